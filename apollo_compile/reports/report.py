"""The report of one model.

    Report(graphs, fallbacks, verdicts, breaks, fragments, states)

A report is frozen plain data (`values.py`) with a method per rendering; renderings compute no numbers.
`from_json` reads the text of `to_json`, in any process and on any machine.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apollo_compile.errors import ReportFileError
from apollo_compile.json_form import from_json, parse, to_json
from apollo_compile.reports.check import check_summary
from apollo_compile.reports.diff import Difference, compare, sides_of_report
from apollo_compile.reports.metrics import metrics_of
from apollo_compile.reports.render_html import render_frame, render_html
from apollo_compile.reports.render_text import render_text
from apollo_compile.reports.render_trace import render_trace
from apollo_compile.reports.values import ModelSummary
from apollo_compile.reports.why import explain_place
from apollo_compile.store.files import check_format, read_file

FORMAT = 6
"""Number of the JSON form."""

_MAX_BYTES = 256 * 2**20
"""Size limit of a report's file; a report of 1,000 segments takes about 3 MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(ModelSummary):
    """Report of all graphs of one model; prints as text, and in a notebook as a page."""

    def __str__(self) -> str:
        return render_text(self)

    def _repr_html_(self) -> str:
        return render_frame(self)

    def to_json(self) -> str:
        """Return the report as JSON text, which `Report.from_json` reads."""
        return json.dumps({"format": FORMAT, "report": to_json(self)})

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Return the report that `to_json` wrote.

        Raises:
            ReportFileError: the text is not a report of this format.
        """
        try:
            return _to_report(parse(text))
        except ValueError as error:
            raise ReportFileError(f"not a report: {error}; expected text written by Report.to_json") from error

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Return the report in a file.

        Raises:
            ReportFileError: the file cannot be read, or is not a report of this format.
        """
        try:
            return _to_report(read_file(Path(path), max_bytes=_MAX_BYTES))
        except OSError as error:
            raise ReportFileError(f"cannot read the report {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ReportFileError(f"not a report: {path}: {error}; expected a file of Report.to_json") from error

    def to_html(self) -> str:
        """Return a self-contained HTML page: it needs no network and no other file."""
        return render_html(self)

    def save_html(self, path: str | Path) -> None:
        """Write `to_html` to a file."""
        Path(path).write_text(self.to_html(), encoding="utf-8")

    def to_trace(self) -> str:
        """Return the timelines in the trace-event format, which Perfetto and chrome://tracing open."""
        return json.dumps(render_trace(self))

    def save_trace(self, path: str | Path) -> None:
        """Write `to_trace` to a file."""
        Path(path).write_text(self.to_trace(), encoding="utf-8")

    def metrics(self) -> dict[str, float]:
        """Return the main numbers as a flat dictionary for dashboards; numbers that are not known yet have no entry.

        Names begin with `apollo/`. Times are in milliseconds, memory is in bytes, gains are ratios; counts and flags
        are floats too. `apollo_compile.reports.metrics` describes each number.
        """
        return metrics_of(self)

    def why(self, name: str) -> str:
        """Explain in three or four sentences why a segment, or a module, runs where and when it does.

        Arguments:
            name: name of a segment, or of a module, which includes its submodules.

        Raises:
            LookupError: no segment or module has that name; the message lists similar names.
        """
        return explain_place(self, name)

    def diff(self, other: Report) -> Difference:
        """Return the differences between this report's plans and those of `other`, which print as text."""
        return compare(sides_of_report(self), sides_of_report(other))


def merge_reports(reports: Iterable[Report]) -> Report:
    """Return one report of several Dynamo graphs; repeated names get a number."""
    found = Report(graphs=(), fallbacks=())
    taken: set[str] = set()
    for report in reports:
        own = _names(report)
        endings = itertools.chain([""], (f"#{number}" for number in itertools.count(2)))
        ending = next(ending for ending in endings if not taken & {name + ending for name in own})
        taken |= {name + ending for name in own}
        found = Report(
            graphs=found.graphs + tuple(replace(graph, name=graph.name + ending) for graph in report.graphs),
            fallbacks=found.fallbacks + tuple((name + ending, reason) for name, reason in report.fallbacks),
            verdicts=found.verdicts + tuple((name + ending, verdict) for name, verdict in report.verdicts),
            breaks=found.breaks + tuple(replace(each, graph=each.graph + ending) for each in report.breaks),
            states=found.states + tuple(replace(state, graph=state.graph + ending) for state in report.states),
        )
    return found


def _names(report: Report) -> set[str]:
    names = [graph.name for graph in report.graphs]
    names += [name for name, _ in (*report.fallbacks, *report.verdicts)]
    names += [found.graph for found in report.breaks] + [state.graph for state in report.states]
    return set(names)


def _to_report(content: Any) -> Report:
    report = from_json(Report, check_format(content, "report", FORMAT).get("report"))
    for graph in report.graphs:
        check_summary(graph)
    return report
