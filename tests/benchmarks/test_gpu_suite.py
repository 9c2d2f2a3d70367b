"""What can be known of the GPU suite without a GPU: its exit code, its tables, its workloads, its variants on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from apollo_compile.device.gpu.gpu import Sharing
from apollo_compile.device.profile import Rate
from apollo_compile.errors import CudaError
from apollo_compile.session import registry
from apollo_compile.store.profiles import load_profile
from benchmarks import gpu_checks, gpu_suite
from benchmarks.gpu_checks import CHECKS, THOROUGH_CHECKS, Outcome
from benchmarks.gpu_suite import (
    CheckResult,
    VariantTimes,
    best_baseline,
    format_results,
    measure_workload,
    run_checks,
    wrong_variants,
)
from benchmarks.harness.gpu_busy import KernelRecord, StepKernels, busy_share, read_step, side_by_side_share
from benchmarks.workloads import gpu as gpu_workloads
from benchmarks.workloads.gpu import SHAPES, build_gpu_workload
from tests.device.gpu.fake_gpu import FakeGpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_has_an_exit_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And writes nothing."""
    assert gpu_suite.main(["--json", str(tmp_path / "gpu.json")]) == gpu_suite.NO_GPU
    assert capsys.readouterr().out == "no GPU: torch sees no CUDA device, so nothing was checked or measured\n"
    assert not list(tmp_path.iterdir())


def test_checks_that_raise_have_failed_and_late_ones_are_skipped() -> None:
    """The others go on."""
    times = iter((0.0, 1.0, 1.0, 3.0, 3.0, 4.5, 11.0))

    def fail(gpu: object) -> Outcome:
        raise RuntimeError("an illegal memory access\nwas encountered")

    checks = [
        ("T0", lambda gpu: Outcome(is_met=True, text="well")),
        ("T1", fail),
        ("T2", lambda gpu: Outcome(is_met=False, text="7 SMs instead of 8")),
        ("T3", lambda gpu: Outcome(is_met=True, text="never seen")),
    ]
    results = run_checks(checks, None, deadline=10.0, clock=lambda: next(times))
    assert [(each.name, each.state, each.text, each.seconds) for each in results] == [
        ("T0", "ok", "well", 1.0),
        ("T1", "failed", "RuntimeError: an illegal memory access", 2.0),
        ("T2", "failed", "7 SMs instead of 8", 1.5),
        ("T3", "skipped", "no time left; raise --budget", 0.0),
    ]


def test_every_check_has_a_name_and_says_what_it_is_for() -> None:
    """By the numbers of the experiments."""
    for name, check in (*CHECKS, THOROUGH_CHECKS[-1]):
        assert check.__doc__ is not None and check.__doc__.split(":")[0].replace(",", "") in name
    numbers = {word for name, _ in CHECKS for word in name.split() if word[0] == "T" and word[1:].isdigit()}
    assert numbers == {f"T{number}" for number in range(14)}
    assert [name for name, _ in THOROUGH_CHECKS] == [*(name for name, _ in CHECKS), "T9 persistent grids"]


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_workload_is_begun_only_if_as_much_time_is_left_as_the_longest_took() -> None:
    """What was measured is kept at once; later ones are named."""
    clock, kept = Clock(), []

    def workload(seconds: float) -> list[VariantTimes]:
        clock.now += seconds
        return [variant("eager", round(seconds))]

    workloads = {f"{seconds} s": partial(workload, seconds) for seconds in (60, 150, 100, 20)}
    results, skipped = gpu_suite.run_workloads(
        workloads, deadline=350, reserve=100, clock=clock, keep=lambda found, late: kept.append((list(found), late[:]))
    )
    assert list(results) == ["60 s", "150 s"] and skipped == ["100 s", "20 s"]
    assert kept == [(["60 s"], []), (["60 s", "150 s"], []), (["60 s", "150 s"], ["100 s", "20 s"])]


@pytest.mark.parametrize("seconds", [0.5, 8.0, 30.0, 45.0])
def test_the_whole_suite_ends_within_ten_minutes(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long checks and compiles take, with the default options; the important variants come first."""
    clock = Clock()
    args = gpu_suite._parse([])

    def check(gpu: object) -> Outcome:
        clock.now += seconds
        return Outcome(is_met=True, text="well")

    def compile_variant(workload: object, dtype: str) -> gpu_suite.Compiled:
        clock.now += seconds

        def step() -> torch.Tensor:
            clock.now += 0.02
            return torch.tensor(1.0)

        return step, lambda: True

    monkeypatch.setattr(gpu_suite, "VARIANTS", dict.fromkeys(gpu_suite.VARIANTS, compile_variant))
    checks = run_checks([(name, check) for name, _ in CHECKS], None, deadline=args.budget, clock=clock)
    measure = partial(
        measure_workload,
        batch=2,
        dtype="fp32",
        rounds=args.rounds,
        deadline=args.budget,
        clock=clock,
        device="cpu",
        scale="tiny",
    )
    results, skipped = gpu_suite.run_workloads(
        {name: partial(measure, name) for name in args.workloads},
        deadline=args.budget,
        reserve=args.reserve,
        clock=clock,
        keep=lambda found, late: None,
    )
    assert clock.now <= 600
    assert len(checks) == len(CHECKS) and [*results, *skipped] == list(SHAPES)
    for times in results.values():
        ran = [bool(each.step_ns) for each in times]
        assert ran == sorted(ran, reverse=True) and ran[0]
        assert {each.note for each in times if not each.step_ns} <= {gpu_suite.NO_TIME}
    assert (seconds > 1) is bool(skipped)
    assert list(gpu_suite.VARIANTS)[:4] == ["eager", "inductor", "reduce-overhead", "apollo"]


def variant(name: str, ns: int, loss: float = 1.0, note: str = "") -> VariantTimes:
    """Return a measured variant."""
    times = () if note else (ns, ns, ns)
    return VariantTimes(name=name, step_ns=times, first_step_s=3.0, loss=loss, peak_bytes=2**30, note=note)


def test_speed_ups_are_over_the_faster_mode_of_inductor() -> None:
    """In the table that comes last."""
    times = [
        variant("eager", 9_000_000),
        variant("inductor", 6_000_000),
        variant("reduce-overhead", 4_000_000),
        variant("streams by hand", 0, note="RuntimeError: no"),
        variant("apollo", 2_000_000),
    ]
    assert best_baseline(times).name == "reduce-overhead"
    checks = [CheckResult(name="T0 driver", state="ok", text="132 SMs")]
    times[-1] = replace(times[-1], busy_share=0.814, side_by_side_share=0.5, plan_ns=1_500_000, bound_ns=1_250_000)
    assert format_results(checks, {"clip, batch 8": times}, ["flava, batch 8"]) == (
        "check          seen\n"
        "---------  --  -------\n"
        "T0 driver  ok  132 SMs\n"
        "\n"
        "clip, batch 8    median step       over reduce-overhead    SMs busy    overlap    memory    first step\n"
        "---------------  ----------------  ----------------------  ----------  ---------  --------  ------------\n"
        "eager            9.00 ms           0.44x                                          1.00 GiB  3 s\n"
        "inductor         6.00 ms           0.67x                                          1.00 GiB  3 s\n"
        "reduce-overhead  4.00 ms           1.00x                                          1.00 GiB  3 s\n"
        "streams by hand  RuntimeError: no\n"
        "apollo           2.00 ms           2.00x                   81%         50%        1.00 GiB  3 s\n"
        "apollo: planned 1.50 ms, bound 1.25 ms; the step took 1.60 of the bound\n"
        "\n"
        "apollo over Inductor's best mode: 2.00x at most (clip, batch 8; 1.31x is wanted), 2.00x at least (clip, batch "
        "8; 0.98x is wanted)\n"
        "\n"
        "skipped, no time left (raise --budget): flava, batch 8"
    )
    assert format_results([], {"clip": [variant("eager", 0, note="boom")]}, []) == "clip: nothing ran; boom"


def test_gains_are_those_of_apollo_as_users_get_it() -> None:
    """Not of its plan, and only where there is something to compare it with."""
    both = [variant("eager", 9), variant("inductor", 6), variant("apollo's plan", 2), variant("apollo", 4)]
    alone = [variant("eager", 9), variant("inductor", 0, note="no"), variant("apollo", 4)]
    without = [variant("eager", 9), variant("inductor", 6), variant("apollo", 0, note="no")]
    assert gpu_suite.speed_ups({"both": both, "alone": alone, "without": without}) == {"both": 1.5}


def test_a_driver_that_makes_no_lanes_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which says what to do."""

    def refuse(ordinal: int) -> None:
        raise CudaError("it has no cuGreenCtxStreamCreate; lanes need a driver of CUDA 12.5 on: update it")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_suite, "TorchGpu", refuse)
    assert gpu_suite.main([]) == 1
    assert "nothing was checked or measured: it has no cuGreenCtxStreamCreate" in capsys.readouterr().out


def kernel(begin: int, end: int, blocks: int, context: int = 1, stream: int = 7) -> KernelRecord:
    """Return a kernel of a profile."""
    return KernelRecord(begin_ns=begin, end_ns=end, blocks=blocks, stream=stream, context=context)


@pytest.mark.parametrize(
    ("kernels", "busy", "together"),
    [
        ([], 0.0, 0.0),
        ([kernel(0, 10, 50)], 0.5, 0.0),
        ([kernel(0, 10, 1000)], 1.0, 0.0),
        ([kernel(0, 10, 1000, context=2)], 0.2, 0.0),
        ([kernel(0, 10, 30), kernel(30, 40, 90)], 0.3, 0.0),
        ([kernel(0, 10, 60, stream=1), kernel(5, 10, 90, stream=2)], 0.8, 0.5),
        ([kernel(0, 10, 10, context=2, stream=1), kernel(5, 15, 90, context=2, stream=2)], 1 / 6, 1 / 3),
        ([kernel(0, 10, 10), kernel(10, 20, 30)], 0.2, 0.0),
    ],
)
def test_busy_sms_are_those_of_blocks_within_the_quota(
    kernels: list[KernelRecord], busy: float, together: float
) -> None:
    """Of a device with 100 SMs, of which context 2 has 20; idle time counts, and no SM twice."""
    assert busy_share(kernels, num_sms=100, sms={2: 20}) == pytest.approx(busy)
    assert side_by_side_share(kernels) == pytest.approx(together)


def test_a_profile_tells_kernels_from_markers_and_all_else() -> None:
    """By what torch's profiler writes; a marker has a block for every SM of its context.

    Its memory is filled before it; where one context has several markers, the largest counts.
    """

    def event(name: str, cat: str, ts: float, context: int, grid: list[int]) -> dict[str, object]:
        args = {"grid": grid, "stream": 7, "context": context}
        return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": 2.5, "args": args}

    events: list[object] = [
        event("gemm", "kernel", 20.0, 1, [4, 2, 1]),
        event("_note_and_spin_0d1d", "kernel", 1.0, 3, [64, 1, 1]),
        event("norm", "kernel", 10.5, 3, [9, 1, 1]),
        event("fill", "kernel", 0.5, 3, [700, 1, 1]),
        event("_note_and_spin_0d1d", "kernel", 3.5, 1, [96, 1, 1]),
        event("fill", "kernel", 4.0, 1, [900, 1, 1]),
        event("_note_and_spin_0d1d", "kernel", 6.5, 1, [32, 1, 1]),
        {"ph": "X", "name": "cudaGraphLaunch", "cat": "cuda_runtime", "ts": 1, "dur": 1, "args": {}},
        {"ph": "M", "name": "process_name", "args": {}},
    ]
    assert read_step({"traceEvents": events}) == StepKernels(
        kernels=(kernel(10_500, 13_000, 9, context=3), kernel(20_000, 22_500, 8)),
        sms={3: 64, 1: 96},
        mixed_contexts=(1,),
    )
    unmarked = [event("gemm", "kernel", 20.0, 1, [4, 2, 1])]
    assert read_step({"traceEvents": unmarked}) == StepKernels(kernels=(kernel(20_000, 22_500, 8),), sms={})


class CheckedGpu(FakeGpu):
    """The stand-in, as checks see a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.native = SimpleNamespace(
            num_sms=132, num_atoms=16, atom_sizes=[*15 * [8], 12], name="Fake", compute_capability=(9, 0)
        )

    def sharing(self, sharing: Sharing) -> CheckedGpu:
        """Return another one."""
        return self.others.setdefault(sharing, CheckedGpu())  # type: ignore[return-value, arg-type]


@pytest.mark.parametrize("check", (gpu_checks.splits_against_streams, gpu_checks.many_small_kernels_keep_their_pace))
def test_checks_that_only_launch_can_do_so(check: gpu_checks.Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stand-in, whose times mean nothing, but which refuses what a GPU would."""
    tiny = gpu_workloads._tiny(SHAPES["clip_b32"])
    monkeypatch.setattr(gpu_checks, "SHAPES", {**SHAPES, "clip_b32": tiny})
    gpu = CheckedGpu()
    outcome = check(gpu)  # type: ignore[arg-type]
    assert outcome.text and all(ns > 0 for ns in outcome.numbers.values())
    assert not gpu.races and not any(other.races for other in gpu.others.values())
    if check is gpu_checks.splits_against_streams:
        assert len(outcome.numbers) == 4 + 15 and {"8 + 124", "64 + 68", "120 + 12"} <= set(outcome.numbers)


@pytest.mark.parametrize(
    ("late_ns", "is_met", "text"),
    [
        (0, True, "with queues 1: 1 lane 2.0 us, 2 lanes 4.0 us; by default: 1 lane 2.0 us, 2 lanes 2.0 us; 32: "),
        (2_000, False, "by default: 1 lane 2.0 us, 2 lanes 4.0 us; 32: 1 lane 2.0 us, 2 lanes 2.0 us"),
    ],
)
def test_queues_are_tried_in_processes_of_their_own(
    late_ns: int, is_met: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this one's environment says."""
    monkeypatch.setenv(gpu_checks.CONNECTIONS, "4")
    seen = []

    def run(command: list[str], *, env: dict[str, str], **options: object) -> SimpleNamespace:
        connections = env.get(gpu_checks.CONNECTIONS)
        seen.append((connections, command[1:]))
        late = {"1": 2_000, None: late_ns, "32": 0}[connections]
        times = {"1 lane": 600_000, "2 lanes": 600_000 + 300 * late, "2 streams": 1}
        return SimpleNamespace(returncode=0, stdout=f"a warning\n{json.dumps(times)}\n")

    monkeypatch.setattr(subprocess, "run", run)
    outcome = gpu_checks.queues_of_the_device_are_enough(CheckedGpu())  # type: ignore[arg-type]
    assert seen == [(each, ["-m", "benchmarks.harness.gpu_pace", "2", "4", "8"]) for each in ("1", None, "32")]
    assert outcome.is_met is is_met and text in outcome.text


def test_a_process_that_fails_is_told_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """And by what it was started."""
    failed = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nCudaError: no driver\n")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: failed)
    outcome = gpu_checks.queues_of_the_device_are_enough(CheckedGpu())  # type: ignore[arg-type]
    assert (outcome.is_met, outcome.text) == (False, "CUDA_DEVICE_MAX_CONNECTIONS=1: CudaError: no driver")


def fake_kernels(monkeypatch: pytest.MonkeyPatch, num_sms: int, *, is_refused: bool = True) -> None:
    """Put stand-ins in the place of kernels, which note `num_sms` different SMs or spin as long as they were told."""

    def launch_clusters(out: torch.Tensor, size: int) -> None:
        out.copy_(torch.arange(len(out)) % num_sms)

    launched: list[bool] = []

    def launch_census(out: torch.Tensor, spin_ns: int, *, is_cooperative: bool = False) -> None:
        launched.append(is_cooperative)
        if launched.count(True) == 2 and is_refused:
            raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")
        out[:, 2] = out[:, 1] + spin_ns

    kernels = SimpleNamespace(CLUSTERS=(1, 2), launch_clusters=launch_clusters)
    monkeypatch.setitem(sys.modules, "benchmarks.harness.gpu_kernels", kernels)
    census = SimpleNamespace(COLUMNS=3, launch_census=launch_census)
    monkeypatch.setitem(sys.modules, "apollo_compile.device.gpu.census_kernel", census)


@pytest.mark.parametrize(
    ("num_sms", "is_refused", "is_met", "text"),
    [
        (8, True, True, "clusters of 8 SMs of atoms 0: 1 5.0 us, 2 5.0 us; 24 SMs of atoms 0, 1, 2: 1 5.0 us"),
        (
            8,
            True,
            True,
            "a cooperative grid of 2112 blocks is refused on one atom: Triton Error [CUDA]: too many",
        ),
        (8, False, True, "is not refused on one atom: a barrier in it would hang"),
        (
            26,
            True,
            False,
            "clusters of 2 ran on 26 SMs of a lane of 8 SMs of atoms 0; clusters of 1 ran on 26 SMs",
        ),
    ],
)
def test_clusters_have_to_stay_on_their_lane(
    num_sms: int, is_refused: bool, is_met: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the SMs that the driver may add."""
    fake_kernels(monkeypatch, num_sms, is_refused=is_refused)

    def time_on(gpu: object, lane: object, call: Callable[[], None], repeats: int) -> int:
        call()
        return 5_000

    monkeypatch.setattr(gpu_checks, "time_on", time_on)
    outcome = gpu_checks.clusters_fit_into_lanes(CheckedGpu())  # type: ignore[arg-type]
    assert outcome.is_met is is_met and text in outcome.text
    old = CheckedGpu()
    old.native.compute_capability = (8, 0)
    assert gpu_checks.clusters_fit_into_lanes(old).text == "this GPU has no clusters"  # type: ignore[arg-type]


@pytest.mark.parametrize(("profiled_ns", "is_met"), [(1_000_000, True), (2_000_000, False)])
def test_clocks_have_to_agree(profiled_ns: int, is_met: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events, the profiler and the kernel itself, of the same replay."""
    fake_kernels(monkeypatch, 8)
    gpu = CheckedGpu()
    gpu.ns_by_stream = {"lane 1": 1_000_000, "lane 2": 1_000_000}

    def profile_step(step: Callable[[], object], mark: Callable[[], None]) -> dict[str, object]:
        step()
        args = [{"grid": [64, 1, 1], "stream": 7, "context": context} for context in (1, 2)]
        event = {"cat": "kernel", "name": "_note_and_spin", "ts": 3.0, "dur": profiled_ns / 1000}
        return {"traceEvents": [{**event, "args": each} for each in args]}

    monkeypatch.setattr(gpu_checks, "profile_step", profile_step)
    outcome = gpu_checks.markers_agree(gpu)  # type: ignore[arg-type]
    assert outcome.is_met is is_met
    assert outcome.text.endswith("the profiler tells lanes apart by context") and not gpu.races


@pytest.mark.parametrize(("near", "is_met"), [(2.0, True), (1.0, False), (0.9, False)])
def test_a_cache_that_is_no_faster_than_memory_was_not_measured(
    near: float, is_met: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T1 says so of a calibration."""
    sheet = load_profile(Path("h200"))
    rates = tuple(near * rate for rate in sheet.far_bytes_per_s[0].per_s)
    measured = replace(sheet, near_bytes_per_s=(Rate(size=1, per_s=rates), *sheet.near_bytes_per_s))
    monkeypatch.setattr(gpu_checks, "calibrate_gpu", lambda *arguments, **options: measured)
    assert gpu_checks.calibration_is_plausible(CheckedGpu()).is_met is is_met  # type: ignore[arg-type]


def test_a_plan_is_held_against_its_bound() -> None:
    """Over all graphs of the model that ran; a model of others has none."""
    workload = build_gpu_workload("clip_b32", batch=2, scale="tiny", device="cpu")
    assert gpu_suite.plan_of(workload.model) == (None, None)
    torch._dynamo.reset()
    options = {"plan.autotune": False, "plan.min_gain": 0.0, "plan.planner": "greedy", "runtime.bodies": "eager"}
    run = torch.compile(workload.model, backend="apollo", options=options)
    run(workload.inputs).backward()
    plan_ns, bound_ns = gpu_suite.plan_of(workload.model)
    plans = [graph.compilation.plan for made in registry.find_models(workload.model) for graph in made.graphs]
    assert len(plans) == 2
    assert (plan_ns, bound_ns) == (sum(p.makespan_ns for p in plans), sum(p.lower_bound_ns for p in plans))


def test_another_loss_than_eagers_is_wrong() -> None:
    """NaN as well; a variant that did not run has none."""
    times = [variant("eager", 1), variant("a", 1, 1.02), variant("b", 1, 1.2), variant("c", 1, float("nan"))]
    assert wrong_variants([*times, variant("d", 1, 5.0, note="no")], 0.03) == ["b", "c"]


def test_complaints_are_about_wrong_numbers_and_about_what_failed() -> None:
    """Not about what there was no time for, nor about losses where eager has none."""
    no_time, boom = gpu_suite.NO_TIME, "RuntimeError: boom"
    workloads = {
        "clip": [variant("eager", 1), variant("inductor", 1, 2.0), variant("apollo", 0, note=boom)],
        "flava": [variant("eager", 1), variant("inductor", 0, note=boom), variant("apollo", 0, note=no_time)],
        "llava": [variant("eager", 0, note=boom), variant("inductor", 1, 2.0), variant("apollo", 1)],
    }
    assert gpu_suite.complaints_about(workloads, 0.03) == [
        "clip: the loss of inductor is not eager's",
        "clip: apollo did not run",
    ]


def test_a_workload_that_fails_leaves_the_table_of_the_others() -> None:
    """With a note, and a complaint."""

    def fail() -> list[VariantTimes]:
        raise RuntimeError("an illegal memory access\nwas encountered")

    results, skipped = gpu_suite.run_workloads(
        {"clip": lambda: [variant("eager", 9)], "flava": fail},
        deadline=10,
        reserve=1,
        clock=Clock(),
        keep=lambda found, late: None,
    )
    assert skipped == [] and [each.name for each in results["clip"]] == ["eager"]
    text = format_results([], results, [])
    assert text.endswith("flava: nothing ran; RuntimeError: an illegal memory access")
    assert gpu_suite.complaints_about(results, 0.03) == ["flava: apollo, apollo's plan did not run"]


@pytest.mark.parametrize("name", SHAPES)
def test_workloads_train(name: str) -> None:
    """Every parameter gets a gradient; equal arguments give equal numbers."""
    losses = []
    for _ in range(2):
        workload = build_gpu_workload(name, batch=2, scale="tiny", device="cpu")
        loss = workload.model(workload.inputs)
        loss.backward()
        assert all(parameter.grad is not None for parameter in workload.model.parameters())
        losses.append(loss.item())
    assert losses[0] == losses[1] and losses[0] > 0


def test_full_workloads_have_the_numbers_of_the_published_models() -> None:
    """Parameters in millions; embeddings are not among them."""
    with torch.device("meta"):
        from benchmarks.workloads.gpu import Multimodal

        millions = {
            name: sum(p.numel() for p in Multimodal(shape).parameters()) / 1e6 for name, shape in SHAPES.items()
        }
    assert millions["clip_b32"] == pytest.approx(124, abs=3)
    assert millions["clip_l14"] == pytest.approx(389, abs=6)
    assert millions["imagebind"] == pytest.approx(278, abs=6)


def test_unknown_workloads_are_refused() -> None:
    """With those that are known."""
    with pytest.raises(ValueError, match="unknown workload 'bert' at scale 'full'; known: clip_b32, imagebind"):
        build_gpu_workload("bert", batch=1)


def test_variants_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with the variants that need no GPU; one that cannot run has a note."""

    def fail(workload: object, dtype: str) -> gpu_suite.Compiled:
        raise RuntimeError("needs a GPU\nand more")

    monkeypatch.setattr(gpu_suite, "VARIANTS", {"eager": gpu_suite._eager, "no": fail})
    eager, no = measure_workload(
        "clip_b32", batch=2, dtype="fp32", rounds=2, deadline=float("inf"), device="cpu", scale="tiny"
    )
    assert len(eager.step_ns) == 2 * gpu_suite.STEPS_PER_TURN and eager.loss > 0 and not eager.note
    assert no.step_ns == () and no.note == "RuntimeError: needs a GPU"
    assert wrong_variants([eager, no], 1e-6) == []
