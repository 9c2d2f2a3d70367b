"""A graph as one segment: with the graph itself as its body, a caller cannot tell it from the graph."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from apollo_compile.ir import SegmentGraph
from apollo_compile.passes.join import join_segments
from tests.builders import random_graph


def run(made: SegmentGraph, given: Sequence[int]) -> list[int | None]:
    """Compute numbers that tell of all that was read, segment by segment; return the outputs."""
    memory = dict(zip(made.inputs, given, strict=True))
    for segment in made.segments:
        read = tuple(memory[buffer] for buffer in segment.inputs)
        for place, buffer in enumerate(segment.outputs):
            memory[buffer] = hash((segment.id, place, read))
    return [None if buffer is None else memory[buffer] for buffer in made.outputs]


@pytest.mark.parametrize("seed", range(20))
def test_it_gives_what_the_graph_gives(seed: int) -> None:
    """Also where the graph returns an input, nothing, or a value twice."""
    rng = random.Random(seed)
    made = random_graph(rng, rng.randrange(1, 12))
    outputs = rng.choices([*(each.id for each in made.buffers), None], k=rng.randrange(1, 6))
    made = replace(made, outputs=(*outputs, outputs[0]))
    joined, places = join_segments(made)
    given = [rng.randrange(1000) for _ in made.inputs]
    (segment,) = joined.segments
    memory = dict(zip(joined.inputs, given, strict=True))
    whole = run(made, [memory[buffer] for buffer in segment.inputs])
    assert len(places) == len(segment.outputs) == len(set(segment.outputs))
    memory.update(zip(segment.outputs, (whole[place] for place in places), strict=True))
    assert [None if buffer is None else memory[buffer] for buffer in joined.outputs] == run(made, given)
    old_of = dict(zip((*joined.inputs, *joined.outputs), (*made.inputs, *made.outputs), strict=True))
    for buffer in joined.buffers:
        assert (buffer.producer is None) == (buffer.id in joined.inputs)
        assert buffer.num_bytes == made.buffers[old_of[buffer.id]].num_bytes
    assert [buffer.id for buffer in joined.buffers] == list(range(len(joined.buffers)))
