"""What a node of the FX graph needs from a device, as formulas.

    torch.fx.Node -> NodeWork      flops, bytes read, bytes written and kernels launched as sympy expressions in the
                                   graph's shape symbols
    NodeWork, hints -> ir.Work     the same as integers

One table, `_RULES`, has an entry per operator: its kind, its flops, its bytes where they are not simply all inputs and
all outputs, and its kernels where they are not simply one. What the table does not name is classified by what torch
itself says of the operator (a view, a pointwise operator); anything else is counted by its bytes and has the kind
UNKNOWN, so that capture can report it.

Conventions, chosen to agree with `torch.utils.flop_counter` where that counts at all:

- a multiply-add is two flops; causal attention is counted in full;
- a pointwise operator is one flop per element of its result, a transcendental function what its vectorised code takes;
- a tensor is as many bytes as it has distinct elements, so an expanded dimension (stride 0) counts once;
- a view is free; an operator alone reads its inputs once and writes its outputs once. What fusion saves is counted
  per segment, in `fusion.py`.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

from apollo_compile import ir

Expr: TypeAlias = Any
"""A sympy expression; sympy has no annotations."""

_ZERO: Expr = sympy.Integer(0)

TILE = 128
"""Rows and columns of the block of a product's result that one unit of a GPU computes at a time."""


class WorkKind(enum.StrEnum):
    """What sort of work an operator is."""

    VIEW = "view"
    """Free: an alias of its input, or arithmetic on sizes."""
    CONSTANT = "constant"
    """Makes a tensor from no tensor; compilers fold it into its readers."""
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    COPY = "copy"
    GATHER = "gather"
    SCATTER = "scatter"
    RANDOM = "random"
    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    LOOKUP = "lookup"
    """Sorts, scans and searches: a library call whose order depends on the values."""
    UNKNOWN = "unknown"
    """Counted by its bytes alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMeta:
    """The shape of a tensor and the bytes of its distinct elements."""

    shape: tuple[Expr, ...]
    num_bytes: Expr
    dtype: str = "float32"

    itemsize: int = 4

    @property
    def num_elements(self) -> Expr:
        """Elements of the tensor, repeated ones included."""
        return _product(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeWork:
    """Work of one node as formulas, and the sort of work it is."""

    kind: WorkKind
    flops: Expr
    bytes_read: Expr
    bytes_written: Expr
    tiles: Expr = _ZERO
    """Output tiles of a product, `TILE` x `TILE` each."""
    launches: Expr = _ZERO
    """Kernels, as many as the operator launches where nothing is fused with it."""
    kernel: ir.KernelKind = ir.KernelKind.LOOP
    dtype: str = "float32"
    """Of the first operand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """One call of an operator, with metadata in the place of tensors."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


_Formula = Callable[[_Call], Expr]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    kind: WorkKind
    flops: _Formula
    read: _Formula
    written: _Formula
    tiles: _Formula
    launches: _Formula
    kernel: ir.KernelKind


# ------------------------------------------------------------------------------------------------------ interface


def work_of(node: torch.fx.Node) -> NodeWork:
    """Return the work of a call of an FX graph, from the `val` metadata of the node and its arguments.

    Nodes that are no calls (placeholders, attributes, outputs) are free.
    """
    if node.op not in ("call_function", "call_method", "call_module"):
        return NodeWork(kind=WorkKind.VIEW, flops=_ZERO, bytes_read=_ZERO, bytes_written=_ZERO)
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda read: read.meta.get("val"))
    return node_work(node.target, args, kwargs, node.meta.get("val"))


def node_work(target: object, args: Iterable[Any], kwargs: Mapping[str, Any], out: Any) -> NodeWork:
    """Return the work of `target` on arguments whose tensors are real, fake or `TensorMeta`.

    `target` is an operator overload, a Python function, or a name such as `aten.mm.default`.
    """
    known: dict[int, TensorMeta] = {}  # a tensor that is passed twice is read once
    call_args, call_kwargs = _describe(tuple(args), known), _describe(dict(kwargs), known)
    call = _Call(
        args=call_args,
        kwargs=call_kwargs,
        inputs=_distinct_tensors((call_args, call_kwargs)),
        outputs=_distinct_tensors(_describe(out, known)),
    )
    rule = _find_rule(target)
    return NodeWork(
        kind=rule.kind,
        flops=rule.flops(call),
        bytes_read=rule.read(call),
        bytes_written=rule.written(call),
        tiles=rule.tiles(call),
        launches=rule.launches(call),
        kernel=rule.kernel,
        dtype=next((tensor.dtype for tensor in (*call.inputs, *call.outputs)), "float32"),
    )


def evaluate(work: NodeWork, hints: Mapping[sympy.Symbol, int]) -> ir.Work:
    """Return the work as integers, with every shape symbol replaced by its hint.

    Raises `ValueError` where a symbol has no hint.
    """
    formulas = (work.flops, work.bytes_read, work.bytes_written, work.tiles, work.launches)
    flops, read, written, tiles, launches = (evaluate_formula(formula, hints) for formula in formulas)
    if not launches:
        return ir.Work(flops=flops, bytes_read=read, bytes_written=written)
    kernel = ir.Kernel(
        kind=work.kernel,
        dtype=work.dtype,
        flops=flops,
        bytes_moved=read + written,
        bytes_from_outside=read,
        tiles=tiles,
        launches=launches,
    )
    return ir.Work(flops=flops, bytes_read=read, bytes_written=written, kernels=launches, parts=(kernel,))


# ------------------------------------------------------------------------------------------------------- metadata


def evaluate_formula(formula: Expr, hints: Mapping[sympy.Symbol, int]) -> int:
    """Return the value of a formula, with every shape symbol replaced by its hint.

    Raises `ValueError` where a symbol has no hint.
    """
    if not formula.is_Integer:
        formula = formula.xreplace({symbol: sympy.Integer(value) for symbol, value in hints.items()})
    if formula.free_symbols:
        missing = ", ".join(sorted(str(symbol) for symbol in formula.free_symbols))
        raise ValueError(f"cannot evaluate the work {formula}: no hint for {missing}; give one per shape symbol")
    return int(formula)


def _describe(value: Any, known: dict[int, TensorMeta]) -> Any:
    """Replace tensors by their metadata, one per tensor, and symbolic integers by their expressions, at any depth."""
    if isinstance(value, torch.Tensor):
        return known.setdefault(id(value), _describe_tensor(value))
    if isinstance(value, torch.SymInt):
        return expression(value)
    if isinstance(value, tuple | list):
        return tuple(_describe(item, known) for item in value)
    if isinstance(value, Mapping):
        return {key: _describe(item, known) for key, item in value.items()}
    return value


def _describe_tensor(tensor: torch.Tensor) -> TensorMeta:
    shape = tuple(expression(size) for size in tensor.shape)
    distinct: Iterable[Expr] = shape
    if tensor.layout is torch.strided:
        distinct = (size for size, stride in zip(shape, tensor.stride(), strict=True) if not _is_zero(stride))
    return TensorMeta(
        shape=shape,
        num_bytes=_product(distinct) * tensor.dtype.itemsize,
        dtype=str(tensor.dtype).removeprefix("torch."),
        itemsize=tensor.dtype.itemsize,
    )


def _is_zero(stride: int | torch.SymInt) -> bool:
    return isinstance(stride, int) and stride == 0  # a symbolic stride is a product of sizes, none of them zero


def expression(size: int | torch.SymInt) -> Expr:
    """Return a size as a sympy expression."""
    if isinstance(size, torch.SymInt):
        return size.node.expr
    return sympy.Integer(int(size))


def _distinct_tensors(value: Any) -> tuple[TensorMeta, ...]:
    """Return the tensors in `value` in order; arguments that are one and the same value count once."""
    found: dict[int, TensorMeta] = {}
    _collect(value, found)
    return tuple(found.values())


def _collect(value: Any, found: dict[int, TensorMeta]) -> None:
    if isinstance(value, TensorMeta):
        found.setdefault(id(value), value)
    elif isinstance(value, tuple | list):
        for item in value:
            _collect(item, found)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)


def _product(factors: Iterable[Any]) -> Expr:
    constant = 1
    product = sympy.Integer(1)
    for factor in factors:  # integers first: sympy's own product is a hundred times slower
        if isinstance(factor, int | sympy.Integer):
            constant *= int(factor)
        else:
            product = product * factor
    return product * constant


def _total_bytes(tensors: Iterable[Any]) -> Expr:
    return sympy.Add(*(tensor.num_bytes for tensor in tensors if isinstance(tensor, TensorMeta)))


# ---------------------------------------------------------------------------------------------------------- bytes


def _nothing(call: _Call) -> Expr:
    return _ZERO


def _all_inputs(call: _Call) -> Expr:
    return _total_bytes(call.inputs)


def _all_outputs(call: _Call) -> Expr:
    return _total_bytes(call.outputs)


def _all_but_first_input(call: _Call) -> Expr:
    return _total_bytes(_distinct_tensors((call.args[1:], call.kwargs)))


def _indexed_read(call: _Call) -> Expr:
    """Indices in full, but of the indexed tensor only what is picked."""
    return _all_but_first_input(call) + _all_outputs(call)


def _embedding_read(call: _Call) -> Expr:
    return _total_bytes((call.argument(1, "indices"),)) + _all_outputs(call)


# ---------------------------------------------------------------------------------------------------------- flops


def _per_output(flops: int) -> _Formula:
    def count(call: _Call) -> Expr:
        return call.outputs[0].num_elements * flops if call.outputs else _ZERO

    return count


def _per_input(flops: int) -> _Formula:
    def count(call: _Call) -> Expr:
        return call.inputs[0].num_elements * flops if call.inputs else _ZERO

    return count


def _matmul_flops(first: int) -> _Formula:
    """(..., m, k) times (..., k, n), or times (k), the operands at positions `first` and `first + 1`."""

    def count(call: _Call) -> Expr:
        left, right = call.args[first], call.args[first + 1]
        columns = right.shape[-1] if len(right.shape) > 1 else 1
        return left.num_elements * columns * 2

    return count


def _any_convolution_flops(call: _Call) -> Expr:
    return (_transposed_convolution_flops if call.argument(6, "transposed", False) else _convolution_flops)(call)


def _convolution_flops(call: _Call) -> Expr:
    """Every element of the result meets one filter."""
    return _meet_filters(call.outputs[0], call.args[0], call.args[1])


def _transposed_convolution_flops(call: _Call) -> Expr:
    """Every element of the input meets one filter."""
    return _meet_filters(call.args[0], call.args[0], call.args[1])


def _meet_filters(positions: TensorMeta, image: TensorMeta, weight: TensorMeta) -> Expr:
    # The weight is (out, in / groups, ...), or (in, out / groups, ...) if transposed: groups are counted either way.
    return _product(positions.shape[2:]) * image.shape[0] * weight.num_elements * 2


def _convolution_backward_flops(call: _Call) -> Expr:
    """The input's and the weight's gradient each cost what the forward pass cost."""
    gradient, image, weight = call.args[0], call.args[1], call.args[2]
    transposed, wanted = bool(call.args[7]), call.args[10]
    forward = _meet_filters(image if transposed else gradient, image, weight)
    bias = gradient.num_elements if wanted[2] else _ZERO
    return forward * (int(wanted[0]) + int(wanted[1])) + bias


def _attention_flops(call: _Call) -> Expr:
    query, key, value = call.args[0], call.args[1], call.args[2]
    scores = _product(query.shape[:-1]) * key.shape[-2]
    return scores * (query.shape[-1] + value.shape[-1]) * 2


def _attention_backward_flops(call: _Call) -> Expr:
    """Five products: the scores again, then the gradients of values, scores, query and key."""
    query, key, value = call.args[1], call.args[2], call.args[3]
    scores = _product(query.shape[:-1]) * key.shape[-2]
    return scores * (query.shape[-1] * 3 + value.shape[-1] * 2) * 2


def _scattered(call: _Call, position: int) -> tuple[Expr, Expr]:
    """Return the elements and bytes of the values that a scatter writes; a plain number goes where the indices say."""
    values = call.args[position]
    if isinstance(values, TensorMeta):
        return values.num_elements, values.num_bytes
    indices = next((tensor for tensor in call.inputs[1:]), call.inputs[0])
    return indices.num_elements, indices.num_elements * call.inputs[0].itemsize


def _filled(call: _Call) -> tuple[Expr, Expr]:
    """Return the elements and bytes that an `index_fill` writes: every row that the indices name."""
    target, dim, indices = call.args[:3]
    rest = [size for place, size in enumerate(target.shape) if place != dim % len(target.shape)]
    elements = _product(rest) * indices.num_elements
    return elements, elements * target.itemsize


# ---------------------------------------------------------------------------------------------------------- tiles


def _tiles(rows: Expr, columns: Expr, batch: Expr = 1) -> Expr:
    return sympy.ceiling(rows / TILE) * sympy.ceiling(columns / TILE) * batch


def _matmul_tiles(call: _Call) -> Expr:
    """The result is (..., m, n), (m) or ()."""
    shape = call.outputs[0].shape
    rows = shape[-2] if len(shape) > 1 else sympy.Integer(1)
    columns = shape[-1] if shape else sympy.Integer(1)
    return _tiles(rows, columns, _product(shape[:-2]))


def _linear_tiles(call: _Call) -> Expr:
    shape = call.outputs[0].shape
    return _tiles(_product(shape[:-1]), shape[-1])


def _convolution_tiles(call: _Call) -> Expr:
    """As a product: a row per position of every image, a column per channel."""
    return _position_tiles(call.outputs[0])


def _convolution_backward_tiles(call: _Call) -> Expr:
    """The input's gradient as above; the weight's has a row per channel out and a column per weight of its filter."""
    image, weight, wanted = call.args[1], call.args[2], call.args[10]
    tiles = _position_tiles(image) if wanted[0] else _ZERO
    return tiles + (_tiles(weight.shape[0], _product(weight.shape[1:])) if wanted[1] else _ZERO)


def _position_tiles(image: TensorMeta) -> Expr:
    return _tiles(image.shape[0] * _product(image.shape[2:]), image.shape[1])


def _attention_tiles(first: int) -> _Formula:
    """A block of queries of one head is a tile; the query is at position `first`."""

    def count(call: _Call) -> Expr:
        query = call.args[first]
        return _tiles(query.shape[-2], sympy.Integer(1), _product(query.shape[:-2]))

    return count


# -------------------------------------------------------------------------------------------------------- kernels


def _launches(number: int) -> _Formula:
    return lambda call: sympy.Integer(number)


_one = _launches(1)


def _convolution_backward_launches(call: _Call) -> Expr:
    """One for each gradient that is wanted; the bias's is a sum."""
    return sympy.Integer(sum(map(bool, call.args[10])))


# ---------------------------------------------------------------------------------------------------------- rules


def _rule(
    kind: WorkKind,
    flops: _Formula = _nothing,
    read: _Formula = _all_inputs,
    written: _Formula = _all_outputs,
    *,
    tiles: _Formula = _nothing,
    launches: _Formula = _one,
    kernel: ir.KernelKind = ir.KernelKind.LOOP,
) -> _Rule:
    return _Rule(kind=kind, flops=flops, read=read, written=written, tiles=tiles, launches=launches, kernel=kernel)


def _scatter_rule(values: Callable[[_Call], tuple[Expr, Expr]], *, replaces: bool, launches: _Formula = _one) -> _Rule:
    """Values and indices are read, and what the values are added to is read and written: nothing else of the target.

    Arguments:
        values: the elements and bytes that are written.
        replaces: whether the first input is what they are written to.
        launches: kernels.
    """

    def read(call: _Call) -> Expr:
        target = call.inputs[0].num_bytes if replaces else _ZERO
        return _total_bytes(call.inputs) - target + values(call)[1]

    return _rule(
        WorkKind.SCATTER,
        lambda call: values(call)[0],
        read,
        lambda call: values(call)[1],
        launches=launches,
        kernel=ir.KernelKind.SCATTER,
    )


def _product_rule(
    kind: WorkKind,
    kernel: ir.KernelKind,
    flops: _Formula,
    tiles: _Formula,
    read: _Formula = _all_inputs,
    launches: _Formula = _one,
) -> _Rule:
    return _rule(kind, flops, read, tiles=tiles, launches=launches, kernel=kernel)


_VIEW_RULE = _rule(WorkKind.VIEW, read=_nothing, written=_nothing, launches=_nothing)
_POINTWISE_RULE = _rule(WorkKind.POINTWISE, _per_output(1))
_UNKNOWN_RULE = _rule(WorkKind.UNKNOWN, kernel=ir.KernelKind.LIBRARY)

_POINTWISE_FLOPS = {
    1: (
        "abs add bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min eq fill floor ge gt "
        "isfinite isinf isnan le logical_and logical_not logical_or logical_xor lt masked_fill maximum max.other "
        "min.other minimum mul ne neg relu round rsub sign sub threshold threshold_backward trunc where "
        "bitwise_left_shift bitwise_right_shift"
    ),
    2: "addcmul addcdiv lerp leaky_relu leaky_relu_backward hardtanh hardtanh_backward native_dropout_backward",
    4: "div floor_divide fmod remainder reciprocal rsqrt sqrt nan_to_num hardsigmoid hardswish",
    # Polynomials and range reduction, as in SLEEF: about this many vector instructions.
    12: "exp exp2 expm1 log log2 log10 log1p sin cos sigmoid sigmoid_backward tanh_backward",
    20: "tanh tan silu silu_backward atan atan2 pow erf erfc erfinv elu softplus mish logaddexp",
    30: "gelu gelu_backward lgamma digamma",
}
_REDUCTION_FLOPS = {
    1: "sum mean amax amin max.default max.dim min.default min.dim any all prod argmax argmin count_nonzero aminmax",
    2: "norm linalg_vector_norm",
    4: "var var_mean std std_mean",
    8: "logsumexp _softmax_backward_data _log_softmax_backward_data native_layer_norm native_group_norm "
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update "
    "_native_batch_norm_legit_no_training",
    16: "_softmax _log_softmax _safe_softmax native_layer_norm_backward native_group_norm_backward "
    "native_batch_norm_backward batch_norm_backward",
}
_LOSSES = (
    "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward l1_loss "
    "smooth_l1_loss smooth_l1_loss_backward huber_loss binary_cross_entropy binary_cross_entropy_backward "
    "binary_cross_entropy_with_logits"
)
_VIEWS = (
    "alias as_strided chunk detach diagonal expand lift_fresh narrow permute real reshape select slice split "
    "split_with_sizes squeeze swapaxes t transpose unbind unfold unsqueeze view _unsafe_view view_as_real "
    "view_as_complex sym_size sym_stride sym_numel sym_storage_offset _assert_async _assert_scalar "
    "_assert_tensor_metadata sym_constrain_range sym_constrain_range_for_size _functional_assert_async "
    "_local_scalar_dense item"
)
_CONSTANTS = (
    "full full_like zeros zeros_like ones ones_like empty empty_like empty_strided empty_permuted scalar_tensor "
)
_CONSTANTS += "arange eye new_zeros new_ones new_full new_empty new_empty_strided"
_COPIES = (
    "select_scatter slice_scatter diagonal_scatter as_strided_scatter "
    "cat stack clone contiguous _to_copy to lift_fresh_copy constant_pad_nd repeat flip roll tril triu expand_copy "
    "view_copy slice_copy select_copy reflection_pad1d reflection_pad2d replication_pad2d pixel_shuffle pixel_unshuffle"
)
_POOLS = (
    "max_pool2d_with_indices avg_pool2d avg_pool1d avg_pool3d _adaptive_avg_pool2d adaptive_max_pool2d "
    "max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward "
    "_low_memory_max_pool_with_offsets"
)
_RESAMPLES = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d "
    "upsample_nearest1d_backward upsample_nearest2d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler_2d grid_sampler_2d_backward"
)
_SCATTERED = {
    "index_put": 2,
    "_unsafe_index_put": 2,
    "_unsafe_masked_index_put_accumulate": 3,
    "scatter": 3,
    "scatter_add": 3,
    "scatter_reduce": 3,
    "index_add": 3,
    "index_copy": 3,
    "masked_scatter": 2,
    "masked_scatter_backward": 0,
}
"""Where a scatter has the values that it writes."""

_LOOKUPS = (
    "sort topk kthvalue cumsum cumprod cummax cummin logcumsumexp searchsorted bucketize nonzero unique_consecutive "
)
_LOOKUPS += "_unique2 unique_dim masked_select histc bincount"
_RANDOM = "rand rand_like randn randn_like randint randint_like randperm bernoulli native_dropout normal multinomial"
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention _scaled_dot_product_attention_math"
)
_ATTENTION_BACKWARD = {
    1: "_scaled_dot_product_flash_attention_for_cpu_backward",
    # First the sums of gradient times output; last, the query's gradient is converted from float32.
    3: "_scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward "
    "_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_fused_attention_overrideable_backward",
}
"""By the number of kernels."""


def _make_rules() -> dict[str, _Rule]:
    rules: dict[str, _Rule] = {}

    def enter(names: str, rule: _Rule, namespace: str = "aten") -> None:
        rules.update({f"{namespace}.{name}": rule for name in names.split()})

    for flops, names in _POINTWISE_FLOPS.items():
        enter(names, _rule(WorkKind.POINTWISE, _per_output(flops)))
    for flops, names in _REDUCTION_FLOPS.items():
        enter(names, _rule(WorkKind.REDUCTION, _per_input(flops)))
    enter(_LOSSES, _rule(WorkKind.REDUCTION, _per_input(4)))
    enter(_VIEWS, _VIEW_RULE)
    enter(_CONSTANTS, _rule(WorkKind.CONSTANT, read=_nothing, launches=_nothing))
    enter(_COPIES, _rule(WorkKind.COPY))
    enter("copy", _rule(WorkKind.COPY, read=_all_but_first_input))
    enter(_POOLS, _rule(WorkKind.REDUCTION, _per_input(1)))
    enter(_RESAMPLES, _rule(WorkKind.GATHER, _per_output(16)))
    enter(
        "index _unsafe_index _unsafe_masked_index gather index_select take", _rule(WorkKind.GATHER, read=_indexed_read)
    )
    enter("embedding", _rule(WorkKind.GATHER, read=_embedding_read))
    enter("_embedding_bag", _rule(WorkKind.GATHER, _per_output(1)))
    for name, position in _SCATTERED.items():
        enter(name, _scatter_rule(functools.partial(_scattered, position=position), replaces=position > 0))
    sums_by_row = functools.partial(_scattered, position=0)
    enter("embedding_dense_backward", _scatter_rule(sums_by_row, replaces=False, launches=_launches(2)))  # zeros first
    enter("index_fill", _scatter_rule(_filled, replaces=True))
    enter(_LOOKUPS, _rule(WorkKind.LOOKUP, _per_input(1), kernel=ir.KernelKind.LIBRARY))
    enter(_RANDOM, _rule(WorkKind.RANDOM, _per_output(40)))  # ten Philox rounds of four instructions a number
    _enter_products(enter)

    enter("clone convert_element_type device_put", _rule(WorkKind.COPY), "prims")
    enter("fma", _rule(WorkKind.POINTWISE, _per_output(2)), "prims")
    enter("iota", _rule(WorkKind.CONSTANT, read=_nothing, launches=_nothing), "prims")
    enter("inductor_seeds inductor_seed", _rule(WorkKind.RANDOM, _per_output(1)), "prims")
    enter("inductor_lookup_seed inductor_force_stride_order", _VIEW_RULE, "prims")
    enter("inductor_random inductor_randint", _rule(WorkKind.RANDOM, _per_output(40)), "prims")
    enter(
        "_low_memory_max_pool_with_offsets _low_memory_max_pool_offsets_to_indices", rules["aten.avg_pool2d"], "prims"
    )
    enter("view_of broadcast_in_dim split_dim squeeze transpose", _VIEW_RULE, "prims")
    enter("getitem add sub mul floordiv mod truediv neg pow lt le gt ge eq ne and_ or_", _VIEW_RULE, "operator")
    return rules


def _enter_products(enter: Callable[[str, _Rule], None]) -> None:
    kernels = ir.KernelKind
    for names, kernel, first in (
        ("mm mv dot _int_mm _scaled_mm", kernels.MATMUL, 0),
        ("addmm addmv", kernels.MATMUL, 1),
        ("bmm", kernels.BATCHED_MATMUL, 0),
        ("baddbmm addbmm", kernels.BATCHED_MATMUL, 1),
    ):
        enter(names, _product_rule(WorkKind.MATMUL, kernel, _matmul_flops(first), _matmul_tiles))
    enter("linear", _product_rule(WorkKind.MATMUL, kernels.MATMUL, _linear_flops, _linear_tiles))
    for names, flops in (
        ("convolution _convolution", _any_convolution_flops),
        ("conv1d conv2d conv3d", _convolution_flops),
        ("conv_transpose1d conv_transpose2d conv_transpose3d", _transposed_convolution_flops),
    ):
        enter(names, _product_rule(WorkKind.CONVOLUTION, kernels.CONVOLUTION, flops, _convolution_tiles))
    enter(
        "convolution_backward",
        _product_rule(
            WorkKind.CONVOLUTION,
            kernels.CONVOLUTION_BACKWARD,
            _convolution_backward_flops,
            _convolution_backward_tiles,
            _convolution_backward_read,
            _convolution_backward_launches,
        ),
    )
    enter(_ATTENTION, _product_rule(WorkKind.ATTENTION, kernels.ATTENTION, _attention_flops, _attention_tiles(0)))
    for launches, names in _ATTENTION_BACKWARD.items():
        enter(
            names,
            _product_rule(
                WorkKind.ATTENTION,
                kernels.ATTENTION_BACKWARD,
                _attention_backward_flops,
                _attention_tiles(1),
                launches=_launches(launches),
            ),
        )


def _linear_flops(call: _Call) -> Expr:
    """The weight is (out, in): every row of the input meets all of it."""
    image, weight = call.args[0], call.args[1]
    return image.num_elements * weight.shape[0] * 2


def _convolution_backward_read(call: _Call) -> Expr:
    """The gradient, the weight for the input's gradient, and the input for the weight's."""
    wanted = call.args[10]
    weight = call.args[2].num_bytes if wanted[0] else _ZERO
    image = call.args[1].num_bytes if wanted[1] else _ZERO
    return call.args[0].num_bytes + weight + image


_RULES = _make_rules()


def _find_rule(target: object) -> _Rule:
    """Return the rule of an operator: by overload, by operator, by its functional form, by what torch says of it."""
    name = _name_of(target)
    overloaded, _, _ = name.rpartition(".")
    for key in (name, overloaded, overloaded.removesuffix("_")):
        if key in _RULES:
            return _RULES[key]
    if isinstance(target, torch._ops.OpOverload):
        if target.is_view:
            return _VIEW_RULE
        if torch.Tag.pointwise in target.tags:
            return _POINTWISE_RULE
    if getattr(target, "__module__", "") in (math.__name__, "torch", "torch.fx.experimental.symbolic_shapes"):
        return _VIEW_RULE  # sym_max, sym_sqrt and their like: arithmetic on sizes
    return _UNKNOWN_RULE


def _name_of(target: object) -> str:
    if isinstance(target, str):
        return target
    if getattr(target, "__module__", "") == operator.getitem.__module__:  # spelt `_operator` in CPython
        return f"operator.{getattr(target, '__name__', '')}"
    return str(target)
