"""A dry run on a CPU: it finds a defect of the suite before minutes of a GPU are spent on it.

    drills(folder, clock)                  stages in which something goes wrong on purpose
    complaints_about(report, ...)          what should be there and is not

All else is the suite itself, with models of one layer, few rounds, only as many variants that compile at the same time
as there are cores, one cache of Inductor for all of them, since each would compile the same code, and few variants
after the first workload. Time limits are for a busy machine; nothing is waited for that is there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from apollo_compile.errors import ApolloError
from apollo_compile.tools.bench.task import Task, Variant
from benchmarks.gpu_suite.checks import NO_TIME
from benchmarks.gpu_suite.race import Result, race, started
from benchmarks.gpu_suite.stages import LATE_S, Clock, Report, Stage
from benchmarks.gpu_suite.variants import APOLLO, APOLLO_STEP, REDUCE_OVERHEAD

BUDGET_S = 1800.0
ROUNDS, LOOP_STEPS = 2, 5
DRILL_SHARE = 60.0

LATER = (REDUCE_OVERHEAD, APOLLO, APOLLO_STEP)
"""Variants of all workloads but the first: those that every target has a figure of."""

FAILING, PROCESSES = "drill: a stage that fails", "drill: processes that die and hang"
"""Names of stages; the first has to fail, as nothing else may."""

STOP_S = 6.0
"""Seconds until the end of a race in which something hangs: more than every request has at least."""

FIGURES = ("first_step_s", "warm_up", "losses", "memory", "launch", "decided", "loops_ns", "steps_ns")
"""Fields of a result that every variant has on a CPU, too."""


def drills(folder: Path, clock: Clock) -> list[Stage]:
    """Return stages in which something goes wrong on purpose."""
    return [
        Stage(name=FAILING, share=1.0, run=_fail),
        Stage(name=PROCESSES, share=DRILL_SHARE, run=partial(_lose_processes, folder, clock)),
    ]


def complaints_about(
    report: Report, *, variants: Mapping[str, Sequence[str]], ledger: Sequence[str], has_targets: bool
) -> list[str]:
    """Return what should be there and is not.

    Arguments:
        report: of a dry run.
        variants: names of those that take part, by the title of their workload.
        ledger: names of those whose ledger there should be.
        has_targets: whether there should be a figure for every target.
    """
    complaints = [
        f"stage {stage.name} was {stage.state}{': ' * bool(stage.note)}{stage.note}"
        for stage in report.stages
        if stage.state != ("failed" if stage.name == FAILING else "done")
    ]
    complaints += [f"check {check.name}: {NO_TIME}" for check in report.checks if check.text.startswith(NO_TIME)]
    for title, names in variants.items():
        results: Mapping[str, Result] = report.workloads.get(title, {})
        for name in names:
            result = results.get(name, Result(name=name))
            missing = [field for field in FIGURES if not getattr(result, field)]
            missing += [f"{kind} of memory" for kind, count in result.memory.items() if not count]
            if missing:
                complaints.append(f"{title}: {name} has no {', '.join(missing)}{': ' * bool(result.note)}{result.note}")
    complaints += [f"the ledger has no {name}" for name in ledger if name not in report.ledger]
    unseen = [target.name for target in report.targets if not target.found] if has_targets else []
    return complaints + [f"there is no figure for the target: {name}" for name in unseen]


# -------------------------------------------------------------------------------------------------------------- drills


def _fail(report: Report, until: float) -> None:
    raise RuntimeError("on purpose; what follows goes on")


def _lose_processes(folder: Path, clock: Clock, report: Report, until: float) -> None:
    """Race processes of which one dies and one hangs; raise unless it costs them alone, and the race ends in time."""
    variants = [
        Variant(name=each.__name__.lower(), backend=None, stepper=f"{__name__}:{each.__name__}")
        for each in (Answers, Dies, Hangs)
    ]
    with started(Task(builder=""), variants, folder, clock) as heat:
        while heat.is_waiting(dict.fromkeys(heat.children, until)):
            threading.Event().wait(0.1)
        end = clock() + STOP_S
        results = race(heat, until=end, start_limits_s={}, most_rounds=ROUNDS)
        late_s = clock() - end
    notes = {name: result.note for name, result in results.items()}
    is_alone = results["answers"].loops_ns and not notes["answers"]
    if not (is_alone and "exit code 9" in notes["dies"] and "did not answer" in notes["hangs"] and late_s < LATE_S):
        raise ApolloError(f"one process should have died, one should have hung until the end, but: {notes}")


class Answers:
    """Answers everything; a step takes a millisecond, and nothing."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        pass

    def start(self) -> float:
        """Return the seconds of a first step."""
        return 1.0

    def warm_up(self, steps: int, limit_s: float) -> dict[str, Any]:
        """Return how many steps were taken."""
        return {"steps": steps, "is_settled": True}

    def losses(self) -> list[float]:
        """Return a loss."""
        return [1.0]

    def memory(self) -> dict[str, int]:
        """Return a peak."""
        return {"warm_bytes": 1}

    def launch_times(self) -> dict[str, int | None]:
        """Return times."""
        return {"host_ns": 1_000_000, "device_ns": None}

    def decided(self) -> dict[str, Any]:
        """Return what ran."""
        return {"ran": []}

    def replays(self) -> list[dict[str, Any]]:
        """Return none."""
        return []

    def loop(self, steps: int) -> int:
        """Return the nanoseconds of a step."""
        return 1_000_000

    def run(self, untimed: int, timed: int) -> list[int]:
        """Return the nanoseconds of steps."""
        return timed * [1_000_000]


class Dies(Answers):
    """Ends in its first loop."""

    def loop(self, steps: int) -> int:
        """End."""
        os._exit(9)


class Hangs(Answers):
    """Never ends its first loop."""

    def loop(self, steps: int) -> int:
        """Wait for nothing."""
        threading.Event().wait()
        return 0
