"""How the plan of one graph becomes final: it is planned again with measured durations.

    Learner.after_run(): observes the run that just ended;    Learner.time_bodies(inputs): where runs have no spans

The first runs of a plan are measured. If the durations that it was made from turn out wrong, it is planned again with
the measured ones, up to `MAX_REPLANS` times, each time after `OBSERVED_RUNS` runs of the current plan. On a device
whose runs have no spans, the second call times every body on every quota instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import torch

from apollo_compile.config import Config
from apollo_compile.device.target import Target
from apollo_compile.distributed.agreement import Agreement
from apollo_compile.ir import Observations
from apollo_compile.observe import StageRunner
from apollo_compile.passes.cost import estimate_costs
from apollo_compile.pipeline import Compilation, plan_partition
from apollo_compile.session.monitor import is_same_placement, observe_trace, should_replan
from apollo_compile.session.variants import Variants
from apollo_compile.units import format_ns

_logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")

SKIPPED_RUNS = 1
"""Runs of a new plan that are not measured: caches and threads are cold."""

OBSERVED_RUNS = 5
"""Measured runs before a plan is judged."""

MAX_REPLANS = 3


class Learner:
    """Observes the runs of one graph, and replans it.

    Arguments:
        variants: the variants of the graph; the learner replaces the plan.
        target: the device that it runs on.
        config: its `plan` options hold for replans.
        agreement: makes all ranks run the same plans.
        submit: runs a replan: now, or in the background.
        is_settled: whether the plan is final from the start.
    """

    def __init__(
        self,
        variants: Variants,
        target: Target,
        config: Config,
        agreement: Agreement,
        submit: Callable[[Callable[[], Compilation]], Future[Compilation]],
        *,
        is_settled: bool,
    ) -> None:
        self.is_settled = is_settled
        self.num_replans = 0
        self.submit = submit
        self._variants = variants
        self._target = target
        self._config = config
        self._agreement = agreement
        self._observations = variants.compilation.observations
        self._runs = self._num_observed = 0
        """Runs of this plan, and those of them that were observed."""
        self._has_failed = False
        """Whether observing or replanning raised an error; neither is tried again."""
        self._lock = threading.Lock()
        self._proposal: Future[Compilation] | None = None
        self._asked_ns = 0

    @property
    def observations(self) -> Observations:
        """What was measured until now."""
        return self._observations

    @property
    def is_cold(self) -> bool:
        """Whether the plan's last run was a warm-up run, which is not a measurement."""
        return self._target.is_synchronous and self._variants.plan.num_runs <= SKIPPED_RUNS

    @property
    def progress(self) -> str | None:
        """The progress of the plan, as text; None where it is final."""
        if self.is_settled:
            return None
        if self._proposal is not None:
            return "planning again with measured durations"
        if not self._target.is_synchronous:
            return "its bodies are timed in the second call"
        again = f", planned again {self.num_replans}x" if self.num_replans else ""
        return f"{self._runs} of {SKIPPED_RUNS + OBSERVED_RUNS} runs of its plan{again}"

    def after_run(self) -> None:
        """Observe the run that just ended; replan, in agreement with all ranks, when enough runs were observed."""
        if not self._lock.acquire(blocking=False):
            return  # another thread runs the same graph and observes it
        try:
            if self._proposal is None:
                self._runs += 1
                if self._runs > SKIPPED_RUNS:
                    self._try(self._observe_run)
                if self._runs < SKIPPED_RUNS + OBSERVED_RUNS:
                    return
                self._try(self._plan_again)
            self._take_proposal()
        finally:
            self._lock.release()

    def time_bodies(self, inputs: Sequence[torch.Tensor]) -> None:
        """Time every body on every quota, then replan; the plan before rests on formulas."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._variants.compilation.plan.pinned:
                measured = self._try(partial(self._variants.plan.measure, inputs))
                self._observations = measured or self._observations
                self._try(self._ask_for_plan)
                self._take_proposal()
            self.is_settled = True
        finally:
            self._lock.release()

    def _try(self, work: Callable[[], _Found]) -> _Found | None:
        """Return the result of `work`; None if it fails, or if earlier work failed: then the plan is kept.

        Other ranks may still agree on another plan after a fixed number of runs, so runs are still counted here.
        """
        if self._has_failed:
            return None
        try:
            return work()
        except Exception as error:  # training continues with the current plan
            if self._config.debug.strict:
                raise
            self._has_failed = True
            self._log_failure(error)
            return None

    def _log_failure(self, error: Exception) -> None:
        name = self._variants.compilation.capture.name
        _logger.warning("%s keeps its plan: %s: %s", name, type(error).__name__, error)

    def _observe_run(self) -> None:
        old = self._variants.compilation
        graph, trace = old.partition.graph, self._variants.plan.trace()
        if len(trace.spans) == len(graph.segments):  # not in a run without lanes, and there may be only such runs
            self._observations = observe_trace(trace, old.plan, graph, old.costs, self._observations)
            self._num_observed += 1

    def _plan_again(self) -> None:
        """Request a plan with measured durations, if those of the current plan were wrong."""
        old = self._variants.compilation
        if old.plan.pinned or self._num_observed == 0 or self.num_replans >= MAX_REPLANS:
            return
        if should_replan(old.plan, old.costs, estimate_costs(old.partition.graph, old.profile, self._observations)):
            self._ask_for_plan()

    def _ask_for_plan(self) -> None:
        self._asked_ns = time.perf_counter_ns()
        old = self._variants.compilation
        self._proposal = self.submit(
            partial(
                plan_partition,
                old.capture,
                old.partition,
                self._observations,
                profile=old.profile,
                config=self._config,
                runner=StageRunner(),
            )
        )

    def _take_proposal(self) -> None:
        """Switch to the requested plan when it is ready; with several ranks, to the one that the first rank proposed.

        Raises:
            RankError: the plan that ranks agreed on is unknown, or cannot run here.
        """
        if self._proposal is not None and not self._proposal.done():
            return
        proposal, self._proposal = self._proposal, None
        if proposal is None:
            self._asked_ns = time.perf_counter_ns()
        proposed = None if proposal is None else self._try(proposal.result)
        new = self._agreement.settle(proposed, self._variants.compilation, StageRunner())
        if new is None:
            self.is_settled = True
            return
        try:
            self._switch_to(new)
        except Exception as error:  # the plan exists, but cannot be loaded
            if self._config.debug.strict:
                raise
            if not self._agreement.ranks.is_alone:
                name = self._variants.compilation.capture.name
                why = f"{name} cannot go over to the plan that ranks agreed on: {type(error).__name__}: {error}"
                raise self._agreement.ranks.fail(why) from error
            self.is_settled = True
            self._log_failure(error)

    def _switch_to(self, new: Compilation) -> None:
        old = self._variants.compilation
        if is_same_placement(old.plan, new.plan):
            self._variants.update(new)
        else:
            self._variants.adopt(new)
        self.num_replans += 1
        self._runs = self._num_observed = 0
        _log_replan(old, new, time.perf_counter_ns() - self._asked_ns)


def _log_replan(old: Compilation, new: Compilation, planning_ns: int) -> None:
    _logger.info(
        "%s: planned again with measured durations: predicted %s, before %s, serial %s, bound %s; took %s",
        new.capture.name,
        format_ns(new.plan.makespan_ns),
        format_ns(old.plan.makespan_ns),
        format_ns(new.plan.serial_ns),
        format_ns(new.plan.lower_bound_ns),
        format_ns(planning_ns),
    )
