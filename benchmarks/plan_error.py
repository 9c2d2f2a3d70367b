"""Predicted against measured times of segments and of plans, the order of plans, and the regret.

    python -m benchmarks.plan_error --workloads clip,two_tower --size small --json out.json

Per workload, in one process; the profile is this machine's, so run `apollo calibrate` before:

1. learn     every segment runs alone on all units and on half of them, as the first steps of a training run would have
             it; the observations replace the formulas, and the planner chooses by them.
2. collect   at least `--plans` distinct plans per graph: the planner's own choice, all segments in turn on all units,
             and on half of them, the baselines of `rules.py`, and random changes of the choice.
3. measure   all plans take turns in training steps, forward and backward with the same number; the median of a plan
             counts. Where the machine was slower for a round, its times are divided by the median, over the plans, of
             their times in it over their usual ones.
4. predict   every plan from the segments' times in those runs of step 3 in which nothing ran side by side: an error is
             then that of the simulator, and not of a machine that has become slower since step 1.

Printed per graph: predicted and measured makespan of the choice, Kendall's tau between predicted and measured order of
all plans, and the regret: measured time of the choice over the best measured one, minus 1. "planned" is the promise of
the planner in step 1, whatever the machine did since. Plans that run serially on lane 0 count as one plan. Of a
whole step, the plans with the same number are added up; "together" is the regret over the best measured plans of all
graphs, added up, which were the luckiest of many.

Printed per class of segments and number of units: the median of |predicted / measured - 1|, the median with its sign
(bias), and the 95th percentile, by formulas alone and with the observations of step 1. Measured is the median of the
runs of step 3 without neighbours, so that a drift of the machine since step 1 is in the errors. The class of a segment
is the kind of kernel with the largest share of its predicted time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import kendalltau
from tabulate import tabulate
from tqdm import tqdm

from apollo_compile.cost_model.roofline import predict_kernel
from apollo_compile.device.cpu.execute import Executable
from apollo_compile.ir import (
    Assignment,
    CostTable,
    LaneId,
    Observations,
    Origin,
    Plan,
    Quota,
    Segment,
    SegmentId,
    Trace,
    check,
)
from apollo_compile.observe import StageRunner
from apollo_compile.passes.cost import estimate_costs
from apollo_compile.passes.plan import make_plan, to_problem
from apollo_compile.pipeline import compile_plan
from apollo_compile.session import registry
from apollo_compile.session.graph import CompiledGraph
from apollo_compile.session.monitor import is_same_placement, observe_trace
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.profile import DeviceProfile
from apollo_compile.tools.bench.facts import machine_facts
from apollo_compile.units import NS_PER_MS
from benchmarks.rules import BASELINES
from benchmarks.run import names_of
from benchmarks.workloads import Workload, build
from benchmarks.workloads.specs import SPECS

LEARNING_RUNS = 6
"""Runs of every learning plan; the first is not observed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """One plan of one graph, ready to run."""

    name: str
    compilation: Compilation
    executable: Executable


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Predicted and measured makespans of one plan, in nanoseconds."""

    name: str
    planned_ns: int
    """Predicted before anything of step 3 ran."""
    predicted_ns: int
    measured_ns: float
    p10_ns: float
    p90_ns: float


TIMES = ("planned_ns", "predicted_ns", "measured_ns", "p10_ns", "p90_ns")
"""Fields of a `Result`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentError:
    """One segment on one number of units, without neighbours, in nanoseconds."""

    graph: str
    segment: str
    units: int
    kind: str
    """The kind of kernel with the largest share of the predicted time."""
    formula_ns: int
    learned_ns: int
    """Predicted with the observations of step 1."""
    measured_ns: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The plans of one graph, or of a step; the first is the planner's choice."""

    name: str
    results: tuple[Result, ...]
    best_ns: float
    """The least measured makespan; of a step, those of its graphs added up."""

    @property
    def ratios(self) -> dict[str, float]:
        """Errors of the choice, the order of all plans, and the regrets."""
        choice = self.results[0]
        predicted, measured = zip(*((r.predicted_ns, r.measured_ns) for r in self.results), strict=True)
        return {
            "planned_error": choice.planned_ns / choice.measured_ns - 1,
            "error": choice.predicted_ns / choice.measured_ns - 1,
            "tau": float(kendalltau(predicted, measured).statistic),  # nan where all plans are predicted alike
            "regret": choice.measured_ns / min(measured) - 1,
            "regret_together": choice.measured_ns / self.best_ns - 1,
        }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write JSON; return the exit code."""
    args = _parse(arguments)
    content: dict[str, Any] = {"machine": machine_facts(), "workloads": {}, "segments": {}}
    rows, errors = [], []
    for name in args.workloads:
        workload = build(name, args.size, batch=args.batch)
        comparisons, found = compare_plans(workload, num_plans=args.plans, rounds=args.rounds, seed=args.seed)
        errors += found
        print(f"\n== {name}, {args.size}")
        for comparison in comparisons:
            print(f"{comparison.name}\n{_plan_table(comparison)}\n", flush=True)
            rows.append([name, comparison.name, len(comparison.results), *_cells(comparison)])
        content["workloads"][name] = [
            {"graph": each.name, **each.ratios, "plans": [asdict(result) for result in each.results]}
            for each in comparisons
        ]
        content["segments"][name] = list(map(asdict, found))
        if args.json is not None:
            args.json.write_text(json.dumps(content, indent=1))
    headers = ["workload", "graph", "plans", *(f"{kind} ms" for kind in ("planned", "predicted", "measured"))]
    headers += ["planned", "predicted", "tau", "regret", "together"]
    print(f"\n{tabulate(rows, headers=headers)}\n\n{_segment_table(errors)}")
    return 0


def compare_plans(
    workload: Workload, *, num_plans: int, rounds: int, seed: int = 0
) -> tuple[list[Comparison], list[SegmentError]]:
    """Return one comparison per graph of the workload's training step, one of the whole step, and all segments."""
    compiled = torch.compile(
        workload.model, backend="apollo", options={"plan.replan": False, "plan.autotune": False, "debug.strict": True}
    )

    def step() -> None:
        workload.loss(compiled(**workload.inputs)).backward()

    step()
    graphs = [graph for model in registry.find_models(workload.model) for graph in model.graphs]
    formulas = [graph.compilation.costs for graph in graphs]
    for graph in graphs:
        graph.variants.adopt(learn(graph, step))
    plans = [collect_plans(graph, num_plans, random.Random(seed)) for graph in graphs]
    times: list[list[list[tuple[int, int]]]] = [[[] for _ in variations] for variations in plans]
    observations = [Observations() for _ in graphs]
    alone: list[dict[int, list[Trace]]] = [defaultdict(list) for _ in graphs]
    count = max(len(variations) for variations in plans)
    for turn in tqdm(range(rounds), desc=f"   measuring {workload.name}", file=sys.stderr, mininterval=5):
        for index in range(count) if turn % 2 == 0 else reversed(range(count)):
            for graph, variations in zip(graphs, plans, strict=True):
                chosen = variations[index % len(variations)]
                graph.variants.compilation, graph.variants.plan = chosen.compilation, chosen.executable
                graph.variants.use(graph.variants.current)
            step()  # brings code and weights of these plans back into the caches
            step()
            for number, (graph, samples) in enumerate(zip(graphs, times, strict=True)):
                trace, run = graph.trace(), graph.compilation
                samples[index % len(samples)].append((turn, trace.duration_ns))
                if len(lanes := {span.lane for span in trace.spans}) == 1:
                    alone[number][len(run.plan.lanes[lanes.pop()].units)].append(trace)
                    observations[number] = observe_trace(
                        trace, run.plan, run.partition.graph, run.costs, observations[number]
                    )
    torch.compiler.reset()
    comparisons, errors = [], []
    for graph, variations, found, observed in zip(graphs, plans, times, observations, strict=True):
        results = tuple(
            _result(variation, _predict(variation.compilation, observed), samples)
            for variation, samples in zip(variations, even_rounds(found), strict=True)
        )
        best_ns = min(result.measured_ns for result in results)
        comparisons.append(Comparison(name=graph.compilation.capture.role, results=results, best_ns=best_ns))
    for variations, costs, traces in zip(plans, formulas, alone, strict=True):
        errors += compare_segments(variations[0].compilation, costs, traces)
    return [*comparisons, _whole_step(comparisons, count)], errors


def compare_segments(
    choice: Compilation, formulas: CostTable, traces: Mapping[int, Sequence[Trace]]
) -> list[SegmentError]:
    """Return the errors of all segments of a graph.

    Arguments:
        choice: planned with learned costs.
        formulas: costs without observations.
        traces: of runs without neighbours, by the number of units of their segments.
    """
    graph = choice.partition.graph
    footprint = sum(buffer.num_bytes for buffer in graph.buffers)
    errors = []
    for units, found in sorted(traces.items()):
        durations: dict[SegmentId, list[int]] = defaultdict(list)
        for trace in found:
            for span in trace.spans:
                durations[span.segment].append(span.end_ns - span.start_ns)
        formula, learned = (
            [next(mode.duration_ns for mode in modes if mode.units == units) for modes in table.modes]
            for table in (formulas, choice.costs)
        )
        errors += [
            SegmentError(
                graph=graph.role,
                segment=segment.name,
                units=units,
                kind=_largest_kind(segment, choice.profile, units, footprint),
                formula_ns=formula[segment.id],
                learned_ns=learned[segment.id],
                measured_ns=statistics.median(durations[segment.id]),
            )
            for segment in graph.segments
        ]
    return errors


def _largest_kind(segment: Segment, profile: DeviceProfile, units: int, footprint: int) -> str:
    shares: dict[str, float] = defaultdict(float)
    for kernel in segment.work.parts:
        shares[kernel.kind] += kernel.count * predict_kernel(kernel, profile, units, footprint=footprint).total_ns
    return max(shares, key=lambda kind: shares[kind], default="nothing")


def even_rounds(times: Sequence[Sequence[tuple[int, int]]]) -> list[list[float]]:
    """Return the times of all plans as if every round had been as fast as the others; before, with their rounds."""
    ratios: dict[int, list[float]] = defaultdict(list)
    for samples in times:
        usual = statistics.median(ns for _, ns in samples)
        for number, ns in samples:
            ratios[number].append(ns / usual)
    return [[ns / statistics.median(ratios[number]) for number, ns in samples] for samples in times]


def learn(graph: CompiledGraph, step: Any) -> Compilation:
    """Return the compilation, planned with measurements of every segment on all units and on half of them."""
    start = graph.compilation
    segments = start.partition.graph
    observations = Observations()
    for alone in _in_turn(start.plan).values():
        plan = make_plan(segments, start.costs, lanes=start.plan.lanes, pinned=alone)
        graph.variants.adopt(_compile(start, start.costs, plan, observations))
        for run in range(LEARNING_RUNS):
            step()
            if run:
                observations = observe_trace(graph.trace(), plan, segments, start.costs, observations)
    costs = estimate_costs(segments, start.profile, observations)
    return _compile(start, costs, make_plan(segments, costs, lanes=start.plan.lanes), observations)


def collect_plans(graph: CompiledGraph, num_plans: int, rng: random.Random) -> list[Variation]:
    """Return distinct plans of a graph, the planner's choice first."""
    choice = graph.compilation
    found = [Variation(name="choice", compilation=choice, executable=graph.executable)]
    for name, skeleton in _skeletons(choice, rng):
        if len(found) == num_plans:
            break
        plan = make_plan(choice.partition.graph, choice.costs, lanes=choice.plan.lanes, pinned=skeleton)
        if any(is_same_placement(plan, other.compilation.plan) for other in found):
            continue
        compilation = _compile(choice, choice.costs, plan, choice.observations)
        graph.variants.adopt(compilation)
        found.append(Variation(name=name, compilation=compilation, executable=graph.executable))
    return found


def _in_turn(plan: Plan) -> dict[str, Plan]:
    """Return plans without neighbours: all segments in turn on all units, and on half of them."""
    half = LaneId(min(1, len(plan.lanes) - 1))
    lanes = {"serial": LaneId(0), "serial on fewer": half}
    in_order = range(len(plan.assignments))
    return {name: _rearrange(plan, [lane] * len(in_order), in_order) for name, lane in lanes.items()}


def _skeletons(choice: Compilation, rng: random.Random) -> Iterable[tuple[str, Plan]]:
    """Yield plans of which lanes and order count: in turn, the baselines', then random changes."""
    graph, plan = choice.partition.graph, choice.plan
    yield from _in_turn(plan).items()
    for name, baseline in BASELINES.items():
        problem = to_problem(graph, choice.costs, plan.lanes)
        schedule = baseline(problem)
        lanes = [problem.mode(schedule, segment).lane for segment in range(len(graph.segments))]
        yield name, _rearrange(plan, lanes, schedule.starts)
    for change in range(1000):
        lanes = [assignment.lane for assignment in plan.assignments]
        for _ in range(rng.randrange(1, 5)):
            first = rng.randrange(len(lanes))
            last = first + rng.randrange(1, max(2, len(lanes) // 3))
            lane = rng.randrange(len(plan.lanes))
            lanes[first:last] = [LaneId(lane)] * len(lanes[first:last])
        yield f"change {change + 1}", _rearrange(plan, lanes, [a.start_ns for a in plan.assignments])


def _rearrange(plan: Plan, lanes: Sequence[int], starts: Sequence[int]) -> Plan:
    assignments = tuple(
        Assignment(
            segment=old.segment,
            lane=LaneId(lane),
            quota=Quota(units=len(plan.lanes[lane].units), memory_bytes=old.quota.memory_bytes),
            start_ns=start,
            duration_ns=old.duration_ns,
        )
        for old, lane, start in zip(plan.assignments, lanes, starts, strict=True)
    )
    return Plan(
        origin=Origin.GREEDY,
        lanes=plan.lanes,
        assignments=assignments,
        makespan_ns=0,
        undisturbed_ns=0,
        serial_ns=0,
        lower_bound_ns=0,
    )


def _compile(base: Compilation, costs: CostTable, plan: Plan, observations: Observations) -> Compilation:
    check.check_plan(plan, base.partition.graph, costs)
    return compile_plan(
        base.capture, base.partition, observations, costs, plan, profile=base.profile, runner=StageRunner()
    )


def _predict(compilation: Compilation, observations: Observations) -> int:
    graph, plan = compilation.partition.graph, compilation.plan
    costs = estimate_costs(graph, compilation.profile, observations)
    return make_plan(graph, costs, lanes=plan.lanes, pinned=plan).makespan_ns


def _result(variation: Variation, predicted_ns: int, times: Sequence[float]) -> Result:
    deciles = statistics.quantiles(times, n=10)
    return Result(
        name=variation.name,
        planned_ns=variation.compilation.plan.makespan_ns,
        predicted_ns=predicted_ns,
        measured_ns=statistics.median(times),
        p10_ns=deciles[0],
        p90_ns=deciles[-1],
    )


def _whole_step(comparisons: Sequence[Comparison], count: int) -> Comparison:
    def total(parts: Sequence[Result]) -> Result:
        sums = {name: sum(getattr(part, name) for part in parts) for name in TIMES}
        return Result(name=" / ".join(dict.fromkeys(part.name for part in parts)), **sums)

    steps = [[found.results[index % len(found.results)] for found in comparisons] for index in range(count)]
    best_ns = sum(found.best_ns for found in comparisons)
    return Comparison(name="step", results=tuple(map(total, steps)), best_ns=best_ns)


def _plan_table(comparison: Comparison) -> str:
    rows = [[each.name, *(f"{getattr(each, time) / NS_PER_MS:.2f}" for time in TIMES)] for each in comparison.results]
    return str(tabulate(rows, headers=("plan", *(f"{time.removesuffix('_ns')} ms" for time in TIMES))))


def _cells(comparison: Comparison) -> list[str]:
    """Return the times of the choice, and the ratios."""
    times = [f"{getattr(comparison.results[0], time) / NS_PER_MS:.2f}" for time in TIMES[:3]]
    return times + [f"{value:.2f}" if name == "tau" else f"{value:+.1%}" for name, value in comparison.ratios.items()]


def _segment_table(errors: Sequence[SegmentError]) -> str:
    groups: dict[tuple[str, int | str], list[SegmentError]] = defaultdict(list)
    for error in errors:
        for key in ((error.kind, error.units), (error.kind, "any"), ("all", error.units), ("all", "any")):
            groups[key].append(error)
    rows = []
    for (kind, units), group in sorted(groups.items(), key=lambda item: tuple(map(str, item[0]))):
        by_formula = [error.formula_ns / error.measured_ns - 1 for error in group]
        learned = [error.learned_ns / error.measured_ns - 1 for error in group]
        rows.append([kind, units, len(group), *_summary(by_formula), *_summary(learned)])
    headers = ("mostly", "units", "segments", "formula", "bias", "p95", "learned", "bias", "p95")
    return str(tabulate(rows, headers=headers))


def _summary(errors: Sequence[float]) -> tuple[str, str, str]:
    """Return the median size, the median with its sign, and the 95th percentile of the sizes."""
    sizes = np.abs(errors)
    return f"{np.median(sizes):.1%}", f"{np.median(errors):+.1%}", f"{np.quantile(sizes, 0.95):.1%}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_error", description="Run many plans of a model.")
    parser.add_argument("--workloads", type=names_of(SPECS), default=list(SPECS), help=", ".join(SPECS))
    parser.add_argument("--size", choices=("tiny", "small"), default="small")
    parser.add_argument("--batch", type=int, help="default: the spec's")
    parser.add_argument("--plans", type=int, default=12, help="distinct plans per graph")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of every plan")
    parser.add_argument("--seed", type=int, default=0, help="of the random changes")
    parser.add_argument("--json", type=Path, help="write everything there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
