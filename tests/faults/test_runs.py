"""Faults while a model is compiled and trained: the error is the user's, the next step works, nothing is lost."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import apollo_compile
from apollo_compile.device.cpu import cgroup, discover
from apollo_compile.device.cpu.machine import machine_fingerprint
from apollo_compile.planner import apart
from apollo_compile.session import bodies, registry
from apollo_compile.session import compile as session_compile
from apollo_compile.session import model as session_model
from apollo_compile.store.files import LOCK
from apollo_compile.store.profiles import cached_profile_path, default_profile, save_profile
from tests.builders import in_threads
from tests.end_to_end.models import STRICT, Training, assert_same_training, assert_trains_as_in_eager, train
from tests.end_to_end.step_cases.models import Wrapped
from tests.native.runner import count_threads

_armed: dict[str, type[BaseException] | signal.Signals] = {}
"""What to raise, or which signal to send to the process, by place."""

_threads: set[int] = set()
"""Where the operator has run."""


def _fail_if_armed(place: str) -> None:
    _threads.add(threading.get_ident())
    match _armed.pop(place, None):
        case signal.Signals() as number:
            os.kill(os.getpid(), number)
        case type() as error:
            raise error(f"injected in {place}")


@torch.library.custom_op("apollo_faults::trip", mutates_args=())
def trip(x: torch.Tensor, place: str) -> torch.Tensor:
    """Raise what the place is armed with, in the forward and in the backward."""
    _fail_if_armed(place)
    return x.clone()


@trip.register_fake
def _(x: torch.Tensor, place: str) -> torch.Tensor:
    return torch.empty_like(x)


def _remember_place(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    ctx.place = inputs[1]


def _trip_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return trip(gradient, f"{ctx.place} backward"), None


trip.register_autograd(_trip_backward, setup_context=_remember_place)


def _join_branches(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Run two branches that are worth a lane each, and a head; each can fail."""
    left = right = x
    for one, other in zip(own.left, own.right, strict=True):
        left, right = one(left).relu(), other(right).relu()
    return own.head(trip((trip(left, "left") @ trip(right, "right").T).softmax(-1) @ x, "head"))


PLACES = tuple(f"{branch}{role}" for role in ("", " backward") for branch in ("left", "right", "head"))
ERRORS = (LookupError, MemoryError, torch.OutOfMemoryError, RuntimeError, KeyboardInterrupt, SystemExit)


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch._dynamo.reset()
    _armed.clear()
    yield
    _armed.clear()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt; a job in the background ignores it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def _model_and_input() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    left, right = (nn.ModuleList(nn.Linear(256, 256) for _ in range(2)) for _ in range(2))
    return Wrapped(_join_branches, left=left, right=right, head=nn.Linear(256, 4)), torch.randn(256, 256)


def _check_training(options: dict[str, Any]) -> None:
    """Expect three steps to be those of eager."""
    model, x = _model_and_input()
    assert_trains_as_in_eager(model, lambda run: run(x).square().mean(), steps=3, **_apollo(options))


def _step_of_lanes() -> Callable[[], list[torch.Tensor]]:
    """Return what computes gradients of a model on lanes."""
    model, x = _model_and_input()
    run = torch.compile(model, backend="apollo", options={**STRICT, "plan.replan": False})
    return lambda: list(torch.autograd.grad(run(x).square().mean(), list(model.parameters())))


def test_an_error_in_a_body_on_any_lane_is_the_users_and_the_next_step_works() -> None:
    """Forward and backward: type and message survive; affinity, threads, the OpenMP team and the gradients too."""
    step = _step_of_lanes()
    assert torch.ones(2**20).sum() == 2**20  # this thread has its OpenMP team from here on
    expected = step()
    if len(os.sched_getaffinity(0)) > 1:
        _threads.clear()
        step()
        assert len(_threads) > 1, "faults must reach the caller's thread and a lane's"
    affinity, num_threads = os.sched_getaffinity(0), len(os.listdir("/proc/self/task"))
    for place in PLACES:
        for error in ERRORS:
            _armed[place] = error
            with pytest.raises(error, match=f"injected in {place}") as caught:
                step()
            assert type(caught.value) is error
            assert os.sched_getaffinity(0) == affinity
            assert torch.ones(2**20).sum() == 2**20  # a parallel region: the team has been released
            torch.testing.assert_close(step(), expected)
    assert count_threads(num_threads) <= num_threads


def test_ctrl_c_while_any_lane_works_ends_the_step_and_the_next_one_works(interruptible: None) -> None:
    """The signal itself, which the main thread gets while it computes or waits, forward and backward."""
    step = _step_of_lanes()
    expected, affinity = step(), os.sched_getaffinity(0)
    for place in PLACES:
        _armed[place] = signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            step()
        assert not _armed
        assert os.sched_getaffinity(0) == affinity
        torch.testing.assert_close(step(), expected)


@pytest.mark.parametrize(
    ("room", "place"),
    [(session_compile, "plan_graph"), (bodies, "compile_bodies"), (session_model, "CompiledGraph")],
    ids=["plan", "bodies", "graph"],
)
def test_ctrl_c_while_a_graph_is_compiled_ends_the_call_and_the_next_one_compiles(
    monkeypatch: pytest.MonkeyPatch, interruptible: None, room: ModuleType, place: str
) -> None:
    """Before it is planned, when its bodies are compiled, and when all is there; forward and backward."""
    model, x = _model_and_input()
    run = torch.compile(model, backend="apollo", options={**STRICT, "plan.replan": False})
    original = getattr(room, place)

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        if place == "compile_bodies":
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **kwargs)

    def end(call: Callable[[], Any]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(room, place, interrupt)
            with pytest.raises(KeyboardInterrupt):
                call()

    end(lambda: run(x))
    end(run(x).square().mean().backward)
    results = [torch.autograd.grad(call(x).square().mean(), list(model.parameters())) for call in (model, run)]
    for gradient, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


def test_an_allocator_that_fails_in_compiled_code_is_the_users_error() -> None:
    """More bytes than addresses, asked for by a native body.

    The first time, oneDNN leaves no reason in the library, so that the error names the function that failed.
    """
    run = torch.compile(lambda x, column: (x @ x, (column @ column.T)[0, 0]), backend="apollo", options=STRICT)
    x, column = torch.ones(8, 8), torch.ones(2**23, 1)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"allocate|memory|API call failed"):
            run(x, column)
        with pytest.raises(RuntimeError, match=r"allocate|memory"):
            run(x, column)
    assert torch.ones(2**20).sum() == 2**20


@pytest.mark.soak
def test_training_that_skips_failed_steps_ends_as_eager_does_autotuning_included() -> None:
    """Every third step fails somewhere; the comparison goes on, and its verdict comes."""
    model, x = _model_and_input()

    def loss_of(run: Callable[..., torch.Tensor]) -> torch.Tensor:
        loss_of.step += 1  # type: ignore[attr-defined]
        if loss_of.step % 3 == 0:  # type: ignore[attr-defined]
            _armed[PLACES[loss_of.step % 2]] = LookupError  # type: ignore[attr-defined]
            with pytest.raises(LookupError):
                run(x)
        return run(x).square().mean()

    results = []
    for options in ({}, {"backend": "apollo", "options": {"debug.strict": True}}):
        loss_of.step = 0  # type: ignore[attr-defined]
        results.append(train(model, loss_of, steps=40, **options))  # type: ignore[arg-type]
    assert_same_training(*results)


_REPLY = "import json, os, socket, sys, time; channel = socket.socket(fileno=json.loads(sys.argv[1])[0]); "


@pytest.mark.parametrize(
    "command",
    [
        (sys.executable, "-c", "import os; os.abort()"),
        ("/nothing/here",),
        (sys.executable, "-c", "import time; time.sleep(600)"),
        (sys.executable, "-c", f"{_REPLY}channel.sendall((4).to_bytes(8, 'little') + b'nuts'); time.sleep(600)"),
    ],
    ids=["crashes", "is missing", "hangs", "talks rubbish"],
)
def test_a_model_trains_without_the_planners_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, command: tuple[str, ...]
) -> None:
    """Its plans are made by list schedules, and lines say why."""
    apart.stop_planner()
    monkeypatch.setattr(apart, "COMMAND", command)
    monkeypatch.setattr(apart, "START_LIMIT_S", 1.0 if "sleep(600)" in command[-1] else apart.START_LIMIT_S)
    monkeypatch.setattr(apart, "_num_failures", 0)
    _check_training({**STRICT, "runtime.bodies": "eager"})
    assert "the planner's process failed" in caplog.text
    assert [graph.compilation.plan.solver for graph in registry.compiled_models()[-1].graphs] == [None, None]


def test_a_quota_of_the_control_group_means_fewer_units_and_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Lanes beyond it would be stopped in the midst of a step."""
    if torch.get_num_threads() < 2:
        pytest.skip("one core is as few as a quota can leave")
    (tmp_path / "cpu.max").write_text("150000 100000")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "nothing")
    model, x = _model_and_input()
    with torch.no_grad():
        options = {**STRICT, "runtime.bodies": "eager", "device.cache": tmp_path}
        run = torch.compile(model, backend="apollo", options=options)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
        run(x[:8])
    (line,) = [record.getMessage() for record in caplog.records if "control group" in record.getMessage()]
    assert "grants 1.5 cores" in line and "lanes use 1" in line
    assert {graph.device.units for graph in apollo_compile.report(model).graphs} == {1}


def test_a_full_disk_costs_dumps_and_the_kept_profile_nothing_else(
    monkeypatch: pytest.MonkeyPatch, info_log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Nothing is left behind half written; each line says what once."""
    monkeypatch.delenv("APOLLO_PROFILE")
    monkeypatch.setattr(discover, "_scale_default", lambda units: (default_profile(units), False))
    write_text = Path.write_text

    def fill(path: Path, *args: object, **kwargs: object) -> int:
        if not path.is_relative_to(tmp_path) or path.name.startswith("00"):
            return write_text(path, *args, **kwargs)  # type: ignore[arg-type]
        write_text(path, "half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", fill)
    model, x = _model_and_input()
    options = {**STRICT, "debug.dump": tmp_path / "dump", "device.cache": tmp_path / "cache"}
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="apollo", options=options)(x), model(x))
    for line in ("nothing more is dumped", "the plan is not dumped", "the measured device profile is not kept"):
        assert sum(record.getMessage().startswith(line) for record in info_log.records) == 1, line
    assert {path.name for path in (tmp_path / "cache").rglob("*")} <= {LOCK}
    assert {path.name for path in (tmp_path / "dump").rglob("plan.json*")} == set()
    assert registry.find_models(model)[0].graphs


def test_a_read_only_disk_costs_what_would_be_kept_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Not even folders can be made; the model trains, and one line says what is not dumped."""
    mkdir = Path.mkdir

    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.is_relative_to(tmp_path):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    _check_training({**STRICT, "debug.dump": tmp_path / "dump", "device.cache": tmp_path / "cache"})
    assert [each for each in caplog.records if "dump" in each.getMessage() and each.levelno >= logging.WARNING]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_all_files_that_are_kept_are_damaged_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Plans, device profile, and what an earlier process found out: the model trains, and a line names the file."""
    monkeypatch.delenv("APOLLO_PROFILE")
    monkeypatch.setattr(discover, "_scale_default", lambda units: (default_profile(units), False))
    model, x = _model_and_input()
    units = torch.get_num_threads()
    profile = cached_profile_path(tmp_path / "cache", units)
    profile.parent.mkdir()
    save_profile(default_profile(units), profile, fingerprint=machine_fingerprint(units))
    options = {"device.cache": tmp_path / "cache"}
    run = torch.compile(model, backend="apollo", options={**options, "debug.dump": tmp_path / "dump"})
    for _ in range(2000):
        run(x).square().mean().backward()
        if registry.is_settled(model):
            break
    model.zero_grad()
    kept = [profile, *(tmp_path / "cache" / "history").iterdir(), *(tmp_path / "dump").rglob("plan.json")]
    assert len(kept) == 5, "a profile; for each of two graphs a finding and a plan"
    for file in kept:
        os.truncate(file, file.stat().st_size // 2)
    (tmp_path / "cache").rename(tmp_path / "damaged")  # of one place, a process reads the profile once
    options, profile = {"device.cache": tmp_path / "damaged"}, tmp_path / "damaged" / profile.name
    expected = train(model, lambda run: run(x).square().mean(), steps=3)
    plan = kept[-1]
    for more, file in (({}, profile), ({"plan.file": plan}, plan)):
        caplog.clear()
        found = train(model, lambda run: run(x).square().mean(), steps=3, **_apollo({**options, **more}))
        assert_same_training(expected, found)
        assert len(registry.compiled_models()[-1].graphs) == 2
        (line, *_) = [record.getMessage() for record in caplog.records if str(file) in record.getMessage()]
        assert "char " in line, "where its JSON ends"


def _apollo(options: dict[str, Any]) -> dict[str, Any]:
    return {"backend": "apollo", "options": options}


@pytest.mark.parametrize(
    "is_compiled",
    [pytest.param(True, marks=pytest.mark.soak), False],
    ids=["compiled before", "compiled by one of them"],
)
def test_threads_may_train_one_compiled_model_at_once(is_compiled: bool) -> None:
    """Every thread has its own input, and gets its own gradients."""
    model, _ = _model_and_input()
    run = torch.compile(model, backend="apollo", options={"debug.strict": True})
    inputs = [torch.randn(256, 256) * 2.0**number for number in range(3)]

    def step(call: Callable[..., torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(call(x).square().mean(), list(model.parameters())))

    expected = [step(model, x) for x in inputs]
    if is_compiled:
        step(run, inputs[0])
    failures: list[object] = []
    start = threading.Barrier(len(inputs))

    def work(number: int) -> None:
        try:
            start.wait(60)
            for _ in range(20):
                for gradient, wanted in zip(step(run, inputs[number]), expected[number], strict=True):
                    torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))
        except BaseException as error:
            failures.append(error)

    in_threads(work, len(inputs))
    assert not failures


def _train_on(sizes: Sequence[int], **compile_options: Any) -> tuple[Training, int]:
    """Train with another batch size in each step; return what came out, and how many graphs Dynamo compiled."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(64, 8)
    remaining = iter(sizes)
    torch._dynamo.utils.counters.clear()
    training = train(model, lambda run: run(x[: next(remaining)]).square().mean(), steps=len(sizes), **compile_options)
    return training, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_shapes_that_change_every_step_are_compiled_twice(caplog: pytest.LogCaptureFixture) -> None:
    """Once for the first shape, once for all others; losses and gradients are those of eager at every shape."""
    sizes = (64, 8, 31, 16, 8, 63, 2, 17)
    eager, _ = _train_on(sizes)
    apollo, num_graphs = _train_on(sizes, **_apollo({**STRICT, "runtime.bodies": "eager"}))
    assert_same_training(eager, apollo)
    assert num_graphs == 2
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_alternating_shapes_have_a_plan_each() -> None:
    """Every shape is compiled once, however often it comes back."""
    sizes = (64, 16) * 4
    eager, _ = _train_on(sizes)
    apollo, num_graphs = _train_on(sizes, dynamic=False, **_apollo({**STRICT, "runtime.bodies": "eager"}))
    assert_same_training(eager, apollo)
    assert num_graphs == 2
    graphs = [graph for model in registry.compiled_models()[-2:] for graph in model.graphs]
    assert len(graphs) == 4
    assert len({graph.compilation.costs for graph in graphs}) == 4
