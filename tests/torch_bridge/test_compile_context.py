"""Dynamo graphs are named by Dynamo's compile id, and no two of a process have one name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from apollo_compile.torch_bridge.compile_context import name_dynamo_graph
from tests.torch_bridge.upstream_bugs.conftest import _forget

__all__ = ["_forget"]


def named(num_graphs: int = 1) -> tuple[list[str], Callable[..., Any]]:
    """Return names, and a backend that adds some for each graph that Dynamo hands over."""
    names: list[str] = []

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        names.extend(name_dynamo_graph() for _ in range(num_graphs))
        return graph_module

    return names, backend


def broken(x: torch.Tensor) -> torch.Tensor:
    """Return something that takes two graphs."""
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2


def test_names_are_dynamos_compile_context() -> None:
    """The frame, and how often it was compiled: behind a break another frame, for another size the same one again."""
    names, backend = named()
    run = torch.compile(broken, backend=backend, dynamic=False)
    run(torch.ones(2))
    run(torch.ones(3))
    assert names == ["0/0", "1/0", "0/1", "1/1"]


def test_graphs_of_one_compile_are_kept_apart() -> None:
    """As DDP's buckets are; a compile that breaks is attempted twice, which does not count."""
    names, backend = named(num_graphs=2)
    torch.compile(broken, backend=backend)(torch.ones(2))
    assert names == ["0/0", "0/0.2", "1/0", "1/0.2"]


def test_without_dynamo_graphs_have_names_too() -> None:
    """A backend may be called by anybody."""
    names = [name_dynamo_graph() for _ in range(2)]
    assert all(name.startswith("-/-") for name in names) and len(set(names)) == 2
