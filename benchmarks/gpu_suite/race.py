"""The variants of one workload: they compile at the same time, and are measured in turns.

    with started(task, variants, folder, clock) as heat:
        results = race(heat, until=...)

    start     all at once: build, compile, take the first step; the caller may do something else meanwhile. In a dry
              run, only so many at the same time
    warm up   one after the other, so that what autotuning measures is not disturbed
    look      one after the other: losses of the first steps, memory, host and device times
    rounds    one loop of every variant and some single steps, in alternating order, as long as there is time

A variant that fails, dies or takes too long has a note instead of what is missing, its process is stopped, and the
others go on. Every request has a time limit, so all of it ends soon after `until`. What comes first in `variants` is
what is still measured where time is short.

On 16 cores, each half as fast as a desktop's, the first steps of six variants of CLIP B/32 that compiled at the same
time took 60 s each, and that of Inductor on the whole traced step more than 110 s. So most of a workload's time is for
first steps; variants that are known to be slow are given up before (`start_limits_s`); and apollo, which compiles again
for its comparison, may take as long for that as its first step took.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apollo_compile.errors import ApolloError
from apollo_compile.tools.bench.task import MeasuredTask, MeasuredVariant
from apollo_compile.tools.bench.turns import ChildProcess, spawn, turn_orders
from benchmarks.gpu_suite.stages import Clock

START_SHARE = 0.65
"""Of a workload's time from its start on, after which variants that have not taken their first step are given up."""

WARM_UP_SHARE, LAST_WARM_UP_SHARE = 0.72, 0.8
"""After which apollo is measured whether its comparison is over or not: the first, or the second where it had less time
than its first step took."""

LOOK_SHARE = 0.88
"""After which no more is asked, so that at least some rounds are measured."""

WARM_UP_STEPS = 8
LOOP_STEPS = 50
SINGLE_STEPS = 5
MOST_ROUNDS = 12

LEAST_LIMIT_S = 5.0
"""Every request after the first has at least this much."""


@dataclass(kw_only=True, slots=True)
class Result:
    """One variant of one workload; what was not measured is None or empty."""

    name: str
    note: str = ""
    """Why something is missing."""
    first_step_s: float | None = None
    warm_up: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    launch: dict[str, int | None] = field(default_factory=dict)
    replays: list[dict[str, Any]] = field(default_factory=list)
    decided: dict[str, Any] = field(default_factory=dict)
    loops_ns: list[int] = field(default_factory=list)
    """Nanoseconds of a step in a loop without waits, by round."""
    steps_ns: list[list[int]] = field(default_factory=list)
    """Nanoseconds of single steps with waits, by round."""


LOOKS: Sequence[tuple[str, str]] = (
    ("losses", "losses"),
    ("memory", "memory"),
    ("launch", "launch_times"),
    ("decided", "decided"),
    ("replays", "replays"),
)
"""Fields of a result, with the requests that give them."""


@contextmanager
def started(
    task: MeasuredTask,
    variants: Sequence[MeasuredVariant],
    folder: Path,
    clock: Clock,
    *,
    abreast: int | None = None,
    cache: Path | None = None,
) -> Iterator[Heat]:
    """Let variants begin to compile and to take their first step; end their processes after the `with`.

    Arguments:
        task: what a step is.
        variants: what takes it, the most important first.
        folder: for output and caches of the processes.
        clock: returns seconds.
        abreast: how many compile at the same time; all, if that is None. The others begin in `race`.
        cache: of Inductor, for all of them; each has its own, if that is None.
    """
    with ExitStack() as stack:

        def start(variant: MeasuredVariant) -> ChildProcess:
            process = spawn(task, variant, folder, cold=True, cache=cache, patience_s=0.0)
            return stack.enter_context(process)

        heat = Heat(variants, start, clock)
        heat.start(len(variants) if abreast is None else max(1, abreast))
        yield heat


def race(
    heat: Heat,
    *,
    until: float,
    start_limits_s: Mapping[str, float],
    meanwhile: Callable[[float, Callable[[], bool]], None] = lambda until, is_waiting: None,
    loop_steps: int = LOOP_STEPS,
    most_rounds: int = MOST_ROUNDS,
) -> dict[str, Result]:
    """Return what was measured of each variant until a time of the heat's clock.

    Arguments:
        heat: the variants, started.
        until: when to end.
        start_limits_s: seconds of variants that get less than all others until their first step.
        meanwhile: called with the time when the last first step has to have been taken, and whether one is waited for;
            not where some variants have yet to begin.
        loop_steps: steps of a loop.
        most_rounds: at which a race ends early.
    """
    clock, begin = heat.clock, heat.begin

    def at(share: float) -> float:
        return begin + share * (until - begin)

    def start_end(name: str) -> float:
        return min(at(START_SHARE), heat.begins[name] + start_limits_s.get(name, float("inf")))

    if not heat.left:
        ends = {name: start_end(name) for name in heat.children}
        meanwhile(max(ends.values()), lambda: heat.is_waiting(ends))
    for name, result in heat.results.items():
        result.first_step_s = heat.receive(name, start_end(name), least_s=0.1)
        if "did not answer" in result.note:
            had_s = max(0.0, start_end(name) - heat.begins[name])
            result.note = f"had no first step in {had_s:.0f} s, in which others compiled too"
        heat.start(1)
    deciding = [name for name in heat.deciding if name in heat.children]
    for name in list(heat.children):
        left_s, end = max(0.0, at(WARM_UP_SHARE) - clock()) / max(1, len(deciding)), at(LOOK_SHARE)
        if name in deciding:
            deciding.remove(name)
            left_s = max(left_s, min(heat.results[name].first_step_s or 0.0, at(LAST_WARM_UP_SHARE) - clock()))
            end = until  # a step that compiles takes as long as it takes
        heat.results[name].warm_up = heat.ask(name, ("warm_up", WARM_UP_STEPS, left_s), end) or {}
    for field_name, request in LOOKS:
        for name in list(heat.children):
            if clock() < at(LOOK_SHARE):
                heat.look(name, field_name, request, until)
    for number, order in enumerate(turn_orders(tuple(heat.children), most_rounds)):
        if number > 0 and clock() > until:
            break
        for name in order:
            heat.take_turn(name, loop_steps, until)
    return heat.results


class Heat:
    """Processes that still take part, and what they have given so far.

    Arguments:
        variants: that take part.
        start: returns the process of one.
        clock: returns seconds; the heat begins now.
    """

    def __init__(
        self, variants: Sequence[MeasuredVariant], start: Callable[[MeasuredVariant], ChildProcess], clock: Clock
    ) -> None:
        self.children: dict[str, ChildProcess] = {}
        self.begins: dict[str, float] = {}
        """When a variant began."""
        self.left = list(variants)
        """Those that have yet to begin."""
        self.results = {each.name: Result(name=each.name) for each in variants}
        self.deciding = [each.name for each in variants if each.backend == "apollo"]
        """Those that compare before they are measured."""
        self.clock = clock
        self.begin = clock()
        self._start = start

    def start(self, count: int) -> None:
        """Let so many more begin, if they are left."""
        for variant in self.left[:count]:
            self.begins[variant.name] = self.clock()
            child = self.children[variant.name] = self._start(variant)
            child.send(("start",))
        del self.left[:count]

    def is_waiting(self, ends: Mapping[str, float]) -> bool:
        """Return whether there is a process that has not answered and whose end has not come."""
        now = self.clock()
        return any(now < ends[name] and not child.has_answered() for name, child in self.children.items())

    def ask(self, name: str, request: tuple[Any, ...], until: float) -> Any:
        """Return the answer of a process; None if there is none, and then it takes part no more."""
        if name in self.children:
            self.children[name].send(request)
        return self.receive(name, until)

    def receive(self, name: str, until: float, least_s: float = LEAST_LIMIT_S) -> Any:
        """Return the answer to the last request; see `ask`."""
        child = self.children.get(name)
        if child is None:
            return None
        try:
            return child.receive(max(least_s, until - self.clock()))
        except Exception as error:  # whatever became of it, the others go on
            self.results[name].note = _short(error)
            child.kill()
            del self.children[name]
            return None

    def look(self, name: str, field_name: str, request: str, until: float) -> None:
        """Ask for one field of the result of a process."""
        answer = self.ask(name, (request,), until)
        if answer is not None:
            setattr(self.results[name], field_name, answer)

    def take_turn(self, name: str, loop_steps: int, until: float) -> None:
        """Add a round of one process, if it takes part still."""
        loop = self.ask(name, ("loop", loop_steps), until)
        steps = self.ask(name, ("run", 1, SINGLE_STEPS), until)
        if loop is not None and steps is not None:
            self.results[name].loops_ns.append(loop)
            self.results[name].steps_ns.append(steps)


def _short(error: Exception) -> str:
    """Return what failed, and the last error that the process wrote, or its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if not isinstance(error, ApolloError):
        lines[0] = f"{type(error).__name__}: {lines[0]}"
    errors = [line for line in lines[1:] if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return " ... ".join(dict.fromkeys((lines[0], (errors or lines)[-1])))[:400]
