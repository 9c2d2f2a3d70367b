"""Stage 2: estimate the durations of every segment.

    (SegmentGraph, DeviceProfile, Observations) -> CostTable

A segment gets one mode per unit count of the lane catalogue of the device. Its duration is, in this order:

    measured    the median of its body on that many units
    scaled      formula * median / formula at the nearest number of units on which its body was measured
    formula     the roofline's prediction

A segment has a mode on no unit if its body was measured there: one that only waits for other ranks.

Equal segments share a body, so measuring one layer gives the cost of all equal layers. The first segment with a body
is predicted slower, because the code of the body is cold when it first runs in a step.

The memory share of the duration always comes from the formula. The planner (`planner/simulate.py`) uses it to predict
how much segments slow each other. The launch share comes from the formula too; only reports read it.

Guarantees: at least one mode per segment, ascending in units; every duration is at least 1 ns, so that no two
segments of a lane start at the same time. Leaves interference between concurrent segments to the planner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apollo_compile.cost_model.roofline import SegmentTime, predict
from apollo_compile.ir import CostSource, CostTable, Mode, Observations, Segment, SegmentGraph

if TYPE_CHECKING:
    from apollo_compile.target.profile import DeviceProfile


def estimate_costs(graph: SegmentGraph, profile: DeviceProfile, observations: Observations) -> CostTable:
    """Return one mode per segment and unit count of the lane catalogue."""
    unit_counts = sorted({len(lane.units) for lane in profile.lanes})
    medians: dict[int, dict[int, int]] = {}
    for entry in observations.entries:
        medians.setdefault(entry.body, {})[entry.units] = max(1, entry.median_ns)
    footprint = sum(buffer.num_bytes for buffer in graph.buffers)
    first = {segment.body: segment.id for segment in reversed(graph.segments)}

    def formula(segment: Segment, units: int) -> SegmentTime:
        return predict(
            segment.work,
            profile,
            units,
            num_tensors=len(segment.inputs) + len(segment.outputs),
            footprint=footprint,
            is_first=first[segment.body] == segment.id,
        )

    def mode(segment: Segment, units: int) -> Mode:
        prediction, measured = formula(segment, max(1, units)), medians.get(segment.body, {})
        duration_ns, source = prediction.duration_ns, CostSource.FORMULA
        if units in measured:
            duration_ns, source = measured[units], CostSource.MEASURED
        elif any(measured):
            nearest = min(filter(None, measured), key=lambda count: (abs(count - units), count))
            ratio = measured[nearest] / formula(segment, nearest).duration_ns
            duration_ns, source = max(1, round(duration_ns * ratio)), CostSource.SCALED
        return Mode(
            units=units,
            duration_ns=duration_ns,
            memory_bytes=segment.workspace_bytes + sum(graph.buffers[buffer].num_bytes for buffer in segment.outputs),
            source=source,
            memory_share=prediction.memory_share,
            launch_share=prediction.launch_share,
        )

    def counts(segment: Segment) -> list[int]:
        return [0, *unit_counts] if 0 in medians.get(segment.body, {}) else unit_counts

    return CostTable(
        modes=tuple(tuple(mode(segment, units) for units in counts(segment)) for segment in graph.segments),
        handover_ns=profile.handover_ns,
        slowdown=profile.slowdown,
    )
