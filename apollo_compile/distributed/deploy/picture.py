"""Deployments as pictures.

render_svg(deployment) -> str    devices as rows, time from left to right, shares of units as heights
render_dot(deployment) -> str    calls and what they read, for Graphviz
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from apollo_compile.ir.text import format_count
from apollo_compile.passes.deploy import Bar, Deployment, Group
from apollo_compile.reports.colors import COLORS
from apollo_compile.units import format_ns

WIDTH, LEFT, RIGHT, TOP = 960, 130, 36, 46
ROW, GAP = 44, 6
LETTER = 6.2
"""Width of a letter, about."""


class _Box(NamedTuple):
    bar: Bar
    offset: float
    """Share of a device's units below it."""
    height: float


def render_svg(plan: Deployment) -> str:
    """Return the picture; devices with the same modules are one row."""
    rows = _rows(plan)
    height = TOP + len(rows) * (ROW + GAP) + 30
    colors = {group.module: COLORS[index % len(COLORS)] for index, group in enumerate(plan.groups)}
    kind = "" if plan.cluster.is_measured else "simulated, "
    title = f"a step of {format_ns(plan.step_ns)} ({kind}at most {plan.gap:.1%} above the best possible)"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{LEFT + WIDTH + RIGHT}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for index, (label, groups) in enumerate(rows):
        top = TOP + index * (ROW + GAP)
        lines.append(f'<text x="{LEFT - 8}" y="{top + ROW / 2 + 4}" text-anchor="end">{escape(label)}</text>')
        lines.append(f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{ROW}" fill="#eeeeee"/>')
        lines += [_draw(plan, box, top, colors[box.bar.module]) for box in _boxes(plan, groups)]
    bottom = TOP + len(rows) * (ROW + GAP) + 12
    for tick in range(5):
        x, time_ns = LEFT + WIDTH * tick / 4, plan.step_ns * tick / 4
        lines.append(f'<text x="{x:.0f}" y="{bottom}" text-anchor="middle" fill="#555555">{format_ns(time_ns)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _rows(plan: Deployment) -> list[tuple[str, list[Group]]]:
    """Return label and groups of every row: consecutive devices with the same modules."""
    rows: list[tuple[int, int, list[Group]]] = []
    for device in range(plan.cluster.devices):
        groups = [group for group in plan.groups if group.first <= device < group.first + group.devices]
        if rows and rows[-1][2] == groups:
            rows[-1] = (rows[-1][0], device, groups)
        else:
            rows.append((device, device, groups))
    return [
        (f"device {first}" if first == last else f"devices {first} to {last}", groups) for first, last, groups in rows
    ]


def _boxes(plan: Deployment, groups: list[Group]) -> Iterator[_Box]:
    """Yield the bars of a row, side by side where they run at once."""
    units = {group.module: group.units for group in groups}
    placed: list[tuple[Bar, int]] = []
    for bar in plan.bars:
        if bar.module not in units:
            continue
        taken = sorted((offset, offset + units[o.module]) for o, offset in placed if o.end_ns > bar.start_ns)
        offset = 0
        for first, end in taken:
            if first - offset >= units[bar.module]:
                break
            offset = max(offset, end)
        placed.append((bar, offset))
        share = plan.cluster.units
        yield _Box(bar, min(offset, share - units[bar.module]) / share, units[bar.module] / share)


def _draw(plan: Deployment, box: _Box, top: float, color: str) -> str:
    bar = box.bar
    x = LEFT + WIDTH * bar.start_ns / plan.step_ns
    width = max(0.5, WIDTH * (bar.end_ns - bar.start_ns) / plan.step_ns)
    y, height = top + ROW * box.offset, ROW * box.height
    name = f"{bar.name}, {bar.kind}, {format_ns(bar.end_ns - bar.start_ns)}"
    opacity = {"forward": "1", "backward": "0.75", "sum": "0.4"}[bar.kind]
    text = ""
    letters = int(width / LETTER)
    if letters >= 4 and height >= 11:
        label = bar.name if len(bar.name) <= letters else f"{bar.name[: letters - 1]}…"
        text = f'<text x="{x + 3:.1f}" y="{y + height / 2 + 4:.1f}" font-size="11">{escape(label)}</text>'
    return (
        f'<g><title>{escape(name)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{color}" fill-opacity="{opacity}" stroke="#ffffff" stroke-width="0.5"/>{text}</g>'
    )


def render_dot(plan: Deployment) -> str:
    """Return a digraph: calls as boxes with their groups, and arrows for what they read."""
    groups = {group.module: group for group in plan.groups}
    colors = {group.module: COLORS[index % len(COLORS)] for index, group in enumerate(plan.groups)}
    lines = [
        "digraph deployment {",
        "  rankdir=LR;",
        '  node [shape=box, style="filled,rounded", fontname="sans-serif", fontsize=10];',
    ]
    number = {call.name: index for index, call in enumerate(plan.work.calls)}
    for call in plan.work.calls:
        group = groups[call.module]
        label = f"{call.name}\n{group}\n{format_count(group.units, 'unit')}"
        lines.append(f"  c{number[call.name]} [label={_quote(label)}, fillcolor={_quote(colors[call.module])}];")
    lines += [f"  c{number[name]} -> c{number[call.name]};" for call in plan.work.calls for name in call.inputs]
    return "\n".join([*lines, "}"]) + "\n"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
