"""Every check and benchmark that needs a GPU, in one command.

    python -m benchmarks.gpu_suite --json gpu.json

First the checks T0 to T13 (`gpu_checks.py`), which decide whether lanes work at all on this GPU, driver and torch; then
training steps of `workloads/gpu.py`, measured in turns: eager, Inductor, Inductor with CUDA graphs (`reduce-overhead`),
hand-written streams over compiled encoders, the plan, and apollo as a user gets it. After its times, one step of each
is profiled: how many SMs it keeps busy, and how much of it runs side by side. A short table comes last; the JSON file
has every number.

The time is bounded by `--budget`: a workload, or a variant of one, is begun only if as much time is left as the longest
so far took, and a check only before the end; what is left out is named. Exit codes: 0, all is well; 1, a check failed,
a variant has wrong numbers, or apollo did not run; 3, there is no GPU, and nothing was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from apollo_compile import backend
from apollo_compile.device.gpu.gpu import TorchGpu
from apollo_compile.device.lanes import lane_catalogue
from apollo_compile.errors import CudaError
from apollo_compile.session import registry
from apollo_compile.tools.bench.facts import machine_facts
from apollo_compile.units import format_bytes, format_ns
from benchmarks.gpu_checks import CHECKS, OPTIONS, THOROUGH_CHECKS, Outcome
from benchmarks.harness.gpu_busy import busy_share, profile_step, read_step, side_by_side_share
from benchmarks.run import batch_sizes, names_of
from benchmarks.workloads.gpu import SHAPES, GpuWorkload, build_gpu_workload

NO_GPU = 3
"""Exit code where there is none."""

NO_TIME = "no time left; raise --budget"

TOLERANCES = {"bf16": 3e-2, "fp32": 1e-3}
"""Largest relative difference of the loss from eager's."""

WARMUP_STEPS = 6
MOST_WARMUP_STEPS = 400
"""Steps after which apollo is measured whether its comparison is over or not."""

STEPS_PER_TURN = 5
WANTED_GAIN = 1.31
"""Of at least one workload."""

WANTED_LEAST = 0.98
"""Of every workload."""

MARK_NS = 20_000
"""How long a marker runs."""
BASELINES = ("inductor", "reduce-overhead")
"""The faster of the two is what speed-ups are over."""

Step = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """One check, as it went."""

    name: str
    state: str
    """`ok`, `failed` or `skipped`."""
    text: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantTimes:
    """One variant of one workload."""

    name: str
    step_ns: tuple[int, ...]
    first_step_s: float
    loss: float
    peak_bytes: int
    """Device memory that the allocator holds for a warm step: weights, gradients and CUDA graphs too."""
    note: str = ""
    busy_share: float | None = None
    """Of the device's SMs, in one step; None where that was not profiled."""
    side_by_side_share: float | None = None
    """Of the time of that step, with kernels of several streams at once."""
    plan_ns: int | None = None
    """Makespans of the plans of its graphs, added up; None where it has none, as all that follows."""
    bound_ns: int | None = None
    """The least that any plan on these costs takes, by the planner's proof."""

    @property
    def median_ns(self) -> float:
        """Median step."""
        return statistics.median(self.step_ns) if self.step_ns else float("inf")


def main(arguments: list[str] | None = None) -> int:
    """Check, measure, print tables, write JSON; return the exit code."""
    args = _parse(arguments)
    if not torch.cuda.is_available():
        print("no GPU: torch sees no CUDA device, so nothing was checked or measured")
        return NO_GPU
    clock = time.monotonic
    deadline = clock() + args.budget
    try:
        gpu = TorchGpu(0)
    except CudaError as error:
        print(f"no lanes on this GPU, so nothing was checked or measured: {error}")
        return 1
    torch.set_float32_matmul_precision("high")
    facts = {**machine_facts(), "gpu": gpu.native.name, "driver": gpu.native.driver_version, "cuda": torch.version.cuda}
    chosen = THOROUGH_CHECKS if args.thorough else CHECKS
    checks = run_checks(chosen, gpu, deadline=deadline, clock=clock) if args.checks else []
    _write(args.json, facts, checks, {}, [])

    def measure(name: str, batch: int) -> list[VariantTimes]:
        mark = partial(mark_lanes, gpu) if args.profile else None
        return measure_workload(
            name, batch=batch, dtype=args.dtype, rounds=args.rounds, mark=mark, deadline=deadline, clock=clock
        )

    chosen_workloads = {
        f"{name}, batch {batch}, {args.dtype}": partial(measure, name, batch)
        for name in args.workloads
        for batch in args.batch
    }
    workloads, skipped = run_workloads(
        chosen_workloads,
        deadline=deadline,
        reserve=args.reserve,
        clock=clock,
        keep=partial(_write, args.json, facts, checks),
    )
    print(f"{facts['gpu']}, driver of CUDA {facts['driver'] / 1000:.1f}, torch {facts['torch']}")
    print(format_results(checks, workloads, skipped))
    complaints = complaints_about(workloads, TOLERANCES[args.dtype])
    if complaints:
        print("\n" + "\n".join(complaints))
    return 1 if complaints or any(check.state == "failed" for check in checks) else 0


# ---------------------------------------------------------------------------------------------------------- checks


def run_checks(
    checks: Sequence[tuple[str, Callable[[Any], Outcome]]], gpu: Any, *, deadline: float, clock: Callable[[], float]
) -> list[CheckResult]:
    """Run one check after the other; one that raises has failed, one after the deadline is skipped."""
    results = []
    for name, check in checks:
        begin = clock()
        if begin > deadline:
            results.append(CheckResult(name=name, state="skipped", text=NO_TIME))
            continue
        _tell(name)
        try:
            outcome = check(gpu)
            state, text, numbers = "ok" if outcome.is_met else "failed", outcome.text, outcome.numbers
        except Exception as error:
            lines = str(error).splitlines() or [""]
            state, text, numbers = "failed", f"{type(error).__name__}: {lines[0]}", {"error": str(error)}
        seconds = round(clock() - begin, 1)
        _tell(f"  {state} in {seconds} s: {text}")
        results.append(CheckResult(name=name, state=state, text=text, numbers=numbers, seconds=seconds))
    return results


# ------------------------------------------------------------------------------------------------------- workloads


def run_workloads(
    workloads: Mapping[str, Callable[[], list[VariantTimes]]],
    *,
    deadline: float,
    reserve: float,
    clock: Callable[[], float],
    keep: Callable[[Mapping[str, list[VariantTimes]], list[str]], None],
) -> tuple[dict[str, list[VariantTimes]], list[str]]:
    """Measure one workload after the other; return their times, and the titles of those for which none was left.

    One is begun only if as many seconds are left as the longest so far took, and `reserve` at least. `keep` is called
    with all results whenever there are new ones.
    """
    results: dict[str, list[VariantTimes]] = {}
    skipped = []
    for title, measure in workloads.items():
        begin = clock()
        if begin + reserve > deadline:
            skipped.append(title)
            continue
        _tell(title)
        try:
            results[title] = measure()
        except Exception as error:  # what was measured before is worth its table
            results[title] = [_not_run(variant, _note_of(error)) for variant in VARIANTS]
        reserve = max(reserve, clock() - begin)
        keep(results, skipped)
    keep(results, skipped)
    return results, skipped


def measure_workload(
    name: str,
    *,
    batch: int,
    dtype: str,
    rounds: int,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
    device: str = "cuda",
    scale: str = "full",
    mark: Callable[[], None] | None = None,
) -> list[VariantTimes]:
    """Measure all variants of a training step in turns; one that cannot run has a note instead of times.

    A variant is compiled only if as many seconds are left as the longest so far took. Rounds end at the deadline, but
    for the first. `mark` launches the markers of `gpu_busy.py`; None is no profile.
    """
    torch._dynamo.reset()  # not between variants: all of them stay compiled
    workload = build_gpu_workload(name, batch=batch, device=device, scale=scale)
    steps: dict[str, Step] = {}
    firsts: dict[str, tuple[float, float]] = {}
    peaks: dict[str, int] = {}
    notes: dict[str, str] = {}
    models: dict[str, nn.Module] = {}
    longest = 0.0
    for variant, compile_variant in VARIANTS.items():
        begin = clock()
        if begin + longest > deadline:
            notes[variant] = NO_TIME
            continue
        try:
            held = _held_bytes(device)
            own = copied(workload)
            step, is_settled = compile_variant(own, dtype)
            firsts[variant] = _first_step(step)
            _warm_up(step, is_settled, device)
            peaks[variant] = _peak_bytes(step, device) - held
            steps[variant] = step
            models[variant] = own.model
        except Exception as error:
            notes[variant] = _note_of(error)
        longest = max(longest, clock() - begin)
    times: dict[str, list[int]] = {variant: [] for variant in steps}
    for number in range(rounds):
        if number > 0 and clock() > deadline:
            break
        for variant in list(steps)[:: 1 if number % 2 == 0 else -1]:
            times[variant] += [_time(steps[variant], device) for _ in range(STEPS_PER_TURN + 1)][1:]
    nothing = (float("nan"), float("nan"))
    shares = {variant: _shares(step, mark) for variant, step in steps.items() if mark is not None}
    plans = {variant: plan_of(model) for variant, model in models.items()}
    return [
        VariantTimes(
            name=variant,
            step_ns=tuple(times.get(variant, ())),
            first_step_s=firsts.get(variant, nothing)[0],
            loss=firsts.get(variant, nothing)[1],
            peak_bytes=peaks.get(variant, 0),
            note=notes.get(variant, ""),
            busy_share=shares.get(variant, (None, None))[0],
            side_by_side_share=shares.get(variant, (None, None))[1],
            plan_ns=plans.get(variant, (None, None))[0],
            bound_ns=plans.get(variant, (None, None))[1],
        )
        for variant in VARIANTS
    ]


def _not_run(variant: str, note: str) -> VariantTimes:
    nan = float("nan")
    return VariantTimes(name=variant, step_ns=(), first_step_s=nan, loss=nan, peak_bytes=0, note=note)


def _note_of(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:60]}"


def mark_lanes(gpu: TorchGpu) -> None:
    """Launch a marker on every lane of the catalogue: a kernel of as many blocks as the lane has SMs."""
    from apollo_compile.device.gpu.census_kernel import COLUMNS, launch_census

    for lane in lane_catalogue(gpu.native.num_sms, gpu.native.atom_sizes):
        stream = gpu.lane_stream(lane) or gpu.caller_stream()
        with torch.cuda.stream(stream):
            launch_census(torch.zeros(len(lane.units), COLUMNS, dtype=torch.int64, device=gpu.device), MARK_NS)


def _shares(step: Step, mark: Callable[[], None]) -> tuple[float | None, float | None]:
    """Return the shares of one step in which SMs are busy, and in which streams run side by side."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    try:
        found = read_step(profile_step(step, mark))
    except Exception as error:  # times are worth more than a profile
        _tell(f"no profile: {type(error).__name__}: {error}")
        return None, None
    if found.mixed_contexts:
        _tell("the profile does not tell lanes apart: SMs busy are counted as if each had those of the largest")
    return busy_share(found.kernels, num_sms=num_sms, sms=found.sms), side_by_side_share(found.kernels)


def plan_of(model: nn.Module) -> tuple[int | None, int | None]:
    """Return the makespans of the plans of a model's graphs, added up, and their bounds; None where it has none."""
    plans = [graph.compilation.plan for found in registry.find_models(model) for graph in found.graphs if graph.has_run]
    if not plans:
        return None, None
    return sum(plan.makespan_ns for plan in plans), sum(plan.lower_bound_ns for plan in plans)


def copied(workload: GpuWorkload) -> GpuWorkload:
    """Return the workload with weights of its own."""
    return GpuWorkload(name=workload.name, model=copy.deepcopy(workload.model), inputs=workload.inputs)


Compiled = tuple[Step, Callable[[], bool]]
"""A training step, and whether nothing about it is being decided any more."""


def _eager(workload: GpuWorkload, dtype: str) -> Compiled:
    return _make_step(workload, workload.model, dtype), lambda: True


def _inductor(workload: GpuWorkload, dtype: str) -> Compiled:
    return _make_step(workload, torch.compile(workload.model), dtype), lambda: True


def _reduce_overhead(workload: GpuWorkload, dtype: str) -> Compiled:
    step = _make_step(workload, torch.compile(workload.model, mode="reduce-overhead"), dtype)

    def marked() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return step()

    return marked, lambda: True


def _streams(workload: GpuWorkload, dtype: str) -> Compiled:
    """Compiled encoders, each on a stream of its own: what people write by hand."""
    model = workload.model
    encoders = {name: torch.compile(encoder) for name, encoder in model.encoders.items()}
    fuse = torch.compile(model.fuse)
    streams = {name: torch.cuda.Stream() for name in encoders}

    def call(inputs: Mapping[str, Tensor]) -> Tensor:
        caller = torch.cuda.current_stream()
        tokens = {}
        for name, encoder in encoders.items():
            streams[name].wait_stream(caller)
            with torch.cuda.stream(streams[name]):
                tokens[name] = encoder(inputs[name])
        for name, stream in streams.items():
            caller.wait_stream(stream)
            tokens[name].record_stream(caller)
        return fuse(tokens)

    return _make_step(workload, call, dtype), lambda: True


def _plan(workload: GpuWorkload, dtype: str) -> Compiled:
    # The backend itself, here and in the checks: its name is known only where the package is installed.
    return _make_step(
        workload, torch.compile(workload.model, backend=backend.apollo, options=OPTIONS), dtype
    ), lambda: True


def _apollo(workload: GpuWorkload, dtype: str) -> Compiled:
    run = torch.compile(workload.model, backend=backend.apollo, options={"device.cuda_lanes": True})
    return _make_step(workload, run, dtype), lambda: registry.is_settled(workload.model)


VARIANTS: Mapping[str, Callable[[GpuWorkload, str], Compiled]] = {
    "eager": _eager,
    "inductor": _inductor,
    "reduce-overhead": _reduce_overhead,
    "apollo": _apollo,
    "apollo's plan": _plan,
    "streams by hand": _streams,
}
"""In the order in which they are worth their time."""


def _make_step(workload: GpuWorkload, call: Callable[[dict[str, Tensor]], Tensor], dtype: str) -> Step:
    model: nn.Module = workload.model

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        with _autocast(workload, dtype):
            loss = call(workload.inputs)
        loss.backward()
        return loss.detach()

    return step


@contextlib.contextmanager
def _autocast(workload: GpuWorkload, dtype: str) -> Iterator[None]:
    device = next(iter(workload.inputs.values())).device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == "bf16"):
        yield


def _first_step(step: Step) -> tuple[float, float]:
    """Return the seconds of the first step, and its loss."""
    begin = time.monotonic()
    loss = step().item()
    return time.monotonic() - begin, loss


def _held_bytes(device: str) -> int:
    """Return what the allocator holds, after it gave back what it does not need."""
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _peak_bytes(step: Step, device: str) -> int:
    """Return the most that the allocator holds during a step."""
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_reserved()


def _warm_up(step: Step, is_settled: Callable[[], bool], device: str) -> None:
    for count in range(MOST_WARMUP_STEPS):
        if count >= WARMUP_STEPS and is_settled():
            break
        step()
    _synchronize(device)


def _time(step: Step, device: str) -> int:
    _synchronize(device)
    begin = time.perf_counter_ns()
    step()
    _synchronize(device)
    return time.perf_counter_ns() - begin


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# --------------------------------------------------------------------------------------------------------- results


def complaints_about(workloads: Mapping[str, Sequence[VariantTimes]], tolerance: float) -> list[str]:
    """Return what is wrong with the variants: another loss than eager's, or that apollo failed."""
    complaints = []
    for title, times in workloads.items():
        if wrong := wrong_variants(times, tolerance):
            complaints.append(f"{title}: the loss of {', '.join(wrong)} is not eager's")
        failed = [each.name for each in times if each.name.startswith("apollo") and each.note not in ("", NO_TIME)]
        if failed:
            complaints.append(f"{title}: {', '.join(failed)} did not run")
    return complaints


def wrong_variants(times: Sequence[VariantTimes], tolerance: float) -> list[str]:
    """Return the variants whose first loss is not eager's; those that did not run are not among them."""
    eager = next(each for each in times if each.name == "eager")
    if eager.note:
        return []
    return [
        each.name
        for each in times
        if not each.note and not abs(each.loss - eager.loss) <= tolerance * max(abs(eager.loss), 1e-6)
    ]


def best_baseline(times: Sequence[VariantTimes]) -> VariantTimes:
    """Return the faster mode of Inductor; eager where neither ran."""
    ran = [each for each in times if each.step_ns]
    baselines = [each for each in ran if each.name in BASELINES]
    return min(baselines or ran, key=lambda each: each.median_ns)


def speed_ups(workloads: Mapping[str, Sequence[VariantTimes]]) -> dict[str, float]:
    """Return how many times as fast apollo is as the faster mode of Inductor, by workload; none where one did not run.

    That is apollo as a user gets it, with its comparison.
    """
    found = {}
    for title, times in workloads.items():
        ran = {each.name: each for each in times if each.step_ns}
        if "apollo" in ran and any(name in ran for name in BASELINES):
            found[title] = best_baseline(times).median_ns / ran["apollo"].median_ns
    return found


def format_results(
    checks: Sequence[CheckResult], workloads: Mapping[str, Sequence[VariantTimes]], skipped: Sequence[str]
) -> str:
    """Return the short table: a line per check, a line per variant of every workload."""
    blocks = []
    if checks:
        rows = [(check.name, check.state, check.text[:90]) for check in checks]
        blocks.append(tabulate(rows, headers=("check", "", "seen"), disable_numparse=True))
    for title, times in workloads.items():
        if not any(each.step_ns for each in times):
            blocks.append(f"{title}: nothing ran; {times[0].note}")
            continue
        baseline = best_baseline(times)
        rows = [
            (
                each.name,
                each.note or format_ns(each.median_ns),
                "" if each.note else f"{baseline.median_ns / each.median_ns:.2f}x",
                "" if each.busy_share is None else f"{each.busy_share:.0%}",
                "" if each.side_by_side_share is None else f"{each.side_by_side_share:.0%}",
                "" if each.note else format_bytes(each.peak_bytes),
                "" if each.note else f"{each.first_step_s:.0f} s",
            )
            for each in times
        ]
        headers = (
            title,
            "median step",
            f"over {baseline.name}",
            "SMs busy",
            "overlap",
            "memory",
            "first step",
        )
        lines = [tabulate(rows, headers=headers, disable_numparse=True)]
        lines += [_against_bound(each) for each in times if each.plan_ns and each.bound_ns and each.step_ns]
        blocks.append("\n".join(lines))
    gains = speed_ups(workloads)
    if gains:
        least, most = min(gains, key=lambda title: gains[title]), max(gains, key=lambda title: gains[title])
        blocks.append(
            f"apollo over Inductor's best mode: {gains[most]:.2f}x at most ({most}; {WANTED_GAIN:.2f}x is wanted), "
            f"{gains[least]:.2f}x at least ({least}; {WANTED_LEAST:.2f}x is wanted)"
        )
    if skipped:
        blocks.append(f"skipped, no time left (raise --budget): {'; '.join(skipped)}")
    return "\n\n".join(blocks)


def _against_bound(each: VariantTimes) -> str:
    """Say what was planned of a variant, and what no plan can beat; the step has the host's time as well."""
    assert each.plan_ns is not None and each.bound_ns is not None
    return (
        f"{each.name}: planned {format_ns(each.plan_ns)}, bound {format_ns(each.bound_ns)}; "
        f"the step took {each.median_ns / each.bound_ns:.2f} of the bound"
    )


def _tell(line: str) -> None:
    print(f"   {line}", file=sys.stderr, flush=True)


def _write(
    path: Path | None,
    facts: Mapping[str, Any],
    checks: Sequence[CheckResult],
    workloads: Mapping[str, Sequence[VariantTimes]],
    skipped: Sequence[str],
) -> None:
    if path is None:
        return
    content = {
        "machine": facts,
        "checks": [asdict(check) for check in checks],
        "workloads": {title: [asdict(each) for each in times] for title, times in workloads.items()},
        "skipped": list(skipped),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_suite", description="Check and measure a GPU.")
    parser.add_argument("--workloads", type=names_of(SHAPES), default=list(SHAPES), help=", ".join(SHAPES))
    parser.add_argument("--batch", type=batch_sizes, default=[32], help="batch sizes, e.g. 8,32,256")
    parser.add_argument("--dtype", choices=tuple(TOLERANCES), default="bf16", help="bf16 is autocast")
    parser.add_argument("--rounds", type=int, default=8, help=f"turns of {STEPS_PER_TURN} timed steps of every variant")
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything")
    parser.add_argument("--reserve", type=float, default=180, help="seconds that must be left to begin a workload")
    parser.add_argument("--no-profile", dest="profile", action="store_false", help="times only, no share of busy SMs")
    parser.add_argument(
        "--thorough", action="store_true", help="1,000 replays of every workload in T4; takes minutes more"
    )
    parser.add_argument("--no-checks", dest="checks", action="store_false", help="workloads only")
    parser.add_argument("--json", type=Path, help="write everything there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
