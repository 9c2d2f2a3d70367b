"""The whole suite on a CPU: every stage, with tiny models, on code that is not compiled."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from apollo_compile.tools.bench.task import MeasuredVariant
from benchmarks.gpu_suite import __main__ as suite
from benchmarks.gpu_suite import variants
from benchmarks.gpu_suite.checks import CheckResult
from benchmarks.gpu_suite.race import Result
from benchmarks.gpu_suite.stages import Report
from benchmarks.gpu_suite.tables import DRY
from benchmarks.gpu_suite.variants import VARIANTS

QUICK = {"plan.autotune": False, "plan.planner": "greedy", "runtime.bodies": "eager"}

BACKENDS = {
    **{"inductor": "eager", "reduce-overhead": "eager", "apollo": "apollo", "apollo-step": "apollo"},
    **{"captured by hand": None, "traced whole": "eager", "eager": None},
}
STAND_INS = {
    name: MeasuredVariant(
        name=name, backend=backend, options=QUICK if backend == "apollo" else {}, stepper=VARIANTS[name].stepper
    )
    for name, backend in BACKENDS.items()
}
"""The suite's variants with code that is not compiled."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], str]:
    """Return exit code, JSON file and output of a run over one workload."""
    path = tmp_path_factory.mktemp("suite") / "dry.json"
    arguments = ["--device", "cpu", "--json", str(path), "--workloads", "clip_b32:2", "--rounds", "2"]
    arguments += ["--loop-steps", "2", "--budget", "850", "--dtype", "fp32"]
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *parts, **options: lines.append(" ".join(map(str, parts))))
        code = suite.main(arguments, variants=STAND_INS)
    return code, json.loads(path.read_text()), "\n".join(lines)


@pytest.mark.soak
def test_every_stage_runs_on_a_cpu(run: tuple[int, dict[str, Any], str]) -> None:
    """It says before and after that no figure is a GPU's."""
    code, content, printed = run
    assert code == 0, printed
    assert [(stage["name"], stage["state"]) for stage in content["stages"]] == [
        ("device", "done"),
        ("checks", "done"),
        ("clip_b32, batch 2, fp32", "done"),
        ("ledger", "done"),
        ("other checks", "done"),
    ]
    assert [check["name"] for check in content["checks"]] == ["T0 driver", "T1 T2 T4 T5 self-check", "doctor"]
    assert printed.count(DRY) == 3 and "NOT A GPU" in content
    assert content["facts"]["matmul_flops_per_s"] > 0 and content["facts"]["torch"] == torch.__version__
    assert set(content["ledger"]) == {"apollo", "reduce-overhead"}
    assert {target["state"] for target in content["targets"]} == {"dry run"}


@pytest.mark.soak
def test_every_variant_trains_as_eager_does(run: tuple[int, dict[str, Any], str]) -> None:
    """For 50 steps with AdamW."""
    results = run[1]["workloads"]["clip_b32, batch 2, fp32"]
    assert list(results) == list(STAND_INS)
    for name, result in results.items():
        assert not result["note"], (name, result["note"])
        assert len(result["loops_ns"]) == 2 and len(result["steps_ns"][0]) == 5
        assert len(result["losses"]) == variants.NUM_LOSSES and result["losses"][-1] < result["losses"][0]
        assert result["losses"] == pytest.approx(results["eager"]["losses"], rel=1e-3, abs=1e-4), name
        assert result["memory"]["warm_bytes"] > 0 and result["launch"]["host_ns"] > 0
    assert results["apollo"]["decided"]["plan_ns"] >= results["apollo"]["decided"]["bound_ns"] > 0


def test_a_dry_run_is_not_written_among_results(capsys: pytest.CaptureFixture[str]) -> None:
    """Its figures are no GPU's."""
    with pytest.raises(SystemExit):
        suite.main(["--device", "cpu", "--json", str(suite.RESULTS / "gpu_new.json")])
    assert "a dry run has none: write it elsewhere" in capsys.readouterr().err


def test_complaints_are_about_checks_losses_and_apollo() -> None:
    """Not about what there was no time for, nor about a rival that failed."""
    report = Report(is_dry=False)
    report.checks = [
        CheckResult(name="T4 races", state="failed", text=""),
        CheckResult(name="T8", state="skipped", text=""),
    ]
    report.workloads["clip"] = {
        "eager": Result(name="eager", losses=[1.0, 0.5]),
        "max-autotune": Result(name="max-autotune", note="did not answer"),
        "apollo": Result(name="apollo", note="died", losses=[1.0, 0.5]),
        "traced whole": Result(name="traced whole", losses=[1.0, 0.6]),
    }
    assert suite.complaints_about(report, "fp32") == [
        "check T4 races failed",
        "clip: apollo did not run: died",
        "clip: losses of traced whole are 1.0e-01 apart from the reference's",
    ]


def test_one_command_prepares_a_bare_machine(tmp_path: Path) -> None:
    """It unpacks the wheels, takes the extension from one of them, and leaves the rest of the time to the suite."""
    checkout, wheels, programs = tmp_path / "checkout", tmp_path / "wheels", tmp_path / "bin"
    for folder in (checkout / "benchmarks", checkout / "apollo_compile", wheels, programs):
        folder.mkdir(parents=True)
    script = shutil.copy(suite.RESULTS.parent / "on_a_gpu.sh", checkout / "benchmarks")
    (wheels / "apollo_compile-1-cp312-abi3-linux.whl").touch()
    python = programs / "python3"
    python.write_text(
        "#!/bin/sh\n"
        'echo "$PYTHONPATH $*"\n'
        'if [ "$2" = pip ]; then mkdir -p build/gpu/apollo_compile && touch build/gpu/apollo_compile/_native.so; fi\n'
    )
    python.chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": "mine"}
    command = ["sh", script, "wheels", "--json", "gpu.json"]
    printed = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True, timeout=60)
    unpack, run_suite = printed.splitlines()
    assert unpack.split()[:4] == ["mine", "-m", "pip", "install"]
    assert unpack.endswith(f"--target build/gpu {wheels}/apollo_compile-1-cp312-abi3-linux.whl")
    found = re.fullmatch(r"(.*) -m benchmarks.gpu_suite --budget (\d+) --json gpu.json", run_suite)
    assert found is not None and found[1] == f"{checkout}/build/gpu:mine" and 0 <= 570 - int(found[2]) < 60
    assert (checkout / "apollo_compile" / "_native.so").exists()
