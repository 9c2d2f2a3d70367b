"""Side effects of operators, which keep them in graph order.

    is_opaque(node)         its side effects are unknown
    has_effect(node)        it may have a side effect that is visible in no tensor
    draws(node)             it may advance a random generator
    is_collective(node)     it exchanges values with other devices
    is_waited_for(node)     the graph waits for every output of a collective
    reads_number(node)      it reads a number from a tensor

The sources are torch's tags and schemas, and `table.py` where torch declares too little. `writes.py` has the writes to
memory.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from apollo_compile.operators.entry import WorkKind
from apollo_compile.operators.table import find_operator
from apollo_compile.operators.work import name_of
from apollo_compile.operators.writes import written_by

TORCH_NAMESPACES = frozenset({"aten", "prims", "inductor", "mkldnn", "mkl", "quantized", "onednn"})
"""Namespaces of the operators that torch ships and tags, except collectives, which keep their order."""

_COLLECTIVE_NAMESPACES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "c10d"}
)


def is_opaque(node: fx.Node) -> bool:
    """Whether the operator's side effects are unknown: it is custom and not tagged as pointwise, or higher-order."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return target.namespace not in TORCH_NAMESPACES and torch.Tag.pointwise not in target.tags


def has_effect(node: fx.Node) -> bool:
    """Whether the operator may have a side effect other than writing to tensors, so that it keeps its order."""
    target = node.target
    if is_opaque(node) or not isinstance(target, torch._ops.OpOverload):
        return True
    return node.is_impure(impure_random=False) and not written_by(node)


def draws(node: fx.Node) -> bool:
    """Whether the operator may advance a random generator; attention without dropout has the tag but does not."""
    target = node.target
    if is_collective(node):
        return False
    if is_opaque(node) or not isinstance(target, torch._ops.OpOverload):
        return True
    if find_operator(name_of(target)).draws:
        return True
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, 0.0)
            return bool(value != 0.0)
    return True


def is_collective(node: fx.Node) -> bool:
    """Whether the operator exchanges values with other devices, or waits for such an exchange."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace in _COLLECTIVE_NAMESPACES


def is_waited_for(node: fx.Node) -> bool:
    """Whether the graph waits for every output of a collective; collectives of `_dtensor` contain the wait."""
    if node.target.namespace == "_dtensor":  # type: ignore[union-attr]
        return True
    values = [user for user in node.users if user.target is operator.getitem] or [node]
    return all(any(find_operator(name_of(user.target)).waits for user in value.users) for value in values)


def reads_number(node: fx.Node) -> bool:
    """Whether the node is a number on the host that is read from the values of a tensor."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.data_dependent_output not in target.tags:
        return False
    return find_operator(name_of(target)).kind is WorkKind.FREE
