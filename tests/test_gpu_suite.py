"""What can be known of the GPU suite without a GPU: its exit code, its tables, its workloads, its variants on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_suite
from benchmarks.gpu_checks import CHECKS, Outcome
from benchmarks.gpu_suite import (
    CheckResult,
    VariantTimes,
    best_baseline,
    format_results,
    measure_workload,
    run_checks,
    wrong_variants,
)
from benchmarks.gpu_workloads import SHAPES, build_gpu_workload


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    """And writes nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_suite", "--json", str(tmp_path / "gpu.json")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        check=False,
        timeout=900,
    )
    assert done.returncode == gpu_suite.NO_GPU
    assert done.stdout == "no GPU: torch sees no CUDA device, so nothing was checked or measured\n"
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
    for name, check in CHECKS:
        assert check.__doc__ is not None and check.__doc__.split(":")[0].replace(",", "") in name
    numbers = {word for name, _ in CHECKS for word in name.split() if word[0] == "T" and word[1:].isdigit()}
    assert numbers == {f"T{number}" for number in range(14)} - {"T8"}


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
    assert format_results(checks, {"clip, batch 8": times}, ["flava, batch 8"]) == (
        "check          seen\n"
        "---------  --  -------\n"
        "T0 driver  ok  132 SMs\n"
        "\n"
        "clip, batch 8    median step       over reduce-overhead    memory    first step\n"
        "---------------  ----------------  ----------------------  --------  ------------\n"
        "eager            9.00 ms           0.44x                   1.00 GiB  3 s\n"
        "inductor         6.00 ms           0.67x                   1.00 GiB  3 s\n"
        "reduce-overhead  4.00 ms           1.00x                   1.00 GiB  3 s\n"
        "streams by hand  RuntimeError: no\n"
        "apollo           2.00 ms           2.00x                   1.00 GiB  3 s\n"
        "\n"
        "skipped, no time left (raise --budget): flava, batch 8"
    )
    assert format_results([], {"clip": [variant("eager", 0, note="boom")]}, []) == "clip: nothing ran; boom"


def test_another_loss_than_eagers_is_wrong() -> None:
    """NaN as well; a variant that did not run has none."""
    times = [variant("eager", 1), variant("a", 1, 1.02), variant("b", 1, 1.2), variant("c", 1, float("nan"))]
    assert wrong_variants([*times, variant("d", 1, 5.0, note="no")], 0.03) == ["b", "c"]


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
        from benchmarks.gpu_workloads import Multimodal

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
    eager, no = measure_workload("clip_b32", batch=2, dtype="fp32", rounds=2, device="cpu", scale="tiny")
    assert len(eager.step_ns) == 2 * gpu_suite.STEPS_PER_TURN and eager.loss > 0 and not eager.note
    assert no.step_ns == () and no.note == "RuntimeError: needs a GPU"
    assert wrong_variants([eager, no], 1e-6) == []
