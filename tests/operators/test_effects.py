"""What an operator does besides its outputs follows from torch's tags, and from the table where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.inductor_prims  # registers the operators for seeds
from torch import fx

from apollo_compile.operators.effects import draws, has_effect, is_collective, is_opaque, is_waited_for, reads_number

aten, prims = torch.ops.aten, torch.ops.prims


@torch.library.custom_op("apollo_tests::seen", mutates_args=())
def seen(x: torch.Tensor) -> torch.Tensor:
    """Return a copy."""
    return x.clone()


def _call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    return graph.call_function(target, tuple(graph.placeholder("x") if arg is ... else arg for arg in args), kwargs)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (_call(aten.rand.default, [4]), True),
        (_call(aten.sin.default, ...), False),
        (_call(prims.inductor_seeds.default, 2, torch.device("cpu")), True),  # torch does not tag it
        (_call(prims.inductor_random.default, [4], ..., "rand"), False),  # its seed was drawn
        (_call(aten._scaled_dot_product_flash_attention_for_cpu.default, ..., ..., ...), False),
        (_call(aten._scaled_dot_product_flash_attention_for_cpu.default, ..., ..., ..., 0.1), True),
        (_call(aten._scaled_dot_product_flash_attention_for_cpu.default, ..., ..., ..., dropout_p=0.1), True),
        (_call(seen._opoverload, ...), True),
        (_call(torch.ops.higher_order.cond, ...), True),
    ],
    ids=str,
)
def test_what_may_draw_is_in_the_order_of_random_numbers(node: fx.Node, expected: bool) -> None:
    """Attention draws for its dropout only; of a user's operator nothing is known."""
    assert draws(node) is expected


def test_what_is_known_to_compute_only_has_no_effect() -> None:
    """A user's operator may do anything, a check raises, and a write is an order of its own."""
    assert [has_effect(_call(target, ...)) for target in (aten.sin.default, aten._assert_async.msg)] == [False, True]
    assert not has_effect(_call(aten.copy_.default, ..., ...))
    assert is_opaque(_call(seen._opoverload, ...))
    assert has_effect(_call(seen._opoverload, ...))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no collectives")
def test_a_collective_is_waited_for_if_all_its_values_are() -> None:
    """One whose value something else reads is not."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    sums = [graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "group")) for _ in range(2)]
    waits = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (sums[0],))
    graph.call_function(aten.sin.default, (sums[1],))
    assert [is_waited_for(value) for value in sums] == [True, False]
    assert [is_collective(node) for node in (*sums, waits, x)] == [True, True, True, False]
    assert not draws(sums[0])


def test_numbers_that_are_read_are_told_from_sizes() -> None:
    """The ones depend on what is in a tensor; a truth that eager would branch on is no number."""
    targets = (aten._local_scalar_dense.default, aten.item.default, aten.sym_size.int, aten.equal.default)
    assert [reads_number(_call(target, ...)) for target in targets] == [True, True, False, False]
