"""Steps of a pipeline before and after filling, as a page and as a trace for Perfetto.

    PipelineSteps -> str;  PipelineSteps -> {"traceEvents": [...], ...}

Ranks are rows of the page and tracks of the trace; where an encoder is split over fewer devices than a stage, every
column of a rank has a row. The page merges consecutive short bars into one block, so that its size is bounded. The
trace has every operation, every run of encoder segments (nested in an operation, if it runs inside one), every
remaining bubble, and a counter of idle devices. Note [traces for Perfetto] of
`reports/render_trace.py` applies here too.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any, NamedTuple

import jinja2

from apollo_compile.distributed.pipeline.bubbles import bubbles_of
from apollo_compile.distributed.pipeline.values import Bar, FilledPlan, Kind, PipelineSteps
from apollo_compile.reports.colors import COLORS
from apollo_compile.reports.render_html import ROW, make_ticks, percent_of, read_asset
from apollo_compile.reports.render_trace import counter_events, name_tracks, slice_event
from apollo_compile.units import format_ns

MAX_BLOCKS = 1500
"""Approximate limit of bars of one step on a page; with more, short bars are merged."""

COARSEST = 250
"""Number of blocks that fit into the width of a page."""


class Look(NamedTuple):
    """Label and colour of one kind of work."""

    label: str
    color: str


LOOKS = (
    Look("forward", COLORS[0]),
    Look("backward", COLORS[5]),
    Look("forwards and backwards", COLORS[3]),
    Look("encoder forward", COLORS[1]),
    Look("encoder backward", COLORS[4]),
)
_MIXED = 2
_LOOK = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.ENCODER_FORWARD: 3, Kind.ENCODER_BACKWARD: 4}


def render_html(steps: PipelineSteps) -> str:
    """Return the page; it needs no network and no other file."""
    plans = list(steps.by_name.values())
    return _template().render(
        steps=steps,
        schedule=steps.plain.schedule,
        span=max(plan.step_ns for plan in plans),
        is_merged=any(_is_large(plan) for plan in plans),
        css=read_asset("page.css"),
        js=read_asset("page.js"),
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(ns=format_ns)
    environment.globals.update(
        ROW=ROW,
        MIXED=LOOKS[_MIXED],
        blocks=make_blocks,
        device_rows=device_rows,
        idle_share=idle_share,
        label=label_of,
        looks=LOOKS,
        ticks=make_ticks,
        where=percent_of,
    )
    return environment.from_string(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))


def label_of(plan: FilledPlan, device: int) -> str:
    """Return the name of a device."""
    ranks = plan.schedule.num_ranks
    column = f", column {device // ranks}" if plan.num_devices > ranks else ""
    return f"rank {device % ranks}{column}"


def bars_by_device(plan: FilledPlan) -> list[list[Bar]]:
    """Return the bars of every device by start; operations of the pipeline are on every column of their rank."""
    found: list[list[Bar]] = [[] for _ in range(plan.num_devices)]
    for bar in plan.bars:
        columns = [bar.device] if bar.op.is_encoder else range(bar.device, plan.num_devices, plan.schedule.num_ranks)
        for device in columns:
            found[device].append(bar)
    return [sorted(bars, key=lambda bar: (bar.start_ns, -bar.end_ns)) for bars in found]


def idle_share(plan: FilledPlan) -> float:
    """Return the share of bubbles in the time of all devices, 0 to 1."""
    idle_ns = sum(row.bubble_ns for row in device_rows(plan))
    return idle_ns / (plan.step_ns * plan.num_devices)


class DeviceRow(NamedTuple):
    """Time of a device in a step, by kind of work."""

    label: str
    pipeline_ns: int
    forward_ns: int
    backward_ns: int
    bubble_ns: int


def device_rows(plan: FilledPlan) -> list[DeviceRow]:
    """Return the time of every device by kind of work."""
    bubbles = bubbles_of(plan.bars, plan.num_devices, plan.schedule.num_ranks, plan.step_ns)
    rows = []
    for device, bars in enumerate(bars_by_device(plan)):
        spent: dict[Kind, int] = defaultdict(int)
        for bar in bars:
            spent[bar.op.kind] += bar.end_ns - bar.start_ns
        rows.append(
            DeviceRow(
                label_of(plan, device),
                spent[Kind.FORWARD] + spent[Kind.BACKWARD],
                spent[Kind.ENCODER_FORWARD],
                spent[Kind.ENCODER_BACKWARD],
                sum(end_ns - start_ns for start_ns, end_ns in bubbles[device]),
            )
        )
    return rows


# ------------------------------------------------------------------------------------------------------------- the page


class Block(NamedTuple):
    """One bar on the page: an operation, or several short operations."""

    device: int
    start_ns: int
    end_ns: int
    look: int
    name: str
    detail: str
    key: str
    """Equal for the same operation in other steps."""


def make_blocks(plan: FilledPlan) -> Iterator[Block]:
    """Yield the blocks of a step, with short bars merged."""
    least_ns = plan.step_ns // COARSEST if _is_large(plan) else 0
    for device, bars in enumerate(bars_by_device(plan)):
        group: list[Bar] = []
        for bar in bars:
            if group and bar.op.is_encoder and bar.end_ns <= group[-1].end_ns:
                continue  # inside an operation
            is_near = group and bar.start_ns - group[-1].end_ns < least_ns
            is_short = bar.end_ns - bar.start_ns < least_ns
            if not (is_near and is_short and bar.op.is_encoder == group[-1].op.is_encoder):
                if group:
                    yield _block(plan, device, group)
                group = []
            group.append(bar)
        if group:
            yield _block(plan, device, group)


def _is_large(plan: FilledPlan) -> bool:
    return len(plan.bars) > MAX_BLOCKS


def _block(plan: FilledPlan, device: int, group: Sequence[Bar]) -> Block:
    looks = {_LOOK[bar.op.kind] for bar in group}
    first = group[0]
    look = looks.pop() if len(looks) == 1 else _MIXED
    name = detail = _name(plan, first)
    if len(group) > 1:
        name = detail = f"{len(group)} operations, {name} to {_name(plan, group[-1])}"
    return Block(device, first.start_ns, group[-1].end_ns, look, name, detail, f"{device} {first.op}")


def _name(plan: FilledPlan, bar: Bar) -> str:
    """Return a short name: `2F5`, or `EF5 vision`."""
    if bar.op.is_encoder:
        return f"{bar.op.kind.value}{bar.op.microbatch} {plan.encoders[bar.op.encoder].name}"
    return str(bar.op)


# ------------------------------------------------------------------------------------------------------------ the trace


def render_trace(steps: PipelineSteps) -> dict[str, Any]:
    """Return the trace as plain data."""
    events: list[dict[str, Any]] = []
    for process, (name, plan) in enumerate(steps.by_name.items(), 1):
        events += name_tracks(process, name, {device: label_of(plan, device) for device in range(plan.num_devices)})
        bubbles = bubbles_of(plan.bars, plan.num_devices, plan.schedule.num_ranks, plan.step_ns)
        for device, bars in enumerate(bars_by_device(plan)):
            events += [_slice(plan, process, device, bar) for bar in bars]
            for start_ns, end_ns in bubbles[device]:
                events.append(slice_event("bubble", "bubble", process, device, start_ns, end_ns))
        events += counter_events("devices", "idle", process, _idle_devices(bubbles))
    return {"traceEvents": events, "otherData": {"producer": "apollo_compile"}}


def _slice(plan: FilledPlan, process: int, device: int, bar: Bar) -> dict[str, Any]:
    event = slice_event(_name(plan, bar), LOOKS[_LOOK[bar.op.kind]].label, process, device, bar.start_ns, bar.end_ns)
    event["args"] = {"microbatch": bar.op.microbatch, "stage": bar.op.stage}
    if bar.op.is_encoder:
        event["args"] |= {"segment": bar.op.segment, "segments": bar.num_segments}
    return event


def _idle_devices(bubbles: Sequence[Sequence[tuple[int, int]]]) -> Iterator[tuple[int, int]]:
    """Yield the changes of the number of idle devices: (nanoseconds, devices)."""
    changes: dict[int, int] = defaultdict(int)
    for start_ns, end_ns in itertools.chain.from_iterable(bubbles):
        changes[start_ns] += 1
        changes[end_ns] -= 1
    times = sorted(changes)
    return zip(times, itertools.accumulate(changes[time_ns] for time_ns in times), strict=True)
