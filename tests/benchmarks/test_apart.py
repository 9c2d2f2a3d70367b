"""Processes that run one case after the other: their results, and their ends."""

from __future__ import annotations

import math
import signal
import time

import pytest

from benchmarks.harness.apart import run_apart


def test_a_process_that_crashes_costs_its_case_alone() -> None:
    """The one before it has its result, the one behind it another process."""
    cases = [signal.SIGCONT, signal.SIGSEGV, signal.SIGCONT]
    results = list(run_apart(signal.raise_signal, cases, timeout_s=300.0, cases_per_process=9))
    assert results == list(zip(cases, (None, f"died with exit code {-signal.SIGSEGV}", None), strict=True))


def test_an_error_ends_the_process_too(capfd: pytest.CaptureFixture[str]) -> None:
    """It is told where the process writes to."""
    results = list(run_apart(math.sqrt, [4.0, -1.0, 9.0], timeout_s=300.0, cases_per_process=9))
    assert results == [(4.0, 2.0), (-1.0, "died with exit code 1"), (9.0, 3.0)]
    assert "ValueError" in capfd.readouterr().err


@pytest.mark.soak
def test_a_process_that_hangs_is_ended() -> None:
    """When the time of its case is over."""
    results = list(run_apart(time.sleep, [0.0, 1000.0, 0.0], timeout_s=20.0, cases_per_process=9))
    assert results == [(0.0, None), (1000.0, "hung"), (0.0, None)]
