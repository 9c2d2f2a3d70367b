"""What Dynamo calls for a graph on a GPU by default: torch.compile's code, until ours is measured to be faster.

    Challenge(name, incumbent, challenger, target, ...)(*arguments)

A step, forward and backward, belongs to one side: a backward is always that of the forward that ran. `turns.py` says
which side runs in which step, and how they are compared. Afterwards the steps of the winner are watched, by the time
between their beginnings, without waiting for the device; if it drifts, the winner is compared again with the best of
the others.

Guarantees: whatever fails, torch.compile's code runs from the next step on, with one WARNING, or one INFO line where it
is only that a CUDA graph cannot hold the graph. The memory of a side that lost is released. Within a CUDA graph that
the user captures, torch.compile's code runs, whichever side has won.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from apollo_compile.device.target import Run, Target
from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import Role, Variant, Verdict
from apollo_compile.reports.values import Stage, State
from apollo_compile.session.contest.challenger import Challenger
from apollo_compile.session.contest.turns import Contest, LanesOffError, Sides, name_of
from apollo_compile.session.drift import WATCH_EVERY, DriftWatch
from apollo_compile.store.verdicts import Choice

_logger = logging.getLogger(__name__)


class Challenge:
    """The sides of one Dynamo graph, as one function; see the top of this file.

    Arguments:
        name: name of the Dynamo graph.
        incumbent: torch.compile's function.
        challenger: our sides.
        target: the device.
        compile_ns: how long torch.compile took.
        is_replayed: whether torch.compile's code is CUDA graphs.
        tell: called with what later processes may begin with.
        known: what an earlier process found.
        is_strict: raise what would otherwise be logged.
        is_for_step: only compile and time segments, of which a training step is to be linked; torch.compile's code
            runs.
        clock: time of the host in nanoseconds.
    """

    def __init__(
        self,
        name: str,
        incumbent: Callable[..., Any],
        challenger: Challenger,
        target: Target,
        *,
        compile_ns: int,
        is_replayed: bool,
        tell: Callable[[Choice], None] = lambda choice: None,
        known: Choice | None = None,
        is_strict: bool = False,
        is_for_step: bool = False,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.verdict: Verdict | None = None
        """The latest one."""
        self.reason = ""
        """Why not all sides were compared."""
        self.variant = Variant.COMPILED
        """What runs the current step: the side, or torch.compile's code where sizes are rare."""
        self._side = Variant.COMPILED
        """The side of the current step."""
        self._name = name
        self._incumbent = incumbent
        self._challenger: Challenger | None = challenger
        """None once torch.compile's code runs for good."""
        self._target = target
        self._tell = tell
        self._is_strict = is_strict
        self._clock = clock
        self._contest = Contest(
            name,
            challenger,
            target,
            compile_ns=compile_ns,
            is_replayed=is_replayed,
            clock=clock,
            is_strict=is_strict,
        )
        self._is_for_step = is_for_step
        self._sides: Sides | None = self._contest.prepare_for_step() if is_for_step else self._contest.run()
        """The sides of the steps to come; None while nothing is being decided."""
        self._watch = DriftWatch()
        self._num_unwatched = 0
        self._watched_ns = 0
        self._lock = threading.Lock()
        if known is not None:
            self._adopt(known)

    @property
    def is_over(self) -> bool:
        """Whether torch.compile's code runs for good, so that its function may be called instead."""
        return self._challenger is None

    @property
    def wholes(self) -> Mapping[Role, Run]:
        """The graphs after AOTAutograd as Inductor compiled them whole, to be part of a larger CUDA graph."""
        graphs = () if self._challenger is None else self._challenger.graphs
        return {graph.compilation.capture.role: graph.plain for graph in graphs}

    def __call__(self, *arguments: Any) -> Any:
        """Run one forward, of the side whose turn it is."""
        challenger = self._challenger
        if challenger is None:
            return self._incumbent(*arguments)
        if self._target.is_capturing():
            self._watch.spoil()
            return self._incumbent(*arguments)
        if self._lock.acquire(blocking=False):  # else another thread is here, and decides for this one too
            try:
                self._begin_step(challenger, arguments)
            finally:
                self._lock.release()
        run = self._incumbent if self.variant is Variant.COMPILED else challenger.run
        return run(*arguments)

    def state(self) -> State:
        """Return how far it is."""
        if self._sides is not None:
            return State(graph=self._name, stage=Stage.MEASURING, detail=self._contest.progress)
        parts = [name_of(self._side)]
        standings = () if self.verdict is None else self.verdict.standings
        own = next((each for each in standings if each.name == parts[0]), None)
        others = [each for each in standings if each is not own]
        if own is not None and others:
            rival = next((other for other in others if other.name == Variant.COMPILED), others[0])
            parts[0] += f", {rival.ratio / own.ratio:.2f}x as fast as {rival.name}"
        parts += [self.reason] if self.reason else []
        return State(graph=self._name, stage=Stage.SETTLED, detail="; ".join(parts))

    # ------------------------------------------------------------------------------------------------- one step

    def _begin_step(self, challenger: Challenger, arguments: Sequence[Any]) -> None:
        """Set the side of the step that begins."""
        if challenger.failure is not None:
            self._give_up(challenger.failure)
            return
        self._contest.note_step()
        takes = challenger.sizes.admit(arguments)
        if self._sides is None and not self._is_for_step and not challenger.sizes.change:
            self._watch_step()
        if self._sides is not None:
            self._decide(challenger, self._sides, arguments)
        if self._challenger is not None:
            self._use(challenger, self._side if takes else Variant.COMPILED)

    def _decide(self, challenger: Challenger, sides: Sides, arguments: Sequence[Any]) -> None:
        """Set the side of the step that begins, while something is being decided."""
        self._contest.arguments = arguments
        try:
            side = next(sides, None)
            self._side = self._contest.champion if side is None else side
            if side is None:
                self._settle(challenger)
        except Exception as error:
            self._give_up(error)
        except BaseException:  # an interrupt, while something compiled
            self._end("a compile was interrupted", logging.INFO)
            raise
        finally:
            self._contest.arguments = ()

    def _use(self, challenger: Challenger, variant: Variant) -> None:
        self.variant = variant
        if variant is not Variant.COMPILED:
            challenger.use(variant)

    def _settle(self, challenger: Challenger) -> None:
        """Say what runs from now on, and begin to watch it."""
        self._sides = None
        self.reason = self._contest.reason or self.reason
        verdict = self._contest.verdict
        if self._is_for_step:
            return
        if verdict is None and self.verdict is None:  # torch.compile's code is CUDA graphs, and lanes promise nothing
            self._tell(self._choice(None))
            self._end(self.reason, logging.INFO)
            return
        self._watched_ns = self._clock()
        if verdict is None:
            self._watch.restart(is_confirmed=False)
        else:
            is_confirmed = self.verdict is not None and self.verdict.selection == verdict.selection
            self._watch.restart(is_confirmed=is_confirmed)
            self.verdict = verdict
            why = f"; {self.reason}" if self.reason else ""
            _logger.info("%s: chosen by measuring: %s%s", self._name, verdict, why)
            self._tell(self._choice(verdict))
        self._num_unwatched = WATCH_EVERY
        if self._side is not Variant.COMPILED:
            challenger.prove()

    def _watch_step(self) -> None:
        """Look at the time of the latest steps; if it has drifted, begin to compare again."""
        self._num_unwatched -= 1
        if self._num_unwatched > 0:
            return
        now, before = self._clock(), self._watched_ns
        self._num_unwatched, self._watched_ns = WATCH_EVERY, now
        if self._watch.is_in_step:  # not the first steps after a verdict
            self._watch.record(self, (now - before) // WATCH_EVERY)
            if self._watch.has_drifted([self]) and self.verdict is not None:
                self._sides = self._contest.run_again(self.verdict)
        self._watch.begin_step(is_spoilt=False)

    # ---------------------------------------------------------------------------------------- beginning and end

    def _adopt(self, known: Choice) -> None:
        """Begin with what an earlier process found."""
        self.reason = known.reason
        self.verdict = None if known.verdict is None else replace(known.verdict, is_remembered=True)
        self._sides = self._contest.adopt(known)
        if self._sides is None:
            self._challenger = None

    def _give_up(self, error: Exception) -> None:
        """Go back to torch.compile for good, because of an error."""
        is_expected = isinstance(error, UnsupportedGraphError)
        if self._is_strict and not is_expected:
            self._sides = None
            raise error
        if is_expected:
            self._end(str(error), logging.INFO)
        else:
            self._end(f"{type(error).__name__}: {error}", logging.WARNING)
        if is_expected and not isinstance(error, LanesOffError):
            self._tell(self._choice(None, str(error)))

    def _choice(self, verdict: Verdict | None, reason: str | None = None) -> Choice:
        """Return what later processes may begin with."""
        return Choice(verdict=verdict, reason=self.reason if reason is None else reason)

    def _end(self, why: str, level: int) -> None:
        """Run torch.compile's code from now on, for good."""
        self.reason, self.verdict = why, None
        self.variant = self._side = Variant.COMPILED
        challenger, self._challenger, self._sides = self._challenger, None, None
        self._contest.leave()
        if challenger is not None:
            challenger.close()
        _logger.log(level, "%s: torch.compile stays: %s", self._name, why)
