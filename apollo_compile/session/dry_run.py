"""Run all stages up to the program on a model, forward and backward, without compiling.

Dynamo traces the model, AOTAutograd makes forward and backward graphs, and these are planned. Then they run once in
eager, so that code after a graph break gets real values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from apollo_compile.config import Config
from apollo_compile.errors import TargetError, UnsupportedGraphError
from apollo_compile.ir import GraphBreak, Role
from apollo_compile.session.planning import plan_graph, reason_to_fall_back, role_of
from apollo_compile.session.private_copy import Arguments, PrivateCopy, copy_inputs, same_random_states
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.profile import DeviceProfile
from apollo_compile.target.target import Contract, Run
from apollo_compile.torch_bridge.aot_graph import user_outputs, written_inputs
from apollo_compile.torch_bridge.compile_context import (
    code_of,
    compile_apart,
    name_dynamo_graph,
    original_callable,
    written_arguments,
)
from apollo_compile.torch_bridge.frontend import compile_with_inductor
from apollo_compile.torch_bridge.graph_breaks import find_break
from apollo_compile.torch_bridge.interpret import run_as_traced
from apollo_compile.torch_bridge.layouts import adopt_layouts
from apollo_compile.torch_bridge.settings import inductor_settings, with_settings
from apollo_compile.torch_bridge.tensor_lists import with_tensors_apart
from apollo_compile.torch_bridge.trees import count_tensors, map_tensors


@dataclass(kw_only=True, slots=True)
class DryRun:
    """Takes the place of the backend: plans the graphs of Dynamo and AOTAutograd, and runs them in eager."""

    config: Config
    profile: DeviceProfile
    graphs: dict[str, list[tuple[Compilation, str | None]]] = field(default_factory=dict)
    """Planned graphs by the name of their Dynamo graph, each with the reason if it would fall back."""
    fallbacks: list[tuple[str, str]] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)
    contracts: dict[str, Contract] = field(default_factory=dict)
    """Contracts by the name of the planned graph."""
    inputs: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Arguments of Dynamo's call of a graph, by its name: parameters and buffers are those of the private copy."""
    state: tuple[torch.Tensor, ...] = ()
    """Parameters and buffers of the private copy."""
    num_returned: int = 0
    """How many tensors the call returned."""
    returned: Any = None
    """Results of the call, without graphs."""

    @property
    def planned(self) -> list[tuple[Compilation, str | None]]:
        """All graphs, forward before backward."""
        return [
            item
            for graphs in self.graphs.values()
            for item in sorted(graphs, key=lambda item: item[0].capture.role is Role.BACKWARD)
        ]

    def compile(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], before_write: Callable[[Sequence[Any]], None]
    ) -> Callable[..., Any]:
        """Plan a Dynamo graph; `before_write` is called with the arguments that it writes to, before it runs."""
        name = name_dynamo_graph()
        self.graphs[name] = []
        found = find_break(graph_module, name)
        if found is not None:
            self.breaks.append(found)
        settings = inductor_settings(self.config.mode, self.config.inductor)
        written: set[int] = set()
        with with_settings(settings):
            compiled = compile_with_inductor(
                graph_module,
                example_inputs,
                partial(self._plan, name, written),
                recompute_masks=self.config.runtime.recompute_masks,
                eager_randomness=self.config.runtime.bodies == "eager",
                backward_at_once=True,
                settings=settings,
            )

        def run(*arguments: Any) -> Any:
            self.inputs[name] = arguments
            before_write([arguments[position] for position in written if position < len(arguments)])
            return compiled(*arguments)

        return run

    def _plan(
        self,
        dynamo_name: str,
        written: set[int],
        graph_module: fx.GraphModule,
        example_inputs: Sequence[Any],
        **kwargs: Any,
    ) -> tuple[Run, None]:
        role = role_of(graph_module, kwargs)
        written |= written_arguments()
        if role is Role.BACKWARD and dynamo_name in dict(self.fallbacks):  # its forward falls back
            return run_as_traced(graph_module), None
        graph_name = f"{dynamo_name} {role}"
        subject = graph_name if role is Role.BACKWARD else dynamo_name
        try:
            adopt_layouts(graph_module, example_inputs)
            written_to, returned = written_inputs(graph_module), user_outputs(graph_module)
            self.contracts[graph_name] = Contract(written_inputs=written_to, user_outputs=returned)
            apart = with_tensors_apart(graph_module)
            static = kwargs.get("static_input_idxs") or ()
            plan = partial(plan_graph, profile=self.profile, config=self.config, static=static)
            compilation = plan(apart, name=graph_name, role=role)
        except UnsupportedGraphError as error:
            self.fallbacks.append((subject, str(error)))
        except Exception as error:  # the backend would fall back, too
            if self.config.debug.strict:
                raise
            self.fallbacks.append((subject, f"{type(error).__name__}: {error}"))
        else:
            before = {code_of(name) for name in self.graphs} - {code_of(dynamo_name)}
            reason = reason_to_fall_back(compilation, self.config, num_before=len(before))
            self.graphs[dynamo_name].append((compilation, reason))
            if reason is not None:
                self.fallbacks.append((subject, reason))
        return run_as_traced(graph_module), None


def trace(
    model: Callable[..., Any],
    call: Arguments,
    config: Config,
    profile: DeviceProfile,
    *,
    uses: Callable[[Any], Callable[..., Any]] = lambda copied: copied,
    fullgraph: bool = False,
) -> DryRun:
    """Return the plans of one call of a model; the model is not changed.

    Arguments:
        model: a module or a function.
        call: the arguments.
        config: its options apply.
        profile: the device.
        uses: given the copy of the model, returns the function to call.
        fullgraph: whether a graph break is an error.

    Raises:
        TargetError: the model or its inputs cannot be copied, or Dynamo finds nothing to compile.
    """
    dry_run = DryRun(config=config, profile=profile)
    args, kwargs = copy_inputs(call)
    private = PrivateCopy(original_callable(model))
    dry_run.state = private.state()
    used = [(dry_run, private)]

    def compile_graph(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return used[0][0].compile(graph_module, example_inputs, before_write)

    def before_write(tensors: Sequence[Any]) -> None:
        used[0][1].own(tensors)

    try:
        with same_random_states():
            run = compile_apart(uses(private.run), backend=compile_graph, dynamic=False, fullgraph=fullgraph)
            returned = run(*args, **kwargs)
        dry_run.num_returned = count_tensors(returned)
        dry_run.returned = map_tensors(lambda each: each.detach().requires_grad_(each.requires_grad), returned)
    finally:
        used.clear()  # Dynamo keeps backends and graphs for ever; this frees the plans and the copy
    if not dry_run.graphs:
        raise TargetError(
            "Dynamo found nothing to compile: expected a call that runs operators of torch on its inputs, in a process "
            "in which Dynamo is on (see TORCHDYNAMO_DISABLE and torch.compiler.set_stance)"
        )
    return dry_run
