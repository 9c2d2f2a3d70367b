"""Learn the durations of one graph's bodies, and plan it again with them until its plan is final.

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
from functools import partial
from typing import TypeVar

import torch

from apollo_compile.config import Config
from apollo_compile.observe import StageRunner
from apollo_compile.passes.cost import estimate_costs
from apollo_compile.pipeline import plan_partition
from apollo_compile.session.monitor import is_same_placement, observe_trace, should_replan
from apollo_compile.session.variants import Variants
from apollo_compile.target.target import Target
from apollo_compile.units import format_ns

_logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")

SKIPPED_RUNS = 1
"""Runs of a new plan that are not measured: caches and threads are cold."""

OBSERVED_RUNS = 5
"""Measured runs before a plan is judged."""

MAX_REPLANS = 3


class Learner:
    """Observes the runs of one graph, and replaces the plan among its variants, unless that is final from the start."""

    def __init__(self, variants: Variants, target: Target, config: Config, *, is_settled: bool) -> None:
        self.is_settled = is_settled
        self.failure: str | None = None
        """Why observing or replanning failed; neither is tried again."""
        self.num_replans = 0
        self._variants = variants
        self._target = target
        self._config = config
        self.observations = variants.compilation.observations
        """Measurements until now."""
        self._runs = self._num_observed = 0
        """Runs of this plan, and those of them that were observed."""
        self._lock = threading.Lock()

    @property
    def is_cold(self) -> bool:
        """Whether the plan's last run was a warm-up run, which is not a measurement."""
        return self._target.has_spans and self._variants.plan.num_runs <= SKIPPED_RUNS

    @property
    def runs_left(self) -> int:
        """The most runs until the plan is final; 0 where it is."""
        if self.is_settled:
            return 0
        if not self._target.has_spans:  # bodies are timed in the second call
            return 1
        return (1 + MAX_REPLANS - self.num_replans) * (SKIPPED_RUNS + OBSERVED_RUNS) - self._runs

    def after_run(self) -> None:
        """Observe the run that just ended; replan when enough runs were observed."""
        if not self._lock.acquire(blocking=False):
            return  # another thread runs the same graph and observes it
        try:
            self._runs += 1
            if self._runs > SKIPPED_RUNS:
                self._try(self._observe_run)
            if self._runs == SKIPPED_RUNS + OBSERVED_RUNS or self.failure:
                self.is_settled = not self._try(self._plan_again)
        finally:
            self._lock.release()

    def time_bodies(self, inputs: Sequence[torch.Tensor]) -> None:
        """Time every body on every quota, then replan; the plan before rests on formulas."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._variants.compilation.plan.pinned:
                measured = self._try(partial(self._variants.plan.measure, inputs))
                self.observations = measured or self.observations
                self._try(self._replan)
            self.is_settled = True
        finally:
            self._lock.release()

    def _try(self, work: Callable[[], _Found]) -> _Found | None:
        """Return the result of `work`; None if it fails, or if earlier work failed: then the plan is kept."""
        if self.failure:
            return None
        try:
            return work()
        except Exception as error:  # training continues with the current plan
            if self._config.debug.strict:
                raise
            self.failure = f"{type(error).__name__}: {error}"
            name = self._variants.compilation.capture.name
            if self._target.has_spans:  # else the graph reverts to torch.compile, and one line says so
                _logger.warning("%s keeps its plan, since measuring or replanning failed: %s", name, self.failure)
            return None

    def _observe_run(self) -> None:
        old = self._variants.compilation
        graph, trace = old.partition.graph, self._variants.plan.trace()
        if len(trace.spans) == len(graph.segments):  # not in a run without lanes, and there may be only such runs
            self.observations = observe_trace(trace, old.plan, graph, old.costs, self.observations)
            self._num_observed += 1

    def _plan_again(self) -> bool:
        """Plan with measured durations, if those of the current plan were wrong; return whether it was planned."""
        old = self._variants.compilation
        if old.plan.pinned or self._num_observed == 0 or self.num_replans >= MAX_REPLANS:
            return False
        measured = estimate_costs(old.partition.graph, old.profile, self.observations)
        if should_replan(old.plan, old.costs, measured):
            self._replan()
            return True
        return False

    def _replan(self) -> None:
        """Plan with measured durations, and run that plan."""
        begin, old = time.perf_counter_ns(), self._variants.compilation
        runner, profile = StageRunner(), old.profile
        new = plan_partition(
            old.capture, old.partition, self.observations, profile=profile, config=self._config, runner=runner
        )
        if is_same_placement(old.plan, new.plan):
            self._variants.compilation = new
        else:
            self._variants.adopt(new)
        self.num_replans += 1
        self._runs = self._num_observed = 0
        times = new.plan.makespan_ns, old.plan.makespan_ns, new.plan.serial_ns, new.plan.lower_bound_ns
        _logger.info(
            "%s: planned again with measured durations: predicted %s, before %s, serial %s, bound %s; took %s",
            new.capture.name,
            *map(format_ns, (*times, time.perf_counter_ns() - begin)),
        )
