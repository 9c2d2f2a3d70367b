"""Stage 2: what every segment costs on every number of units.

    (SegmentGraph, DeviceProfile, Observations) -> CostTable

A segment gets one mode per unit count of the lane catalogue of the device. The duration is the measured median where
the segment's body was observed on that many units, and the roofline's prediction elsewhere. Equal segments share a
body, so one measured layer prices all layers like it.

Guarantees: at least one mode per segment, ascending in units, every duration at least 1 ns (so that starts order
segments strictly). Leaves to others: what segments do to each other when they run side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apollo_compile.cost_model.roofline import predict_ns
from apollo_compile.ir import CostSource, CostTable, Mode, Observations, Segment, SegmentGraph
from apollo_compile.lanes import lane_catalogue

if TYPE_CHECKING:
    from apollo_compile.device import DeviceProfile


def estimate_costs(graph: SegmentGraph, profile: DeviceProfile, observations: Observations) -> CostTable:
    """Return one mode per segment and unit count of the lane catalogue."""
    unit_counts = sorted({len(lane.units) for lane in lane_catalogue(profile.units)})
    measured = {(entry.body, entry.units): entry.median_ns for entry in observations.entries}

    def mode(segment: Segment, units: int) -> Mode:
        median_ns = measured.get((segment.body, units))
        return Mode(
            units=units,
            duration_ns=predict_ns(segment.work, profile, units) if median_ns is None else max(1, median_ns),
            memory_bytes=sum(graph.buffers[buffer].num_bytes for buffer in segment.outputs),
            source=CostSource.FORMULA if median_ns is None else CostSource.MEASURED,
        )

    return CostTable(
        modes=tuple(tuple(mode(segment, units) for units in unit_counts) for segment in graph.segments),
        handover_ns=profile.handover_ns,
    )
