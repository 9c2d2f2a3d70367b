"""`apollo pipeline simulate`: simulate the steps of a pipeline that a file describes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.schedules import ScheduleName, make_schedule
from apollo_compile.distributed.pipeline.text import format_steps
from apollo_compile.distributed.pipeline.values import Encoder, Filling, PipelineSteps, StageTimes
from apollo_compile.errors import PipelinePlanError
from apollo_compile.json_form import from_json, parse, to_json


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Result of the command."""

    steps: PipelineSteps
    """Steps, for the page and the trace."""
    text: str
    facts: dict[str, Any]
    """Numbers, for JSON."""


def simulate_file(path: Path) -> Simulation:
    """Return the simulation of the pipeline that a JSON file describes.

    Raises:
        PipelinePlanError: the file does not describe a pipeline that can be filled.
        OSError: it cannot be read.
    """
    try:
        case = from_json(PipelineCase, parse(path.read_text(encoding="utf-8")), place="")
    except ValueError as error:
        raise PipelinePlanError(f"{path} does not describe a pipeline: {error}") from error
    steps = case.fill(path.stem)
    facts = {
        name: {
            "step_ns": plan.step_ns,
            "hidden_share": plan.hidden_share,
            "live": plan.peak_live(),
            "replica_of": plan.replica_of,
            "pauses": [pause._asdict() for pause in plan.pauses],
        }
        for name, plan in steps.by_name.items()
    }
    return Simulation(steps=steps, text=format_steps(steps), facts=to_json(facts))
