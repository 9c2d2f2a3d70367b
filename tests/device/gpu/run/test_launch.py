from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from apollo_compile.device.gpu.run.gpu import atoms_of
from apollo_compile.device.gpu.run.launch import Launcher, host_order
from apollo_compile.errors import InvariantError
from apollo_compile.ir import EventId, Lane, LaneId, Launch, Plan, Program, Record, SegmentGraph, Wait
from apollo_compile.ir.check import check_memory
from tests.builders import follow, graph, plan, random_planned
from tests.device.gpu.fake_gpu import CALLER, FakeGpu
from tests.failures import raising


def program_of(made: SegmentGraph, planned: Plan, *, owners_release: bool = True) -> Program:
    """Return the checked program."""
    return follow(made, planned, owners_release=owners_release)[2]


def bodies_of(made: SegmentGraph) -> list[Callable[..., Any]]:
    """Return, per body, a function whose outputs depend on all of its inputs; it empties its list."""
    outputs_by_body = {segment.body: len(segment.outputs) for segment in made.segments}

    def run(number: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        total = sum(tensor * (place + 2) for place, tensor in enumerate(inputs)) + number
        inputs.clear()
        return [total * (index + 1) for index in range(outputs_by_body.get(number, 1))]

    return [partial(run, number) for number in range(max(outputs_by_body) + 1)]


def interpret(
    made: SegmentGraph, bodies: Sequence[Callable[..., Any]], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return the outputs by running segments in order of their ids."""
    values = dict(zip(made.inputs, inputs, strict=True))
    for segment in made.segments:
        out = bodies[segment.body]([values[buffer] for buffer in segment.inputs])
        values.update(zip(segment.outputs, out, strict=True))
    return [None if buffer is None else values[buffer] for buffer in made.outputs]


@pytest.mark.parametrize("seed", range(60))
def test_any_program_is_launched_in_a_legal_order_and_frees_memory_safely(seed: int) -> None:
    """Twice in a row, so that memory freed between runs is used again too; numbers are those of the graph."""
    made, planned = random_planned(seed)
    program = program_of(made, planned)
    gpu, bodies = FakeGpu(units=len(program.lanes[0].units)), bodies_of(made)
    launcher = Launcher(program, bodies, gpu)
    for number in (1.0, 2.0):
        value = torch.full((2,), number, dtype=torch.float64)
        assert all(map(torch.equal, launcher.launch([value], CALLER), interpret(made, bodies, [value])))
    assert not gpu.races


def test_holds_for_threads_would_be_races_on_a_gpu() -> None:
    """Lane B would let a buffer of lane A go while it reads it, and A's next segment would write there."""
    made = graph((), (0,), ())
    for owners_release, expected in ((False, ["memory of lane 1 is used again while lane 2 reads it"]), (True, [])):
        gpu = FakeGpu(units=2)
        program = program_of(made, plan(made, "ABA"), owners_release=owners_release)
        Launcher(program, bodies_of(made), gpu).launch([torch.ones(1)], CALLER)
        assert gpu.races == expected


@pytest.mark.parametrize("seed", range(40))
def test_buffers_go_on_their_owners_lane_as_early_as_it_knows_the_readers_ended(seed: int) -> None:
    """Every other hold is refused, and graph inputs stay to the end."""
    made, planned = random_planned(seed)
    syncs, memory, _ = follow(made, planned, owners_release=True)
    assert set(made.inputs) <= set(memory.at_end) or made.buffers[0].is_output
    _, free, _ = follow(made, planned)
    order = {assignment.segment: rank for rank, assignment in enumerate(planned.in_start_order())}
    early = {hold.buffer: order[hold.segment] for hold in free.holds}
    for hold in memory.holds:
        assert order[hold.segment] >= early[hold.buffer]
    if [hold for hold in free.holds if hold not in memory.holds]:
        with pytest.raises(InvariantError, match="on another lane than its owner's"):
            check_memory(free, made, planned, syncs, owners_release=True)


@pytest.mark.parametrize("seed", range(40))
def test_the_host_order_has_every_instruction_once_and_records_before_waits(seed: int) -> None:
    """And every lane's own order."""
    program = program_of(*random_planned(seed))
    order = host_order(program)
    for lane, instructions in zip(program.lanes, program.instructions, strict=True):
        assert tuple(each for on, each in order if on == lane.id) == instructions
    recorded = set()
    for _, instruction in order:
        if isinstance(instruction, Record):
            recorded.add(instruction.event)
        assert not isinstance(instruction, Wait) or instruction.event in recorded


def test_lanes_take_turns_so_that_none_starts_late() -> None:
    """Three independent segments on each of two lanes."""
    made = graph((), (), (0,), (1,), (2,), (3,))
    order = host_order(program_of(made, plan(made, "ABABAB")))
    assert [lane for lane, each in order if isinstance(each, Launch)] == [1, 2, 1, 2, 1, 2]


def test_every_lane_forks_from_the_caller_and_joins_it(gpu: FakeGpu) -> None:
    """Only the kept wait lies between; a lane that is not used is left alone."""
    made = graph((), (0,), (0,), (1, 2))
    launcher = Launcher(program_of(made, plan(made, "AABA")), bodies_of(made), gpu)
    launcher.launch([torch.ones(1)], CALLER)
    a, b = "lane 1", "lane 2"
    fork = [("record", CALLER), ("wait", a), ("wait", b)]
    first = [("launch", a), ("record", a), ("wait", b), ("launch", b), ("record", b)]
    second = [("launch", a), ("wait", a), ("launch", a)]
    join = [("record", a), ("wait", CALLER), ("record", b), ("wait", CALLER)]
    assert gpu.log == fork + first + second + join
    assert launcher.streams == {LaneId(1): a, LaneId(2): b}


def test_lanes_are_joined_where_a_body_fails(gpu: FakeGpu) -> None:
    """The end of a capture would hide its error otherwise; the same program can be captured afterwards."""
    made = graph((), (), (0, 1))
    bodies, fail = bodies_of(made), raising(ZeroDivisionError())
    for each in range(3):
        launcher = Launcher(program_of(made, plan(made, "ABA")), [*bodies[:each], fail, *bodies[each + 1 :]], gpu)
        with pytest.raises(ZeroDivisionError):
            gpu.capture(lambda origin, launcher=launcher: launcher.launch([torch.ones(1)], origin), None)
    launcher = Launcher(program_of(made, plan(made, "ABA")), bodies, gpu)
    gpu.capture(lambda origin: launcher.launch([torch.ones(1)], origin), None)
    assert len(gpu.recordings) == 1 and not gpu.races


def test_a_program_on_the_whole_device_is_launched_on_the_callers_stream(gpu: FakeGpu) -> None:
    """It needs no event."""
    made = graph((), (0,))
    Launcher(program_of(made, plan(made, "**")), bodies_of(made), gpu).launch([torch.ones(1)], CALLER)
    assert gpu.log == [("launch", CALLER), ("launch", CALLER)]


def test_lanes_that_wait_in_a_circle_are_refused() -> None:
    """No order of the host could launch them."""
    made = graph((), ())
    program = program_of(made, plan(made, "AB"))
    first, second = ([each for each in lane if isinstance(each, Launch)] for lane in program.instructions[1:3])
    a, b = EventId(0), EventId(1)
    lanes = ((), (Wait(event=b), *first, Record(event=a)), (Wait(event=a), *second, Record(event=b)))
    with pytest.raises(ValueError, match="program test cannot be launched: its lanes wait for each other in a circle"):
        host_order(replace(program, num_events=2, instructions=lanes))


def test_a_lane_of_half_an_atom_is_refused() -> None:
    """SMs are given out in groups."""
    with pytest.raises(ValueError, match=r"lane 3 has units \[0, 1, 2, 3\]; a lane has whole atoms of \[8, 8\] units"):
        atoms_of(Lane(id=LaneId(3), units=(0, 1, 2, 3)), [8, 8])
