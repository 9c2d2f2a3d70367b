"""Read the pipeline that `apollo pipeline simulate` simulates: `read_steps`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.schedules import ScheduleName, make_schedule
from apollo_compile.distributed.pipeline.values import Encoder, Filling, PipelineSteps, StageTimes
from apollo_compile.errors import PipelinePlanError
from apollo_compile.json_form import from_json, parse


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineCase:
    """A pipeline with encoders, as a file describes it."""

    schedule: ScheduleName = "1f1b"
    num_ranks: int
    stages_per_rank: int = 1
    num_microbatches: int
    times: StageTimes
    encoders: tuple[Encoder, ...]

    def fill(self, title: str) -> PipelineSteps:
        """Return its steps; raises `PipelinePlanError` if it cannot be filled."""
        times = self.times
        schedule = make_schedule(self.schedule, self.num_ranks, self.stages_per_rank, self.num_microbatches, times)
        try:
            coarse = fill(schedule, times, self.encoders, filling=Filling.COARSE)
        except PipelinePlanError:
            coarse = None
        fine = fill(schedule, times, self.encoders)
        return PipelineSteps(title=title, plain=fill(schedule, times, ()), coarse=coarse, fine=fine)


def read_steps(path: Path) -> PipelineSteps:
    """Return the steps of the pipeline that a JSON file describes.

    Raises:
        PipelinePlanError: the file does not describe a pipeline that can be filled.
        OSError: it cannot be read.
    """
    try:
        case = from_json(PipelineCase, parse(path.read_text(encoding="utf-8")), place="")
    except ValueError as error:
        raise PipelinePlanError(f"{path} does not describe a pipeline: {error}") from error
    return case.fill(path.stem)
