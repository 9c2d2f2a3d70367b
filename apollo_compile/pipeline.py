"""The compiler's pipeline: the stages of one FX graph.

    capture -> partition -> cost -> plan -> sync -> memory -> emit

Each stage is a function from products to a product, with the check that its product must pass and the text that
`APOLLO_DUMP` writes. The stages from partition on need no torch, and run here. `session/planning.py` runs capture,
which reads a graph of torch, and looks for the plan of an earlier process between partition and cost. Replanning runs
the stages from `cost` on, with more observations. So does planning a graph with dynamic shapes for other sizes, with
the segments of the first plan.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from apollo_compile.config import Config
from apollo_compile.errors import InvariantError, PlanFileError
from apollo_compile.ir import Capture, CostTable, Lane, Observations, Partition, Plan, SegmentGraph, check, text
from apollo_compile.observe import StageRunner
from apollo_compile.passes.cost import estimate_costs
from apollo_compile.passes.emit import emit_program
from apollo_compile.passes.memory import plan_memory
from apollo_compile.passes.partition import partition_graph
from apollo_compile.passes.plan import estimate_makespan, make_plan
from apollo_compile.passes.sync import eliminate_syncs
from apollo_compile.store.plan_file import check_fits, load_plan
from apollo_compile.target.compilation import Compilation, Finding
from apollo_compile.target.profile import DeviceProfile

_logger = logging.getLogger(__name__)

MIN_SEPARATION_GAIN = 0.15
"""Share of a plan's predicted time that separate segments for weight gradients must save. Fusion ends at segment
boundaries, and matmuls use a second core better than the formulas predict: on two cores, backwards predicted to take 2
to 20 % less took between 4 % more and 9 % less."""


def rename(compilation: Compilation, name: str) -> Compilation:
    """Return the products with another name of the graph."""
    partition = compilation.partition
    return replace(
        compilation,
        capture=replace(compilation.capture, name=name),
        partition=replace(partition, graph=replace(partition.graph, name=name)),
        program=replace(compilation.program, name=name),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CostedPlan:
    """A plan with its costs, with which a rank can run the plan of another."""

    costs: CostTable
    plan: Plan


def partition_capture(
    capture: Capture, *, profile: DeviceProfile, config: Config, runner: StageRunner, is_alone: bool = True
) -> Partition:
    """Run the stage partition on a capture.

    With several ranks (`is_alone` is False), the partition does not depend on the profile, so that all ranks make the
    same one.
    """
    partition: Partition = runner.run(
        "partition",
        partition_graph,
        capture,
        config=config.partition,
        is_better=partial(_is_better, profile=profile, config=config) if is_alone else None,
        check=partial(check.check_partition, capture=capture),
        text=text.format_partition,
    )
    return partition


def compile_partition(
    capture: Capture,
    partition: Partition,
    finding: Finding | None = None,
    *,
    profile: DeviceProfile,
    config: Config,
    runner: StageRunner,
) -> Compilation:
    """Run the stages after partition, with the plan of an earlier process if there is one and it is legal.

    Raises:
        InfeasiblePlanError: no plan meets the memory quota.
        PlanFileError: with `debug.strict`, the plan file cannot be read or is for another graph.
    """
    found = None if finding is None else compile_finding(capture, partition, finding, profile=profile, runner=runner)
    if found is not None:
        return found
    pinned = _load_pinned_plan(partition.graph, profile.lanes, config)
    return plan_partition(
        capture, partition, Observations(), profile=profile, config=config, runner=runner, pinned=pinned
    )


def _is_better(graph: SegmentGraph, other: SegmentGraph, *, profile: DeviceProfile, config: Config) -> bool:
    """Return whether `graph` is the better partition: the plan file fits it, or its predicted time is clearly shorter.

    It has more segments than `other` and may take more memory, so the result is False with a memory quota.
    """
    lanes = profile.lanes
    if config.plan.file is not None:
        return _fits(config.plan.file, graph, lanes) and not _fits(config.plan.file, other, lanes)
    if config.plan.planner == "serial" or config.plan.memory_quota is not None:
        return False
    separate, together = (
        estimate_makespan(each, estimate_costs(each, profile, Observations()), lanes) for each in (graph, other)
    )
    return separate < (1 - MIN_SEPARATION_GAIN) * together


def _fits(path: Path, graph: SegmentGraph, lanes: tuple[Lane, ...]) -> bool:
    try:
        load_plan(path, graph, lanes)
    except PlanFileError:
        return False
    return True


def compile_finding(
    capture: Capture, partition: Partition, finding: Finding, *, profile: DeviceProfile, runner: StageRunner
) -> Compilation | None:
    """Run the stages after the plan on a finding's plan; return None if it is not legal for these segments."""
    graph = partition.graph
    try:
        check_fits(finding.plan, graph, profile.lanes, "the plan of an earlier process")
        costs = _run_cost(graph, profile, finding.observations, runner)
        plan = runner.run(
            "plan",
            lambda: finding.plan,
            check=partial(check.check_plan, graph=graph, costs=costs),
            text=partial(text.format_plan, graph=graph),
        )
        compilation = compile_plan(
            capture, partition, finding.observations, costs, plan, profile=profile, runner=runner
        )
    except (InvariantError, PlanFileError) as error:
        _logger.info("%s is planned again: %s", capture.name, error)
        return None
    return replace(compilation, finding=finding)


def _run_cost(
    graph: SegmentGraph, profile: DeviceProfile, observations: Observations, runner: StageRunner
) -> CostTable:
    costs: CostTable = runner.run(
        "cost",
        estimate_costs,
        graph,
        profile,
        observations,
        check=partial(check.check_costs, graph=graph),
        text=partial(text.format_costs, graph=graph),
    )
    return costs


def plan_partition(
    capture: Capture,
    partition: Partition,
    observations: Observations,
    *,
    profile: DeviceProfile,
    config: Config,
    runner: StageRunner,
    lanes: tuple[Lane, ...] | None = None,
    pinned: Plan | None = None,
) -> Compilation:
    """Run the stages from cost to program on a partition.

    The lane catalogue is that of the profile, unless `lanes` is another. A `pinned` plan keeps its lanes and order.
    """
    graph = partition.graph
    costs = _run_cost(graph, profile, observations, runner)
    plan = runner.run(
        "plan",
        make_plan,
        graph,
        costs,
        lanes=profile.lanes if lanes is None else lanes,
        planner=config.plan.planner,
        min_gain=config.plan.min_gain,
        seed=config.plan.seed,
        time_limit_s=config.plan.time_limit_s,
        memory_quota=config.plan.memory_quota,
        pinned=pinned,
        check=partial(check.check_plan, graph=graph, costs=costs),
        text=partial(text.format_plan, graph=graph),
    )
    return compile_plan(capture, partition, observations, costs, plan, profile=profile, runner=runner)


def compile_plan(
    capture: Capture,
    partition: Partition,
    observations: Observations,
    costs: CostTable,
    plan: Plan,
    *,
    profile: DeviceProfile,
    runner: StageRunner,
) -> Compilation:
    """Run the stages from sync to program on a plan."""
    graph = partition.graph
    owners_release = profile.owners_release
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
        owners_release=owners_release,
        check=partial(check.check_memory, graph=graph, plan=plan, syncs=syncs, owners_release=owners_release),
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
        observations=observations,
        costs=costs,
        plan=plan,
        syncs=syncs,
        memory=memory,
        program=program,
    )


def adopt_decision(own: Compilation, decision: CostedPlan, *, runner: StageRunner) -> Compilation:
    """Run the stages from sync to program on another rank's plan of the same segments.

    Raises:
        PlanFileError: the plan is for other lanes.
        InvariantError: it is not legal for these segments.
    """
    graph, lanes = own.partition.graph, own.plan.lanes
    if decision.plan.lanes != lanes:
        raise PlanFileError(
            f"the plan of another rank is for lanes with {[len(lane.units) for lane in decision.plan.lanes]} units; "
            f"this rank has lanes with {[len(lane.units) for lane in lanes]}: give every rank the same number of cores"
        )
    check.check_costs(decision.costs, graph)
    check.check_plan(decision.plan, graph, decision.costs)
    return compile_plan(
        own.capture, own.partition, own.observations, decision.costs, decision.plan, profile=own.profile, runner=runner
    )


def _load_pinned_plan(graph: SegmentGraph, lanes: tuple[Lane, ...], config: Config) -> Plan | None:
    if config.plan.file is None:
        return None
    try:
        return load_plan(config.plan.file, graph, lanes)
    except PlanFileError as error:
        if config.debug.strict:
            raise
        _logger.warning("%s; planning %s without it", error, graph.name)
        return None
