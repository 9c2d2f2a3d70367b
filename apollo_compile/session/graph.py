"""One FX graph of a model, compiled in segments: `CompiledGraph`, which AOTAutograd calls in every step.

What it runs may change between steps: it is planned again with what it has measured (`monitor.py`), and the contest of
its model (`select.py`) may have it run another way than its plan.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from apollo_compile.config import Config
from apollo_compile.device.cpu.execute import Executable
from apollo_compile.device.gpu.execute import Contract, CudaExecutable, ModelMemory
from apollo_compile.device.gpu.gpu import Gpu, Sharing
from apollo_compile.device.gpu.urgency import rank_lanes
from apollo_compile.device.gpu.whole import as_one_segment
from apollo_compile.distributed.agreement import Commons
from apollo_compile.distributed.ranks import Ranks
from apollo_compile.errors import RankError
from apollo_compile.ir import BodyId, LaneId, Plan, Trace, Variant, Verdict
from apollo_compile.ir.check import check_plan
from apollo_compile.observe import StageRunner
from apollo_compile.passes.cost import estimate_costs
from apollo_compile.passes.plan import make_list_plan, make_serial_plan
from apollo_compile.pipeline import Compilation, compile_plan, plan_partition
from apollo_compile.progress import Progress
from apollo_compile.session.autotune import Selection
from apollo_compile.session.buckets import at_once
from apollo_compile.session.monitor import is_same_placement, observe_trace, should_replan
from apollo_compile.session.warm_start import are_numbers_fixed
from apollo_compile.torch_bridge.inductor import Boundary, CompiledBody, Run
from apollo_compile.units import format_ns

_logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")

SKIPPED_RUNS = 1
"""Runs of a new plan that are not measured: caches and threads are cold."""

OBSERVED_RUNS = 5
"""Measured runs before a plan is judged."""

MAX_REPLANS = 3

CLOSE = 0.05
"""Of a plan's predicted time, what a list schedule may be behind and compete all the same: predictions are wrong by
about as much."""

COMPILE_NS_PER_OPERATOR = 50_000_000
"""What Inductor and the C++ compiler take per operator of a whole graph, about."""

_SHARING_BY_WAY: Mapping[str, Sharing] = {
    Variant.STREAMS: Sharing.FREE,
    Variant.PRIORITIES: Sharing.URGENCY,
    Variant.OVERLAPPING: Sharing.OVERLAPPING,
}
"""How lanes share a GPU where a graph does not run as planned."""


@dataclass(eq=False)
class CompiledGraph:
    """One FX graph, compiled in segments: callable as AOTAutograd calls it, with a list that it empties.

    Its first runs are measured. When they say that the plan rests on wrong durations, it is planned again with the
    measured ones, up to `MAX_REPLANS` times, each time after `OBSERVED_RUNS` runs of the plan at hand. On a GPU, where
    a run does not tell when its segments ran, the second call times every body on every quota instead. Then its plan is
    final, and the model's `Selection` may make it run another way. Where an earlier process has found all that out, its
    plan and its way run from the beginning.

    No slots: AOTAutograd wraps the callable of a backward and finds `_boxed_call` in its `__dict__`.
    """

    compilation: Compilation
    bodies: tuple[CompiledBody, ...]
    config: Config
    mutates: bool
    """Whether the graph writes to its inputs."""
    compile_whole: Callable[[], Run] | None = None
    """Compiles the graph as Inductor alone would; None where no contest is held."""
    selection: Selection | None = None
    """The contest of the model; None where the plan runs whatever is measured."""
    gpu: Gpu | None = None
    """Where it runs; None on CPU lanes."""
    tuned: Mapping[tuple[BodyId, int], CompiledBody] = field(default_factory=dict)
    """On a GPU, what lanes run instead of a body, by its id and their number of units."""
    contract: Contract = field(default_factory=Contract)
    memories: dict[str, ModelMemory] = field(default_factory=lambda: defaultdict(ModelMemory))
    """By way, what it shares with the model's other graphs; this and the contract have a meaning on a GPU only."""
    commons: Commons = field(default_factory=lambda: Commons(Ranks(None)))
    """What its plans are settled with."""
    boundary: Boundary | None = None
    """What else than tensors it takes and returns."""
    submit: Callable[[Callable[[], Compilation]], Future[Compilation]] = at_once
    """Has it planned again: now, or in the background."""
    executable: Executable | CudaExecutable = field(init=False)
    """The plan's."""
    is_deterministic: bool = field(init=False)
    """Whether it was compiled for the same numbers every time, and so keeps its plan."""
    way: str = Variant.PLAN
    """Which way it runs now."""
    is_variant: bool = False
    """Whether it is planned for other sizes than those that it was traced with."""
    num_replans: int = 0
    has_run: bool = False
    """Whether it was ever called."""
    _boxed_call: bool = True

    def __post_init__(self) -> None:
        """Start the lanes."""
        self._observations = self.compilation.observations
        self._runs = self._num_observed = 0
        """Runs of this plan, and those of them that say how long its segments take."""
        self._has_failed = False
        """Whether a part of learning failed; it is not tried again."""
        self._learning = threading.Lock()
        self._proposal: Future[Compilation] | None = None
        self._asked_ns = 0
        finding = self.compilation.finding
        self.is_deterministic = are_numbers_fixed()
        is_free = self.config.plan.replan and self.config.plan.planner != "serial" and not self.is_deterministic
        # One plan for all sizes is not observed: what they take says nothing of each other.
        is_for_its_sizes = not self.compilation.capture.sizes or has_free_plans(self.compilation.plan, self.config)
        self._is_settled = not (is_free and is_for_its_sizes) or finding is not None
        self._others: dict[str, Run] = {}
        self._listed: tuple[Compilation, Executable] | None = None
        """The best list schedule, if it is to compete."""
        self._has_looked = False
        """Whether it was looked for."""
        self._on_gpu: dict[str, CudaExecutable] = {}
        """All that may have captured something, by way."""
        self._run: Run
        self.adopt(self.compilation)
        if finding is not None:
            self.use(finding.way)

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the graph once and return its outputs."""
        if self.boundary is None:
            return self._call(inputs)
        taken = self.boundary.take(inputs)
        return self.boundary.give(self._call(inputs), taken)

    def planned_as(self, compilation: Compilation) -> CompiledGraph:
        """Return the same graph and code with a plan for other sizes, which has learnt nothing yet."""
        return replace(
            self,
            compilation=compilation,
            selection=None,
            way=Variant.PLAN,
            is_variant=True,
            num_replans=0,
            has_run=False,
        )

    def run_once(self, inputs: list[Any]) -> Sequence[Any]:
        """Run it as it runs now; nothing is learnt from that."""
        return self._run(inputs)

    def _call(self, inputs: list[torch.Tensor]) -> Sequence[Any]:
        if self.gpu is not None and self.has_run and not self._is_settled and not self.gpu.is_capturing():
            self._measure_bodies(inputs)
        if self.selection is None or self._is_left_alone(self.selection):
            outputs = self._run(inputs)
        else:
            outputs = self._run_watched(inputs, self.selection)
        self.has_run = True
        if not self._is_settled and self.way == Variant.PLAN and self.gpu is None:
            self._learn()
        return outputs

    def _run_watched(self, inputs: list[torch.Tensor], selection: Selection) -> Sequence[Any]:
        """Run as the contest wants it, and tell it how long that took."""
        self._choose(selection)
        taken_ns, begin = None, self._now_ns()
        try:
            outputs = self._run(inputs)
            taken_ns = self._now_ns() - begin
        finally:
            selection.leave(self, taken_ns)
        return outputs

    def _is_left_alone(self, selection: Selection) -> bool:
        """Whether nothing about this call is to be decided or measured."""
        if self.gpu is not None:
            return selection.is_settled or self.gpu.is_capturing()
        return selection.passes(self)

    def _now_ns(self) -> int:
        """Return the time at which everything launched so far has ended."""
        if self.gpu is not None:
            self.gpu.synchronize()
        return time.perf_counter_ns()

    def trace(self) -> Trace:
        """Return the spans of the plan's last run."""
        return self.executable.trace()

    @property
    def is_cold(self) -> bool:
        """Whether the plan's last run is no measurement: the first ones are not, and a GPU's never are."""
        return isinstance(self.executable, Executable) and self.executable.num_runs <= SKIPPED_RUNS

    @property
    def progress(self) -> str | None:
        """Say what of its plan is being decided; None where it is final, or not what runs."""
        if self._is_settled or self.way != Variant.PLAN:
            return None
        if self._proposal is not None:
            return "planning again with measured durations"
        if self.gpu is not None:
            return "its bodies are timed in the second call"
        again = f", planned again {self.num_replans}x" if self.num_replans else ""
        return f"{self._runs} of {SKIPPED_RUNS + OBSERVED_RUNS} runs of its plan{again}"

    def lane_bytes(self) -> dict[LaneId, int]:
        """Return the device memory that every lane took when the plan was captured; on a CPU nothing is."""
        if not isinstance(self.executable, CudaExecutable):
            return {}
        return {each.lane: each.num_bytes for each in self.executable.lane_memory}

    def adopt(self, compilation: Compilation, executable: Executable | CudaExecutable | None = None) -> None:
        """Run this compilation of the same capture and partition from the next call on.

        `executable` is what an earlier call made of it (`graph.executable`), for those who go back and forth.
        """
        self.executable = self._make_executable(compilation) if executable is None else executable
        if isinstance(self.executable, CudaExecutable):
            self._on_gpu[Variant.PLAN] = self.executable
        self.compilation = compilation
        self._listed, self._has_looked = None, False  # it was for other costs
        self._others.pop(Variant.LISTED, None)
        self.use(Variant.PLAN if self.way == Variant.LISTED else self.way)

    @property
    def ways(self) -> Sequence[str]:
        """Ways that it can run now; a plan that is to run in turn is not a way of its own."""
        own = {Variant.SERIAL}
        if uses_lanes(self.compilation.plan):
            own |= {Variant.PLAN} if self.gpu is None else {Variant.PLAN, *map(Variant, _SHARING_BY_WAY)}
            own |= {Variant.LISTED} if self._has_rival() else set()
        return (*sorted(own), *sorted(self._others.keys() - own))

    @property
    def is_bound(self) -> bool:
        """Whether all graphs of its model have to run the same way."""
        return self.gpu is not None

    @property
    def way_of_plan(self) -> str:
        """Return how it runs now; `PLAN` too where the plan is to run in turn, and it does."""
        return Variant.PLAN if self.way == Variant.SERIAL and not uses_lanes(self.compilation.plan) else self.way

    @property
    def is_settled(self) -> bool:
        """Whether its plan is final."""
        return self._is_settled

    @property
    def remembered(self) -> Verdict | None:
        """Return the verdict of an earlier process, with whose plan it runs."""
        finding = self.compilation.finding
        return None if finding is None else finding.verdict

    @property
    def topic(self) -> str:
        """Its name among the ranks."""
        return self.commons.topic

    def use(self, way: str) -> None:
        """Run this way from the next call on."""
        if way == Variant.SERIAL and Variant.SERIAL not in self._others:
            self._add_way(Variant.SERIAL, self._make_serial())
        if way == Variant.LISTED and self._listed is not None:
            self._others[Variant.LISTED] = self._listed[1].run
        if way in _SHARING_BY_WAY and way not in self._others and self.gpu is not None:
            gpu = self.gpu.sharing(_SHARING_BY_WAY[way])
            self._add_way(way, self._make_cuda_executable(way, self.compilation, gpu))
        self._run = self.executable.run if way == Variant.PLAN else self._others[way]
        self.way = way

    def _add_way(self, way: str, executable: Executable | CudaExecutable) -> None:
        self._others[way] = executable.run
        if isinstance(executable, CudaExecutable) and executable is not self.executable:
            self._on_gpu[way] = executable

    def keep(self, ways: Collection[str]) -> None:
        """Let go of what other ways captured on a GPU; a way that is used again captures again."""
        kept = [self.executable.run if way == Variant.PLAN else self._others.get(way) for way in ways]
        for executable in self._on_gpu.values():
            if executable.run not in kept:  # the plan may be to run in turn, and is then two ways
                executable.release()

    def adopt_way(self) -> str:
        """Make the list schedule, if that is how it runs, the plan that reports show and later processes begin with."""
        if self.way == Variant.LISTED and self._listed is not None:
            self.adopt(*self._listed)
        return self.way

    def keep_only_this_way(self) -> None:
        """Let go of what other ways captured on a GPU, and of all of them but the plan."""
        self.keep([self.way])
        self._others = {way: run for way, run in self._others.items() if way == self.way}
        self._on_gpu = {way: made for way, made in self._on_gpu.items() if way in (self.way, Variant.PLAN)}

    @property
    def prepare_ns(self) -> int:
        """How long Inductor takes to compile the whole graph, about; 0 where it has, or is not to."""
        return 0 if self.compile_whole is None else COMPILE_NS_PER_OPERATOR * len(self.compilation.capture.nodes)

    def prepare(self) -> None:
        """Compile the graph as Inductor would; if it cannot, say so and leave that way out."""
        compile_whole = self.compile_whole
        if compile_whole is None:
            return
        name = self.compilation.capture.name
        _logger.info("%s: Inductor compiles it whole, to be compared with its segments", name)
        try:
            with Progress(f"compiling {name} whole") as progress:
                progress.at("Inductor, to be compared with its segments,")
                run = compile_whole()
            if self.gpu is None:
                self._others[Variant.INDUCTOR] = run
            else:
                self._add_way(Variant.INDUCTOR, self._make_whole(run, self.gpu))
        except Exception as error:  # the contest is held without it
            if self.config.debug.strict:
                raise
            _logger.warning("%s: Inductor did not compile it whole: %s: %s", name, type(error).__name__, error)
        self.compile_whole = None  # once, whether it succeeds or not; again if it was interrupted

    def _make_whole(self, run: Run, gpu: Gpu) -> CudaExecutable:
        """Return what Inductor compiled as it runs on a GPU: as one CUDA graph, as plans do."""
        graph, program, make_body = as_one_segment(self.compilation.partition.graph, self.compilation.plan.lanes[0])
        return CudaExecutable(
            program=program,
            graph=graph,
            bodies=[CompiledBody(function=make_body(run))],
            gpu=gpu,
            contract=self.contract,
            shared=self.memories[Variant.INDUCTOR],
            strict=self.config.debug.strict,
        )

    def _choose(self, selection: Selection) -> None:
        """Let the contest say how this step runs; if that fails, plans run from now on, unless other ranks go on."""
        try:
            selection.enter(self)
        except RankError:
            raise
        except Exception as error:
            if self.config.debug.strict:
                raise
            name = self.compilation.capture.name
            _logger.warning("%s: plans stay, unmeasured: %s: %s", name, type(error).__name__, error)

    def _make_serial(self) -> Executable | CudaExecutable:
        old = self.compilation
        if not uses_lanes(old.plan) and not self.is_bound:
            return self.executable
        plan = make_serial_plan(old.partition.graph, old.costs, old.plan)
        return self._make_executable(self._planned_so(plan), Variant.SERIAL)

    def _has_rival(self) -> bool:
        """Whether a list schedule may be as fast as the plan; it is made when that is asked for the first time."""
        old = self.compilation
        may_have = self.gpu is None and not old.plan.pinned and self.config.plan.memory_quota is None
        if may_have and not self._has_looked:
            self._has_looked = True
            plan = make_list_plan(old.partition.graph, old.costs, old.plan)
            is_close = plan.makespan_ns <= min(old.plan.serial_ns, (1 + CLOSE) * old.plan.makespan_ns)
            if is_close and uses_lanes(plan) and not is_same_placement(plan, old.plan):
                check_plan(plan, old.partition.graph, old.costs)
                compilation = self._planned_so(plan)
                self._listed = compilation, self._make_cpu_executable(compilation)
        return self._listed is not None

    def _planned_so(self, plan: Plan) -> Compilation:
        """Return the compilation with another plan of the same costs."""
        old = self.compilation
        return compile_plan(
            old.capture, old.partition, old.observations, old.costs, plan, profile=old.profile, runner=StageRunner()
        )

    def _make_executable(self, compilation: Compilation, way: str = Variant.PLAN) -> Executable | CudaExecutable:
        if self.gpu is not None:
            return self._make_cuda_executable(way, compilation, self.gpu)
        return self._make_cpu_executable(compilation)

    def _make_cpu_executable(self, compilation: Compilation) -> Executable:
        return Executable(
            compilation.program,
            compilation.partition.graph,
            self.bodies,
            mutates=self.mutates,
            park_team=self.config.runtime.park_team,
        )

    def _make_cuda_executable(self, way: str, compilation: Compilation, gpu: Gpu) -> CudaExecutable:
        return CudaExecutable(
            program=compilation.program,
            graph=compilation.partition.graph,
            bodies=self.bodies,
            gpu=gpu,
            contract=self.contract,
            shared=self.memories[way],
            urgency=rank_lanes(compilation.partition.graph, compilation.plan, compilation.costs),
            tuned={} if way in _SHARING_BY_WAY else self.tuned,
            lane_memory_quota=self.config.device.lane_memory_quota,
            is_quota_hard=self.config.device.hard_lane_memory_quota,
            strict=self.config.debug.strict,
        )

    def _learn(self) -> None:
        """Watch the run that just ended; plan again when enough was seen, or say so where that is settled in common."""
        if not self._learning.acquire(blocking=False):
            return  # another thread runs the same graph and learns
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
            self._learning.release()

    def _measure_bodies(self, inputs: Sequence[torch.Tensor]) -> None:
        """On a GPU: time every body on every quota, then plan again; what was planned before came from formulas."""
        if not self._learning.acquire(blocking=False):
            return
        try:
            executable = self.executable
            if isinstance(executable, CudaExecutable) and not self.compilation.plan.pinned:
                self._observations = self._try(partial(executable.measure, inputs)) or self._observations
                self._try(self._ask_for_plan)
                self._take_proposal()
            self._is_settled = True
        finally:
            self._learning.release()

    def _try(self, work: Callable[[], _Found]) -> _Found | None:
        """Do a part of learning and return what it finds; once one has failed, nothing is done, and the plan is kept.

        Other ranks may decide otherwise, in a step that all of them count to: until then, this one counts with them.
        """
        if self._has_failed:
            return None
        try:
            return work()
        except Exception as error:  # training goes on with the plan it has
            if self.config.debug.strict:
                raise
            self._has_failed = True
            _logger.warning("%s keeps its plan: %s: %s", self.compilation.capture.name, type(error).__name__, error)
            return None

    def _observe_run(self) -> None:
        old = self.compilation
        graph, trace = old.partition.graph, self.trace()
        if len(trace.spans) == len(graph.segments):  # not in a run without lanes, as all of them may be
            self._observations = observe_trace(trace, old.plan, graph, old.costs, self._observations)
            self._num_observed += 1

    def _plan_again(self) -> None:
        """Ask for a plan from what was measured, if there is reason to."""
        old = self.compilation
        if old.plan.pinned or self._num_observed == 0 or self.num_replans >= MAX_REPLANS:
            return
        if should_replan(old.plan, old.costs, estimate_costs(old.partition.graph, old.profile, self._observations)):
            self._ask_for_plan()

    def _ask_for_plan(self) -> None:
        self._asked_ns = time.perf_counter_ns()
        old = self.compilation
        self._proposal = self.submit(
            partial(
                plan_partition,
                old.capture,
                old.partition,
                self._observations,
                profile=old.profile,
                config=self.config,
                runner=StageRunner(),
            )
        )

    def _take_proposal(self) -> None:
        """Go over to the plan that was asked for, if it is there; with several ranks, to what the first one proposes.

        Raises:
            RankError: that is not known, or cannot be run here.
        """
        if self._proposal is not None and not self._proposal.done():
            return
        proposal, self._proposal = self._proposal, None
        if proposal is None:
            self._asked_ns = time.perf_counter_ns()
        proposed = None if proposal is None else self._try(proposal.result)
        new = self.commons.settle(proposed, self.compilation, StageRunner())
        if new is None:
            self._is_settled = True
            return
        try:
            self._go_over_to(new)
        except Exception as error:  # there is a plan, but it cannot be made
            if self.config.debug.strict:
                raise
            name = self.compilation.capture.name
            if not self.commons.ranks.is_alone:
                why = f"{name} cannot go over to the plan that ranks agreed on: {type(error).__name__}: {error}"
                raise self.commons.ranks.fail(why) from error
            self._is_settled = True
            _logger.warning("%s keeps its plan: %s: %s", name, type(error).__name__, error)

    def _go_over_to(self, new: Compilation) -> None:
        old = self.compilation
        if is_same_placement(old.plan, new.plan):
            self.compilation = new
        else:
            self.adopt(new)
        self.num_replans += 1
        self._runs = self._num_observed = 0
        _log_replan(old, new, time.perf_counter_ns() - self._asked_ns)


def uses_lanes(plan: Plan) -> bool:
    """Whether anything runs elsewhere than on the lane of all units."""
    return any(assignment.lane != 0 for assignment in plan.assignments)


def has_free_plans(plan: Plan, config: Config) -> bool:
    """Whether other sizes may get other plans: not if somebody wants this plan, or the same numbers every time."""
    is_asked_for = plan.pinned or config.plan.planner == "serial"
    return not is_asked_for and not are_numbers_fixed()


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
