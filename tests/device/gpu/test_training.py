"""Whole models through the backend, with the stand-in for the GPU: what a user does between forward and backward."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from apollo_compile.config import load_config
from apollo_compile.device.gpu.run.execute import CudaExecutable
from apollo_compile.device.gpu.run.gpu import Sharing
from apollo_compile.device.gpu.target import GpuTarget
from apollo_compile.ir import Variant
from apollo_compile.passes.plan import make_plan
from apollo_compile.session.compile import GraphCompiler
from apollo_compile.session.model import CompiledModel
from apollo_compile.store.profiles import load_profile
from apollo_compile.torch_bridge.frontend import compile_with_inductor, keep_with
from tests.device.gpu.fake_gpu import FakeGpu
from tests.device.gpu.test_steps import PROGRAM
from tests.end_to_end.models import TwoTowers, assert_same_training, train, two_tower_inputs, two_tower_loss

OPTIONS = {**PROGRAM, "plan.replan": False, "runtime.isolation": True}
"""Bodies are not compiled, which takes most of the time: what becomes of them is the same."""


class Compiler:
    """A backend as `apollo` is, with tensors on the CPU and lanes on the stand-in."""

    def __init__(self, **options: Any) -> None:
        self.gpu = FakeGpu()
        self.models: list[CompiledModel] = []
        self._config = load_config({**OPTIONS, **options})

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        model = CompiledModel(
            name=f"{len(self.models)}/0",
            config=self._config,
            target=GpuTarget(self.gpu, load_profile(Path("h200")), self._config, device=torch.device("cpu")),
        )
        self.models.append(model)
        compiler = GraphCompiler(model, {})
        compiled = compile_with_inductor(graph_module, example_inputs, compiler.compile_graph, recompute_masks=False)
        keep_with(compiled, model)
        return compiled

    @property
    def executables(self) -> list[CudaExecutable]:
        """All plans' executables, forwards before their backwards."""
        found = [graph.executable for model in self.models for graph in model.graphs]
        assert all(isinstance(each, CudaExecutable) for each in found)
        return found  # type: ignore[return-value]

    def check(self, *, replays: Sequence[int] | None = None) -> None:
        """Expect no race, more than one lane, and as many replays of each executable."""
        assert not self.gpu.races
        assert all(len(each.program.instructions) > 1 for each in self.executables)
        if replays is not None:
            assert [each.num_replays for each in self.executables] == list(replays)


def new_compiler(**options: Any) -> Compiler:
    """Return a backend that has compiled nothing."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Compiler(**options)


@pytest.fixture
def compiler() -> Compiler:
    """Make a backend that has compiled nothing."""
    return new_compiler()


class Towers:
    """A compiled model of two towers, whose gradients must be those of its copy in eager after every step."""

    def __init__(self, compiler: Compiler) -> None:
        self.inputs, self.model = two_tower_inputs(), TwoTowers(depth=1)
        made = copy.deepcopy(self.model)
        self.run = torch.compile(made, backend=compiler)
        self._pairs = list(zip(made.parameters(), self.model.parameters(), strict=True))
        self.model(*self.inputs).square().mean().backward()

    def steps(self, count: int, pack: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """Train so often, with a hook on saved tensors if there is one."""
        for _ in range(count):
            for parameter, _ in self._pairs:
                parameter.grad = None
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x) if pack else contextlib.nullcontext():
                loss = self.run(*self.inputs).square().mean()
            loss.backward()
            for parameter, other in self._pairs:
                torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_without_isolation_bodies_are_timed_on_quotas_and_run_on_plain_streams() -> None:
    """The plan competes with segments in turn."""
    compiler = new_compiler(**{"runtime.isolation": False, "plan.replan": True})
    compiler.gpu.ns_by_stream = {f"lane {lane}": 600 for lane in range(1, 11)}
    Towers(compiler).steps(5)
    for graph in compiler.models[0].graphs:
        assert graph.variant == Variant.PLAN
        assert set(graph.variants.available) == {Variant.SERIAL, Variant.PLAN}
        assert {mode.duration_ns for mode in graph.compilation.costs.modes[0]} == {600, 1_000}
    gpus = compiler.gpu.others
    assert set(gpus) == {Sharing.APART, Sharing.FREE} and not compiler.gpu.races
    assert len(gpus[Sharing.FREE].recordings) == 2
    assert all(recording.num_replays == 7 for recording in gpus[Sharing.APART].recordings), "only bodies were timed"


def test_masks_under_replay_are_those_of_runs_on_lanes(compiler: Compiler) -> None:
    """Dropout: other masks at every step, the same in a forward and its backward."""
    model = TwoTowers(depth=1, dropout=0.3)
    torch.manual_seed(5)
    replayed = train(model, two_tower_loss, steps=7, backend=compiler)
    compiler.check(replays=[5, 5])
    on_lanes = Compiler(**{"debug.strict": False})
    on_lanes.gpu.fail_capture = RuntimeError("not here")
    torch.manual_seed(5)
    assert_same_training(train(model, two_tower_loss, steps=7, backend=on_lanes), replayed)
    assert len({loss.item() for loss in replayed[0]}) == 7


@pytest.mark.parametrize("moves", (True, False), ids=("replaced", "kept"))
def test_hooks_on_saved_tensors_leave_the_forward_a_cuda_graph(
    compiler: Compiler, info_log: pytest.LogCaptureFixture, moves: bool
) -> None:
    """A backward reads what they return, from wherever it is; a CUDA graph would overwrite what they may have kept."""
    Towers(compiler).steps(6, pack=torch.clone if moves else lambda x: x)
    lines = [record.message for record in info_log.records if "saved_tensors_hooks" in record.message]
    forward, backward = compiler.executables
    assert (forward.num_replays, backward.num_replays, len(lines)) == (4, 0, 1)
    compiler.check()


def test_other_shapes_get_graphs_of_their_own(compiler: Compiler) -> None:
    """Each with lanes at first and a CUDA graph afterwards."""
    model = TwoTowers(depth=1)
    run = torch.compile(model, backend=compiler, dynamic=False)
    with torch.no_grad():
        for batch in (4, 6, 4, 6, 4, 6):
            x = torch.randn(batch, 64)
            torch.testing.assert_close(run(x, x + 1), model(x, x + 1))
    compiler.check(replays=[1, 1])


@pytest.mark.parametrize("is_lopsided", (False, True), ids=("lanes", "a backward in turn"))
def test_the_serial_variant_replays_forward_and_backward(compiler: Compiler, is_lopsided: bool) -> None:
    """With memory of its own: captures of one variant do not stop another; also where one of both has no lanes."""
    towers = Towers(compiler)
    towers.steps(5)
    compiler.check(replays=[3, 3])
    if is_lopsided:
        _, last = compiler.models[0].graphs
        old = last.compilation
        in_turn = make_plan(old.partition.graph, old.costs, lanes=old.plan.lanes, planner="serial")
        last.variants.adopt(last.variants.with_plan(in_turn))
        assert last.variants.available == (Variant.SERIAL,)
    for graph in compiler.models[0].graphs:
        graph.use(Variant.SERIAL)
    towers.steps(4)
    executables = [graph.variants.loaded()[Variant.SERIAL] for graph in compiler.models[0].graphs]
    assert [each.num_replays for each in executables] == [2, 2]
    compiler.check(replays=[3, 0 if is_lopsided else 3])


@pytest.mark.soak
def test_what_inductor_compiles_whole_replays_as_plans_do() -> None:
    """Forward and backward, as one CUDA graph each: that is what lanes have to beat."""
    compiler = new_compiler(**{"runtime.bodies": "python", "plan.autotune": True})
    towers = Towers(compiler)
    towers.steps(1)
    graphs = compiler.models[0].graphs
    for graph in graphs:
        graph.tuner = None
        graph.prepare()
        graph.use(Variant.INDUCTOR)
    towers.steps(6)
    executables = [graph.variants.loaded()[Variant.INDUCTOR] for graph in graphs]
    assert [each.num_replays for each in executables] == [4, 4]
    assert [len(each.graph.segments) for each in executables] == [1, 1]
    assert not compiler.gpu.races
