"""Forward and backward of a micro-batch as one segment of a step, which code for both together runs.

join_micro_batch(graph, run, ...) -> Joint
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apollo_compile.device.target import CompiledBody, Run
from apollo_compile.ir import SegmentGraph
from apollo_compile.passes.join import join_segments


@dataclass(frozen=True, kw_only=True, slots=True)
class Joint:
    """A micro-batch as one segment: state, inputs and weight in; loss and gradients out."""

    graph: SegmentGraph
    body: CompiledBody


def join_micro_batch(graph: SegmentGraph, run: Run, takes: Sequence[int], makes: Sequence[int]) -> Joint:
    """Return a micro-batch as one segment.

    Arguments:
        graph: of a step of one micro-batch, without an optimizer.
        run: computes the same.
        takes: places of the inputs of the graph among those of `run`.
        makes: places of its outputs among those of `run`.
    """
    joined, places = join_segments(graph)

    def body(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        taken: list[Any] = [None] * len(arguments)
        for place, argument in zip(takes, arguments, strict=True):
            taken[place] = argument
        arguments.clear()
        made = run(taken)
        return [made[makes[place]] for place in places]

    return Joint(graph=joined, body=CompiledBody(function=body))
