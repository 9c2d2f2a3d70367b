"""Steps of pipelines as text.

format_steps(steps), format_prediction(prediction, names) -> str
"""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from apollo_compile.distributed.pipeline.durations import StepPrediction
from apollo_compile.distributed.pipeline.values import FilledPlan, PipelineSteps
from apollo_compile.units import format_ns


def format_steps(steps: PipelineSteps) -> str:
    """Return a table with a row per way of filling."""
    rows = [
        (
            name,
            format_ns(plan.step_ns),
            "" if plan is steps.plain else f"+{format_ns(plan.step_ns - plan.plain_ns)}",
            f"{plan.hidden_share:.1%}" if plan.encoders else "",
            _format_live(plan),
            len(plan.pauses) if plan.encoders else "",
        )
        for name, plan in steps.by_name.items()
    ]
    table: str = tabulate(
        rows,
        headers=("encoder work", "step", "longer by", "hidden", "live micro-batches", "pauses"),
        colalign=("left", "right", "right", "right", "right", "right"),
        disable_numparse=True,
    )
    schedule = steps.plain.schedule
    lines = [
        f"{steps.title}: {schedule.name}, {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} micro-batches",
        table,
    ]
    if steps.coarse is None:
        lines.append("coarse: not possible, since it exceeds max_live, the limit of live micro-batches")
    return "\n".join(lines)


def _format_live(plan: FilledPlan) -> str:
    """Return the most live micro-batches of a replica, by encoder."""
    return ", ".join(
        f"{encoder.name} {max(live)}" for encoder, live in zip(plan.encoders, plan.peak_live(), strict=True)
    )


def format_prediction(prediction: StepPrediction, names: Sequence[str]) -> str:
    """Return the durations and the predicted step of a plan, on one line.

    Arguments:
        prediction: prediction of the plan.
        names: names of the encoders.
    """
    durations, times = prediction.durations, prediction.durations.times
    stages = f"stages {_format_range(times.forward_ns)} forward, {_format_range(times.backward_ns)} backward"
    encoders = (
        f"{name} {format_ns(sum(forward))} forward" + (f", {format_ns(sum(backward))} backward" if backward else "")
        for name, forward, backward in zip(names, durations.forward_ns, durations.backward_ns, strict=True)
    )
    return (
        f"{'; '.join([stages, *encoders])}; steps are predicted to take {format_ns(prediction.step_ns)}, "
        f"{format_ns(prediction.plain_ns)} without encoders, with {prediction.hidden_share:.0%} of the encoder work "
        "in bubbles"
    )


def _format_range(durations: Sequence[int]) -> str:
    """Return the range of durations as text."""
    least, most = format_ns(min(durations)), format_ns(max(durations))
    return least if least == most else f"{least} to {most}"
