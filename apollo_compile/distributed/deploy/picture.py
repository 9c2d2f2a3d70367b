"""Deployments as pictures: devices as rows, time from left to right, shares of units as heights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from html import escape

from apollo_compile.passes.deploy import Deployment, DeviceGroup, WorkInterval
from apollo_compile.reports.colors import COLORS
from apollo_compile.units import format_ns

WIDTH, LEFT, RIGHT, TOP = 960, 130, 36, 46
ROW, GAP = 44, 6
OPACITY = {"forward": 1, "backward": 0.75, "sum": 0.4}


def render_svg(plan: Deployment) -> str:
    """Return the picture; devices with the same modules are one row."""
    groups = [[group for group in plan.groups if device in group.range] for device in range(plan.cluster.devices)]
    rows = [list(row) for _, row in itertools.groupby(range(plan.cluster.devices), key=groups.__getitem__)]
    bottom = TOP + len(rows) * (ROW + GAP) + 12
    colors = {group.module: COLORS[index % len(COLORS)] for index, group in enumerate(plan.groups)}
    kind = "" if plan.cluster.is_measured else "simulated, "
    title = f"a step of {format_ns(plan.step_ns)} ({kind}at most {plan.gap:.1%} above the best possible)"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {bottom + 18}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for index, row in enumerate(rows):
        top = TOP + index * (ROW + GAP)
        label = DeviceGroup(module="", first=row[0], devices=len(row), units=0)
        lines.append(f'<text x="{LEFT - 8}" y="{top + ROW / 2 + 4}" text-anchor="end">{label}</text>')
        lines.append(f'<svg x="{LEFT}" y="{top}" width="{WIDTH}" height="{ROW}">')
        lines.append('<rect width="100%" height="100%" fill="#eeeeee"/>')
        for bar, below, share in _side_by_side(plan, groups[row[0]]):
            length_ns, division = bar.end_ns - bar.start_ns, next(g.kind for g in plan.groups if g.module == bar.module)
            x, width = bar.start_ns / plan.step_ns, length_ns / plan.step_ns
            lines.append(  # an inner picture cuts a name that is longer
                f'<svg x="{x:.2%}" y="{below:.2%}" width="{width:.2%}" height="{share:.2%}">'
                f"<title>{escape(f'{bar.name}, {bar.kind}, {format_ns(length_ns)}{division}')}</title>"
                f'<rect width="100%" height="100%" fill="{colors[bar.module]}" fill-opacity="{OPACITY[bar.kind]}" '
                f'stroke="#ffffff" stroke-width="0.5"/><text x="3" y="50%" dy="4">{escape(bar.name)}</text></svg>'
            )
        lines.append("</svg>")
    for tick in range(5):
        x, time_ns = LEFT + WIDTH * tick / 4, plan.step_ns * tick / 4
        lines.append(f'<text x="{x:.0f}" y="{bottom}" text-anchor="middle" fill="#555555">{format_ns(time_ns)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _side_by_side(plan: Deployment, groups: Sequence[DeviceGroup]) -> Iterator[tuple[WorkInterval, float, float]]:
    """Yield the bars of a row, each with the shares of a device's units below it and of its own."""
    units = {group.module: group.units for group in groups}
    placed: list[tuple[WorkInterval, int]] = []
    for bar in plan.bars:
        if bar.module not in units:
            continue
        offset = 0
        for first, end in sorted((first, first + units[o.module]) for o, first in placed if o.end_ns > bar.start_ns):
            if first - offset >= units[bar.module]:
                break
            offset = max(offset, end)
        placed.append((bar, offset))
        own, all_units = units[bar.module], plan.cluster.units
        yield bar, min(offset, all_units - own) / all_units, own / all_units
