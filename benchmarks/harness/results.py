"""Results of cases in a JSON file, and the cases run apart.

    load_results(path, Result) -> list[Result];  save_results(path, results)
    run_each(run, cases, Result, ...) -> results

A result has a `case`, an `outcome`, `reasons`, a `problem` and the `commit` that it is of; the file has the versions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from apollo_compile.tools.bench.facts import machine_facts
from benchmarks.harness.apart import run_apart

ResultT = TypeVar("ResultT")


def load_results(path: Path, kind: Callable[..., ResultT]) -> list[ResultT]:
    """Return the results of a file that `save_results` wrote."""
    case = get_type_hints(kind)["case"]
    content = json.loads(path.read_text(encoding="utf-8"))
    return [kind(**{**it, "case": case(**it["case"]), "reasons": tuple(it["reasons"])}) for it in content["cases"]]


def save_results(path: Path, results: Iterable[Any]) -> None:
    """Write results, one on each line, and the versions that they are for; each has its own commit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {name: fact for name, fact in machine_facts().items() if name != "commit"}
    lines = ",\n".join(json.dumps(asdict(result)) for result in results)
    path.write_text(f'{{"machine": {json.dumps(machine)},\n"cases": [\n{lines}\n]}}\n', encoding="utf-8")


def run_each(
    run: Callable[[Any], ResultT], cases: Sequence[Any], kind: Callable[..., ResultT], **limits: Any
) -> Iterator[ResultT]:
    """Yield the result of every case; a process that dies or hangs costs its case alone.

    `limits` are those of `run_apart`.
    """
    for case, result in run_apart(run, cases, **limits):
        yield kind(case=case, outcome="failed", problem=f"the process {result}") if isinstance(result, str) else result
