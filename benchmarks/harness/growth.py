"""Watch a process over many steps: step time, resident memory, threads, open files.

watch(step, is_settled, steps) -> list[Slice];  find_growth(early, late) -> one line for each thing that grew
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from apollo_compile.units import format_bytes

SLICES = 100
ALLOWED_GROWTH = 0.02
"""Of resident memory: allocators settle for a while."""

MAX_RESTARTS = 5
"""A machine whose other users come and go makes times drift for ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Some steps in a row, and the process at their end."""

    last_step: int
    step_ns: float
    """Median."""
    resident_bytes: int
    num_threads: int
    num_files: int


def watch(step: Callable[[], None], is_settled: Callable[[], bool], steps: int) -> list[Slice]:
    """Run steps, cut into `SLICES`, from the end of the comparison on, since it compiles its competitors.

    Where it is held again because times drifted, the watch begins again, up to `MAX_RESTARTS` times.
    """
    step()
    size = max(1, steps // SLICES)
    slices: list[Slice] = []
    num_restarts = 0
    with tqdm(total=steps // size, desc="slices", file=sys.stderr, mininterval=5) as progress:
        while len(slices) < steps // size:
            if not is_settled() and num_restarts <= MAX_RESTARTS:
                num_restarts += 1
                while not is_settled():
                    step()
                slices.clear()
                progress.reset()
            step_ns = statistics.median(_time(step) for _ in range(size))
            slices.append(look(size * (len(slices) + 1), step_ns))
            progress.update()
    return slices


def _time(call: Callable[[], None]) -> int:
    begin = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin


def look(last_step: int, step_ns: float) -> Slice:
    """Return the present memory, threads and files of the process."""
    return Slice(
        last_step=last_step,
        step_ns=step_ns,
        resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        num_threads=len(os.listdir("/proc/self/task")),
        num_files=len(os.listdir("/proc/self/fd")),
    )


def find_growth(early: Sequence[Slice], late: Sequence[Slice]) -> list[str]:
    """Return a line for each thing of which the late slices have more than the early ones."""
    found = []
    for name in ("num_threads", "num_files"):
        before, after = (max(getattr(s, name) for s in part) for part in (early, late))
        if after > before:
            found.append(f"{name} from {before} to {after}")
    before, after = (max(s.resident_bytes for s in part) for part in (early, late))
    if after > before * (1 + ALLOWED_GROWTH):
        found.append(f"resident memory from {format_bytes(before)} to {format_bytes(after)}")
    return found
