"""The planner against the schedules of others, on many graphs, without running any.

    python -m benchmarks.planner --only clip,split --devices h200,cpu16 --json results/planner.json

Graphs: forward and backward of six workloads (`graphs.py`) and synthetic training steps of 10 to 500 segments
(`synthetic.py`). Devices: 132 units of the packaged profile `h200`, which comes from data sheets, and 16 of the
packaged profile of CPUs. Durations are formulas, so every number here is a prediction.

Per graph and device: makespan of every baseline (`rules.py`), of the best list schedule
(greedy), and of `solve` with its default effort but for the time limit; the lower bound, the gap to it, and seconds.
Makespans are compared twice: with interference, where the schedule that a method decides on counts; and in the plain
model without, where the shortest candidate of `solve` counts, and which the bound and the gap are about. Printed as
speed-up over serial; JSON has nanoseconds of both.

Exit code 1: on some graph a baseline is more than `MOST_BEHIND` shorter than `solve`, in one of the two comparisons.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

from apollo_compile.ir import Observations, SegmentGraph
from apollo_compile.passes.cost import estimate_costs
from apollo_compile.passes.plan import lanes_for, to_problem
from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.greedy import greedy_schedules
from apollo_compile.planner.problem import Problem, TaskSchedule
from apollo_compile.planner.simulate import execute
from apollo_compile.planner.solve import Effort, solve
from apollo_compile.store.profiles import default_profile, load_profile
from apollo_compile.target.profile import DeviceProfile
from apollo_compile.tools.bench.facts import machine_facts
from apollo_compile.units import NS_PER_MS
from benchmarks.graphs import load_graphs
from benchmarks.rules import BASELINES
from benchmarks.run import names_of
from benchmarks.workloads.synthetic import synthetic_graphs

DEVICES: dict[str, Callable[[], DeviceProfile]] = {
    "h200": lambda: load_profile(Path("h200")),
    "cpu16": lambda: default_profile(16),
}

MOST_BEHIND = 0.01
"""A smaller difference could not be measured in a step."""

SHORT_NAMES = {
    "equal split": "equal",
    "critical path + round-robin": "torchsched",
    "first-successor streams": "Opara",
    "wavefront": "waves",
}
"""Column heads of baselines, where their names are too long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The plan of one method for one graph; times in nanoseconds."""

    makespan_ns: int
    """With interference."""
    undisturbed_ns: int
    """Without: the shortest that the method knows of."""
    took_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Search(Result):
    """A result of `solve`."""

    time_limit_s: float
    gap: float
    """Undisturbed makespan over the bound, minus 1."""
    proof: str | None
    chosen: str
    """Name of the candidate that was chosen."""
    stopped_early: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One graph on one device."""

    graph: str
    device: str
    num_segments: int
    bound_ns: int
    baselines: dict[str, Result]
    greedy: Result
    searches: tuple[Search, ...]

    def defeats(self) -> list[str]:
        """Return one line per baseline and search in which the baseline is ahead by more than `MOST_BEHIND`."""
        return [
            f"{self.graph} on {self.device}: {name} takes {theirs:,} ns, solve at {search.time_limit_s:g} s takes "
            f"{ours:,} ns {kind} interference"
            for search in self.searches
            for name, result in self.baselines.items()
            for kind, theirs, ours in (
                ("with", result.makespan_ns, search.makespan_ns),
                ("without", result.undisturbed_ns, search.undisturbed_ns),
            )
            if theirs < ours / (1 + MOST_BEHIND)
        ]


def main(arguments: list[str] | None = None) -> int:
    """Plan, print the table, write JSON; return the exit code."""
    args = _parse(arguments)
    graphs = load_graphs() | synthetic_graphs()
    chosen = [graph for name, graph in graphs.items() if any(part in name for part in args.only)]
    tasks = [(graph, device) for device in args.devices for graph in chosen]
    rows = []
    for graph, device in tqdm(tasks, desc="planning", file=sys.stderr, mininterval=1):
        rows.append(measure(graph, device, args.time_limits))
        if args.json is not None:
            _write(args.json, rows)
    print(format_rows(rows, args.time_limits))
    defeats = [line for row in rows for line in row.defeats()]
    for line in defeats:
        print(f"BEHIND: {line}")
    return 1 if defeats else 0


def measure(graph: SegmentGraph, device: str, time_limits_s: Iterable[float]) -> Row:
    """Return the plans of every method for a graph on a device."""
    profile = DEVICES[device]()
    costs = estimate_costs(graph, profile, Observations())
    problem = to_problem(graph, costs, lanes_for(graph, costs, profile.lanes))
    return Row(
        graph=graph.name,
        device=device,
        num_segments=len(graph.segments),
        bound_ns=lower_bound(problem),
        baselines={name: _measure_rule(problem, baseline) for name, baseline in BASELINES.items()},
        greedy=_measure_rule(problem, greedy_schedules),
        searches=tuple(_measure_search(problem, Effort(time_limit_s=limit)) for limit in time_limits_s),
    )


def format_rows(rows: list[Row], time_limits_s: list[float]) -> str:
    """Return the table, and under it the largest gaps and the longest times."""
    headers = ["graph", "device", "segments", "serial ms", *(SHORT_NAMES.get(name, name) for name in BASELINES)]
    headers += ["greedy", *(f"solve {limit:g} s" for limit in time_limits_s), "bound"]
    headers += [f"gap {limit:g} s" for limit in time_limits_s]
    headers += ["greedy ms", *(f"took {limit:g} s" for limit in time_limits_s)]
    table = tabulate([_cells(row) for row in rows], headers=headers, disable_numparse=True, stralign="right")
    lines = [
        table,
        "baselines, greedy, solve: speed-up over serial with interference; bound: the same, without",
        *(_summary(rows, index, limit) for index, limit in enumerate(time_limits_s)),
        f"greedy: at most {max(row.greedy.took_s for row in rows):.3f} s",
    ]
    return "\n".join(lines)


def _measure_rule(problem: Problem, rule: Callable[[Problem], TaskSchedule | Sequence[TaskSchedule]]) -> Result:
    begin = time.perf_counter()
    found = rule(problem)
    took_s = time.perf_counter() - begin
    schedules = [found] if isinstance(found, TaskSchedule) else found
    return Result(
        makespan_ns=min(execute(problem, schedule).makespan for schedule in schedules),
        undisturbed_ns=min(schedule.makespan for schedule in schedules),
        took_s=took_s,
    )


def _measure_search(problem: Problem, effort: Effort) -> Search:
    begin = time.perf_counter()
    solution = solve(problem, effort)
    took_s = time.perf_counter() - begin
    undisturbed_ns = min(candidate.makespan for candidate in solution.candidates)
    return Search(
        makespan_ns=solution.execution.makespan,
        undisturbed_ns=undisturbed_ns,
        took_s=took_s,
        time_limit_s=effort.time_limit_s,
        gap=undisturbed_ns / solution.bound - 1,
        proof=solution.proof,
        chosen=solution.candidates[solution.chosen].name,
        stopped_early=solution.stopped_early,
    )


def _cells(row: Row) -> list[str]:
    serial_ns = row.baselines["serial"].makespan_ns

    def speedup(makespan_ns: int) -> str:
        return f"{serial_ns / makespan_ns:.3f}"

    return [
        row.graph,
        row.device,
        str(row.num_segments),
        f"{serial_ns / NS_PER_MS:.2f}",
        *(speedup(result.makespan_ns) for result in row.baselines.values()),
        speedup(row.greedy.makespan_ns),
        *(speedup(search.makespan_ns) + ("*" if search.stopped_early else "") for search in row.searches),
        speedup(row.bound_ns),
        *(f"{search.gap:.2%}" for search in row.searches),
        f"{1000 * row.greedy.took_s:.0f}",
        *(f"{search.took_s:.1f} s" for search in row.searches),
    ]


def _summary(rows: list[Row], index: int, limit: float) -> str:
    searches = [row.searches[index] for row in rows]
    worst = max(range(len(rows)), key=lambda number: searches[number].gap)
    early = sum(search.stopped_early for search in searches)
    return (
        f"solve at {limit:g} s: gap at most {searches[worst].gap:.2%} ({rows[worst].graph} on {rows[worst].device}); "
        f"at most {max(search.took_s for search in searches):.1f} s; time limit struck on {early} of {len(rows)} (*)"
    )


def _write(path: Path, rows: list[Row]) -> None:
    """Write the rows; those of other graphs and devices that the file has already stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    by_key = {(row["graph"], row["device"]): row for row in known}
    by_key |= {(row.graph, row.device): asdict(row) for row in rows}
    content = {"machine": machine_facts(), "rows": list(by_key.values())}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description="Plan many graphs.")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[""], help="parts of names of graphs")
    parser.add_argument("--devices", type=names_of(DEVICES), default=list(DEVICES), help=", ".join(DEVICES))
    parser.add_argument("--time-limits", type=_seconds, default=[2.0, 10.0], help="of solve, in seconds, e.g. 2,10")
    parser.add_argument("--json", type=Path, help="write everything there; rows of graphs that do not run now stay")
    return parser.parse_args(arguments)


def _seconds(text: str) -> list[float]:
    limits = [float(limit) for limit in text.split(",")]
    if min(limits) <= 0:
        raise argparse.ArgumentTypeError(f"a time limit is above 0, got {text}")
    return limits


if __name__ == "__main__":
    sys.exit(main())
