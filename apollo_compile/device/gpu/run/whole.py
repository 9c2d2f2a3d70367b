"""The whole graph as Inductor compiles it, as a program of one segment on the whole device.

    as_one_segment(graph, lane) -> SegmentGraph, Program, and a function that makes the body from the compiled graph

So it runs in the same form as plans: on the caller's stream at first, then as one CUDA graph. Without a CUDA graph for
Inductor's code, plans would win by the launch overhead that their CUDA graph saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from apollo_compile.device.gpu.run.gpu import Body
from apollo_compile.ir import Lane, LaneId, Launch, Program, SegmentGraph
from apollo_compile.passes.join import join_segments


def as_one_segment(
    graph: SegmentGraph, lane: Lane
) -> tuple[SegmentGraph, Program, Callable[[Callable[[list[Any]], Sequence[Any]]], Body]]:
    """Return `graph` as a single segment, its program on `lane`, which has every unit, and a function `make_body`.

    `make_body(run)` makes the body from a callable that takes the inputs of the graph in a list and returns its
    outputs, which may include None and inputs.
    """
    joined, places = join_segments(graph)
    (segment,) = joined.segments
    launch = Launch(
        segment=segment.id,
        body=segment.body,
        inputs=segment.inputs,
        takes=tuple(buffer not in joined.outputs for buffer in segment.inputs),
        outputs=segment.outputs,
    )
    program = Program(
        name=graph.name,
        lanes=(replace(lane, id=LaneId(0)),),
        instructions=((launch,),),
        num_buffers=len(joined.buffers),
        num_events=0,
        inputs=joined.inputs,
        outputs=joined.outputs,
    )

    def make_body(run: Callable[[list[Any]], Sequence[Any]]) -> Body:
        def body(arguments: list[Any]) -> Sequence[Any]:
            made = run(arguments)
            return [made[place] for place in places]

        return body

    return joined, program, make_body
