"""Sentences of a report: overlaps, missed overlaps and their reasons, limits of the plan, and suggestions.

    describe_state(states) -> stage of the Dynamo graphs, the first line of a report
    describe(graph, report) -> sentences about one graph
    breaks_by_place(breaks) -> distinct graph breaks, with the graphs that they end

Sentences only interpret numbers of the summary. Every sentence has a condition under which it is useful.
"""

from __future__ import annotations

from collections.abc import Sequence

from apollo_compile.ir import GraphBreak, Standing, Variant
from apollo_compile.ir.text import format_count
from apollo_compile.reports.values import Bottleneck, GraphSummary, Limit, ModelSummary, PairSummary, Stage, State
from apollo_compile.units import format_ns


def format_interval(standing: Standing) -> str:
    """Return the interval of a ratio, as in `1.08..1.15`; empty for the winner, which it is relative to."""
    low, high = standing.interval
    return "" if low == high == 1.0 else f"{low:.2f}..{high:.2f}"


MUCH = 0.05
"""Share of a graph's serial time from which the overlap of two branches is worth a sentence."""

MANY = 0.25
"""Share of a graph's time from which a bottleneck is worth a sentence."""

MOST = 0.5
"""Share of a graph's time from which a bottleneck is the dominant one."""

SMALL_GAIN = 1.02
"""Gain below which lanes are not worth a sentence."""

MAX_PAIRS = 4

MAX_GRAPHS = 4
"""Number of graphs that a line about states names, per stage."""

WORTH_BATCHING = 1.2
"""Time of equal segments side by side over that of one batched call from which it is worth a sentence."""

WRONG = 1.1
"""Measured over predicted time from which the difference is worth a sentence."""


NOTHING_YET = (
    "nothing compiled for this model has run yet: call the compiled model first. Without a model, report() covers "
    "everything that was compiled, also with FSDP2. With the option disable or APOLLO_DISABLE=1 nothing is reported. "
    "Where Dynamo runs all of a model in eager, TORCH_LOGS=graph_breaks says why"
)

NOT_MEASURED_YET = "not measured yet: the first call of a plan is cold and does not count"


def describe_state(states: Sequence[State]) -> str:
    """Return the stages of Dynamo graphs in one line, with details; empty if there is none."""
    if len({(state.progress, state.detail) for state in states}) == 1:
        return str(states[0])
    by_stage = {stage: [state for state in states if state.stage is stage] for stage in Stage}
    return "; ".join(f"{_longest(found)}: {_list(found)}" for found in by_stage.values() if found)


def _longest(states: Sequence[State]) -> str:
    """Return the progress of the graph that takes the most steps; all of them run in the same steps."""
    return max(states, key=lambda state: state.num_steps).progress


def _list(states: Sequence[State]) -> str:
    return _first([f"{state.graph} ({state.detail})" if state.detail else state.graph for state in states])


def breaks_by_place(breaks: Sequence[GraphBreak]) -> list[tuple[GraphBreak, str]]:
    """Return one graph break per line of code and problem, with the names of all graphs that end there."""
    found: dict[tuple[str, int, str], list[GraphBreak]] = {}
    for each in breaks:
        found.setdefault((each.file, each.line, each.problem), []).append(each)
    return [(alike[0], _first([each.graph for each in alike])) for alike in found.values()]


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_GRAPHS]) + (f" and {len(names) - MAX_GRAPHS} more" if len(names) > MAX_GRAPHS else "")


def describe(graph: GraphSummary, report: ModelSummary) -> tuple[str, ...]:
    """Return sentences about a graph: overlaps, limits, deviations and suggestions."""
    return (*_overlaps(graph), *_limits(graph), *_unknown_work(graph), *_deviations(graph), *_remedies(graph, report))


def describe_search(graph: GraphSummary) -> str:
    """Return how the plan was found."""
    if graph.pinned:
        return "read from a plan file"
    parts = [f"best of {format_count(len(graph.candidates), 'candidate')}"] if graph.candidates else ["no search"]
    if graph.solver:
        parts.append(f"{graph.solver}, seed {graph.seed}")
    if graph.stopped_early:
        parts.append("stopped by the time limit")
    if graph.num_replans:
        parts.append(f"planned again from measured durations ({graph.num_replans}x)")
    if graph.is_deterministic:
        parts.append("not replanned from measurements, since deterministic algorithms are enabled")
    return "; ".join(parts)


def describe_device(graph: GraphSummary) -> str:
    """Return the device that the plan is for, and the source of its profile."""
    device = graph.device
    units = format_count(device.units, "unit")
    return f"for {device.name} ({device.kind}, {units}), profile {device.source}"


def _overlaps(graph: GraphSummary) -> list[str]:
    found = []
    did = "overlapped" if graph.measured else "will overlap"
    much = MUCH * graph.serial_ns
    for pair in graph.pairs[:MAX_PAIRS]:
        if pair.overlap_ns >= much:
            found.append(f"{_who(pair)} {did} for {format_ns(pair.overlap_ns)}{_allowed(pair)}.")
        elif graph.variant == Variant.PLAN and graph.planned_overlap_ns(pair) >= much:
            found.append(
                f"{_who(pair)} are planned to overlap for {format_ns(graph.planned_overlap_ns(pair))}, but overlapped "
                f"for {format_ns(pair.overlap_ns)} in the last run, which other processes may have disturbed."
            )
        elif pair.could_overlap_ns >= much:
            found.append(
                f"{_who(pair)} are independent for {format_ns(pair.could_overlap_ns)}, but run one after the other: "
                f"{_why_serial(graph, pair)}."
            )
    if not any(pair.could_overlap_ns >= much for pair in graph.pairs if pair.first != pair.second):
        found.append(_chain(graph))
    return found


def _who(pair: PairSummary) -> str:
    return f"Segments within {pair.first}" if pair.first == pair.second else f"{pair.first} and {pair.second}"


def _allowed(pair: PairSummary) -> str:
    is_less = pair.overlap_ns < pair.could_overlap_ns
    return f" (dependencies allow {format_ns(pair.could_overlap_ns)})" if is_less else ""


def _why_serial(graph: GraphSummary, pair: PairSummary) -> str:
    if graph.device.units == 1:
        return "there is one unit"
    if graph.variant not in (Variant.PLAN, Variant.SERIAL):
        return f"{graph.variant} runs the graph"
    if graph.num_lanes > 1:
        return "the plan gains more elsewhere"
    choices = [
        {c.units: c.duration_ns for c in s.choices} for s in graph.segments if s.branch in (pair.first, pair.second)
    ]
    shared = [units for units in set.intersection(*map(set, choices)) if units <= graph.device.units // 2]
    if not shared:
        return "no lane has half of the units"
    half = max(shared)
    longer = sum(on[half] for on in choices) / sum(on[graph.device.units] for on in choices)
    return (
        f"on {half} of the {graph.device.units} units they take {longer:.2f}x as long as on all, so sharing the device "
        "gains little"
    )


def _chain(graph: GraphSummary) -> str:
    if len(graph.segments) == 1:
        return "Nothing can overlap: there is one segment."
    names = [branch for branch in graph.branches if branch]
    who = f"{', '.join(names[:-1])} and {names[-1]} depend" if 1 < len(names) <= MAX_PAIRS else "its segments depend"
    if graph.serial_ns > 1.02 * graph.critical_path_ns:
        return f"Almost nothing can overlap between modules: {who} on each other, one after the other."
    return f"Nothing can overlap: {who} on each other, in one chain of {len(graph.segments)} segments."


def _limits(graph: GraphSummary) -> list[str]:
    if graph.possible_gain < SMALL_GAIN:
        return [f"No plan on these lanes can be more than {graph.possible_gain:.2f}x as fast as one lane."]
    if graph.limit is Limit.DEPENDENCIES:
        limit = f"the longest chain of dependencies takes {format_ns(graph.critical_path_ns)} on any lanes"
    else:
        limit = f"the work alone keeps {graph.device.units} units busy for about that long"
    return [
        f"No plan takes less than {format_ns(graph.bound_ns)} ({graph.possible_gain:.2f}x): {limit}; this plan takes "
        f"{format_ns(graph.predicted_ns)} ({graph.gain:.2f}x)."
    ]


def _unknown_work(graph: GraphSummary) -> list[str]:
    if not graph.without_formula:
        return []
    names = ", ".join(graph.without_formula)
    return [f"Predictions for segments with these operators are rough, since they have no formula but bytes: {names}."]


def _deviations(graph: GraphSummary) -> list[str]:
    """Return the deviation of the last run from the plan, and the largest part of it."""
    if graph.measured is None or not graph.predicted_ns:
        return []
    ratio = graph.measured.duration_ns / graph.predicted_ns
    if 1 / WRONG < ratio < WRONG:
        return []
    off = {
        f"in {module.name}": module.measured_ns - module.predicted_ns
        for module in graph.modules
        if module.measured_ns is not None
    }
    off["while no lane was busy"] = graph.measured.idle_ns - graph.predicted.idle_ns
    place, most = max(off.items(), key=lambda item: item[1] if ratio > 1 else -item[1])
    where = (
        f", the largest part of it {place} ({format_ns(abs(most))} {'more' if most > 0 else 'less'})" if most else ""
    )
    return [f"The last run took {ratio:.2f}x the predicted time{where}; other processes may have disturbed this run."]


def _remedies(graph: GraphSummary, report: ModelSummary) -> list[str]:
    found = []
    times = graph.time_by_bottleneck()
    total = max(1, sum(times.values()))
    share = {kind: time_ns / total for kind, time_ns in times.items()}
    if share[Bottleneck.LAUNCH] >= MANY:
        found.append(
            f"Try a larger batch: segments with {share[Bottleneck.LAUNCH]:.0%} of the time mostly launch small kernels."
        )
    if share[Bottleneck.MEMORY] >= MANY:
        found.append(
            f"Segments with {share[Bottleneck.MEMORY]:.0%} of the time wait for memory, which more units do not speed "
            "up: try a smaller data type."
        )
    if graph.possible_gain < SMALL_GAIN and share[Bottleneck.COMPUTE] > MOST:
        largest = max(graph.modules, key=lambda module: module.predicted_ns)
        found.append(
            f"Lanes cannot help here. Try to reduce the work itself, for example with torch.autocast: segments with "
            f"{share[Bottleneck.COMPUTE]:.0%} of the time compute, and {largest.name} takes "
            f"{largest.predicted_ns / total:.0%} of it."
        )
    for each in graph.ensembles:
        if each.apart_ns > WORTH_BATCHING * each.batched_ns:
            found.append(
                f"Try torch.vmap over torch.func.stack_module_state: {len(each.names)} independent segments run the "
                f"same code ({_first(each.names)}), which takes {format_ns(each.apart_ns)} or more side by side, and "
                f"{format_ns(each.batched_ns)} as one batched call, by prediction."
            )
    if report.breaks and not report.fragments:  # `fragments` covers the breaks of all graphs
        found.append(
            f"Try to remove the {len(report.breaks)} graph breaks below: nothing overlaps across a break."
            if len(report.breaks) > 1
            else "Try to remove the graph break below: nothing overlaps across a break."
        )
    if graph.stopped_early:
        found.append("The time limit ended the search: try a larger 'plan.time_limit_s'.")
    return found
