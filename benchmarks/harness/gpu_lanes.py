"""Small programs on lanes of a GPU, written by hand, and their times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from apollo_compile.device.gpu.check.examine import split_lanes
from apollo_compile.device.gpu.run.gpu import Sharing, TorchGpu
from apollo_compile.device.gpu.run.launch import Launcher
from apollo_compile.ir import BodyId, BufferId, Lane, LaneId, Launch, Program, SegmentId
from apollo_compile.target.lanes import lane_catalogue

SPIN_NS = 1_000_000
"""How long a kernel spins that is to be seen by a clock."""

MARK_NS = 20_000
"""How long a marker runs."""

SMALL_KERNELS = 300
"""Kernels in a row on every lane."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a check of a GPU saw."""

    is_met: bool
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)


Check = Callable[[TorchGpu], Outcome]
"""Raises what it cannot do."""


def split_evenly(gpu: TorchGpu, count: int) -> tuple[Lane, ...]:
    """Return so many lanes of the same size, as far as atoms allow."""
    return split_lanes(gpu.native.atom_sizes, (1,) * count)


def beside(lanes: Sequence[Lane], bodies: Sequence[int] | None = None) -> Program:
    """Return a program in which segment `i` reads input `i` on lane `i`, with body `bodies[i]`, by default 0."""
    count = len(lanes)
    return Program(
        name="beside",
        lanes=tuple(replace(lane, id=LaneId(index)) for index, lane in enumerate(lanes)),
        instructions=tuple(
            (
                Launch(
                    segment=SegmentId(index),
                    body=BodyId(bodies[index] if bodies else 0),
                    inputs=(BufferId(index),),
                    takes=(False,),
                    outputs=(BufferId(count + index),),
                ),
            )
            for index in range(count)
        ),
        num_buffers=2 * count,
        num_events=0,
        inputs=tuple(BufferId(index) for index in range(count)),
        outputs=tuple(BufferId(count + index) for index in range(count)),
    )


def spinners(gpu: TorchGpu, count: int) -> Callable[[Any], object]:
    """Return work that spins on `count` lanes of one split, side by side."""
    from apollo_compile.device.gpu.check.census_kernel import COLUMNS, launch_census

    lanes = split_lanes(gpu.native.atom_sizes, (1,) * max(2, count))[:count]
    outs = [torch.zeros(64, COLUMNS, dtype=torch.int64, device=gpu.device) for _ in lanes]

    def body(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        launch_census(inputs[0], SPIN_NS)
        return [inputs.pop()]

    program = beside(lanes)
    launcher = Launcher(program, [body], gpu)
    return lambda origin: launcher.launch(list(outs), origin)


def launch_with(launcher: Launcher, inputs: Sequence[torch.Tensor], origin: Any) -> None:
    """Launch, and leave the inputs to the caller."""
    launcher.launch(list(inputs), origin)


def mark_lanes(gpu: TorchGpu) -> None:
    """Launch a marker on every lane of the catalogue: a kernel of as many blocks as the lane has SMs."""
    from apollo_compile.device.gpu.check.census_kernel import COLUMNS, launch_census

    for lane in lane_catalogue(gpu.native.num_sms, gpu.native.atom_sizes):
        stream = gpu.lane_stream(lane) or gpu.caller_stream()
        with torch.cuda.stream(stream):
            launch_census(torch.zeros(len(lane.units), COLUMNS, dtype=torch.int64, device=gpu.device), MARK_NS)


def time_on(gpu: TorchGpu, lane: Lane, call: Callable[[], object], repeats: int = 20) -> int:
    """Return the median nanoseconds of a call on a lane."""
    stream = gpu.lane_stream(lane) or gpu.caller_stream()
    times = []
    with torch.cuda.stream(stream):
        for _ in range(repeats + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            call()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e6)
    return round(statistics.median(times[3:]))


def time_graph(gpu: TorchGpu, work: Callable[[Any], object], repeats: int = 20) -> int:
    """Return the median nanoseconds of a replay of what `work` launches."""
    work(gpu.caller_stream())
    gpu.synchronize()
    recording = gpu.capture(work, None)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        recording.replay()
        gpu.synchronize()
        times.append(time.perf_counter_ns() - begin)
    return round(statistics.median(times))


def time_small_kernels(gpu: TorchGpu, counts: Sequence[int]) -> dict[str, int]:
    """Return the nanoseconds of a replay of many small kernels on each of so many lanes, and of plain streams."""
    values = [torch.zeros(1024, device=gpu.device) for _ in range(max(counts))]

    def body(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        for _ in range(SMALL_KERNELS):
            inputs[0].add_(1)
        return [inputs.pop()]

    def time_of(device: TorchGpu, lanes: Sequence[Lane]) -> int:
        return time_graph(device, partial(launch_with, Launcher(beside(lanes), [body], device), values[: len(lanes)]))

    times = {"1 lane": time_of(gpu, split_evenly(gpu, max(counts))[:1])}
    for count in counts:
        times[f"{count} lanes"] = time_of(gpu, split_evenly(gpu, count))
        times[f"{count} streams"] = time_of(gpu.sharing(Sharing.FREE), split_evenly(gpu, count))
    return times
