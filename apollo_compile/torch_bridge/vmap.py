"""Where `torch.vmap` computes something else than a call for every sample.

obstacle_to_vmap(graph_module) -> str | None
without_vmap_warnings()         while something is traced through `vmap`
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import fx


def obstacle_to_vmap(graph_module: fx.GraphModule) -> str | None:
    """Return why the Dynamo graph that is compiled now cannot go through `vmap`; None if nothing speaks against it.

    There, Dynamo of torch 2.13 traces the forward of an `autograd.Function` and loses its backward, and autocast
    converts fewer tensors.
    """
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        return "autocast is on"
    for module in graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            called = getattr(node.target, "__name__", str(node.target))
            if called == "autograd_function_apply":
                return "it calls an autograd.Function"
            if called == "_enter_autocast":
                return "autocast is on"
    return None


@contextlib.contextmanager
def without_vmap_warnings() -> Iterator[None]:
    """Silence warnings about operators that `vmap` calls once for every sample."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*batching rule")
        yield
