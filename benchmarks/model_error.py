"""How far predicted segment times are from measured ones, by formula alone and with observations.

    python -m benchmarks.model_error --workloads clip,two_tower --sizes tiny,small --json out.json

Per workload and size (`small*2` is small with twice the batch), in one process: the model is compiled in segments;
then training steps run with every segment on lane 0 (all units) and with every segment on a lane of one unit, in turns,
so that drift falls on both. A segment's measured time is the median of its spans; the profile is this machine's, so run
`apollo calibrate` before. `--calibrate` does so anew before every workload and size, 40 seconds each time: how much
faster or slower the machine becomes over the whole run is then in no error.

formula     what `estimate_costs` says without observations, against all runs
observed    what it says with the medians of the first half of the runs, against the medians of the second half
in turns    the same with every other run in place of the first half: what drift of the machine does is not in it

Printed are the median of |predicted / measured - 1|, the median with its sign (bias) and the 95th percentile: per
workload, size and number of units, and per class of segments. The class of a segment is the kind of kernel that has
the largest share of its predicted time. `undisturbed` compares the formula with the lower quartile of the runs instead
of their median: on a machine with neighbours the difference says what these cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from tqdm import tqdm

from apollo_compile.cost_model.roofline import predict_kernel
from apollo_compile.device.cpu.calibrate import calibrate
from apollo_compile.device.cpu.execute import Executable, available_units
from apollo_compile.device.profile import DeviceProfile
from apollo_compile.ir import (
    Assignment,
    LaneId,
    Observation,
    Observations,
    Origin,
    Plan,
    Quota,
    Segment,
    SegmentGraph,
    Trace,
)
from apollo_compile.observe import StageRunner
from apollo_compile.passes.cost import estimate_costs
from apollo_compile.pipeline import Compilation, compile_plan
from apollo_compile.session import registry
from apollo_compile.session.graph import CompiledGraph
from apollo_compile.store.profiles import save_profile
from apollo_compile.tools.bench.facts import machine_facts
from benchmarks.run import names_of
from benchmarks.workloads import Workload, build
from benchmarks.workloads.specs import SPECS

MEASURED = ("tiny", "small", "small*2")
"""Sizes that a machine with a few cores can run; `*2` is twice the spec's batch."""

STEPS_PER_TURN = 2
"""Timed steps before the other plan's turn; one more, not timed, brings its code and data back into the caches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentError:
    """One segment on one number of units, in nanoseconds."""

    workload: str
    size: str
    graph: str
    segment: str
    units: int
    kind: str
    """The kind of kernel with the largest share of the predicted time."""
    formula_ns: int
    measured_ns: float
    undisturbed_ns: float
    """Lower quartile of the runs."""
    observed_ns: int
    """Predicted with the first half of the runs."""
    second_half_ns: float
    """Median of the second half of the runs."""
    observed_in_turns_ns: int
    """Predicted with every other run."""
    other_runs_ns: float
    """Median of the runs between those."""


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write JSON; return the exit code."""
    args = _parse(arguments)
    errors: list[SegmentError] = []
    profiles = set()
    for name in args.workloads:
        for size in args.sizes:
            measured_now = calibrate_now() if args.calibrate else None
            found, profile = measure_workload(build_size(name, size), size, runs=args.runs, profile=measured_now)
            errors += found
            profiles.add(f"{profile.name} ({profile.source})")
            print(f"\n== {name}, {size}\n{_table(found, lambda e: (e.workload, e.size, e.units))}", flush=True)
            if args.json is not None:
                content = {
                    "machine": machine_facts(),
                    "profiles": sorted(profiles),
                    "segments": list(map(asdict, errors)),
                }
                args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"\n== by class and units\n{_table(errors, lambda e: (e.kind, e.units))}")
    print(f"\n== all\n{_table(errors, lambda e: (e.units,))}\n\n{_table(errors, lambda e: ('all',))}")
    print(f"\ndevice profile: {', '.join(sorted(profiles))}")
    return 0


def build_size(name: str, size: str) -> Workload:
    """Return a workload at a size of its spec; `small*2` is one with twice the spec's batch."""
    size, _, factor = size.partition("*")
    workload = build(name, size)
    if not factor:
        return workload
    batch = next(value.shape[0] for value in workload.inputs.values() if isinstance(value, torch.Tensor))
    return build(name, size, batch=int(factor) * batch)


def calibrate_now() -> DeviceProfile:
    """Measure this machine."""
    with tqdm(desc="   calibrating", file=sys.stderr, mininterval=5, leave=False) as bar:

        def progress(what: str, done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        calibration = calibrate(available_units(), progress=progress)
    if calibration.is_disturbed:
        print(f"other processes held a core in {calibration.disturbed_share:.0%} of the rounds", file=sys.stderr)
    return calibration.profile


def measure_workload(
    workload: Workload, size: str, *, runs: int, profile: DeviceProfile | None = None
) -> tuple[list[SegmentError], DeviceProfile]:
    """Return the errors of all segments of a workload's graphs on all units and on one, and the profile used.

    Without `profile` that is the one that users of this machine get.
    """
    options: dict[str, Any] = {"plan.planner": "serial", "plan.replan": False, "debug.strict": True}
    with TemporaryDirectory() as folder:
        if profile is not None:
            options["device.profile"] = Path(folder, "profile.json")
            save_profile(profile, options["device.profile"])
        return _measure(workload, size, options, runs=runs)


def _measure(
    workload: Workload, size: str, options: dict[str, Any], *, runs: int
) -> tuple[list[SegmentError], DeviceProfile]:
    compiled = torch.compile(workload.model, backend="apollo", options=options)

    def step() -> None:
        workload.model.zero_grad(set_to_none=True)
        workload.loss(compiled(**workload.inputs)).backward()

    step()
    graphs = [graph for model in registry.find_models(workload.model) for graph in model.graphs]
    lanes = graphs[0].compilation.plan.lanes
    chosen = {len(lane.units): lane.id for lane in lanes}  # the last lane of a size; one of each is enough
    chosen = {units: chosen[units] for units in {len(lanes[0].units), min(chosen)}}
    plans = {units: [plan_on_lane(graph.compilation.plan, lane) for graph in graphs] for units, lane in chosen.items()}
    traces = measure_plans(graphs, plans, step, runs=runs)
    torch.compiler.reset()
    errors = [
        error
        for units in sorted(plans)
        for graph, found in zip(graphs, traces[units], strict=True)
        for error in _compare(workload.name, size, graph, units, found)
    ]
    return errors, graphs[0].compilation.profile


def plan_on_lane(plan: Plan, lane: LaneId) -> Plan:
    """Return the plan that runs every segment on `lane`, in graph order."""
    units = len(plan.lanes[lane].units)
    return Plan(
        origin=Origin.SERIAL,
        lanes=plan.lanes,
        assignments=tuple(
            Assignment(
                segment=old.segment,
                lane=lane,
                quota=Quota(units=units, memory_bytes=old.quota.memory_bytes),
                start_ns=start,
                duration_ns=1,
            )
            for start, old in enumerate(plan.assignments)
        ),
        makespan_ns=len(plan.assignments),
        undisturbed_ns=len(plan.assignments),
        serial_ns=len(plan.assignments),
        lower_bound_ns=0,
    )


def measure_plans(
    graphs: Sequence[CompiledGraph],
    plans: Mapping[int, Sequence[Plan]],
    step: Callable[[], None],
    *,
    runs: int,
) -> dict[int, list[list[Trace]]]:
    """Run steps under sets of plans, in turns; return the traces of every graph by set.

    Arguments:
        graphs: all graphs of the model; they have their own plans again afterwards.
        plans: by any number, one plan per graph.
        step: runs every graph once.
        runs: traces per graph and set; at least that many.
    """
    before = [graph.compilation for graph in graphs]
    ready: dict[int, list[tuple[Compilation, Executable]]] = {}
    for number, chosen in plans.items():
        for graph, old, plan in zip(graphs, before, chosen, strict=True):
            graph.variants.adopt(
                compile_plan(
                    old.capture,
                    old.partition,
                    old.observations,
                    old.costs,
                    plan,
                    profile=old.profile,
                    runner=StageRunner(),
                )
            )
        ready[number] = [(graph.compilation, graph.executable) for graph in graphs]
    traces: dict[int, list[list[Trace]]] = {number: [[] for _ in graphs] for number in plans}
    turns = -(-runs // STEPS_PER_TURN)
    for turn in tqdm(range(turns), desc="   measuring", file=sys.stderr, mininterval=5, leave=False):
        for number in plans if turn % 2 == 0 else reversed(plans):
            for graph, made in zip(graphs, ready[number], strict=True):
                graph.variants.adopt(*made)
            step()
            for _ in range(STEPS_PER_TURN):
                step()
                for graph, found in zip(graphs, traces[number], strict=True):
                    found.append(graph.trace())
    for graph, old in zip(graphs, before, strict=True):
        graph.variants.adopt(old)
    return traces


def durations_by_segment(graph: SegmentGraph, traces: Iterable[Trace]) -> list[list[int]]:
    """Return the durations of every segment in all traces."""
    found: list[list[int]] = [[] for _ in graph.segments]
    for trace in traces:
        for span in trace.spans:
            found[span.segment].append(span.end_ns - span.start_ns)
    return found


def _compare(
    workload: str, size: str, compiled: CompiledGraph, units: int, traces: Sequence[Trace]
) -> list[SegmentError]:
    graph, profile = compiled.compilation.partition.graph, compiled.compilation.profile
    half = len(traces) // 2
    durations = durations_by_segment(graph, traces)
    formulas = _predict(graph, profile, units, Observations())
    observed = _predict(graph, profile, units, _observe(graph, units, traces[:half]))
    in_turns = _predict(graph, profile, units, _observe(graph, units, traces[::2]))
    footprint = sum(buffer.num_bytes for buffer in graph.buffers)
    return [
        SegmentError(
            workload=workload,
            size=size,
            graph=graph.role,
            segment=segment.name,
            units=units,
            kind=_largest_kind(segment, profile, units, footprint),
            formula_ns=formulas[segment.id],
            measured_ns=statistics.median(durations[segment.id]),
            undisturbed_ns=float(np.quantile(durations[segment.id], 0.25)),
            observed_ns=observed[segment.id],
            second_half_ns=statistics.median(durations[segment.id][half:]),
            observed_in_turns_ns=in_turns[segment.id],
            other_runs_ns=statistics.median(durations[segment.id][1::2]),
        )
        for segment in graph.segments
    ]


def _predict(graph: SegmentGraph, profile: DeviceProfile, units: int, observations: Observations) -> list[int]:
    """Return the predicted duration of every segment on `units` units."""
    table = estimate_costs(graph, profile, observations)
    return [next(mode.duration_ns for mode in modes if mode.units == units) for modes in table.modes]


def _observe(graph: SegmentGraph, units: int, traces: Sequence[Trace]) -> Observations:
    """Return the median of every body."""
    samples: dict[int, list[int]] = defaultdict(list)
    for segment, durations in zip(graph.segments, durations_by_segment(graph, traces), strict=True):
        samples[segment.body] += durations
    return Observations(
        entries=tuple(
            Observation(body=body, units=units, count=len(found), median_ns=round(statistics.median(found)))
            for body, found in sorted(samples.items())
        )
    )


def _largest_kind(segment: Segment, profile: DeviceProfile, units: int, footprint: int) -> str:
    shares: dict[str, float] = defaultdict(float)
    for kernel in segment.work.parts:
        shares[kernel.kind] += kernel.count * predict_kernel(kernel, profile, units, footprint=footprint).total_ns
    return max(shares, key=lambda kind: shares[kind], default="nothing")


def _table(errors: Sequence[SegmentError], key: Callable[[SegmentError], tuple[Any, ...]]) -> str:
    groups: dict[tuple[Any, ...], list[SegmentError]] = defaultdict(list)
    for error in errors:
        groups[key(error)].append(error)
    rows = []
    for name in sorted(groups):
        group = groups[name]
        formula = [error.formula_ns / error.measured_ns - 1 for error in group]
        undisturbed = [error.formula_ns / error.undisturbed_ns - 1 for error in group]
        observed = [error.observed_ns / error.second_half_ns - 1 for error in group]
        in_turns = [error.observed_in_turns_ns / error.other_runs_ns - 1 for error in group]
        cells = [*_summary(formula), *_summary(undisturbed)[:2], *_summary(observed)[::2], *_summary(in_turns)[::2]]
        rows.append([", ".join(map(str, name)), len(group), *cells])
    headers = ("", "segments", "formula", "bias", "p95", "undisturbed", "bias", "observed", "p95", "in turns", "p95")
    return str(tabulate(rows, headers=headers, colalign=("left",)))


def _summary(errors: Sequence[float]) -> tuple[str, str, str]:
    sizes = np.abs(errors)
    return f"{np.median(sizes):.1%}", f"{np.median(errors):+.1%}", f"{np.quantile(sizes, 0.95):.1%}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_error", description="Check predicted times.")
    parser.add_argument("--workloads", type=names_of(SPECS), default=list(SPECS), help=", ".join(SPECS))
    parser.add_argument("--sizes", type=names_of(MEASURED), default=list(MEASURED), help=", ".join(MEASURED))
    parser.add_argument("--runs", type=int, default=40, help="timed steps per number of units; better 20 or more")
    parser.add_argument("--calibrate", action="store_true", help="calibrate anew before every workload and size")
    parser.add_argument("--json", type=Path, help="write everything there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
