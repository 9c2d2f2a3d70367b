"""`apollo pipeline simulate`: simulate the steps of a pipeline that a file describes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apollo_compile.distributed.pipeline.case import fill_case, read_case
from apollo_compile.distributed.pipeline.text import format_steps
from apollo_compile.distributed.pipeline.values import PipelineSteps
from apollo_compile.errors import PipelinePlanError
from apollo_compile.json_form import parse, to_json


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
        case = read_case(parse(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise PipelinePlanError(f"{path} does not describe a pipeline: {error}") from error
    steps = fill_case(case, path.stem)
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
