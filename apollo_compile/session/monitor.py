"""Stage 8: turn the trace of a run into observations, and decide whether to replan.

    (Trace, Plan, SegmentGraph, CostTable, Observations) -> Observations
    (Plan, CostTable before, CostTable now) -> whether to plan again

Equal segments share a body, so a measurement belongs to a body on a number of units: every span of a trace is a sample
of (body of its segment, units of its lane). The next cost table is made from these entries.

A cost is the duration of a segment that runs alone, but a span was measured beside others. So each span's duration is
divided by

    1 + sum over spans j on other lanes of  overlap(j) / duration * weight(j) * (factor(own share, share of j) - 1)

the mean slowdown that the planner's simulator would apply (`planner/simulate.py`): a share is the fraction of time
spent waiting for memory, and the weight is the units of j's lane over all units outside the span's own lane.

A median of all samples would need to keep them, and would be slow to notice that the machine has changed. An entry
keeps one running estimate instead, and moves it towards the median m of the new samples by

    median += (m - median) * weight,    weight = max(k / (count + k), LEAST_WEIGHT) for k new samples

which is the mean of the per-run medians, weighted by samples, until LEAST_WEIGHT makes it an exponential average over
about the last 1 / LEAST_WEIGHT runs. Noise on a machine only ever adds time, so the two directions differ: a step up is
at most MAX_STEP of the estimate, so that one disturbed run fades; and a run of less than half the estimate resets the
entry, since the samples before it were a cold start. (The compromise of a Robbins-Monro quantile estimate
with Huber's clipping, https://doi.org/10.1214/aoms/1177729586 and https://doi.org/10.1214/aoms/1177703732.)

Guarantees: entries are unique and ascending in (body, units); entries without new samples are unchanged; the result
depends on the arguments alone.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

from apollo_compile.ir import BodyId, CostTable, Mode, Observation, Observations, Plan, SegmentGraph, Span, Trace
from apollo_compile.planner.problem import Interference

LEAST_WEIGHT = 0.05
"""Least weight of the newest run, however many there were before."""

MAX_STEP = 0.25
"""Largest step upward by one run, as a share of the estimate."""

TOLERANCE = 0.05
"""Change of the durations in a plan, as a share of their sum, below which the plan stands."""


def observe_trace(
    trace: Trace, plan: Plan, graph: SegmentGraph, costs: CostTable, observations: Observations
) -> Observations:
    """Return `observations` with the spans of one more run."""
    durations = _durations_by_mode(trace, plan, graph, costs)
    entries = {(entry.body, entry.units): entry for entry in observations.entries}
    for (body, units), samples in durations.items():
        entries[body, units] = _combine(entries.get((body, units)), body, units, samples)
    return Observations(entries=tuple(entries[key] for key in sorted(entries)))


def should_replan(plan: Plan, before: CostTable, now: CostTable) -> bool:
    """Return whether the durations that the plan was made from were wrong by more than `TOLERANCE`.

    Only the modes that the plan uses count: they are the ones that were measured.
    """
    planned = changed = 0
    for assignment in plan.assignments:
        old = _mode(before, assignment.segment, assignment.quota.units).duration_ns
        planned += old
        changed += abs(_mode(now, assignment.segment, assignment.quota.units).duration_ns - old)
    return changed > TOLERANCE * planned


def is_same_placement(first: Plan, second: Plan) -> bool:
    """Return whether two plans put every segment on the same lane in the same order, whatever the times."""
    return first.lanes == second.lanes and [(a.segment, a.lane) for a in first.in_start_order()] == [
        (a.segment, a.lane) for a in second.in_start_order()
    ]


def _durations_by_mode(
    trace: Trace, plan: Plan, graph: SegmentGraph, costs: CostTable
) -> dict[tuple[BodyId, int], list[int]]:
    interference = Interference(slowdown=costs.slowdown)
    all_units = len(plan.lanes[0].units)
    units = [len(lane.units) for lane in plan.lanes]
    shares = {span: _mode(costs, span.segment, units[span.lane]).memory_share for span in trace.spans}

    def slowdown(span: Span) -> float:
        total = 0.0
        for other in trace.spans:
            overlap = min(span.end_ns, other.end_ns) - max(span.start_ns, other.start_ns)
            if other.lane != span.lane and overlap > 0:
                weight = units[other.lane] / max(1, all_units - units[span.lane])
                total += overlap * weight * (interference.factor(shares[span], shares[other]) - 1)
        return 1 + total / (span.end_ns - span.start_ns) if total else 1.0

    durations: dict[tuple[BodyId, int], list[int]] = defaultdict(list)
    for span in trace.spans:
        alone = round((span.end_ns - span.start_ns) / slowdown(span))
        durations[graph.segments[span.segment].body, units[span.lane]].append(alone)
    return durations


def _mode(costs: CostTable, segment: int, units: int) -> Mode:
    return next(mode for mode in costs.modes[segment] if mode.units == units)


def _combine(old: Observation | None, body: BodyId, units: int, samples: list[int]) -> Observation:
    newest = statistics.median(samples)
    if old is None or newest * 2 < old.median_ns:
        return Observation(body=body, units=units, count=len(samples), median_ns=round(newest))
    weight = max(len(samples) / (old.count + len(samples)), LEAST_WEIGHT)
    step = min((newest - old.median_ns) * weight, old.median_ns * MAX_STEP)
    return Observation(body=body, units=units, count=old.count + len(samples), median_ns=round(old.median_ns + step))
