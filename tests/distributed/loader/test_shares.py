"""The samples of steps, and the slots that they get."""

from __future__ import annotations

import numpy as np
import pytest

from apollo_compile.distributed.loader.shares import Layout, samples_of_steps, share_in_turn, share_out


def test_heavy_micro_batches_run_together_and_ranks_take_the_same_over_the_step() -> None:
    """Bins by load: the two heaviest first, the next two in reverse."""
    layout = Layout(batch_size=1, micro_batches=2, num_ranks=2, group_size=2)
    costs = np.array([[[10], [40], [20], [30]]], dtype=np.int64)
    (slots,) = share_out(costs, layout)
    assert slots.tolist() == [2, 0, 3, 1]  # 40 and 30 in the first micro-batch; rank 0 has 40 + 10, rank 1 has 30 + 20


@pytest.mark.parametrize("num_samples", [48, 53, 49])
def test_groups_divide_the_samples_of_each_step(num_samples: int) -> None:
    """A whole epoch has every sample once, apart from those that fill up the last step."""
    layout = Layout(batch_size=2, micro_batches=2, num_ranks=4, group_size=2)
    order = np.random.default_rng(0).permutation(num_samples)
    steps = -(-num_samples // layout.step_size)
    by_group = [
        [row for block in samples_of_steps(order, layout, 0, steps, group) for row in block] for group in range(2)
    ]
    for step in range(steps):
        own = np.concatenate([rows[step] for rows in by_group])
        begin = step * layout.step_size
        expected = order[begin : begin + layout.step_size].tolist()
        expected += order[: max(0, 8 - len(expected))].tolist()  # each of 8 slots needs one
        assert sorted(own.tolist()) == sorted(expected)
        assert all(len(rows[step]) >= layout.num_slots for rows in by_group)


def test_in_turn_is_the_order_of_torch() -> None:
    """Rank by rank, one micro-batch after the other."""
    layout = Layout(batch_size=2, micro_batches=2, num_ranks=2, group_size=2)
    assert share_in_turn(8, layout).tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"group_size": 3}, "group_size is 3: expected a divisor of 4"), ({"batch_size": 0}, "batch_size is 0")],
)
def test_numbers_that_do_not_fit_are_refused(changes: dict[str, int], message: str) -> None:
    """When a layout is made."""
    with pytest.raises(ValueError, match=message):
        Layout(**{"batch_size": 1, "micro_batches": 1, "num_ranks": 4, "group_size": 4, **changes})
