"""Matmuls in the graph of a body, and the calls of oneDNN that take the place of some of them.

On a CPU, torch and Inductor call the BLAS that torch was built with for every float32 matmul. Which matmuls oneDNN
computes faster is measured by the device (`device/cpu/matmul_libraries.py`).

Note [transposed left]: the gradient of a weight is a matmul of a transposed gradient and a layer's input. oneDNN needs
the left matrix in row-major order, so a body also writes it in that order, which Inductor fuses into the code that
computes the gradient.

Results differ between the two libraries as between any two orders of a sum. Matmuls stay with BLAS if the user wants
the same numbers every time, or allows float32 with less precision, which has rules of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from apollo_compile.target.matmul import Matmul
from apollo_compile.torch_bridge.compile_scope import compile_lock

LINEAR = "apollo_compile::linear"
"""The operator for matmuls that oneDNN computes; Inductor's patterns do not match it."""


def find_matmuls(graph: fx.Graph) -> list[Matmul]:
    """Return the matmuls in a graph after AOTAutograd that both libraries can compute."""
    return [matmul for matmul in map(_matmul_of, graph.nodes) if matmul is not None]


def replace_with_onednn(graph: fx.Graph, is_for_onednn: Callable[[Matmul], bool]) -> int:
    """Replace the matmuls for which `is_for_onednn` is true by calls of oneDNN; return their number.

    Arguments:
        graph: after AOTAutograd, with values; changed in place.
        is_for_onednn: called with each matmul that `find_matmuls` returns.
    """
    count = 0
    for node in list(graph.nodes):
        matmul = _matmul_of(node)
        if matmul is None or not is_for_onednn(matmul):
            continue
        *bias, left, right = node.args
        with graph.inserting_before(node):
            weight = graph.call_function(torch.ops.aten.permute.default, (right, [1, 0]))
            weight.meta["val"] = right.meta["val"].t()
            linear = graph.call_function(onednn_linear(), (left, weight, bias[0] if bias else None))
        linear.meta.update(node.meta)
        node.replace_all_uses_with(linear)
        graph.erase_node(node)
        count += 1
    return count


def is_linear(target: object) -> bool:
    """Whether the target is the operator of `onednn_linear`."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.name == LINEAR


def onednn_linear() -> torch._ops.OpOverload:
    """Return the operator `input @ weight.T + bias` of oneDNN: float32, row-major input, weight in either order."""
    namespace, _, name = LINEAR.partition("::")
    with compile_lock():
        if not hasattr(getattr(torch.ops, namespace), name):  # a definition survives a reload of this file
            torch.library.define(LINEAR, "(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
            torch.library.impl(LINEAR, "CPU", call_onednn)
            torch.library.register_fake(LINEAR, lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]))
    return torch.ops.apollo_compile.linear.default


def call_onednn(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `value @ weight.T + bias`, computed by oneDNN."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(value, weight, bias, "none", [], "")
    return result


@functools.cache
def lower_linear() -> None:
    """Register a lowering to oneDNN for the operator of `onednn_linear`, as Inductor has for frozen weights.

    Inductor's lowering requires a weight that is a constant and row-major.
    """
    from torch._inductor import ir, mkldnn_ir
    from torch._inductor.lowering import register_lowering

    class Linear(mkldnn_ir.LinearUnary):
        """oneDNN's call with a weight that is row-major or column-major."""

        @classmethod
        def make(cls, value: Any, weight: Any, bias: Any) -> Any:
            inputs = [cls.require_contiguous(cls.realize_input(value)), cls.realize_input(weight)]
            if bias is not None:
                inputs.append(cls.require_contiguous(cls.realize_input(bias)))
            size = [value.get_size()[0], weight.get_size()[0]]
            layout = ir.FixedLayout(device=value.get_device(), dtype=value.get_dtype(), size=size)
            no_activation: list[Any] = ["none", [-1], ""]
            constants = no_activation if bias is not None else [None, *no_activation]
            call = cls(layout=layout, inputs=inputs, constant_args=constants)
            return ir.TensorBox.create(mkldnn_ir._create_output_node(call))  # type: ignore[no-untyped-call]

    register_lowering(onednn_linear(), type_promotion_kind=None)(Linear.make)


def _matmul_of(node: fx.Node) -> Matmul | None:
    """Return the matmul that a node computes, if both libraries can compute it."""
    if node.target not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) or node.kwargs:
        return None
    *biases, left, right = (argument.meta["val"] for argument in node.args)  # type: ignore[union-attr]
    values = (*biases, left, right)
    if any(value.dtype != torch.float32 or value.device.type != "cpu" for value in values):
        return None
    if not all(type(size) is int for value in values for size in (*value.shape, *value.stride())):
        return None  # dynamic sizes: comparing them would add guards
    (m, k), n = left.shape, right.shape[1]
    is_left, is_right = _is_transposed(left), _is_transposed(right)
    if is_left is None or is_right is None or any(bias.shape != (n,) or bias.stride() != (1,) for bias in biases):
        return None
    return Matmul(
        rows=m, inner=k, columns=n, is_left_transposed=is_left, is_right_transposed=is_right, has_bias=bool(biases)
    )


def _is_transposed(matrix: torch.Tensor) -> bool | None:
    """Return whether a matrix is column-major; None if it is a part of a larger matrix."""
    if matrix.is_contiguous():
        return False
    return True if matrix.t().is_contiguous() else None
