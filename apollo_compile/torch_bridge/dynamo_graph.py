"""Graphs as Dynamo hands them over, before AOTAutograd.

    copy_of_dynamo_graph(graph)         a copy that compiling may change, so that the other can still fall back
    traced_tensors(graph, inputs)       the tensors that it was traced with, fake inputs or not
    module_paths(graph)                 which modules its nodes come from, as a text

Why Dynamo ended a graph is in `graph_breaks.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import is_fake

from apollo_compile.torch_bridge.aot_graph import clone_graph


@contextlib.contextmanager
def copy_of_dynamo_graph(graph_module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Give a copy of a Dynamo graph that may be compiled, which changes a graph and those inside it.

    Parameters, buffers and modules are shared, and so is what Dynamo notes about the graph. As Dynamo does with its
    own, what is noted about nodes is dropped afterwards: it refers to parameters, which nobody could swap then.
    """
    copied = _copy_dynamo_graph(graph_module)
    try:
        yield copied
    finally:
        for module in copied.modules():
            for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
                node.meta.clear()


def _copy_dynamo_graph(graph_module: fx.GraphModule) -> fx.GraphModule:
    copied = clone_graph(graph_module)
    for node, original in zip(copied.graph.nodes, graph_module.graph.nodes, strict=True):
        vars(node).update({**vars(original), **vars(node)})
    for name, inner in copied.named_children():
        if isinstance(inner, fx.GraphModule):
            setattr(copied, name, _copy_dynamo_graph(inner))
    for name, value in vars(graph_module).items():  # in their order, which is part of the keys of AOTAutograd's cache
        if name != "_code":
            vars(copied).setdefault(name, value)
    copied.meta = dict(graph_module.meta)
    return copied


def traced_tensors(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors that a Dynamo graph was traced with.

    Where Dynamo cuts a graph for the buckets of DDP, the inputs of the pieces are fake; what was an input of the whole
    graph still has the tensor that it stands for. What another piece computes is left out. The graphs of compiled
    autograd take their tensors in a list.
    """
    found = []
    for node, value in zip(graph_module.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        argument = node.meta.get("grapharg")
        real = argument.example if is_fake(value) and argument is not None else value
        items = real if isinstance(real, list | tuple) else (real,)
        found += [item for item in items if isinstance(item, torch.Tensor) and not is_fake(item)]
    return found


def module_paths(graph_module: fx.GraphModule) -> str:
    """Return which modules the nodes of a Dynamo graph come from, as a text that is the same for the same ones."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in graph_module.graph.nodes)
    return repr([[path for path, _ in stack.values()] for stack in stacks])
