"""Writes in place to numbers, which Dynamo drops when it traces a function for the second time.

    keep_writes(graph)     while AOTAutograd compiles a graph of Dynamo

Dynamo gives a symbol to a float64 tensor without dimensions on the CPU, which may be a Python number. A pass in
AOTAutograd collects the names of symbols that it could not turn into tensors, and Dynamo traces again to remove their
inputs. It removes every node whose value has such a symbol and whose users all call `item`, also one without users. The
result of `count.add_(1)` is one: in these releases a write keeps the symbol. So the write is lost, without an error.
The names are kept, and drop writes of other functions whose inputs have the same names.

Here the pass finds the symbols of tensors that are used as tensors among the names, so that it does not ask for another
trace, and then all names are forgotten. Where other backends have left names, Dynamo traces the function again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import fx
from torch._guards import CompileContext
from torch.torch_version import TorchVersion


@contextlib.contextmanager
def keep_writes(graph_module: fx.GraphModule) -> Iterator[None]:
    """Keep Dynamo from tracing again for symbols of tensors, and forget all names afterwards.

    Raises:
        TensorifyScalarRestartAnalysis: for Dynamo, which then traces the function again.
    """
    if TorchVersion(torch.__version__) >= "2.14.1":
        yield
        return
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis  # later releases need not have them
    from torch._dynamo.symbolic_convert import TensorifyState

    context = CompileContext.try_get()
    if context is not None and context.attempt == 0 and not TensorifyState.empty():
        TensorifyState.clear()
        raise TensorifyScalarRestartAnalysis(restart_reason="another function left names of symbols")
    own = _symbols_of_tensors(graph_module.graph) - TensorifyState.force_specializations
    TensorifyState.force_specializations |= own
    try:
        yield
    finally:
        TensorifyState.force_specializations -= own
    TensorifyState.clear()


def _symbols_of_tensors(graph: fx.Graph) -> set[str]:
    """Return the names of the symbols of inputs that nodes other than calls of `item` use."""
    inputs = [node for node in graph.find_nodes(op="placeholder") if any(user.target != "item" for user in node.users)]
    symbols = [getattr(node.meta.get("example_value"), "item_memo", None) for node in inputs]
    names = [getattr(symbol.node._expr, "name", None) for symbol in symbols if symbol is not None]
    return {name for name in names if name is not None}
