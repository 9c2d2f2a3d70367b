"""Make the tables of docs/robustness.md from results.

    python -m benchmarks.robustness --sweep build/sweep.json --op-infos build/op_infos.json --tests build/tests.json

`--sweep` is what `benchmarks.sweep --json` wrote: its cases replace those that are kept in `RESULTS`, which keeps all
others, each with its commit. So do those of `--op-infos`, which `benchmarks.op_infos --json` wrote. `--tests` is what
`pytest --robustness` wrote; it replaces what is kept. A run without arguments makes the tables from what is kept. In
the page a table stands between two comments, `<!-- sweep -->` and `<!-- end of sweep -->`, and so with each section of
marked tests: a new section needs these two lines in the page, nothing here.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tabulate import tabulate

from benchmarks import op_infos
from benchmarks.sweep import BODIES, OUTCOMES, RIVALS, Result, load, model_names, save

PAGE = Path(__file__).parents[1] / "docs" / "robustness.md"
RESULTS = Path(__file__).parent / "results"
SWEEP, OP_INFOS, TESTS = RESULTS / "sweep.json", RESULTS / "op_infos.json", RESULTS / "robustness.json"

BODIES_IN_WORDS = {"native": "compiled", "eager": "eager bodies"}
MAX_NAMES = 12
"""Of operators with a reason in common; the JSON file has all of them."""

T, K = TypeVar("T"), TypeVar("K")

_TABLE = re.compile(r"(<!-- (?P<name>[\w ]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


def main(arguments: list[str] | None = None) -> int:
    """Keep the results that are named, write the page; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.robustness", description="Write docs/robustness.md.")
    parser.add_argument("--sweep", type=Path, help="results of benchmarks.sweep")
    parser.add_argument("--op-infos", type=Path, help="results of benchmarks.op_infos")
    parser.add_argument("--tests", type=Path, help="results of marked tests")
    args = parser.parse_args(arguments)
    if args.sweep is not None:
        results = {result.case: result for path in (SWEEP, args.sweep) for result in load(path)}
        save(SWEEP, list(results.values()))
    if args.op_infos is not None:
        found = {result.case: result for path in (OP_INFOS, args.op_infos) for result in op_infos.load(path)}
        op_infos.save(OP_INFOS, found.values())
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
    described = op_infos.load(OP_INFOS)
    tables |= {"counts": format_counts(results, described, lines), "sweep": format_sweep(results)}
    tables |= {"operators": format_operators(described), "reasons": format_reasons(described)}
    places = [match["name"] for match in _TABLE.finditer(page)]
    if sorted(places) != sorted(tables):
        raise ValueError(f"{PAGE.name} has places for {sorted(places)}; the results have {sorted(tables)}")
    return _TABLE.sub(lambda match: f"{match[1]}\n{tables[match['name']]}\n\n{match[3]}", page)


def format_counts(
    results: Sequence[Result], described: Sequence[op_infos.Result], lines: Sequence[Mapping[str, Any]]
) -> str:
    """Return how many of each section were tried, what came of them, and which commits they were tried with."""
    parts: dict[str, list[tuple[str, str]]] = {}
    for what, own in {"Models": results, "Operators and modules": described}.items():
        for bodies in BODIES:
            found = [(result.outcome, result.commit) for result in own if result.case.bodies == bodies]
            parts[f"{what}, {BODIES_IN_WORDS[bodies]}"] = found
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
            _in_words(result.outcome),
            "; ".join(filter(None, (*result.reasons, result.problem, result.inductor_problem))),
            _short(result.commit),
        )
        for result in sorted(results, key=lambda result: order.index(result.case.model))
    ]
    return _table(rows, ("family", "model", "setting", "graphs in segments", "on lanes", "outcome", "why", "commit"))


def format_operators(results: Sequence[op_infos.Result]) -> str:
    """Return what came of operators and modules of torch's own tests, and how many of them torch alone gets right."""
    rows = []
    for (bodies, kind), own in _grouped(results, lambda result: (result.case.bodies, result.case.kind)):
        rival = RIVALS[bodies][0]
        outcomes = Counter(result.outcome for result in own)
        rows.append(
            (
                f"{kind.capitalize()}s, {BODIES_IN_WORDS[bodies]}",
                len(own),
                sum(result.num_in_segments > 0 for result in own),
                sum(result.num_on_lanes > 0 for result in own),
                *(outcomes[outcome] for outcome in OUTCOMES),
                f"{sum(result.rivals.get(rival) == '' for result in own)} ({rival})",
                _commits(result.commit for result in own),
            )
        )
    headers = ("", "tried", "in segments", "on lanes", "passed", "fell back", "Inductor's own", "failed")
    return _table(rows, (*headers, "torch alone is right", "commit"))


def format_reasons(results: Sequence[op_infos.Result]) -> str:
    """Return why operators and modules fell back or are wrong, the most frequent reason first."""
    troubled = [result for result in results if result.outcome != "passed"]
    rows = [
        (
            _in_words(outcome),
            bodies,
            reason,
            len(own),
            ", ".join(f"`{result.case.name}`" for result in own[:MAX_NAMES]) + (", ..." if own[MAX_NAMES:] else ""),
        )
        for (outcome, bodies, reason), own in _grouped(
            troubled, lambda result: (result.outcome, result.case.bodies, _reason(result))
        )
    ]
    rows.sort(key=lambda row: (row[0], row[1], -row[3], row[2]))
    return _table(rows, ("outcome", "bodies", "why", "number", "of them"))


def _reason(result: op_infos.Result) -> str:
    """Return one line without numbers that differ from one operator to the next."""
    if result.outcome == "fell back":
        return "; ".join(result.reasons)
    if "off by" in result.problem:
        return f"{result.problem.split(maxsplit=1)[0]} differs from eager's"
    return result.problem


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> list[tuple[K, list[T]]]:
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.items())


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


def _in_words(outcome: str) -> str:
    return "Inductor's own" if outcome == "inductor" else outcome


def _outcome(line: Mapping[str, Any]) -> str:
    return "fell back" if line["outcome"] == "passed" and line.get("reasons") else str(line["outcome"])


def _table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    escaped = [[str(cell).replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
    return tabulate(escaped, headers=headers, tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    sys.exit(main())
