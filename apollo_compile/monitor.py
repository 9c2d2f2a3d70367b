"""Stage 8: what running a program says about its plan.

    (Trace, Plan, SegmentGraph, Observations) -> Observations

Equal segments share a body, so a measurement belongs to a body on a number of units: every span of a trace is a sample
of (body of its segment, units of its lane). The entries are what the next cost table is made from.

A median of all samples ever seen would need all of them, and would be slow to notice that the machine has changed. An
entry keeps one number instead, the running estimate, and moves it towards the median of the new samples m by

    median += (m - median) * weight,    weight = max(k / (count + k), LEAST_WEIGHT) for k new samples

which is the mean of the per-run medians, weighted by samples, until LEAST_WEIGHT makes it an exponential average over
about the last 1 / LEAST_WEIGHT runs. Noise on a machine only ever adds time, so the two directions differ: a step up is
at most MAX_STEP of the estimate, so that one disturbed run fades; and a run in less than half the estimate starts the
entry anew, since what was measured before it was a cold start. (The compromise of a Robbins-Monro quantile estimate
with Huber's clipping, https://doi.org/10.1214/aoms/1177729586 and https://doi.org/10.1214/aoms/1177703732.)

Guarantees: entries are unique and ascending in (body, units); entries without new samples are unchanged; the result
depends on the arguments alone.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

from apollo_compile.ir import BodyId, Observation, Observations, Plan, SegmentGraph, Trace

LEAST_WEIGHT = 0.05
"""Weight of the newest run however many there were."""

MAX_STEP = 0.25
"""Largest step upward by one run, as a share of the estimate."""


def observe_trace(trace: Trace, plan: Plan, graph: SegmentGraph, observations: Observations) -> Observations:
    """Return `observations` with the spans of one more run."""
    durations = _durations_by_mode(trace, plan, graph)
    entries = {(entry.body, entry.units): entry for entry in observations.entries}
    for (body, units), samples in durations.items():
        entries[body, units] = _combine(entries.get((body, units)), body, units, samples)
    return Observations(entries=tuple(entries[key] for key in sorted(entries)))


def _durations_by_mode(trace: Trace, plan: Plan, graph: SegmentGraph) -> dict[tuple[BodyId, int], list[int]]:
    durations: dict[tuple[BodyId, int], list[int]] = defaultdict(list)
    for span in trace.spans:
        units = len(plan.lanes[span.lane].units)
        durations[graph.segments[span.segment].body, units].append(span.end_ns - span.start_ns)
    return durations


def _combine(entry: Observation | None, body: BodyId, units: int, samples: list[int]) -> Observation:
    newest = statistics.median(samples)
    if entry is None or newest * 2 < entry.median_ns:
        return Observation(body=body, units=units, count=len(samples), median_ns=round(newest))
    weight = max(len(samples) / (entry.count + len(samples)), LEAST_WEIGHT)
    step = min((newest - entry.median_ns) * weight, entry.median_ns * MAX_STEP)
    return Observation(
        body=body, units=units, count=entry.count + len(samples), median_ns=round(entry.median_ns + step)
    )
