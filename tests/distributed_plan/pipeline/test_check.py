"""The check refuses plans in which one thing is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from apollo_compile.distributed.pipeline.check import check_orders, check_plan
from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.schedules import one_forward_one_backward
from apollo_compile.distributed.pipeline.simulate import orders_of
from apollo_compile.distributed.pipeline.values import (
    Bar,
    Encoder,
    FilledPlan,
    Filling,
    Kind,
    Op,
    StageTimes,
    one_replica_per_rank,
)
from apollo_compile.errors import InvariantError, PipelinePlanError

ENCODER = Encoder(
    name="vision", forward_ns=((10, 10),), backward_ns=((20, 20),), replicas=one_replica_per_rank(2), max_live=3
)
TIMES = StageTimes(forward_ns=(50, 50), backward_ns=(100, 100), transfer_ns=5, lead_ns=15, trail_ns=30)


@pytest.fixture(scope="module")
def plan() -> FilledPlan:
    """A legal plan of two ranks and five micro-batches."""
    return fill(one_forward_one_backward(2, 5), TIMES, (ENCODER,))


def moved(plan: FilledPlan, chosen: Callable[[Bar], bool], by_ns: int) -> FilledPlan:
    """Return the plan with the first bar that is chosen moved."""
    index = next(index for index, bar in enumerate(plan.bars) if chosen(bar))
    bar = plan.bars[index]
    other = bar._replace(start_ns=bar.start_ns + by_ns, end_ns=bar.end_ns + by_ns)
    bars = sorted((*plan.bars[:index], other, *plan.bars[index + 1 :]), key=lambda bar: (bar.device, bar.start_ns))
    return replace(plan, bars=tuple(bars))


def is_kind(kind: Kind, microbatch: int) -> Callable[[Bar], bool]:
    """Choose bars of one kind and micro-batch."""
    return lambda bar: (bar.op.kind, bar.op.microbatch) == (kind, microbatch)


def test_a_legal_plan_passes(plan: FilledPlan) -> None:
    """Else the others show nothing."""
    check_plan(plan)
    check_orders(orders_of(plan), plan.schedule, plan.encoders, plan.replica_of)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: replace(plan, bars=plan.bars[1:]), "does not run"),
        (lambda plan: replace(plan, bars=(*plan.bars, plan.bars[-1])), "runs twice"),
        (lambda plan: replace(plan, step_ns=plan.step_ns - 1), "the step takes"),
        (lambda plan: replace(plan, replica_of=((1, 1, 1, 1, 1),)), "which is not its own"),
        (lambda plan: moved(plan, is_kind(Kind.FORWARD, 0), -1), "before it has ended"),
        (lambda plan: moved(plan, is_kind(Kind.ENCODER_FORWARD, 4), 2000), "before it has ended|arrives at"),
        (lambda plan: moved(plan, is_kind(Kind.ENCODER_BACKWARD, 0), -300), "before it has ended|arrives at"),
        (lambda plan: moved(plan, is_kind(Kind.BACKWARD, 4), 1), "the step takes|before it has ended|arrives at"),
        (lambda plan: replace(plan, filling=Filling.COARSE), "in a coarse plan"),
        (lambda plan: replace(plan, encoders=(replace(ENCODER, max_live=1),)), "holds . micro-batches; limit 1"),
        (lambda plan: replace(plan, encoders=(replace(ENCODER, forward_ns=((10, 11),)),)), "its bar"),
    ],
)
def test_a_broken_rule_is_found(plan: FilledPlan, change: Callable[[FilledPlan], FilledPlan], message: str) -> None:
    """Each of them by itself."""
    with pytest.raises(InvariantError, match=message):
        check_plan(change(plan))


def test_nothing_starts_while_parameters_are_gathered() -> None:
    """Of the pipeline; encoders may."""
    plain = fill(one_forward_one_backward(2, 5), TIMES, ())
    with pytest.raises(InvariantError, match="rank 0 begins 0F0 while parameters are gathered"):
        check_plan(moved(plain, is_kind(Kind.FORWARD, 0), -1))


def test_orders_are_refused_with_the_microbatch(plan: FilledPlan) -> None:
    """What is missing, doubled, elsewhere, or in a circle."""
    orders = [list(row) for row in orders_of(plan)]
    encoders, places = plan.encoders, plan.replica_of

    def refuse(rows: list[list[Op]], message: str) -> None:
        with pytest.raises(PipelinePlanError, match=message):
            check_orders(rows, plan.schedule, encoders, places)

    target = Op(Kind.ENCODER_BACKWARD, 3, segment=1)
    device = encoders[0].replicas[places[0][3]][0]
    without = [[op for op in row if op != target] for row in orders]
    refuse(without, "micro-batch 3: no device runs EB3")
    refuse([[*row, target] for row in without], f"micro-batch 3: device {1 - device} runs EB3 .* belongs to device")
    refuse(
        [[target, *row] if index == device else row for index, row in enumerate(without)], "micro-batch 3 stops at EB3"
    )
    refuse([[Op(Kind.FORWARD, 9), *orders[0]], orders[1]], "micro-batch 9: device 0 runs 0F9; it is not part")
