"""Make the tables of docs/robustness.md from results.

    python -m benchmarks.robustness --sweep build/sweep.json --tests build/robustness.json

`--sweep` is what `benchmarks.sweep --json` wrote, `--tests` what `pytest --robustness` wrote; both are kept in
`RESULTS`, and a run without arguments makes the tables from there. In the page a table stands between two comments,
`<!-- sweep -->` and `<!-- end of sweep -->`, and so with each section of marked tests: a new section needs these two
lines in the page, nothing here.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.sweep import OUTCOMES, Result, load, model_names

PAGE = Path(__file__).parents[1] / "docs" / "robustness.md"
RESULTS = Path(__file__).parent / "results"
SWEEP, TESTS = RESULTS / "sweep.json", RESULTS / "robustness.json"

_TABLE = re.compile(r"(<!-- (?P<name>[\w ]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


def main(arguments: list[str] | None = None) -> int:
    """Keep the results that are named, write the page; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.robustness", description="Write docs/robustness.md.")
    parser.add_argument("--sweep", type=Path, help="results of benchmarks.sweep")
    parser.add_argument("--tests", type=Path, help="results of marked tests")
    args = parser.parse_args(arguments)
    for given, kept in ((args.sweep, SWEEP), (args.tests, TESTS)):
        if given is not None:
            kept.write_text(given.read_text(encoding="utf-8"), encoding="utf-8")
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def render(page: str) -> str:
    """Return the page with its tables made anew.

    Raises:
        ValueError: a section of the results has no place in the page, or the page has one without results.
    """
    results = load(SWEEP)
    lines: list[dict[str, Any]] = list(json.loads(TESTS.read_text(encoding="utf-8")).values())
    sections = {line["section"] for line in lines}
    tables = {
        section.lower(): format_tests([item for item in lines if item["section"] == section]) for section in sections
    }
    tables |= {"sweep": format_sweep(results), "counts": format_counts(results, lines)}
    places = [match["name"] for match in _TABLE.finditer(page)]
    if sorted(places) != sorted(tables):
        raise ValueError(f"{PAGE.name} has places for {sorted(places)}; the results have {sorted(tables)}")
    return _TABLE.sub(lambda match: f"{match[1]}\n{tables[match['name']]}\n\n{match[3]}", page)


def format_counts(results: Sequence[Result], lines: Sequence[Mapping[str, Any]]) -> str:
    """Return how many of each section were tried, and what came of them."""
    sweep = Counter(result.outcome for result in results)
    rows = [("Models", len(results), *(sweep[outcome] for outcome in OUTCOMES))]
    for section in sorted({line["section"] for line in lines}):
        outcomes = Counter(_outcome(line) for line in lines if line["section"] == section)
        rows.append((section, outcomes.total(), *(outcomes[outcome] for outcome in OUTCOMES)))
    return _table(rows, ("", "tried", "passed", "fell back", "Inductor's own", "failed"))


def format_sweep(results: Sequence[Result]) -> str:
    """Return a line for each case, by family."""
    families = model_names()
    order = list(families)
    rows = [
        (
            families[result.case.model],
            f"`{result.case.model}`",
            result.case.setting,
            f"{result.num_in_segments} of {result.num_graphs}",
            result.num_on_lanes,
            result.outcome if result.outcome != "inductor" else "Inductor's own",
            "; ".join(filter(None, (*result.reasons, result.problem))),
        )
        for result in sorted(results, key=lambda result: order.index(result.case.model))
    ]
    return _table(rows, ("family", "model", "setting", "graphs in segments", "on lanes", "outcome", "why"))


def format_tests(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each marked test."""
    rows = [
        (
            line["subject"],
            line["says"],
            line.get("segments", ""),
            line.get("lanes", ""),
            _outcome(line),
            "; ".join(line.get("reasons", ())),
        )
        for line in sorted(lines, key=lambda line: line["subject"].lower())
    ]
    return _table(rows, ("subject", "what is tested", "graphs in segments", "on lanes", "outcome", "why"))


def _outcome(line: Mapping[str, Any]) -> str:
    return "fell back" if line["outcome"] == "passed" and line.get("reasons") else str(line["outcome"])


def _table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    escaped = [[str(cell).replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
    return tabulate(escaped, headers=headers, tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    sys.exit(main())
