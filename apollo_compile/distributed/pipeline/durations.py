"""Durations of the stages of a pipeline and of the segments of its encoders, and the plan from them.

    Samples of every rank -> medians_of(...) -> Durations.with_measured(...) -> plan_step(...) -> StepPlan

A rank takes samples of the pieces that it computes. The first step with a piece does not count, since it compiles and
allocates. Ranks gather their samples after a fixed number of steps. Steps are counted when they begin, so a rank with a
failed step takes part too, if it continues, and reports the failure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.simulate import end_of, orders_of, simulate
from apollo_compile.distributed.pipeline.values import Encoder, Kind, Op, PipelineSchedule, StageTimes
from apollo_compile.units import NS_PER_MS

NUM_COUNTED = 2
"""Number of measured steps, after the first step."""

GUESS_NS: Mapping[Kind, int] = {
    Kind.FORWARD: NS_PER_MS,
    Kind.BACKWARD: 2 * NS_PER_MS,
    Kind.ENCODER_FORWARD: NS_PER_MS,
    Kind.ENCODER_BACKWARD: 2 * NS_PER_MS,
}
"""Guessed durations until they are measured: equal for all stages and segments, a backward takes twice a forward."""

Orders = tuple[tuple[Op, ...], ...]
"""Operations of every device, in order."""


class Piece(NamedTuple):
    """Unit of timing: the forward or backward of a stage, or of a segment of an encoder."""

    kind: Kind
    number: int
    """Stage of the pipeline, or segment of the encoder in the order of its forward."""
    encoder: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """Durations for one micro-batch, in nanoseconds."""

    times: StageTimes
    """Durations of the stages."""
    forward_ns: tuple[tuple[int, ...], ...]
    """Durations of forwards, by encoder and segment."""
    backward_ns: tuple[tuple[int, ...], ...]
    """Durations of backwards, by encoder and segment, in the order of `forward_ns`; empty for a frozen encoder."""

    def with_measured(self, found: Mapping[Piece, int]) -> Durations:
        """Return these durations with measured ones replaced."""

        def of(kind: Kind, known: Sequence[int], encoder: int = 0) -> tuple[int, ...]:
            return tuple(found.get(Piece(kind, index, encoder), ns) for index, ns in enumerate(known))

        return Durations(
            times=replace(
                self.times,
                forward_ns=of(Kind.FORWARD, self.times.forward_ns),
                backward_ns=of(Kind.BACKWARD, self.times.backward_ns),
            ),
            forward_ns=tuple(of(Kind.ENCODER_FORWARD, row, index) for index, row in enumerate(self.forward_ns)),
            backward_ns=tuple(of(Kind.ENCODER_BACKWARD, row, index) for index, row in enumerate(self.backward_ns)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPrediction:
    """Predicted duration of a planned step, and the durations that it was planned with."""

    durations: Durations
    step_ns: int
    """Duration of a step, in nanoseconds."""
    plain_ns: int
    """Duration of a step without encoders, in nanoseconds."""
    hidden_share: float
    """Share of the encoder work that runs in bubbles, without making the step longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Operations of every rank in a step."""

    orders: Orders
    replica_of: tuple[tuple[int, ...], ...]
    """By encoder and micro-batch, the rank that computes it."""
    prediction: StepPrediction | None
    """Prediction; None if durations are guessed."""


def plan_step(
    schedule: PipelineSchedule, encoders: Sequence[Encoder], durations: Durations, *, known: Sequence[StepPlan] = ()
) -> StepPlan:
    """Return the plan of a step: the planner's, or a known plan if it is shorter in the simulation.

    Arguments:
        schedule: the pipeline.
        encoders: encoders of one stage; their durations are replaced.
        durations: durations to plan with.
        known: plans of the same pipeline and encoders. A plan for other durations can be better: if encoders take as
            long as stages, the planner adds pauses on more ranks than necessary.

    Raises:
        PipelinePlanError: an encoder does not fit the pipeline, or no order meets its limit of live micro-batches.
    """
    timed = [
        replace(encoder, forward_ns=(forward,), backward_ns=(backward[::-1],) if backward else ())
        for encoder, forward, backward in zip(encoders, durations.forward_ns, durations.backward_ns, strict=True)
    ]
    filled = fill(schedule, durations.times, timed)
    own = StepPlan(orders=orders_of(filled), replica_of=filled.replica_of, prediction=None)
    found: list[tuple[int, StepPlan]] = []
    for plan in (own, *known):
        bars = simulate(schedule, durations.times, orders=plan.orders, encoders=timed, replica_of=plan.replica_of)
        found.append((end_of(bars, durations.times), plan))
    step_ns, best = min(found, key=lambda item: item[0])
    prediction = StepPrediction(
        durations=durations,
        step_ns=step_ns,
        plain_ns=filled.plain_ns,
        hidden_share=replace(filled, step_ns=step_ns).hidden_share,
    )
    return replace(best, prediction=prediction)


class Samples:
    """Measurements of one rank in the first steps."""

    def __init__(self) -> None:
        self._found: dict[Piece, list[int]] = {}
        self._has_run: set[Piece] = set()
        self._num_begun = 0
        self._due = 1 + NUM_COUNTED
        self._is_open = False
        self._has_failed = False

    @property
    def is_due(self) -> bool:
        """Whether ranks gather samples now: after the counted steps, and then each time after twice as many."""
        return self._num_begun >= self._due

    def begin_step(self) -> None:
        """Count a step; the previous step has failed if it did not end."""
        self._has_failed |= self._is_open
        self._is_open = True
        self._num_begun += 1

    def end_step(self, spans: Iterable[tuple[Piece, int]]) -> None:
        """Add the (piece, nanoseconds) of a step, one per micro-batch."""
        self._is_open = False
        seen: set[Piece] = set()
        for piece, duration_ns in spans:
            seen.add(piece)
            if piece in self._has_run:
                self._found.setdefault(piece, []).append(duration_ns)
        self._has_run |= seen

    def take(self) -> dict[Piece, list[int]] | None:
        """Return all samples so far, or None if a step has failed since the last call."""
        has_failed = self._has_failed or self._is_open
        self._has_failed = self._is_open = False
        self._due *= 2
        return None if has_failed else self._found


def medians_of(
    by_rank: Sequence[Mapping[Piece, Sequence[int]] | None], wanted: Iterable[Piece]
) -> dict[Piece, int] | None:
    """Return the median of every wanted piece over micro-batches, steps and ranks, in nanoseconds, at least 1.

    None if a step has failed on a rank, or no rank has computed a piece twice. Of two middle samples the lower one is
    taken, since disturbances only make samples longer.
    """
    present = [samples for samples in by_rank if samples is not None]
    if len(present) < len(by_rank):
        return None
    pooled = {piece: [ns for samples in present for ns in samples.get(piece, ())] for piece in wanted}
    if not all(pooled.values()):
        return None
    return {piece: max(1, statistics.median_low(found)) for piece, found in pooled.items()}
