"""Exact shortest makespan of two chains of tasks that share the lanes.

    shortest_makespan(one, other, lanes) -> makespan, or None if that would take too long

The towers of a model are chains. The bound of a linear program is loose for them, because it may run a layer half on
many units and half on few; here every task runs in one mode.

A partial schedule is described by its state whenever a task ends, its label. Then either nothing runs, or one chain
runs a task until `end`, and the other is free since `now`: it starts its next task on a lane that shares no atom with
the busy lane, or waits until `end`. It need not wait for anything else, because starting a task earlier never
makes a schedule longer. Of the labels with the same finished tasks and the same busy lane, only those whose `now` and
`end` are not dominated (Pareto) are kept. Once a chain has finished, the other uses its fastest modes.

Sources: Akers, "A graphical approach to production scheduling problems", Operations Research 4, 1956,
https://doi.org/10.1287/opre.4.2.244 (two jobs as a shortest path); Ehrgott, "Multicriteria Optimization", 2005,
https://doi.org/10.1007/3-540-27659-9 (labels with several criteria)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

MAX_STARTS = 500_000
"""Limit of labels x lanes, each a microsecond or less; mostly, a few labels per pair of tasks and lane are enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """Tasks that run one after the other."""

    modes: tuple[tuple[tuple[int, int], ...], ...]
    """Lane and duration of every mode of every task."""
    heads: tuple[int, ...]
    """Earliest start of each task."""
    tail: int
    """Least time from the end of the last task to the end of the schedule."""

    def end_alone(self, now: int, position: int) -> int:
        """Return the makespan if the tasks from `position` on have the whole device from `now` on."""
        for task in range(position, len(self.modes)):
            now = max(now, self.heads[task]) + min(duration for _, duration in self.modes[task])
        return now + self.tail


_Place: TypeAlias = tuple[int, int]
"""Number of finished tasks of each chain."""


@dataclass(slots=True)
class _Search:
    """Labels that are not expanded yet, and the best makespan so far."""

    chains: tuple[Chain, Chain]
    excludes: Sequence[Sequence[bool]]
    """Whether two lanes have an atom in common."""
    best: int | None = None
    idle: dict[_Place, int] = field(default_factory=dict)
    """Per place: the earliest instant at which nothing runs."""
    busy: dict[_Place, defaultdict[tuple[int, int], list[tuple[int, int]]]] = field(default_factory=dict)
    """Per place, running chain and its lane: (instant since when the other chain is free, end of the running task)."""

    def visit(self, place: _Place) -> int:
        """Expand all labels of a place, which lead to places with more finished tasks; return their number."""
        if place in self.idle:
            now = self.idle.pop(place)
            for chain in (0, 1):
                for lane, end in self._starts(chain, place, now):
                    self._run(place, chain, lane, now, end)
        num_labels = 0
        for (chain, lane), labels in self.busy.pop(place, {}).items():
            least = None
            for now, end in sorted(labels):
                if least is None or end < least:
                    least = end
                    num_labels += 1
                    self._go_on(place, chain, lane, now, end)
        return num_labels

    def _starts(self, chain: int, place: _Place, now: int) -> Iterator[tuple[int, int]]:
        """Yield the lane and the end of the chain's next task, by mode."""
        begin = max(now, self.chains[chain].heads[place[chain]])
        return ((lane, begin + duration) for lane, duration in self.chains[chain].modes[place[chain]])

    def _go_on(self, place: _Place, busy: int, lane: int, now: int, end: int) -> None:
        """Expand a label: chain `busy` runs until `end`; the other waits for this end, or starts a task."""
        self._finish(place, busy, end)
        free = 1 - busy
        if self.chains[free].heads[place[free]] >= end:
            return
        for other_lane, other_end in self._starts(free, place, now):
            if self.excludes[lane][other_lane]:
                continue
            if other_end <= end:
                self._finish(place, free, other_end, (busy, lane, end))
            else:
                self._finish(place, busy, end, (free, other_lane, other_end))

    def _finish(self, place: _Place, chain: int, now: int, running: tuple[int, int, int] | None = None) -> None:
        """End a task of `chain` at `now`, while a task of the other chain is `running`: chain, lane, end."""
        after = (place[0] + (chain == 0), place[1] + (chain == 1))
        ended, other = self.chains[chain], self.chains[1 - chain]
        if after[chain] == len(ended.modes):
            position = after[1 - chain] + (running is not None)
            rest = other.end_alone(now if running is None else running[2], position)
            makespan = max(now + ended.tail, rest)
            self.best = makespan if self.best is None else min(self.best, makespan)
        elif running is not None:
            self._run(after, running[0], running[1], now, running[2])
        else:
            self.idle[after] = min(now, self.idle.get(after, now))

    def _run(self, place: _Place, chain: int, lane: int, now: int, end: int) -> None:
        self.busy.setdefault(place, defaultdict(list))[chain, lane].append((now, end))


def shortest_makespan(one: Chain, other: Chain, lanes: Sequence[frozenset[int]]) -> int | None:
    """Return the shortest makespan of two chains that are not empty; None if it takes more than `MAX_STARTS`.

    Arguments:
        one: a chain.
        other: another chain; neither depends on the other.
        lanes: the atoms of every lane; lanes that share one exclude each other.
    """
    search = _Search((one, other), [[bool(a & b) for b in lanes] for a in lanes])
    search.idle[0, 0] = 0
    num_labels = 0
    for num_ended in range(len(one.modes) + len(other.modes)):
        for first in range(max(0, num_ended - len(other.modes) + 1), min(len(one.modes) - 1, num_ended) + 1):
            num_labels += search.visit((first, num_ended - first))
            if num_labels * len(lanes) > MAX_STARTS:
                return None
    return search.best
