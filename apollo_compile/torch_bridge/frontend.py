"""The hook into `torch.compile`: Dynamo graphs go through AOTAutograd, with our inner compiler behind it.

    compile_with_inductor(graph, inputs, inner_compile)     AOTAutograd and Inductor's passes, then `inner_compile`
    compile_plainly(graph, inputs, settings)                the fallback: compile as torch.compile alone does
    keep_with(compiled, value)                              tie a value to the lifetime of a compiled function
    is_for_dynamo(error)                                    whether an error is meant for Dynamo

`inner_compile` gets the forward and, when that is first called, the backward; the session decides how to compile them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._dynamo.exc import TorchDynamoException, exceptions_allowed_to_be_fallback
from torch._guards import TracingContext
from torch._inductor.compile_fx import compile_fx

from apollo_compile.target.target import Run
from apollo_compile.torch_bridge.aot_cache import Bundle, Cache, CachedGraph, unbundled_by
from apollo_compile.torch_bridge.checkpointed_attention import stateless_attention
from apollo_compile.torch_bridge.joint_passes import JointPasses
from apollo_compile.torch_bridge.traced_backward import remember_modules
from apollo_compile.torch_bridge.upstream_bugs.dropped_writes import keep_writes
from apollo_compile.torch_bridge.upstream_bugs.freed_sizes import forget_sizes
from apollo_compile.torch_bridge.upstream_bugs.skipped_guards import check_parameters
from apollo_compile.torch_bridge.upstream_bugs.untrained_lstms import train_lstms

InnerCompile = Callable[..., tuple[Run, Bundle | None]]
"""`compile(graph_module, example_inputs, **kwargs)`; the bundle is None if the graph must not be cached."""


_NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


def compile_with_inductor(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    inner_compile: InnerCompile,
    *,
    recompute_masks: bool,
    eager_randomness: bool = False,
    backward_at_once: bool = False,
    cache: Cache | None = None,
    settings: Mapping[str, Any] = _NO_SETTINGS,
) -> Callable[..., Any]:
    """Run AOTAutograd and Inductor's graph passes on a Dynamo graph; `inner_compile` gets the post-AOT graphs.

    Arguments:
        graph_module: what Dynamo traced; compiling changes it.
        example_inputs: its inputs.
        inner_compile: compiles the forward and the backward.
        recompute_masks: let the min-cut partitioner recompute cheap values in the backward instead of saving them:
            Inductor's CPU code that writes boolean masks is many times slower than code that recomputes them.
        eager_randomness: keep the random operators of eager PyTorch instead of Inductor's, which only its compiled code
            can run.
        backward_at_once: compile the backward with the forward instead of when it is first called.
        cache: let AOTAutograd load the result from its cache, and store it there.
        settings: Inductor's settings, which also apply when a backward is compiled later.
    """
    users, tag = inductor_config.joint_custom_pre_pass, torch.compiler.config.cache_key_tag
    patches: dict[str, Any] = {
        "bundled_autograd_cache": cache is not None,
        "donated_buffer": False,  # bodies reuse no donated buffers, and without them backward(retain_graph=True) works
    }
    if cache is None:
        patches["enable_autograd_cache"] = False
    if recompute_masks:
        patches["recompute_views"] = True
    if backward_at_once or cache is not None:
        patches["force_non_lazy_backward_lowering"] = True
    graphs: list[CachedGraph] = []
    remember_modules(graph_module)
    check_parameters()

    def compile_behind_passes(*args: Any, **kwargs: Any) -> Any:
        with (
            inductor_config.patch({**settings, "joint_custom_pre_pass": users}),  # parts of keys of Inductor's cache
            torch.compiler.config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
            functorch_config.patch(bundled_autograd_cache=False),
        ):
            run, bundle = inner_compile(*args, **kwargs)
        _donate_nothing()
        if cache is None:
            return run
        graphs.append(CachedGraph(run, bundle))
        return graphs[-1]

    own: dict[str, Any] = {"joint_custom_pre_pass": JointPasses(users)}
    if eager_randomness:
        own["fallback_random"] = True
    with contextlib.ExitStack() as stack:
        stack.enter_context(functorch_config.patch(patches))
        stack.enter_context(inductor_config.patch(own))
        if cache is not None:
            stack.enter_context(torch.compiler.config.patch(cache_key_tag=f"{tag} {cache.key}"))  # type: ignore[attr-defined]
            stack.enter_context(unbundled_by(cache))
        with keep_writes(graph_module), train_lstms(), stateless_attention(), forget_sizes():
            compiled = compile_fx(graph_module, list(example_inputs), inner_compile=compile_behind_passes)
    for graph in graphs:
        graph.bundle = None
    return compiled  # type: ignore[return-value]


def _donate_nothing() -> None:
    """Declare that no backward reuses memory of its inputs; else AOTAutograd refuses backward(retain_graph=True)."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is not None and metadata.bw_donated_idxs is None:
        metadata.bw_donated_idxs = []


def compile_plainly(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Mapping[str, Any],
    *,
    backward_at_once: bool = False,
) -> Callable[..., Any]:
    """Compile a Dynamo graph as `torch.compile(mode=..., options=...)` does: same code, same caches, same memory.

    Arguments:
        graph_module: what Dynamo traced; compiling changes it.
        example_inputs: its inputs.
        settings: Inductor's, from `inductor_settings`.
        backward_at_once: raise what compiling the backward raises, instead of when the backward is first called.
    """
    patches = {"force_non_lazy_backward_lowering": True} if backward_at_once else {}
    check_parameters()
    with functorch_config.patch(patches), keep_writes(graph_module), train_lstms(), forget_sizes():
        return compile_fx(  # type: ignore[return-value]
            graph_module, list(example_inputs), config_patches=dict(settings)
        )


def is_for_dynamo(error: Exception) -> bool:
    """Whether an error tells Dynamo what to do, such as to trace again or to break the graph."""
    return isinstance(error, (TorchDynamoException, *exceptions_allowed_to_be_fallback))


def keep_with(compiled: Callable[..., Any], value: object) -> None:
    """Keep `value` alive as long as Dynamo keeps `compiled`."""
    innermost = compiled
    while hasattr(innermost, "_torchdynamo_orig_callable"):  # Dynamo takes wrappers of its own off and drops them
        innermost = innermost._torchdynamo_orig_callable
    innermost.apollo_keeps = value  # type: ignore[attr-defined]
