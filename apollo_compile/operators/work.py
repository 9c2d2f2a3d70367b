"""Work of a node of the FX graph, as formulas.

    torch.fx.Node -> NodeWork      flops, bytes read, bytes written and kernels launched as sympy expressions in the
                                   graph's shape symbols
    NodeWork, hints -> ir.Work     the same as integers

The formulas come from the operator's entry in `table.py`. Operators without an entry are classified by torch's own
properties (a view, a pointwise operator); the work of any other is its bytes alone, with the kind UNKNOWN, so that
capture can report it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from apollo_compile import ir
from apollo_compile.operators.call import ZERO, Expr, OperatorCall, TensorMeta, distinct_tensors, product
from apollo_compile.operators.entry import Operator, WorkKind, free, pointwise, view
from apollo_compile.operators.table import UNLISTED, find_operator


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeWork:
    """Work of one node as formulas, and its kind."""

    kind: WorkKind
    flops: Expr
    bytes_read: Expr
    bytes_written: Expr
    tiles: Expr = ZERO
    """Output tiles of a matmul, `formulas.TILE` x `formulas.TILE` each."""
    launches: Expr = ZERO
    """Kernels that the operator launches if nothing is fused with it."""
    kernel: ir.KernelKind = ir.KernelKind.LOOP
    dtype: str = "float32"
    """Type of the first operand."""


# ------------------------------------------------------------------------------------------------------ interface


def work_of(node: torch.fx.Node) -> NodeWork:
    """Return the work of a node, computed from the `val` metadata of the node and its arguments.

    Nodes that are not calls (placeholders, attributes, outputs) have no work.
    """
    if node.op not in ("call_function", "call_method", "call_module"):
        return NodeWork(kind=WorkKind.FREE, flops=ZERO, bytes_read=ZERO, bytes_written=ZERO)
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda read: read.meta.get("val"))
    return node_work(node.target, args, kwargs, node.meta.get("val"))


def node_work(target: object, args: Iterable[Any], kwargs: Mapping[str, Any], out: Any) -> NodeWork:
    """Return the work of `target` on arguments whose tensors are real, fake or `TensorMeta`.

    `target` is an operator overload, a Python function, or a name such as `aten.mm.default`.
    """
    known: dict[int, TensorMeta] = {}  # a tensor that is passed twice is read once
    call_args, call_kwargs = _describe(tuple(args), known), _describe(dict(kwargs), known)
    call = OperatorCall(
        args=call_args,
        kwargs=call_kwargs,
        inputs=distinct_tensors((call_args, call_kwargs)),
        outputs=distinct_tensors(_describe(out, known)),
    )
    operator = _operator_of(target, makes_tensors=bool(call.outputs))
    return NodeWork(
        kind=operator.kind,
        flops=operator.flops(call),
        bytes_read=operator.read(call),
        bytes_written=operator.written(call),
        tiles=operator.tiles(call),
        launches=operator.launches(call),
        kernel=operator.kernel,
        dtype=next((tensor.dtype for tensor in (*call.inputs, *call.outputs)), "float32"),
    )


def evaluate(work: NodeWork, hints: Mapping[sympy.Symbol, int]) -> ir.Work:
    """Return the work as integers, with every shape symbol replaced by its hint.

    Raises:
        ValueError: a symbol has no hint.
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


def evaluate_formula(formula: Expr, hints: Mapping[sympy.Symbol, int]) -> int:
    """Return the value of a formula, with every shape symbol replaced by its hint.

    Raises:
        ValueError: a symbol has no hint.
    """
    if not formula.is_Integer:
        formula = formula.xreplace({symbol: sympy.Integer(value) for symbol, value in hints.items()})
    if formula.free_symbols:
        missing = ", ".join(sorted(str(symbol) for symbol in formula.free_symbols))
        raise ValueError(f"cannot evaluate the work {formula}: no hint for {missing}; give one per shape symbol")
    return int(formula)


def expression(size: int | torch.SymInt) -> Expr:
    """Return a size as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def name_of(target: object) -> str:
    """Return the name of a node's target, such as `aten.mm.default`, or `getitem` for a Python function."""
    if isinstance(target, str | torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


# ------------------------------------------------------------------------------------------------------- metadata


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
        strides = (stride if isinstance(stride, int) else 1 for stride in tensor.stride())  # no symbolic one is zero
        distinct = (size for size, stride in zip(shape, strides, strict=True) if stride)
    return TensorMeta(
        shape=shape,
        num_bytes=product(distinct) * tensor.dtype.itemsize,
        dtype=str(tensor.dtype).removeprefix("torch."),
        itemsize=tensor.dtype.itemsize,
    )


def _operator_of(target: object, *, makes_tensors: bool) -> Operator:
    """Return the entry of a node's target, or one derived from torch's properties of the target."""
    operator = find_operator(name_of(target))
    if operator is not UNLISTED:
        return operator
    if isinstance(target, torch._ops.OpOverload):
        if target.is_view:
            return view()
        return pointwise(1) if torch.Tag.pointwise in target.tags else UNLISTED
    is_arithmetic_on_sizes = callable(target) and not makes_tensors
    return free() if is_arithmetic_on_sizes else UNLISTED
