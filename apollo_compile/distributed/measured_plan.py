"""Plan a pipeline from measurements of its ranks in their first steps.

    measured = MeasuredPlan(...);  measured.begin_step();  measured.end_step() -> StepPlan | None

Every rank times its own stages and segments with `measured.watch`. After enough steps, the first rank gathers the
samples and plans, and broadcasts its plan, so that all ranks switch at the same step.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist

from apollo_compile.distributed.link import tell
from apollo_compile.distributed.pipeline.durations import Durations, Piece, Samples, StepPlan, medians_of, plan_step
from apollo_compile.distributed.pipeline.text import format_prediction
from apollo_compile.distributed.pipeline.values import Encoder, Kind, PipelineSchedule
from apollo_compile.errors import PipelinePlanError
from apollo_compile.torch_bridge.pipelining import Operation
from apollo_compile.torch_bridge.stopwatch import Stopwatch

_logger = logging.getLogger(__name__)


class MeasuredPlan:
    """Measures durations, and makes the plan from them.

    Arguments:
        schedule: the pipeline.
        encoders: encoders in the form of the planner.
        durations: given durations, with guesses for the pieces to measure.
        wanted: pieces to measure.
        first: plan until the measurement ends.
        group: process group of all ranks.
        device: device of this rank's stages.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        encoders: Sequence[Encoder],
        durations: Durations,
        *,
        wanted: frozenset[Piece],
        first: StepPlan,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.watch = Stopwatch(device)
        """Stopwatch whose keys are operations of the pipeline and pieces of encoders."""
        self._schedule = schedule
        self._encoders = encoders
        self._durations = durations
        self._wanted = wanted
        self._first = first
        self._group = group
        self._samples = Samples()

    def begin_step(self) -> None:
        """Begin to measure a step."""
        if self._samples.is_due:  # the previous step failed on this rank, and other ranks may wait after it
            self._settle()
        self.watch.clear()
        self._samples.begin_step()

    def end_step(self) -> StepPlan | None:
        """Return the plan for the next steps of all ranks, which ends the measurement; None if it continues."""
        self._samples.end_step((_piece_of(key), duration_ns) for key, duration_ns in self.watch.read())
        return self._settle() if self._samples.is_due else None

    def _settle(self) -> StepPlan | None:
        """Gather samples, and return the plan of the first rank; None if samples are missing."""
        samples = self._samples.take()
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        everyone: list[dict[Piece, list[int]] | None] = [None] * size
        dist.gather_object(samples, everyone if rank == 0 else None, group=self._group, group_dst=0)
        plan: StepPlan | None = tell(lambda: self._plan(everyone), self._group)
        return plan

    def _plan(self, by_rank: Sequence[dict[Piece, list[int]] | None]) -> StepPlan | None:
        found = medians_of(by_rank, self._wanted)
        if found is None:
            _logger.info("bubbles: the guessed plan is kept for now: a step failed, or a piece has not run twice yet")
            return None
        try:
            durations = self._durations.with_measured(found)
            plan = plan_step(self._schedule, self._encoders, durations, known=[self._first])
        except PipelinePlanError as error:
            _logger.warning("bubbles: the guessed plan is kept: there is no plan with measured durations: %s", error)
            return self._first
        if plan.prediction is not None:
            names = [encoder.name for encoder in self._encoders]
            _logger.info("bubbles: measured %s", format_prediction(plan.prediction, names))
        return plan


def _piece_of(key: Hashable) -> Piece:
    """Return the piece of a key of the stopwatch."""
    if isinstance(key, Operation):
        return Piece(Kind.FORWARD if key.is_forward else Kind.BACKWARD, key.stage)
    assert isinstance(key, Piece)
    return key
