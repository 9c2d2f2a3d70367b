"""Stage 1b: compose one segment graph of a whole training step.

    ([SegmentGraph of forward, backward, optimizer, ...], [Call]) -> SegmentGraph of the step

A step calls a few graphs many times: the forward and the backward of every micro-batch, sums of gradients, and the
optimizer. Every call becomes an instance of the segments of its graph; instances share bodies, so nothing is compiled
twice, and an output of one call that another call takes is one buffer. The planner gets an ordinary graph, in which
segments of different calls may run at the same time unless one depends on the other.

Values have names. A value that is written in place (a parameter by its optimizer, a running mean by a forward) keeps
its name. In the call that writes it, every segment that takes the value counts as a writer, because a graph writes to
its inputs at its end: these segments run after all earlier users of the value, and all later users run after them.
Segments that are `ordered`, such as those that draw random numbers, run after all `ordered` segments of earlier calls,
and segments with collectives one after the other, in the order of their calls.

A segment that an earlier call has run on the same values is not run again: later micro-batches take the casts of
weights that the first one made.

Guarantees: every call has one instance of each of its segments, its own or an earlier call's, with the dependencies of
its own graph; segments are in the order of the calls, but those of the phase UPDATE right behind the last segment that
they wait for; a name stands for one value at a time, that of the latest call that made it or wrote to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from apollo_compile.ir import BodyId, Buffer, BufferId, Phase, Role, Segment, SegmentGraph, SegmentId


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One use of a graph in a step."""

    graph: int
    """Index of the graph."""
    label: str
    """Suffix of the names of its segments, e.g. `@2` for a micro-batch; empty for a graph that is called once."""
    phase: Phase
    takes: tuple[str, ...]
    """Names of its inputs, in order."""
    makes: tuple[str | None, ...]
    """Names of its outputs, in order; None for an output that is not used."""
    writes: frozenset[str] = frozenset()
    """Names of the inputs that it writes to."""


def compose_step(
    name: str,
    graphs: Sequence[SegmentGraph],
    calls: Sequence[Call],
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    ordered: Mapping[int, Collection[SegmentId]] | None = None,
) -> SegmentGraph:
    """Return the graph of a step.

    Arguments:
        name: name of the step.
        graphs: graphs that are called; bodies of graph `g` are numbered after those of all graphs before it.
        calls: calls of these graphs, in an order in which they could run one after the other.
        inputs: names of the inputs of the step, in order.
        outputs: names of its outputs, in order: values that a call makes, or inputs that are passed through.
        ordered: by graph, segments that run after all `ordered` segments of earlier calls.

    Raises:
        ValueError: a call takes an unknown name, makes a name that is already in use, or has another number of inputs
            or outputs than its graph.
    """
    linker = _Linker(graphs, ordered or {})
    for value in inputs:
        linker.add_input(value)
    for call in calls:
        linker.link(call)
    return linker.finish(name, inputs, outputs)


class _Linker:
    """Builds the graph of a step, call by call."""

    def __init__(self, graphs: Sequence[SegmentGraph], ordered: Mapping[int, Collection[SegmentId]]) -> None:
        self._graphs = graphs
        self._ordered = ordered
        num_bodies = (1 + max((s.body for s in graph.segments), default=-1) for graph in graphs)
        self._first_body = list(itertools.accumulate(num_bodies, initial=0))
        self._segments: list[Segment] = []
        self._buffers: list[Buffer] = []
        self._readers: list[list[SegmentId]] = []
        self._buffer_of: dict[str, BufferId] = {}
        """Buffer of every named value."""
        self._users: dict[BufferId, list[SegmentId]] = {}
        """Segments that take a value, since the last call that wrote to it."""
        self._writers: dict[BufferId, list[SegmentId]] = {}
        """Segments that take a value in the last call that wrote to it."""
        self._instance_of: dict[tuple[int, SegmentId, tuple[BufferId, ...]], SegmentId] = {}
        """Instances of segments that compute the same again from the same values, by graph, segment and values."""
        self._last_ordered: list[SegmentId] = []
        """Ordered segments of the latest call that has any."""
        self._last_collective: list[SegmentId] = []
        """The latest segment with a collective, if there is one."""

    def add_input(self, name: str) -> None:
        """Add an input of the step."""
        self._name(name, self._new_buffer(name, None, 0))

    def link(self, call: Call) -> None:
        """Add the segments of one call."""
        graph = self._graphs[call.graph]
        _check_arity(call, graph)
        buffers = self._take_inputs(call, graph)
        names = {buffer: value for value, buffer in zip(call.makes, graph.outputs, strict=True) if value is not None}
        written = {self._buffer_of[name] for name in call.writes}
        changed = written | self._writers.keys()
        ordered = frozenset(self._ordered.get(call.graph, ()))
        users: dict[BufferId, list[SegmentId]] = {}
        instances: list[SegmentId] = []
        for segment in graph.segments:
            own = SegmentId(len(self._segments))
            taken = tuple(buffers[buffer] for buffer in segment.inputs)
            is_repeated = not (segment.id in ordered or segment.has_collective or changed & {*taken})
            known = self._instance_of.setdefault((call.graph, segment.id, taken), own) if is_repeated else own
            instances.append(known)
            if known != own:
                buffers.update(zip(segment.outputs, self._segments[known].outputs, strict=True))
                continue
            for buffer in segment.outputs:
                name = names.get(buffer) or f"{graph.buffers[buffer].name}{call.label}"
                buffers[buffer] = self._new_buffer(name, own, graph.buffers[buffer].num_bytes)
            after = {instances[other] for other in segment.after}
            for buffer in dict.fromkeys(taken):
                users.setdefault(buffer, []).append(own)
                after.update(self._writers.get(buffer, ()))
                if buffer in written:
                    after.update(self._users.get(buffer, ()))
                self._readers[buffer].append(own)
            if segment.id in ordered:
                after.update(self._last_ordered)
            if segment.has_collective:
                after.update(self._last_collective)
                self._last_collective = [own]
            self._segments.append(
                replace(
                    segment,
                    id=own,
                    name=f"{segment.name}{call.label}",
                    phase=call.phase,
                    body=BodyId(self._first_body[call.graph] + segment.body),
                    inputs=taken,
                    outputs=tuple(buffers[buffer] for buffer in segment.outputs),
                    after=tuple(sorted(after)),
                )
            )
        for made, returned in zip(call.makes, graph.outputs, strict=True):
            if made is not None and returned is not None:
                self._name(made, buffers[returned])  # an input that the graph passes through then has two names
        for buffer, own_users in users.items():
            if buffer in written:
                self._writers[buffer], self._users[buffer] = own_users, []
            else:
                self._users.setdefault(buffer, []).extend(own_users)
        if ordered:
            self._last_ordered = [instances[segment] for segment in ordered]

    def finish(self, name: str, inputs: Sequence[str], outputs: Sequence[str]) -> SegmentGraph:
        """Return the graph of the step."""
        returned = tuple(self._lookup(value, "the step returns") for value in outputs)
        order = self._order()
        place = {segment: SegmentId(number) for number, segment in enumerate(order)}
        buffers = tuple(
            replace(
                buffer,
                producer=None if buffer.producer is None else place[buffer.producer],
                readers=tuple(sorted(place[reader] for reader in readers)),
                is_output=buffer.id in returned,
            )
            for buffer, readers in zip(self._buffers, self._readers, strict=True)
        )
        segments = (self._segments[segment] for segment in order)
        return SegmentGraph(
            name=name,
            role=Role.STEP,
            segments=tuple(
                replace(each, id=place[each.id], after=tuple(sorted(place[other] for other in each.after)))
                for each in segments
            ),
            buffers=buffers,
            inputs=tuple(self._buffer_of[value] for value in inputs),
            outputs=returned,
        )

    def _order(self) -> Sequence[SegmentId]:
        """Return the segments in the order of the calls, but those of updates right behind the last they wait for.

        Gradients that are released by their update are then few at a time where segments run in this order.
        """
        behind: list[int] = []
        for segment in self._segments:
            made = (self._buffers[buffer].producer for buffer in segment.inputs)
            before = [behind[other] for other in (*made, *segment.after) if other is not None]
            behind.append(max(before, default=0) if segment.phase is Phase.UPDATE else segment.id)
        return sorted((segment.id for segment in self._segments), key=lambda each: (behind[each], each))

    def _take_inputs(self, call: Call, graph: SegmentGraph) -> dict[BufferId, BufferId]:
        """Return the buffer of the step for every input of a call's graph."""
        placed: dict[BufferId, BufferId] = {}
        for taken, known in zip(call.takes, graph.inputs, strict=True):
            placed[known] = self._lookup(taken, f"{graph.name} takes")
            self._grow(placed[known], graph.buffers[known].num_bytes)
        return placed

    def _new_buffer(self, name: str, producer: SegmentId | None, num_bytes: int) -> BufferId:
        buffer = BufferId(len(self._buffers))
        self._buffers.append(
            Buffer(id=buffer, name=name, producer=producer, readers=(), num_bytes=num_bytes, is_output=False)
        )
        self._readers.append([])
        return buffer

    def _grow(self, buffer: BufferId, num_bytes: int) -> None:
        """Set the size of an input of the step to the largest among the graphs that take it."""
        known = self._buffers[buffer]
        if known.producer is None and known.num_bytes < num_bytes:
            self._buffers[buffer] = replace(known, num_bytes=num_bytes)

    def _name(self, name: str, buffer: BufferId) -> None:
        if name in self._buffer_of:
            raise ValueError(f"two values of a step have the name {name!r}")
        self._buffer_of[name] = buffer

    def _lookup(self, name: str, who: str) -> BufferId:
        if name not in self._buffer_of:
            raise ValueError(f"{who} {name!r}, which is neither an input of the step nor made by an earlier call")
        return self._buffer_of[name]


def _check_arity(call: Call, graph: SegmentGraph) -> None:
    if (len(call.takes), len(call.makes)) != (len(graph.inputs), len(graph.outputs)):
        raise ValueError(
            f"{graph.name} has {len(graph.inputs)} inputs and {len(graph.outputs)} outputs; it is called with "
            f"{len(call.takes)} and {len(call.makes)}"
        )
