"""Operators that Inductor compiles to code with wrong numbers, written so that it does not.

    write_otherwise(graph)     in place, on a graph after AOTAutograd and before Inductor's passes

Note [Windows that overhang]
    With `ceil_mode`, the last windows of a pooling may reach over the end of the image. What an average over them is
    divided by is the size of the window within image and padding; Inductor's backward (2.13, in two and three
    dimensions) divides by the size of a whole window. Without padding that is the number of elements of the image that
    the window has, which is what `count_include_pad=False` asks for, and which Inductor does right. With padding the
    operator is left to ATen.
    Source: https://github.com/pytorch/pytorch/issues/198119

A second such operator is mended where the code for it is made: `scatter_addresses.py`.
"""

from __future__ import annotations

import torch
from torch import fx

_POOLS = (torch.ops.aten.avg_pool2d_backward.default, torch.ops.aten.avg_pool3d_backward.default)
_PADDING, _CEIL_MODE, _COUNT_INCLUDE_PAD, _DIVISOR = 4, 5, 6, 7
"""Positions of arguments of a pooling's backward."""


def write_otherwise(graph: fx.Graph) -> None:
    """Rewrite what Inductor would compile to wrong code; numbers of eager PyTorch stay as they are.

    Arguments:
        graph: forward and backward together, or an inference graph.
    """
    for target in _POOLS:
        for node in graph.find_nodes(op="call_function", target=target):
            ceil_mode, counts_padding = node.args[_CEIL_MODE], node.args[_COUNT_INCLUDE_PAD]
            if not (ceil_mode and counts_padding) or node.args[_DIVISOR] is not None:
                continue
            if any(node.args[_PADDING]):
                node.meta["should_fallback"] = True
            else:
                node.update_arg(_COUNT_INCLUDE_PAD, False)
