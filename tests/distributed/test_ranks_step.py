"""Whole steps of two ranks over gloo: numbers of the loop under the same wrapper, collectives in one order, no hang."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from apollo_compile.device.cpu.execute import most_units
from apollo_compile.ir import Variant
from apollo_compile.session.step.collectives import fill_buckets
from tests.distributed import steps, work
from tests.distributed.conftest import Seen, run_ranks

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"),
    pytest.mark.skipif(most_units() < 2, reason="one core has no lanes"),
]

NAMES = [f"{name} {count} {norm}" for name, count, norm in steps.CASES]


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Run all scenarios; return what two ranks saw of one, by rank."""
    return run_ranks(steps.__name__, steps.SCENARIOS[work.SIZE], work.SIZE, tmp_path_factory, request.config)


def assert_trained_alike(results: list[dict[str, Any]]) -> None:
    """Check that losses and states are those of the loop under the wrapper, and parameters equal on all ranks.

    Running statistics are what a rank has seen since they were copied from rank 0.
    """
    for result in results:
        assert len(result["losses"]) == len(result["expected losses"]) > 0
        torch.testing.assert_close(result["losses"], result["expected losses"], rtol=1e-4, atol=1e-5)
        work.assert_close(result["state"], result["expected state"])
    first, second = (result["state"] for result in results)
    for key, value in first.items():
        assert "running" in key or torch.equal(value, second[key]), key


@pytest.mark.parametrize("name", [*NAMES, "mesh"])
def test_a_step_trains_as_the_loop_under_its_wrapper(seen: Seen, name: str) -> None:
    """Over 10 steps, with one or two micro-batches, clipped and not."""
    results = seen(name)
    assert_trained_alike(results)
    for result in results:
        (verdict,) = result["verdicts"]
        assert verdict.startswith(Variant.PLAN), verdict


@pytest.mark.parametrize("name", [*NAMES, "mesh"])
def test_ranks_send_the_same_in_one_order(seen: Seen, name: str) -> None:
    """Every bucket once per step, whatever the number of micro-batches; as many values as there are parameters."""
    first, second = seen(name)
    assert first["sent"] == second["sent"]
    (sums,) = first["collectives"]
    per_step = first["sent"][-len(sums) :]
    assert first["sent"][-len(sums) * steps.STEPS :] == steps.STEPS * per_step
    assert sum(per_step) == sum(each.numel() for key, each in first["state"].items() if is_parameter(key))
    assert first["plans"] == second["plans"]


def is_parameter(name: str) -> bool:
    """Whether a tensor of a state is a parameter of the models here."""
    return not any(part in name for part in ("running", "tracked", "position_ids"))


def test_sums_have_a_lane_of_their_own(seen: Seen) -> None:
    """The last lane, which has no units; only the last sum may be where nothing else is left to do."""
    for result in seen("towers 1 None"):
        (plan,), (collectives,) = result["plans"], result["collectives"]
        assert plan.lanes[-1].units == () and len(collectives) > 2
        assert all(lane == plan.lanes[-1].id for _, lane in collectives[:-1])


def test_the_last_layers_of_all_towers_come_first(seen: Seen) -> None:
    """Two towers run at once; in the order of the graph, nothing of one would be sent before all of the other."""
    for result in seen("towers 1 None"):
        (made_by,) = result["summed"]
        layers = [module.rpartition(".") for modules in made_by for module in modules if module != "module"]
        assert len(layers) == 4 and [layer for _, _, layer in layers] == ["2", "2", "0", "0"]
        assert {tower for tower, _, _ in layers[:2]} == {"module.left", "module.right"}


def test_a_rank_in_a_loop_meets_the_program_of_another(seen: Seen) -> None:
    """A batch of another shape on one rank: both send the same buckets."""
    results = seen("other shapes")
    assert_trained_alike(results)
    assert results[0]["sent"] == results[1]["sent"]


def test_gradients_of_several_steps_add_up_without_communication(seen: Seen) -> None:
    """Inside of `no_sync`, as a backward under the wrapper does."""
    for result in seen("no sync"):
        assert result["sent inside"] == []
        for found, expected in zip(result["found"], result["expected"], strict=True):
            work.assert_close(found, expected, atol=1e-6)


def test_a_rank_that_fails_ends_the_step_of_the_other_within_its_timeout(seen: Seen) -> None:
    """The error itself there, gloo's timeout on the other; no parameter has changed on either."""
    first, second = seen("failure")
    assert (second["error"]["type"], second["error"]["text"]) == ("ValueError", "this batch is damaged")
    assert first["error"] is not None and "timed out" in first["error"]["text"].lower()
    assert any("raised in segment bucket0:mean" in note for note in first["error"]["notes"])
    assert first["waited"] < 60
    for result in (first, second):
        for key, value in result["before"].items():
            assert torch.equal(result["state"][key], value), key


def test_parameters_without_gradients_are_named(seen: Seen) -> None:
    """DDP has an error too, unless it was told to find them; then the step is its loop."""
    for result in seen("unused"):
        assert result["error"].startswith("TargetError: cannot average gradients over ranks: module.idle.weight")
        assert result["verdicts"] == [f"{Variant.LOOP}: DistributedDataParallel has find_unused_parameters"]


def test_a_step_under_fsdp_is_a_loop_with_a_reason(seen: Seen) -> None:
    """With the numbers of the loop, and one line."""
    results = seen("fsdp")
    assert_trained_alike(results)
    for result in results:
        (reason,) = result["reasons"]
        assert "FSDP2" in reason
        lines = [line for line in result["log"] if reason in line]
        assert len(lines) == 1 and lines[0].startswith("INFO the step stays a loop")


def test_a_mesh_that_cannot_average_is_an_error(seen: Seen) -> None:
    """Of several dimensions, or beside a wrapper."""
    for result in seen("wrong meshes"):
        assert "mesh has 2 dimensions; expected one" in result["square"] and "mesh['data']" in result["square"]
        assert "cannot average gradients of a DistributedDataParallel over a mesh" in result["wrapped"]


def test_buckets_are_filled_in_order() -> None:
    """Each of one dtype, and of the least size unless nothing is left."""
    sizes = [10, 30, 5, 5, 100, 1]
    parameters = [torch.zeros(size, dtype=torch.int8) for size in sizes]
    assert fill_buckets(range(6), parameters, 40) == [[0, 1], [2, 3, 4], [5]]
    parameters[3] = parameters[3].to(torch.uint8)
    assert fill_buckets(range(6), parameters, 40) == [[0, 1], [2, 4], [3], [5]]
    for least in range(1, 200, 7):
        assert sorted(itertools.chain(*fill_buckets(range(6), parameters, least))) == list(range(6))
