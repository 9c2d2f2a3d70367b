"""The order of comparisons on a GPU: which side of a Dynamo graph runs in which step until it is decided what stays.

    Contest(...).run() -> the sides of the steps to come, one for each `next`
    .run_again(verdict), .adopt(choice)         likewise after a drift, and after an earlier process decided
    .prepare_for_step()                         likewise until a training step can be linked, without a comparison

    1. torch.compile's code runs. Nothing else is compiled before the training loop has run for so long that this takes
       `plan.compile_share` of its time: a short run pays nothing, a long one that share at most. One step waits for the
       compile; Note [compiling beside training] in `torch_bridge/kept_graph.py` says why it is not done in the
       background.
    2. The graph as one CUDA graph is compared with it, unless torch.compile's code is CUDA graphs itself.
    3. Only if branches of the forward are independent, bodies of segments are compiled, when that is due; and only if
       their times promise enough over one CUDA graph (`promises.py`), the plan on plain streams is compared with the
       winner until then.

What is measured is what the user feels: the time from the beginning of one step to that of a later one, with the
optimizer, the loader and all other graphs in it. It is taken over the steps of a turn, and the device is waited for at
its borders only: without that, work that one side left in the queue would be timed as the other side's, and with a wait
in every step nothing would overlap. Where sizes change, times are for as many elements of those inputs. A rival has to
be ahead by more than `RULES.tie`; if it is not after the first rounds, the comparison ends. Since each step contains
all graphs, one graph of the process is compared at a time.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from apollo_compile.device.target import Target
from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import Variant, Verdict
from apollo_compile.session.comparison import IN_TURNS, Comparison, Results
from apollo_compile.session.compile_budget import CompileBudget
from apollo_compile.session.contest.challenger import Challenger
from apollo_compile.session.contest.exclusive import Exclusive
from apollo_compile.session.contest.promises import reason_against_lanes, reason_without_branches
from apollo_compile.store.verdicts import Choice
from apollo_compile.units import format_ns

_logger = logging.getLogger(__name__)

RULES = replace(IN_TURNS, is_first_kept=True)

WARM_STEPS = 4
"""Steps of a side before it is compared: two that launch, one that captures, and a replay."""

MOST_WARM_STEPS = 100
"""Where sizes change, steps after which a side is compared although it is still captured for new ones."""

WHOLE = "one CUDA graph"
"""Name of the side that runs the variant `INDUCTOR`."""

_NAMES = {Variant.INDUCTOR: WHOLE}

Sides = Generator[Variant, None, None]
"""The side of every step to come."""


class LanesOffError(UnsupportedGraphError):
    """The checks of the device failed, so that nothing of ours runs there."""


class Contest:
    """The sides of one Dynamo graph, and which of them runs when.

    Arguments:
        name: name of the Dynamo graph.
        challenger: our sides.
        target: the device.
        compile_ns: how long torch.compile took.
        is_replayed: whether torch.compile's code is CUDA graphs.
        clock: time of the host in nanoseconds.
        is_strict: raise what would otherwise be logged.
    """

    def __init__(
        self,
        name: str,
        challenger: Challenger,
        target: Target,
        *,
        compile_ns: int,
        is_replayed: bool,
        clock: Callable[[], int] = time.perf_counter_ns,
        is_strict: bool = False,
    ) -> None:
        self.champion = Variant.COMPILED
        """The side that runs between comparisons."""
        self.arguments: Sequence[Any] = ()
        """Those of the step that begins."""
        self.reason = ""
        """Why not all sides were compared."""
        self._name = name
        self._challenger = challenger
        self._target = target
        self._compile_ns = compile_ns
        self._is_replayed = is_replayed
        self._clock = clock
        self._is_strict = is_strict
        self._budget = CompileBudget(clock)
        self._exclusive = Exclusive(clock)
        self._results = Results([0], rules=RULES)
        self._comparison: Comparison | None = None
        self._doing = "not called yet"
        self._spent_ns = 0
        """Time that steps waited for compiles of the present comparisons."""

    @property
    def progress(self) -> str:
        """Return what it does now, as text."""
        if self._comparison is None:
            return self._doing
        return f"{' against '.join(self._comparison.selections)}, {self._comparison.turn}"

    @property
    def verdict(self) -> Verdict | None:
        """The result of its comparisons; None if nothing was compared."""
        if not self._results.selections:
            return None
        return self._results.verdict(name_of(self.champion), prepare_ns=self._spent_ns)

    def run(self) -> Sides:
        """Yield the side of every step until all sides that may be faster were compared."""
        challenger = self._challenger
        yield from self._begin()
        yield from self._wait_for(max(self._compile_ns, challenger.prepare_ns), "one CUDA graph of it")
        while not challenger.sizes.are_known:
            yield self.champion
        if challenger.sizes.are_rare:
            raise UnsupportedGraphError("its sizes seldom come again, and a CUDA graph is for one set of sizes")
        self._prepare()
        if challenger.sizes.change:
            self.reason = "lanes are for sizes that do not change"
        else:
            self.reason = reason_without_branches(challenger.graphs[0].compilation) or ""
        if not self._is_replayed:
            yield from self._compare(Variant.INDUCTOR)
        if not self.reason:
            yield from self._wait_for(challenger.prepare_lanes_ns, "its segments")
            yield from self._compare_lanes()
        self.leave()

    def prepare_for_step(self) -> Sides:
        """Yield the side of every step until segments are compiled and timed, for a training step to be linked of them.

        Whoever compiles a step waits for that, so nothing is put off.
        """
        yield from self._begin()
        self._prepare()
        yield from self._time_bodies()
        self._challenger.keep(())

    def run_again(self, verdict: Verdict) -> Sides:
        """Yield sides until the champion was compared again with the best of the others that there are, if any."""
        self._results = Results([0], rules=RULES)
        self._spent_ns = 0
        others = (each for each in _sides_of(verdict) if each is not self.champion)
        rival = next(filter(self._challenger.has, others), None)
        if rival is not None:
            yield from self._compare(rival)
        self.leave()

    def follow(self, verdict: Verdict) -> Sides:
        """Yield sides until the winner of an earlier process runs, which is not compared again.

        Training begins as torch.compile makes it, which its caches have, and a failure ends there.
        """
        (winner,) = verdict.selection
        yield from self._begin(f"{name_of(winner)} is compiled, which was the fastest in an earlier process")
        self._prepare()
        if winner is not Variant.INDUCTOR:
            yield from self._time_bodies()
        yield from self._warm_up(winner)
        self.champion = winner
        self._challenger.keep((winner,))
        self.leave()

    def adopt(self, known: Choice) -> Sides | None:
        """Return the sides until what an earlier process found runs; None if that is torch.compile's code."""
        verdict = known.verdict
        return None if verdict is None or verdict.selection == (Variant.COMPILED,) else self.follow(verdict)

    # ------------------------------------------------------------------------------------------------- its parts

    def _begin(self, until: str = "its code is warm") -> Sides:
        self._doing = f"torch.compile, until {until}"
        for _ in range(WARM_STEPS):
            yield self.champion
        self._budget.restart()

    def _wait_for(self, cost_ns: int, what: str) -> Sides:
        """Train on until that cost is a small share of the loop's time."""
        self.leave()
        share = self._challenger.compile_share
        self._doing = f"{name_of(self.champion)}, until compiling {what} takes {share:.0%} of the training time at most"
        while not self._budget.allows(cost_ns, share):
            yield self.champion
        yield from self._enter()

    def _prepare(self) -> None:
        """Compile the Dynamo graph again.

        Raises:
            LanesOffError: the checks of the device failed.
            UnsupportedGraphError: a CUDA graph cannot hold it, or lanes could not run it.
            Exception: whatever a compile raises.
        """
        complaint = self._target.complaint()
        if complaint is not None:
            _warn_of_complaint(complaint)
            raise LanesOffError(f"the checks of lanes failed: {complaint}")
        begin = self._clock()
        self._challenger.prepare(self.arguments)
        self._note_compile(begin, "as one CUDA graph")

    def _compare_lanes(self) -> Sides:
        """Compile and time bodies; compare plans on lanes with the champion if they promise enough."""
        try:
            yield from self._time_bodies()
        except Exception as error:
            if self._is_strict:
                raise
            self.reason = f"no lanes: {type(error).__name__}: {error}"
            _logger.warning("%s: %s stays: %s", self._name, name_of(self.champion), self.reason)
        else:
            self.reason = reason_against_lanes(self._challenger.graphs) or ""
        if not self.reason:
            yield from self._compare(Variant.PLAN)

    def _time_bodies(self) -> Sides:
        begin = self._clock()
        self._challenger.prepare_lanes()
        self._note_compile(begin, "in segments")
        yield from self._time("its segments are timed")

    def _time(self, doing: str) -> Sides:
        self._doing, begin = doing, self._clock()
        with self._challenger.timing():
            for _ in range(2):  # one that times it, and one more if the first was a forward alone
                yield Variant.INDUCTOR
        self._budget.spend(self._clock() - begin)
        if self._challenger.timing_failure is not None:
            raise self._challenger.timing_failure

    def _note_compile(self, begin: int, how: str) -> None:
        taken_ns = self._clock() - begin
        self._spent_ns += taken_ns
        self._budget.spend(taken_ns)
        self._exclusive.note_step()
        _logger.info("%s: compiled again, %s, for which one step waited %s", self._name, how, format_ns(taken_ns))

    def _warm_up(self, variant: Variant) -> Sides:
        """Run a side untimed, so that it is captured."""
        self._doing = f"{name_of(variant)} is captured"
        num_warm, num_cold = 0, self._challenger.num_cold_runs
        for _ in range(MOST_WARM_STEPS):
            yield variant
            before, num_cold = num_cold, self._challenger.num_cold_runs
            num_warm = num_warm + 1 if num_cold == before else 0
            if num_warm == WARM_STEPS:
                return

    def _compare(self, rival: Variant) -> Sides:
        """Let the champion and a rival take turns; the winner is the champion afterwards."""
        yield from self._enter()
        yield from self._warm_up(rival)
        sides = {name_of(variant): (variant,) for variant in (self.champion, rival)}
        holding = self._results.hold(sides, name_of(self.champion))
        self._comparison = comparison = next(holding)
        begin = num_elements = 0
        usual = 0.0  # elements of a step
        while (side := comparison.begin_step()) is not None:
            if comparison.num_timed == 1:
                begin, num_elements = self._target.now_ns(), 0
            num_elements += self._challenger.sizes.num_elements(self.arguments)
            yield side[0]
            if comparison.is_in_last_step:
                usual = usual or num_elements / comparison.num_timed
                comparison.record(0, round((self._target.now_ns() - begin) * usual / num_elements))
        self._comparison = None
        (self.champion,) = self._results.selections[_end_of(holding)]
        self._challenger.keep(() if self.champion is Variant.COMPILED else (self.champion,))

    def _enter(self) -> Sides:
        """Train on until no other graph is compared; then this one is."""
        while not self._exclusive.may_take():
            yield self.champion
        self._exclusive.take()

    def leave(self) -> None:
        """Let other graphs be compared."""
        self._exclusive.leave()

    def note_step(self) -> None:
        """Note that a step begins."""
        self._exclusive.note_step()
        self._budget.note_step()


def _end_of(holding: Generator[Comparison, None, str]) -> str:
    try:
        next(holding)
    except StopIteration as end:
        winner: str = end.value
        return winner
    raise AssertionError("a comparison goes on after its last step")


def name_of(variant: Variant) -> str:
    """Return the name of a side."""
    return _NAMES.get(variant, variant)


def _sides_of(verdict: Verdict) -> list[Variant]:
    """Return the sides that were compared, the fastest first, and torch.compile's code if it was not."""
    return [*(_variant_of(standing.name) for standing in verdict.standings), Variant.COMPILED]


def _variant_of(name: str) -> Variant:
    return next((variant for variant, known in _NAMES.items() if known == name), None) or Variant(name)


@functools.cache
def _warn_of_complaint(complaint: str) -> None:
    """Warn once per process that the checks of the device failed."""
    _logger.warning(
        "lanes stay off, and graphs run as torch.compile makes them: %s; 'apollo doctor' shows it, and 'apollo doctor "
        "--self-check' tries again",
        complaint,
    )
