"""Steps composed of graphs: every legal order computes what the calls compute one after the other."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest

from apollo_compile.ir import BufferId, Phase, Segment, SegmentGraph, SegmentId
from apollo_compile.passes.compose import Call, compose_step
from tests.builders import follow, graph, random_costs, random_graph, random_lanes, random_plan
from tests.races import find_races

Memory = dict[BufferId, int]


def with_inputs(made: SegmentGraph, count: int, rng: random.Random) -> SegmentGraph:
    """Return the graph with `count` more inputs, each read by a few segments."""
    segments, buffers, inputs = list(made.segments), list(made.buffers), list(made.inputs)
    for _ in range(count):
        buffer = BufferId(len(buffers))
        readers = sorted(rng.sample(range(len(segments)), rng.randrange(1, min(4, len(segments)) + 1)))
        buffers.append(replace(buffers[0], id=buffer, name=f"in{buffer}", readers=tuple(map(SegmentId, readers))))
        inputs.append(buffer)
        for reader in readers:
            segments[reader] = replace(segments[reader], inputs=(*segments[reader].inputs, buffer))
    return replace(made, segments=tuple(segments), buffers=tuple(buffers), inputs=tuple(inputs))


def in_write_order(made: SegmentGraph, buffers: Sequence[BufferId]) -> SegmentGraph:
    """Return the graph in which the last segment that has a written input comes after all others that have it."""
    segments = list(made.segments)
    for buffer in buffers:
        *others, last = made.buffers[buffer].readers
        segments[last] = replace(segments[last], after=tuple(sorted({*segments[last].after, *others})))
    return replace(made, segments=tuple(segments))


def run_segment(piece: Segment, memory: Memory, writes: Iterable[BufferId], body: int) -> None:
    """Compute numbers that tell of the body and of all it read, and write such numbers to some inputs."""
    read = tuple(memory[buffer] for buffer in piece.inputs)
    for place, buffer in enumerate(piece.outputs):
        memory[buffer] = hash((body, place, read))
    for buffer in writes:
        memory[buffer] = hash(("written", body, read))


def writers(made: SegmentGraph, call: Call) -> Iterator[tuple[SegmentId, BufferId, str]]:
    """Yield, of every written input, the last segment that has it, which writes to it, its buffer and its name."""
    for buffer, name in zip(made.inputs, call.takes, strict=True):
        if name in call.writes:
            yield made.buffers[buffer].readers[-1], buffer, name


def run_calls(
    graphs: Sequence[SegmentGraph], calls: Sequence[Call], given: Mapping[str, int], first_body: Sequence[int]
) -> dict[str, int]:
    """Run one call after the other, each in the order of its segments."""
    values = dict(given)
    for call in calls:
        made = graphs[call.graph]
        memory = {buffer: values[name] for buffer, name in zip(made.inputs, call.takes, strict=True)}
        for segment in made.segments:
            writes = [buffer for writer, buffer, _ in writers(made, call) if writer == segment.id]
            run_segment(segment, memory, writes, first_body[call.graph] + segment.body)
        for buffer, name in zip(made.inputs, call.takes, strict=True):
            values[name] = memory[buffer]
        for out, made_name in zip(made.outputs, call.makes, strict=True):
            if out is not None and made_name is not None:
                values[made_name] = memory[out]
    return values


def run_in_any_order(
    rng: random.Random, step: SegmentGraph, given: Mapping[BufferId, int], writes: Mapping[int, Sequence[BufferId]]
) -> Memory:
    """Run the segments of a step in a random order that keeps its dependencies."""
    memory, done = dict(given), set[SegmentId]()
    waiting = set(range(len(step.segments)))
    while waiting:
        ready = [s for s in sorted(waiting) if done.issuperset(step.predecessors(SegmentId(s)))]
        segment = rng.choice(ready)
        waiting.remove(segment)
        done.add(SegmentId(segment))
        run_segment(step.segments[segment], memory, writes.get(segment, ()), step.segments[segment].body)
    return memory


def random_step(rng: random.Random) -> tuple[list[SegmentGraph], list[Call], list[str], list[str]]:
    """Return graphs, calls of them, inputs and outputs; values flow between calls, and some are written in place."""
    shared = [f"weight{number}" for number in range(3)]
    calls, made_values = [], ["batch"]
    graphs = [with_inputs(random_graph(rng, rng.randrange(2, 7)), 2, rng) for _ in range(2)]
    for number in range(5):
        which = rng.randrange(2)
        takes = (rng.choice(made_values), *rng.sample(shared, 2))
        makes = tuple(
            f"value{number}.{place}" if rng.random() < 0.8 else None for place in range(len(graphs[which].outputs))
        )
        writes = frozenset(name for name in takes[1:] if rng.random() < 0.4)
        calls.append(
            Call(graph=which, label=f" call {number}", phase=Phase.FORWARD, takes=takes, makes=makes, writes=writes)
        )
        made_values += [name for name in makes if name is not None]
    graphs = [in_write_order(made, made.inputs[1:]) for made in graphs]
    return graphs, calls, ["batch", *shared], [*made_values[1:], *shared]


@pytest.mark.parametrize("seed", range(60))
def test_every_legal_order_of_a_step_computes_what_its_calls_compute_in_turn(seed: int) -> None:
    """Calls that share a written value keep their order; others may change places."""
    rng = random.Random(seed)
    graphs, calls, inputs, outputs = random_step(rng)
    first_body = [0, 1 + max(segment.body for segment in graphs[0].segments)]
    given = {name: rng.randrange(10**9) for name in inputs}
    expected = run_calls(graphs, calls, given, first_body)
    step = compose_step("step", graphs, calls, inputs=inputs, outputs=outputs)

    buffer_of = dict(zip([*inputs, *outputs], [*step.inputs, *step.outputs], strict=True))
    writes: dict[int, list[BufferId]] = {}
    place = {segment.name: segment.id for segment in step.segments}
    for call in calls:
        made = graphs[call.graph]
        for writer, _, name in writers(made, call):
            writes.setdefault(place[f"{made.segments[writer].name}{call.label}"], []).append(buffer_of[name])
    for _ in range(4):
        memory = run_in_any_order(rng, step, {buffer_of[name]: given[name] for name in inputs}, writes)
        assert {name: memory[buffer_of[name]] for name in outputs} == {name: expected[name] for name in outputs}


@pytest.mark.parametrize("seed", range(40))
def test_programs_of_steps_have_no_races(seed: int) -> None:
    """Calls write to values that others read, on random lanes."""
    rng = random.Random(seed)
    graphs, calls, inputs, outputs = random_step(rng)
    step = compose_step("step", graphs, calls, inputs=inputs, outputs=outputs)
    lanes = random_lanes(rng)
    *_, program = follow(step, random_plan(rng, step, lanes, random_costs(rng, step, lanes)))
    assert [defect for _ in range(3) for defect in find_races(program, step, rng)] == []


def test_micro_batches_depend_on_each_other_only_where_something_is_written() -> None:
    """Two calls that read the same weight are free of each other; with a running mean, one comes after the other."""
    forward = with_inputs(graph((), (0,)), 1, random.Random(0))

    def step(writes: frozenset[str]) -> SegmentGraph:
        call = Call(graph=0, label="", phase=Phase.FORWARD, takes=(), makes=(), writes=writes)
        calls = [replace(call, label=f"@{n}", takes=(f"batch{n}", "state"), makes=(f"loss{n}",)) for n in (0, 1)]
        names = ["batch0", "batch1", "state"]
        return compose_step("step", [forward], calls, inputs=names, outputs=["loss0", "loss1"])

    free, chained = step(frozenset()), step(frozenset({"state"}))
    assert all(other >= 2 for segment in free.segments[2:] for other in free.predecessors(segment.id))
    readers = forward.buffers[forward.inputs[1]].readers
    assert set(readers) <= set(chained.segments[2 + readers[0]].after)


def test_segments_that_draw_random_numbers_or_communicate_keep_the_order_of_the_calls() -> None:
    """The second call draws after the first one has; ranks agree on collectives, which share no value."""
    made = graph((), (0,), (0,))
    calls = [
        Call(graph=0, label=f"@{n}", phase=Phase.FORWARD, takes=(f"x{n}",), makes=(f"a{n}", f"b{n}")) for n in (0, 1)
    ]
    step = compose_step("step", [made], calls, inputs=["x0", "x1"], outputs=["a1"], ordered={0: {SegmentId(1)}})
    assert step.segments[4].after == (SegmentId(1),)
    assert [segment.body for segment in step.segments] == 2 * [0, 1, 2]
    assert [segment.name for segment in step.segments] == ["m0@0", "m1@0", "m2@0", "m0@1", "m1@1", "m2@1"]
    made = graph((), collectives=(0,))
    calls = [Call(graph=0, label=f"@{n}", phase=Phase.UPDATE, takes=("x",), makes=(f"y{n}",)) for n in range(3)]
    step = compose_step("step", [made], calls, inputs=["x"], outputs=["y0", "y1", "y2"])
    assert [each.after for each in step.segments] == [(), (0,), (1,)]


@pytest.mark.parametrize(("writes", "ordered", "count"), [("", {}, 2), ("x", {}, 4), ("", {0: {SegmentId(0)}}, 4)])
def test_segments_run_again_only_where_they_may_make_something_else(
    writes: str, ordered: dict[int, set[SegmentId]], count: int
) -> None:
    """Two calls take the same value: one result has both names, unless it is written to, or the segments draw."""
    call = Call(graph=0, label="", phase=Phase.FORWARD, takes=("x",), makes=(), writes=frozenset(writes))
    calls = [replace(call, label=f"@{n}", makes=(f"y{n}",)) for n in (0, 1)]
    step = compose_step("step", [graph((), (0,))], calls, inputs=["x"], outputs=["y0", "y1"], ordered=ordered)
    assert len(step.segments) == count
    assert (step.outputs[0] == step.outputs[1]) == (count == 2)


@pytest.mark.parametrize(
    ("takes", "makes", "problem"),
    [
        (("y",), ("a",), "test takes 'y', which is neither an input"),
        (("x", "x"), ("a",), "has 1 inputs and 1 outputs; it is called with 2"),
        (("x",), ("x",), "two values of a step have the name 'x'"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(takes: tuple[str, ...], makes: tuple[str, ...], problem: str) -> None:
    """With the name of the value, or the numbers."""
    call = Call(graph=0, label="", phase=Phase.FORWARD, takes=takes, makes=makes)
    with pytest.raises(ValueError, match=problem):
        compose_step("step", [graph((), (0,))], [call], inputs=["x"], outputs=["x"])
