"""Checks T0 to T13: what has to hold on a GPU before a step time of lanes means anything. See `gpu_suite.py`.

Each check is a function of the device that returns what it saw; what it cannot do it raises. Whether whole models are
faster is the second half of the suite.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from apollo_compile import backend
from apollo_compile.cuda.calibrate import calibrate_gpu
from apollo_compile.cuda.examine import contexts_of, examine_cuda, judge_nodes, split_lanes, walk_capture
from apollo_compile.cuda.execute import CudaExecutable
from apollo_compile.cuda.gpu import Sharing, TorchGpu, TorchRecording
from apollo_compile.cuda.launch import Launcher
from apollo_compile.device import load_profile
from apollo_compile.errors import MemoryQuotaError
from apollo_compile.findings import Finding, Level
from apollo_compile.ir import BodyId, BufferId, Lane, LaneId, Launch, Program, SegmentId
from apollo_compile.json_form import to_json
from apollo_compile.units import format_bytes, format_ns
from benchmarks.gpu_workloads import SHAPES, Encoder, build_gpu_workload

OPTIONS = {
    "debug.strict": True,
    "device.cuda_lanes": True,
    "plan.contest": False,
    "plan.min_gain": 0.0,
    "plan.planner": "greedy",
}
"""Run the plan, whatever is faster, and raise what would be hidden otherwise."""

FORMULA_OPTIONS = {**OPTIONS, "plan.replan": False, "device.profile": "h200"}
"""Keep the plan that rests on formulas and the data sheet, whatever was measured on this GPU: it has lanes even where
small models gain nothing by them."""

SPIN_NS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a check saw."""

    is_met: bool
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)


Check = Callable[[TorchGpu], Outcome]


def what_the_driver_gives(gpu: TorchGpu) -> Outcome:
    """T0: atoms, and what a lane costs to make."""
    native = gpu.native
    free = native.memory()[0]
    begin = time.perf_counter_ns()
    for atom in range(native.num_atoms):
        native.lane([atom], native.priorities[0])
    made_ns = (time.perf_counter_ns() - begin) // native.num_atoms
    taken = (free - native.memory()[0]) // native.num_atoms
    text = f"{native.num_sms} SMs, {native.num_atoms} atoms of {native.atom_sms}; a lane takes {format_ns(made_ns)}"
    numbers = {"functions": native.functions, "lane_ns": made_ns, "lane_bytes": taken}
    return Outcome(is_met=native.num_atoms >= 2, text=f"{text} and {format_bytes(taken)}", numbers=numbers)


def lanes_keep_to_their_sms(gpu: TorchGpu) -> Outcome:
    """T1, T2: censuses in eager and in replay, nodes of captured graphs, overlapping lanes."""
    findings: Sequence[Finding] = examine_cuda(gpu.device.index)
    bad = [finding for finding in findings if finding.level in (Level.ERROR, Level.WARNING)]
    shown = (
        "; ".join(f"{finding.subject}: {finding.message}" for finding in bad) or f"{len(findings)} findings, all well"
    )
    numbers = {finding.subject: [finding.level, finding.message] for finding in findings}
    return Outcome(is_met=not any(f.level == Level.ERROR for f in bad), text=shown, numbers=numbers)


def products_scale_with_their_quota(gpu: TorchGpu) -> Outcome:
    """T1, T6: a library's products obey the quota, at sizes that use clusters too."""
    times: dict[str, dict[int, int]] = {}
    for size in (512, 2048, 8192):
        left, right = (torch.randn(size, size, device=gpu.device, dtype=torch.bfloat16) for _ in range(2))
        product = partial(torch.mm, left, right, out=torch.empty_like(left))
        per_lane = {}
        for atoms in (1, 4, 8, gpu.native.num_atoms):
            lane = Lane(id=LaneId(1), units=tuple(range(atoms * gpu.native.atom_sms)))
            per_lane[len(lane.units)] = _time_on(gpu, lane, product)
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
        times[name] = _time_graph(device, _spinners(device, 2))
    alone = _time_graph(gpu, _spinners(gpu, 1))
    shown = ", ".join(f"{name} {format_ns(ns)}" for name, ns in times.items())
    is_met = times["lanes"] < 1.5 * alone
    return Outcome(is_met=is_met, text=f"{shown}, one alone {format_ns(alone)}", numbers={**times, "alone": alone})


def many_small_kernels_keep_their_pace(gpu: TorchGpu) -> Outcome:
    """T3: 300 kernels on each of two lanes take as long as 300 on one; a queue that lanes share would show here."""
    count = 300
    values = [torch.zeros(1024, device=gpu.device) for _ in range(2)]

    def body(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        for _ in range(count):
            inputs[0].add_(1)
        return [inputs.pop()]

    times = {}
    for name, device, lanes in (
        ("one lane", gpu, 1),
        ("two lanes", gpu, 2),
        ("two plain streams", gpu.sharing(Sharing.FREE), 2),
    ):
        launcher = Launcher(_beside(_split(gpu, 2)[:lanes]), [body], device)
        times[name] = _time_graph(device, partial(_launch_with, launcher, values[:lanes]))
    later_ns = (times["two lanes"] - times["one lane"]) // count
    shown = ", ".join(f"{name} {format_ns(ns // count)}" for name, ns in times.items())
    return Outcome(is_met=later_ns < 1_000, text=f"a kernel takes {shown}", numbers=times)


def kernels_of_a_model_are_in_their_lanes(gpu: TorchGpu) -> Outcome:
    """T2: every kernel of a model's forward is in the lane that launched it; library kernels too."""
    run, inputs = _compiled(gpu, "flava")
    taken: list[list[torch.Tensor]] = []
    with torch.no_grad():
        run(inputs)
        compiled = backend.compiled_models()[-1].graphs[-1]
        own = compiled._run

        def listen(arguments: list[torch.Tensor]) -> Any:
            taken.append(list(arguments))
            return own(arguments)

        compiled._run = listen
        run(inputs)
        executable = compiled.executable
        launcher = Launcher(executable.program, [body.function for body in compiled.bodies], gpu)
        _, kernels = walk_capture(gpu, launcher, taken[0])
    lanes = zip(executable.program.lanes, executable.program.instructions, strict=True)
    finding = judge_nodes("model", kernels, contexts_of(gpu, [lane for lane, work in lanes if work]))
    numbers = {"kernels": [[each.lane, each.segment, each.name] for each in kernels]}
    return Outcome(is_met=finding.level is not Level.ERROR, text=finding.message, numbers=numbers)


def replays_do_not_race(gpu: TorchGpu, names: Sequence[str] = ("flava",), count: int = 200) -> Outcome:
    """T4: replays with cross-lane tensors give the same numbers, with poison in all memory of the graph before each."""
    seen, is_met = {}, True
    for name in names:
        run, inputs = _compiled(gpu, name)
        with torch.no_grad():
            for _ in range(3):
                expected = run(inputs)
            num_wrong = 0
            for _ in range(count):
                for executable in _executables():
                    _poison(executable)
                num_wrong += not torch.equal(run(inputs), expected)
        replays = _num_replays()
        has_lanes = _num_lanes() > 1 or len(SHAPES[name].towers) == 1  # of a chain nothing runs side by side
        is_met = is_met and num_wrong == 0 and replays >= count and has_lanes
        seen[name] = f"{num_wrong} of {replays} replays on {_num_lanes()} lanes differ"
    return Outcome(is_met=is_met, text="; ".join(f"{name}: {text}" for name, text in seen.items()), numbers=seen)


def masks_are_right_under_replay(gpu: TorchGpu) -> Outcome:
    """T5: other masks at every replay, the same again from the same seed."""
    runs = []
    for _ in range(2):
        run, inputs = _compiled(gpu, "clip_b32", dropout=0.5)
        torch.manual_seed(7)
        with torch.no_grad():
            runs.append([run(inputs).item() for _ in range(8)])
    is_met = runs[0] == runs[1] and len(set(runs[0])) == 8
    return Outcome(is_met=is_met, text=f"{len(set(runs[0]))} of 8 steps differ; reseeded: {runs[0] == runs[1]}")


def training_is_as_in_eager(gpu: TorchGpu) -> Outcome:
    """T7: losses and gradients over 12 steps, with the backward on autograd's thread."""
    run, inputs = _compiled(gpu, "imagebind")
    eager = build_gpu_workload("imagebind", batch=4, scale="tiny", device=str(gpu.device)).model
    worst = 0.0
    for _ in range(12):
        losses = []
        for model, call in ((eager, eager), (run.model, run)):
            model.zero_grad(set_to_none=True)
            losses.append(call(inputs))
            losses[-1].backward()
        worst = max(worst, abs(losses[0].item() - losses[1].item()))
        for one, other in zip(eager.parameters(), run.model.parameters(), strict=True):
            worst = max(worst, (one.grad - other.grad).abs().max().item())
    text = f"largest difference {worst:.1e}, {_num_replays()} replays on {_num_lanes()} lanes"
    is_met = worst < 1e-3 and _num_replays() >= 16 and _num_lanes() > 1
    return Outcome(is_met=is_met, text=text, numbers={"worst": worst})


def splits_against_streams(gpu: TorchGpu) -> Outcome:
    """T8: two encoders side by side on every split in two, on overlapping lanes, by priorities, on streams, in turn."""
    encoders, inputs = [], []
    for name in ("image", "text"):
        tower = SHAPES["clip_b32"].towers[name]
        encoders.append(Encoder(tower, tower.width, 0.0).to(gpu.device, torch.bfloat16))
        inputs.append(torch.randn(32, tower.tokens, tower.width, device=gpu.device, dtype=torch.bfloat16))
    bodies = [lambda taken, encoder=encoder: [encoder(taken.pop())] for encoder in encoders]

    def time_of(device: TorchGpu, lanes: Sequence[Lane], urgency: dict[LaneId, int] | None = None) -> int:
        program = _beside(lanes, bodies=range(len(bodies)))
        launcher = Launcher(program, bodies, device, urgency)
        return _time_graph(device, partial(_launch_with, launcher, inputs))

    atoms, halves = gpu.native.num_atoms, _split(gpu, 2)
    whole = Lane(id=LaneId(0), units=tuple(range(gpu.native.num_sms)))
    first = {LaneId(0): 1}
    with torch.no_grad():
        times = {"one stream": time_of(gpu, [whole, whole])}
        times["streams"] = time_of(gpu.sharing(Sharing.FREE), halves)
        times["priorities"] = time_of(gpu.sharing(Sharing.URGENCY), halves, first)
        times["overlapping halves"] = time_of(gpu.sharing(Sharing.OVERLAPPING), halves, first)
        for part in range(1, atoms):
            lanes = split_lanes(atoms, gpu.native.atom_sms, (part, atoms - part))
            times[" + ".join(str(len(lane.units)) for lane in lanes)] = time_of(gpu, lanes)
    best = min(list(times)[4:], key=lambda name: times[name])
    shown = ", ".join(f"{name} {format_ns(times[name])}" for name in (*list(times)[:4], best))
    return Outcome(is_met=True, text=f"{shown} (the best of {atoms - 1} splits)", numbers=times)


def carveout_helps_or_not(gpu: TorchGpu) -> Outcome:
    """T9: scaled products on half the device with and without telling libraries how many SMs are not theirs.

    Other products of torch take no notice of it.
    """
    tell = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if tell is None:
        return Outcome(is_met=True, text="this torch has no carveout")
    lane = split_lanes(gpu.native.num_atoms, gpu.native.atom_sms, (1, 1))[0]
    left, right = (torch.randn(4096, 4096, device=gpu.device).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device=gpu.device)
    product = partial(torch._scaled_mm, left, right.t(), scale, scale, out_dtype=torch.bfloat16)
    without = _time_on(gpu, lane, product)
    try:
        tell(gpu.native.num_sms - len(lane.units))
        told = _time_on(gpu, lane, product)
    finally:
        tell(None)
    text = f"4096^3 fp8 on {len(lane.units)} SMs: {format_ns(without)}, told {format_ns(told)}"
    return Outcome(is_met=True, text=text, numbers={"without_ns": without, "told_ns": told})


def lanes_account_for_their_memory(gpu: TorchGpu) -> Outcome:
    """T10: what lanes took, by the allocator's segments, for a forward of two encoders."""
    run, inputs = _compiled(gpu, "clip_b32")
    with torch.no_grad():
        for _ in range(4):
            run(inputs)
    taken = {each.lane: each.num_bytes for each in (e for made in _executables() for e in made.lane_memory)}
    shown = ", ".join(f"lane {lane} {format_bytes(size)}" for lane, size in taken.items())
    return Outcome(is_met=bool(taken) and all(taken.values()), text=shown or "no lane took memory", numbers=taken)


def a_hard_quota_is_kept(gpu: TorchGpu) -> Outcome:
    """T10: lanes captured alone have the numbers of others; one that asks for too much is refused, with its name."""
    run, inputs = _compiled(gpu, "flava")
    capped, _ = _compiled(gpu, "flava", {"device.lane_memory_quota": 2**32, "device.hard_lane_memory_quota": True})
    with torch.no_grad():
        expected = run(inputs)
        outputs = [capped(inputs) for _ in range(6)]
    is_right = all(torch.equal(output, expected) for output in outputs) and _num_replays() >= 4
    taken = [each.num_bytes for made in _executables() for each in made.lane_memory]
    refused, _ = _compiled(gpu, "flava", {"device.lane_memory_quota": 1, "device.hard_lane_memory_quota": True})
    text = "nobody was refused anything"
    with torch.no_grad():
        try:
            for _ in range(4):
                refused(inputs)
        except MemoryQuotaError as error:
            text = str(error)
    shown = f"lanes took {', '.join(map(format_bytes, taken))}; {text}"
    return Outcome(is_met=is_right and all(taken) and "asked for" in text, text=shown, numbers={"taken": taken})


def a_longer_lane_can_go_on_with_every_sm(gpu: TorchGpu) -> Outcome:
    """T11: after the shorter lane has ended, the rest of the longer one runs on the whole device."""
    half, other = split_lanes(gpu.native.num_atoms, gpu.native.atom_sms, (1, 1))
    left = torch.randn(4096, 4096, device=gpu.device, dtype=torch.bfloat16)

    def body(count: int) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            value = inputs.pop()
            for _ in range(count):
                value = left @ value
            return [value]

        return run

    def launcher(long: Sequence[Launch], last: int) -> Launcher:
        program = Program(
            name="tail",
            lanes=(half, other),
            instructions=((_launch(0, 0, 0, 1),), tuple(long)),
            num_buffers=4,
            num_events=0,
            inputs=(BufferId(0),),
            outputs=(BufferId(last),),
        )
        return Launcher(program, [body(4), body(4), body(8)], gpu)

    static = launcher((_launch(1, 1, 0, 2), _launch(2, 2, 2, 3)), last=3)
    joined = launcher((_launch(1, 1, 0, 2),), last=2)

    def widened(origin: Any) -> None:
        middle = joined.launch([left], origin)
        with torch.cuda.stream(origin):
            body(8)(middle)

    times = {
        "static": _time_graph(gpu, lambda origin: static.launch([left], origin)),
        "widened": _time_graph(gpu, widened),
    }
    shown = ", ".join(f"{name} {format_ns(ns)}" for name, ns in times.items())
    return Outcome(is_met=True, text=shown, numbers=times)


def markers_agree(gpu: TorchGpu) -> Outcome:
    """T12: events inside a graph tell the same duration as the clock that a kernel reads."""
    from apollo_compile.cuda.census_kernel import COLUMNS, launch_census

    out = torch.zeros(64, COLUMNS, dtype=torch.int64, device=gpu.device)
    begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))

    def work(origin: Any) -> None:
        with torch.cuda.stream(origin):
            begin.record(origin)
            launch_census(out, SPIN_NS)
            end.record(origin)

    launch_census(out, SPIN_NS)
    gpu.synchronize()
    gpu.capture(work, None).replay()
    gpu.synchronize()
    by_events = round(begin.elapsed_time(end) * 1e6)
    by_kernel = int(out[:, 2].max() - out[:, 1].min())
    text = f"events {format_ns(by_events)}, kernel {format_ns(by_kernel)}"
    return Outcome(is_met=abs(by_events - by_kernel) < SPIN_NS // 5, text=text)


def failures_and_recaptures_leave_no_trace(gpu: TorchGpu) -> Outcome:
    """T13: a capture that fails on a lane, 50 after it in bounded memory, and a process that ends with lanes."""
    value = torch.ones(1024, 1024, device=gpu.device)

    def add(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs.pop().add(1)]

    def fail(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        raise RuntimeError("on purpose")

    launcher = Launcher(_beside(_split(gpu, 2), bodies=(0, 1)), [add, fail], gpu)
    try:
        gpu.capture(partial(_launch_with, launcher, [value, value]), None)
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
    done = subprocess.run([sys.executable, "-c", _ENDS_WITH_LANES], capture_output=True, text=True, check=False)
    is_met = grown <= 2**21 and done.returncode == 0
    ended = "ends well" if done.returncode == 0 else f"returns {done.returncode}"
    text = f"memory grew by {format_bytes(grown)} over 45 captures; a process that ends with lanes {ended}"
    return Outcome(is_met=is_met, text=text, numbers={"stderr": done.stderr[-2000:]})


_ENDS_WITH_LANES = """
import torch
from apollo_compile.cuda.examine import split_lanes
from apollo_compile.cuda.gpu import TorchGpu
gpu = TorchGpu(0)
lane = split_lanes(gpu.native.num_atoms, gpu.native.atom_sms, (1, 1))[0]
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


def calibration_is_plausible(gpu: TorchGpu) -> Outcome:
    """T1: lanes of every size, hand-overs and neighbours; more SMs are not much slower, and the cache is faster."""
    native = gpu.native
    sheet = replace(load_profile(Path("h200")), units=native.num_sms, atom=native.atom_sms)
    profile = calibrate_gpu(gpu, sheet, name=native.name, device=gpu.device, num_atoms=native.num_atoms)
    far = profile.far_bytes_per_s[0].per_s
    saturated = next(count for count, rate in zip(profile.unit_counts, far, strict=True) if rate > 0.95 * max(far))
    text = (
        f"a kernel takes {format_ns(profile.kernel_ns)}, a hand-over {format_ns(profile.handover_ns)}; {saturated} SMs "
        f"saturate the memory; neighbours {profile.slowdown}"
    )
    near = profile.near_bytes_per_s[0].per_s[-1]
    text += f"; the cache gives {near / far[-1]:.1f} times as many bytes"
    is_met = far[-1] > 0.8 * max(far) and near > far[-1]
    return Outcome(is_met=is_met, text=text, numbers={"profile": to_json(profile)})


CHECKS: tuple[tuple[str, Check], ...] = (
    ("T0 driver", what_the_driver_gives),
    ("T1 T2 SMs of lanes", lanes_keep_to_their_sms),
    ("T2 kernels of a model", kernels_of_a_model_are_in_their_lanes),
    ("T1 T6 products", products_scale_with_their_quota),
    ("T3 overlap", lanes_run_at_the_same_time),
    ("T3 small kernels", many_small_kernels_keep_their_pace),
    ("T4 races", replays_do_not_race),
    ("T5 random numbers", masks_are_right_under_replay),
    ("T7 training", training_is_as_in_eager),
    ("T8 splits", splits_against_streams),
    ("T9 carveout", carveout_helps_or_not),
    ("T10 memory", lanes_account_for_their_memory),
    ("T10 hard quota", a_hard_quota_is_kept),
    ("T11 wider tail", a_longer_lane_can_go_on_with_every_sm),
    ("T12 clocks", markers_agree),
    ("T13 failures", failures_and_recaptures_leave_no_trace),
    ("T1 calibration", calibration_is_plausible),
)

THOROUGH_CHECKS: tuple[tuple[str, Check], ...] = tuple(
    (name, partial(replays_do_not_race, names=tuple(SHAPES), count=1000) if check is replays_do_not_race else check)
    for name, check in CHECKS
)
"""The same, with a thousand replays of every workload."""


# --------------------------------------------------------------------------------------------------------- helpers


class _Compiled:
    """A compiled tiny model, called with its inputs."""

    def __init__(self, gpu: TorchGpu, name: str, dropout: float, options: Mapping[str, Any]) -> None:
        torch._dynamo.reset()
        workload = build_gpu_workload(name, batch=4, scale="tiny", device=str(gpu.device), dropout=dropout)
        self.model: nn.Module = workload.model
        self.inputs = workload.inputs
        self._run = torch.compile(workload.model, backend="apollo", options={**FORMULA_OPTIONS, **options})

    def __call__(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._run(inputs)


def _compiled(
    gpu: TorchGpu, name: str, options: Mapping[str, Any] | None = None, *, dropout: float = 0.0
) -> tuple[_Compiled, dict[str, torch.Tensor]]:
    made = _Compiled(gpu, name, dropout, options or {})
    return made, made.inputs


def _executables() -> list[CudaExecutable]:
    """Return those of the model that was compiled last."""
    graphs = backend.compiled_models()[-1].graphs
    return [graph.executable for graph in graphs if isinstance(graph.executable, CudaExecutable)]


def _num_replays() -> int:
    return sum(each.num_replays for each in _executables())


def _num_lanes() -> int:
    """Return the lanes that the widest of its graphs uses."""
    return max(sum(map(bool, each.program.instructions)) for each in _executables())


def _launch(segment: int, body: int, read: int, made: int) -> Launch:
    return Launch(
        segment=SegmentId(segment),
        body=BodyId(body),
        inputs=(BufferId(read),),
        takes=(False,),
        outputs=(BufferId(made),),
    )


def _split(gpu: TorchGpu, count: int) -> tuple[Lane, ...]:
    return split_lanes(gpu.native.num_atoms, gpu.native.atom_sms, (1,) * count)


def _beside(lanes: Sequence[Lane], bodies: Sequence[int] | None = None) -> Program:
    """Return a program in which segment `i` reads input `i` on lane `i`, with body `bodies[i]`, by default 0."""
    count = len(lanes)
    return Program(
        name="beside",
        lanes=tuple(replace(lane, id=LaneId(index)) for index, lane in enumerate(lanes)),
        instructions=tuple(
            (_launch(index, bodies[index] if bodies else 0, index, count + index),) for index in range(count)
        ),
        num_buffers=2 * count,
        num_events=0,
        inputs=tuple(BufferId(index) for index in range(count)),
        outputs=tuple(BufferId(count + index) for index in range(count)),
    )


def _poison(executable: CudaExecutable) -> None:
    """Fill all memory of a captured graph with NaNs; nobody may hold anything in it."""
    captured = executable._captured
    if captured is None:
        return
    assert isinstance(captured.recording, TorchRecording)
    torch.cuda.synchronize()
    for segment in captured.recording.segments():
        torch.as_tensor(_DeviceBytes(segment["address"], segment["total_size"]), device="cuda").fill_(255)
    torch.cuda.synchronize()


class _DeviceBytes:
    """Device memory at an address, for `torch.as_tensor`."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _spinners(gpu: TorchGpu, count: int) -> Callable[[Any], object]:
    """Return work that spins on `count` lanes of one split, side by side."""
    from apollo_compile.cuda.census_kernel import COLUMNS, launch_census

    lanes = split_lanes(gpu.native.num_atoms, gpu.native.atom_sms, (1,) * max(2, count))[:count]
    outs = [torch.zeros(64, COLUMNS, dtype=torch.int64, device=gpu.device) for _ in lanes]

    def body(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        launch_census(inputs[0], SPIN_NS)
        return [inputs.pop()]

    program = _beside(lanes)
    launcher = Launcher(program, [body], gpu)
    return lambda origin: launcher.launch(list(outs), origin)


def _launch_with(launcher: Launcher, inputs: Sequence[torch.Tensor], origin: Any) -> None:
    launcher.launch(list(inputs), origin)


def _time_on(gpu: TorchGpu, lane: Lane, call: Callable[[], object], repeats: int = 20) -> int:
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


def _time_graph(gpu: TorchGpu, work: Callable[[Any], object], repeats: int = 20) -> int:
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
