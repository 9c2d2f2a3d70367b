"""Time every body on every quota.

    measure_bodies(...) -> Observations

The graph is launched once, so that all code is loaded and tuned, and then captured with serial segments on the whole
device; the first segment of every body also runs on one lane of each size, alone, between two events that are nodes of
the CUDA graph. Replays measure the times, without the host's launch time. Nothing that the caller can see changes:
inputs that the graph writes to are copied, and the state of random number generators is restored.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import torch

from apollo_compile.device.gpu.run.gpu import BodyFunction, Event, Gpu, Stream
from apollo_compile.device.gpu.run.launch import Launcher, forked
from apollo_compile.ir import BodyId, Lane, Launch, Observation, Observations, SegmentGraph
from apollo_compile.trials import program_in_order

UNTIMED_REPLAYS = 2
TIMED_REPLAYS = 5


def measure_bodies(
    graph: SegmentGraph,
    bodies: Sequence[BodyFunction],
    lanes: Sequence[Lane],
    gpu: Gpu,
    inputs: Sequence[torch.Tensor],
    *,
    written: Iterable[int],
) -> Observations:
    """Return the median time of each body on each number of units that a lane has.

    Arguments:
        graph: segments in a topological order.
        bodies: by id.
        lanes: the catalogue, first the lane with every unit; of lanes with equal numbers of units, the first is
            measured.
        gpu: their device.
        inputs: inputs of the graph, in order; every replay reads them.
        written: positions of the inputs that the graph writes to.
    """
    given = list(inputs)
    for index in written:
        given[index] = given[index].clone()
    in_turn = [lanes[0].id] * len(graph.segments)
    launcher = Launcher(program_in_order(graph, (lanes[0],), in_turn, owners_release=True), bodies, gpu)
    lane_by_units = {len(lane.units): lane for lane in reversed(lanes)}
    first = {segment.body: segment.id for segment in reversed(graph.segments)}
    timers: dict[tuple[BodyId, int], tuple[Event, Event]] = {}

    def time_body(launch: Launch, arguments: Sequence[torch.Tensor], origin: Stream) -> None:
        for units, lane in lane_by_units.items() if first[launch.body] == launch.segment else ():
            own, begin, end = gpu.lane_stream(lane), gpu.new_timer(), gpu.new_timer()
            stream = origin if own is None else own
            with forked(gpu, origin, [] if own is None else [own]):
                gpu.record(begin, stream)
                made = gpu.call(bodies[launch.body], list(arguments), stream)
                gpu.record(end, stream)
            del made  # freed on the lane, where nothing else runs
            timers[launch.body, units] = (begin, end)

    def launch_all(origin: Stream) -> None:
        launcher.launch(list(given), origin, before=time_body)

    times: dict[tuple[BodyId, int], list[int]] = {}
    with gpu.random_numbers_kept():
        launch_all(gpu.caller_stream())  # autotuning at a body's first run synchronizes, which a capture forbids
        gpu.synchronize()
        gpu.give_back_memory()  # every lane has some of its own
        recording = gpu.capture(launch_all, None)
        for number in range(UNTIMED_REPLAYS + TIMED_REPLAYS):
            recording.replay()
            gpu.synchronize()
            if number >= UNTIMED_REPLAYS:
                for mode, (begin, end) in timers.items():
                    times.setdefault(mode, []).append(gpu.elapsed_ns(begin, end))
        del recording
        gpu.give_back_memory()
    return Observations(
        entries=tuple(
            Observation(body=body, units=units, count=len(samples), median_ns=round(statistics.median(samples)))
            for (body, units), samples in sorted(times.items())
        )
    )
