"""Equal segments that one batched call could replace, such as the critics of a learner.

    find_ensembles(compilation) -> [EnsembleSummary]

Members of an ensemble are modules that share a body and are independent of each other. Side by side on lanes they take
at least their work divided by the units, each on the number of units that suits it best. Batched, they launch as many
kernels as one member, each with the work of all: `torch.vmap` over `torch.func.stack_module_state` makes such a call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from apollo_compile.cost_model.roofline import predict
from apollo_compile.ir import BodyId, KernelKind, Segment, SegmentGraph, Work
from apollo_compile.reports.values import EnsembleSummary
from apollo_compile.target.compilation import Compilation

FEWEST_MEMBERS = 3
"""Least number of members: two equal branches, as of a forward and its target, are not worth stacking."""


def find_ensembles(compilation: Compilation) -> tuple[EnsembleSummary, ...]:
    """Return the ensembles of a graph, in graph order; both times are from formulas."""
    graph, profile = compilation.partition.graph, compilation.profile
    counts = {len(lane.units) for lane in profile.lanes}
    found = []
    for members in _independent(graph):
        work, num_tensors = members[0].work, len(members[0].inputs + members[0].outputs)
        alone = min(units * predict(work, profile, units, num_tensors=num_tensors).duration_ns for units in counts)
        batched = predict(_batched(work, len(members)), profile, profile.units, num_tensors=num_tensors)
        found.append(
            EnsembleSummary(
                names=tuple(each.name for each in members),
                apart_ns=round(len(members) * alone / profile.units),
                batched_ns=batched.duration_ns,
            )
        )
    return tuple(found)


def _independent(graph: SegmentGraph) -> Iterator[list[Segment]]:
    """Yield segments of several modules that share a body, none of which depends on another."""
    before: list[int] = []  # as bits, all that a segment depends on
    members: dict[BodyId, dict[str, Segment]] = defaultdict(dict)
    for segment in graph.segments:
        earlier = graph.predecessors(segment.id)
        before.append(sum(1 << other for other in earlier))
        for other in earlier:
            before[-1] |= before[other]
        members[segment.body].setdefault(segment.module, segment)  # other calls and micro-batches have the same weights
    for by_module in members.values():
        alike = list(by_module.values())
        bits = sum(1 << each.id for each in alike)
        if len(alike) >= FEWEST_MEMBERS and not any(before[each.id] & bits for each in alike):
            yield alike


def _batched(work: Work, count: int) -> Work:
    """Return the work of one member with each kernel as large as those of all members."""
    parts = tuple(
        replace(
            kernel,
            kind=KernelKind.BATCHED_MATMUL if kernel.kind is KernelKind.MATMUL else kernel.kind,
            flops=count * kernel.flops,
            bytes_moved=count * kernel.bytes_moved,
            bytes_from_outside=count * kernel.bytes_from_outside,
            tiles=count * kernel.tiles,
        )
        for kernel in work.parts
    )
    return replace(work, flops=count * work.flops, parts=parts)
