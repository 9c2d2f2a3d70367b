"""Published instances as planning problems.

    read_instance(path) -> Problem, budgets     a `.sm` or `.mm` file of PSPLIB or MMLIB
    published() -> tuple of Instance            those in `psplib/`, with the makespans in `best.csv`

A file lists jobs with their successors, then per job and mode a duration and what it asks of the renewable and the
non-renewable resources, then how much of each there is. The first and the last job are a source and a sink without
duration; they are left out. Jobs are put into a topological order. There are no lanes, so modes differ in demands only.
A non-renewable resource is a `Budget`: the planner has none, since nothing that a graph needs is used up.
Sources: Kolisch, Sprecher, "PSPLIB - a project scheduling problem library", EJOR 96, 1996,
https://doi.org/10.1016/S0377-2217(96)00170-1 (format); Van Peteghem, Vanhoucke, "An experimental investigation of
metaheuristics for the multi-mode RCPSP on new dataset instances", EJOR 235, 2014,
https://doi.org/10.1016/j.ejor.2013.10.012 (MMLIB)
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

from apollo_compile.planner.problem import ExecutionMode, Problem, Task

FOLDER = Path(__file__).parent / "psplib"


@dataclass(frozen=True, slots=True)
class Instance:
    """A published instance and what is known of it."""

    name: str
    family: str
    best_makespan: int
    is_proven: bool

    def read(self) -> tuple[Problem, tuple[Budget, ...]]:
        """Read its file."""
        return read_instance(FOLDER / self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """A non-renewable resource."""

    limit: int
    """What all tasks together may consume."""
    consumption: tuple[tuple[int, ...], ...]
    """Per task and mode."""


def published() -> tuple[Instance, ...]:
    """Return the instances that `best.csv` names."""
    with (FOLDER / "best.csv").open(newline="") as rows:
        return tuple(
            Instance(row["file"], row["class"], int(row["best_makespan"]), row["status"] == "proven")
            for row in csv.DictReader(rows)
        )


def read_instance(path: Path) -> tuple[Problem, tuple[Budget, ...]]:
    """Return the problem in a `.sm` or `.mm` file, and the budgets that its tasks share."""
    text = path.read_text()
    _, relations, requests, limits = re.split(r"PRECEDENCE RELATIONS|REQUESTS/DURATIONS|RESOURCE ?AVAILABILITIES", text)
    num_renewable = limits.count("R")
    amounts = _rows(limits)[0]
    modes: dict[int, list[ExecutionMode]] = {}
    consumption: dict[int, list[list[int]]] = {}
    job = 0
    for row in _rows(requests):
        if len(row) == len(amounts) + 3:  # a job's first mode
            job = row.pop(0)
        _, duration, *asked = row
        if duration:
            modes.setdefault(job, []).append(ExecutionMode(duration=duration, demands=tuple(asked[:num_renewable])))
            consumption.setdefault(job, []).append(asked[num_renewable:])
    predecessors: dict[int, list[int]] = {job: [] for job in modes}
    for before, _, _, *after in _rows(relations):
        for job in after:
            if before in modes and job in modes:
                predecessors[job].append(before)
    order = list(TopologicalSorter(predecessors).static_order())
    place = {job: index for index, job in enumerate(order)}
    tasks = (
        Task(modes=tuple(modes[job]), predecessors=tuple(sorted(place[other] for other in predecessors[job])))
        for job in order
    )
    budgets = (
        Budget(limit=limit, consumption=tuple(tuple(row[index] for row in consumption[job]) for job in order))
        for index, limit in enumerate(amounts[num_renewable:])
    )
    return Problem(tasks=tuple(tasks), capacities=tuple(amounts[:num_renewable])), tuple(budgets)


def _rows(section: str) -> list[list[int]]:
    """Return the lines that have numbers only."""
    rows = [line.split() for line in section.splitlines()]
    return [[int(number) for number in row] for row in rows if row and all(number.isdigit() for number in row)]
