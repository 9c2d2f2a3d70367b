from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apollo_compile.errors import PlanFileError
from apollo_compile.ir import CostTable, Lane, Plan, SegmentGraph
from apollo_compile.ir.check import check_plan
from apollo_compile.passes.plan import make_plan
from apollo_compile.store.plan_file import FILE_NAME, fingerprint, folder_of, load_plan, save_plan
from apollo_compile.target.lanes import lane_catalogue
from tests.builders import chains, graph, random_costs, random_graph, random_plan


def _two_chains() -> tuple[SegmentGraph, CostTable, tuple[Lane, ...], Plan]:
    made, table, lanes = chains([100] * 4, [100] * 4, efficiency=0.6)
    return made, table, lanes, make_plan(made, table, lanes=lanes)


def test_a_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    """The file is found by its path and by the directory of all graphs; under the same costs the times are the same."""
    made, table, lanes, plan = _two_chains()
    file = tmp_path / made.name / FILE_NAME
    save_plan(plan, made, file)
    assert load_plan(file, made, lanes) == plan
    assert load_plan(tmp_path, made, lanes) == plan
    again = make_plan(made, table, lanes=lanes, pinned=plan)
    assert again.assignments == plan.assignments
    assert (again.makespan_ns, again.origin, again.seed) == (plan.makespan_ns, plan.origin, plan.seed)
    with pytest.raises(PlanFileError, match=f"{made.name}/{made.name}/{FILE_NAME}"):  # the file that was looked for
        load_plan(file.parent, made, lanes)


@pytest.mark.parametrize("seed", range(20))
def test_a_pinned_plan_keeps_lanes_and_order_and_takes_todays_times(seed: int) -> None:
    """Also where it is slower than the serial plan."""
    rng = random.Random(seed)
    made = random_graph(rng, 12)
    lanes = lane_catalogue(4)
    pinned = random_plan(rng, made, lanes, random_costs(rng, made, lanes))
    today = random_costs(rng, made, lanes)
    plan = make_plan(made, today, lanes=lanes, pinned=pinned)
    check_plan(plan, made, today)
    assert plan.pinned
    assert [a.lane for a in plan.assignments] == [a.lane for a in pinned.assignments]
    for lane in lanes:
        order = [[a.segment for a in p.in_start_order() if a.lane == lane.id] for p in (plan, pinned)]
        assert order[0] == order[1]


def test_the_fingerprint_is_that_of_the_structure() -> None:
    """Another dependency or size is another graph; other work is not."""
    first = graph((), (), (0, 1))
    assert fingerprint(first) == fingerprint(graph((), (), (0, 1)))
    assert fingerprint(first) != fingerprint(graph((), (), (1,)))
    assert fingerprint(first) != fingerprint(graph((), (), (0, 1), sizes=[1, 2, 3, 4]))
    heavier = dataclasses.replace(first.segments[0], work=dataclasses.replace(first.segments[0].work, flops=5))
    assert fingerprint(first) == fingerprint(dataclasses.replace(first, segments=(heavier, *first.segments[1:])))


def _break(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return apply


def _swap_starts(content: Any) -> None:
    first, second = content["plan"]["assignments"][:2]
    first["start_ns"], second["start_ns"] = second["start_ns"], first["start_ns"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_text("{"), "cannot read the plan of test"),
        (_break(lambda content: content["plan"].pop("lanes")), "plan has no field lanes"),
        (_break(lambda content: content["plan"].update(makespan_ns="soon")), "plan.makespan_ns is 'soon'"),
        (_break(lambda content: content["graph"].update(fingerprint="0")), "segments are not those of test"),
        (_break(lambda content: content["plan"]["lanes"].pop()), "is for lanes with .* units"),
        (
            _break(lambda content: content["plan"]["assignments"].pop()),
            "does not assign each of the 8 segments to a lane",
        ),
        (_break(lambda content: content["plan"]["assignments"][0].update(lane=7)), "does not assign each of the 8"),
        (_break(_swap_starts), "before segment 0, which it depends on"),
    ],
)
def test_a_damaged_or_foreign_plan_is_refused(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    """The message names the file and what is wrong with it."""
    made, _, lanes, plan = _two_chains()
    file = tmp_path / FILE_NAME
    save_plan(plan, made, file)
    damage(file)
    with pytest.raises(PlanFileError, match=message) as raised:
        load_plan(file, made, lanes)
    assert str(file) in str(raised.value)


def test_the_folder_of_a_graph_is_a_legal_name() -> None:
    """Also of one with sizes, of a part of a compile, and of compiled autograd's."""
    assert folder_of("0/0 forward") == "0_0_forward"
    assert folder_of("0/0.2 backward") == "0_0.2_backward"
    assert folder_of("12/3 forward[s77=400, s27=800]") == "12_3_forward[s77=400,_s27=800]"
    assert folder_of("!0/1/0 inference") == "_0_1_0_inference"
