"""How evenly batch samplers load ranks: predicted, with bodies that sleep their cost, and how long planning takes.

    python -m benchmarks.balance

Samples are invented: texts of log-normal length, and images of several sizes in a share of them; a sample costs an
encoder linear and quadratic time in its patches, and a language model the same in its tokens. All samplers get the same
samples and seed, so that the samples of a step are the same: `DistributedSampler`; longest-first on tokens; Hugging
Face's `BatchRebalanceSampler` (on tokens, with its fixed formula); longest-first on the sum of costs; and apollo's.

A rank that sleeps stands for a device that computes: processes over gloo, which meet after each phase. Samplers take
turns step by step.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from numpy.typing import NDArray
from tabulate import tabulate
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from apollo_compile.distributed.loader.sampler import BalancedBatchSampler

PATCHES = (256, 576, 1024, 2304)
"""Patches of images."""

BASELINE, OURS, PEER = "DistributedSampler", "apollo", "BatchRebalanceSampler"

Steps = list[list[list[int]]]
"""Samples by step and rank."""


class Samples(NamedTuple):
    """Invented samples."""

    tokens: NDArray[np.int64]
    """That the language model sees, those of images included."""
    seconds: NDArray[np.float64]
    """(samples, 2): encoder, language model."""


def invent_samples(number: int, share: float, seed: int = 0, scale: float = 1.0) -> Samples:
    """Return samples of which a `share` has an image; their seconds are multiplied by `scale`."""
    random = np.random.default_rng(seed)
    text = np.minimum(random.lognormal(6.0, 0.8, number), 8192).astype(np.int64) + 1
    patches = np.where(random.random(number) < share, random.choice(PATCHES, number), 0)
    tokens = text + patches // 4
    encoder = patches * 3e-6 + patches**2 * 1e-9
    language = tokens * 8e-6 + tokens**2 * 6e-10
    return Samples(tokens, np.stack([encoder, language], axis=1) * scale)


# -------------------------------------------------------------------------------------------------------- samplers


def in_turn(samples: Samples, ranks: int, batch: int) -> Steps:
    """Return the batches of `DistributedSampler`, on every rank in a sampler of its own."""
    whole = torch.utils.data.TensorDataset(torch.empty(len(samples.tokens)))

    def batches(rank: int) -> BatchSampler:
        own = DistributedSampler(whole, ranks, rank, seed=0, drop_last=True)
        return BatchSampler(own, batch, drop_last=True)

    return _transposed([list(batches(rank)) for rank in range(ranks)])


def rebalanced(samples: Samples, ranks: int, batch: int) -> Steps:
    """Return the batches of Hugging Face's sampler."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    lengths = samples.tokens.tolist()
    return _transposed(
        [list(BatchRebalanceSampler(lengths, ranks * batch, ranks, 1, seed=0, rank=rank)) for rank in range(ranks)]
    )


def balanced(samples: Samples, ranks: int, batch: int) -> Steps:
    """Return the batches of apollo's sampler."""
    return _transposed(
        [
            list(BalancedBatchSampler(samples.seconds, batch_size=batch, num_replicas=ranks, rank=rank, drop_last=True))
            for rank in range(ranks)
        ]
    )


def longest_first(weights: Callable[[Samples], NDArray[Any]], samples: Samples, ranks: int, batch: int) -> Steps:
    """Return batches in which every sample, by descending weight, goes to the rank with the least weight so far."""
    weight = weights(samples)
    found: Steps = []
    for step in in_turn(samples, ranks, batch):
        bins: list[list[int]] = [[] for _ in range(ranks)]
        heap = [(0.0, rank) for rank in range(ranks)]
        for sample in sorted((each for own in step for each in own), key=lambda each: -weight[each]):
            load, rank = heapq.heappop(heap)
            bins[rank].append(sample)
            heapq.heappush(heap, (load + float(weight[sample]), rank))
        found.append(bins)
    return found


SAMPLERS: dict[str, Callable[[Samples, int, int], Steps]] = {
    BASELINE: in_turn,
    "longest-first, tokens": functools.partial(longest_first, lambda samples: samples.tokens),
    PEER: rebalanced,
    "longest-first, costs": functools.partial(longest_first, lambda samples: samples.seconds.sum(axis=1)),
    OURS: balanced,
}


def _transposed(by_rank: Sequence[list[list[int]]]) -> Steps:
    return [list(step) for step in zip(*by_rank, strict=True)]


def loads_of(steps: Steps, samples: Samples) -> NDArray[np.float64]:
    """Return the (steps, ranks, phases) seconds of batches."""
    return np.array([[samples.seconds[own].sum(axis=0) for own in step] for step in steps])


def slowest_over_mean(loads: NDArray[np.float64]) -> float:
    """Return the seconds of all steps over what they would be if every phase took as long on every rank."""
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum())


# ---------------------------------------------------------------------------------------------------------- sleeping


def sleep_steps(loads: dict[str, NDArray[np.float64]]) -> dict[str, list[float]]:
    """Return the measured seconds of every step, by sampler; one process per rank."""
    ranks = next(iter(loads.values())).shape[1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds.json"
        mp.spawn(_sleep, (ranks, port, loads, path), nprocs=ranks)
        found: dict[str, list[float]] = json.loads(path.read_text())
    return found


def _sleep(rank: int, ranks: int, port: int, loads: dict[str, NDArray[np.float64]], path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    seconds: dict[str, list[float]] = {name: [] for name in loads}
    gradient = torch.zeros(1)
    for step in range(len(next(iter(loads.values())))):
        for name, own in loads.items():
            dist.barrier()
            begin = time.perf_counter()
            for phase in own[step, rank]:
                time.sleep(phase)
                dist.all_reduce(gradient)
            seconds[name].append(time.perf_counter() - begin)
    if rank == 0:
        path.write_text(json.dumps(seconds))
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------ report


def compare(ranks: int, share: float, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per sampler."""
    batch = args.batch
    samples = invent_samples(max(args.samples, args.steps * ranks * batch), share)
    loads = {name: loads_of(sampler(samples, ranks, batch), samples) for name, sampler in SAMPLERS.items()}
    measured: dict[str, list[float]] = {}
    if args.steps:
        scale = args.sleep_ms / 1000 / np.mean(loads[OURS].mean(axis=1).sum(axis=1))
        measured = sleep_steps({name: own[: args.steps] * scale for name, own in loads.items()})
    for name, own in loads.items():
        row = {"ranks": ranks, "images": share, "sampler": name, "predicted": slowest_over_mean(own)}
        if measured:
            row["step_ms"] = statistics.fmean(measured[name]) * 1000
            row["faster"] = statistics.fmean(measured[BASELINE]) / statistics.fmean(measured[name])
        yield row


def time_planning(number: int, ranks: int, batch: int) -> float:
    """Return the microseconds of one core per sample that one rank plans for an epoch."""
    samples = invent_samples(number, 0.5)
    begin = time.process_time()
    sampler = BalancedBatchSampler(samples.seconds, batch_size=batch, num_replicas=ranks, rank=0)
    given = sum(len(own) for own in sampler)
    assert abs(given * ranks - number) < number / 4
    return (time.process_time() - begin) / number * 1e6


def main(arguments: list[str] | None = None) -> None:
    """Compare, time, print and write."""
    args = _parse(arguments)
    rows = [row for ranks in args.ranks for share in args.shares for row in compare(ranks, share, args)]
    headers = {"predicted": "slowest/mean", "step_ms": "step, ms", "faster": f"over {BASELINE}"}
    print(
        tabulate([{headers.get(key, key): value for key, value in row.items()} for row in rows], "keys", floatfmt=".3f")
    )
    planning = [
        {"ranks": ranks, "samples": args.planned, "us_per_sample": time_planning(args.planned, ranks, args.batch)}
        for ranks in args.ranks
        if args.planned
    ]
    for row in planning:
        print(
            f"{row['ranks']} ranks: {row['samples']} samples planned at {row['us_per_sample']:.2f} us of one core each"
        )
    args.json.write_text(json.dumps({"batch": args.batch, "rows": rows, "planning": planning}, indent=1) + "\n")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.balance", description="Compare samplers.")
    parser.add_argument("--ranks", type=_numbers, default=[2, 4], help="numbers of ranks, comma-separated")
    parser.add_argument("--shares", type=_shares, default=[0.1, 0.5, 0.9], help="shares of samples with an image")
    parser.add_argument("--batch", type=int, default=8, help="samples of a rank and step, on average")
    parser.add_argument("--samples", type=int, default=20_000, help="samples of the prediction")
    parser.add_argument("--steps", type=int, default=40, help="steps that sleep, per sampler; 0 predicts only")
    parser.add_argument("--sleep-ms", type=float, default=50.0, help="mean sleep of a rank in a step")
    parser.add_argument("--planned", type=int, default=1_000_000, help="samples of which planning is timed; 0 for none")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/balance.json"), help="file to write")
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _shares(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
