"""Work of a call of an operator, as formulas of tensor shapes: bytes, flops, output tiles, kernels.

A formula takes an `OperatorCall` and returns a sympy expression. The conventions agree with `torch.utils.flop_counter`,
which counts some of these operators:

- a multiply-add is two flops; causal attention counts as full attention;
- a pointwise operator is one flop per element of its result, a transcendental function as many as its vectorised code;
- the bytes of a tensor are those of its distinct elements, so an expanded dimension (stride 0) counts once;
- a view is free; any other operator reads its inputs once and writes its outputs once. Fusion is accounted for per
  segment, in `cost_model/fusion.py`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import sympy

from apollo_compile.operators.call import (
    ZERO,
    Expr,
    Formula,
    OperatorCall,
    TensorMeta,
    distinct_tensors,
    product,
    total_bytes,
)

TILE = 128
"""Rows and columns of the output tile of a GEMM that one unit of a GPU computes at a time."""

Elements: TypeAlias = Any
"""A function from a call to the elements and bytes that it writes."""


# ---------------------------------------------------------------------------------------------------------- bytes


def nothing(call: OperatorCall) -> Expr:
    """Return zero."""
    return ZERO


def all_inputs(call: OperatorCall) -> Expr:
    """Return the bytes of all inputs."""
    return total_bytes(call.inputs)


def all_outputs(call: OperatorCall) -> Expr:
    """Return the bytes of all outputs."""
    return total_bytes(call.outputs)


def all_but_first_input(call: OperatorCall) -> Expr:
    """Return the bytes of all inputs but the first, which is overwritten."""
    return total_bytes(distinct_tensors((call.args[1:], call.kwargs)))


def indexed(call: OperatorCall) -> Expr:
    """Return the bytes of the indices and of the selected elements."""
    return all_but_first_input(call) + all_outputs(call)


def embedded(call: OperatorCall) -> Expr:
    """Return the bytes of the indices and of the selected rows."""
    return total_bytes((call.argument(1, "indices"),)) + all_outputs(call)


# ---------------------------------------------------------------------------------------------------------- flops


def per_output(flops: int) -> Formula:
    """Return the formula of `flops` per element of the first output."""

    def count(call: OperatorCall) -> Expr:
        return call.outputs[0].num_elements * flops if call.outputs else ZERO

    return count


def per_output_of_all(flops: int) -> Formula:
    """Return the formula of `flops` per element of every output."""

    def count(call: OperatorCall) -> Expr:
        return sympy.Add(*(output.num_elements for output in call.outputs)) * flops

    return count


def per_input(flops: int) -> Formula:
    """Return the formula of `flops` per element of the first input."""

    def count(call: OperatorCall) -> Expr:
        return call.inputs[0].num_elements * flops if call.inputs else ZERO

    return count


def matmul_flops(first: int) -> Formula:
    """Return the formula of (..., m, k) times (..., k, n) or (k), the arguments `first` and `first + 1`."""

    def count(call: OperatorCall) -> Expr:
        left, right = call.args[first], call.args[first + 1]
        columns = right.shape[-1] if len(right.shape) > 1 else 1
        return left.num_elements * columns * 2

    return count


def linear_flops(call: OperatorCall) -> Expr:
    """Return the flops of a linear layer with a weight of shape (out, in)."""
    image, weight = call.args[0], call.args[1]
    return image.num_elements * weight.shape[0] * 2


def any_convolution_flops(call: OperatorCall) -> Expr:
    """Return the flops of a convolution that has an argument `transposed`."""
    return (transposed_convolution_flops if call.argument(6, "transposed", False) else convolution_flops)(call)


def convolution_flops(call: OperatorCall) -> Expr:
    """Return the flops of a convolution: one filter per element of the result."""
    return _filter_flops(call.outputs[0], call.args[0], call.args[1])


def transposed_convolution_flops(call: OperatorCall) -> Expr:
    """Return the flops of a transposed convolution: one filter per element of the input."""
    return _filter_flops(call.args[0], call.args[0], call.args[1])


def _filter_flops(positions: TensorMeta, image: TensorMeta, weight: TensorMeta) -> Expr:
    # The weight is (out, in / groups, ...), or (in, out / groups, ...) if transposed: both account for groups.
    return product(positions.shape[2:]) * image.shape[0] * weight.num_elements * 2


def convolution_backward_flops(call: OperatorCall) -> Expr:
    """Return the flops of a convolution's gradients; those of input and weight each take as many as the forward."""
    gradient, image, weight = call.args[0], call.args[1], call.args[2]
    transposed, wanted = bool(call.args[7]), call.args[10]
    forward = _filter_flops(image if transposed else gradient, image, weight)
    bias = gradient.num_elements if wanted[2] else ZERO
    return forward * (int(wanted[0]) + int(wanted[1])) + bias


def convolution_backward_read(call: OperatorCall) -> Expr:
    """Return the bytes of the output gradient, and of weight and input where the gradient of the other is computed."""
    wanted = call.args[10]
    weight = call.args[2].num_bytes if wanted[0] else ZERO
    image = call.args[1].num_bytes if wanted[1] else ZERO
    return call.args[0].num_bytes + weight + image


def attention_flops(call: OperatorCall) -> Expr:
    """Return the flops of two matmuls: query times key, and scores times value."""
    query, key, value = call.args[0], call.args[1], call.args[2]
    scores = product(query.shape[:-1]) * key.shape[-2]
    return scores * (query.shape[-1] + value.shape[-1]) * 2


def attention_backward_flops(call: OperatorCall) -> Expr:
    """Return the flops of five matmuls: the scores again, then the gradients of value, scores, query and key."""
    query, key, value = call.args[1], call.args[2], call.args[3]
    scores = product(query.shape[:-1]) * key.shape[-2]
    return scores * (query.shape[-1] * 3 + value.shape[-1] * 2) * 2


# ------------------------------------------------------------------------------------------------------- scatters


def scattered(position: int) -> Elements:
    """Return a function that counts elements and bytes of the values at `position`; a number is written per index."""

    def count(call: OperatorCall) -> tuple[Expr, Expr]:
        values = call.args[position]
        if isinstance(values, TensorMeta):
            return values.num_elements, values.num_bytes
        indices = next((tensor for tensor in call.inputs[1:]), call.inputs[0])
        return indices.num_elements, indices.num_elements * call.inputs[0].itemsize

    return count


def filled(call: OperatorCall) -> tuple[Expr, Expr]:
    """Return the elements and bytes that an `index_fill` writes: one row per index."""
    target, dim, indices = call.args[:3]
    rest = [size for place, size in enumerate(target.shape) if place != dim % len(target.shape)]
    elements = product(rest) * indices.num_elements
    return elements, elements * target.itemsize


# ---------------------------------------------------------------------------------------------------------- tiles


def _tiles(rows: Expr, columns: Expr, batch: Expr = 1) -> Expr:
    return sympy.ceiling(rows / TILE) * sympy.ceiling(columns / TILE) * batch


def matmul_tiles(call: OperatorCall) -> Expr:
    """Return the tiles of a result of shape (..., m, n), (m) or ()."""
    shape = call.outputs[0].shape
    rows = shape[-2] if len(shape) > 1 else sympy.Integer(1)
    columns = shape[-1] if shape else sympy.Integer(1)
    return _tiles(rows, columns, product(shape[:-2]))


def linear_tiles(call: OperatorCall) -> Expr:
    """Return the tiles of a result whose dimensions but the last are rows of one matrix."""
    shape = call.outputs[0].shape
    return _tiles(product(shape[:-1]), shape[-1])


def convolution_tiles(call: OperatorCall) -> Expr:
    """Return the tiles of a GEMM with a row per position of every image and a column per channel."""
    return _position_tiles(call.outputs[0])


def convolution_backward_tiles(call: OperatorCall) -> Expr:
    """Return the tiles of both gradients.

    The input's gradient is tiled like a convolution's result; the weight's is a GEMM with a row per output channel and
    a column per filter weight.
    """
    image, weight, wanted = call.args[1], call.args[2], call.args[10]
    tiles = _position_tiles(image) if wanted[0] else ZERO
    return tiles + (_tiles(weight.shape[0], product(weight.shape[1:])) if wanted[1] else ZERO)


def _position_tiles(image: TensorMeta) -> Expr:
    return _tiles(image.shape[0] * product(image.shape[2:]), image.shape[1])


def attention_tiles(first: int) -> Formula:
    """Return the formula of one tile per block of queries of a head; the query is argument `first`."""

    def count(call: OperatorCall) -> Expr:
        query = call.args[first]
        return _tiles(query.shape[-2], sympy.Integer(1), product(query.shape[:-2]))

    return count


# -------------------------------------------------------------------------------------------------------- kernels


def launches(number: int) -> Formula:
    """Return the formula of a constant number of kernels."""
    return lambda call: sympy.Integer(number)


one = launches(1)


def convolution_backward_launches(call: OperatorCall) -> Expr:
    """Return one kernel per requested gradient; the bias gradient is a sum."""
    return sympy.Integer(sum(map(bool, call.args[10])))
