"""Compare whole steps of several ranks with DistributedDataParallel or FSDP2 and Inductor, in turns.

    python -m benchmarks.ranks --wrappers ddp,fsdp --workloads clip,chain --microbatches 1,2 --rounds 20 --json out.json

Ranks are processes of this machine over gloo, each with its share of the cores. Both variants train copies of a
workload with AdamW: `torch.compile` of the wrapped model, which communicates gradients in the backward of the last
micro-batch, and `apollo_compile.compile_step` of the wrapped model. FSDP2 shards every child of the model. They take
turns of a few steps; ranks begin a turn together, and the times are those of rank 0. The ratio is that of the medians,
with a 95 % interval over rounds: above 1, the compiled step is faster.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

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
    parser.add_argument("--wrappers", default="ddp", help="ddp, fsdp, or both")
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
    counts = map(int, arguments.microbatches.split(","))
    for wrapper, name, count in itertools.product(WRAPPERS, arguments.workloads.split(","), counts):
        if wrapper not in arguments.wrappers.split(","):
            continue
        torch._dynamo.reset()
        line, (loop_ns, step_ns) = compare(wrapper, name, count, arguments)
        case = {"wrapper": wrapper, "workload": name, "microbatches": count}
        results.append({**case, "loop": loop_ns, "step": step_ns})
        if rank == 0:
            print(line, flush=True)
    if rank == 0 and arguments.json is not None:
        arguments.json.write_text(json.dumps(results))
    dist.destroy_process_group()


Times = tuple[list[list[int]], list[list[int]]]
"""Nanoseconds of the steps by round, of the loop and of the compiled step."""


def shard(model: nn.Module) -> nn.Module:
    """Let FSDP2 shard a model; of a parameter without dimensions, as CLIP's scale, it makes one with a dimension."""
    for parent in model.modules():
        for name, parameter in list(parent.named_parameters(recurse=False)):
            if not parameter.dim():
                setattr(parent, name, nn.Parameter(parameter.detach()[None]))
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child)
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": DistributedDataParallel, "fsdp": shard}


def compare(wrapper: str, name: str, count: int, arguments: argparse.Namespace) -> tuple[str, Times]:
    """Return a line about one workload, and the times behind it."""
    takers = []
    for make in (make_loop, make_step):
        task = build_task(name=name, size=arguments.size, batch=arguments.batch, optimizer="adamw", microbatches=count)
        assert isinstance(task, StepTask)
        takers.append(make(copy.deepcopy(task), WRAPPERS[wrapper]))
    rounds_ns: Times = ([], [])
    shown = partial(
        tqdm, desc=f"   {name} under {wrapper}", file=sys.stderr, mininterval=5, disable=dist.get_rank() > 0
    )
    for take, _ in takers:
        for _ in shown(range(WARM_STEPS)):
            take()
    for number in shown(range(arguments.rounds)):
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
        f"{wrapper} with Inductor {format_ns(round(base.median_ns))}, step {format_ns(round(found.median_ns))}, "
        f"{found.speedup:.3f}x ({found.speedup_low:.3f} .. {found.speedup_high:.3f}); {'; '.join(takers[1][1]())}"
    )
    return line, rounds_ns


Taker = tuple[Callable[[], Any], Callable[[], list[str]]]
"""Takes a step, and says how it does."""


def make_loop(task: StepTask, wrap: Callable[[nn.Module], nn.Module]) -> Taker:
    """Return the loop over micro-batches, with the wrapped model compiled by Inductor."""
    model = wrap(task.model)
    task = dataclasses.replace(task, model=model)
    optimizer, compiled = make_optimizer(task), cast(nn.Module, torch.compile(model))

    def take() -> None:
        optimizer.zero_grad()
        parts = split_evenly(task.batch, task.microbatches)
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(is_last)
            with model.no_sync() if isinstance(model, DistributedDataParallel) and not is_last else nullcontext():
                (task.loss_fn(compiled, part) / len(parts)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return take, list


def make_step(task: StepTask, wrap: Callable[[nn.Module], nn.Module]) -> Taker:
    """Return the compiled step."""
    task = dataclasses.replace(task, model=wrap(task.model))
    step = apollo_compile.compile_step(task.model, task.loss_fn, make_optimizer(task), microbatches=task.microbatches)
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
