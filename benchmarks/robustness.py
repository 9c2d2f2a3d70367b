"""Write the tables of docs/robustness.md from results: the outcomes of all cases, and their reasons.

    python -m benchmarks.robustness --sweep build/sweep.json --op-infos build/op_infos.json --tests build/tests.json

Every case is in a file of `RESULTS`, with its commit. The cases of `--sweep`, of `benchmarks.sweep --json`, replace
those that are kept there, and so do those of `--op-infos`, of `benchmarks.op_infos --json`. The file of `--tests`, of
`pytest --robustness`, replaces the kept one. Without arguments, the tables are made from kept files. In the page a
table stands between two comments, `<!-- counts -->` and `<!-- end of counts -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import op_infos, sweep
from benchmarks.harness.results import load_results, save_results
from benchmarks.sweep import OUTCOMES, RIVALS, model_names

PAGE = Path(__file__).parents[1] / "docs" / "robustness.md"
RESULTS = Path(__file__).parent / "results"
SWEEP, OP_INFOS, TESTS = RESULTS / "sweep.json", RESULTS / "op_infos.json", RESULTS / "robustness.json"

BODIES_IN_WORDS = {"native": "compiled", "eager": "eager bodies"}
OUTCOMES_IN_WORDS = {"inductor": "Inductor's own"}
MAX_NAMES = 8
"""Most cases named for a common reason; the JSON files have all of them."""

_TABLE = re.compile(r"(<!-- (?P<name>\w+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One case of any of the files, as the tables count it."""

    section: str
    name: str
    outcome: str
    is_in_segments: bool
    """Whether a graph of it ran in segments."""
    is_on_lanes: bool
    """Whether one ran on more than one lane."""
    reasons: tuple[str, ...]
    """Reasons of another way than planned, or of a difference from eager, without details of a case."""
    commit: str


def main(arguments: list[str] | None = None) -> int:
    """Keep the results that are named, write the page; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.robustness", description="Write docs/robustness.md.")
    parser.add_argument("--sweep", type=Path, help="results of benchmarks.sweep")
    parser.add_argument("--op-infos", type=Path, help="results of benchmarks.op_infos")
    parser.add_argument("--tests", type=Path, help="results of marked tests")
    args = parser.parse_args(arguments)
    for kept, new, kind in ((SWEEP, args.sweep, sweep.Result), (OP_INFOS, args.op_infos, op_infos.Result)):
        if new is not None:
            results: dict[Any, Any] = {
                result.case: result for path in (kept, new) for result in load_results(path, kind)
            }
            save_results(kept, results.values())
    if args.tests is not None:
        TESTS.write_text(args.tests.read_text(encoding="utf-8"), encoding="utf-8")
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def render(page: str) -> str:
    """Return the page with tables of the results.

    Raises:
        ValueError: the page has other tables than there are.
    """
    models, described = load_results(SWEEP, sweep.Result), load_results(OP_INFOS, op_infos.Result)
    tests: list[dict[str, Any]] = list(json.loads(TESTS.read_text(encoding="utf-8")).values())
    lines = [*map(line_of_case, [*models, *described]), *map(line_of_test, tests)]
    tables = {
        "counts": format_counts(lines),
        "models": format_models(models),
        "rivals": format_rivals(described),
        "variants": format_variants(tests),
        "reasons": format_reasons(lines),
    }
    places = [match["name"] for match in _TABLE.finditer(page)]
    if sorted(places) != sorted(tables):
        raise ValueError(f"{PAGE.name} has places for {sorted(places)}; there are tables of {sorted(tables)}")
    return _TABLE.sub(lambda match: f"{match[1]}\n{tables[match['name']]}\n\n{match[3]}", page)


# -------------------------------------------------------------------------------------------------------------- lines


def line_of_case(result: sweep.Result | op_infos.Result) -> Line:
    """Return the line of a model in one setting, or of an operator or a module of torch's own tests."""
    case = result.case
    kind, name = ("model", case.model) if isinstance(case, sweep.Case) else (case.kind, case.name)
    reasons = result.reasons or ((_without_numbers(result.problem),) if result.problem else ())
    return Line(
        section=f"{kind.capitalize()}s, {BODIES_IN_WORDS[case.bodies]}",
        name=name,
        outcome=result.outcome,
        is_in_segments=result.num_in_segments > 0,
        is_on_lanes=result.num_on_lanes > 0,
        reasons=tuple(re.sub(r"the training of .+ to eager", "training to eager", reason) for reason in reasons),
        commit=result.commit,
    )


def line_of_test(test: Mapping[str, Any]) -> Line:
    """Return the line of a marked test; one that passed with a reason fell back."""
    reasons = tuple(dict.fromkeys(map(_head, test.get("reasons", ()))))
    return Line(
        section=test["section"],
        name=test["subject"],
        outcome="fell back" if test["outcome"] == "passed" and reasons else test["outcome"],
        is_in_segments=test.get("segments", 0) > 0,
        is_on_lanes=test.get("lanes", 0) > 0,
        reasons=reasons,
        commit=test["commit"],
    )


def _without_numbers(problem: str) -> str:
    """Return a problem without its size and place, which differ from case to case."""
    if "off by" in problem:
        return f"{'a gradient' if problem.startswith('gradient') else 'a number'} differs from eager's"
    return problem.partition(" raised: ")[0]


def _head(reason: str) -> str:
    """Return a reason without the details that follow a colon, and without the number of the graph."""
    text = re.sub(
        r"graph\d+_\w+|\d+/\d+(\.\d+)? (forward|backward|inference)",
        "a graph",
        re.sub(r"^\w+Error: |^.*a loop over micro-batches(?: for now)?: (?:\d+/\d+ falls back: )?", "", reason),
    )
    return re.split(r": | \(", text)[0]


# ------------------------------------------------------------------------------------------------------------- tables


def format_counts(lines: Sequence[Line]) -> str:
    """Return the numbers of cases of each section: tried, in segments, on lanes, by outcome; and their commits."""
    rows = []
    for section in dict.fromkeys(line.section for line in lines):
        own = [line for line in lines if line.section == section]
        outcomes = Counter(line.outcome for line in own)
        rows.append(
            (
                section,
                len(own),
                sum(line.is_in_segments for line in own),
                sum(line.is_on_lanes for line in own),
                *(outcomes[outcome] for outcome in OUTCOMES),
                _commits(line.commit for line in own),
            )
        )
    return _table(rows, ("", "tried", "in segments", "on lanes", *map(_in_words, OUTCOMES), "commit"))


def format_models(results: Sequence[sweep.Result]) -> str:
    """Return the models of each family, with the number of settings and their outcomes."""
    families = model_names()
    rows = []
    for family in dict.fromkeys(families.values()):
        own = [result for result in results if families[result.case.model] == family]
        outcomes = Counter(result.outcome for result in own)
        names = ", ".join(f"`{name}`" for name in families if families[name] == family)
        rows.append((family, names, len(own), *(outcomes[outcome] for outcome in OUTCOMES)))
    return _table(rows, ("family", "models", "cases", *map(_in_words, OUTCOMES)))


def format_rivals(results: Sequence[op_infos.Result]) -> str:
    """Return how many operators and modules torch alone gets right, running the same code without apollo."""
    rows = []
    for section in dict.fromkeys(line_of_case(result).section for result in results):
        own = [result for result in results if line_of_case(result).section == section]
        rival = RIVALS[own[0].case.bodies][0]
        rows.append((section, len(own), sum(result.rivals.get(rival) == "" for result in own), f"`{rival}`"))
    return _table(rows, ("", "tried", "torch alone is right", "torch's backend"))


def format_variants(tests: Sequence[Mapping[str, Any]]) -> str:
    """Return in how many cases of training steps each variant took steps, and how many; the last row has the sums."""
    ran = [test["variants"] for test in tests if test.get("variants")]
    cases = Counter(name for variants in ran for name in variants)
    steps: Counter[str] = Counter()
    for variants in ran:
        steps.update(variants)
    rows = [(name, count, steps[name]) for name, count in cases.most_common()]
    return _table([*rows, ("all", cases.total(), steps.total())], ("variant", "cases", "steps"))


def format_reasons(lines: Sequence[Line]) -> str:
    """Return why cases fell back or differ, compiled or not, the most frequent reason of each section first."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for line in lines:
        for reason in line.reasons if line.outcome != "passed" else ():
            names.setdefault((_of_all_bodies(line.section), _in_words(line.outcome), reason), []).append(line.name)
    sections = list(dict.fromkeys(_of_all_bodies(line.section) for line in lines))
    ranked = sorted(names.items(), key=lambda item: (sections.index(item[0][0]), item[0][1], -len(item[1]), item[0][2]))
    rows = [(*group, len(cases), _first(dict.fromkeys(cases))) for group, cases in ranked]
    return _table(rows, ("section", "outcome", "why", "cases", "of them"))


def _first(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - MAX_NAMES} more" if len(shown) > MAX_NAMES else ""
    return ", ".join(f"`{name}`" if " " not in name else name for name in shown[:MAX_NAMES]) + more


def _of_all_bodies(section: str) -> str:
    return section.partition(", ")[0]


def _in_words(outcome: str) -> str:
    return OUTCOMES_IN_WORDS.get(outcome, outcome)


def _commits(commits: Iterable[str]) -> str:
    counts = Counter(f"{commit[:7]}{'-dirty' if commit.endswith('-dirty') else ''}" for commit in commits)
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{it} ({n})" for it, n in counts.most_common())


def _table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    """Return a table in Markdown with numbers to the right and without padding, which would fill most of the page."""
    aligned = ["---:" if all(isinstance(row[i], int) for row in rows) else "---" for i in range(len(headers))]
    cells = [[str(cell).replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headers, aligned, *cells))


if __name__ == "__main__":
    sys.exit(main())
