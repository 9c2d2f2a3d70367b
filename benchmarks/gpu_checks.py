"""Checks T0 to T15: what has to hold on a GPU before a step time of lanes means anything. See `gpu_suite/`.

Each check is a function of the device that returns what it saw; what it cannot do it raises. Whether whole models are
faster is the second half of the suite.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from apollo_compile.config import load_config
from apollo_compile.device.gpu.check.examine import lane_of_atoms
from apollo_compile.device.gpu.check.self_check import check_gpu
from apollo_compile.device.gpu.run.gpu import Sharing, TorchGpu
from apollo_compile.device.gpu.run.launch import Launcher, forked
from apollo_compile.target.check_result import Level
from apollo_compile.units import format_bytes, format_ns
from benchmarks.gpu_step_checks import sizes_and_numbers_may_change, steps_are_those_of_the_loop
from benchmarks.gpu_training_checks import (
    backwards_have_the_masks_of_their_forwards,
    lanes_account_for_their_memory,
    loops_are_as_in_eager,
    masks_are_right_under_replay,
    masks_are_those_of_inductor,
    replays_do_not_race,
    training_is_as_in_eager,
)
from benchmarks.harness.gpu_busy import marker_records, profile_step
from benchmarks.harness.gpu_lanes import (
    SMALL_KERNELS,
    SPIN_NS,
    Check,
    Outcome,
    beside,
    launch_with,
    spinners,
    split_evenly,
    time_graph,
    time_on,
    time_small_kernels,
)
from benchmarks.workloads.gpu import SHAPES

LANE_COUNTS = (2, 4, 8)
"""Lanes side by side, each with many small kernels."""


LONGEST_PROCESS_S = 120
"""Seconds after which a process hangs."""


def what_the_driver_gives(gpu: TorchGpu) -> Outcome:
    """T0: atoms, and what a lane costs to make."""
    native = gpu.native
    free = native.memory()[0]
    begin = time.perf_counter_ns()
    for atom in range(native.num_atoms):
        native.lane([atom])
    made_ns = (time.perf_counter_ns() - begin) // native.num_atoms
    taken = (free - native.memory()[0]) // native.num_atoms
    first, last = native.atom_sizes[0], native.atom_sizes[-1]
    text = f"{native.num_sms} SMs, {native.num_atoms} atoms of {first}, the last of {last}; a lane takes"
    numbers = {"functions": native.functions, "lane_ns": made_ns, "lane_bytes": taken}
    text += f" {format_ns(made_ns)} and {format_bytes(taken)}"
    return Outcome(is_met=native.num_atoms >= 2, text=text, numbers=numbers)


def lanes_pass_the_self_check(gpu: TorchGpu) -> Outcome:
    """T1, T2, T4, T5: the self-check: censuses in eager and in replay, hand-overs, steps, dropout.

    It is made anew, as users have it, and kept: doctor shows this verdict, and models that are measured rely on it.
    """
    cache = load_config().device.cache
    assert cache is not None, "load_config fills it in"
    results = check_gpu(gpu, cache, again=True).results
    bad = [result for result in results if result.level in (Level.ERROR, Level.WARNING)]
    shown = "; ".join(f"{result.subject}: {result.message}" for result in bad) or f"{len(results)} results, all well"
    numbers = {result.subject: [result.level, result.message] for result in results}
    return Outcome(is_met=not any(f.level == Level.ERROR for f in bad), text=shown, numbers=numbers)


def products_scale_with_their_quota(gpu: TorchGpu) -> Outcome:
    """T1, T6: a library's products obey the quota, at sizes that use clusters too."""
    times: dict[str, dict[int, int]] = {}
    for size in (512, 2048, 8192):
        left, right = (torch.randn(size, size, device=gpu.device, dtype=torch.bfloat16) for _ in range(2))
        product = partial(torch.mm, left, right, out=torch.empty_like(left))
        per_lane = {}
        for atoms in (1, 4, 8, gpu.native.num_atoms):
            lane = lane_of_atoms(1, gpu.native.atom_sizes, 0, atoms)
            per_lane[len(lane.units)] = time_on(gpu, lane, product)
        times[str(size)] = per_lane
    largest = times["8192"]
    fewest, most = min(largest), max(largest)
    ratio = largest[fewest] / largest[most]
    shown = ", ".join(f"{sms} SMs {format_ns(ns)}" for sms, ns in largest.items())
    return Outcome(is_met=ratio > 2, text=f"8192^3 bf16: {shown}", numbers={"ns": times})


def lanes_run_at_the_same_time(gpu: TorchGpu) -> Outcome:
    """T3: two kernels of one millisecond in one graph take one, not two."""
    times = {}
    for name, device in (("lanes", gpu), ("plain streams", gpu.sharing(Sharing.FREE))):
        times[name] = time_graph(device, spinners(device, 2))
    alone = time_graph(gpu, spinners(gpu, 1))
    shown = ", ".join(f"{name} {format_ns(ns)}" for name, ns in times.items())
    is_met = times["lanes"] < 1.5 * alone
    return Outcome(is_met=is_met, text=f"{shown}, one alone {format_ns(alone)}", numbers={**times, "alone": alone})


def many_small_kernels_keep_their_pace(gpu: TorchGpu) -> Outcome:
    """T3: 300 kernels on each of two lanes take as long as 300 on one; a queue that lanes share would show here."""
    times = time_small_kernels(gpu, LANE_COUNTS)
    later_ns = (times["2 lanes"] - times["1 lane"]) // SMALL_KERNELS
    shown = ", ".join(f"{name} {format_ns(ns // SMALL_KERNELS)}" for name, ns in times.items())
    return Outcome(is_met=later_ns < 1_000, text=f"a kernel on each takes {shown}", numbers=times)


def markers_agree(gpu: TorchGpu) -> Outcome:
    """T12: events in a graph, the profiler, and the clock that a kernel reads tell the same of kernels on two lanes."""
    from apollo_compile.device.gpu.check.census_kernel import COLUMNS, launch_census

    lanes = split_evenly(gpu, 2)
    outs = [torch.zeros(64, COLUMNS, dtype=torch.int64, device=gpu.device) for _ in lanes]
    timers = [(gpu.new_timer(), gpu.new_timer()) for _ in lanes]

    def spin(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        launch_census(inputs[0], SPIN_NS)
        return [inputs.pop()]

    def work(origin: Any) -> None:
        streams = [gpu.lane_stream(lane) for lane in lanes]
        with forked(gpu, origin, streams):
            for stream, out, (begin, end) in zip(streams, outs, timers, strict=True):
                gpu.record(begin, stream)
                gpu.call(spin, [out], stream)
                gpu.record(end, stream)

    launch_census(outs[0], SPIN_NS)
    gpu.synchronize()
    recording = gpu.capture(work, None)
    trace = profile_step(recording.replay, lambda: None)
    by_events = [gpu.elapsed_ns(begin, end) for begin, end in timers]
    by_kernel = [int(out[:, 2].max() - out[:, 1].min()) for out in outs]
    profiled = marker_records(trace)
    by_profiler = [kernel.end_ns - kernel.begin_ns for kernel in profiled]
    told_apart = {
        "context": len({kernel.context for kernel in profiled}) == len(lanes),
        "stream": len({kernel.stream for kernel in profiled}) == len(lanes),
    }
    found = {"events": by_events, "kernel": by_kernel, "profiler": by_profiler}
    shown = ", ".join(f"{name} {' and '.join(map(format_ns, times))}" for name, times in found.items())
    how = " and ".join(name for name, is_told in told_apart.items() if is_told) or "nothing"
    is_met = all(len(times) == 2 and all(abs(ns - SPIN_NS) < SPIN_NS // 5 for ns in times) for times in found.values())
    text = f"{shown}; the profiler tells lanes apart by {how}"
    return Outcome(is_met=is_met, text=text, numbers={**found, "told apart": told_apart})


def failures_and_recaptures_leave_no_trace(gpu: TorchGpu) -> Outcome:
    """T13: a capture that fails on a lane, 50 after it in bounded memory, and a process that ends with lanes."""
    value = torch.ones(1024, 1024, device=gpu.device)

    def add(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs.pop().add(1)]

    def fail(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        raise RuntimeError("on purpose")

    launcher = Launcher(beside(split_evenly(gpu, 2), bodies=(0, 1)), [add, fail], gpu)
    try:
        gpu.capture(partial(launch_with, launcher, [value, value]), None)
    except RuntimeError as error:
        if "on purpose" not in str(error):
            raise
    sizes = []
    for _ in range(50):
        recording = gpu.capture(lambda origin: value.add(1), None)
        recording.replay()
        gpu.synchronize()
        del recording
        torch.cuda.empty_cache()
        sizes.append(torch.cuda.memory_reserved(gpu.device))
    grown = sizes[-1] - sizes[4]
    done = subprocess.run(
        [sys.executable, "-c", _ENDS_WITH_LANES], capture_output=True, text=True, check=False, timeout=LONGEST_PROCESS_S
    )
    is_met = grown <= 2**21 and done.returncode == 0
    ended = "ends well" if done.returncode == 0 else f"returns {done.returncode}"
    text = f"memory grew by {format_bytes(grown)} over 45 captures; a process that ends with lanes {ended}"
    return Outcome(is_met=is_met, text=text, numbers={"stderr": done.stderr[-2000:]})


_ENDS_WITH_LANES = """
import torch
from apollo_compile.device.gpu.check.examine import split_lanes
from apollo_compile.device.gpu.run.gpu import TorchGpu
gpu = TorchGpu(0)
lane = split_lanes(gpu.native.atom_sizes, (1, 1))[0]
value = torch.ones(1024, device=gpu.device)
def work(origin):
    stream = gpu.lane_stream(lane)
    for source, target in ((origin, stream), (stream, origin)):
        event = gpu.new_event()
        gpu.record(event, source)
        gpu.wait(event, target)
        if target is stream:
            gpu.call(lambda inputs: value.add_(1), [], stream)
recording = gpu.capture(work, None)
recording.replay()
"""


def a_refused_capture_leaves_dropout_alone(gpu: TorchGpu) -> Outcome:
    """T13: after a capture that the driver refuses, dropout works, and so does the next capture; in its own process."""
    done = subprocess.run(
        [sys.executable, "-c", _HAS_A_REFUSED_CAPTURE, str(gpu.device.index)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LONGEST_PROCESS_S,
        cwd=Path(__file__).parents[1],
    )
    text = _last_line(done.stdout) if done.returncode == 0 else _last_line(done.stderr)
    return Outcome(is_met=done.returncode == 0, text=text, numbers={"stderr": done.stderr[-2000:]})


_HAS_A_REFUSED_CAPTURE = """
import sys
import torch
from apollo_compile.device.gpu.run.gpu import TorchGpu
gpu = TorchGpu(int(sys.argv[1]))
ones = torch.ones(4096, device=gpu.device)
def refused(origin):
    torch.nn.functional.dropout(ones, 0.5)
    ones.sum().item()  # a wait for the device, which invalidates a capture
try:
    gpu.capture(refused, None)
except Exception as error:
    told = f"{type(error).__name__}: {str(error).splitlines()[0]}"
else:
    sys.exit("the driver does not refuse to wait in a capture")
try:
    torch.nn.functional.dropout(ones, 0.5).sum().item()
except Exception as error:
    sys.exit(f"dropout after {told}: {error}")
outputs = []
recording = gpu.capture(lambda origin: outputs.append(torch.nn.functional.dropout(ones, 0.5)), None)
masks = []
for _ in range(2):
    recording.replay()
    masks.append(outputs[0].clone())
if torch.equal(*masks):
    sys.exit(f"equal masks in replays after {told}")
print(f"dropout and the next capture work after {told}")
"""


def replays_of_all_workloads_do_not_race(gpu: TorchGpu) -> Outcome:
    """T4: a thousand replays of every workload."""
    return replays_do_not_race(gpu, tuple(SHAPES), 1000)


QUICK_CHECKS: Mapping[str, Check] = {
    "T0 driver": what_the_driver_gives,
    "T3 overlap": lanes_run_at_the_same_time,
    "T3 small kernels": many_small_kernels_keep_their_pace,
}
"""What takes seconds, and times kernels, so nobody else may use the GPU meanwhile."""

UNTIMED_CHECKS: Mapping[str, Check] = {
    "T1 T2 T4 T5 self-check": lanes_pass_the_self_check,
    "T5 slopes": backwards_have_the_masks_of_their_forwards,
    "T5 random numbers": masks_are_right_under_replay,
    "T14 whole steps": steps_are_those_of_the_loop,
    "T13 refused capture": a_refused_capture_leaves_dropout_alone,
    "T7 loops": loops_are_as_in_eager,
    "T10 memory": lanes_account_for_their_memory,
    "T4 races": replays_do_not_race,
    "T7 training": training_is_as_in_eager,
    "T15 sizes and numbers": sizes_and_numbers_may_change,
    "T5 T7 dropout": masks_are_those_of_inductor,
    "T13 failures": failures_and_recaptures_leave_no_trace,
}
"""What computes and compares, whatever else goes on. Most compile models; those that share one follow each other."""

TIMED_CHECKS: Mapping[str, Check] = {"T1 T6 products": products_scale_with_their_quota, "T12 clocks": markers_agree}
"""What times kernels, and is worth its time if some is left."""

CHECKS: Mapping[str, Check] = {**QUICK_CHECKS, **UNTIMED_CHECKS, **TIMED_CHECKS}
"""All of them, by name; each group in the order in which its checks are worth their time."""

THOROUGH_CHECKS: Mapping[str, Check] = {**CHECKS, "T4 races in all workloads": replays_of_all_workloads_do_not_race}
"""The same, with a thousand replays of every workload."""


def _last_line(text: str) -> str:
    return (text.splitlines() or [""])[-1]
