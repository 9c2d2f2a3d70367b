"""A dry run on a CPU: it finds a defect of the suite before minutes of a GPU are spent on it.

    complaints_about(report, ...)          what should be there and is not

All else is the suite itself, with models of one layer, few rounds, only as many variants that compile at the same time
as there are cores, one cache of Inductor for all of them, since each would compile the same code, and few variants
after the first workload. Time limits are for a busy machine; nothing is waited for that is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.gpu_suite.checks import NO_TIME
from benchmarks.gpu_suite.race import Result
from benchmarks.gpu_suite.stages import Report
from benchmarks.gpu_suite.variants import APOLLO, APOLLO_STEP, REDUCE_OVERHEAD

BUDGET_S = 1800.0
ROUNDS, LOOP_STEPS = 2, 5

LATER = (REDUCE_OVERHEAD, APOLLO, APOLLO_STEP)
"""Variants of all workloads but the first: those that every target has a figure of."""

FIGURES = ("first_step_s", "warm_up", "losses", "memory", "launch", "decided", "loops_ns", "steps_ns")
"""Fields of a result that every variant has on a CPU, too."""


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
        if stage.state != "done"
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
