"""Verdicts about a GPU are kept for its driver and torch, and made by one process at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apollo_compile.store.files import FileState
from apollo_compile.store.self_checks import RETRY_S, SelfCheck, SelfChecks
from apollo_compile.target.check_result import CheckResult, Level
from apollo_compile.target.fingerprint import Fingerprint

MINE = Fingerprint(device="NVIDIA H200", driver="580.1 (CUDA 13000)", torch="2.11", cores=132, units=132)
FINE = CheckResult(level=Level.OK, subject="hand-overs", message="are in order")
BAD = CheckResult(level=Level.ERROR, subject="dropout", message="equal masks")


def verdict(*results: CheckResult, age_s: float = 0) -> SelfCheck:
    """Return what was found `age_s` seconds ago."""
    return SelfCheck(made_at=time.time() - age_s, fingerprint=MINE, results=results)


def never() -> SelfCheck:
    """Fail: there is a verdict already."""
    raise AssertionError("it was made again")


@pytest.mark.parametrize(("results", "complaint"), [((FINE,), None), ((FINE, BAD), "dropout: equal masks")])
def test_a_verdict_is_made_once(tmp_path: Path, results: tuple[CheckResult, ...], complaint: str | None) -> None:
    """Later processes read it, whatever it says."""
    made = verdict(*results)
    assert SelfChecks(tmp_path / "new").find(MINE, lambda: made) == made
    found = SelfChecks(tmp_path / "new").find(MINE, never)
    assert found == made and found.complaint == complaint


@pytest.mark.parametrize(
    ("change", "state", "detail"),
    [
        ({"driver": "580.2 (CUDA 13000)"}, FileState.STALE, "driver '580.1 (CUDA 13000)' is now '580.2 (CUDA 13000)'"),
        ({"torch": "2.12"}, FileState.STALE, "torch '2.11' is now '2.12'"),
        ({"device": "NVIDIA L40S"}, FileState.MISSING, None),
        ({"units": 60, "cores": 60}, FileState.MISSING, None),
    ],
    ids=["driver", "torch", "GPU", "SMs"],
)
def test_a_verdict_is_stale_with_another_driver_or_torch_and_another_gpu_has_its_own(
    tmp_path: Path, change: dict[str, Any], state: FileState, detail: str | None
) -> None:
    """It says which, and a new one takes its place; GPUs are told apart by name and number of SMs."""
    kept, now = SelfChecks(tmp_path), replace(MINE, **change)
    kept.find(MINE, verdict)
    found = kept.read(now)
    assert (found.state, detail or found.detail) == (state, found.detail)
    again = replace(verdict(BAD), fingerprint=now)
    assert kept.find(now, lambda: again) == again == kept.find(now, never)


def test_a_failure_is_tried_again_after_a_day(tmp_path: Path) -> None:
    """What went well is not."""
    kept = SelfChecks(tmp_path)
    for result, state in ((BAD, FileState.STALE), (FINE, FileState.CURRENT)):
        kept.find(MINE, lambda result=result: verdict(result, age_s=RETRY_S + 60), again=True)  # type: ignore[misc]
        assert kept.read(MINE).state is state
    kept.find(MINE, lambda: verdict(BAD, age_s=RETRY_S - 60), again=True)
    assert kept.read(MINE).state is FileState.CURRENT


def test_a_process_waits_for_the_check_of_another(tmp_path: Path) -> None:
    """And takes its verdict over."""
    begun, may_end = threading.Event(), threading.Event()
    found: list[SelfCheck] = []

    def slow() -> SelfCheck:
        begun.set()
        assert may_end.wait(60)
        return verdict(BAD)

    def find(make: Callable[[], SelfCheck]) -> threading.Thread:
        thread = threading.Thread(target=lambda: found.append(SelfChecks(tmp_path).find(MINE, make)))
        thread.start()
        return thread

    first = find(slow)
    assert begun.wait(60)
    second = find(never)
    may_end.set()
    for thread in (first, second):
        thread.join(60)
    assert len(found) == 2 and found[0] == found[1]


def test_a_directory_that_cannot_be_written_costs_the_keeping_only(tmp_path: Path) -> None:
    """The verdict counts in this process."""
    file = tmp_path / "file"
    file.touch()
    assert SelfChecks(file / "below").find(MINE, lambda: verdict(BAD)).complaint == "dropout: equal masks"
