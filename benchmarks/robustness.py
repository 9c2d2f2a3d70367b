"""Make the tables of docs/robustness.md from results.

    python -m benchmarks.robustness --sweep build/sweep.json --tests build/robustness.json

`--sweep` is what `benchmarks.sweep --json` wrote: its cases replace those that are kept in `RESULTS`, which keeps all
others, each with its commit. `--tests` is what `pytest --robustness` wrote; it replaces what is kept. A run without
arguments makes the tables from what is kept. In the page a table stands between two comments,
`<!-- sweep -->` and `<!-- end of sweep -->`, and so with each section of marked tests: a new section needs these two
lines in the page, nothing here.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.sweep import BODIES, OUTCOMES, Result, load, model_names, save

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
    if args.sweep is not None:
        results = {result.case: result for path in (SWEEP, args.sweep) for result in load(path)}
        save(SWEEP, list(results.values()))
    if args.tests is not None:
        TESTS.write_text(args.tests.read_text(encoding="utf-8"), encoding="utf-8")
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
    """Return how many of each section were tried, what came of them, and which commits they were tried with."""
    parts = {
        f"Models, {'compiled' if bodies == 'native' else f'{bodies} bodies'}": [
            (result.outcome, result.commit) for result in results if result.case.bodies == bodies
        ]
        for bodies in BODIES
    }
    for section in sorted({line["section"] for line in lines}):
        parts[section] = [(_outcome(line), line["commit"]) for line in lines if line["section"] == section]
    rows = []
    for name, found in parts.items():
        outcomes = Counter(outcome for outcome, _ in found)
        rows.append((name, len(found), *(outcomes[outcome] for outcome in OUTCOMES), _commits(it for _, it in found)))
    return _table(rows, ("", "tried", "passed", "fell back", "Inductor's own", "failed", "commit"))


def _commits(commits: Iterable[str]) -> str:
    counts = Counter(map(_short, commits))
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{it} ({n})" for it, n in counts.most_common())


def _short(commit: str) -> str:
    name, _, rest = commit.partition("-")
    return "-".join(filter(None, (name[:7], rest)))


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
            "; ".join(filter(None, (*result.reasons, result.problem, result.inductor_problem))),
            _short(result.commit),
        )
        for result in sorted(results, key=lambda result: order.index(result.case.model))
    ]
    return _table(rows, ("family", "model", "setting", "graphs in segments", "on lanes", "outcome", "why", "commit"))


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
