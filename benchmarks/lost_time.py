"""Where the units of a device spend their time while a plan runs, and what keeps them from useful work.

    python -m benchmarks.lost_time --workloads two_tower,clip --size small --json out.json

Every workload runs training steps in one process under its plan, with every segment on all units and with every segment
on one unit, in turns. A device with U units offers U times the duration of a run; of that time, summed over forward
and backward and taken as the median over runs,

work        is what the segments take on one unit with nothing beside them,
scaling     is what they cost more where they run on several units,
contention  is what they take longer in the plan than alone on as many units, negative where they take less,
hand-over   goes by while a segment could run, all it needs being there and its units free, and has not begun; also
            before the first and after the last segment of a run,
imbalance   goes by on a unit because what it runs next waits for other segments, or because nothing is left to run.

The five add up to the whole. `in turn` is the time of the segments one after the other on all units, over that of the
plan: what lanes alone give.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import torch
from tabulate import tabulate

from apollo_compile.ir import Lane, Plan, SegmentGraph, Trace
from apollo_compile.session import registry
from apollo_compile.tools.bench.facts import machine_facts
from benchmarks.model_error import durations_by_segment, measure_plans, plan_on_lane
from benchmarks.run import names_of
from benchmarks.workloads import Workload, build
from benchmarks.workloads.specs import SPECS

WARM_UP_STEPS = 30
"""Steps before the first measured one; by then plans are final."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LostTime:
    """Nanoseconds of units in one run of a graph, or in several."""

    work: float
    scaling: float
    contention: float
    handover: float
    imbalance: float

    @property
    def total(self) -> float:
        """Units times the duration of the run."""
        return sum(astuple(self))


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write JSON; return the exit code."""
    args = _parse(arguments)
    rows, found = [], []
    for name in args.workloads:
        lost, units, serial_ns = measure_workload(build(name, args.size, batch=args.batch), runs=args.runs)
        plan_ns = lost.total / units
        shares = [f"{share / lost.total:.1%}" for share in astuple(lost)]
        rows.append([name, f"{plan_ns / 1e6:.2f} ms", f"{serial_ns / plan_ns:.2f}x", *shares])
        found.append({"workload": name, "units": units, "serial_ns": serial_ns, **asdict(lost)})
        headers = ("", "plan", "in turn", "work", "scaling", "contention", "hand-over", "imbalance")
        print(f"\n{tabulate(rows, headers=headers, colalign=('left',))}", flush=True)
        if args.json is not None:
            content = {"machine": machine_facts(), "size": args.size, "batch": args.batch, "workloads": found}
            args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def measure_workload(workload: Workload, *, runs: int) -> tuple[LostTime, int, float]:
    """Return where the time of a step went, the number of units, and the time of the segments in turn on all units."""
    options = {"plan.autotune": False, "plan.min_gain": 0.0}
    compiled = torch.compile(workload.model, backend="apollo", options=options)

    def step() -> None:
        workload.model.zero_grad(set_to_none=True)
        workload.loss(compiled(**workload.inputs)).backward()

    for _ in range(WARM_UP_STEPS):
        step()
    graphs = [graph for model in registry.find_models(workload.model) for graph in model.graphs]
    plans = [graph.compilation.plan for graph in graphs]
    lanes = plans[0].lanes
    single = min(lanes, key=lambda lane: len(lane.units))
    sets = {0: plans, 1: _all_on(plans, lanes[0]), 2: _all_on(plans, single)}
    traces = measure_plans(graphs, sets, step, runs=runs)
    torch.compiler.reset()
    parts, serial_ns = [], 0.0
    for index, graph in enumerate(graphs):
        segments = graph.compilation.partition.graph
        alone = {len(lane.units): _medians(segments, traces[key][index]) for key, lane in ((1, lanes[0]), (2, single))}
        parts.append(_median([account(segments, lanes, trace, alone) for trace in traces[0][index]]))
        serial_ns += statistics.median(trace.duration_ns for trace in traces[1][index])
    return _add(parts), len(lanes[0].units), serial_ns


def account(graph: SegmentGraph, lanes: Sequence[Lane], trace: Trace, alone: Mapping[int, Sequence[float]]) -> LostTime:
    """Return where the time of all units went in one run.

    Arguments:
        graph: what ran.
        lanes: of the plan; the first has all units.
        trace: of the run.
        alone: durations by segment with nothing beside them, by number of units: one unit, and those of every lane.
    """
    spans = sorted(trace.spans, key=lambda span: span.start_ns)
    end = {span.segment: span.end_ns for span in spans}
    work = scaling = contention = handover = imbalance = 0.0
    free = dict.fromkeys(lanes[0].units, 0)
    for span in spans:
        units = lanes[span.lane].units
        duration = span.end_ns - span.start_ns
        work += alone[1][span.segment]
        scaling += len(units) * alone[len(units)][span.segment] - alone[1][span.segment]
        contention += len(units) * (duration - alone[len(units)][span.segment])
        ready = max([free[unit] for unit in units] + [end[needed] for needed in graph.predecessors(span.segment)])
        for unit in units:
            imbalance += ready - free[unit]
            handover += span.start_ns - ready
            free[unit] = span.end_ns
    last = max(free.values())
    imbalance += sum(last - at for at in free.values())
    handover += len(free) * (trace.duration_ns - last)
    return LostTime(work=work, scaling=scaling, contention=contention, handover=handover, imbalance=imbalance)


def _all_on(plans: Sequence[Plan], lane: Lane) -> list[Plan]:
    return [plan_on_lane(plan, lane.id) for plan in plans]


def _medians(graph: SegmentGraph, traces: Sequence[Trace]) -> list[float]:
    return [statistics.median(found) for found in durations_by_segment(graph, traces)]


def _median(found: Sequence[LostTime]) -> LostTime:
    """Return the run with the median duration, whose parts add up."""
    return sorted(found, key=lambda lost: lost.total)[len(found) // 2]


def _add(parts: Sequence[LostTime]) -> LostTime:
    return LostTime(
        work=sum(part.work for part in parts),
        scaling=sum(part.scaling for part in parts),
        contention=sum(part.contention for part in parts),
        handover=sum(part.handover for part in parts),
        imbalance=sum(part.imbalance for part in parts),
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lost_time", description="Account for lost time.")
    parser.add_argument("--workloads", type=names_of(SPECS), default=["two_tower", "clip"], help=", ".join(SPECS))
    parser.add_argument("--size", choices=("tiny", "small"), default="small")
    parser.add_argument("--batch", type=int, help="batch size; default: the spec's")
    parser.add_argument("--runs", type=int, default=40, help="timed steps per set of plans")
    parser.add_argument("--json", type=Path, help="write everything there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
