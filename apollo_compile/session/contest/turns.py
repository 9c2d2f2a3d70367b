"""The order of comparisons on a GPU: which side of a Dynamo graph runs in which step until it is decided what stays.

    Contest(...).run() -> the sides of the steps to come, one for each `next`
    .run_again(verdict), .follow(verdict)       likewise after a drift, and after an earlier process decided
    .tuning() -> sides | None                   likewise with tuned code, once that is due
    .prepare_for_step(), .tune_for_step()       likewise until a training step can be linked, without a comparison

    1. torch.compile's code runs. Nothing else is compiled before the training loop has run for so long that this takes
       `plan.compile_share` of its time: a short run pays nothing, a long one that share at most. One step waits for the
       compile; Note [compiling beside training] in `torch_bridge/kept_graph.py` says why it is not done in the
       background.
    2. The graph as one CUDA graph is compared with it, unless torch.compile's code is CUDA graphs itself.
    3. Only if branches of the forward are independent, bodies of segments are compiled, when that is due; and only if
       their times promise enough over one CUDA graph (`promises.py`), the plan on plain streams is compared with the
       winner until then.
    4. When that is due by `plan.late_share`, Inductor tunes the whole graph, and the bodies where there are segments,
       as in mode `max-autotune`. What is faster tuned, by times of the device, is compared with the winner until then.
       Until that is due the graph counts as settled, since it may be after hours.

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
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from apollo_compile.device.target import Target
from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import Variant, Verdict
from apollo_compile.session.comparison import IN_TURNS, Comparison, Results
from apollo_compile.session.contest.challenger import Challenger
from apollo_compile.session.contest.promises import reason_against_lanes, reason_without_branches, tuned_variants
from apollo_compile.session.procedure import SHARED_VARIANTS
from apollo_compile.units import format_ns

_logger = logging.getLogger(__name__)

RULES = replace(IN_TURNS, is_first_kept=True)

WARM_STEPS = 4
"""Steps of a side before it is compared: two that launch, one that captures, and a replay."""

MOST_WARM_STEPS = 100
"""Where sizes change, steps after which a side is compared although it is still captured for new ones."""

LATE_NS = 60_000_000_000
"""A contest whose graph was not called for so long does not keep other graphs from being compared."""

WHOLE = "one CUDA graph"
"""Name of the side that runs the variant `INDUCTOR`."""

TUNED_WHOLE = "one CUDA graph, tuned"
"""The same of `TUNED_INDUCTOR`."""

_NAMES = {Variant.INDUCTOR: WHOLE, Variant.TUNED_INDUCTOR: TUNED_WHOLE}

_UNTUNED = {Variant.TUNED_INDUCTOR: Variant.INDUCTOR, Variant.TUNED: Variant.PLAN}
"""What runs in the place of a side with tuned code until there is such code."""

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
        self._follows: Variant | None = None
        """A side with tuned code that an earlier process decided for, until there is such code."""
        self.is_tuned_slower = False
        """Whether tuned code was timed, and promised nothing."""
        self._tune_ns: int | None = None
        """Approximate time that tuning takes; None before that is known."""
        self._name = name
        self._challenger = challenger
        self._target = target
        self._compile_ns = compile_ns
        self._is_replayed = is_replayed
        self._clock = clock
        self._is_strict = is_strict
        self.has_tuned = not self._may_tune()
        """Whether code was tuned, or cannot be."""
        self._results = Results([0], rules=RULES)
        self._comparison: Comparison | None = None
        self._doing = "not called yet"
        self._spent_ns = 0
        """Time that steps waited for compiles."""
        self._began_ns = clock()
        self._last_ns = 0

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

    def tune_for_step(self) -> Sides:
        """Yield the side of every step until tuned code is timed, for a training step to be linked of it."""
        self.has_tuned = True
        yield from self._tune()
        self._challenger.keep(())

    def run_again(self, verdict: Verdict) -> Sides:
        """Yield sides until the champion was compared again with the best of the others that there are."""
        self._results = Results([0], rules=RULES)
        self._spent_ns = 0
        others = (_variant_of(standing.name) for standing in verdict.standings[1:])
        yield from self._compare(next(filter(self._challenger.has, others), Variant.COMPILED))
        self.leave()

    def follow(self, verdict: Verdict) -> Sides:
        """Yield sides until the winner of an earlier process runs, which is not compared again.

        Training begins as torch.compile makes it, which its caches have, and a failure ends there. A winner with tuned
        code runs without it until tuning is due.
        """
        (winner,) = verdict.selection
        if winner in _UNTUNED:
            self._follows, winner = winner, _UNTUNED[winner]
            self.has_tuned = not self._may_tune()
        yield from self._begin(f"{name_of(winner)} is compiled, which was the fastest in an earlier process")
        self._prepare()
        if winner is not Variant.INDUCTOR:
            yield from self._time_bodies()
        self.champion = winner
        self._challenger.keep((winner,))
        self.leave()

    def tuning(self) -> Sides | None:
        """Return the sides until tuned code was compared, once that is due; None until then, and ever after.

        Where torch.compile's code was found to be the fastest in an earlier process, the graph is compiled again first.

        Raises:
            Exception: whatever that compile raises.
        """
        challenger = self._challenger
        if self.has_tuned:
            return None
        if challenger.is_prepared and self._tune_ns is None:
            self.has_tuned, self._tune_ns = not self._may_tune(), challenger.tune_ns
        cost_ns = challenger.prepare_ns if self._tune_ns is None else self._tune_ns
        if self.has_tuned or not self._is_due(cost_ns, challenger.late_share):
            return None
        if self._tune_ns is None:
            self._prepare()
            return None
        self.has_tuned = True
        return self._compare_tuned()

    # ------------------------------------------------------------------------------------------------- its parts

    def _begin(self, until: str = "its code is warm") -> Sides:
        self._doing = f"torch.compile, until {until}"
        for _ in range(WARM_STEPS):
            yield self.champion
        self._began_ns = self._clock()

    def _wait_for(self, cost_ns: int, what: str) -> Sides:
        """Train on until that cost is a small share of the loop's time."""
        self.leave()
        share = self._challenger.compile_share
        self._doing = f"{name_of(self.champion)}, until compiling {what} takes {share:.0%} of the training time at most"
        while not self._is_due(cost_ns, share):
            yield self.champion
        yield from self._enter()

    def _is_due(self, cost_ns: int, share: float) -> bool:
        """Whether that cost is so small a share of the loop's time."""
        return self._spent_ns + cost_ns <= share * (self._clock() - self._began_ns)

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
        for variant in () if self.reason else _plans_of(self._target):
            yield from self._compare(variant)

    def _time_bodies(self) -> Sides:
        begin = self._clock()
        self._challenger.prepare_lanes()
        self._note_compile(begin, "in segments")
        yield from self._time("its segments are timed")

    def _time(self, doing: str) -> Sides:
        self._doing = doing
        self._challenger.time_code()
        for _ in range(2):  # one that times it, and one more if the first was a forward alone
            yield Variant.INDUCTOR
        if self._challenger.timing_failure is not None:
            raise self._challenger.timing_failure

    def _may_tune(self) -> bool:
        return self._challenger.late_share > 0 and self._challenger.reason_against_tuning() is None

    def _compare_tuned(self) -> Sides:
        """Tune; compare what is faster tuned with the champion, or run what an earlier process decided for."""
        yield from self._enter()
        challenger, is_tuned = self._challenger, (yield from self._tune())
        if not is_tuned:
            self._results = Results([0], rules=RULES)
        elif self._follows is not None and challenger.has(self._follows):
            self.champion, self._follows = self._follows, None
            challenger.keep((self.champion,))
        else:
            faster = tuned_variants(challenger.graphs)
            if not faster:
                _logger.info("%s: tuned code is not faster", self._name)
                self._results, self.is_tuned_slower = Results([0], rules=RULES), True
                challenger.keep(() if self.champion is Variant.COMPILED else (self.champion,))
            for variant in faster:
                yield from self._compare(variant)
        self.leave()

    def _tune(self) -> Generator[Variant, None, bool]:
        """Compile and time tuned code; return whether there is some. If that fails, what runs goes on."""
        begin = self._clock()
        try:
            self._challenger.tune()
            self._note_compile(begin, "tuned")
            yield from self._time("its tuned code is timed")
        except Exception as error:
            if self._is_strict:
                raise
            _logger.warning("%s: its code is not tuned: %s: %s", self._name, type(error).__name__, error)
            return False
        return True

    def _note_compile(self, begin: int, how: str) -> None:
        taken_ns = self._clock() - begin
        self._spent_ns += taken_ns
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

    # --------------------------------------------------------------------------------------- one graph at a time

    def _enter(self) -> Sides:
        """Train on until no other graph is compared; then this one is."""
        global _compared
        while (other := _other_than(self)) is not None and other._last_ns + LATE_NS > self._clock():
            yield self.champion
        _compared = weakref.ref(self)

    def leave(self) -> None:
        """Let other graphs be compared."""
        global _compared
        if _compared is not None and _compared() is self:
            _compared = None

    def note_step(self) -> None:
        """Note that a step begins, so that others know that this graph is still called."""
        self._last_ns = self._clock()


_compared: weakref.ref[Contest] | None = None
"""The contest whose sides are compared now."""


def _other_than(contest: Contest) -> Contest | None:
    other = None if _compared is None else _compared()
    return None if other is contest else other


def _end_of(holding: Generator[Comparison, None, str]) -> str:
    try:
        next(holding)
    except StopIteration as end:
        winner: str = end.value
        return winner
    raise AssertionError("a comparison goes on after its last step")


def _plans_of(target: Target) -> list[Variant]:
    """Return the variants that run the plan, in the order in which they are compared with the winner until then.

    With quotas, plain streams come first; without, the plan is on plain streams itself.
    """
    return [*(variant for variant in SHARED_VARIANTS if variant in target.variants), Variant.PLAN]


def name_of(variant: Variant) -> str:
    """Return the name of a side."""
    return _NAMES.get(variant, variant)


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
