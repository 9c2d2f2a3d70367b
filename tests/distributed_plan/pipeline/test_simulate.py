"""The event simulation, against one that looks at every nanosecond."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.schedules import one_forward_one_backward
from apollo_compile.distributed.pipeline.simulate import duration_of, inputs_of, orders_of, simulate
from apollo_compile.distributed.pipeline.values import Encoder, Kind, Op, StageTimes, one_replica_per_rank
from apollo_compile.errors import PipelinePlanError
from tests.distributed_plan.pipeline.problems import Problem, random_problem


def tick(problem: Problem, orders: Sequence[Sequence[Op]]) -> dict[Op, int]:
    """Return when every operation ends, by asking at every nanosecond what each device could begin."""
    schedule, times, encoders = problem
    ends: dict[Op, int] = {}
    place = {op: device for device, row in enumerate(orders) for op in row}
    left = [list(row) for row in orders]
    busy_until = [0] * len(orders)
    now = 0
    while any(left):
        for device, row in enumerate(left):
            if not row or busy_until[device] > now:
                continue
            op = row[0]
            arrivals = [
                ends.get(other, 10**9) + (times.transfer_ns if place[other] != device else 0)
                for other in inputs_of(op, schedule.num_stages - 1, encoders)
            ]
            if not op.is_encoder:
                arrivals.append(times.lead_ns)
            if all(arrival <= now for arrival in arrivals):
                ends[op] = busy_until[device] = now + duration_of(op, times, encoders)
                row.pop(0)
        now += 1
        assert now < 10**5, "deadlock"
    return ends


@pytest.mark.parametrize("seed", range(25))
def test_operations_end_when_a_clock_of_nanoseconds_says(seed: int) -> None:
    """For orders of filled plans, encoders included."""
    problem = random_problem(seed)
    plan = fill(*problem)
    orders = orders_of(plan)
    bars = simulate(
        problem.schedule, problem.times, orders=orders, encoders=problem.encoders, replica_of=plan.replica_of
    )
    assert {bar.op: bar.end_ns for bar in bars} == tick(problem, orders)


def test_an_order_that_cannot_run_names_the_microbatch() -> None:
    """The encoder's forward of micro-batch 2 is behind the forward that reads it."""
    schedule = one_forward_one_backward(2, 3)
    times = StageTimes(forward_ns=(10, 10), backward_ns=(20, 20))
    encoder = Encoder(name="vision", forward_ns=((5,),), replicas=one_replica_per_rank(2))
    plan = fill(schedule, times, (encoder,))
    rows = [[op for op in row if op != Op(Kind.ENCODER_FORWARD, 2)] for row in orders_of(plan)]
    rows[0].append(Op(Kind.ENCODER_FORWARD, 2))
    with pytest.raises(
        PipelinePlanError, match=r"device 0 cannot run: it stops at 0F2, which needs EF2 of .* has not run"
    ):
        simulate(schedule, times, orders=rows, encoders=(encoder,), replica_of=((0, 0, 0),))
