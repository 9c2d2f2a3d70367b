"""Two ranks over gloo with encoders in the bubbles of their pipeline: the numbers of encoders on the first stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from apollo_compile.distributed.pipeline.durations import Orders
from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.schedules import one_forward_one_backward
from apollo_compile.distributed.pipeline.simulate import end_of, orders_of, simulate
from apollo_compile.distributed.pipeline.text import format_prediction
from apollo_compile.distributed.pipeline.values import Encoder, StageTimes, one_replica_per_rank
from tests.distributed import pipeline_work as work
from tests.distributed.conftest import Seen, needs_gloo

pytestmark = needs_gloo

WORK = work


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Losses of the last rank, stages of every rank, and the encoders of all ranks are those of the first stage."""
    torch.testing.assert_close(found[-1]["losses"], expected[-1]["losses"], rtol=1e-4, atol=1e-4)
    assert len(found[-1]["losses"]) == work.STEPS * work.MICROBATCHES
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine["stages"], theirs["stages"], rtol=1e-3, atol=2e-4)
        # Gradients are summed over the ranks, so all replicas are equal to the last bit.
        torch.testing.assert_close(mine["encoders"], found[0]["encoders"], rtol=0, atol=0)
        torch.testing.assert_close(mine["encoders"], expected[0]["encoders"], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("1f1b in bubbles", "1f1b on stage 0"),
        ("1f1b in bubbles, few live", "1f1b on stage 0"),
        ("gpipe in bubbles", "1f1b on stage 0"),
        ("interleaved in bubbles", "interleaved on stage 0"),
        ("frozen in bubbles", "frozen on stage 0"),
        ("two in bubbles", "two on stage 0"),
        ("1f1b in bubbles, measured", "1f1b on stage 0"),
        ("interleaved in bubbles, measured", "interleaved on stage 0"),
    ],
)
def test_ten_steps_give_the_numbers_of_the_encoder_on_the_first_stage(seen: Seen, name: str, reference: str) -> None:
    """Losses of all micro-batches, and all parameters."""
    assert_same(seen(name), seen(reference))


def test_both_ranks_run_encoders_between_operations_of_the_pipeline(seen: Seen) -> None:
    """Else there would be nothing to compare: the one plan has segments of one encoder on both, and in bubbles."""
    ranks = seen("1f1b in bubbles")
    assert ranks[0]["orders"] == ranks[1]["orders"]
    for row in ranks[0]["orders"]:
        is_encoder = [op.startswith("E") for op in row]
        assert any(is_encoder)
    inner = [row[row.index(next(op for op in row if "F0" in op and op[0].isdigit())) :] for row in ranks[0]["orders"]]
    assert any(op.startswith("EF") for row in inner for op in row)


def test_frozen_encoders_do_not_change(seen: Seen) -> None:
    """And trained ones do."""
    start = work.make_vit(1).state_dict()
    torch.testing.assert_close(seen("frozen in bubbles")[0]["encoders"]["images"], start, rtol=0, atol=0)
    trained = seen("1f1b in bubbles")[0]["encoders"]["images"]
    assert all(not torch.equal(trained[key], value) for key, value in start.items() if "in_proj_bias" not in key)


@pytest.mark.parametrize("name", ["text only", "text only, measured"])
def test_micro_batches_of_text_alone_need_no_encoder(seen: Seen, name: str) -> None:
    """Two of every step and all of one step: the numbers of one process without a pipeline."""
    expected, found = seen("text only, alone")[0], seen(name)
    torch.testing.assert_close(found[-1]["losses"], expected["losses"], rtol=1e-4, atol=1e-4)
    for rank, result in enumerate(found):
        torch.testing.assert_close(result["stages"][0], expected["stages"][rank], rtol=1e-3, atol=2e-4)
        torch.testing.assert_close(result["encoders"], expected["encoders"], rtol=1e-3, atol=2e-4)


def test_gradients_accumulate_over_steps(seen: Seen) -> None:
    """Two equal steps give twice the gradient of one, on both ranks: what was there is not summed over ranks again."""
    ranks = seen("accumulate")
    for result in ranks:
        first, second = result["gradients"]
        torch.testing.assert_close(second, [2 * grad for grad in first])
        torch.testing.assert_close(first, ranks[0]["gradients"][0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["1f1b in bubbles, measured", "interleaved in bubbles, measured"])
def test_durations_that_are_not_given_are_measured_in_three_steps(seen: Seen, name: str) -> None:
    """The same ones on both ranks; given ones are never measured."""
    first, second = (rank["predictions"] for rank in seen(name))
    assert first == second
    assert first[:3] == [None] * 3
    assert first[3] is not None and first[3:] == [first[3]] * (work.STEPS - 3)
    given = seen(name.removesuffix(", measured"))[0]["predictions"]
    assert given == [given[0]] * work.STEPS
    num_stages = len(given[0].durations.times.forward_ns)
    assert given[0].durations.times == work.times_of(num_stages)
    assert len(first[3].durations.times.forward_ns) == num_stages


def simulate_sleepers(orders: Orders, replica_of: tuple[tuple[int, ...], ...]) -> int:
    """Return how long a step of the sleepers takes by their true durations."""
    (forward, backward), (encoder_forward, encoder_backward) = (
        zip(*durations, strict=True) for durations in (work.STAGE_MS, work.SEGMENT_MS)
    )
    times = StageTimes(forward_ns=forward, backward_ns=backward)
    encoder = Encoder(
        name="features",
        forward_ns=(encoder_forward,),
        backward_ns=(encoder_backward[::-1],),
        replicas=one_replica_per_rank(work.SIZE),
    )
    schedule = one_forward_one_backward(work.SIZE, work.MICROBATCHES)
    if not orders:
        plan = fill(schedule, times, (encoder,))
        orders, replica_of = orders_of(plan), plan.replica_of
    return end_of(simulate(schedule, times, orders=orders, encoders=(encoder,), replica_of=replica_of), times)


def test_the_plan_of_measured_durations_is_that_of_the_true_ones(seen: Seen) -> None:
    """By the true durations its step is nearly as short; that of the guess is not."""
    ranks = seen("measured")
    assert ranks[0]["followed"] == ranks[1]["followed"]
    guessed, *_, measured = ranks[0]["followed"]
    best = simulate_sleepers((), ())
    assert simulate_sleepers(*measured[:2]) < 1.1 * best < simulate_sleepers(*guessed[:2])


def test_time_that_a_rank_waits_is_not_measured(seen: Seen) -> None:
    """Each rank waits for the stage of the other one, which is four times as long, and for features and gradients."""
    *_, (_, _, prediction) = seen("measured")[0]["followed"]
    durations = prediction.durations
    (first, second), (first_backward, second_backward) = durations.times.forward_ns, durations.times.backward_ns
    assert first > 1.5 * second and second_backward > 1.5 * first_backward
    (short, long), (short_backward, long_backward) = durations.forward_ns[0], durations.backward_ns[0]
    assert long > 1.5 * short and long_backward > 1.5 * short_backward


def test_one_line_says_what_was_measured_and_what_is_predicted(seen: Seen) -> None:
    """On the first rank."""
    first, second = (rank["lines"] for rank in seen("measured"))
    assert len(first) == 1 and not second
    *_, (_, _, prediction) = seen("measured")[0]["followed"]
    assert first[0] == f"bubbles: measured {format_prediction(prediction, ['features'])}"


def test_only_what_is_missing_is_measured(seen: Seen) -> None:
    """Given durations of stages are used as they are."""
    *guesses, (_, _, prediction) = seen("segments measured")[1]["followed"]
    assert [guess[2] for guess in guesses] == [None] * 3
    assert prediction.durations.times == work.times_of(work.SIZE)


@pytest.mark.parametrize("step", [2, 3])
def test_a_step_that_fails_on_one_rank_changes_no_plan(seen: Seen, step: int) -> None:
    """Not even if the others end it, and are about to compare: all of them change after three more steps."""
    first, second = seen(f"failure in step {step}")
    assert (first["num_failed"], second["num_failed"]) == (1, 0)
    for rank in (first, second):
        *before, (orders, replica_of, prediction) = rank["followed"]
        assert before == [before[0]] * 6 and before[0][2] is None
        assert (orders, replica_of, prediction) == second["followed"][-1] and prediction is not None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stage under FSDP2", "is sharded by FSDP2, whose unsharding would not wait for encoders; shard the optimizer"),
        ("encoder under FSDP2", "encoder of images is sharded by FSDP2"),
        ("durations", "has 3 segments and 1 durations in forward_ns; give one per segment, or none to measure them"),
        ("schedule", "bubbles of a object cannot be filled; use one of Schedule1F1B"),
        ("inputs", "encoder_inputs has no 'images', it has []"),
        ("parts", "has 1 parts; expected one for each of 4 micro-batches"),
    ],
)
def test_what_cannot_be_filled_is_refused_in_words(seen: Seen, name: str, message: str) -> None:
    """On every rank, before anything runs."""
    results = [result[name] for result in seen("refusals")]
    if name == "stage under FSDP2":
        assert [result.split(" is ")[0] for result in results] == ["stage 0", "stage 1"]
    assert all(message in result for result in results), results


def test_a_rank_whose_features_never_come_ends_with_an_error(seen: Seen) -> None:
    """Within the timeout of the group that was given for them."""
    error = seen("death")[0]["error"].lower()
    assert "timed out" in error or "timeout" in error or "closed" in error, error
