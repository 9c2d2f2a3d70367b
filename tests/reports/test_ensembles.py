"""Equal segments that one batched call could replace are found, and named where that is predicted to be faster."""

from __future__ import annotations

from collections.abc import Sequence
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


CRITICS = [f"critics.{number}" for number in range(12)]


def with_critics(flops: int, names: Sequence[str] = CRITICS[:4], *, is_chain: bool = False) -> Compilation:
    """Return a stem and segments of one body that read it, or one another; each is one matmul."""
    reads = [(), *((number if is_chain else 0,) for number in range(len(names)))]
    made = graph(*reads, names=("stem", *names), bodies=(0, *(1 for _ in names)))
    work = Work(flops=flops, kernels=1, parts=(Kernel(kind=KernelKind.MATMUL, flops=flops, bytes_moved=4_000),))
    own = (replace(each, work=work, module=each.name.partition("@")[0]) for each in made.segments)
    return compile_graph(replace(made, segments=tuple(own)))


def test_independent_segments_of_one_body_are_an_ensemble() -> None:
    """Batched, the call has one kernel with the work of all."""
    made = with_critics(LARGE)
    (found,) = find_ensembles(made)
    assert found.names == tuple(CRITICS[:4])
    kernel = Kernel(kind=KernelKind.BATCHED_MATMUL, flops=4 * LARGE, bytes_moved=16_000)
    one = made.partition.graph.segments[1]
    tensors = len(one.inputs) + len(one.outputs)
    assert found.batched_ns == predict(Work(parts=(kernel,)), made.profile, UNITS, num_tensors=tensors).duration_ns
    assert found.apart_ns <= predict(one.work, made.profile, 1, num_tensors=tensors).duration_ns * 4 / UNITS


@pytest.mark.parametrize(("members", "is_chain"), [(4, True), (2, False)], ids=["layers", "twins"])
def test_layers_of_a_chain_and_twins_are_no_ensemble(members: int, is_chain: bool) -> None:
    """Layers need each other's results."""
    assert find_ensembles(with_critics(SMALL, CRITICS[:members], is_chain=is_chain)) == ()


@pytest.mark.parametrize(("modules", "found"), [(4 * ["norm"], []), (CRITICS[:4], [4])])
def test_calls_of_one_module_are_no_ensemble(modules: Sequence[str], found: Sequence[int]) -> None:
    """Micro-batches and repeated calls have the same weights, so only different modules can be stacked."""
    calls = [f"{module}@{part}" for part in range(2) for module in modules]
    assert [len(each.names) for each in find_ensembles(with_critics(SMALL, calls))] == found


@pytest.mark.parametrize(("flops", "is_said"), [(SMALL, True), (LARGE, False)])
def test_a_report_suggests_to_batch_small_members(flops: int, is_said: bool) -> None:
    """Launches of small ones add up; large ones fill lanes as they are."""
    text = " ".join(str(report_of(summarize(with_critics(flops, CRITICS), Trace()))).split())
    said = "12 independent segments run the same code (critics.0, critics.1, critics.2, critics.3 and 8 more)"
    assert (said in text) == is_said
