"""The watch over a process: growth, and nothing else, is found."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.harness.growth import MAX_RESTARTS, SLICES, Slice, find_growth, watch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SLICE = Slice(last_step=1, step_ns=1e6, resident_bytes=1000, num_threads=3, num_files=5)


def test_growth_is_named_and_nothing_else_is() -> None:
    """One more thread or file is a leak; a little memory is not, nor is a slower step."""
    assert find_growth([SLICE], [replace(SLICE, step_ns=9e6, resident_bytes=1010)]) == []
    assert find_growth([SLICE], [replace(SLICE, num_threads=4)]) == ["num_threads from 3 to 4"]
    assert find_growth([SLICE], [replace(SLICE, num_files=6)]) == ["num_files from 5 to 6"]
    (memory,) = find_growth([SLICE], [replace(SLICE, resident_bytes=1100)])
    assert "resident memory" in memory


def test_leaked_threads_are_seen() -> None:
    """Every step is run once, after the one that compiles.

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

    slices = watch(step, lambda: True, 3 * SLICES)
    stop.set()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 + 3 * SLICES
    assert [s.last_step for s in slices] == list(range(3, 3 * SLICES + 1, 3))
    assert slices[-1].num_threads > slices[0].num_threads + len(threads) / 2
    assert slices[0].resident_bytes > 2**20


@pytest.mark.parametrize(
    ("is_settled", "num_calls"),
    [
        (lambda calls, turn: not 3 <= calls < 7 and not 50 <= calls < 60, 60 + SLICES),
        (lambda calls, turn: turn % 2 == 1, 1 + MAX_RESTARTS + SLICES),
    ],
)
def test_a_comparison_that_is_held_again_restarts_the_watch(
    is_settled: Callable[[int, int], bool], num_calls: int
) -> None:
    """Its compiles are no growth of steps; times that drift for ever do not keep the watch from its end."""
    calls: list[int] = []
    turns = iter(range(10**6))
    slices = watch(lambda: calls.append(1), lambda: is_settled(len(calls), next(turns)), SLICES)
    assert [s.last_step for s in slices] == list(range(1, SLICES + 1))
    assert len(calls) == num_calls
