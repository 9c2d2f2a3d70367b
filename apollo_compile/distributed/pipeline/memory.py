"""Memory of the devices of a pipeline with encoders.

    peak_bytes(plan, Footprint) -> bytes by device;  peak_live(plan) -> micro-batches by encoder and replica

Weights (with gradients and optimizer state) are there all the time. Activations of a stage are held from the begin of
its forward of a micro-batch to the end of its backward; those of an encoder stage likewise, of a frozen one during its
forward only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from apollo_compile.distributed.pipeline.values import FilledPlan, Kind

Interval = tuple[int, int, int]
"""Start, end, value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes of stages and encoders, per device."""

    stage_bytes: tuple[int, ...]
    """By stage of the pipeline: weights, gradients, optimizer state."""
    stage_activation_bytes: tuple[int, ...]
    """By stage, of one micro-batch."""
    encoder_bytes: tuple[int, ...] = ()
    """By encoder, of one of its stages: weights, gradients, optimizer state."""
    encoder_activation_bytes: tuple[int, ...] = ()
    """By encoder, of one of its stages and one micro-batch."""


def peak_bytes(plan: FilledPlan, footprint: Footprint) -> tuple[int, ...]:
    """Return the most that every device holds at a time."""
    ranks = plan.schedule.num_ranks
    held: list[list[Interval]] = [[] for _ in range(plan.num_devices)]
    fixed = [0] * plan.num_devices
    for device in range(plan.num_devices):
        fixed[device] += sum(footprint.stage_bytes[device % ranks :: ranks])
    for index, encoder in enumerate(plan.encoders):
        for device in {device for replica in encoder.replicas for device in replica}:
            fixed[device] += footprint.encoder_bytes[index]
    spans: dict[tuple[bool, int, int, int, int], tuple[int, int]] = {}
    for bar in plan.bars:
        # The stages of an encoder's backward count from its last one.
        stage = bar.op.stage
        if bar.op.kind is Kind.ENCODER_BACKWARD:
            stage = len(plan.encoders[bar.op.encoder].backward_ns) - 1 - stage
        key = bar.op.is_encoder, bar.op.encoder, stage, bar.op.microbatch, bar.device
        start_ns, end_ns = spans.get(key, (bar.start_ns, bar.end_ns))
        spans[key] = min(start_ns, bar.start_ns), max(end_ns, bar.end_ns)
    for (is_encoder, index, stage, _, device), (start_ns, end_ns) in spans.items():
        if is_encoder:
            held[device].append((start_ns, end_ns, footprint.encoder_activation_bytes[index]))
        else:
            for column in range(device, plan.num_devices, ranks):
                held[column].append((start_ns, end_ns, footprint.stage_activation_bytes[stage]))
    return tuple(fixed[device] + peak_of(intervals) for device, intervals in enumerate(held))


def peak_live(plan: FilledPlan) -> tuple[tuple[int, ...], ...]:
    """Return, by encoder and replica, the most micro-batches that are live at a time, as `Encoder.max_live` counts."""
    held: list[list[list[Interval]]] = [[[] for _ in encoder.replicas] for encoder in plan.encoders]
    for index, encoder in enumerate(plan.encoders):
        for microbatch, replica in enumerate(plan.replica_of[index]):
            held[index][replica].append((*live_span(plan, index, microbatch, is_frozen=encoder.is_frozen), 1))
    return tuple(tuple(map(peak_of, replicas)) for replicas in held)


def live_span(plan: FilledPlan, index: int, microbatch: int, *, is_frozen: bool) -> tuple[int, int]:
    """Return from when to when a micro-batch of an encoder is live."""
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
    """Return the largest sum of the values of intervals that contain one time; an end is not contained."""
    changes = sorted(change for start, end, value in intervals for change in ((start, 1, value), (end, 0, -value)))
    level = highest = 0
    for _, _, value in changes:
        level += value
        highest = max(highest, level)
    return highest
