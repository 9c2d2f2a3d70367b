"""Writes of operators to memory; no other file decides whether a tensor is mutated.

    written_by(node)        arguments of a node whose memory it writes to
    resizes_storage(node)   whether the node resizes the storage of an argument
    is_view(node)           whether the node shares the memory of its first argument
    writes_undeclared(op)   whether an operator is assumed to write to all of its tensors without declaring it

Note [Undeclared writes]
    The schema of an operator declares the arguments that it writes to, and nearly always that is complete. But an
    operator without outputs and without a declared write would have no reason to be in a graph:
    `inductor::resize_storage_bytes_` is one, which frees memory. So an operator without outputs is assumed to write to
    all of its tensors, unless it declares which, or its entry in `table.py` has another purpose for it (`reads_only`).
    Operators with outputs that declare too few writes have `writes` in their entry.

    Higher-order operators are functional after AOTAutograd, except for writes of their inner graphs.

Note [Resized storages]
    Freeing a storage frees it for every tensor that shares it, including graph inputs that are other views of the same
    memory: nothing in the graph shows that, and Dynamo does not guard against it. So a storage is freed when all
    earlier readers of any input have ended. The operator is in a segment of its own: Inductor has no native code for
    it, and Inductor's order inside a body does not take shared storages into account either.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from apollo_compile.operators.table import find_operator
from apollo_compile.operators.work import name_of


def written_by(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the arguments whose memory a node writes to: Note [Undeclared writes]."""
    target = node.target
    if node.op != "call_function":
        return ()
    if isinstance(target, torch._ops.OpOverload):
        return tuple(dict.fromkeys(_nodes_in(value for name, value in _arguments(node) if _writes(target, name))))
    inner = _inner_graphs(node) if isinstance(target, torch._ops.HigherOrderOperator) else ()
    if any(written_by(each) for graph in inner for each in graph.nodes):
        return tuple(value for value in node.all_input_nodes if value.op != "get_attr")
    return ()


def resizes_storage(node: fx.Node) -> bool:
    """Whether a node resizes the storage of an argument: Note [Resized storages]."""
    return find_operator(name_of(node.target)).resizes_storage


def frees_storage(node: fx.Node) -> bool:
    """Whether a node may leave an argument without memory; a resize that allocates memory has no earlier readers."""
    return resizes_storage(node) and (len(node.args) < 2 or not isinstance(node.args[1], int) or node.args[1] == 0)


def is_view(node: fx.Node) -> bool:
    """Whether the node is a view of its first argument, or one of several such views; a number has none."""
    target = node.target
    is_operator = isinstance(target, torch._ops.OpOverload) and target.is_view
    return target is operator.getitem or (is_operator and isinstance(node.args[0], fx.Node))


def writes_undeclared(target: torch._ops.OpOverload) -> bool:
    """Whether an operator is assumed to write to all of its tensors without declaring it."""
    schema = target._schema
    return not schema.returns and not schema.is_mutable and not find_operator(name_of(target)).reads_only


def _writes(target: torch._ops.OpOverload, name: str) -> bool:
    if writes_undeclared(target) or name in find_operator(name_of(target)).writes:
        return True
    declared = next(argument.alias_info for argument in target._schema.arguments if argument.name == name)
    return declared is not None and declared.is_write


def _arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a call of an operator by name."""
    declared = node.target._schema.arguments  # type: ignore[union-attr]
    yield from zip((argument.name for argument in declared), node.args, strict=False)
    yield from node.kwargs.items()


def _nodes_in(values: Iterable[Any]) -> Iterator[fx.Node]:
    for value in values:
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, fx.Node):
                yield item


def _inner_graphs(node: fx.Node) -> Iterator[fx.Graph]:
    """Yield the graphs that a higher-order operator is called with."""
    owner = node.graph.owning_module
    for value in node.all_input_nodes:
        if value.op == "get_attr" and owner is not None:
            inner = getattr(owner, str(value.target), None)
            if isinstance(inner, fx.GraphModule):
                yield inner.graph
