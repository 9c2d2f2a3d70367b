"""Code that Inductor tunes, beside code that it does not, on the stand-in for the GPU and with a clock of the test."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from apollo_compile.device.target import CompiledBody
from apollo_compile.ir import Variant
from apollo_compile.session.drift import DRIFT_STEPS, WATCH_EVERY
from apollo_compile.tools.report import report
from apollo_compile.torch_bridge.aot_graph import clone_graph
from apollo_compile.torch_bridge.interpret import interpret_bodies, interpret_whole
from tests.device.gpu.test_default import (
    COMPILED,
    EVEN,
    PLAN,
    WHOLE,
    BusyGpu,
    Default,
    Loop,
    S,
    branches,
    chain,
    interpret_plainly,
    warnings_in,
)

TUNED, TUNED_WHOLE = Variant.TUNED, Variant.TUNED_INDUCTOR

HOURS = 1500
"""Steps after which tuning is long due: one takes ten seconds."""


class Inductor:
    """Stands in for Inductor: code takes 1 us for every operator, and tuned code what the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_quick: Callable[[str], bool] = lambda name: True
        """Whether tuned code of the body of this name, or of a whole graph (""), takes no time; else twice as much."""
        self.failure: Exception | None = None
        """What tuning raises."""
        self.failure_at_run: Exception | None = None
        """What tuned code raises when it runs."""
        self.tuned: list[str] = []
        """Names of the bodies that were tuned, and empty ones for whole graphs."""
        monkeypatch.setattr("apollo_compile.session.bodies.compile_bodies", self._compile_bodies)
        for place in ("challenger", "tuned"):
            monkeypatch.setattr(f"apollo_compile.session.contest.{place}.compile_again", self._compile_again)

    def _compile_bodies(
        self, pieces: Sequence[tuple[str, fx.GraphModule, Sequence[Any]]], **_: Any
    ) -> tuple[CompiledBody, ...]:
        bodies = interpret_bodies(pieces)
        if not inductor_config.max_autotune:
            return bodies
        return tuple(
            CompiledBody(function=self._tune(name, body.function))
            for (name, _, _), body in zip(pieces, bodies, strict=True)
        )

    def _compile_again(self, graph: fx.GraphModule, settings: Mapping[str, Any], **_: Any) -> Callable[..., Any]:
        run = interpret_whole(clone_graph(graph))
        return self._tune("", run) if settings["max_autotune"] else run

    def _tune(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        if self.failure is not None:
            raise self.failure
        self.tuned.append(name)
        is_quick = self.is_quick(name)

        def tuned(inputs: list[Any]) -> Any:
            if self.failure_at_run is not None:
                raise self.failure_at_run
            if not is_quick:
                run(list(inputs))
                return run(inputs)
            with _disable_current_modes():  # the clock counts operators
                return run(inputs)

        return tuned


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> Inductor:
    """Let a stand-in compile."""
    interpret_plainly(monkeypatch)
    return Inductor(monkeypatch)


@pytest.fixture(autouse=True)
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Take INFO lines of the package, as `APOLLO_LOG=INFO` shows them."""
    caplog.set_level(logging.INFO, logger="apollo_compile")
    return caplog


def compiling(**options: Any) -> Default:
    """Return a backend whose bodies are compiled."""
    return Default(**{"runtime.bodies": "native", **options})


def train_until(loop: Loop, variant: Variant, times: Mapping[Variant, int] = EVEN, most: int = HOURS) -> int:
    """Train until this side runs; return in how many steps."""
    for number in range(most):
        loop.step(times)
        if loop.ran[-1] is variant:
            return number
    raise AssertionError(f"{variant} never ran: {loop.default.state}")


@pytest.mark.parametrize(("whole_s", "until_then"), [(9, WHOLE), (11, COMPILED)])
def test_tuned_code_is_compared_when_it_is_due_and_stays_if_it_is_faster(
    whole_s: int, until_then: Variant, inductor: Inductor
) -> None:
    """The graph counts as settled until then.

    The next process runs it without a comparison, when it is due again; until then the fastest side without it runs.
    """
    default = compiling()
    loop = Loop(default, chain)
    times = {**EVEN, WHOLE: whole_s * S, TUNED_WHOLE: 8 * S}
    loop.settle(times)
    assert set(loop.ran) == {COMPILED, WHOLE} and not inductor.tuned
    taken = train_until(loop, TUNED_WHOLE, times)
    assert inductor.tuned == ["", ""], "forward and backward, once each"
    least = 0.95 * sum(5 * S * num for num in (2, 3)) / 0.05 / (10 * S)  # 2 distinct matmuls forward, 3 backward
    assert taken + len(loop.states) > least
    champion = "one CUDA graph" if until_then is WHOLE else "torch.compile"
    during = f"measuring: {champion} against one CUDA graph, tuned, turn 3 of 10"
    assert during not in loop.states
    loop.settle(times)
    assert during in loop.states
    assert default.state.startswith("settled: one CUDA graph, tuned, 1.25x as fast as torch.compile")
    again = compiling()
    loop = Loop(again, chain)
    loop.settle(times)
    loop.step(times)
    assert loop.ran[-1] is until_then and len(loop.ran) < 16 and TUNED_WHOLE not in loop.ran
    assert again.state.startswith(f"settled: {champion}") and "1.25x" not in again.state
    train_until(loop, TUNED_WHOLE, times)
    for _ in range(2 * DRIFT_STEPS * WATCH_EVERY):
        loop.step(times)
    assert not any(", turn " in state for state in loop.states), "other steps are no drift"
    assert set(loop.ran[-8:]) == {TUNED_WHOLE} and again.state.startswith("settled: one CUDA graph, tuned")
    assert not again.gpu.races and len(list(again.gpu.captures)) == 2


class Unlike(nn.Module):
    """Two branches that have no code in common."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.right = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the similarities of what both make of `x`."""
        return self.left(x) @ self.right(x).T


def unlike() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return such a model and its inputs."""
    return Unlike(), chain()[1]


def test_each_body_keeps_the_code_that_is_faster(inductor: Inductor, lines: pytest.LogCaptureFixture) -> None:
    """Tuned code of some bodies is slower; the plan with the faster of both takes turns with the plan without."""
    inductor.is_quick = lambda name: "left" in name
    default = compiling()
    loop = Loop(default, unlike)
    times = {**EVEN, PLAN: 8 * S, TUNED: 7 * S}
    loop.settle(times)
    assert loop.default.variant is PLAN
    train_until(loop, TUNED, times)
    loop.settle(times)
    assert default.state == "settled: plan, tuned, 1.43x as fast as torch.compile"
    assert TUNED_WHOLE not in loop.ran, "by times of the device it is slower"
    assert any("right" in name for name in inductor.tuned)
    changed = set()
    for graph in default.models[0].graphs:
        runs, plan = graph.variants.loaded()[TUNED], graph.variants.plan
        names = [body.name for body in graph.compilation.partition.bodies]
        changed |= {name for name, a, b in zip(names, runs.bodies, plan.bodies, strict=True) if a is not b}
    assert changed == {name for name in inductor.tuned if "left" in name}
    for _ in range(3):
        loop.step(times)
    assert set(loop.ran[-3:]) == {TUNED} and not warnings_in(lines)
    assert not any(gpu.races for gpu in default.gpu.others.values())
    assert len(list(default.gpu.captures)) == 2
    (first, *_) = report(loop.run).graphs
    assert first.variant == TUNED and first.num_lanes > 1


def test_tuned_code_that_is_not_faster_is_not_compared(inductor: Inductor, lines: pytest.LogCaptureFixture) -> None:
    """Nor tuned by the next process, in which torch.compile's function runs alone."""
    inductor.is_quick = lambda name: False
    default = compiling()
    loop = Loop(default, branches)
    loop.settle()
    before = default.state
    for _ in range(HOURS):
        loop.step()
        if inductor.tuned and default.is_settled:
            break
    assert default.state == before and "0/0: tuned code is not faster" in lines.text
    assert {COMPILED, WHOLE} <= set(loop.ran) <= {COMPILED, WHOLE, PLAN}
    assert not list(default.gpu.captures) and not warnings_in(lines)
    again = compiling()
    Loop(again, branches).step()
    assert again.models[0].challenge.is_over


def test_a_short_run_leaves_tuning_to_a_longer_one(inductor: Inductor) -> None:
    """Where torch.compile won before tuning was due, the next process runs it, and tunes when that is due."""
    Loop(compiling(), chain).settle()
    again = compiling()
    loop = Loop(again, chain)
    loop.step()
    assert again.is_settled and not again.gpu.log
    times = {**EVEN, TUNED_WHOLE: 8 * S}
    train_until(loop, TUNED_WHOLE, times)
    loop.settle(times)
    assert again.state.startswith("settled: one CUDA graph, tuned, 1.25x as fast as torch.compile")


@pytest.mark.parametrize("place", ("compile", "timing"))
def test_tuning_that_fails_leaves_what_runs(place: str, inductor: Inductor, lines: pytest.LogCaptureFixture) -> None:
    """With one WARNING; it is not tried again in this process."""

    class Full(BusyGpu):
        def new_timer(self) -> Any:
            if inductor.tuned:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().new_timer()

    if place == "compile":
        inductor.failure = torch.OutOfMemoryError("CUDA out of memory.")
    default = compiling(gpu=Full())
    loop = Loop(default, branches)
    times = {**EVEN, PLAN: 8 * S}
    loop.settle(times)
    for _ in range(HOURS):
        loop.step(times)
        if warnings_in(lines) and default.is_settled:
            break
    for _ in range(100):
        loop.step(times)
    assert set(loop.ran[-100:]) == {PLAN} and default.state == "settled: plan, 1.25x as fast as torch.compile"
    assert warnings_in(lines) == [
        "0/0: its code is not tuned: OutOfMemoryError: CUDA out of memory.; what runs stays, and 'plan.late_share' 0 "
        "leaves tuning out"
    ]


@pytest.mark.soak
def test_drift_while_tuned_code_is_awaited(inductor: Inductor, lines: pytest.LogCaptureFixture) -> None:
    """The side that runs meanwhile is compared with what else there is; then the remembered one runs."""
    times = {**EVEN, WHOLE: 9 * S, TUNED_WHOLE: 7 * S}
    options = {"plan.late_share": 0.004}
    loop = Loop(compiling(**options), chain)
    train_until(loop, TUNED_WHOLE, times, 4 * HOURS)
    loop.settle(times)
    again = compiling(**options)
    loop = Loop(again, chain)
    loop.settle(times)
    for _ in range(2 * DRIFT_STEPS * WATCH_EVERY):
        loop.step(times)
    slower = {variant: 13 * ns // 10 for variant, ns in times.items()}
    while again.is_settled:
        loop.step(slower)
        assert TUNED_WHOLE not in loop.ran
    loop.settle(slower)
    assert again.variant is WHOLE
    train_until(loop, TUNED_WHOLE, slower, 4 * HOURS)
    loop.settle(slower)
    assert loop.ran[-1] is TUNED_WHOLE and not warnings_in(lines)


def test_a_run_of_tuned_code_that_fails_leaves_the_winner(inductor: Inductor, lines: pytest.LogCaptureFixture) -> None:
    """That step has the right numbers, and from the next one on the proven side is replayed.

    The next process runs that side, and does not tune again.
    """
    default = compiling()
    loop = Loop(default, branches)
    times = {**EVEN, PLAN: 8 * S, TUNED: 7 * S, TUNED_WHOLE: 7 * S}
    loop.settle(times)
    train_until(loop, TUNED_WHOLE, times)
    inductor.failure_at_run = torch.OutOfMemoryError("CUDA out of memory.")
    for _ in range(100):
        loop.step(times)
    assert warnings_in(lines) == [
        "0/0: tuned code is dropped: OutOfMemoryError: CUDA out of memory.; plan runs, and 'plan.late_share' 0 leaves "
        "tuning out"
    ]
    assert set(loop.ran[-99:]) == {PLAN} and default.state == "settled: plan, 1.25x as fast as torch.compile"
    assert default.gpu.log.count(("replay",)) and len(list(default.gpu.captures)) == 2
    loaded = [graph.variants.plan for graph in default.models[0].graphs]
    before = [each.num_replays for each in loaded]
    loop.step(times)
    assert [each.num_replays for each in loaded] == [num + 1 for num in before]
    inductor.failure_at_run = None
    inductor.tuned.clear()
    again = compiling()
    loop = Loop(again, branches)
    loop.settle(times)
    for _ in range(HOURS):
        loop.step(times)
    assert loop.ran[-1] is PLAN and not inductor.tuned
    assert again.state == default.state


def test_an_interrupt_in_a_late_compile_leaves_torch_compile(
    inductor: Inductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who goes on training after it, as in a notebook, does so with torch.compile's code."""
    Loop(compiling(), chain).settle()
    default = compiling()
    loop = Loop(default, chain)
    compiled: list[int] = []

    def interrupt(*_: Any, **__: Any) -> Any:
        compiled.append(1)
        if len(compiled) == 2:
            raise KeyboardInterrupt
        return lambda inputs: inputs

    monkeypatch.setattr("apollo_compile.session.contest.challenger.compile_again", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train_until(loop, TUNED_WHOLE)
    loop.model.load_state_dict(loop.eager.state_dict())  # which is a step ahead
    for _ in range(3):
        loop.step()
    assert default.models[0].challenge.is_over


def test_idle_time_is_no_training(inductor: Inductor) -> None:
    """After a night without a call, the first call does not wait for a compile."""
    default = compiling(**{"plan.late_share": 0.01})
    loop = Loop(default, chain)
    loop.settle()
    default.clock.now += 8 * 3600 * S
    loop.step()
    assert not inductor.tuned


def pointwise() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model in which there is nothing to tune, and its inputs."""
    return nn.Sequential(nn.GELU(), nn.LayerNorm(8)), chain()[1]


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (pointwise, {}),
        (chain, {"inductor.max_autotune": False}),
        (chain, {"plan.late_share": 0.0}),
        (chain, {"mode": "max-autotune-no-cudagraphs"}),
    ],
    ids=("nothing", "refused", "never", "tuned"),
)
def test_what_cannot_be_tuned_is_not(build: Callable[[], Any], options: dict[str, Any], inductor: Inductor) -> None:
    """Because there is nothing to tune, or since the settings of the user decide on it."""
    default = compiling(**options)
    loop = Loop(default, build)
    loop.settle()
    for _ in range(200):
        loop.step()
    inductor.tuned.clear()  # with max-autotune, everything is
    for _ in range(200):
        loop.step()
    assert not inductor.tuned and not {TUNED, TUNED_WHOLE} & set(loop.ran)


@pytest.mark.soak
def test_inductor_itself_tunes_graphs_and_bodies(
    monkeypatch: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture
) -> None:
    """On a CPU, where its kernels for these shapes are the same ones; the numbers stay those of eager."""
    interpret_plainly(monkeypatch)
    default = compiling(**{"inductor.max_autotune_gemm_backends": "ATEN"})
    loop = Loop(default, branches)
    times = {**EVEN, PLAN: 8 * S}
    loop.settle(times)
    for _ in range(HOURS):
        loop.step(times)
        if "0/0: compiled again, tuned, for which one step waited " in lines.text and default.is_settled:
            break
    assert "0/0: tuned code is not faster" in lines.text or TUNED in loop.ran or TUNED_WHOLE in loop.ran
    assert not warnings_in(lines)
