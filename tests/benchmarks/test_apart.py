"""Processes that run one case after the other: their results, and their ends."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.harness.apart import run_apart


@pytest.mark.parametrize(
    ("function", "cases", "end", "timeout_s"),
    [
        (signal.raise_signal, [signal.SIGCONT, signal.SIGSEGV], f"died with exit code {-signal.SIGSEGV}", 300.0),
        pytest.param(time.sleep, [0.0, 1000.0], "hung", 20.0, marks=pytest.mark.soak),
    ],
    ids=["crashes", "hangs"],
)
def test_a_process_that_does_not_end_well_costs_its_case_alone(
    function: Callable[[Any], None], cases: list[Any], end: str, timeout_s: float
) -> None:
    """The case before it has its result, and the one behind it another process."""
    good, bad = cases
    results = list(run_apart(function, [good, bad, good], timeout_s=timeout_s, cases_per_process=9))
    assert results == [(good, None), (bad, end), (good, None)]


def test_an_error_ends_the_process_too(capfd: pytest.CaptureFixture[str]) -> None:
    """It is told where the process writes to."""
    results = list(run_apart(math.sqrt, [4.0, -1.0, 9.0], timeout_s=300.0, cases_per_process=9))
    assert results == [(4.0, 2.0), (-1.0, "died with exit code 1"), (9.0, 3.0)]
    assert "ValueError" in capfd.readouterr().err
