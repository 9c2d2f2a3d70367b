"""The benchmark that watches a process over many steps."""

from __future__ import annotations

import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from benchmarks.steady import SLICES, Slice, draw, find_growth, watch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


SLICE = Slice(last_step=1, step_ns=1e6, witness_ns=1e5, resident_bytes=1000, num_threads=3, num_files=5)


def _nothing() -> None:
    pass


def test_growth_is_named_and_nothing_else_is() -> None:
    """One more thread or file is a leak; a little memory is not, nor is a slower step."""
    assert find_growth([SLICE], [replace(SLICE, step_ns=9e6, resident_bytes=1010)]) == []
    assert find_growth([SLICE], [replace(SLICE, num_threads=4)]) == ["num_threads from 3 to 4"]
    assert find_growth([SLICE], [replace(SLICE, num_files=6)]) == ["num_files from 5 to 6"]
    (memory,) = find_growth([SLICE], [replace(SLICE, resident_bytes=1100)])
    assert "resident memory" in memory


def test_leaked_threads_are_seen() -> None:
    """Slices are what the process has, and every step is run once, apart from the one that compiles.

    Many threads, since a few that earlier tests left behind may end meanwhile.
    """
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(100)]
    calls = []

    def step() -> None:
        calls.append(1)
        if len(calls) == 2 * SLICES:
            for thread in threads:
                thread.start()

    slices = watch(step, lambda: True, 3 * SLICES, _nothing)
    stop.set()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 + 3 * SLICES
    assert [s.last_step for s in slices] == list(range(3, 3 * SLICES + 1, 3))
    assert slices[-1].num_threads > slices[0].num_threads + len(threads) / 2
    assert slices[0].resident_bytes > 2**20


def test_a_comparison_that_is_held_again_begins_the_watch_anew() -> None:
    """What is compiled for it is no growth of what runs."""
    calls: list[int] = []

    def is_settled() -> bool:
        return not 3 <= len(calls) < 7 and not 50 <= len(calls) < 60

    slices = watch(lambda: calls.append(1), is_settled, SLICES, _nothing)
    assert [s.last_step for s in slices] == list(range(1, SLICES + 1))
    assert len(calls) == 60 + SLICES


def test_times_that_drift_for_ever_do_not_keep_the_watch_from_its_end() -> None:
    """After some restarts every step counts."""
    calls: list[int] = []
    asked = iter(range(10**6))
    slices = watch(lambda: calls.append(1), lambda: next(asked) % 2 == 1, SLICES, _nothing)
    assert len(slices) == SLICES


def test_a_witness_runs_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice has the medians of both."""
    ran: list[str] = []
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 3 * ran.count("step") + 5 * ran.count("witness"))
    slices = watch(lambda: ran.append("step"), lambda: True, 2 * SLICES, lambda: ran.append("witness"))
    assert ran == ["step", *["step", "witness"] * 2 * SLICES]
    assert {(s.step_ns, s.witness_ns) for s in slices} == {(3, 5)}


def test_the_drawing_is_an_svg_with_all_curves() -> None:
    """It parses, and the curves have a point per slice."""
    root = ElementTree.fromstring(draw([replace(SLICE, last_step=n) for n in range(1, 8)], "a model"))
    curves = [element for element in root if element.tag.endswith("polyline")]
    assert [len(curve.attrib["points"].split()) for curve in curves] == [7, 7, 7]
