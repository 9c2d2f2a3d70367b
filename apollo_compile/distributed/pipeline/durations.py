"""How long the stages of a pipeline and the segments of its encoders take, and the plan that follows from it.

    Samples of every rank -> medians_of(...) -> Durations.with_measured(...) -> plan_step(...) -> StepPlan

A rank takes samples of what it computes. The first step in which it computes a piece is not counted: that step compiles
and allocates. Ranks compare what they have after a step whose number all of them know. They count steps that began, so
a rank on which one failed takes part as well, if it goes on, and says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.simulate import end_of, orders_of, simulate
from apollo_compile.distributed.pipeline.values import Encoder, Kind, Op, Schedule, StageTimes
from apollo_compile.units import NS_PER_MS

NUM_COUNTED = 2
"""Steps that are measured, after the first one."""

GUESS_NS: Mapping[Kind, int] = {
    Kind.FORWARD: NS_PER_MS,
    Kind.BACKWARD: 2 * NS_PER_MS,
    Kind.ENCODER_FORWARD: NS_PER_MS,
    Kind.ENCODER_BACKWARD: 2 * NS_PER_MS,
}
"""Durations until they are measured: all stages and segments alike, a backward twice a forward."""

Orders = tuple[tuple[Op, ...], ...]
"""Operations of every device, in order."""


class Piece(NamedTuple):
    """What is timed: the forward or backward of a stage, or of a segment of an encoder."""

    kind: Kind
    number: int
    """Stage of the pipeline, or segment of the encoder in the order of its forward."""
    encoder: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """How long one micro-batch takes, in nanoseconds."""

    times: StageTimes
    """Of the stages."""
    forward_ns: tuple[tuple[int, ...], ...]
    """By encoder and segment."""
    backward_ns: tuple[tuple[int, ...], ...]
    """By encoder and segment, in the order of `forward_ns`; empty where nothing is trained."""

    def with_measured(self, found: Mapping[Piece, int]) -> Durations:
        """Return these durations with those that were measured in their place."""

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
class Prediction:
    """What a plan was made from, and what it promises."""

    durations: Durations
    step_ns: int
    """Duration of a step, in nanoseconds."""
    plain_ns: int
    """The same without encoders."""
    hidden_share: float
    """Share of the encoder work that is in bubbles: that does not make the step longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """What every rank does in a step."""

    orders: Orders
    replica_of: tuple[tuple[int, ...], ...]
    """By encoder and micro-batch, the rank that computes it."""
    prediction: Prediction | None
    """None: durations are guessed, or the orders were given."""


def plan_step(
    schedule: Schedule, encoders: Sequence[Encoder], durations: Durations, *, known: Sequence[StepPlan] = ()
) -> StepPlan:
    """Return the plan of a step: the planner's, or a known one if the simulation says that it is shorter.

    Arguments:
        schedule: the pipeline.
        encoders: encoders of one stage; their durations are replaced.
        durations: what to plan with.
        known: plans of the same pipeline and encoders. A plan for other durations can be better: where encoders take as
            long as stages, the planner lets all ranks pause, and more of them than have to.

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
    prediction = Prediction(
        durations=durations,
        step_ns=step_ns,
        plain_ns=filled.plain_ns,
        hidden_share=replace(filled, step_ns=step_ns).hidden_share,
    )
    return replace(best, prediction=prediction)


class Samples:
    """What one rank measures in the first steps."""

    def __init__(self) -> None:
        self._found: dict[Piece, list[int]] = {}
        self._has_run: set[Piece] = set()
        self._num_begun = 0
        self._due = 1 + NUM_COUNTED
        self._is_open = False
        self._has_failed = False

    @property
    def is_due(self) -> bool:
        """Whether ranks compare now: after as many steps as are counted, and after twice as many each time."""
        return self._num_begun >= self._due

    def begin_step(self) -> None:
        """Count a step; the one before has failed if it did not end."""
        self._has_failed |= self._is_open
        self._is_open = True
        self._num_begun += 1

    def end_step(self, spans: Iterable[tuple[Piece, int]]) -> None:
        """Add what was measured in a step: pieces and nanoseconds, one for every micro-batch."""
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

    None if it is missing: a step has failed on a rank, or nobody has computed a piece twice. Of two middle samples the
    lower one is taken: a rank can be kept from computing, never made faster.
    """
    present = [samples for samples in by_rank if samples is not None]
    if len(present) < len(by_rank):
        return None
    pooled = {piece: [ns for samples in present for ns in samples.get(piece, ())] for piece in wanted}
    if not all(pooled.values()):
        return None
    return {piece: max(1, statistics.median_low(found)) for piece, found in pooled.items()}
