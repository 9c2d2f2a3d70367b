"""Graphs that `benchmarks.planner` plans: they load and make sense; and the lines where a baseline is ahead."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("tqdm")

from apollo_compile.ir import Role, SegmentGraph
from benchmarks.graphs import load_graphs
from benchmarks.planner import Result, measure
from benchmarks.workloads.synthetic import synthetic_graphs

SAVED = load_graphs()
SYNTHETIC = synthetic_graphs()


@pytest.mark.parametrize("graph", [*SAVED.values(), *SYNTHETIC.values()], ids=lambda graph: graph.name)
def test_a_graph_is_topological_and_all_its_segments_have_kernels(graph: SegmentGraph) -> None:
    """Ids are positions, readers and producers agree, and the sums of the work are those of its kernels."""
    assert [segment.id for segment in graph.segments] == list(range(len(graph.segments)))
    for segment in graph.segments:
        assert all(other < segment.id for other in graph.predecessors(segment.id))
        assert all(segment.id in graph.buffers[buffer].readers for buffer in segment.inputs)
        assert all(graph.buffers[buffer].producer == segment.id for buffer in segment.outputs)
        assert segment.work.kernels == sum(kernel.count * kernel.launches for kernel in segment.work.parts) > 0
        assert segment.work.flops == sum(kernel.count * kernel.flops for kernel in segment.work.parts)


def test_saved_graphs_are_training_steps_of_large_models() -> None:
    """A backward needs about twice the flops of its forward, and there are tera of them."""
    names = [name for name in SAVED if name.endswith("forward")]
    assert len(names) == 6
    for name in names:
        forward, backward = SAVED[name], SAVED[name.replace("forward", "backward")]
        flops, more = (sum(segment.work.flops for segment in graph.segments) for graph in (forward, backward))
        assert (forward.role, backward.role) == (Role.FORWARD, Role.BACKWARD)
        assert flops > 5e11
        assert 1.8 < more / flops < 2.5


def test_gradients_of_weights_are_apart_in_graphs_of_the_same_work() -> None:
    """Every workload has some, with about half of a backward's flops at most, and nothing waits for them."""
    for name, graph in SAVED.items():
        weights = {segment.id for segment in graph.segments if segment.name.partition("#")[0].endswith(":weights")}
        assert bool(weights) == name.endswith("_apart")
        assert not any(weights & set(graph.predecessors(segment.id)) for segment in graph.segments)
        if weights:
            together = SAVED[name.removesuffix("_apart")]
            flops = [segment.work.flops for segment in graph.segments]
            assert sum(flops) == pytest.approx(sum(segment.work.flops for segment in together.segments), rel=0.01)
            assert 0.1 < sum(flops[segment] for segment in weights) / sum(flops) < 0.6


@pytest.mark.parametrize("device", ["h200", "cpu16"])
def test_measuring_a_graph_names_where_a_baseline_is_ahead(device: str) -> None:
    """Serial is in the row and never ahead; an invented result that is better makes one line per comparison."""
    row = measure(SYNTHETIC["layered 10"], device, [0.1])
    assert row.defeats() == []
    assert row.baselines["serial"].makespan_ns >= row.searches[0].makespan_ns
    assert row.bound_ns <= row.searches[0].undisturbed_ns
    better = Result(makespan_ns=row.bound_ns // 2, undisturbed_ns=row.bound_ns // 2, took_s=0.0)
    beaten = dataclasses.replace(row, baselines=row.baselines | {"better": better})
    assert [line.split()[-2] for line in beaten.defeats()] == ["with", "without"]
    assert all(" better takes " in line for line in beaten.defeats())
