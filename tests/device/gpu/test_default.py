"""What runs a graph on a GPU by default, on the stand-in for the GPU, with a clock that the test sets."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from apollo_compile.config import load_config
from apollo_compile.device.gpu.target import GpuTarget
from apollo_compile.distributed.ranks import Ranks
from apollo_compile.ir import Variant
from apollo_compile.reports.values import Stage
from apollo_compile.session.compile import GraphCompiler
from apollo_compile.session.drift import DRIFT_STEPS, WATCH_EVERY
from apollo_compile.session.model import CompiledModel
from apollo_compile.session.registry import is_settled, register, variants_of
from apollo_compile.store.profiles import load_profile
from apollo_compile.tools.report import report, status
from apollo_compile.torch_bridge.dynamo_graph import traced_tensors
from apollo_compile.torch_bridge.frontend import compile_with_inductor, keep_with
from apollo_compile.torch_bridge.interpret import interpret_whole
from apollo_compile.torch_bridge.settings import inductor_settings
from apollo_compile.torch_bridge.storages import storages_of
from tests.device.gpu.fake_gpu import FakeGpu

COMPILED, WHOLE, PLAN = Variant.COMPILED, Variant.INDUCTOR, Variant.PLAN

S = 1_000_000_000

EVEN = dict.fromkeys(Variant, 10 * S)
"""All sides take as long. The steps are long, so that compiles are soon a small share of the loop's time."""

ENOUGH = 1000
"""Steps in which everything is decided."""


class Clock:
    """The time of the host, as the test sets it."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class _Count(TorchDispatchMode):
    """Counts operators."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


class BusyGpu(FakeGpu):
    """A body takes 1 us for each of its operators, on a lane of any size."""

    def call(self, body: Callable[..., Any], inputs: list[torch.Tensor], stream: str) -> Sequence[torch.Tensor]:
        """Run the body and let that time pass."""
        count = _Count()

        def counted(arguments: list[torch.Tensor]) -> Any:
            with count:
                return body(arguments)

        outputs = super().call(counted, inputs, stream)
        self._now_ns += 1_000 * count.num
        return outputs


class ClockedTarget(GpuTarget):
    """A target on a clock of the test's, that may find a fault in its device."""

    def __init__(self, clock: Clock, found: str | None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clock, self._found = clock, found

    def now_ns(self) -> int:
        """Return the time of the test."""
        return self._clock.now

    def complaint(self) -> str | None:
        """Return what the test says."""
        return self._found


class Default:
    """A backend as `apollo` is with default options, with tensors on the CPU and lanes on the stand-in."""

    def __init__(
        self,
        gpu: FakeGpu | None = None,
        *,
        found: str | None = None,
        ranks: Ranks | None = None,
        is_for_step: bool = False,
        **options: Any,
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.gpu = gpu or BusyGpu()
        self.clock = Clock()
        self.models: list[CompiledModel] = []
        self._found = found
        self._ranks = ranks or Ranks(None)
        self._is_for_step = is_for_step
        quick = {"plan.planner": "greedy", "partition.granularity": "module", "runtime.bodies": "eager"}
        self._config = load_config({**quick, **options})

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        settings = inductor_settings(self._config.mode, self._config.inductor)
        profile, device = load_profile(Path("h200")), torch.device("cpu")
        model = CompiledModel(
            name=f"{len(self.models)}/0",
            config=self._config,
            target=ClockedTarget(self.clock, self._found, self.gpu, profile, self._config, device=device),
            storages=storages_of(traced_tensors(graph_module, example_inputs)),
            ranks=self._ranks,
            clock=self.clock,
            is_for_step=self._is_for_step,
        )
        self.models.append(model)
        compiled = GraphCompiler(model, settings).compile(graph_module, example_inputs)
        keep_with(compiled, model)
        register(model)
        return compiled

    @property
    def state(self) -> str:
        """The first line of a report of the first graph."""
        state = self.models[0].state()
        return f"{state.stage}: {state.detail}"

    @property
    def variant(self) -> Variant:
        """The side of the latest step of the first graph."""
        (variant,) = self.models[0].running_variants()
        return variant

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being decided."""
        return self.models[0].state().stage is not Stage.MEASURING


class Chain(nn.Module):
    """Layers one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` after all layers."""
        return self.layers(x)


def chain() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model without branches and its inputs."""
    return Chain(), (torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),)


def normalized() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model that writes to its buffers, and its inputs."""
    model, inputs = chain()
    return nn.Sequential(model, nn.BatchNorm1d(8)), inputs


class Branches(nn.Module):
    """Two layers that are independent of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the similarities of what both make of `x`."""
        return self.left(x) @ self.right(x).T


def branches() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model with branches and its inputs."""
    return Branches(), chain()[1]


class Loop:
    """A training loop of a compiled model beside that of the same model in eager, in which losses must be equal."""

    def __init__(self, default: Default, build: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]) -> None:
        self.default = default
        torch.manual_seed(0)
        model, inputs = build()
        self.eager, self._inputs = model.double(), [each.double() for each in inputs]  # so that only mistakes show
        self.model = copy.deepcopy(self.eager)
        self.run = torch.compile(self.model, backend=default, dynamic=False)
        self._optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (self.eager, self.model)]
        self.ran: list[Variant] = []
        self.states: list[str] = []

    def step(self, times: Mapping[Variant, int] = EVEN) -> None:
        """Train one step, which takes the time of the side that ran."""
        losses = []
        for call, optimizer in zip((self.eager, self.run), self._optimizers, strict=True):
            loss = call(*self._inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-7, atol=1e-9)
        self.ran.append(self.default.variant if self.default.models[0].challenge else COMPILED)
        self.states.append(self.default.state)
        self.default.clock.now += times[self.ran[-1]]

    def settle(self, times: Mapping[Variant, int] = EVEN) -> None:
        """Train until nothing is being decided."""
        for _ in range(ENOUGH):
            self.step(times)
            if self.default.is_settled:
                return
        raise AssertionError(f"not settled: {self.default.state}")


def interpret_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.compile interpret what AOTAutograd made: its compiler takes most of the time, and changes nothing."""

    def compile_plainly(graph_module: fx.GraphModule, example_inputs: Sequence[Any], settings: Any, **_: Any) -> Any:
        def interpret(graph: fx.GraphModule, *_: Any, **__: Any) -> tuple[Any, None]:
            return interpret_whole(graph), None

        return compile_with_inductor(
            graph_module, example_inputs, interpret, recompute_masks=False, eager_randomness=True
        )

    monkeypatch.setattr("apollo_compile.session.compile.compile_plainly", compile_plainly)


@pytest.fixture(autouse=True)
def _without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_plainly(monkeypatch)


@pytest.fixture(autouse=True)
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Take INFO lines of the package, as `APOLLO_LOG=INFO` shows them."""
    caplog.set_level(logging.INFO, logger="apollo_compile")
    return caplog


def warnings_in(lines: pytest.LogCaptureFixture) -> list[str]:
    """Return what users see who set no level."""
    own = [record for record in lines.records if record.name.startswith("apollo_compile")]
    return [record.getMessage() for record in own if record.levelno >= logging.WARNING]


def test_a_chain_that_gains_nothing_stays_with_torch_compile(lines: pytest.LogCaptureFixture) -> None:
    """It trains at once; one CUDA graph of it is compared when a compile is a small share of the loop; no body is.

    In the next process torch.compile's code runs alone, and nothing else is compiled.
    """
    default = Default()
    loop = Loop(default, chain)
    loop.settle()
    first = loop.ran.index(WHOLE)
    assert loop.ran[:first] == first * [COMPILED] and first >= 4
    assert loop.ran[-1] == COMPILED and set(loop.ran) == {COMPILED, WHOLE}
    waiting = "measuring: torch.compile, until compiling one CUDA graph of it takes 5% of the training time at most"
    assert waiting in loop.states
    assert "measuring: torch.compile against one CUDA graph, turn 3 of 10" in loop.states
    assert default.state == (
        "settled: torch.compile, 1.00x as fast as one CUDA graph; no two branches of 0/0 forward are independent"
    )
    assert not warnings_in(lines) and " segments (" not in lines.text
    assert "0/0: chosen by measuring: torch.compile 10.00 s a step, one CUDA graph 10.00 s (1.00x)" in lines.text
    assert not default.gpu.races and not list(default.gpu.captures), "the loser keeps no memory"
    again = Default()
    loop = Loop(again, chain)
    loop.step()
    assert again.models[0].challenge.is_over and again.state == default.state and not again.gpu.log
    ((_, verdict),) = again.models[0].verdicts
    assert verdict.is_remembered


def test_a_report_says_where_it_is() -> None:
    """Its first line, its numbers, and the plans that nobody runs."""
    default = Default()
    loop = Loop(default, chain)
    loop.step()
    assert status(loop.model) == "measuring: torch.compile, until its code is warm"
    assert report(loop.model).metrics() == {
        "apollo/settled": 0,
        "apollo/graphs_on_lanes": 0,
        "apollo/graphs_in_turn": 0,
        "apollo/graphs_in_inductor": 0,
        "apollo/fallbacks": 0,
    }
    while ", turn " not in status(loop.model):
        loop.step()
    assert str(report(loop.model)).startswith("measuring: torch.compile against one CUDA graph, turn 1 of 10\n")
    assert not is_settled(loop.run)
    loop.settle({**EVEN, WHOLE: 8 * S})
    text = str(report(loop.run))
    assert text.startswith("settled: one CUDA graph, 1.25x as fast as torch.compile; no two branches of 0/0 forward")
    assert "0/0: chosen by measuring\n" in text and "Nothing can overlap: " in text
    assert report(loop.run).metrics()["apollo/gain_over_inductor"] == 1.25
    assert is_settled(loop.run) and variants_of(loop.run) == [WHOLE]


def test_one_cuda_graph_that_is_faster_stays() -> None:
    """By more than 2 %; after the verdict every step is a replay."""
    default = Default()
    loop = Loop(default, chain)
    loop.settle({**EVEN, WHOLE: 9 * S})
    assert default.state.startswith("settled: one CUDA graph, 1.11x as fast as torch.compile; ")
    before = default.gpu.log.count(("replay",))
    for _ in range(3):
        loop.step()
    assert loop.ran[-3:] == 3 * [WHOLE] and default.gpu.log.count(("replay",)) == before + 6


def test_one_per_cent_is_not_worth_a_change() -> None:
    """The simpler side stays."""
    default = Default()
    loop = Loop(default, chain)
    loop.settle({**EVEN, WHOLE: round(9.9 * S)})
    assert default.variant is COMPILED


def test_branches_that_win_run_on_lanes(lines: pytest.LogCaptureFixture) -> None:
    """Bodies are compiled and timed; the plan is compared with what won before.

    The next process runs them after a few steps of torch.compile's code, without a comparison.
    """
    default = Default()
    loop = Loop(default, branches)
    times = {COMPILED: 10 * S, WHOLE: round(9.5 * S), PLAN: 8 * S}
    loop.settle(times)
    order = [variant for variant, before in zip(loop.ran, [None, *loop.ran], strict=False) if variant != before]
    assert list(dict.fromkeys(order)) == [COMPILED, WHOLE, PLAN]
    assert "measuring: one CUDA graph against plan, turn 1 of 10" in loop.states
    assert default.state == "settled: plan, 1.25x as fast as torch.compile"
    assert not warnings_in(lines) and lines.text.count(" segments (") == 2
    for _ in range(3):
        loop.step()
    assert set(loop.ran[-3:]) == {PLAN} and not default.gpu.races
    assert not any(gpu.races for gpu in default.gpu.others.values())
    assert len(list(default.gpu.captures)) == 2, "of the winner's forward and backward"
    assert " instead of its plan" not in str(report(loop.run))
    again = Default()
    loop = Loop(again, branches)
    loop.settle(times)
    loop.step(times)
    assert loop.ran[0] is COMPILED and loop.ran[-1] is PLAN and len(loop.ran) < 16
    assert again.state == default.state and again.models[0].verdicts[0][1].is_remembered


def test_branches_that_lose_leave_torch_compile(lines: pytest.LogCaptureFixture) -> None:
    """Whatever their times promised; the report has what they took."""
    default = Default()
    loop = Loop(default, branches)
    loop.settle({COMPILED: 10 * S, WHOLE: 11 * S, PLAN: 12 * S})
    assert default.state == "settled: torch.compile, 1.10x as fast as one CUDA graph"
    (verdict,) = [verdict for _, verdict in default.models[0].verdicts]
    assert [standing.name for standing in verdict.standings] == [COMPILED, "one CUDA graph", PLAN]
    assert not warnings_in(lines)


def test_bodies_that_promise_nothing_are_not_compared() -> None:
    """On a device where the whole graph takes as long as one of its bodies."""
    default = Default(FakeGpu())
    loop = Loop(default, branches)
    loop.settle()
    assert set(loop.ran) == {COMPILED, WHOLE}
    assert "; as one CUDA graph it takes 2.0 us, and no plan on lanes less than " in default.state


def test_lanes_compete_with_the_cuda_graphs_of_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours would be the same once more, so only lanes are compared; a chain compiles nothing at all to be compared."""
    monkeypatch.setattr("apollo_compile.session.contest.default.replays_cuda_graphs", lambda settings: True)
    default = Default()
    loop = Loop(default, branches)
    loop.settle({**EVEN, PLAN: 9 * S})
    assert default.state == "settled: plan, 1.11x as fast as torch.compile"
    default = Default()
    loop = Loop(default, chain)
    loop.settle()
    assert default.state == "settled: torch.compile; no two branches of 0/0 forward are independent"


def _with_size(x: torch.Tensor, count: int) -> torch.Tensor:
    return x * count


@torch.library.custom_op("apollo_tests::uncapturable", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _uncapturable(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@_uncapturable.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _with_operator(x: torch.Tensor, count: int) -> torch.Tensor:
    return _uncapturable(x * count)


class Hiding(nn.Module):
    """A model with an operator that no CUDA graph may hold, in an inner graph of Dynamo's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` after the layer and the operator."""
        return checkpoint(lambda value: self.linear(value) + _uncapturable(value), x, use_reentrant=False)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("ranks", "several ranks run it"),
        ("step", "its sizes change, and a whole step is for one size"),
        ("capture", "it is compiled inside of a CUDA graph that the user captures"),
        ("fixed", "deterministic algorithms are on"),
        ("off", "the options leave nothing to compare"),
        ("operator", "it has apollo_tests.uncapturable.default, which no CUDA graph may hold"),
    ],
)
def test_what_is_not_eligible_is_torch_compile_with_one_line(
    problem: str, reason: str, lines: pytest.LogCaptureFixture
) -> None:
    """Its very function, with no WARNING."""
    ranks = Ranks(dist.HashStore()) if problem == "ranks" else None
    default = Default(
        ranks=ranks, is_for_step=problem == "step", **({"plan.autotune": False} if problem == "off" else {})
    )
    default.gpu.is_captured_by_user = problem == "capture"
    torch.use_deterministic_algorithms(problem == "fixed")
    try:
        function = _with_operator if problem == "operator" else _with_size
        run = torch.compile(function, backend=default, dynamic=problem == "step")
        torch.testing.assert_close(run(torch.ones(3), 5), torch.full((3,), 5.0))
    finally:
        torch.use_deterministic_algorithms(False)
    (model,) = default.models
    assert model.challenge is None and model.falls_back
    (line,) = [record for record in lines.records if record.name.startswith("apollo_compile")]
    assert line.levelno == logging.INFO and f"0/0 falls back to torch.compile: {reason}" in line.getMessage()


@pytest.mark.parametrize(("build", "side"), [(normalized, WHOLE), (branches, PLAN)], ids=("whole", "lanes"))
def test_out_of_memory_in_a_capture_ends_the_comparison(
    build: Callable[[], Any], side: Variant, lines: pytest.LogCaptureFixture
) -> None:
    """Training goes on, to the same losses, statistics of normalizations included, with one WARNING."""
    default = Default()
    loop = Loop(default, build)
    while side not in loop.ran:
        loop.step({**EVEN, WHOLE: 9 * S})
    default.gpu.fail_capture = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    for gpu in default.gpu.others.values():
        gpu.fail_capture = default.gpu.fail_capture
    loop.settle({**EVEN, WHOLE: 9 * S})
    for _ in range(3):
        loop.step()
    assert default.state == (
        "settled: torch.compile; OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    (line,) = warnings_in(lines)
    assert line == "0/0: torch.compile stays: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    for name, value in loop.eager.state_dict().items():
        torch.testing.assert_close(loop.model.state_dict()[name], value, rtol=1e-7, atol=1e-9)
    assert not list(default.gpu.captures)


def test_out_of_memory_while_bodies_are_timed_leaves_the_winner_until_then(lines: pytest.LogCaptureFixture) -> None:
    """Nothing that runs has failed; the graph that was found to be faster goes on."""

    class Full(BusyGpu):
        def new_timer(self) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    default = Default(Full())
    loop = Loop(default, branches)
    loop.settle({**EVEN, WHOLE: 9 * S})
    assert default.state == (
        "settled: one CUDA graph, 1.11x as fast as torch.compile; no lanes: OutOfMemoryError: CUDA out of memory."
    )
    assert len(warnings_in(lines)) == 1


def test_a_device_whose_checks_fail_has_no_lanes(lines: pytest.LogCaptureFixture) -> None:
    """One WARNING says what differs; nothing is compiled, and the next process checks again."""
    found = "lane 2 ran on SMs of lane 1"
    default = Default(found=found)
    loop = Loop(default, branches)
    loop.settle()
    loop.step()
    assert set(loop.ran) == {COMPILED}
    assert default.state == f"settled: torch.compile; the checks of lanes failed: {found}"
    (line,) = warnings_in(lines)
    assert line == (
        f"lanes stay off, and graphs run as torch.compile makes them: {found}; 'apollo doctor' shows it, and "
        "'apollo doctor --self-check' tries again"
    )
    assert not default.gpu.log
    assert Loop(Default(), branches).default.models == []


def test_an_operator_that_no_cuda_graph_can_hold_is_found_once(lines: pytest.LogCaptureFixture) -> None:
    """After AOTAutograd, where a capture would fail; the next process knows it, and compiles nothing for it."""
    build = lambda: (Hiding(), (torch.arange(8.0).reshape(4, 2),))  # noqa: E731
    for is_known in (False, True):
        default = Default()
        loop = Loop(default, build)
        if not is_known:
            loop.settle()
        loop.step()
        assert set(loop.ran) == {COMPILED} and not default.gpu.log
        assert "which no CUDA graph may hold" in default.state
    assert not warnings_in(lines)


def test_nothing_is_kept_where_the_user_does_not_want_it() -> None:
    """`plan.remember` off: the next process compares again."""
    options = {"plan.remember": False}
    Loop(Default(**options), chain).settle()
    loop = Loop(Default(**options), chain)
    while WHOLE not in loop.ran:
        loop.step()


def test_steps_that_drift_are_compared_again() -> None:
    """By the time between their beginnings alone; what is faster then runs."""
    default = Default()
    loop = Loop(default, chain)
    loop.settle({**EVEN, WHOLE: 9 * S})
    for _ in range(2 * DRIFT_STEPS * WATCH_EVERY):
        loop.step({**EVEN, WHOLE: 9 * S})
    assert set(loop.ran[-20:]) == {WHOLE}
    slower = {**EVEN, WHOLE: 12 * S}
    while default.is_settled and len(loop.ran) < 2 * ENOUGH:
        loop.step(slower)
    loop.settle(slower)
    assert default.state.startswith("settled: torch.compile, 1.20x as fast as one CUDA graph")


def test_the_users_own_capture_has_torch_compiles_code() -> None:
    """Whichever side won: what is recorded stays, and must not depend on memory of ours."""
    default = Default()
    loop = Loop(default, chain)
    loop.settle({**EVEN, WHOLE: 9 * S})
    default.gpu.is_captured_by_user = True
    log = len(default.gpu.log)
    loop.step()
    assert len(default.gpu.log) == log
    default.gpu.is_captured_by_user = False
    loop.step()
    assert default.gpu.log[log:].count(("replay",)) == 2


def test_one_graph_of_a_process_is_compared_at_a_time() -> None:
    """Two models in one loop: a step of one contains the other, whose sides stay meanwhile."""
    default = Default()
    first, second = Loop(default, chain), Loop(default, chain)
    for _ in range(ENOUGH):
        for loop in (first, second):
            loop.step()
        sides = [model.challenge.variant for model in default.models if model.challenge is not None]
        states = [model.state().detail for model in default.models]
        assert sum(", turn " in state for state in states) <= 1
        assert sides.count(WHOLE) <= 1
        if all(model.state().stage is Stage.SETTLED for model in default.models):
            break
    assert all(model.verdicts for model in default.models)


def test_on_a_cpu_nothing_of_it_is_imported() -> None:
    """Neither by the backend nor by opening the target of a graph."""
    program = (
        "import sys, torch, apollo_compile.backend\n"
        "from apollo_compile.config import load_config\n"
        "from apollo_compile.device.open import open_target\n"
        "target, reason = open_target([torch.ones(1)], load_config({}))\n"
        "names = ('apollo_compile.device.gpu', 'apollo_compile.session.cont', 'apollo_compile.session.chall')\n"
        "print(target.device, reason, [name for name in sys.modules if name.startswith(names)])\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=900)
    assert ran.stdout.strip() == "cpu None []", ran.stdout
