"""Stages share the time of the suite, whatever becomes of one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_suite.stages import LATE_S, Report, Stage, run_stages
from tests.builders import Clock


def run(clock: Clock, stages: list[Stage], budget_s: float) -> tuple[Report, list[int]]:
    """Return the report, and how many stages it had each time it was written."""
    report, written = Report(is_dry=False), list[int]()

    def note(report: Report) -> None:
        written.append(len(report.stages))

    run_stages(stages, report, budget_s=budget_s, clock=clock, write=note, tell=lambda line: None)
    return report, written


def taking(clock: Clock, name: str, share: float, seconds: float, ends: list[float] | None = None) -> Stage:
    """Return a stage that takes so long, and notes the end that it was told."""

    def work(report: Report, until: float) -> None:
        if ends is not None:
            ends.append(until - 1000.0)
        clock.now_s += seconds

    return Stage(name=name, share=share, run=work)


def test_ends_are_in_proportion_and_what_is_left_is_the_next_ones() -> None:
    """The report is written after each."""
    clock, ends = Clock(), list[float]()
    stages = [taking(clock, name, share, 5.0, ends) for name, share in (("a", 10), ("b", 30), ("c", 60))]
    report, written = run(clock, stages, 200.0)
    assert ends == [20.0, 80.0, 200.0]
    assert [(each.state, each.seconds) for each in report.stages] == 3 * [("done", 5.0)]
    assert [each.allotted_s for each in report.stages] == [20.0, 75.0, 190.0]
    assert written == [1, 2, 3]


def test_a_stage_that_runs_over_takes_the_next_ones_time() -> None:
    """It is called late, if by more than ending processes takes; the next is skipped, and the suite ends in time."""
    clock = Clock()
    report, _ = run(clock, [taking(clock, "a", 1, 35.0), taking(clock, "b", 2, 1.0), taking(clock, "c", 1, 5.0)], 40.0)
    assert [each.state for each in report.stages] == ["late", "skipped", "done"]
    assert report.stages[0].note == "ended 25 s after its time" and report.stages[1].note == "no time left"
    assert clock.now_s - 1000.0 <= 40.0
    report, _ = run(clock, [taking(clock, "a", 1, 10.0 + LATE_S), taking(clock, "b", 9, 1.0)], 100.0)
    assert [each.state for each in report.stages] == ["done", "done"]


def test_a_stage_that_raises_has_failed_and_the_next_one_runs() -> None:
    """What it found before is kept."""
    clock = Clock()

    def fail(report: Report, until: float) -> None:
        report.facts["gpu"] = "H200"
        raise RuntimeError("an illegal memory access")

    report, _ = run(clock, [Stage(name="a", share=1, run=fail), taking(clock, "b", 1, 1.0)], 100.0)
    assert [(each.state, each.note) for each in report.stages] == [
        ("failed", "RuntimeError: an illegal memory access"),
        ("done", ""),
    ]
    assert report.facts == {"gpu": "H200"}


@pytest.mark.parametrize("is_dry", (False, True))
def test_the_file_says_whether_it_is_of_a_gpu(is_dry: bool, tmp_path: Path) -> None:
    """Loudly."""
    Report(is_dry=is_dry, facts={"torch": "2.11"}).write(tmp_path / "new" / "gpu.json")
    content = json.loads((tmp_path / "new" / "gpu.json").read_text())
    assert ("NOT A GPU" in content) is is_dry is content["is_dry"]
    assert content["facts"] == {"torch": "2.11"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["gpu.json"]
