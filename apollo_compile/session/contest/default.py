"""The default on a GPU: torch.compile's code, and a challenger for it where one is possible.

compile_with_challenger(model, settings, graph_module, inputs, compile_plainly) -> the function that Dynamo calls
reason_without_challenger(model, graph_module, example_inputs) -> str | None
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from apollo_compile.session.contest.challenge import Challenge
from apollo_compile.session.contest.challenger import Challenger
from apollo_compile.session.model import CompiledModel
from apollo_compile.session.planning import Fallback
from apollo_compile.session.warm_start import are_numbers_fixed, may_be_compared
from apollo_compile.torch_bridge.cuda_private import find_uncapturable
from apollo_compile.torch_bridge.host_scalars import find_host_scalars, returns_elsewhere
from apollo_compile.torch_bridge.kept_graph import KeptGraph
from apollo_compile.torch_bridge.settings import replays_cuda_graphs, with_settings


def compile_with_challenger(
    model: CompiledModel,
    settings: Mapping[str, Any],
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_plainly: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Return torch.compile's function, or one that runs it until something of ours is faster.

    Arguments:
        model: gets the challenge, or the reason why there is none.
        settings: Inductor's.
        graph_module: what Dynamo traced; compiling changes it.
        example_inputs: its inputs.
        compile_plainly: compiles it as torch.compile does.
    """
    reason = reason_without_challenger(model, graph_module, example_inputs)
    is_replayed = replays_cuda_graphs(settings)
    if reason is None and is_replayed and has_numbers(example_inputs):
        reason = "its sizes change, and its mode makes CUDA graphs for each of them"
    if reason is not None:
        model.fall_back(Fallback(reason=reason))
        return compile_plainly(graph_module, example_inputs)
    with with_settings(settings):
        known = None if model.is_for_step else model.warm_start.recall_choice(graph_module, example_inputs)
    kept = KeptGraph(graph_module, example_inputs)
    scalars = find_host_scalars(example_inputs, model.target.device)
    begin = model.clock()
    incumbent = compile_plainly(graph_module, example_inputs)
    model.challenge = challenge = Challenge(
        model.name,
        incumbent,
        Challenger(model, settings, kept, scalars),
        model.target,
        compile_ns=model.clock() - begin,
        is_replayed=is_replayed,
        tell=model.warm_start.keep_choice,
        known=known,
        is_strict=model.config.debug.strict,
        is_for_step=model.is_for_step,
        clock=model.clock,
    )
    return incumbent if challenge.is_over else lambda *arguments: challenge(*arguments)


def has_numbers(example_inputs: Sequence[Any]) -> bool:
    """Whether a Dynamo graph takes numbers: sizes that change."""
    return any(not isinstance(item, torch.Tensor) for item in example_inputs)


def reason_without_challenger(
    model: CompiledModel, graph_module: fx.GraphModule, example_inputs: Sequence[Any]
) -> str | None:
    """Return why nothing of ours may run a Dynamo graph on a GPU; None if something may."""
    config, device = model.config, model.target.device
    unsafe = find_uncapturable(graph_module)
    scalars = () if model.is_for_step else find_host_scalars(example_inputs, device)
    others = [item for place, item in enumerate(example_inputs) if place not in scalars]
    elsewhere = {item.device for item in others if isinstance(item, torch.Tensor)} - {device}
    if not model.ranks.is_alone:
        return (
            "several ranks run it, which would each measure something else; 'device.cuda_lanes' True tries lanes there"
        )
    if any(not isinstance(item, torch.Tensor | torch.SymInt) for item in example_inputs):
        return "it has inputs that are neither tensors nor sizes"
    if model.is_for_step and has_numbers(example_inputs):
        return "its sizes change, and a whole step is for one size; dynamic=False makes them constants"
    if elsewhere:
        return f"it has tensors on {', '.join(sorted(map(str, elsewhere)))}, and others on {device}"
    if scalars and returns_elsewhere(graph_module, device):
        return "it takes numbers on the host, and returns tensors there"
    if unsafe is not None:
        return f"it has {unsafe}, which no CUDA graph may hold"
    if model.target.is_capturing():
        return "it is compiled inside of a CUDA graph that the user captures"
    if are_numbers_fixed():
        return "deterministic algorithms are on, so no time decides what runs"
    if not model.is_for_step and (not may_be_compared(config) or config.plan.file is not None):
        return "the options leave nothing to compare: 'device.cuda_lanes' True runs plans without that"
    return None
