"""Divide layers among the stages of a pipeline.

balance_layers(costs, num_stages) -> layers per stage
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from apollo_compile.errors import PipelinePlanError


def balance_layers(costs: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return how many layers each stage takes, in order, so that the most expensive stage is as cheap as possible.

    Raises:
        PipelinePlanError: there are fewer layers than stages.
    """
    if not 1 <= num_stages <= len(costs):
        raise PipelinePlanError(f"{len(costs)} layers cannot be divided among {num_stages} stages; use fewer stages")
    limits = range(max(costs), sum(costs) + 1)
    place = bisect.bisect_left(limits, True, key=lambda limit: len(_divide(costs, limit, num_stages)) <= num_stages)
    return tuple(_divide(costs, limits[place], num_stages))


def _divide(costs: Sequence[int], limit: int, num_stages: int) -> list[int]:
    """Return the layers per stage if each takes as many as the limit and the stages behind it allow."""
    counts: list[int] = []
    cost, count = 0, 0
    for index, layer in enumerate(costs):
        if count and (cost + layer > limit or len(costs) - index < num_stages - len(counts)):
            counts.append(count)
            cost, count = 0, 0
        cost, count = cost + layer, count + 1
    return [*counts, count]


def sum_stages(costs: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Return the cost of every stage."""
    layers = iter(costs)
    return tuple(sum(itertools.islice(layers, count)) for count in counts)
