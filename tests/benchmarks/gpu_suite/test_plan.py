"""Stages in their order, with processes that do nothing."""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import pytest

from apollo_compile.tools.bench.task import MeasuredVariant
from benchmarks.gpu_checks import QUICK_CHECKS, TIMED_CHECKS, UNTIMED_CHECKS
from benchmarks.gpu_suite import __main__ as command
from benchmarks.gpu_suite.device import DeviceProcess
from benchmarks.gpu_suite.plan import BUDGET_S, OTHER_CORES, Suite
from benchmarks.gpu_suite.stages import Report, run_stages
from benchmarks.gpu_suite.variants import VARIANTS
from tests.benchmarks.gpu_suite import steppers

FINE = {
    name: MeasuredVariant(name=name, backend=None, stepper=f"{steppers.__name__}:Fine")
    for name in ("inductor", "max-autotune", "apollo")
}


def suite_of(args: argparse.Namespace, folder: Path, cores: int) -> Suite:
    """Return a suite of processes that do nothing."""
    process = DeviceProcess("cpu", folder, f"{steppers.__name__}:Looker")
    return Suite(args, FINE, folder, process, time.monotonic, cores=cores)


def test_the_default_ends_within_ten_minutes_in_the_documented_order() -> None:
    """Each stage at the time that the README names."""
    args = command._parse([], VARIANTS)
    shares = [stage.share for stage in suite_of(args, Path(), 2).stages()]
    assert sum(shares) == BUDGET_S == args.budget < 600
    readme = (command.RESULTS.parent / "README.md").read_text()
    for end in map(int, itertools.accumulate(shares)):
        assert f"| {end // 60}:{end % 60:02d} |" in readme


@pytest.mark.parametrize("spare_cores", (0, -1))
def test_checks_that_time_nothing_are_made_while_variants_compile(tmp_path: Path, spare_cores: int) -> None:
    """If there are cores for both; the others are made before or after, when nothing else uses the GPU."""
    args = command._parse(["--workloads", "clip_b32:2,chain:2", "--rounds", "1", "--no-ledger"], VARIANTS)
    suite = suite_of(args, tmp_path, len(FINE) + OTHER_CORES + spare_cores)
    report, made = Report(is_dry=False), dict[str, list[str]]()

    def write(report: Report) -> None:
        before = sum(map(len, made.values()))
        made[report.stages[-1].name] = [check.name for check in report.checks[before:]]

    with suite._process, suite:
        run_stages(suite.stages(), report, budget_s=400.0, clock=time.monotonic, write=write, tell=lambda line: None)
    assert [stage.state for stage in report.stages] == 5 * ["done"]
    assert all(check.state == "ok" for check in report.checks)
    if spare_cores < 0:
        assert made["checks"] == [*QUICK_CHECKS, *UNTIMED_CHECKS, *TIMED_CHECKS, "doctor"]
    else:
        assert made["checks"] == list(QUICK_CHECKS)
        assert made["clip_b32, batch 2, bf16"] == list(UNTIMED_CHECKS)
        assert made["other checks"] == [*TIMED_CHECKS, "doctor"]
    results = report.workloads
    assert list(results["clip_b32, batch 2, bf16"]) == list(FINE)
    assert list(results["chain, batch 2, bf16"]) == ["inductor", "apollo"]  # what is slow is in the first one alone
    assert all(result.loops_ns and not result.note for found in results.values() for result in found.values())
