"""What a graph would take on other devices: its plan on other numbers of units, or on another device profile.

    what_if(compilation, units=..., profiles=...) -> [WhatIf]

Heuristics with little effort make these plans: they are there to be compared, and a report has several per graph. They
keep the memory quota of the plan that runs; a device on which no plan keeps it has no row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from apollo_compile.config import Config
from apollo_compile.device.profile import DeviceProfile, limit_units, load_profile
from apollo_compile.errors import ConfigError, InfeasiblePlanError
from apollo_compile.ir import Observations
from apollo_compile.ir.text import format_count
from apollo_compile.passes.cost import estimate_costs
from apollo_compile.passes.plan import make_plan
from apollo_compile.pipeline import Compilation
from apollo_compile.reports.summary import WhatIf

_logger = logging.getLogger(__name__)

PROFILES = ("h200",)
"""Devices that every report compares with."""
EFFORT = 0.1
"""As a share of the time limit of the plan that runs."""


def what_if(
    compilation: Compilation, config: Config, *, units: Sequence[int] | None = None, profiles: Sequence[str] = PROFILES
) -> tuple[WhatIf, ...]:
    """Return what the plan of a graph would take on `units` of its device, and on the devices of `profiles`.

    Arguments:
        compilation: the graph, its device and what was measured on it.
        config: with the options of the planner.
        units: numbers of units of the same device; None is half, twice and four times as many as there are, as far as
            the profile has rates for them.
        profiles: paths or packaged names.

    Raises:
        ConfigError: a profile cannot be read, or there are to be no units.
    """
    if units is not None and min(units, default=1) < 1:
        raise ConfigError(f"cannot compare with {min(units)} units: expected at least 1")
    here = compilation.profile
    devices = [
        (_describe(here, count), limit_units(here, count), compilation.observations)
        for count in dict.fromkeys(_usual_units(here) if units is None else units)
        if count != here.units
    ]
    devices += [(f"device profile {name}", load_profile(Path(name)), Observations()) for name in profiles]
    return tuple(_plan_each(compilation, config, devices))


def _usual_units(profile: DeviceProfile) -> tuple[int, ...]:
    candidates = (profile.units // 2, profile.units * 2, profile.units * 4)
    return tuple(count for count in candidates if 1 <= count <= profile.unit_counts[-1])


def _plan_each(
    compilation: Compilation, config: Config, devices: Iterable[tuple[str, DeviceProfile, Observations]]
) -> Iterator[WhatIf]:
    graph = compilation.partition.graph
    for change, profile, observations in devices:
        try:
            plan = make_plan(
                graph,
                estimate_costs(graph, profile, observations),
                lanes=profile.lanes,
                planner="serial" if config.plan.planner == "serial" else "greedy",
                min_gain=config.plan.min_gain,
                seed=config.plan.seed,
                time_limit_s=config.plan.time_limit_s,
                work_s=config.plan.time_limit_s * EFFORT,
                fixed_effort=config.plan.fixed_effort,
                memory_quota=config.plan.memory_quota,
            )
        except InfeasiblePlanError as error:
            _logger.info("%s is not compared with %s: %s", graph.name, change, error)
            continue
        yield WhatIf(change=change, units=profile.units, serial_ns=plan.serial_ns, predicted_ns=plan.makespan_ns)


def _describe(profile: DeviceProfile, units: int) -> str:
    most = profile.unit_counts[-1]
    return format_count(units, "unit") + (f", no kernel faster than on {most}" if units > most else "")
