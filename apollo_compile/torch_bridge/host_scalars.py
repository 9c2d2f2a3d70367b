"""Numbers in tensors of the host, among the inputs of a graph on a GPU.

    find_host_scalars(inputs, device) -> positions
    returns_elsewhere(graph, device) -> whether tensors on another device come out
    scalars_on(device, positions, arguments) -> arguments with tensors on the device there
    with_scalars_on(device, positions, function) -> function that gives `function` such arguments

Code that Inductor makes for a GPU reads such a number on the host at every call, so that a CUDA graph would repeat the
one that it was captured with. On the device it is read at every replay. It is written there as the argument of a
kernel: a copy would wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx


def find_host_scalars(inputs: Sequence[object], device: torch.device) -> tuple[int, ...]:
    """Return the positions of inputs that are numbers on the host, which the graph of a GPU may have on its device."""
    return tuple(
        place
        for place, item in enumerate(inputs)
        if isinstance(item, torch.Tensor)
        and item.device.type == "cpu" != device.type
        and not item.dim()
        and not item.requires_grad
    )


def returns_elsewhere(graph_module: fx.GraphModule, device: torch.device) -> bool:
    """Whether a Dynamo graph returns tensors on another device, which may depend on where its inputs are."""
    values = (node.meta.get("example_value") for node in graph_module.graph.output_node().all_input_nodes)
    return any(isinstance(value, torch.Tensor) and value.device != device for value in values)


def scalars_on(device: torch.device, places: Collection[int], arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments with new tensors on the device at some places."""
    return [
        torch.full((), value.item(), dtype=value.dtype, device=device) if place in places else value
        for place, value in enumerate(arguments)
    ]


def with_scalars_on(device: torch.device, places: Collection[int], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` taking numbers on the host at some places, which it is given on the device."""
    if not places:
        return function
    return lambda *arguments: function(*scalars_on(device, places, arguments))
