"""Estimated training steps beside measured ones, on one process with all cores and on two with half of them each.

    python -m benchmarks.estimates --workloads clip,act,chain --size small --batch 8 --rounds 3

Each case runs in processes of its own under torchrun: forward, backward and AdamW, by `compile_step`. Two processes use
DistributedDataParallel over gloo, and half of the batch each. The number is the median step of the slower process,
after autotuning has settled. Estimates use the link that two processes measure first, and the profile of the machine,
which is measured before each round: shared machines change by a quarter within minutes. The table has the median round,
and the range of the errors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate

import apollo_compile
from apollo_compile.cost_model.collectives import Link
from apollo_compile.device.cpu.discover import discover_profile
from apollo_compile.distributed.link import measure_link
from apollo_compile.tools.cli import main as apollo
from apollo_compile.tools.estimate import estimate
from apollo_compile.tools.targets import ModelCall
from benchmarks.harness.whole_steps import StepTask, build_task, make_optimizer
from benchmarks.workloads import build

LINK = "link"
"""In place of a workload: measure the link between the processes."""

STEPS_OF_A_WARM_UP, MOST_WARM_UPS = 12, 30
"""Steps after which ranks compare whether autotuning has settled, and how often at most."""

STEPS = 30


def measure(name: str, size: str, batch: int, processes: int, cores: int) -> list[float]:
    """Return the seconds of a step in processes of their own, or their link."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "benchmarks.estimates", "--child", name, size, str(batch), str(cores)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} with {processes} processes failed: {done.stderr[-2000:]}")
    print(*(line for line in done.stderr.splitlines() if " on rank " in line), sep="\n", file=sys.stderr)
    numbers: list[float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def run_child(name: str, size: str, batch: int, cores: int) -> None:
    """Train or measure the link, and print numbers on the first rank."""
    torch.set_num_threads(cores)
    dist.init_process_group("gloo")
    if name == LINK:
        link = measure_link(dist.all_reduce, 2 * (dist.get_world_size() - 1), None, torch.device("cpu"))
        numbers = [link.latency, link.bandwidth]
    else:
        numbers = [train(name, size, batch)]
    if dist.get_rank() == 0:
        print(json.dumps(numbers), flush=True)
    dist.destroy_process_group()


def train(name: str, size: str, batch: int) -> float:
    """Return the median seconds of a step of the slower rank."""
    ranks = dist.get_world_size()
    task = build_task(name=name, size=size, batch=batch // ranks, optimizer="adamw", microbatches=1)
    assert isinstance(task, StepTask)
    model = torch.nn.parallel.DistributedDataParallel(task.model) if ranks > 1 else task.model
    step = apollo_compile.compile_step(model, task.loss_fn, make_optimizer(task))

    def timed() -> float:
        begin = time.perf_counter()
        step(task.batch)
        return time.perf_counter() - begin

    for _ in range(MOST_WARM_UPS):
        for _ in range(STEPS_OF_A_WARM_UP):
            step(task.batch)
        is_measuring = torch.tensor(apollo_compile.status(step).startswith("measuring"), dtype=torch.int32)
        dist.all_reduce(is_measuring)
        if not is_measuring:
            break
    print(f"{name} on rank {dist.get_rank()}: {apollo_compile.status(step)}", file=sys.stderr, flush=True)
    slower = torch.tensor(statistics.median(timed() for _ in range(STEPS)))
    dist.all_reduce(slower, op=dist.ReduceOp.MAX)
    return slower.item()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="clip,act,chain", help="comma-separated; default: clip,act,chain")
    parser.add_argument("--size", default="small", help="tiny, small or base; default: small")
    parser.add_argument("--batch", type=int, default=8, help="samples of a step; default: 8")
    parser.add_argument("--rounds", type=int, default=3, help="calibrations and measurements of each; default: 3")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        name, size, batch, cores = args.child
        run_child(name, size, int(batch), int(cores))
        return 0
    cores = torch.get_num_threads()
    link = Link(*measure(LINK, args.size, args.batch, 2, cores // 2))
    rows = []
    for name in args.workloads.split(","):
        workload = build(name, args.size, batch=args.batch)
        target = ModelCall(name=name, model=workload.model, args=(), kwargs=workload.inputs, loss=workload.loss)
        rounds: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
        for _ in range(args.rounds):
            if code := apollo(["calibrate"]):  # it says why
                return code
            discover_profile.cache_clear()
            devices = [(f"cpu{cores}", (1,)), (f"cpu{cores // 2}", (2,))]
            found = estimate(target, devices, link=link, max_tensor=1)  # as DDP does
            for processes, cell in zip(rounds, (cell for cell in found.cells if cell.stages == 1), strict=True):
                (measured_s,) = measure(name, args.size, args.batch, processes, cores // processes)
                rounds[processes].append((cell.step_s / measured_s - 1, measured_s))
                print(name, processes, cell.step_s * 1e3, measured_s * 1e3, file=sys.stderr, flush=True)
        for processes, results in rounds.items():
            errors = [error for error, _ in results]
            error, measured_s = sorted(results)[len(results) // 2]
            spread = f"{min(errors):+.0%} to {max(errors):+.0%}"
            rows.append((name, processes, (1 + error) * measured_s * 1e3, measured_s * 1e3, f"{error:+.0%}", spread))
        print("\n".join(f"{key}: {text}" for key, text in found.sources.items()), file=sys.stderr, flush=True)
    headers = ("workload", "processes", "estimated (ms)", "measured (ms)", "error", "rounds")
    print(tabulate(rows, headers=headers, floatfmt=".1f"))
    if args.json:
        args.json.write_text(json.dumps([dict(zip(headers, row, strict=True)) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
