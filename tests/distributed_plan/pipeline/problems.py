"""Random pipelines with encoders, small enough for slow oracles."""

from __future__ import annotations

import random
from typing import NamedTuple

from apollo_compile.distributed.pipeline.schedules import gpipe, interleaved, one_forward_one_backward
from apollo_compile.distributed.pipeline.values import Encoder, PipelineSchedule, StageTimes


class Problem(NamedTuple):
    """What `fill` takes."""

    schedule: PipelineSchedule
    times: StageTimes
    encoders: tuple[Encoder, ...]


def random_schedule(rng: random.Random) -> PipelineSchedule:
    """Return a schedule of one to four ranks."""
    ranks, rounds = rng.randint(1, 4), rng.randint(1, 3)
    match rng.choice(("gpipe", "1f1b", "interleaved")):
        case "gpipe":
            return gpipe(ranks, rng.randint(1, 6))
        case "1f1b":
            return one_forward_one_backward(ranks, rng.randint(1, 8))
        case _:
            return interleaved(ranks, rng.randint(1, 3), ranks * rounds)


def random_times(rng: random.Random, schedule: PipelineSchedule) -> StageTimes:
    """Return durations of tens of nanoseconds, of unequal stages or equal ones."""
    forward = [rng.choice((20, 30, rng.randint(15, 40)))] * schedule.num_stages
    if rng.random() < 0.5:
        forward = [rng.randint(15, 40) for _ in forward]
    return StageTimes(
        forward_ns=tuple(forward),
        backward_ns=tuple(rng.choice((1, 2, 3)) * duration for duration in forward),
        transfer_ns=rng.choice((0, 0, 3)),
        lead_ns=rng.choice((0, 0, 25)),
        trail_ns=rng.choice((0, 0, 45)),
    )


def random_encoder(rng: random.Random, schedule: PipelineSchedule, *, columns: int = 1) -> Encoder:
    """Return an encoder of one or more stages whose replicas fill all devices, or one whole one on any rank."""
    ranks = schedule.num_ranks
    depth = rng.choice([depth for depth in range(1, ranks + 1) if ranks % depth == 0])
    forward = tuple(tuple(rng.choice((3, 3, 10)) for _ in range(rng.randint(1, 4))) for _ in range(depth))
    backward = tuple(tuple(2 * duration for duration in stage) for stage in forward[::-1])
    replicas = [
        tuple(column * ranks + first + stage for stage in range(depth))
        for column in range(columns)
        for first in range(0, ranks, depth)
    ]
    if rng.random() < 0.2:
        replicas = replicas[:1]
    return Encoder(
        name=rng.choice(("vision", "audio")),
        forward_ns=forward,
        backward_ns=() if rng.random() < 0.25 else backward,
        replicas=tuple(replicas),
        feeds=rng.choice((0, 0, rng.randrange(schedule.num_stages))),
    )


def random_problem(seed: int, *, columns: int = 1) -> Problem:
    """Return a pipeline with one or two encoders."""
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    times = random_times(rng, schedule)
    encoders = tuple(random_encoder(rng, schedule, columns=columns) for _ in range(rng.choice((1, 1, 2))))
    return Problem(schedule, times, encoders)
