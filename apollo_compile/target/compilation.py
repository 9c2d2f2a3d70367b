"""The products of one graph that a device loads, and the finding of an earlier process about it.

Compilation     capture, partition, costs, plan, program
Finding         plan, measurements and variant that an earlier process kept
"""

from __future__ import annotations

from dataclasses import dataclass

from apollo_compile.ir import (
    Capture,
    CostTable,
    MemoryPlan,
    Observations,
    Partition,
    Plan,
    Program,
    SyncPlan,
    Variant,
    Verdict,
)
from apollo_compile.target.profile import DeviceProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Plan, measurements and variant of one graph, found by an earlier process."""

    observations: Observations
    """Measurements that the plan was made from."""
    plan: Plan
    variant: Variant
    """The variant that autotuning of its model selected."""
    verdict: Verdict | None
    """The verdict of autotuning; None if there was nothing to compare."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilation:
    """All products of one graph."""

    capture: Capture
    partition: Partition
    profile: DeviceProfile
    observations: Observations
    """Measurements that the plan was made from."""
    finding: Finding | None = None
    """Finding of an earlier process that has the plan; None if the plan was made in this process."""
    costs: CostTable
    plan: Plan
    syncs: SyncPlan
    memory: MemoryPlan
    program: Program
