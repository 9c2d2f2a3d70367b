"""Deployments as text.

format_deployment(deployment), format_difference(before, after) -> str
"""

from __future__ import annotations

from tabulate import tabulate

from apollo_compile.ir.text import format_count
from apollo_compile.passes.deploy import Deployment, Group
from apollo_compile.units import format_bytes, format_ns


def format_deployment(plan: Deployment) -> str:
    """Return a table with a row per module, and the step beside those of the baselines."""
    states = {module.name: module for module in plan.work.modules}
    rows = []
    for group in plan.groups:
        spent = {
            kind: sum(bar.end_ns - bar.start_ns for bar in plan.bars if (bar.module, bar.kind) == (group.module, kind))
            for kind in ("forward", "backward", "sum")
        }
        rows.append(
            (
                group.module,
                str(group),
                f"{group.units} of {plan.cluster.units}",
                *(format_ns(spent[kind]) if spent[kind] else "" for kind in spent),
                format_bytes(states[group.module].state_bytes),
            )
        )
    table: str = tabulate(
        rows,
        headers=("module", "runs on", "units", "forward", "backward", "sum, update", "state"),
        colalign=("left", "left", "right", "right", "right", "right", "right"),
        disable_numparse=True,
    )
    cluster = plan.cluster
    source = "times measured" if cluster.is_measured else "simulated"
    lines = [
        f"deployment on {format_count(cluster.devices, 'device')} of {format_count(cluster.units, 'unit')}, {source}: "
        f"a step is predicted to take {format_ns(plan.step_ns)}, at most {plan.gap:.1%} above the best possible",
        table,
        f"most memory of a device: {format_bytes(max(plan.memory_bytes))}"
        + ("" if cluster.memory_bytes is None else f" of {format_bytes(cluster.memory_bytes)}"),
    ]
    for baseline in plan.baselines:
        ratio = baseline.step_ns / plan.step_ns if plan.step_ns else 1.0
        memory = "" if baseline.keeps_memory else ", which exceeds the memory"
        lines.append(f"{baseline.name}: {format_ns(baseline.step_ns)}, {ratio:.2f} times as long{memory}")
    return "\n".join(lines)


def format_difference(before: Deployment, after: Deployment) -> str:
    """Return the modules whose groups differ, and steps and memory of both."""
    old, new = ({group.module: group for group in plan.groups} for plan in (before, after))
    lines = [f"{name}: only in the first" for name in old if name not in new]
    lines += [f"{name}: only in the second" for name in new if name not in old]
    lines += [
        f"{name}: {_place(old[name])} -> {_place(new[name])}"
        for name in old
        if name in new and _place(old[name]) != _place(new[name])
    ]
    if not lines:
        lines = ["the same groups"]
    lines.append(f"step: {format_ns(before.step_ns)} -> {format_ns(after.step_ns)}")
    lines.append(
        f"most memory of a device: {format_bytes(max(before.memory_bytes))} -> {format_bytes(max(after.memory_bytes))}"
    )
    return "\n".join(lines)


def _place(group: Group) -> str:
    return f"{group} with {format_count(group.units, 'unit')}"
