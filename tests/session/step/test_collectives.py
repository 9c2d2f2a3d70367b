"""Buckets of gradients, which ranks average."""

from __future__ import annotations

import itertools
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from apollo_compile.session.step.collectives import fill_buckets
from tests.end_to_end import twins


def test_buckets_are_filled_in_order() -> None:
    """Each of one dtype, and of the least size unless nothing is left."""
    parameters = [torch.zeros(size, dtype=torch.int8) for size in [10, 30, 5, 5, 100, 1]]
    assert fill_buckets(range(6), parameters, 40) == [[0, 1], [2, 3, 4], [5]]
    parameters[3] = parameters[3].to(torch.uint8)
    assert fill_buckets(range(6), parameters, 40) == [[0, 1], [2, 4], [3], [5]]
    for least in range(1, 200, 7):
        assert sorted(itertools.chain(*fill_buckets(range(6), parameters, least))) == list(range(6))


def test_a_step_under_ddp_on_one_rank_is_a_program() -> None:
    """As with `torchrun --nproc-per-node 1`: there is nothing to average, and it trains as the module itself does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (model, own), (expected, others) = twins.make_towers_twice(partial(torch.optim.SGD, lr=0.01))
        step = twins.compile_step(DistributedDataParallel(model), twins.towers_loss, own, options=twins.EAGER)
        for seed in range(6):
            step(twins.towers_batch(seed))
            twins.run_loop(expected, twins.towers_loss, [twins.towers_batch(seed)], others)
        torch.testing.assert_close(twins.state_of(model), twins.state_of(expected), rtol=1e-4, atol=1e-5)
        assert twins.ran_as_program(step)
    finally:
        dist.destroy_process_group()
