"""Numbers of micro-batches that encoders hold in memory.

peak_live(plan) -> micro-batches by encoder and replica
"""

from __future__ import annotations

from collections.abc import Iterable

from apollo_compile.distributed.pipeline.values import FilledPlan, Kind

Interval = tuple[int, int, int]
"""(start, end, value)."""


def peak_live(plan: FilledPlan) -> tuple[tuple[int, ...], ...]:
    """Return, by encoder and replica, the peak of live micro-batches, counted as for `Encoder.max_live`."""
    held: list[list[list[Interval]]] = [[[] for _ in encoder.replicas] for encoder in plan.encoders]
    for index, encoder in enumerate(plan.encoders):
        for microbatch, replica in enumerate(plan.replica_of[index]):
            held[index][replica].append((*live_span(plan, index, microbatch, is_frozen=encoder.is_frozen), 1))
    return tuple(tuple(map(peak_of, replicas)) for replicas in held)


def live_span(plan: FilledPlan, index: int, microbatch: int, *, is_frozen: bool) -> tuple[int, int]:
    """Return the start and end of the lifetime of an encoder's micro-batch."""
    own = [b for b in plan.bars if b.op.is_encoder and (b.op.encoder, b.op.microbatch) == (index, microbatch)]
    start_ns = min(bar.start_ns for bar in own)
    if not is_frozen:
        return start_ns, max(bar.end_ns for bar in own)
    feeds = plan.encoders[index].feeds
    return start_ns, next(
        b.start_ns
        for b in plan.bars
        if b.op.kind is Kind.FORWARD and (b.op.microbatch, b.op.stage) == (microbatch, feeds)
    )


def peak_of(intervals: Iterable[Interval]) -> int:
    """Return the largest sum of values of intervals that contain the same time; intervals exclude their ends."""
    changes = sorted(change for start, end, value in intervals for change in ((start, 1, value), (end, 0, -value)))
    level = highest = 0
    for _, _, value in changes:
        level += value
        highest = max(highest, level)
    return highest
