"""Which stage comes when, and what goes on at the same time.

    with Suite(args, variants, folder, process, clock) as suite:
        run_stages(suite.stages(), ...)

Compiling is work for the CPU, and what most checks do is work for the GPU, so each goes on while the other does:

    checks       quick ones that time kernels, alone; then the first workload starts to compile
    workloads    while one compiles, checks are made that time nothing. Nothing else goes on while one is measured: the
                 next one starts after that, since its compiles would be seen in the steps that are measured
    other checks what is left, alone, if there is time

That takes a core for every variant that compiles, and two for the check and this process. On fewer cores checks are
made alone, in the stage of that name or in the last one. In a dry run no more variants compile at the same time than
there are cores.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from apollo_compile.tools.bench.task import MeasuredTask, MeasuredVariant
from apollo_compile.tools.bench.turns import spawn
from benchmarks.gpu_suite.checks import DOCTOR, Checks
from benchmarks.gpu_suite.device import DeviceProcess, look_at_device
from benchmarks.gpu_suite.dry import LATER
from benchmarks.gpu_suite.race import Heat, race, started
from benchmarks.gpu_suite.stages import Clock, Report, Stage
from benchmarks.gpu_suite.targets import title_of
from benchmarks.gpu_suite.variants import APOLLO, REDUCE_OVERHEAD, SLOW, START_LIMITS_S, make_task

BUDGET_S = 570.0
"""Nine and a half minutes: whoever lends a GPU for ten stops the suite then."""

DEVICE_SHARE, CHECKS_SHARE, LEDGER_SHARE = 30.0, 90.0, 50.0
WORKLOAD_SHARES: Mapping[str, float] = {"clip_b32": 200.0, "imagebind": 150.0, "chain": 50.0}
"""Seconds of `BUDGET_S`; more or less time is divided in the same proportions."""
OTHER_SHARE = 150.0
"""Of any other workload."""

OTHER_CORES = 2
"""Cores for a check and for this process, beside one for every variant that compiles."""

Workload = tuple[str, int]
"""Name and batch size."""

DEFAULT_WORKLOADS: Sequence[Workload] = (("clip_b32", 32), ("imagebind", 8), ("chain", 32))

QUICK, UNTIMED, TIMED, LAST = GROUPS = ("quick", "untimed", "timed", "last")
"""Groups of checks, in the order in which they are worth their time."""


class Suite:
    """The stages of one run, and the processes that they share.

    Arguments:
        args: of the command.
        variants: by name; those that take part are `args.variants`, or all but some if that is None.
        folder: for output and caches of processes.
        process: looks at the device.
        clock: returns seconds.
        cores: of this machine.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        variants: Mapping[str, MeasuredVariant],
        folder: Path,
        process: DeviceProcess,
        clock: Clock,
        *,
        cores: int = len(os.sched_getaffinity(0)),
    ) -> None:
        self._args = args
        self._variants = variants
        self._folder = folder
        self._process = process
        self._clock = clock
        self._cores = cores
        self._is_dry = args.device == "cpu"
        self._cache = folder / "cache" if self._is_dry else None
        """Of Inductor, for all variants; None if each has its own."""
        self._started: dict[Workload, tuple[Heat, ExitStack]] = {}
        self._checks_until = clock()
        """When the checks' own part of the time ends; before, they go on even if nothing compiles."""
        self.checks = Checks(process, clock, _check_names(args))

    def __enter__(self) -> Suite:
        return self

    def __exit__(self, *error: object) -> None:
        """End what was started and never measured."""
        for _, stack in self._started.values():
            stack.close()

    def stages(self) -> list[Stage]:
        """Return the stages, in order."""
        args = self._args
        looked = Stage(name="device", share=DEVICE_SHARE, run=partial(look_at_device, self._process, self._clock))
        checks = Stage(name="checks", share=CHECKS_SHARE, run=self._check)
        workloads = [
            Stage(
                name=self.title_of((name, batch)),
                share=WORKLOAD_SHARES.get(name, OTHER_SHARE),
                run=partial(self._race, (name, batch)),
            )
            for name, batch in args.workloads
        ]
        ledger = Stage(name="ledger", share=LEDGER_SHARE, run=self._ledger)
        others = Stage(name="other checks", share=0.0, run=partial(self.checks.run, GROUPS))
        return [
            looked,
            *([checks] if args.checks else []),
            *workloads,
            *([ledger] if args.ledger and workloads else []),
            *([others] if args.checks else []),
        ]

    def variants_of(self, workload: Workload) -> list[MeasuredVariant]:
        """Return what takes part: what was asked for, or all but what is slow to compile after the first workload.

        A dry run has only few then.
        """
        if self._args.variants is not None:
            return [self._variants[name] for name in self._args.variants]
        has_all = self._args.thorough or workload == self._args.workloads[0]
        missing = set(self._variants) - set(LATER) if self._is_dry else set(SLOW)
        return [each for name, each in self._variants.items() if has_all or name not in missing]

    def in_ledger(self) -> list[MeasuredVariant]:
        """Return those of the first workload whose memory and kernels are looked at."""
        first = self._args.workloads[:1] if self._args.ledger else []
        return [each for own in map(self.variants_of, first) for each in own if each.name in (APOLLO, REDUCE_OVERHEAD)]

    def title_of(self, workload: Workload) -> str:
        """Return the title of its results."""
        return title_of(*workload, self._args.dtype)

    def _may_check_beside(self, workload: Workload) -> bool:
        return self._args.checks and self._cores >= len(self.variants_of(workload)) + OTHER_CORES

    def _check(self, report: Report, until: float) -> None:
        if not (self._args.workloads and self._may_check_beside(self._args.workloads[0])):
            self.checks.run(GROUPS, report, until)
            return
        self.checks.run((QUICK,), report, until)
        self._start(self._args.workloads[0])
        self._checks_until = until

    def _start(self, workload: Workload) -> None:
        """Let a workload begin to compile."""
        folder = self._folder_of(workload)
        folder.mkdir()
        stack = ExitStack()
        heat = started(
            self._task(workload),
            self.variants_of(workload),
            folder,
            self._clock,
            abreast=self._cores if self._is_dry else None,
            cache=self._cache,
        )
        self._started[workload] = stack.enter_context(heat), stack

    def _race(self, workload: Workload, report: Report, until: float) -> None:
        if workload not in self._started:
            self._start(workload)
        heat, stack = self._started.pop(workload)

        def check(end: float, is_waiting: Callable[[], bool]) -> None:
            if self._may_check_beside(workload):
                own_end = self._checks_until
                self.checks.run(
                    (UNTIMED,), report, max(end, own_end), is_wanted=lambda: self._clock() < own_end or is_waiting()
                )

        scale = self._args.budget / BUDGET_S
        with stack:
            report.workloads[self.title_of(workload)] = race(
                heat,
                until=until,
                start_limits_s={name: limit_s * scale for name, limit_s in START_LIMITS_S.items()},
                meanwhile=check,
                loop_steps=self._args.loop_steps,
                most_rounds=self._args.rounds,
            )

    def _ledger(self, report: Report, until: float) -> None:
        """Look at memory and kernels of the first workload, with the code that its race compiled."""
        workload, clock = self._args.workloads[0], self._clock
        for variant in self.in_ledger():
            if clock() >= until:
                break
            folder = self._folder_of(workload)
            process = spawn(self._task(workload), variant, folder, cold=True, cache=self._cache, patience_s=0.0)
            with process as child:
                child.ask(("start",), max(1.0, until - clock()))
                child.ask(("warm_up", 8, max(0.0, (until - clock()) / 3)), max(1.0, until - clock()))
                report.ledger[variant.name] = child.ask(("ledger",), max(1.0, until - clock()))

    def _folder_of(self, workload: Workload) -> Path:
        return self._folder / f"{workload[0]}-{workload[1]}"

    def _task(self, workload: Workload) -> MeasuredTask:
        args, (name, batch) = self._args, workload
        return make_task(name, batch=batch, scale=args.scale, device=args.device, dtype=args.dtype)


def _check_names(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the checks of every group; none if none are wanted, and those of a dry run are skipped."""
    if not args.checks:
        return {group: [] for group in GROUPS}
    if args.device != "cuda":
        return {QUICK: ["T0 driver"], UNTIMED: ["T1 T2 T4 T5 self-check"], TIMED: [], LAST: [DOCTOR]}
    from benchmarks.gpu_checks import QUICK_CHECKS, THOROUGH_CHECKS, TIMED_CHECKS, UNTIMED_CHECKS

    timed = list(TIMED_CHECKS)
    if args.thorough:
        timed += [name for name in THOROUGH_CHECKS if name not in {**QUICK_CHECKS, **UNTIMED_CHECKS, **TIMED_CHECKS}]
    return {QUICK: list(QUICK_CHECKS), UNTIMED: list(UNTIMED_CHECKS), TIMED: timed, LAST: [DOCTOR]}
