"""Time every body on every quota.

    measure_bodies(...) -> Observations

The graph is launched once, so that all code is loaded and tuned, and then captured with serial segments on the whole
device; the first segment of every body also runs on one lane of each size, alone, between two events that are nodes of
the CUDA graph. Replays measure the times, without the host's launch time. Nothing that the caller can see changes:
inputs that the graph writes to are copied, and the state of random number generators is restored.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

import torch

from apollo_compile.device.gpu.run.gpu import Body, Event, Gpu, Stream
from apollo_compile.device.gpu.run.launch import forked
from apollo_compile.ir import BodyId, BufferId, Lane, Observation, Observations, Segment, SegmentGraph

UNTIMED_REPLAYS = 2
TIMED_REPLAYS = 5


def measure_bodies(
    graph: SegmentGraph,
    bodies: Sequence[Body],
    lanes: Iterable[Lane],
    gpu: Gpu,
    inputs: Sequence[torch.Tensor],
    *,
    written: Iterable[int],
) -> Observations:
    """Return the median time of each body on each number of units that a lane has.

    Arguments:
        graph: segments in a topological order.
        bodies: by id.
        lanes: the catalogue; of lanes with equal numbers of units, the first is measured.
        gpu: their device.
        inputs: inputs of the graph, in order; every replay reads them.
        written: positions of the inputs that the graph writes to.
    """
    given = list(inputs)
    for index in written:
        given[index] = given[index].clone()
    probe = _Probe(graph, bodies, lanes, gpu, given)
    times: dict[tuple[BodyId, int], list[int]] = {}
    with gpu.random_numbers_kept():
        probe.launch(gpu.caller_stream())  # autotuning at a body's first run synchronizes, which a capture forbids
        gpu.synchronize()
        gpu.give_back_memory()  # every lane has some of its own
        recording = gpu.capture(probe.launch, None)
        for number in range(UNTIMED_REPLAYS + TIMED_REPLAYS):
            recording.replay()
            gpu.synchronize()
            if number >= UNTIMED_REPLAYS:
                for mode, (begin, end) in probe.timers.items():
                    times.setdefault(mode, []).append(gpu.elapsed_ns(begin, end))
        del recording
        gpu.give_back_memory()
    return Observations(
        entries=tuple(
            Observation(body=body, units=units, count=len(samples), median_ns=round(statistics.median(samples)))
            for (body, units), samples in sorted(times.items())
        )
    )


class _Probe:
    """Launches a graph, with every body timed on lanes of every size in between."""

    def __init__(
        self,
        graph: SegmentGraph,
        bodies: Sequence[Body],
        lanes: Iterable[Lane],
        gpu: Gpu,
        inputs: list[torch.Tensor],
    ) -> None:
        self.timers: dict[tuple[BodyId, int], tuple[Event, Event]] = {}
        self._graph = graph
        self._bodies = bodies
        self._gpu = gpu
        self._inputs = inputs
        self._lane_by_units: dict[int, Lane] = {}
        for lane in lanes:
            self._lane_by_units.setdefault(len(lane.units), lane)
        self._first = {segment.body: segment.id for segment in reversed(graph.segments)}

    def launch(self, origin: Stream) -> None:
        """Launch everything from `origin`; a buffer is freed after its last reader."""
        values = dict(zip(self._graph.inputs, self._inputs, strict=True))
        last = {
            buffer: segment.id for segment in self._graph.segments for buffer in (*segment.inputs, *segment.outputs)
        }
        for segment in self._graph.segments:
            arguments = [values[buffer] for buffer in segment.inputs]
            if self._first[segment.body] == segment.id:
                for units, lane in self._lane_by_units.items():
                    self._time(segment, units, list(arguments), origin, self._gpu.lane_stream(lane))
            made = self._gpu.call(self._bodies[segment.body], arguments, origin)
            values.update(zip(segment.outputs, made, strict=True))
            _forget(values, last, segment)

    def _time(
        self, segment: Segment, units: int, arguments: list[torch.Tensor], origin: Stream, lane: Stream | None
    ) -> None:
        gpu = self._gpu
        stream = origin if lane is None else lane
        begin, end = gpu.new_timer(), gpu.new_timer()
        with forked(gpu, origin, [] if lane is None else [lane]):
            gpu.record(begin, stream)
            made = gpu.call(self._bodies[segment.body], arguments, stream)
            gpu.record(end, stream)
        del made  # freed on the lane, where nothing else runs
        self.timers[segment.body, units] = (begin, end)


def _forget(values: dict[BufferId, torch.Tensor], last: Mapping[BufferId, int], segment: Segment) -> None:
    for buffer in {*segment.inputs, *segment.outputs}:
        if last[buffer] == segment.id:
            del values[buffer]
