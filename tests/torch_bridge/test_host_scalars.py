"""Numbers on the host among the inputs of a graph on a GPU."""

from __future__ import annotations

import torch
from torch import fx

from apollo_compile.torch_bridge.host_scalars import (
    find_host_scalars,
    returns_elsewhere,
    scalars_on,
    with_scalars_on,
)

GPU = torch.device("cuda", 0)
META = torch.device("meta")


def test_only_numbers_that_need_no_gradient_are_found() -> None:
    """On a GPU; a graph of the host has none."""
    inputs = [torch.ones(()), torch.ones(1), 3, torch.ones((), requires_grad=True), torch.ones((), device=META)]
    assert find_host_scalars(inputs, GPU) == (0,)
    assert find_host_scalars(inputs, torch.device("cpu")) == ()


def test_a_function_gets_their_values_on_the_device() -> None:
    """Of the same type, in new tensors; all else is as it was."""
    number, tensor = torch.tensor(0.1, dtype=torch.float64), torch.ones(2)
    moved, same = scalars_on(META, {0}, [number, tensor])
    assert (moved.device, moved.dtype, moved.shape) == (META, torch.float64, ()) and same is tensor
    seen = []
    with_scalars_on(torch.device("cpu"), {0}, lambda *arguments: seen.extend(arguments))(number, tensor)
    assert seen[0] is not number and torch.equal(seen[0], number) and seen[0].dtype == number.dtype


def test_outputs_on_another_device_are_found() -> None:
    """Where numbers come out that are computed on the host."""
    graph = fx.Graph()
    outputs = [graph.placeholder(name) for name in ("one", "other")]
    graph.output(tuple(outputs))
    for node, device in zip(outputs, (META, torch.device("cpu")), strict=True):
        node.meta["example_value"] = torch.ones((), device=device)
    assert returns_elsewhere(fx.GraphModule({}, graph), META)
    outputs[1].meta["example_value"] = torch.ones((), device=META)
    assert not returns_elsewhere(fx.GraphModule({}, graph), META)
