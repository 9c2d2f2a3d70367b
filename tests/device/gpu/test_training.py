"""Whole models through the backend, with the stand-in for the GPU: what a user does between forward and backward."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.device.gpu.run.execute import CudaExecutable
from apollo_compile.device.gpu.run.gpu import Sharing
from apollo_compile.ir import Variant
from apollo_compile.passes.plan import make_plan
from apollo_compile.session import registry
from apollo_compile.session.graph import CompiledGraph
from tests.device.gpu.fake_gpu import FakeGpu, open_stand_in
from tests.end_to_end.models import TwoTowers, assert_same_training, train, two_tower_loss

OPTIONS = {
    "debug.strict": True,
    "plan.autotune": False,
    "plan.min_gain": 0.0,
    "plan.planner": "greedy",
    "plan.replan": False,
    "plan.time_limit_s": 0.2,
    "partition.granularity": "module",
    "runtime.bodies": "eager",
    "runtime.isolation": True,
}
"""What becomes of bodies is the same if they are not compiled, which takes most of the time."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Let tensors on the CPU be on a GPU."""
    return open_stand_in(monkeypatch, FakeGpu())


def graphs_of(model: nn.Module) -> list[CompiledGraph]:
    """Return the graphs of a model, forwards before their backwards."""
    return [graph for found in registry.find_models(model) for graph in found.graphs]


def check(gpu: FakeGpu, graphs: Sequence[CompiledGraph], *, replays: Sequence[int]) -> None:
    """Expect no race, plans on more than one lane, and as many replays of each of them."""
    executables = [graph.executable for graph in graphs]
    assert not gpu.races
    assert all(isinstance(each, CudaExecutable) and len(each.program.instructions) > 1 for each in executables)
    assert [each.num_replays for each in executables] == list(replays)


class Towers:
    """A compiled model of two towers, whose gradients must be those of its copy in eager after every step."""

    def __init__(self, **options: Any) -> None:
        self.model, eager = (made := TwoTowers(depth=1)), copy.deepcopy(made)
        self.run = torch.compile(self.model, backend="apollo", options={**OPTIONS, **options})
        self._pairs = list(zip(self.model.parameters(), eager.parameters(), strict=True))
        two_tower_loss(eager).backward()

    @property
    def graphs(self) -> list[CompiledGraph]:
        """Its forward and its backward."""
        return graphs_of(self.model)

    def steps(self, count: int, pack: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """Train so often, with a hook on saved tensors if there is one."""
        for _ in range(count):
            for parameter, _ in self._pairs:
                parameter.grad = None
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x) if pack else contextlib.nullcontext():
                loss = two_tower_loss(self.run)
            loss.backward()
            for parameter, other in self._pairs:
                torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_without_isolation_bodies_are_timed_on_quotas_and_run_on_plain_streams(gpu: FakeGpu) -> None:
    """The plan competes with segments in turn."""
    gpu.ns_by_stream = {f"lane {lane}": 600 for lane in range(1, 11)}
    towers = Towers(**{"runtime.isolation": False, "plan.replan": True})
    towers.steps(5)
    for graph in towers.graphs:
        assert graph.variant == Variant.PLAN
        assert set(graph.variants.available) == {Variant.SERIAL, Variant.PLAN}
        assert {mode.duration_ns for mode in graph.compilation.costs.modes[0]} == {600, 1_000}
    assert set(gpu.others) == {Sharing.APART, Sharing.FREE}
    assert not any(other.races for other in gpu.others.values())
    assert len(gpu.others[Sharing.FREE].recordings) == 2
    assert all(recording.num_replays == 7 for recording in gpu.recordings), "only bodies were timed"


def test_masks_under_replay_are_those_of_runs_on_lanes(gpu: FakeGpu) -> None:
    """Dropout: other masks at every step, the same in a forward and its backward."""
    model, trainings = TwoTowers(depth=1, dropout=0.3), []
    for has_replays in (True, False):

        def loss_of(run: Callable[..., torch.Tensor], has_replays: bool = has_replays) -> torch.Tensor:
            loss = two_tower_loss(run)
            gpu.is_captured_by_user = not has_replays  # from the second step on
            return loss

        torch.manual_seed(5)
        trainings.append(train(model, loss_of, steps=7, backend="apollo", options=OPTIONS))
        check(gpu, registry.compiled_models()[-1].graphs, replays=[5, 5] if has_replays else [0, 0])
    assert_same_training(*trainings)
    assert len({loss.item() for loss in trainings[0][0]}) == 7


@pytest.mark.parametrize("moves", (True, False), ids=("replaced", "kept"))
def test_hooks_on_saved_tensors_leave_the_forward_a_cuda_graph(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture, moves: bool
) -> None:
    """A backward reads what they return, from wherever it is; a CUDA graph would overwrite what they may have kept."""
    towers = Towers()
    with caplog.at_level(logging.INFO, logger="apollo_compile.device"):
        towers.steps(6, pack=torch.clone if moves else lambda x: x)
    assert sum("saved_tensors_hooks" in message for message in caplog.messages) == 1
    check(gpu, towers.graphs, replays=[4, 0])


def test_other_shapes_get_graphs_of_their_own(gpu: FakeGpu) -> None:
    """Each with lanes at first and a CUDA graph afterwards."""
    model = TwoTowers(depth=1)
    run = torch.compile(model, backend="apollo", options=OPTIONS, dynamic=False)
    with torch.no_grad():
        for batch in (4, 6, 4, 6, 4, 6):
            x = torch.randn(batch, 64)
            torch.testing.assert_close(run(x, x + 1), model(x, x + 1))
    check(gpu, graphs_of(model), replays=[1, 1])


@pytest.mark.parametrize("is_lopsided", (False, True), ids=("lanes", "a backward in turn"))
def test_the_serial_variant_replays_forward_and_backward(gpu: FakeGpu, is_lopsided: bool) -> None:
    """With memory of its own: captures of one variant do not stop another; also where one of both has no lanes."""
    towers = Towers()
    towers.steps(5)
    check(gpu, towers.graphs, replays=[3, 3])
    if is_lopsided:
        _, last = towers.graphs
        old = last.compilation
        in_turn = make_plan(old.partition.graph, old.costs, lanes=old.plan.lanes, planner="serial")
        last.variants.adopt(last.variants.with_plan(in_turn))
        assert last.variants.available == (Variant.SERIAL,)
    for graph in towers.graphs:
        graph.use(Variant.SERIAL)
    towers.steps(4)
    executables = [graph.variants.loaded()[Variant.SERIAL] for graph in towers.graphs]
    assert [each.num_replays for each in executables] == [2, 2]
    check(gpu, towers.graphs, replays=[3, 0 if is_lopsided else 3])


@pytest.mark.soak
def test_what_inductor_compiles_whole_replays_as_plans_do(gpu: FakeGpu) -> None:
    """Forward and backward, as one CUDA graph each: that is what lanes have to beat."""
    towers = Towers(**{"runtime.bodies": "python", "plan.autotune": True})
    towers.steps(1)
    for graph in towers.graphs:
        graph.tuner = None
        graph.prepare()
        graph.use(Variant.INDUCTOR)
    towers.steps(6)
    executables = [graph.variants.loaded()[Variant.INDUCTOR] for graph in towers.graphs]
    assert [each.num_replays for each in executables] == [4, 4]
    assert [len(each.graph.segments) for each in executables] == [1, 1]
    assert not gpu.races


def test_a_cpu_tensor_among_those_of_a_gpu_falls_back_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The graph names the tensor."""
    open_stand_in(monkeypatch, FakeGpu(), device="cuda:0")
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with caplog.at_level(logging.INFO, logger="apollo_compile"), torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend="apollo", options=OPTIONS)(x), layer(x))
    assert "it has tensors on cpu, and others on cuda:0" in caplog.text
