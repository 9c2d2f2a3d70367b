"""`apollo pipeline simulate`: the steps of a published pipeline, or of one that a file describes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apollo_compile.distributed.pipeline.case import fill_case, read_case
from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.memory import peak_live
from apollo_compile.distributed.pipeline.optimus import (
    PIPELINE_PARALLEL,
    SIZES,
    TENSOR_PARALLEL,
    compare,
    simulate_size,
)
from apollo_compile.distributed.pipeline.text import format_comparison, format_steps
from apollo_compile.distributed.pipeline.values import PipelineSteps
from apollo_compile.errors import PipelinePlanError
from apollo_compile.json_form import parse, to_json
from apollo_compile.units import format_ns, seconds_to_ns

PUBLISHED = "optimus-3072"


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """What the command shows."""

    steps: PipelineSteps
    """For pictures; of several sizes the largest."""
    text: str
    facts: dict[str, Any]


def simulate_source(source: str, *, progress: Callable[[str], None]) -> Simulation:
    """Return the simulation of a published pipeline by its name, or of a file's.

    Raises:
        PipelinePlanError: the file describes no pipeline that can be filled.
        OSError: it cannot be read.
    """
    if source == PUBLISHED:
        return _simulate_published(progress)
    path = Path(source)
    if not path.suffix and not path.exists():
        raise PipelinePlanError(f"{source} is neither a file nor a published pipeline; known: {PUBLISHED}")
    try:
        case = read_case(parse(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise PipelinePlanError(f"{source} describes no pipeline: {error}") from error
    steps = fill_case(case, path.stem)
    facts = {
        name: {
            "step_ns": plan.step_ns,
            "hidden_share": plan.hidden_share,
            "live": peak_live(plan),
            "replica_of": plan.replica_of,
            "pauses": [pause._asdict() for pause in plan.pauses],
        }
        for name, plan in steps.by_name.items()
    }
    return Simulation(steps=steps, text=format_steps(steps), facts=to_json(facts))


def _simulate_published(progress: Callable[[str], None]) -> Simulation:
    results = []
    begin = time.perf_counter()
    for size in SIZES:
        progress(f"filling bubbles of {size.num_gpus} GPUs")
        results.append(simulate_size(size))
    took = format_ns(seconds_to_ns(time.perf_counter() - begin))
    rows, last = compare(results), results[-1]
    plain = fill(last.fine.schedule, last.fine.times, ())
    title = f"{PUBLISHED}, one of {last.size.num_gpus // (PIPELINE_PARALLEL * TENSOR_PARALLEL)} pipelines"
    return Simulation(
        steps=PipelineSteps(title=title, plain=plain, coarse=last.coarse, fine=last.fine),
        text=f"{format_comparison(rows, results)}\nplanned in {took}",
        facts={"rows": [{**to_json(row), "is_within": row.is_within} for row in rows]},
    )
