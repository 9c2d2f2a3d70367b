"""Backwards that Dynamo traced inside a function, so that forward and backward are one graph.

With `torch._dynamo.config.trace_autograd_ops` Dynamo turns `backward()` and `torch.autograd.grad` into a node of its
graph. AOTAutograd traces that node to the operators of the backward, in a graph that it takes for one of inference, and
does not do what it does for backwards of its own: number the nodes of the backward as those of the forward, and copy
the modules over. Without names, the backward of the whole model would be one piece.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import SkipFrame
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch.fx.proxy import _COPY_META_FIELDS

_logger = logging.getLogger(__name__)

_CACHE_HASH = "apollo: torch.autograd.grad with numbered nodes"
"""Tells AOTAutograd's cache that `differentiate` depends on nothing but its arguments."""

_MARK = "autograd_backward"
"""Key of `meta` by which torch marks the nodes that autograd made."""

_IS_MARKED_BY_TORCH = hasattr(fx.traceback, "_mark_autograd_backward")
"""False in torch 2.11, which copies the mark to nodes once it is told to."""
if not _IS_MARKED_BY_TORCH:
    _COPY_META_FIELDS.append(_MARK)


def refuse_hooks(graph_module: fx.GraphModule, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse traced backwards of tensors that have hooks: Dynamo leaves them out, and gradients would be wrong.

    Arguments:
        graph_module: Dynamo's graph.
        tensors: the real tensors that it takes.

    Raises:
        SkipFrame: for Dynamo, which then runs the function in eager.
    """
    if not graph_module.graph.find_nodes(op="call_function", target=torch.autograd.grad):
        return
    for tensor in tensors:
        if tensor.requires_grad and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
            problem = (
                f"a step that calls backward itself runs in eager: its tensor of shape {tuple(tensor.shape)} has hooks "
                "for its gradient, which Dynamo leaves out of the graph; remove them, or call backward outside of what "
                "is compiled"
            )
            _logger.warning(problem)
            raise SkipFrame(problem)


def remember_modules(graph_module: fx.GraphModule) -> None:
    """Number the nodes of traced backwards as those of their forwards; call it for a copy of Dynamo's graph."""
    found = graph_module.graph.find_nodes(op="call_function", target=torch.autograd.grad)
    for node in found:
        node.target = differentiate
        node.meta.update(is_wrapped=True, user_cache_hash=_CACHE_HASH)
    if found:
        graph_module.recompile()


def differentiate(
    outputs: torch.Tensor | Sequence[torch.Tensor], *args: Any, **kwargs: Any
) -> tuple[torch.Tensor | None, ...]:
    """Return what `torch.autograd.grad` returns; while that is traced, nodes get the numbers of the forward's nodes."""
    tensors = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    setup_stacktrace_preservation_hooks([each.grad_fn for each in tensors if each.grad_fn is not None])
    if not _IS_MARKED_BY_TORCH:
        fx.traceback.current_meta[_MARK] = True
    try:
        gradients: tuple[torch.Tensor | None, ...] = torch.autograd.grad(outputs, *args, **kwargs)
    finally:
        if not _IS_MARKED_BY_TORCH:
            fx.traceback.current_meta.pop(_MARK, None)
    return gradients


def name_backward(graph: fx.Graph) -> None:
    """Give the nodes of traced backwards the modules of their forward nodes, where AOTAutograd has not done so.

    Of several forward nodes with one number, the first made the node of autograd; the others are not differentiated.
    Sums of gradients belong to no node of the forward.
    """
    stacks: dict[int, Any] = {}
    for node in graph.nodes:
        number = node.meta.get("seq_nr")
        if number is None or node.meta.get("partitioner_tag") is not None:
            continue
        if not is_backward(node):
            stacks.setdefault(number, node.meta.get("nn_module_stack"))
            continue
        node.meta.pop("nn_module_stack", None)  # of whoever called `backward`
        if not node.meta.get("is_gradient_acc"):
            node.meta["fwd_nn_module_stack"] = stacks.get(number)


def is_backward(node: fx.Node) -> bool:
    """Whether autograd made the node."""
    return bool(node.meta.get(_MARK))


def is_whole_step(graph_module: fx.GraphModule) -> bool:
    """Whether a graph that AOTAutograd takes for one of inference contains a backward."""
    return any(map(is_backward, graph_module.graph.nodes))
