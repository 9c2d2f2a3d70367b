"""Encoders in the bubbles of a real pipeline, with bodies that sleep: what placement alone is worth, and the simulator.

    python -m benchmarks.bubbles

Ranks are processes over gloo that run torch's own pipeline. Stages and encoders sleep for as long as they are said to
take, so that any number of ranks is honest on two cores. Three placements take turns: the encoder on the first stage,
in front of every forward; all encoder work first and last, evenly divided; and the planner's. Beside each is what the
event simulation says of the same order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from apollo_compile.distributed.fill_bubbles import BubbleEncoder, Orders, fill_bubbles
from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.schedules import one_forward_one_backward
from apollo_compile.distributed.pipeline.simulate import end_of, orders_of, simulate
from apollo_compile.distributed.pipeline.values import Encoder, Kind, Op, Schedule, StageTimes, one_replica_per_rank
from apollo_compile.units import NS_PER_MS, NS_PER_S

FORWARD_MS, BACKWARD_MS, ENCODER_FORWARD_MS, ENCODER_BACKWARD_MS = 80, 160, 40, 80
SEGMENTS = 2
TRANSFER_NS = NS_PER_MS
PLACEMENTS = ("on the first stage", "first and last", "in bubbles")

Placement = tuple[Orders, tuple[tuple[int, ...], ...]]


class _Sleep(torch.autograd.Function):
    """Hands on a tensor and its gradient after a while."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        """Sleep."""
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Sleep."""
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Sleeper(nn.Module):
    """A module that takes a given time; features are added to its input."""

    def __init__(self, forward_ns: int, backward_ns: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.durations = forward_ns / NS_PER_S, backward_ns / NS_PER_S

    def forward(self, x: torch.Tensor, features: torch.Tensor | None = None) -> torch.Tensor:
        """Return the input, scaled."""
        if features is not None:
            x = x + features
        return _Sleep.apply(x * self.scale, *self.durations)


def make_problem(num_ranks: int, num_microbatches: int, scale: float) -> tuple[Schedule, StageTimes, Encoder]:
    """Return the pipeline, its durations and the encoder beside it."""
    unit = NS_PER_MS * scale
    schedule = one_forward_one_backward(num_ranks, num_microbatches)
    times = StageTimes(
        forward_ns=(round(FORWARD_MS * unit),) * num_ranks,
        backward_ns=(round(BACKWARD_MS * unit),) * num_ranks,
        transfer_ns=TRANSFER_NS,
    )
    encoder = Encoder(
        name="features",
        forward_ns=((round(ENCODER_FORWARD_MS * unit / SEGMENTS),) * SEGMENTS,),
        backward_ns=((round(ENCODER_BACKWARD_MS * unit / SEGMENTS),) * SEGMENTS,),
        replicas=one_replica_per_rank(num_ranks),
    )
    return schedule, times, encoder


def make_placements(schedule: Schedule, times: StageTimes, encoder: Encoder) -> dict[str, Placement]:
    """Return the order of every device, and the replica of every micro-batch, by placement."""
    microbatches = range(schedule.num_microbatches)

    def segments(kind: Kind, microbatch: int) -> list[Op]:
        return [Op(kind, microbatch, segment=segment) for segment in range(SEGMENTS)]

    first: list[Op] = []
    for op in schedule.orders[0]:
        before = segments(Kind.ENCODER_FORWARD, op.microbatch) if op.kind is Kind.FORWARD else []
        after = segments(Kind.ENCODER_BACKWARD, op.microbatch) if op.kind is Kind.BACKWARD else []
        first += [*before, op, *after]
    around = [
        (
            *(op for index in microbatches[rank :: schedule.num_ranks] for op in segments(Kind.ENCODER_FORWARD, index)),
            *order,
            *(
                op
                for index in microbatches[rank :: schedule.num_ranks]
                for op in segments(Kind.ENCODER_BACKWARD, index)
            ),
        )
        for rank, order in enumerate(schedule.orders)
    ]
    plan = fill(schedule, times, (encoder,))
    return {
        PLACEMENTS[0]: ((tuple(first), *schedule.orders[1:]), ((0,) * len(microbatches),)),
        PLACEMENTS[1]: (tuple(around), (tuple(index % schedule.num_ranks for index in microbatches),)),
        PLACEMENTS[2]: (orders_of(plan), plan.replica_of),
    }


def run_rank(rank: int, port: int, folder: str, args: argparse.Namespace) -> None:
    """Run every placement in turns; the first rank writes how long the steps took."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
    schedule, times, encoder = make_problem(args.ranks, args.microbatches, args.scale)
    steps = {}
    for name, (orders, replica_of) in make_placements(schedule, times, encoder).items():
        stage = PipelineStage(
            Sleeper(times.forward_ns[rank], times.backward_ns[rank]), rank, args.ranks, torch.device("cpu")
        )
        sleeping = BubbleEncoder(
            segments=[
                Sleeper(forward_ns, backward_ns)
                for forward_ns, backward_ns in zip(encoder.forward_ns[0], encoder.backward_ns[0], strict=True)
            ],
            feeds="features",
            features=torch.zeros(1, 4),
            forward_ns=encoder.forward_ns[0],
            backward_ns=encoder.backward_ns[0],
        )
        made = Schedule1F1B(stage, args.microbatches, loss_fn=lambda output, target: ((output - target) ** 2).sum())
        steps[name] = fill_bubbles(made, sleeping, times=times, orders=orders, replica_of=replica_of)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.rounds + 1):  # the first one infers shapes
        for name, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            given = (torch.zeros(args.microbatches, 4),) if rank == 0 else ()
            last = {"target": torch.ones(args.microbatches, 4)} if rank == args.ranks - 1 else {}
            step(*given, encoder_inputs={"features": torch.ones(args.microbatches, 4)}, **last)
            dist.barrier()
            if turn:
                found[name].append(time.perf_counter() - begin)
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of all steps, by placement."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run_rank, (store.port, folder, args), nprocs=args.ranks, start_method="spawn")
        found: dict[str, list[float]] = json.loads((Path(folder) / "seconds.json").read_text())
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4, help="processes; default: 4")
    parser.add_argument("--microbatches", type=int, default=8, help="micro-batches of a step; default: 8")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of every placement; default: 5")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all durations; default: 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds of all steps")
    args = parser.parse_args(arguments)
    schedule, times, encoder = make_problem(args.ranks, args.microbatches, args.scale)
    seconds = measure(args)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = []
    for name, (orders, replica_of) in make_placements(schedule, times, encoder).items():
        bars = simulate(schedule, times, orders=orders, encoders=(encoder,), replica_of=replica_of)
        simulated = end_of(bars, times) / NS_PER_S
        rows.append(
            (
                name,
                f"{1000 * medians[name]:.0f} ms",
                f"{1000 * min(seconds[name]):.0f} .. {1000 * max(seconds[name]):.0f}",
                f"{1000 * simulated:.0f} ms",
                f"{medians[name] / simulated - 1:+.1%}",
                f"{medians[PLACEMENTS[-1]] / medians[name]:.3f}x",
            )
        )
    headers = ("encoder work", "median step", "min .. max", "simulated", "measured over it", "in bubbles over it")
    print(tabulate(rows, headers=headers, disable_numparse=True))
    if args.json is not None:
        args.json.write_text(json.dumps({"ranks": args.ranks, "microbatches": args.microbatches, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
