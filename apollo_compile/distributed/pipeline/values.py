"""Values of a pipeline: its operations, schedule and durations, its encoders, and the plan of one step.

A pipeline has `num_ranks` ranks and `num_stages` stages; stage s runs on rank s % num_ranks. An encoder has replicas,
each of which computes whole micro-batches on one device or on several in turn. A device is a column of a rank: where
tensor parallelism splits a stage over eight devices and an encoder over four, a rank has two columns. Device d belongs
to rank d % num_ranks. Times are nanoseconds from the start of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """Kinds of operations."""

    FORWARD = "F"
    BACKWARD = "B"
    ENCODER_FORWARD = "EF"
    ENCODER_BACKWARD = "EB"


class Op(NamedTuple):
    """One operation: a stage of the pipeline, or a segment of an encoder, for one micro-batch."""

    kind: Kind
    microbatch: int
    stage: int = 0
    """Stage of the pipeline, or of the encoder."""
    encoder: int = 0
    segment: int = 0

    @property
    def is_encoder(self) -> bool:
        """Whether the operation belongs to an encoder."""
        return self.kind in (Kind.ENCODER_FORWARD, Kind.ENCODER_BACKWARD)

    def __str__(self) -> str:
        """Return for example `2F5`, stage 2 of micro-batch 5, or `EF5 of encoder 0, stage 0, segment 1`."""
        if self.is_encoder:
            place = f"encoder {self.encoder}, stage {self.stage}, segment {self.segment}"
            return f"{self.kind.value}{self.microbatch} of {place}"
        return f"{self.stage}{self.kind.value}{self.microbatch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSchedule:
    """Order in which the ranks of a pipeline compute their stages."""

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    orders: tuple[tuple[Op, ...], ...]
    """Operations of every rank, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Durations of the stages of a pipeline for one micro-batch."""

    forward_ns: tuple[int, ...]
    """Forward by stage."""
    backward_ns: tuple[int, ...]
    transfer_ns: int = 0
    """Transfer of activations, gradients or features between ranks."""
    lead_ns: int = 0
    """Idle time of all devices before the first forward, while data parallelism gathers parameters."""
    trail_ns: int = 0
    """Idle time after the last backward, while data parallelism reduces gradients."""

    def duration_ns(self, op: Op) -> int:
        """Return the duration of an operation of the pipeline."""
        return (self.forward_ns if op.kind is Kind.FORWARD else self.backward_ns)[op.stage]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """An encoder of a pipeline, with its stages and replicas."""

    name: str
    forward_ns: tuple[tuple[int, ...], ...]
    """Durations of its segments for one micro-batch, by stage of the encoder. A segment is never interrupted."""
    backward_ns: tuple[tuple[int, ...], ...] = ()
    """Durations of the backward, in the order in which it runs, the last stage first; empty for a frozen encoder."""
    replicas: tuple[tuple[int, ...], ...]
    """By replica, the device of every stage of the encoder."""
    feeds: int = 0
    """Stage of the pipeline that reads the features."""
    max_live: int | None = None
    """Limit of live micro-batches per replica: from the start of the encoder's forward to the end of its backward, or,
    for a frozen encoder, to the start of the forward that reads the features."""

    @property
    def is_frozen(self) -> bool:
        """Whether it has no backward."""
        return not self.backward_ns

    @property
    def work_ns(self) -> int:
        """Sum of the times of all devices for one micro-batch."""
        return sum(map(sum, self.forward_ns)) + sum(map(sum, self.backward_ns))


class Bar(NamedTuple):
    """Interval of an operation; for encoders, of `num_segments` consecutive segments."""

    op: Op
    device: int
    start_ns: int
    end_ns: int
    num_segments: int = 1


class Pause(NamedTuple):
    """Delay of all operations of the pipeline that would start at `at_ns` or later without pauses."""

    at_ns: int
    duration_ns: int


class Filling(Enum):
    """Ways to place encoder work."""

    COARSE = "coarse"
    """On every rank, all forwards before the pipeline begins and all backwards after it has ended."""
    FINE = "fine"
    """Forwards and backwards in all bubbles; the pipeline pauses where bubbles are too short."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilledPlan:
    """One step of a pipeline with encoders, on every device."""

    filling: Filling
    schedule: PipelineSchedule
    times: StageTimes
    encoders: tuple[Encoder, ...]
    replica_of: tuple[tuple[int, ...], ...]
    """Replica by encoder and micro-batch."""
    pauses: tuple[Pause, ...]
    bars: tuple[Bar, ...]
    """Bars of the pipeline, with ranks as devices, and of the encoders, by device and start."""
    plain_ns: int
    """Duration of a step without encoders."""
    step_ns: int

    @property
    def num_devices(self) -> int:
        """Number of devices: columns times ranks."""
        return count_devices(self.schedule, self.encoders)

    @property
    def work_ns(self) -> int:
        """Encoder work of the step, summed over devices."""
        return self.schedule.num_microbatches * sum(encoder.work_ns for encoder in self.encoders)

    @property
    def hidden_share(self) -> float:
        """Share of the encoder work that does not make the step longer; 1 without encoders."""
        if not self.work_ns:
            return 1.0
        return max(0.0, 1 - (self.step_ns - self.plain_ns) * self.num_devices / self.work_ns)

    def peak_live(self) -> tuple[tuple[int, ...], ...]:
        """Return, by encoder and replica, the peak of live micro-batches, counted as for `Encoder.max_live`."""
        found = []
        for index, encoder in enumerate(self.encoders):
            changes: list[list[tuple[int, int]]] = [[] for _ in encoder.replicas]
            for microbatch, replica in enumerate(self.replica_of[index]):
                bars = [bar for bar in self.bars if bar.op.microbatch == microbatch]
                own = [bar for bar in bars if bar.op.is_encoder and bar.op.encoder == index]
                end_ns = max(bar.end_ns for bar in own)
                if encoder.is_frozen:
                    read = Op(Kind.FORWARD, microbatch, encoder.feeds)
                    end_ns = next(bar.start_ns for bar in bars if bar.op == read)
                changes[replica] += [(min(bar.start_ns for bar in own), 1), (end_ns, -1)]
            found.append(
                tuple(max(itertools.accumulate(step for _, step in sorted(each)), default=0) for each in changes)
            )
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSteps:
    """Steps of one pipeline, without encoders and with their work placed in two ways."""

    title: str
    plain: FilledPlan
    coarse: FilledPlan | None
    """Step with coarse filling; None if it exceeds a limit of live micro-batches."""
    fine: FilledPlan

    @property
    def by_name(self) -> dict[str, FilledPlan]:
        """Steps by name, in display order."""
        steps = {"without encoders": self.plain, "coarse": self.coarse, "fine": self.fine}
        return {name: plan for name, plan in steps.items() if plan is not None}


def count_devices(schedule: PipelineSchedule, encoders: Iterable[Encoder]) -> int:
    """Return the number of devices: the columns that the encoders need, times ranks."""
    ranks = schedule.num_ranks
    used = [device for encoder in encoders for replica in encoder.replicas for device in replica]
    return ranks * (max(used, default=0) // ranks + 1)


def one_replica_per_rank(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the replicas of an encoder with a whole replica on every rank."""
    return tuple((rank,) for rank in range(num_ranks))
