"""Operators on lists of tensors, such as an optimizer's, as operators on each of the tensors.

An optimizer that is traced with the step takes the parameters of all layers in one call after the other. As one node,
none of its calls could begin before the backward of the first layer has ended, and segments would fuse none with others
on the same parameter. An operator that is not known here stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg

aten = torch.ops.aten

AddCall = Callable[..., Any]
"""Adds the call of an operator to the graph."""


def with_tensors_apart(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a post-AOT graph in which operators on lists are operators on tensors; the given one stays as it is."""
    if not any(map(_is_apart_possible, graph_module.graph.nodes)):
        return graph_module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    lists: dict[fx.Node, Sequence[fx.Node]] = {}
    for node in graph_module.graph.nodes:
        if _is_apart_possible(node):
            lists[node] = _take_apart(graph, node, copies)
        elif node.target is operator.getitem and node.args[0] in lists:
            copies[node] = lists[node.args[0]][node.args[1]]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return _LazyGraphModule(graph_module, graph)  # generates its code on demand only


def _is_apart_possible(node: fx.Node) -> bool:
    target, is_for_each = node.target, all(user.target is operator.getitem for user in node.users)
    if not (is_for_each and isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"):
        return False
    if (name := _name_of(target)) not in _OF_THREE:
        return name in _OPERATORS
    return target._overloadname != "Tensor" and _type_of(node) in (torch.float32, torch.float64)


def _type_of(node: fx.Node) -> torch.dtype | None:
    """Return the type of all tensors that a node takes; None if they have several."""
    types = {each.meta["val"].dtype for each in node.all_input_nodes if _is_tensor(each)}
    return types.pop() if len(types) == 1 else None


def _take_apart(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> Sequence[fx.Node]:
    """Add the calls for all tensors of the lists."""
    apply = _OPERATORS[_name_of(node.target)]  # type: ignore[arg-type]
    args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
    lists = [argument for argument in args if isinstance(argument, Sequence)]
    return [
        apply(
            partial(_call, graph, node),
            *(argument[place] if isinstance(argument, Sequence) else argument for argument in args),
            **kwargs,
        )
        for place in range(len(lists[0]))
    ]


def _call(graph: fx.Graph, origin: fx.Node, target: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call with its value, which has all else of the node in whose place it is."""
    made = graph.call_function(target, args, kwargs)
    made.meta = {
        key: value for key, value in origin.meta.items() if key not in ("val", "tensor_meta", "eager_input_vals")
    }
    values, names = map_arg((args, kwargs), lambda each: each.meta["val"])
    fakes = [value for value in (*values, *names.values()) if isinstance(value, torch.Tensor)]
    with fakes[0].fake_mode:  # type: ignore[attr-defined]
        made.meta["val"] = target(*values, **names)
    return made


def _is_tensor(value: Any) -> bool:
    """Whether an argument is a tensor, and no number, known or not."""
    return isinstance(value, fx.Node) and isinstance(value.meta["val"], torch.Tensor)


def _name_of(target: torch._ops.OpOverload) -> str:
    return target._schema.name.partition("::")[2]


def _unary(target: torch._ops.OpOverload) -> Callable[..., Any]:
    return lambda call, value: call(target, value)


def _binary(target: torch._ops.OpOverload, with_number: torch._ops.OpOverload | None = None) -> Callable[..., Any]:
    """Return how an operator takes two tensors, or a tensor and a number."""

    def apply(call: AddCall, left: Any, right: Any, *, alpha: Any = 1) -> Any:
        chosen = target if _is_tensor(right) or with_number is None else with_number
        return call(chosen, left, right, **({} if alpha == 1 else {"alpha": alpha}))

    return apply


def _power(call: AddCall, base: Any, exponent: Any) -> Any:
    if not _is_tensor(base):
        return call(aten.pow.Scalar, base, exponent)
    return call(aten.pow.Tensor_Tensor if _is_tensor(exponent) else aten.pow.Tensor_Scalar, base, exponent)


def _sum_with(combine: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return how `value` times what `combine` makes of two tensors is added to a third."""

    def apply(call: AddCall, start: Any, first: Any, second: Any, value: Any = 1) -> Any:
        term = call(combine, first, second)
        return call(aten.add.Tensor, start, term if value == 1 else call(aten.mul.Tensor, term, value))

    return apply


_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "_foreach_abs": _unary(aten.abs.default),
    "_foreach_neg": _unary(aten.neg.default),
    "_foreach_reciprocal": _unary(aten.reciprocal.default),
    "_foreach_rsqrt": _unary(aten.rsqrt.default),
    "_foreach_sign": _unary(aten.sign.default),
    "_foreach_sqrt": _unary(aten.sqrt.default),
    "_foreach_add": _binary(aten.add.Tensor),
    "_foreach_sub": _binary(aten.sub.Tensor),
    "_foreach_mul": _binary(aten.mul.Tensor),
    "_foreach_div": _binary(aten.div.Tensor),
    "_foreach_maximum": _binary(aten.maximum.default, aten.clamp_min.default),
    "_foreach_minimum": _binary(aten.minimum.default, aten.clamp_max.default),
    "_foreach_clamp_min": _binary(aten.maximum.default, aten.clamp_min.default),
    "_foreach_clamp_max": _binary(aten.minimum.default, aten.clamp_max.default),
    "_foreach_pow": _power,
    "_foreach_addcmul": _sum_with(aten.mul.Tensor),
    "_foreach_addcdiv": _sum_with(aten.div.Tensor),
}
"""By name: what adds the calls for one tensor of the lists, given the arguments of the operator for that tensor."""

_OF_THREE = ("_foreach_addcmul", "_foreach_addcdiv")
"""Taken apart for types in which it does not matter that every step is rounded, where eager rounds once; not with all
numbers in one tensor, as one overload has them."""
