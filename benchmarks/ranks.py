"""Compare whole steps of several ranks with DistributedDataParallel and Inductor, in turns.

    python -m benchmarks.ranks --workloads clip,chain --microbatches 1,2 --rounds 20 --json out.json

Ranks are processes of this machine over gloo, each with its share of the cores. Both variants train copies of a
workload with AdamW: `torch.compile` of the wrapped model, whose reducer communicates in the backward of the last
micro-batch, and `apollo_compile.compile_step` of the wrapped model. They take turns of a few steps; ranks begin a turn
together, and the times are those of rank 0. The ratio is that of the medians, with a 95 % interval over rounds: above
1, the compiled step is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import apollo_compile
from apollo_compile.session.step.split import split_evenly
from apollo_compile.tools.bench.numbers import summarize
from apollo_compile.units import format_ns
from benchmarks.harness.whole_steps import StepTask, build_task, make_optimizer

STEPS_PER_TURN = 3
WARM_STEPS = 10


def main(arguments: list[str] | None = None) -> int:
    """Run the ranks; the first prints a line for every case, and writes the times of all. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description="Compare steps of several ranks.")
    parser.add_argument("--workloads", default="clip,chain")
    parser.add_argument("--size", choices=("tiny", "small"), default="small")
    parser.add_argument("--batch", type=int, default=8, help="samples of a step on one rank")
    parser.add_argument("--microbatches", default="1,2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the times there, in nanoseconds by round")
    args = parser.parse_args(arguments)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # any free port
    mp.spawn(run_rank, (store.port, args), nprocs=args.ranks)
    return 0


def run_rank(rank: int, port: int, arguments: argparse.Namespace) -> None:
    """Take the steps of one rank."""
    results = []
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(arguments.ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // arguments.ranks))
    torch._dynamo.config.capture_scalar_outputs = True
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    for name, count in itertools.product(arguments.workloads.split(","), map(int, arguments.microbatches.split(","))):
        torch._dynamo.reset()
        line, rounds_ns = compare(name, count, arguments)
        results.append({"workload": name, "microbatches": count, "loop": rounds_ns[0], "step": rounds_ns[1]})
        if rank == 0:
            print(line, flush=True)
    if rank == 0 and arguments.json is not None:
        arguments.json.write_text(json.dumps(results))
    dist.destroy_process_group()


Times = tuple[list[list[int]], list[list[int]]]
"""Nanoseconds of the steps by round, of the loop and of the compiled step."""


def compare(name: str, count: int, arguments: argparse.Namespace) -> tuple[str, Times]:
    """Return a line about one workload, and the times behind it."""
    takers = []
    for make in (make_loop, make_step):
        task = build_task(name=name, size=arguments.size, batch=arguments.batch, optimizer="adamw", microbatches=count)
        assert isinstance(task, StepTask)
        takers.append(make(copy.deepcopy(task)))
    rounds_ns: Times = ([], [])
    for take, _ in takers:
        for _ in range(WARM_STEPS):
            take()
    for number in range(arguments.rounds):
        for place in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            taken = []
            for _ in range(STEPS_PER_TURN):
                begin = time.perf_counter_ns()
                takers[place][0]()
                taken.append(time.perf_counter_ns() - begin)
            rounds_ns[place].append(taken)
    found, base = summarize(rounds_ns[1], rounds_ns[0]), summarize(rounds_ns[0], rounds_ns[0])
    line = (
        f"{name}, {arguments.size}, batch {arguments.batch} in {count} on {arguments.ranks} ranks: "
        f"DDP with Inductor {format_ns(round(base.median_ns))}, step {format_ns(round(found.median_ns))}, "
        f"{found.speedup:.3f}x ({found.speedup_low:.3f} .. {found.speedup_high:.3f}); {'; '.join(takers[1][1]())}"
    )
    return line, rounds_ns


Taker = tuple[Callable[[], Any], Callable[[], list[str]]]
"""Takes a step, and says how it does."""


def make_loop(task: StepTask) -> Taker:
    """Return the loop over micro-batches, with the wrapped model compiled by Inductor."""
    model = DistributedDataParallel(task.model)
    optimizer, compiled = make_optimizer(task), cast(nn.Module, torch.compile(model))

    def take() -> None:
        optimizer.zero_grad()
        parts = split_evenly(task.batch, task.microbatches)
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                (task.loss_fn(compiled, part) / len(parts)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return take, list


def make_step(task: StepTask) -> Taker:
    """Return the compiled step."""
    model = DistributedDataParallel(task.model)
    step = apollo_compile.compile_step(model, task.loss_fn, make_optimizer(task), microbatches=task.microbatches)
    return (lambda: step(task.batch)), lambda: [*step.verdicts, *map(describe_sums, step.tuners)]


def describe_sums(tuner: Any) -> str:
    """Return how many sums of gradients a program has, and on which lanes."""
    compilation = tuner.program.variants.compilation
    lanes = [
        compilation.plan.assignments[segment.id].lane
        for segment in compilation.partition.graph.segments
        if segment.has_collective
    ]
    return f"{len(lanes)} sums on lanes {sorted(set(lanes))} of {len(compilation.plan.lanes)}"


if __name__ == "__main__":
    main()
