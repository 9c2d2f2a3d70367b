"""Two or three ranks that train over gloo: same numbers as one process, same plans, no hang.

They are forked from a process that has imported what they need and done nothing else. A rank that waits in vain fails
after `PATIENCE`, and all are ended then.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from apollo_compile.device.cpu.execute import most_units
from apollo_compile.ir import Plan, Role, Variant
from tests.distributed import work
from tests.distributed.conftest import Seen, needs_gloo

pytestmark = [needs_gloo, pytest.mark.skipif(most_units() < 2, reason="one core has no lanes")]

WORK = work


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """Return what one process trains CLIP to."""
    return work.train_reference()


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp, native"])
def test_clip_trains_as_in_one_process(seen: Seen, reference: dict[str, Any], name: str) -> None:
    """Over 20 steps, on lanes, with plans that are agreed on; every rank ends with the same parameters."""
    for rank, result in enumerate(seen(name)):
        expected = [losses[rank] for losses in reference["losses"]]
        assert len(expected) == 20
        torch.testing.assert_close(result["losses"], expected, rtol=1e-4, atol=1e-5)
        work.assert_close(result["state"], reference["state"])
        assert result["fallbacks"] == []
        assert len(result["plans"]) == 2
        if name == "fsdp":  # the profiles of the others are wrong, and may favour one lane
            assert all(_num_lanes(plan) > 1 for plan in result["plans"])
    first, second = seen(name)
    for key, value in first["state"].items():
        assert torch.equal(value, second["state"][key]), key
    assert min(reference["losses"][-1]) < min(reference["losses"][0]), "nothing was learnt, so nothing was compared"


def test_native_bodies_read_parameters_whose_memory_comes_and_goes(seen: Seen) -> None:
    """FSDP2 frees what it gathered behind every forward and backward; bodies ask for the address at every call."""
    for result in seen("fsdp, native"):
        assert sum(result["native"]) >= 2
        compiled = [line for line in result["log"] if " segments (" in line]
        assert len(compiled) == 2 and not any("onto 1 lane:" in line for line in compiled)


@pytest.mark.parametrize("name", ["ddp", "buckets", "fsdp", "fsdp, native", "tensor parallel, mixed"])
def test_ranks_run_the_same_plans(seen: Seen, name: str) -> None:
    """To the nanosecond of what is predicted, though two of these believe different things; they plan once."""
    first, second = seen(name)
    assert first["plans"] == second["plans"] != []
    assert set(first["replans"]) == set(second["replans"]) == {0}


def test_a_graph_for_every_bucket_trains_as_one_process(seen: Seen) -> None:
    """Each is cut and planned for itself, forward and backward; gradients are the average over the ranks."""
    for result in seen("buckets"):
        assert result["fallbacks"] == []
        assert len(result["plans"]) >= 4
        assert result["reported"].count(Role.FORWARD) == result["reported"].count(Role.BACKWARD) >= 2
        assert result["is_settled"]
        for found in result["found"]:
            work.assert_close(found, result["expected"])


def test_layers_split_by_dtensor_train_as_before(seen: Seen) -> None:
    """Collectives run on lanes of one rank and in turn on the other, each in its own plan, in one order."""
    results = seen("tensor parallel")
    for result in results:
        assert result["fallbacks"] == []
        work.assert_close(result["found"], result["expected"], atol=1e-6)
    first, second = results
    assert first["collectives"] == second["collectives"]
    assert len(first["collectives"][0]) == 2
    assert _num_lanes(first["plans"][0]) > 1 and _num_lanes(second["plans"][0]) == 1


def test_collectives_in_two_branches_meet_their_own(seen: Seen) -> None:
    """The tensors have equal shapes: if they were exchanged in another order, only the numbers would tell."""
    results = seen("branches")
    assert results[0]["plans"] == results[1]["plans"] == results[2]["plans"]
    for result in results:
        (plan,), (collectives,) = result["plans"], result["collectives"]
        assert len(collectives) == 2
        assert _num_lanes(plan) > 1
        order = [a.segment for a in plan.in_start_order() if a.segment in collectives]
        assert order == sorted(collectives)
        for found in result["found"]:
            torch.testing.assert_close(found, result["expected"], rtol=1e-4, atol=1e-5)


def test_a_report_without_a_model_has_the_graphs_of_fsdp(seen: Seen) -> None:
    """They read what was gathered, which is no parameter of the model."""
    for result in seen("fsdp"):
        assert result["reported"] == [True, True]


def test_what_tensor_parallelism_keeps_equal_stays_equal(seen: Seen) -> None:
    """To the last bit, since ranks run the same plans and compare nothing."""
    first, second = seen("tensor parallel, mixed")
    assert first["is_settled"] and second["is_settled"]
    assert len(first["replicated"]) == 2
    for key, value in first["replicated"].items():
        assert torch.equal(value, second["replicated"][key]), key


def test_a_plan_and_inductors_code_meet_in_collectives(seen: Seen) -> None:
    """One rank runs lanes and the other what Inductor made of the whole: one order, right sums."""
    first, second = seen("tensor parallel, mixed")
    assert set(first["variants"]) == {Variant.PLAN} and set(second["variants"]) == {Variant.INDUCTOR}
    for result in (first, second):
        work.assert_close(result["found"], result["expected"], atol=1e-5)
    assert _num_lanes(first["plans"][0]) > 1
    assert max(map(len, first["collectives"])) >= 2, "there is none in the graphs"


@pytest.mark.parametrize("fault", ["capture", "compile"])
def test_a_rank_that_cannot_compile_alone_meets_the_lanes_of_another(seen: Seen, fault: str) -> None:
    """Inductor runs its graph, which one WARNING says; collectives keep their order, so both have the right sums."""
    first, second = seen(fault)
    (plan,) = first["plans"]
    assert _num_lanes(plan) > 1 and len(first["collectives"][0]) == 2 and first["fallbacks"] == []
    ((name, reason),) = second["fallbacks"]
    assert second["plans"] == [] and reason == "RuntimeError: out of luck"
    _assert_one_warning(first, second, f"{name} falls back to torch.compile: RuntimeError: out of luck")


def test_a_rank_without_a_planner_takes_part(seen: Seen) -> None:
    """List schedules stand in, which one WARNING says; the plan of whoever was first is that of both."""
    first, second = seen("planner")
    assert first["plans"] == second["plans"] != []
    _assert_one_warning(first, second, "the planner's process failed: ")


def test_an_error_on_one_rank_surfaces_there_and_the_others_wait_as_long_as_their_group_does(seen: Seen) -> None:
    """As in eager, gloo says when it has waited long enough; the next graph runs on the same lanes."""
    first, second = seen("damaged batch")
    assert (second["error"]["type"], second["error"]["text"]) == ("ValueError", "this batch is damaged")
    assert first["error"]["type"] == "RuntimeError" and "timed out" in first["error"]["text"].lower()
    for result in (first, second):
        (note,) = result["error"]["notes"]
        assert note.startswith("raised in segment ")
        torch.testing.assert_close(result["found"], result["expected"], rtol=1e-4, atol=1e-5)


def _assert_one_warning(well: dict[str, Any], hurt: dict[str, Any], text: str) -> None:
    """Expect right numbers on both ranks, and one line on the one where something failed."""
    for result in (well, hurt):
        for found in result["found"]:
            torch.testing.assert_close(found, result["expected"], rtol=1e-4, atol=1e-5)
    warnings = [[line for line in result["log"] if not line.startswith("INFO")] for result in (well, hurt)]
    assert [len(lines) for lines in warnings] == [0, 1], warnings
    assert warnings[1][0].startswith(f"WARNING {text}")


def test_dynamic_shapes_train_in_inductor_on_all_ranks(seen: Seen) -> None:
    """Each says why; gradients are the average over the ranks, whatever their batches."""
    for result in seen("dynamic"):
        assert result["plans"] == []
        assert result["fallbacks"] and all("several ranks do not agree" in why for _, why in result["fallbacks"])
        torch.testing.assert_close(result["found"], result["expected"], rtol=1e-4, atol=1e-6)


def test_a_graph_that_only_one_rank_has_blocks_nobody(seen: Seen) -> None:
    """As when a modality is absent from the batches of the others."""
    assert [len(result["plans"]) for result in seen("absent")] == [0, 1, 0]


def test_ranks_divide_the_cores_and_say_so(seen: Seen) -> None:
    """In one line each; no core is both ranks' own."""
    own = []
    for rank, result in enumerate(seen("ddp")):
        (line,) = [line for line in result["log"] if "local rank" in line]
        prefix = f"INFO local rank {rank} of {work.SIZE}: its lanes use cores "
        assert line.startswith(prefix)
        own.append(set(line.removeprefix(prefix).partition(", ")[0].split(",")))
    assert not own[0] & own[1]


def _num_lanes(plan: Plan) -> int:
    return len({assignment.lane for assignment in plan.assignments})
