"""Gradients of averages over windows that overhang; what they are with lanes is in `end_to_end/`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from apollo_compile.torch_bridge.upstream_bugs.pooling_divisor import divide_by_clipped_windows, is_left_to_aten
from tests.torch_bridge.upstream_bugs.defects import assert_as_listed


def test_torch_divides_by_the_size_of_a_whole_window() -> None:
    """The last window has one element of nine, and its gradient is one."""
    image = torch.ones(1, 1, 4, 4, requires_grad=True)
    torch.compile(lambda x: functional.avg_pool2d(x, 3, ceil_mode=True).sum(), backend="inductor")(image).backward()
    assert_as_listed("pooling_divisor.py", is_there=float(image.grad[0, 0, 3, 3]) != 1)


def _is_left(padding: int, *, ceil_mode: bool) -> tuple[bool, bool]:
    """Return whether padding still counts in the backward, and whether ATen computes it."""

    def backward(gradient: Tensor, image: Tensor) -> Tensor:
        window = [3, 3], [2, 2], [padding, padding]
        return torch.ops.aten.avg_pool2d_backward(gradient, image, *window, ceil_mode, True, None)

    image = torch.ones(1, 1, 6, 6)
    graph = make_fx(backward)(functional.avg_pool2d(image, 3, 2, padding, ceil_mode), image).graph
    divide_by_clipped_windows(graph)
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.avg_pool2d_backward.default)
    return bool(node.args[6]), is_left_to_aten(node)


def test_only_windows_that_overhang_are_written_otherwise() -> None:
    """Without padding Inductor can do it, with padding ATen does."""
    assert _is_left(0, ceil_mode=False) == (True, False)
    assert _is_left(1, ceil_mode=False) == (True, False)
    assert _is_left(0, ceil_mode=True) == (False, False)
    assert _is_left(1, ceil_mode=True) == (True, True)
