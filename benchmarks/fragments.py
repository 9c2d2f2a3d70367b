"""Into how many graphs Dynamo cuts the multimodal models of today, and how long a first step takes, beside Inductor.

    python -m benchmarks.fragments --json benchmarks/results/fragments.json
    python -m benchmarks.fragments --only qwen2_vl,pi0 --backends count

`count` runs the graphs as they are: it takes seconds, and says what apollo would compile instead of a model that falls
into many. A step of the others compiles, with empty caches, in a process of its own; a first step has forward, loss and
backward. Graphs and graph breaks are Dynamo's own counts after `STEPS` steps. With `--json` every result is written at
once, and what the file has is not run again; `python -m benchmarks.robustness` makes the table of docs/robustness.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from benchmarks.harness.apart import run_apart
from benchmarks.run import names_of
from benchmarks.workloads.sweep_today import TODAY

MODELS = (*TODAY, "whisper", "clap", "dit")
COUNT = "count"
BACKENDS = (COUNT, "apollo", "inductor")
STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model under a backend."""

    model: str
    backend: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What Dynamo made of a model, and how long that took."""

    case: Case
    num_graphs: int = 0
    num_breaks: int = 0
    step_s: tuple[float, ...] = ()
    """Of every step; the first one compiles."""
    instead: str = ""
    """The modules that apollo would compile instead, if it says anything."""
    problem: str = ""
    """The error, or how the process ended."""
    commit: str = ""


def main(arguments: list[str] | None = None) -> int:
    """Run what is not in the file yet, print a table; return the exit code."""
    from apollo_compile.tools.bench.facts import machine_facts

    args = _parse(arguments)
    results = load(args.json) if args.json is not None and args.json.exists() else []
    known = {result.case for result in results}
    wanted = [Case(model=model, backend=backend) for model in args.only for backend in args.backends]
    commit = str(machine_facts()["commit"])
    for result in run_cases([case for case in wanted if case not in known], timeout_s=args.timeout):
        results.append(replace(result, commit=commit))
        if args.json is not None:
            save(args.json, results)
        tqdm.write(format_results([result]))
    print(format_results(results))
    return 1 if any(result.problem for result in results) else 0


def load(path: Path) -> list[Result]:
    """Read what `save` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return [Result(**{**it, "case": Case(**it["case"]), "step_s": tuple(it["step_s"])}) for it in content["cases"]]


def save(path: Path, results: Sequence[Result]) -> None:
    """Write results, and the machine that they are for."""
    from apollo_compile.tools.bench.facts import machine_facts

    machine = {name: fact for name, fact in machine_facts().items() if name != "commit"}
    content = {"machine": machine, "cases": [asdict(result) for result in results]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def format_results(results: Sequence[Result]) -> str:
    """Return a row per model and backend."""
    rows = [
        (
            result.case.model,
            result.case.backend,
            result.num_graphs,
            result.num_breaks,
            " ".join(f"{seconds:.1f}" for seconds in result.step_s),
            result.problem or result.instead,
        )
        for result in results
    ]
    table: str = tabulate(rows, headers=("model", "backend", "graphs", "breaks", "steps (s)", "instead"))
    return table


def run_cases(cases: Sequence[Case], *, timeout_s: float) -> Iterator[Result]:
    """Yield the result of every case; what compiles has a process of its own."""
    counted = [case for case in cases if case.backend == COUNT]
    timed = [case for case in cases if case.backend != COUNT]
    for some, number in ((counted, len(MODELS)), (timed, 1)):
        for case, result in run_apart(run_case, some, timeout_s=timeout_s, cases_per_process=number):
            yield Result(case=case, problem=f"the process {result}") if isinstance(result, str) else result


def run_case(case: Case) -> Result:
    """Train the model of `case`, with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        for variable in ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"):
            os.environ[variable] = str(Path(folder) / variable)
        try:
            return _take_steps(case)
        except Exception as error:  # whatever it is, it is the result
            return Result(case=case, problem=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")


def _take_steps(case: Case) -> Result:
    import torch
    from torch._dynamo.utils import counters

    from apollo_compile.torch_bridge.fragments import describe_fragments
    from apollo_compile.torch_bridge.graph_breaks import find_break
    from benchmarks.sweep import build_model

    torch._dynamo.reset()
    counters.clear()
    workload = build_model(case.model)
    breaks = []

    def count(graph_module: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        breaks.append(find_break(graph_module, str(len(breaks))))
        return graph_module.forward

    compiled = torch.compile(workload.model, backend=count if case.backend == COUNT else case.backend)
    taken = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        workload.loss(compiled(**workload.inputs)).backward()
        taken.append(round(time.perf_counter() - begin, 2))
        workload.model.zero_grad(set_to_none=True)
    line = describe_fragments(workload.model, len(breaks), [each for each in breaks if each is not None], is_over=True)
    named = re.search("; compile (.+) instead", line)
    return Result(
        case=case,
        num_graphs=counters["stats"]["unique_graphs"],
        num_breaks=sum(counters["graph_break"].values()),
        step_s=() if case.backend == COUNT else tuple(taken),
        instead=named[1] if named else "",
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fragments", description="Count graphs of models.")
    parser.add_argument("--only", type=names_of(MODELS), default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--backends", type=names_of(BACKENDS), default=list(BACKENDS), help=", ".join(BACKENDS))
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds after which a model hangs")
    parser.add_argument("--json", type=Path, help="write results there; what it has is not run again")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
