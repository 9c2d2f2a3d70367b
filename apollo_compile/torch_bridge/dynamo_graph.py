"""Dynamo graphs, before AOTAutograd.

    copy_of_dynamo_graph(graph)         a copy that compiling may change, so that the original can still fall back
    copy_dynamo_graph(graph)            such a copy, until `clear_metadata(copy)`
    traced_tensors(graph, inputs)       the real tensors that it was traced with
    reads_numbers(graph)                whether it reads numbers or sizes from tensors
    return_read_tensors(graph)          numbers that it only returns stay tensors
    module_paths(graph)                 the modules that its nodes come from, as a text

The reason why Dynamo ended a graph is in `graph_breaks.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import is_fake
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from apollo_compile.torch_bridge.aot_graph import clone_graph
from apollo_compile.torch_bridge.trees import leaves_of

_WITH_SYMBOLS = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


@contextlib.contextmanager
def copy_of_dynamo_graph(graph_module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield a copy of a Dynamo graph to compile, because compiling changes a graph and its inner graphs.

    Parameters, buffers, modules and Dynamo's metadata of the graph are shared. The metadata of nodes is cleared
    afterwards, as Dynamo does with its own graph: it refers to parameters, and torch swaps no tensor that is referred
    to elsewhere.
    """
    copied = copy_dynamo_graph(graph_module)
    try:
        yield copied
    finally:
        clear_metadata(copied)


def clear_metadata(copied: fx.GraphModule) -> None:
    """Clear the metadata of all nodes of a copy that was compiled."""
    for module in copied.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            node.meta.clear()


def copy_dynamo_graph(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a Dynamo graph, made while Dynamo compiles it."""
    copied = clone_graph(graph_module)
    for node, original in zip(copied.graph.nodes, graph_module.graph.nodes, strict=True):
        vars(node).update({**vars(original), **vars(node)})
    for name, inner in copied.named_children():
        if isinstance(inner, fx.GraphModule):
            setattr(copied, name, copy_dynamo_graph(inner))
    for name, value in vars(graph_module).items():  # in their order, which is part of the keys of AOTAutograd's cache
        if name != "_code":
            vars(copied).setdefault(name, value)
    copied.meta = dict(graph_module.meta)
    return copied


def traced_tensors(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Return the real tensors that a Dynamo graph was traced with.

    Where Dynamo cuts a graph for the buckets of DDP, the inputs of the pieces are fake; inputs of the whole graph still
    refer to their real tensors, and values computed by another piece are left out. Graphs of compiled autograd take
    their tensors in a list.
    """
    found = []
    for node, value in zip(graph_module.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        argument = node.meta.get("grapharg")
        real = argument.example if is_fake(value) and argument is not None else value
        items = real if isinstance(real, list | tuple) else (real,)
        found += [item for item in items if isinstance(item, torch.Tensor) and not is_fake(item)]
    return found


def reads_numbers(graph_module: fx.GraphModule) -> bool:
    """Return whether a Dynamo graph reads numbers or sizes from tensors, as `item()` and `nonzero()` do."""
    values = (node.meta.get("example_value") for node in graph_module.graph.nodes)
    return any(map(free_unbacked_symbols, leaves_of([*values], _WITH_SYMBOLS)))


def return_read_tensors(graph_module: fx.GraphModule) -> None:
    """Let a Dynamo graph return the tensors of floats that it reads by `item()` and only returns.

    It makes a tensor of float64 of each, which Dynamo reads when the graph has run.
    """
    graph = graph_module.graph
    for made in graph.find_nodes(op="call_function", target=torch.scalar_tensor):
        read = made.args[0]
        if not isinstance(read, fx.Node) or (read.op, read.target) != ("call_method", "item"):
            continue
        if made.kwargs.get("dtype") is not torch.float64 or any(user.op != "output" for user in made.users):
            continue
        with graph.inserting_before(made):
            alone = graph.call_method("reshape", (graph.call_method("detach", (read.args[0],)), ()))
            kept = graph.call_method("to", (alone, torch.float64))
        kept.meta.update(made.meta)
        made.replace_all_uses_with(kept)
        graph.erase_node(made)
        if not read.users:
            graph.erase_node(read)
    graph_module.recompile()


def module_paths(graph_module: fx.GraphModule) -> str:
    """Return the modules that the nodes of a Dynamo graph come from, as a deterministic text."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in graph_module.graph.nodes)
    return repr([[path for path, _ in stack.values()] for stack in stacks])
