"""Names of backwards that Dynamo traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from apollo_compile.torch_bridge.traced_backward import differentiate, name_backward

STACK, CALLER = ({"key": (path, nn.Module)} for path in ("L['self'].encoder", "L['self']"))


def add(graph: fx.Graph, **meta: Any) -> fx.Node:
    """Add a node with this metadata."""
    node = graph.call_function(torch.neg, (torch.ones(()),))
    node.meta.update(meta)
    return node


@pytest.mark.parametrize(
    ("of_forward", "of_backward", "left"),
    [
        ({}, {"nn_module_stack": CALLER}, {"fwd_nn_module_stack": STACK}),
        ({}, {"nn_module_stack": STACK, "is_gradient_acc": True}, {}),
        (
            {"partitioner_tag": "is_forward"},
            {"nn_module_stack": STACK, "partitioner_tag": "is_backward"},
            {"nn_module_stack": STACK},
        ),
    ],
    ids=["a node of the backward", "a sum of gradients", "named by AOTAutograd"],
)
def test_a_backward_node_gets_the_modules_of_the_forward_node_with_its_number(
    of_forward: dict[str, Any], of_backward: dict[str, Any], left: dict[str, Any]
) -> None:
    """The first of several with one number counts; the node's own stack is that of the caller of `backward`.

    The number of a sum says only what was differentiated last, and AOTAutograd tags what it names itself.
    """
    graph = fx.Graph()
    add(graph, seq_nr=3, nn_module_stack=STACK, **of_forward)
    add(graph, seq_nr=3, nn_module_stack={"key": ("L['self'].later", nn.Module)}, **of_forward)
    made = add(graph, seq_nr=3, autograd_backward=True, **of_backward)
    name_backward(graph)
    assert {name: value for name, value in made.meta.items() if name.endswith("nn_module_stack")} == left


def test_gradients_are_those_of_autograd() -> None:
    """For one output and for several, with what is passed on."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y, unused = x.square(), torch.ones(2, requires_grad=True)
    assert torch.equal(differentiate(y.sum(), [x], retain_graph=True)[0], 2 * x)  # type: ignore[arg-type]
    found = differentiate([y, 3 * x], [x, unused], [torch.ones(2), torch.ones(2)], allow_unused=True)
    assert torch.equal(found[0], 2 * x + 3) and found[1] is None  # type: ignore[arg-type]
