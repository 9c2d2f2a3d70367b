"""Stages share the time of the suite: each has an end, and what one leaves is the next one's.

run_stages(stages, report, budget=..., clock=..., write=...)

The end of a stage is told to it, and it keeps it: all it does is asked of processes with a time limit. A stage that
would begin after the end of the suite, or after its own, is skipped. One that raises has failed, and the next one runs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from apollo_compile.store.files import write_file

Clock = Callable[[], float]
"""Returns seconds."""

LATE_S = 5.0
"""How much later than its end a stage may end, since processes have to be stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A part of the suite."""

    name: str
    share: float
    """Of the time, in proportion to those of the other stages."""
    run: Callable[[Report, float], None]
    """Adds what it finds to the report until a time of the clock."""


@dataclass(kw_only=True, slots=True)
class StageRecord:
    """How a stage went."""

    name: str
    state: str
    """`done`, `failed`, `late` or `skipped`."""
    seconds: float = 0.0
    allotted_s: float = 0.0
    note: str = ""


@dataclass(kw_only=True, slots=True)
class Report:
    """Everything that the suite found so far; what the JSON file has."""

    is_dry: bool
    """Whether it ran on a CPU, so that no figure is a GPU's."""
    facts: dict[str, Any] = field(default_factory=dict)
    stages: list[StageRecord] = field(default_factory=list)
    checks: list[Any] = field(default_factory=list)
    workloads: dict[str, Any] = field(default_factory=dict)
    """Results of variants, by the title of their workload."""
    ledger: dict[str, Any] = field(default_factory=dict)
    targets: list[Any] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write all of it atomically."""
        note = {"NOT A GPU": "a dry run on a CPU with tiny models: no figure here is a GPU's"} if self.is_dry else {}
        write_file(path, json.dumps({"format": 2, **note, **asdict(self)}, indent=1, default=str) + "\n")


def run_stages(
    stages: Sequence[Stage],
    report: Report,
    *,
    budget_s: float,
    clock: Clock,
    write: Callable[[Report], None],
    tell: Callable[[str], None],
) -> None:
    """Run the stages in order, and call `write` after each."""
    start = clock()
    total = sum(stage.share for stage in stages)
    ends = itertools.accumulate(stage.share * budget_s / total for stage in stages)
    for stage, end in zip(stages, ends, strict=True):
        begin, until = clock(), start + end
        record = StageRecord(name=stage.name, state="done", allotted_s=round(max(0.0, until - begin), 1))
        report.stages.append(record)
        if begin >= until:
            record.state, record.note = "skipped", "no time left"
        else:
            tell(f"[{begin - start:4.0f} s] {stage.name}, until {end:.0f} s")
            try:
                stage.run(report, until)
            except Exception as error:  # what was found before is worth its table
                record.state, record.note = "failed", f"{type(error).__name__}: {error}"[:500]
            record.seconds = round(clock() - begin, 1)
            if record.state == "done" and clock() > until + LATE_S:
                record.state, record.note = "late", f"ended {clock() - until:.0f} s after its time"
        if record.note:
            tell(f"  {stage.name} {record.state}: {record.note}")
        write(report)
