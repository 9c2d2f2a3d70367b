"""Stage 1c: join all segments of a graph into one, for a compiler of whole graphs.

    SegmentGraph -> SegmentGraph of one segment

Inputs and outputs stay the same; intermediate values are no longer buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from apollo_compile.ir import BodyId, Buffer, BufferId, Segment, SegmentGraph, SegmentId, Work


def join_segments(graph: SegmentGraph) -> tuple[SegmentGraph, Sequence[int]]:
    """Return a graph of one segment with the same inputs and outputs, and the positions of the body's outputs.

    The body makes only graph outputs that are neither None, nor inputs, nor repeated; the positions are those of these
    outputs among the graph outputs, in order.
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
    buffers = tuple(_renumber(graph.buffers[old], new, old in taken) for old, new in number.items())
    joined = replace(
        graph,
        segments=(segment,),
        buffers=buffers,
        inputs=tuple(number[buffer] for buffer in graph.inputs),
        outputs=tuple(None if buffer is None else number[buffer] for buffer in graph.outputs),
    )
    return joined, tuple(places.values())


def _renumber(buffer: Buffer, new: BufferId, is_input: bool) -> Buffer:
    only = SegmentId(0)
    return replace(buffer, id=new, producer=None if is_input else only, readers=(only,) if is_input else ())
