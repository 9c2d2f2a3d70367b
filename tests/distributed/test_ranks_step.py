"""Whole steps of two ranks over gloo: numbers of the loop under the same wrapper, collectives in one order, no hang."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from apollo_compile.device.cpu.execute import most_units
from apollo_compile.ir import Variant
from tests.distributed import steps, work
from tests.distributed.conftest import Seen, needs_gloo

pytestmark = [needs_gloo, pytest.mark.skipif(most_units() < 2, reason="one core has no lanes")]

WORK = steps
NAMES = [f"{name} {count} {norm}" for name, count, norm in steps.CASES]
SHARDED = [f"fsdp {name}" for name in NAMES]


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


@pytest.mark.parametrize("name", [*NAMES, "mesh", *SHARDED, "fsdp uneven"])
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


@pytest.mark.parametrize("name", SHARDED)
def test_ranks_gather_and_scatter_in_one_order(seen: Seen, name: str) -> None:
    """Every shard is gathered once, and its gradient scattered once; clipping adds one number up."""
    first, second = seen(name)
    assert first["sent"] == second["sent"] and first["plans"] == second["plans"]
    (collectives,) = first["collectives"]
    names = [collective for collective, _ in collectives]
    is_clipped = not name.endswith("None")
    gathers, means = ([each for each in names if each.endswith(what)] for what in (":gather", ":mean"))
    assert names == [*gathers, *means, *(["gradients:clip"] if is_clipped else [])]
    assert [each.partition(":")[0] for each in gathers] == [each.partition(":")[0] for each in reversed(means)]
    per_step = first["sent"][-len(names) :]
    assert first["sent"][-len(names) * (steps.STEPS - 1) :] == (steps.STEPS - 1) * per_step
    parameters = [each for key, each in first["state"].items() if is_parameter(key)]
    whole = sum(each[:1].numel() * 2 * math.ceil(len(each) / 2) for each in parameters)  # in halves of equal size
    assert sum(per_step[len(gathers) :][: len(means)]) == whole == 2 * sum(per_step[: len(gathers)])


def test_ranks_with_shards_of_other_sizes_agree(seen: Seen) -> None:
    """Short and empty shards are sent filled up; frozen parameters are gathered first."""
    first, second = seen("fsdp uneven")
    assert first["sent"] == second["sent"] and first["plans"] == second["plans"]
    ((name, _), *_), *_ = first["collectives"]
    assert name == "frozen0:gather"


def test_parameters_are_gathered_ahead_of_the_forward(seen: Seen) -> None:
    """Nothing but the gather before it keeps one waiting; means wait for the layers that make gradients."""
    for result in seen("fsdp towers 1 None"):
        (collectives,), (waits,) = result["collectives"], result["summed"]
        assert len(collectives) == 4
        for (name, _), modules in zip(collectives, waits, strict=True):
            assert bool(modules) == name.endswith(":mean")


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


@pytest.mark.parametrize("name", ["other shapes", "fsdp other shapes"])
def test_a_rank_in_a_loop_meets_the_program_of_another(seen: Seen, name: str) -> None:
    """A batch of another shape on one rank: both send the same buckets; evaluations in between see the loop's model."""
    results = seen(name)
    assert_trained_alike(results)
    assert results[0]["sent"] == results[1]["sent"]


@pytest.mark.parametrize("name", ["frozen", "fsdp frozen"])
def test_layers_that_are_frozen_and_trained_again_have_buckets_of_their_own(seen: Seen, name: str) -> None:
    """Their gradients are averaged from then on, and each set of parameters has a program."""
    results = seen(name)
    assert_trained_alike(results)
    for result in results:
        assert len(result["verdicts"]) == 3 and result["reasons"] == []


def test_gradients_of_several_steps_add_up_without_communication(seen: Seen) -> None:
    """Inside of `no_sync`, as a backward under the wrapper does."""
    for result in seen("no sync"):
        assert result["sent inside"] == []
        for found, expected in zip(result["found"], result["expected"], strict=True):
            work.assert_close(found, expected, atol=1e-6)


def test_sharded_gradients_are_those_of_the_hooks(seen: Seen) -> None:
    """Left in shards and added up; without synchronization they wait for the next step."""
    for result in seen("fsdp gradients"):
        assert result["verdicts"][0].startswith(Variant.PLAN), result["verdicts"]
        assert not any("know of: one has one" in line for line in result["log"])
        for found, expected in zip(result["found"], result["expected"], strict=True):
            assert found.keys() == expected.keys()
            work.assert_close(found, expected, atol=1e-6)


@pytest.mark.parametrize("name", ["failure", "fsdp failure"])
def test_a_rank_that_fails_ends_the_step_of_the_other_within_its_timeout(seen: Seen, name: str) -> None:
    """The error itself there, gloo's timeout on the other; no parameter has changed on either."""
    first, second = seen(name)
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


def test_what_the_reducer_would_do_beside_a_step_is_an_error(seen: Seen) -> None:
    """Before anything is sent: a step leaves the reducer out, with ranks that join and hooks that come later."""
    for result in seen("joined"):
        assert "cannot join() a compiled step" in result["joined"]
        assert "hook came after compile_step" in result["hooked"]


def test_a_step_under_other_policies_of_fsdp_is_a_loop_with_a_reason(seen: Seen) -> None:
    """One line for each."""
    for result in seen("fsdp refused"):
        for name in ("mixed precision", "offload", "a mesh of several dimensions"):
            (reason,), is_finite = result[name]
            assert reason.startswith("FSDP2 has") and name in reason and is_finite
            assert len([line for line in result["log"] if reason in line]) == 1


def test_steps_of_a_wrapped_model_are_explained_without_communication(seen: Seen) -> None:
    """By one rank alone, with the segments that are linked later; the model does not change."""
    first, _ = seen("explained")
    assert first["planned"] == first["linked"] and first["sent"] == []
    assert any(name.endswith(":mean") for name in first["planned"])
    assert "expected the module as it is before fully_shard" in first["refused"]
    for key, value in first["before"].items():
        assert torch.equal(first["after"][key], value), key


def test_a_mesh_that_cannot_average_is_an_error(seen: Seen) -> None:
    """It has several dimensions, is beside a wrapper, or is for a model without a parameter."""
    for result in seen("wrong meshes"):
        assert "mesh has 2 dimensions; expected one" in result["square"] and "mesh['data']" in result["square"]
        assert "cannot average gradients of a DistributedDataParallel over a mesh" in result["wrapped"]
        assert result["empty"].endswith("the model has no parameters")
