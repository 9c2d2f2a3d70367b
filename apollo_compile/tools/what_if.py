"""Predict a graph's time on other devices.

    what_if(compilation, config, units=..., profiles=...) -> [WhatIf]

Plans for other numbers of units or device profiles come from heuristics with a small time limit. They keep the memory
quota; a device without a plan that keeps it has no row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from apollo_compile.config import Config
from apollo_compile.errors import ConfigError, InfeasiblePlanError
from apollo_compile.ir import Observations
from apollo_compile.ir.text import format_count
from apollo_compile.passes.cost import estimate_costs
from apollo_compile.passes.plan import make_plan
from apollo_compile.reports.values import WhatIf
from apollo_compile.store.profiles import load_profile
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.profile import DeviceProfile, limit_units

_logger = logging.getLogger(__name__)

EFFORT = 0.1
"""Share of `plan.time_limit_s` that a comparison may take."""


def what_if(
    compilation: Compilation, config: Config, *, units: Sequence[int] = (), profiles: Sequence[str] = ()
) -> tuple[WhatIf, ...]:
    """Return predicted times of a graph on other numbers of units of its device, and on the devices of `profiles`.

    Arguments:
        compilation: the graph, its device, and measurements on it.
        config: configuration, of which the `plan` options apply.
        units: numbers of units of the same device.
        profiles: paths or packaged names.

    Raises:
        ConfigError: a profile cannot be read, or `units` has a number below 1.
    """
    if min(units, default=1) < 1:
        raise ConfigError(f"cannot compare with {min(units)} units: expected at least 1")
    here = compilation.profile
    devices = [
        (_describe(here, count), limit_units(here, count), compilation.observations)
        for count in dict.fromkeys(units)
        if count != here.units
    ]
    devices += [(f"device profile {name}", load_profile(Path(name)), Observations()) for name in profiles]
    return tuple(_plan_each(compilation, config, devices))


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
                memory_quota=config.plan.memory_quota,
            )
        except InfeasiblePlanError as error:
            _logger.info("%s is not compared with %s: %s", graph.name, change, error)
            continue
        yield WhatIf(
            change=change,
            units=profile.units,
            serial_ns=plan.serial_ns,
            predicted_ns=plan.makespan_ns,
            num_abreast=plan.num_abreast,
        )


def _describe(profile: DeviceProfile, units: int) -> str:
    most = profile.unit_counts[-1]
    return format_count(units, "unit") + (f", no kernel faster than on {most}" if units > most else "")
