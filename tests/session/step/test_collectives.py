"""Buckets of gradients, which ranks average."""

from __future__ import annotations

import itertools

import torch

from apollo_compile.session.step.collectives import fill_buckets


def test_buckets_are_filled_in_order() -> None:
    """Each of one dtype, and of the least size unless nothing is left."""
    parameters = [torch.zeros(size, dtype=torch.int8) for size in [10, 30, 5, 5, 100, 1]]
    assert fill_buckets(range(6), parameters, 40) == [[0, 1], [2, 3, 4], [5]]
    parameters[3] = parameters[3].to(torch.uint8)
    assert fill_buckets(range(6), parameters, 40) == [[0, 1], [2, 4], [3], [5]]
    for least in range(1, 200, 7):
        assert sorted(itertools.chain(*fill_buckets(range(6), parameters, least))) == list(range(6))
