"""Names of backwards that Dynamo traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from apollo_compile.torch_bridge.traced_backward import differentiate, name_backward

STACK = {"key": ("L['self'].encoder", nn.Module)}


def add(graph: fx.Graph, **meta: Any) -> fx.Node:
    """Add a node with this metadata."""
    node = graph.call_function(torch.neg, (torch.ones(()),))
    node.meta.update(meta)
    return node


def test_a_backward_node_gets_the_modules_of_the_forward_node_with_its_number() -> None:
    """The first of several with one number counts; the node's own stack is that of the caller of `backward`."""
    graph = fx.Graph()
    add(graph, seq_nr=3, nn_module_stack=STACK)
    add(graph, seq_nr=3, nn_module_stack={"key": ("L['self'].later", nn.Module)})
    made = add(graph, seq_nr=3, autograd_backward=True, nn_module_stack={"key": ("L['self']", nn.Module)})
    name_backward(graph)
    assert made.meta["fwd_nn_module_stack"] == STACK
    assert "nn_module_stack" not in made.meta


def test_sums_of_gradients_belong_to_no_module() -> None:
    """Their number says only what was differentiated last."""
    graph = fx.Graph()
    add(graph, seq_nr=3, nn_module_stack=STACK)
    total = add(graph, seq_nr=3, autograd_backward=True, is_gradient_acc=True, nn_module_stack=STACK)
    name_backward(graph)
    assert "fwd_nn_module_stack" not in total.meta and "nn_module_stack" not in total.meta


def test_graphs_that_aotautograd_names_are_left_alone() -> None:
    """It tags their nodes."""
    graph = fx.Graph()
    add(graph, seq_nr=3, nn_module_stack=STACK, partitioner_tag="is_forward")
    made = add(graph, seq_nr=3, autograd_backward=True, nn_module_stack=STACK, partitioner_tag="is_backward")
    name_backward(graph)
    assert made.meta["nn_module_stack"] == STACK


def test_gradients_are_those_of_autograd() -> None:
    """For one output and for several, with what is passed on."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y, unused = x.square(), torch.ones(2, requires_grad=True)
    assert torch.equal(differentiate(y.sum(), [x], retain_graph=True)[0], 2 * x)  # type: ignore[arg-type]
    found = differentiate([y, 3 * x], [x, unused], [torch.ones(2), torch.ones(2)], allow_unused=True)
    assert torch.equal(found[0], 2 * x + 3) and found[1] is None  # type: ignore[arg-type]
