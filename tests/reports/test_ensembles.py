"""Equal segments that one batched call could replace are found, and named where that is predicted to be faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apollo_compile.cost_model.roofline import predict
from apollo_compile.ir import Kernel, KernelKind, Trace, Work
from apollo_compile.reports.ensembles import find_ensembles
from apollo_compile.reports.summary import summarize
from apollo_compile.target.compilation import Compilation
from tests.builders import graph
from tests.reports.reports import UNITS, compile_graph, report_of

SMALL, LARGE = 10_000, 1_000_000_000


def with_critics(flops: int, *, members: int = 4, is_chain: bool = False) -> Compilation:
    """Return a stem and segments of one body that read it, or one another; each is one matmul."""
    reads = [(), *((number if is_chain else 0,) for number in range(members))]
    bodies = (0, *(1 for _ in range(members)))
    made = graph(*reads, names=("stem", *(f"critics.{number}" for number in range(members))), bodies=bodies)
    work = Work(flops=flops, kernels=1, parts=(Kernel(kind=KernelKind.MATMUL, flops=flops, bytes_moved=4_000),))
    return compile_graph(replace(made, segments=tuple(replace(each, work=work) for each in made.segments)))


def test_independent_segments_of_one_body_are_an_ensemble() -> None:
    """Batched, the call has one kernel with the work of all."""
    made = with_critics(LARGE)
    (found,) = find_ensembles(made)
    assert found.names == tuple(f"critics.{number}" for number in range(4))
    kernel = Kernel(kind=KernelKind.BATCHED_MATMUL, flops=4 * LARGE, bytes_moved=16_000)
    one = made.partition.graph.segments[1]
    tensors = len(one.inputs) + len(one.outputs)
    assert found.batched_ns == predict(Work(parts=(kernel,)), made.profile, UNITS, num_tensors=tensors).duration_ns
    assert found.apart_ns <= predict(one.work, made.profile, 1, num_tensors=tensors).duration_ns * 4 / UNITS


@pytest.mark.parametrize(("members", "is_chain"), [(4, True), (2, False)], ids=["layers", "twins"])
def test_layers_of_a_chain_and_twins_are_no_ensemble(members: int, is_chain: bool) -> None:
    """Layers need each other's results."""
    assert find_ensembles(with_critics(SMALL, members=members, is_chain=is_chain)) == ()


@pytest.mark.parametrize("is_one_module", [False, True])
def test_calls_of_one_module_are_no_ensemble(is_one_module: bool) -> None:
    """Micro-batches and repeated calls have the same weights, so only different modules can be stacked."""
    made = with_critics(SMALL, members=8)
    stem, *others = made.partition.graph.segments
    modules = ["norm" if is_one_module else f"critics.{number % 4}" for number in range(8)]
    calls = [
        replace(each, name=f"{module}@{number // 4}", module=module)
        for number, (each, module) in enumerate(zip(others, modules, strict=True))
    ]
    partition = replace(made.partition, graph=replace(made.partition.graph, segments=(stem, *calls)))
    found = [each.names for each in find_ensembles(replace(made, partition=partition))]
    assert found == ([] if is_one_module else [tuple(f"critics.{number}@0" for number in range(4))])


@pytest.mark.parametrize(("flops", "is_said"), [(SMALL, True), (LARGE, False)])
def test_a_report_suggests_to_batch_small_members(flops: int, is_said: bool) -> None:
    """Launches of small ones add up; large ones fill lanes as they are."""
    text = " ".join(str(report_of(summarize(with_critics(flops, members=12), Trace()))).split())
    said = "12 independent segments run the same code (critics.0, critics.1, critics.2, critics.3 and 8 more)"
    assert (said in text) == is_said
