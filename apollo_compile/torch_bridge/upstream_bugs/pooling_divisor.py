"""Backward of average pooling with windows beyond the image, where Inductor divides by too large a number.

    divide_by_clipped_windows(graph)    in place, on a graph after AOTAutograd and before Inductor's passes
    is_left_to_aten(node)               whether Inductor must call ATen for a node

With `ceil_mode`, the last windows of a pooling may extend beyond the image. The divisor of the average is the size of
the window within image and padding; Inductor's backward divides by the size of a whole window. Without padding the
right divisor is the number of elements of the image in the window, which is that of `count_include_pad=False`, and
which Inductor computes correctly. With padding, Inductor calls ATen.
"""

from __future__ import annotations

import torch
from torch import fx

_POOLS = (torch.ops.aten.avg_pool2d_backward.default, torch.ops.aten.avg_pool3d_backward.default)
_PADDING, _CEIL_MODE, _COUNT_INCLUDE_PAD, _DIVISOR = 4, 5, 6, 7
"""Positions of arguments of a pooling's backward."""

_LEAVE_TO_ATEN = "should_fallback"
"""Key in the `meta` of a node that makes Inductor call ATen."""


def divide_by_clipped_windows(graph: fx.Graph) -> None:
    """Rewrite backward operators of average pooling so that Inductor divides as eager PyTorch does.

    Arguments:
        graph: forward and backward together, or an inference graph.
    """
    for target in _POOLS:
        for node in graph.find_nodes(op="call_function", target=target):
            ceil_mode, counts_padding = node.args[_CEIL_MODE], node.args[_COUNT_INCLUDE_PAD]
            if not (ceil_mode and counts_padding) or node.args[_DIVISOR] is not None:
                continue
            if any(node.args[_PADDING]):
                node.meta[_LEAVE_TO_ATEN] = True
            else:
                node.update_arg(_COUNT_INCLUDE_PAD, False)


def is_left_to_aten(node: fx.Node) -> bool:
    """Whether Inductor must call ATen; its cache key does not distinguish such code from other code for the graph."""
    return _LEAVE_TO_ATEN in node.meta
