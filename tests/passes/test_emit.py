from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from apollo_compile.errors import InvariantError
from apollo_compile.ir import Launch, MemoryPlan, Plan, Program, Record, Release, SegmentGraph, SyncPlan, Wait
from apollo_compile.ir.check import check_program
from apollo_compile.passes.plan import make_plan
from tests.builders import chains, follow, graph, plan, random_costs, random_graph, random_lanes, random_plan
from tests.races import find_races, without, without_each_wait


def random_program(
    rng: random.Random, units: int | None = None
) -> tuple[SegmentGraph, Plan, SyncPlan, MemoryPlan, Program]:
    """Return a program of a random plan, or of the planner's plan, for a random graph, or for chains on these units."""
    if units is None:
        made, lanes = random_graph(rng, rng.randrange(1, 16)), random_lanes(rng)
        table = random_costs(rng, made, lanes)
    else:
        towers = [[rng.randrange(20, 200) for _ in range(rng.randrange(1, 6))] for _ in range(rng.randrange(3, 6))]
        made, table, lanes = chains(*towers, units=units, efficiency=0.4, handover_ns=rng.choice((0, 5)))
    if rng.random() < 0.3:
        planned = make_plan(made, table, lanes=lanes, planner="greedy", work_s=0.2)
    else:
        planned = random_plan(rng, made, lanes, table)
    return made, planned, *follow(made, planned)


@pytest.mark.parametrize("units", [None, 16], ids=["random lanes", "halves, thirds and quarters"])
@pytest.mark.parametrize("seed", range(80))
def test_programs_have_no_races(seed: int, units: int | None) -> None:
    """The check and the race oracle find none, in several interleavings; lanes of 16 units share some of them."""
    rng = random.Random(seed)
    made, *_, program = random_program(rng, units)
    for _ in range(3):
        assert find_races(program, made, rng) == []


@pytest.mark.parametrize("seed", range(60))
def test_a_program_without_any_one_wait_has_a_race(seed: int) -> None:
    """So waits are minimal, and both the oracle and the check see what is missing."""
    rng = random.Random(seed)
    made, planned, syncs, memory, program = random_program(rng)
    for broken in without_each_wait(program):
        assert find_races(broken, made, rng)
        with pytest.raises(InvariantError):
            check_program(broken, made, planned, syncs, memory)


@pytest.mark.parametrize("seed", range(40))
def test_the_oracle_and_the_check_see_other_damage(seed: int) -> None:
    """A record or launch is missing, a buffer is taken by any reader, a release comes first or twice."""
    rng = random.Random(seed)
    made, planned, syncs, memory, program = random_program(rng)
    for lane, instructions in enumerate(program.instructions):
        for index, instruction in enumerate(instructions):
            blocks = list(program.instructions)
            if isinstance(instruction, Launch | Record):
                broken = without(program, lane, index)
                if isinstance(instruction, Record):
                    assert any("deadlock" in defect for defect in find_races(broken, made, rng))
            elif isinstance(instruction, Release):
                blocks[lane] = (*instructions, instruction)
                broken = replace(program, instructions=tuple(blocks))
            else:
                continue
            all_broken = [broken]
            if isinstance(instruction, Launch) and not all(instruction.takes):
                greedy = replace(instruction, takes=(True,) * len(instruction.takes))
                blocks[lane] = (*instructions[:index], greedy, *instructions[index + 1 :])
                all_broken.append(replace(program, instructions=tuple(blocks)))
            for each in all_broken:
                assert find_races(each, made, rng)
                with pytest.raises(InvariantError):
                    check_program(each, made, planned, syncs, memory)


def test_one_event_serves_all_waits_for_a_segment() -> None:
    """Two lanes wait for segment 0: one record, two waits."""
    made = graph((), (0,), (0,), (1, 2))
    *_, program = follow(made, plan(made, "*ABA"))
    flat = [instruction for block in program.instructions for instruction in block]
    assert program.num_events == 2
    assert sum(isinstance(instruction, Record) for instruction in flat) == 2
    assert sum(isinstance(instruction, Wait) for instruction in flat) == 3


def test_waits_come_before_the_launch_and_releases_after_the_record() -> None:
    """Whoever waits need not wait for the releases, unless they are the last that the lane does."""
    made = graph((), (), (0,), (1, 0), (2,), outputs=[3, 4])
    *_, program = follow(made, plan(made, "AB*AB"))
    for block in program.instructions:
        last = max((place for place, each in enumerate(block) if isinstance(each, Launch)), default=0)
        assert not (isinstance(block[-1], Release) and any(isinstance(each, Record) for each in block[last:]))
        for first, second in itertools.pairwise(block[:last]):
            assert not (isinstance(first, Wait) and not isinstance(second, Wait | Launch))
            assert not (isinstance(first, Release) and isinstance(second, Record))


def test_a_buffer_that_a_segment_reads_twice_is_taken_once() -> None:
    """As its last argument."""
    made = graph((), (0,))
    made = replace(made, segments=(made.segments[0], replace(made.segments[1], inputs=2 * made.segments[1].inputs)))
    *_, program = follow(made, plan(made, "AA"))
    launches = [each for each in program.instructions[1] if isinstance(each, Launch)]
    assert launches[-1].takes == (False, True)
