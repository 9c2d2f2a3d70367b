"""How long the first training step of a process takes, compile included, and how large the process gets.

    python -m benchmarks.first_step --workloads clip,two_tower --warm 3 --json out.json

cold    no process before has compiled anything: every cache, the compiler's precompiled headers among them, is empty
warm    another process took that step before; of `--warm` such processes, in turns with Inductor's, the median

Peak memory is that of a warm process after `STEPS` steps, before which autotuning is not over. A cold process of apollo
trains on until nothing is being decided: `later` is how long one of these steps waited for Inductor to compile the
whole graphs, for the comparison, and 0 where the plan was so far ahead that it did not have to.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from apollo_compile.tools.bench.child import MAX_WARMUP
from apollo_compile.tools.bench.facts import machine_facts
from apollo_compile.units import NS_PER_S, format_bytes
from benchmarks.run import names_of
from benchmarks.workloads.specs import SPECS

BACKENDS = ("inductor", "apollo")

STEPS = 5


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write JSON; return the exit code."""
    args = _parse(arguments)
    if args.child is not None:
        print(json.dumps(take_steps(args.workloads[0], args.size, args.child, settle=args.settle)))
        return 0
    found: list[dict[str, Any]] = []
    with tqdm(total=len(args.workloads) * len(BACKENDS) * (1 + args.warm), unit="process") as progress:
        for name in args.workloads:
            found.append({"workload": name, **measure(name, args.size, args.warm, progress)})
            progress.write(format_rows(found))
            if args.json is not None:
                content = {"machine": machine_facts(), "size": args.size, "warm": args.warm, "workloads": found}
                args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(name: str, size: str, warm: int, progress: Any) -> dict[str, Any]:
    """Return cold and warm seconds, and bytes, by backend."""
    found: dict[str, Any] = {
        backend: {"cold_s": 0.0, "later_s": 0.0, "warm_s": [], "peak_bytes": []} for backend in BACKENDS
    }
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(1 + warm):
            for backend in BACKENDS if turn % 2 else reversed(BACKENDS):
                got = _in_a_process(name, size, backend, Path(folder) / backend, settle=turn == 0)
                if turn == 0:
                    found[backend]["cold_s"] = got["first_step_s"]
                    found[backend]["later_s"] = got["later_s"]
                else:
                    found[backend]["warm_s"].append(got["first_step_s"])
                    found[backend]["peak_bytes"].append(got["peak_bytes"])
                progress.update()
    return found


def _in_a_process(name: str, size: str, backend: str, folder: Path, *, settle: bool) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("APOLLO_")}
    places = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp"}
    for variable, place in places.items():
        (folder / place).mkdir(exist_ok=True)
        environment[variable] = str(folder / place)
    command = [sys.executable, "-m", "benchmarks.first_step", "--workloads", name, "--size", size, "--child", backend]
    command += ["--settle"] if settle else []
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    got: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return got


def take_steps(name: str, size: str, backend: str, *, settle: bool) -> dict[str, Any]:
    """Build a workload and train it for some steps, or until nothing is being decided.

    Return the seconds of the first step, how long a later one waited for Inductor, and the largest resident memory.
    """
    import torch

    from apollo_compile.session.registry import find_models, is_settled
    from benchmarks.workloads import build

    workload = build(name, size)
    compiled = torch.compile(workload.model, backend=backend)
    taken: list[float] = []
    while len(taken) < STEPS or (settle and len(taken) < MAX_WARMUP and not is_settled(workload.model)):
        begin = time.perf_counter()
        workload.loss(compiled(**workload.inputs)).backward()
        taken.append(time.perf_counter() - begin)
        workload.model.zero_grad(set_to_none=True)
    verdicts = [verdict for model in find_models(workload.model) for _, verdict in model.verdicts]
    return {
        "first_step_s": taken[0],
        "later_s": sum(verdict.prepare_ns for verdict in verdicts) / NS_PER_S,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def format_rows(found: list[dict[str, Any]]) -> str:
    """Return one row per workload: seconds and bytes of Inductor and apollo, and their ratios."""
    rows = []
    for entry in found:
        row = [entry["workload"]]
        for values in (
            [entry[backend]["cold_s"] for backend in BACKENDS],
            [statistics.median(entry[backend]["warm_s"]) for backend in BACKENDS],
        ):
            row += [*(f"{value:.1f} s" for value in values), f"{values[1] / values[0]:.2f}x"]
        row.insert(3, f"{entry['apollo']['later_s']:.1f} s")
        peaks = [statistics.median(entry[backend]["peak_bytes"]) for backend in BACKENDS]
        row += [*(format_bytes(round(peak)) for peak in peaks), f"{peaks[1] / peaks[0]:.2f}x"]
        rows.append(row)
    headers = [f"{what}{who}" for what in ("cold ", "warm ", "peak ") for who in ("Inductor", "apollo", "ratio")]
    headers.insert(2, "later apollo")
    table: str = tabulate(rows, headers=["", *headers], colalign=("left",), disable_numparse=True)
    return f"\n{table}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step", description="Measure first steps.")
    parser.add_argument("--workloads", type=names_of(SPECS), default=list(SPECS), help=", ".join(SPECS))
    parser.add_argument("--size", choices=("tiny", "small", "deep"), default="small", help="deep: two_tower's")
    parser.add_argument("--warm", type=_at_least_one, default=3, help="warm processes per backend")
    parser.add_argument("--json", type=Path, help="write everything there, machine and versions included")
    parser.add_argument("--child", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--settle", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes, which is at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
