"""The compiler, top to bottom: what happens to one FX graph.

    capture -> partition -> cost -> plan -> sync -> memory -> emit

Each line of `compile_capture` is one stage: a function from products to a product, with the check that its product
must pass and the text that `APOLLO_DUMP` writes. Replanning is the same lines from `cost` on, with more observations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from apollo_compile import check, text
from apollo_compile.config import Config
from apollo_compile.device import DeviceProfile
from apollo_compile.ir import (
    Capture,
    CostTable,
    MemoryPlan,
    Observations,
    Partition,
    Plan,
    Program,
    SyncPlan,
)
from apollo_compile.lanes import lane_catalogue
from apollo_compile.observe import StageRunner
from apollo_compile.passes.cost import estimate_costs
from apollo_compile.passes.emit import emit_program
from apollo_compile.passes.memory import plan_memory
from apollo_compile.passes.partition import partition_graph
from apollo_compile.passes.plan import make_plan
from apollo_compile.passes.sync import eliminate_syncs


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilation:
    """All products of one graph."""

    capture: Capture
    partition: Partition
    profile: DeviceProfile
    costs: CostTable
    plan: Plan
    syncs: SyncPlan
    memory: MemoryPlan
    program: Program


def compile_capture(capture: Capture, *, profile: DeviceProfile, config: Config, runner: StageRunner) -> Compilation:
    """Take a capture through all stages."""
    partition = runner.run(
        "partition",
        partition_graph,
        capture,
        config=config.partition,
        check=partial(check.check_partition, capture=capture),
        text=text.format_partition,
    )
    return plan_partition(capture, partition, Observations(), profile=profile, config=config, runner=runner)


def plan_partition(
    capture: Capture,
    partition: Partition,
    observations: Observations,
    *,
    profile: DeviceProfile,
    config: Config,
    runner: StageRunner,
) -> Compilation:
    """Take a partition through the stages from cost to program."""
    graph = partition.graph
    costs = runner.run(
        "cost",
        estimate_costs,
        graph,
        profile,
        observations,
        check=partial(check.check_costs, graph=graph),
        text=partial(text.format_costs, graph=graph),
    )
    plan = runner.run(
        "plan",
        make_plan,
        graph,
        costs,
        lanes=lane_catalogue(profile.units),
        planner=config.plan.planner,
        min_gain=config.plan.min_gain,
        seed=config.plan.seed,
        iterations=config.plan.iterations,
        check=partial(check.check_plan, graph=graph, costs=costs),
        text=partial(text.format_plan, graph=graph),
    )
    syncs = runner.run(
        "sync",
        eliminate_syncs,
        graph,
        plan,
        check=partial(check.check_syncs, graph=graph, plan=plan),
        text=partial(text.format_syncs, graph=graph, plan=plan),
    )
    memory = runner.run(
        "memory",
        plan_memory,
        graph,
        plan,
        syncs,
        check=partial(check.check_memory, graph=graph, plan=plan, syncs=syncs),
        text=partial(text.format_memory, graph=graph),
    )
    program = runner.run(
        "program",
        emit_program,
        graph,
        plan,
        syncs,
        memory,
        check=partial(check.check_program, graph=graph, plan=plan, syncs=syncs, memory=memory),
        text=partial(text.format_program, graph=graph),
    )
    return Compilation(
        capture=capture,
        partition=partition,
        profile=profile,
        costs=costs,
        plan=plan,
        syncs=syncs,
        memory=memory,
        program=program,
    )
