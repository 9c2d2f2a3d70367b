"""The checks that are left to do, asked of the device's process one after the other, whenever there is time for some.

Checks(process, clock, groups).run(groups, report, until)     as many as there is time for
                              .skip_rest(report)              names what there was no time for
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from apollo_compile.errors import ApolloError
from benchmarks.gpu_suite.stages import Clock, Report

CHECK_LIMIT_S = 120.0
"""Seconds after which one check hangs. A model that takes 20 to compile may take several times that beside others."""

LEAST_CHECK_S = 15.0
"""No check begins with less time than this: it would most likely be for nothing, and the process would be started
anew."""

DOCTOR = "doctor"
"""What doctor finds; comes last, and shows the verdict of the self-check that was made before."""

NO_TIME = "no time left"


@dataclass(kw_only=True, slots=True)
class CheckResult:
    """One check, as it went."""

    name: str
    state: str
    """`ok`, `failed` or `skipped`."""
    text: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Answers(Protocol):
    """The process that runs checks; `DeviceProcess` is one."""

    def ask(self, request: tuple[Any, ...], limit_s: float, *, start_limit_s: float) -> Any:
        """Return its answer, or raise `ApolloError`; then it has ended."""

    def stop(self) -> None:
        """End it; the next request starts another."""


class Checks:
    """Those that are left.

    Arguments:
        process: what runs them; kept between them, so that they share what they compile.
        clock: returns seconds.
        names: of checks, by the name of their group, in the order in which they are to be done.
    """

    def __init__(self, process: Answers, clock: Clock, names: Mapping[str, Sequence[str]]) -> None:
        self._process = process
        self._clock = clock
        self._left = {group: list(own) for group, own in names.items()}

    def run(
        self, groups: Sequence[str], report: Report, until: float, *, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Add results to the report; a check that fails, dies or hangs has failed, and others go on.

        Arguments:
            groups: whose checks may run now.
            report: gets the results.
            until: when the last one has to end.
            is_wanted: asked before each; a check that has begun is waited for.
        """
        for group in groups:
            while self._left[group] and self._clock() + LEAST_CHECK_S <= until and is_wanted():
                report.checks.append(self._run(self._left[group].pop(0), until))

    def skip_rest(self, report: Report) -> None:
        """Add what is left to the report."""
        for name in (name for own in self._left.values() for name in own):
            report.checks.append(CheckResult(name=name, state="skipped", text=NO_TIME))
        self._left = {group: [] for group in self._left}

    def _run(self, name: str, until: float) -> CheckResult:
        begin = self._clock()
        try:
            limit_s = min(until - begin, CHECK_LIMIT_S)
            result = CheckResult(**self._process.ask(("check", name), limit_s, start_limit_s=until - begin))
        except ApolloError as error:
            lines = str(error).splitlines()
            state = "skipped" if self._clock() >= until else "failed"
            text = f"{NO_TIME}: it did not end" if state == "skipped" else " ... ".join((lines[0], lines[-1]))[:300]
            result = CheckResult(name=name, state=state, text=text)
        if "error" in result.numbers:
            self._process.stop()  # whatever it was may have ended the context of the device
        result.seconds = round(self._clock() - begin, 1)
        return result
