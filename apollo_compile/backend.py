"""The backend function that `torch.compile(model, backend="apollo")` calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from apollo_compile.session.backend import compile_dynamo_graph
from apollo_compile.torch_bridge.cuda_private import reset_cuda_graphs


def apollo(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph so that independent modules share the device.

    Arguments:
        graph_module: the graph that Dynamo traced.
        example_inputs: its inputs.
        options: see `apollo_compile.config`; `torch.compile(..., options={"plan.planner": "serial"})`. Options of
            Inductor have the prefix `inductor.`.
        mode: a mode of Inductor; its settings apply to bodies of segments and to fallbacks.

    Raises:
        ConfigError: an option, environment variable or mode is unknown or has a wrong value.
    """
    return compile_dynamo_graph(graph_module, example_inputs, options=options, mode=mode)[0]


apollo.reset = reset_cuda_graphs  # type: ignore[attr-defined]
