"""The road of a graph on a GPU: compile, capture, compare; on the stand-in for it, with a clock that the test sets."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from apollo_compile.config import Config
from apollo_compile.device.gpu.target import GpuTarget
from apollo_compile.distributed.ranks import Ranks
from apollo_compile.ir import Variant
from apollo_compile.reports.values import Stage
from apollo_compile.session import backend
from apollo_compile.session.model import CompiledModel
from apollo_compile.session.registry import is_settled, variants_of
from apollo_compile.store.profiles import load_profile
from apollo_compile.tools.report import report
from tests.device.gpu.fake_gpu import FakeGpu
from tests.end_to_end.step_cases.models import Wrapped
from tests.torch_settings import changed

pytestmark = pytest.mark.usefixtures("interpreted")

INDUCTOR, SERIAL, PLAN = Variant.INDUCTOR, Variant.SERIAL, Variant.PLAN

S = 1_000_000_000

LEVEL = dict.fromkeys(Variant, 10 * S)
"""All variants take as long. The steps are long, so that compiles are soon a small share of the training time."""

PLAN_WINS = {**LEVEL, PLAN: 8 * S}

ENOUGH = 1000
"""Steps in which everything is decided."""


class _Count(TorchDispatchMode):
    """Counts operators."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


class BusyGpu(FakeGpu):
    """A body takes 1 us for each of its operators, on a lane of any size."""

    def call(self, body: Callable[..., Any], inputs: list[torch.Tensor], stream: str) -> Sequence[torch.Tensor]:
        count = _Count()

        def counted(arguments: list[torch.Tensor]) -> Any:
            with count:
                return body(arguments)

        outputs = super().call(counted, inputs, stream)
        self._now_ns += 1_000 * count.num
        return outputs


class Default:
    """The backend, with tensors on the CPU, lanes on the stand-in, `now_ns` as its time, and a fault that it finds."""

    def __init__(
        self, gpu: FakeGpu | None = None, *, found: str | None = None, ranks: Ranks | None = None, **options: Any
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.gpu = gpu or BusyGpu()
        self.device = torch.device("cpu")
        self.now_ns = 0
        self.models: list[CompiledModel] = []
        self._found = found
        self._ranks = ranks or Ranks(None)
        quick = {"plan.planner": "greedy", "partition.granularity": "module", "runtime.bodies": "python"}
        self._options = {**quick, **options}

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        clock = lambda: self.now_ns  # noqa: E731
        profile, find = load_profile(Path("h200")), lambda: self._found

        def open_target(_: Sequence[Any], config: Config) -> tuple[GpuTarget, None]:
            target = GpuTarget(self.gpu, profile, config, device=self.device, find_unavailable_reason=find)
            target.now_ns = clock  # type: ignore[method-assign]
            return target, None

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "open_target", open_target)
            patch.setattr(backend, "find_ranks", lambda: self._ranks)
            patch.setattr(backend, "CompiledModel", partial(CompiledModel, clock=clock))
            compiled, model = backend.compile_dynamo_graph(graph_module, example_inputs, options=self._options)
        assert model is not None
        self.models.append(model)
        return compiled

    @property
    def state(self) -> str:
        """The first line of a report of the first graph."""
        return str(self.models[0].state())

    @property
    def variant(self) -> Variant:
        """The variant of the latest step; `INDUCTOR` for torch.compile's function."""
        return INDUCTOR if self.models[0].falls_back else self.models[0].graphs[0].variant

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being decided."""
        return self.models[0].state().stage is not Stage.MEASURING


def chain() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model without branches and its inputs."""
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return layers, (torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),)


def branches() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model of two layers that are independent of each other, with buffers that are written to; its inputs."""
    left, right = (nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
    model = Wrapped(
        lambda own, x: own.left(x) @ own.right(own.norm(x)).T, left=left, right=right, norm=nn.BatchNorm1d(8)
    )
    return model, chain()[1]


class Loop:
    """A training loop of a compiled model beside that of the same model in eager, in which losses must be equal."""

    def __init__(
        self, default: Default | None = None, build: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]] = branches
    ) -> None:
        self.default = default = default or Default()
        torch.manual_seed(0)
        model, inputs = build()
        self.eager, self._inputs = model.double(), [each.double() for each in inputs]  # so that only mistakes show
        self.model = copy.deepcopy(self.eager)
        self.run = torch.compile(self.model, backend=default, dynamic=False)
        self._optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (self.eager, self.model)]
        self.ran: list[Variant] = []
        self.states: list[str] = []

    def step(self, times: Mapping[Variant, int] = LEVEL) -> None:
        losses = []
        for call, optimizer in zip((self.eager, self.run), self._optimizers, strict=True):
            loss = call(*self._inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-7, atol=1e-9)
        self.ran.append(self.default.variant)
        self.states.append(self.default.state)
        self.default.now_ns += times[self.ran[-1]]

    def steps(self, count: int, times: Mapping[Variant, int] = LEVEL) -> None:
        for _ in range(count):
            self.step(times)

    def settle(self, times: Mapping[Variant, int] = LEVEL) -> None:
        for _ in range(ENOUGH):
            self.step(times)
            if self.default.is_settled:
                return
        raise AssertionError(f"not settled: {self.default.state}")


def warnings_in(log: pytest.LogCaptureFixture) -> list[str]:
    """Return what users see who set no level."""
    own = [record for record in log.records if record.name.startswith("apollo_compile")]
    return [record.getMessage() for record in own if record.levelno >= logging.WARNING]


def test_a_chain_that_gains_nothing_is_torch_compile(info_log: pytest.LogCaptureFixture) -> None:
    """Its very function, and nothing of ours is compiled; one INFO line says so."""
    loop = Loop(build=chain)
    loop.settle()
    assert loop.default.models[0].falls_back and not loop.default.gpu.log and not warnings_in(info_log)
    assert "nothing to gain" in loop.default.state and is_settled(loop.run)


def test_a_graph_with_branches_is_replayed_after_a_few_steps(info_log: pytest.LogCaptureFixture) -> None:
    """Its plan is launched twice, in the second step bodies are timed; each distinct body is compiled once."""
    loop = Loop()
    loop.steps(5)
    assert loop.ran == 5 * [PLAN] and not warnings_in(info_log)
    assert len(list(loop.default.gpu.captures)) == 2, "its forward and its backward"
    assert [graph.executable.num_launches for graph in loop.default.models[0].graphs] <= [2, 3]
    assert all(graph.learner.num_replans == 1 for graph in loop.default.models[0].graphs)
    assert info_log.text.count(" segments (") == 2 and not loop.default.gpu.races


TIMES = r"segments in turn 10\.00 s, plan 8\.00 s"


def test_the_plan_competes_with_its_segments_in_turn_and_stays_if_it_is_faster(
    info_log: pytest.LogCaptureFixture,
) -> None:
    """Turns of twelve steps, the first after a warm-up; the losers keep no memory."""
    loop = Loop()
    loop.settle(PLAN_WINS)
    assert loop.ran[3:17] == 14 * [PLAN] and SERIAL in loop.ran
    assert any(re.fullmatch(rf"measuring, about \d+ steps \(\d+ min\) left: {TIMES}", state) for state in loop.states)
    told = r"settled after \d+ measured steps: 1\.25x as fast as segments in turn \(plan on \d lanes\)"
    assert re.fullmatch(f"{told}; torch.compile is not compared yet", loop.default.state) and is_settled(loop.run)
    loop.steps(3, PLAN_WINS)
    assert set(loop.ran[-3:]) == {PLAN} and len(list(loop.default.gpu.captures)) == 2
    assert not loop.default.gpu.races
    assert report(loop.run).metrics()["apollo/gain_over_serial"] == 1.25
    assert variants_of(loop.run) == [PLAN]


def test_inductors_whole_graph_is_compiled_once_that_is_a_small_share_of_training() -> None:
    """Not before; as one CUDA graph it is compared with the winner, and stays if it is faster."""
    loop = Loop()
    loop.settle(PLAN_WINS)
    assert INDUCTOR not in loop.ran and loop.default.models[0].tuner.tuner.is_more_to_come
    fastest = {**PLAN_WINS, INDUCTOR: 6 * S}
    while INDUCTOR not in loop.ran:
        loop.step(fastest)
    loop.settle(fastest)
    assert re.fullmatch(r"settled after \d+ measured steps: 1\.33x as fast as plan \(Inductor\)", loop.default.state)
    before = loop.default.gpu.num_replays
    loop.steps(3, fastest)
    assert loop.ran[-3:] == 3 * [INDUCTOR] and loop.default.gpu.num_replays >= before + 5


def test_the_next_process_begins_with_the_winner() -> None:
    """It compares nothing and times nothing, unless the user does not want it."""
    Loop().settle(PLAN_WINS)
    loop = Loop(again := Default())
    loop.steps(4, PLAN_WINS)
    assert set(loop.ran) == {PLAN} and again.is_settled and again.models[0].verdicts[0][1].is_remembered
    assert all(graph.num_replans == 0 for graph in again.models[0].graphs)
    forgetful = Loop(Default(**{"plan.remember": False}))
    forgetful.steps(4, PLAN_WINS)
    assert not forgetful.default.is_settled


@torch.library.custom_op("apollo_tests::uncapturable", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _uncapturable(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@_uncapturable.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("ranks", "several ranks run it"),
        ("sizes", "its sizes change, and a CUDA graph is for one size"),
        ("devices", "it has tensors on cpu, and others on cuda:0"),
        ("capture", "it is compiled inside of a CUDA graph that the user captures"),
        ("fixed", "deterministic algorithms are enabled"),
        ("check", "lane 2 ran on SMs of lane 1"),
        ("operator", "it has apollo_tests.uncapturable.default, which no CUDA graph may hold"),
    ],
)
def test_what_is_not_eligible_is_torch_compile_with_one_line(
    problem: str, reason: str, info_log: pytest.LogCaptureFixture
) -> None:
    """Its very function; a WARNING says what is wrong with the device, and nothing else is one."""
    ranks = Ranks(dist.HashStore()) if problem == "ranks" else None
    default = Default(ranks=ranks, found="lane 2 ran on SMs of lane 1" if problem == "check" else None)
    default.gpu.is_captured_by_user = problem == "capture"
    default.device = torch.device("cuda", 0) if problem == "devices" else default.device

    def function(x: torch.Tensor, count: int) -> torch.Tensor:
        return _uncapturable(x * count) if problem == "operator" else x * count

    with changed(torch.use_deterministic_algorithms, problem == "fixed", False):
        run = torch.compile(function, backend=default, dynamic=problem == "sizes")
        torch.testing.assert_close(run(torch.ones(3), 5), torch.full((3,), 5.0))
    (model,) = default.models
    assert model.falls_back and not default.gpu.log
    *warnings, line = [record for record in info_log.records if record.name.startswith("apollo_compile")]
    assert len(warnings) == (problem == "check") and all(reason in each.getMessage() for each in warnings)
    assert line.levelno == logging.INFO
    assert f"0/0 falls back to torch.compile: {reason}" in line.getMessage()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("operation not permitted when stream is capturing"),
    ],
    ids=["memory", "operation"],
)
def test_a_capture_that_fails_leads_to_torch_compile(error: Exception, info_log: pytest.LogCaptureFixture) -> None:
    """From the next step on, to the same losses, statistics of normalizations included, with one WARNING."""
    loop = Loop(default := Default(**{"debug.strict": False}))
    loop.step()
    for gpu in default.gpu.others.values():
        gpu.fail_capture = error
    loop.steps(5)
    assert loop.ran[-3:] == 3 * [INDUCTOR] and default.models[0].falls_back
    name, reason = default.models[0].fallbacks[0]
    assert name == "0/0" and str(error) in reason
    assert warnings_in(info_log) == [f"0/0 falls back to torch.compile: {reason}"]
    for name, value in loop.eager.state_dict().items():
        torch.testing.assert_close(loop.model.state_dict()[name], value, rtol=1e-7, atol=1e-9)
    assert not list(default.gpu.captures)


def test_a_backward_after_the_way_back_is_that_of_its_forward() -> None:
    """The graph of an earlier forward outlives the model's own graphs."""
    loop = Loop(default := Default(**{"debug.strict": False}))
    loop.steps(4)
    losses = [loop.eager(*loop._inputs).square().mean(), loop.run(*loop._inputs).square().mean()]
    default.models[0].graphs[0].learner.failure = "RuntimeError: a fault"
    loop.run(*loop._inputs)
    assert default.models[0].falls_back and default.models[0].graphs == []
    for loss in losses:
        loss.backward()
    for one, other in zip(loop.eager.parameters(), loop.model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-7, atol=1e-9)


def test_bodies_that_cannot_be_timed_lead_to_torch_compile(info_log: pytest.LogCaptureFixture) -> None:
    """A plan by formulas alone is not worth running."""

    class Full(BusyGpu):
        def new_timer(self) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    loop = Loop(default := Default(Full()))
    loop.steps(4)
    assert default.models[0].falls_back and loop.ran[-1] == INDUCTOR
    assert warnings_in(info_log) == ["0/0 falls back to torch.compile: OutOfMemoryError: CUDA out of memory."]


def test_a_capture_of_the_user_has_launches_and_changes_nothing() -> None:
    """What is recorded stays, and must not depend on memory of ours."""
    loop = Loop()
    loop.settle(PLAN_WINS)
    device = loop.default.gpu
    for gpu in device.others.values():
        gpu.is_captured_by_user = True
    replays = device.num_replays
    loop.step(PLAN_WINS)
    assert device.num_replays == replays
    for gpu in device.others.values():
        gpu.is_captured_by_user = False
    loop.steps(4, PLAN_WINS)
    assert device.num_replays >= replays + 2
