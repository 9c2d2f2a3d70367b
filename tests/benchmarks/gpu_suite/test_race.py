"""Variants in processes of their own: what one does costs the others nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from apollo_compile.tools.bench.task import MeasuredTask, MeasuredVariant
from benchmarks.gpu_suite.race import Result, race, started
from tests.benchmarks.gpu_suite import steppers

ROUNDS = 3


def variant(name: str) -> MeasuredVariant:
    """Return a variant whose stepper has that name."""
    return MeasuredVariant(name=name.lower(), backend="apollo", stepper=f"{steppers.__name__}:{name}")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Let all of them take part."""
    names = ("Fine", "Dies", "Fails", "Breaks", "Hangs")
    folder = tmp_path_factory.mktemp("race")
    with started(MeasuredTask(builder=""), [variant(name) for name in names], folder, time.monotonic) as heat:
        end = time.monotonic() + 300
        return race(heat, until=end, start_limits_s={"hangs": 0.1}, loop_steps=4, most_rounds=ROUNDS)


def test_each_keeps_what_it_gave_and_costs_the_others_nothing(results: dict[str, Result]) -> None:
    """How one ended is told with the last line that it wrote; one that hangs has its time for the first step."""
    assert results["fine"] == Result(
        name="fine",
        first_step_s=1.5,
        warm_up={"steps": 8, "is_settled": True},
        losses=[1.0, 0.5],
        memory={"peak_bytes": 200, "warm_bytes": 100},
        launch={"host_ns": 10, "cpu_ns": 20, "device_ns": None},
        decided={"ran": ["fine"]},
        loops_ns=ROUNDS * [4 * steppers.NS],
        steps_ns=ROUNDS * [5 * [2 * steppers.NS]],
    )
    dies, fails, breaks, hangs = (results[name] for name in ("dies", "fails", "breaks", "hangs"))
    assert dies.memory and dies.loops_ns == [4 * steppers.NS]
    assert "died at ('loop', 4), exit code 9" in dies.note
    assert dies.note.endswith("an illegal memory access was encountered")
    assert fails.losses and not fails.memory and not fails.loops_ns
    assert fails.note.endswith("RuntimeError: no allocator")
    assert breaks.first_step_s is None and breaks.note.endswith("Error: CUDA out of memory")
    assert hangs.first_step_s is None and not hangs.losses
    assert hangs.note == "had no first step in 0 s, in which others compiled too"


def test_something_else_may_be_done_until_the_last_first_step(tmp_path: Path) -> None:
    """Which is not waited for after its end; a process that died is no more waited for either."""
    waited: list[bool] = []
    begin = time.monotonic()

    def meanwhile(until: float, is_waiting: Callable[[], bool]) -> None:
        assert begin < until < begin + 300
        heat.children["breaks"].kill()
        while is_waiting():
            waited.append(all(heat.children[name].has_answered() for name in ("breaks", "fine")))

    variants = [variant(name) for name in ("Fine", "Breaks", "Hangs")]
    with started(MeasuredTask(builder=""), variants, tmp_path, time.monotonic) as heat:
        limits = {"hangs": time.monotonic() - heat.begin + 0.5}
        found = race(heat, until=begin + 300, start_limits_s=limits, meanwhile=meanwhile, most_rounds=1)
    assert waited and time.monotonic() < begin + 200
    assert found["fine"].loops_ns and found["breaks"].note and not found["hangs"].loops_ns


def test_apollo_may_compile_for_its_comparison_as_long_as_for_its_first_step(tmp_path: Path) -> None:
    """Even where that share of the time is over; others may not."""
    passed_s = 0.0

    def clock() -> float:
        return time.monotonic() + passed_s

    def meanwhile(until: float, is_waiting: Callable[[], bool]) -> None:
        nonlocal passed_s
        while is_waiting():
            pass
        passed_s = 740.0  # of 1,000; warm-ups have 720, and 800 at most

    with started(MeasuredTask(builder=""), [variant("Patient"), variant("Fine")], tmp_path, clock) as heat:
        heat.deciding.remove("fine")
        found = race(heat, until=heat.begin + 1000, start_limits_s={}, meanwhile=meanwhile, most_rounds=1)
    assert found["patient"].warm_up == {"steps": 8, "limit_s": 30.0}
    assert found["fine"].warm_up == {"steps": 8, "is_settled": False}
