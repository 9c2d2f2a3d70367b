"""Reports for tests: the saved graphs of the six workloads, planned on a fixed device, with an invented run."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

from apollo_compile import ir
from apollo_compile.passes.cost import estimate_costs
from apollo_compile.passes.plan import make_plan
from apollo_compile.reports.report import Report
from apollo_compile.reports.summary import summarize
from apollo_compile.reports.values import GraphSummary, Stage, State
from apollo_compile.reports.words import describe
from apollo_compile.store.profiles import default_profile
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.lanes import lane_catalogue
from apollo_compile.target.profile import DeviceProfile
from benchmarks.graphs import WORKLOADS, load_graphs
from tests.builders import follow

UNITS = 4

VERDICT = ir.Verdict(
    standings=(
        ir.Standing(name=ir.Variant.INDUCTOR, step_ns=2_000_000.0, ratio=1.0, num_rounds=5),
        ir.Standing(name=ir.Variant.SERIAL, step_ns=2_500_000.0, ratio=1.25, num_rounds=7),
    ),
    num_steps=36,
)
"""Of two variants, the one measured in 5 rounds and the other in 7."""


def report_of(*graphs: GraphSummary, **others: Any) -> Report:
    """Return a report of these graphs, without fallbacks unless they are given."""
    return Report(graphs=graphs, **{"fallbacks": (), **others})


def told_of(graph: GraphSummary) -> str:
    """Return what a report of one graph says of it in words."""
    return " ".join(describe(graph, report_of(graph)))


def compilation_of(graph: ir.SegmentGraph, profile: DeviceProfile, costs: ir.CostTable, plan: ir.Plan) -> Compilation:
    """Return all products of a graph that has a plan, checked, without measurements; its capture has no nodes."""
    syncs, memory, program = follow(graph, plan)
    bodies = {
        segment.body: ir.Body(id=segment.body, name=segment.name, nodes=(), inputs=(), outputs=())
        for segment in reversed(graph.segments)
    }
    return Compilation(
        capture=ir.Capture(name=graph.name, role=graph.role, nodes=(), outputs=()),
        partition=ir.Partition(graph=graph, bodies=tuple(bodies[each] for each in sorted(bodies)), nodes_by_segment=()),
        profile=profile,
        observations=ir.Observations(),
        costs=costs,
        plan=plan,
        syncs=syncs,
        memory=memory,
        program=program,
    )


def compile_graph(graph: ir.SegmentGraph, *, units: int = UNITS, time_limit_s: float = 2.0) -> Compilation:
    """Return all products of a saved graph, planned by heuristics."""
    profile = default_profile(units)
    costs = estimate_costs(graph, profile, ir.Observations())
    plan = make_plan(graph, costs, lanes=lane_catalogue(units), planner="greedy", time_limit_s=time_limit_s)
    return compilation_of(graph, profile, costs, plan)


def invent_run(compilation: Compilation, seed: int = 0) -> ir.Trace:
    """Return a run in the plan's order, in which every segment takes a little longer or shorter than planned."""
    rng = random.Random(seed)
    graph, plan = compilation.partition.graph, compilation.plan
    free_at = dict.fromkeys(plan.lanes[0].units, 0)
    ends: dict[int, int] = {}
    spans = []
    for assignment in plan.in_start_order():
        units = plan.lanes[assignment.lane].units
        start = max([free_at[unit] for unit in units] + [ends[s] for s in graph.predecessors(assignment.segment)])
        start += rng.randrange(1_000, 5_000)
        end = start + round(assignment.duration_ns * rng.uniform(0.9, 1.3))
        ends[assignment.segment] = end
        for unit in units:
            free_at[unit] = end
        spans.append(
            ir.Span(segment=assignment.segment, lane=assignment.lane, start_ns=start, end_ns=end, core=units[0])
        )
    spans.sort(key=lambda span: (span.start_ns, span.segment))
    return ir.Trace(spans=tuple(spans), duration_ns=max(ends.values()) + 10_000)


_saved_graphs = functools.cache(load_graphs)


@functools.cache
def workload_report(name: str) -> Report:
    """Return the report of a training step of a workload: forward and backward, both with a run."""
    assert name in WORKLOADS
    graphs = _saved_graphs()
    summaries = []
    for role in ("forward", "backward"):
        compilation = compile_graph(graphs[f"{name}_{role}"])
        summaries.append(summarize(compilation, invent_run(compilation)))
    return report_of(*summaries)


STATE = State(graph="0/0", stage=Stage.MEASURING, detail="round 3 of at least 5")


def full_report(workload: str = "clip") -> Report:
    """Return a report with everything that a report can have, some of which needs care in HTML."""
    return replace(
        workload_report(workload),
        fallbacks=(("1/0 forward", "x is on device cuda:0 <script>alert(1)</script>"),),
        verdicts=(("0/0", VERDICT),),
        breaks=(a_break(),),
        states=(STATE,),
    )


def a_break(**changes: object) -> ir.GraphBreak:
    """Return a graph break in a line that needs care in HTML."""
    return ir.GraphBreak(
        **{
            "graph": "0/0",
            "problem": "Unsupported Tensor.item() call",
            "explanation": "Dynamo does not support tracing it.",
            "file": "model.py",
            "line": 12,
            "function": "forward",
            "code": 'if x.sum().item() < 0: y = "<b>&"',
            "remedies": ("torch._dynamo.config.capture_scalar_outputs = True",),
            **changes,
        }  # type: ignore[arg-type]
    )
