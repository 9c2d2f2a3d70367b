"""Graphs interpreted without a compiler: one operator after the other, under the GIL.

Results are those of the compiled graph: the same random numbers for a seed, the traced strides, and tensors without
gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._inductor import inductor_prims
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import _disable_current_modes

from apollo_compile.target.target import CompiledBody, Run
from apollo_compile.torch_bridge.attention_seeds import read_seeds_anywhere
from apollo_compile.torch_bridge.boundary import with_numbers
from apollo_compile.torch_bridge.layouts import report_output_strides
from apollo_compile.torch_bridge.private_attributes import mark_boxed


def interpret_bodies(pieces: Sequence[tuple[str, fx.GraphModule, Sequence[Any]]]) -> tuple[CompiledBody, ...]:
    """Return bodies that call the operators of pieces one by one, under the GIL; nothing is compiled."""
    return tuple(CompiledBody(function=with_numbers(_interpret(piece), fakes)) for _, piece, fakes in pieces)


def interpret_whole(graph_module: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a boxed function, as AOTAutograd calls it, that calls the operators of a post-AOT graph one by one."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides:
        context.output_strides.clear()  # a compile that failed may have filled it
    report_output_strides(graph_module)
    read_seeds_anywhere(graph_module.graph)
    return mark_boxed(_interpret(graph_module))


def run_as_traced(graph_module: fx.GraphModule) -> Run:
    """Return a boxed function, as AOTAutograd calls it, that runs a post-AOT graph as it is, for a dry run."""

    @mark_boxed
    def run(inputs: list[Any]) -> Sequence[Any]:
        values = list(inputs)
        inputs.clear()
        outputs: Sequence[Any] = graph_module(*values)
        return outputs

    return run


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Let calls inside compute on real tensors, although a compile with fake tensors is in progress."""
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _interpret(piece: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    view_to_reshape(piece)  # type: ignore[no-untyped-call]  # an operator need not lay its result out as traced
    for node in piece.graph.nodes:
        node.target = _SEEDED.get(node.target, node.target)
    piece.graph.set_codegen(_BoxedCodeGen())
    function = fx.GraphModule(piece, piece.graph).forward

    def run(inputs: list[Any]) -> Sequence[Any]:
        # Results of `torch.ops.prims` operators require gradients if an input does, even under `no_grad`. And writes
        # must not change the versions of inputs, as in compiled code: AOTAutograd does that itself.
        inputs[:] = [value.data if isinstance(value, torch.Tensor) else value for value in inputs]
        # An output that is a view of another one would get the gradient of that one.
        return [value.detach() if isinstance(value, torch.Tensor) else value for value in function(inputs)]

    return run


def _draw(size: Sequence[int], seed: torch.Tensor, mode: str, **_: Any) -> torch.Tensor:
    generator = torch.Generator(seed.device).manual_seed(int(seed))
    drawn: torch.Tensor = getattr(torch, mode)(size, generator=generator, device=seed.device, dtype=torch.float32)
    return drawn


def _draw_integers(low: int, high: int, size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(seed.device).manual_seed(int(seed))
    return torch.randint(low, high, tuple(size), generator=generator, device=seed.device)


_SEEDED: Mapping[Any, Callable[..., torch.Tensor]] = {
    inductor_prims.random: _draw,
    inductor_prims.randint: _draw_integers,
}
"""Replacements for Inductor's random prims, which ignore the seed when they are called instead of compiled."""
