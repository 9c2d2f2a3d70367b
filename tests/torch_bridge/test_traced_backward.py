"""Names of backwards that Dynamo traced: what gets none; `end_to_end/test_whole_step_functions.py` has the names."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from apollo_compile.torch_bridge.traced_backward import name_backward

STACK = {"key": ("L['self'].encoder", nn.Module)}


def add(graph: fx.Graph, **meta: Any) -> fx.Node:
    """Add a node with this metadata."""
    node = graph.call_function(torch.neg, (torch.ones(()),))
    node.meta.update(meta)
    return node


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
