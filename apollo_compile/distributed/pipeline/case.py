"""A pipeline with encoders, described by a file, and its steps before and after filling.

read_case(json) -> PipelineCase;  fill_case(case) -> PipelineSteps
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.schedules import gpipe, interleaved, one_forward_one_backward
from apollo_compile.distributed.pipeline.values import Encoder, Filling, PipelineSteps, Schedule, StageTimes
from apollo_compile.errors import PipelinePlanError
from apollo_compile.json_form import from_json


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineCase:
    """A pipeline with encoders."""

    schedule: Literal["1f1b", "gpipe", "interleaved 1f1b"] = "1f1b"
    num_ranks: int
    stages_per_rank: int = 1
    num_microbatches: int
    times: StageTimes
    encoders: tuple[Encoder, ...]


def read_case(value: Any) -> PipelineCase:
    """Return the case that a JSON value describes, with the fields of `PipelineCase`.

    Raises:
        ValueError: a field is missing, unknown or of another type; the message names its place.
    """
    return from_json(PipelineCase, value, place="")


def make_schedule(case: PipelineCase) -> Schedule:
    """Return the schedule of a case.

    Raises:
        PipelinePlanError: there is no such schedule, or the durations do not match its stages.
    """
    if case.schedule == "interleaved 1f1b":
        schedule = interleaved(case.num_ranks, case.stages_per_rank, case.num_microbatches)
    elif case.stages_per_rank != 1:
        raise PipelinePlanError(
            f"{case.schedule} has one stage per rank, got {case.stages_per_rank}; use 'interleaved 1f1b'"
        )
    else:
        make = gpipe if case.schedule == "gpipe" else one_forward_one_backward
        schedule = make(case.num_ranks, case.num_microbatches)
    for name, durations in (("forward_ns", case.times.forward_ns), ("backward_ns", case.times.backward_ns)):
        if len(durations) != schedule.num_stages:
            raise PipelinePlanError(
                f"times.{name} has {len(durations)} durations, but there are {schedule.num_stages} stages "
                f"({case.num_ranks} ranks of {case.stages_per_rank}); give one per stage"
            )
    return schedule


def fill_case(case: PipelineCase, title: str) -> PipelineSteps:
    """Return the steps of a case.

    Raises:
        PipelinePlanError: the pipeline cannot be filled; the message has the reason.
    """
    schedule = make_schedule(case)
    try:
        coarse = fill(schedule, case.times, case.encoders, filling=Filling.COARSE)
    except PipelinePlanError:
        coarse = None
    fine = fill(schedule, case.times, case.encoders)
    return PipelineSteps(title=title, plain=fill(schedule, case.times, ()), coarse=coarse, fine=fine)
