"""Stage 1c: a whole graph as one segment, as a compiler for whole graphs runs it.

    SegmentGraph -> SegmentGraph of one segment

It has the same inputs and outputs; what is made and read inside is no buffer any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from apollo_compile.ir import BodyId, Buffer, BufferId, Segment, SegmentGraph, SegmentId, Work


def join_segments(graph: SegmentGraph) -> tuple[SegmentGraph, Sequence[int]]:
    """Return a graph of one segment with the same inputs and outputs, and places among the outputs.

    The places are of what the body of the segment has to make, in this order: outputs that are neither None, nor
    inputs, nor returned before.
    """
    places: dict[BufferId, int] = {}
    for place, buffer in enumerate(graph.outputs):
        if buffer is not None and buffer not in graph.inputs:
            places.setdefault(buffer, place)
    only = SegmentId(0)
    kept = (*dict.fromkeys(graph.inputs), *places)
    number = {buffer: BufferId(place) for place, buffer in enumerate(kept)}
    taken = frozenset(graph.inputs)
    segment = Segment(
        id=only,
        name="the whole graph",
        module="",
        body=BodyId(0),
        inputs=tuple(number[buffer] for buffer in dict.fromkeys(graph.inputs)),
        outputs=tuple(number[buffer] for buffer in places),
        after=(),
        work=Work(),
    )
    buffers = tuple(_belonging(graph.buffers[old], new, old in taken) for old, new in number.items())
    joined = replace(
        graph,
        segments=(segment,),
        buffers=buffers,
        inputs=tuple(number[buffer] for buffer in graph.inputs),
        outputs=tuple(None if buffer is None else number[buffer] for buffer in graph.outputs),
    )
    return joined, tuple(places.values())


def _belonging(buffer: Buffer, new: BufferId, is_input: bool) -> Buffer:
    only = SegmentId(0)
    return replace(buffer, id=new, producer=None if is_input else only, readers=(only,) if is_input else ())
