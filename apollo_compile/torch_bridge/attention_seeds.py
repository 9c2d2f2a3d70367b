"""Where the backward of attention with dropout finds the seed that its forward drew.

Kernels of memory-efficient attention leave seed and offset of their masks in two tensors of one number. In a capture
these are on the device, where replays write them; otherwise on the host. The backward reads them where it expects them
by the same rule, unchecked: launched behind a forward that was replayed, as in the rehearsal of its capture, it reads
an address of the device on the host, which ends the process; captured behind one that was launched, the reverse.
So its calls are replaced by those of operators that bring the numbers to where they are read.
Source: aten/src/ATen/native/transformers/cuda/attention_backward.cu, Note [Seed and Offset Device].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from apollo_compile.torch_bridge.cuda_private import allowed_waits

NAMESPACE = "apollo_compile"

SEEDS = ("philox_seed", "philox_offset")

BACKWARDS = (
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    torch.ops.aten._efficient_attention_backward.default,
)
"""Those that read seeds on the host outside of a capture; flash attention's and cuDNN's are on the device always."""


def read_seeds_anywhere(graph: fx.Graph) -> None:
    """Let backwards of attention with dropout read their seeds wherever they are."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in BACKWARDS:
            place = _names_of(node.target).index("dropout_p")
            if node.args[place] != 0.0:
                node.target = replacement_of(node.target)
                # Inductor lays the arguments out as these are, where it would by a rule of its own for the operator.
                node.meta["eager_input_vals"] = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])


def replacement_of(attention: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """Return the operator that takes the place of one of `BACKWARDS`."""
    name = attention._schema.name.partition("::")[2]
    replacement: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return replacement


def _names_of(attention: torch._ops.OpOverload) -> Sequence[str]:
    return [argument.name for argument in attention._schema.arguments]


def place_seeds(
    names: Sequence[str],
    arguments: Sequence[Any],
    *,
    is_capturing: bool,
    to_host: Callable[[torch.Tensor], torch.Tensor],
) -> list[Any]:
    """Return the arguments of a call with seeds where they are read: in a capture on the device, otherwise on the host.

    Arguments:
        names: of the arguments, in order.
        arguments: those of the call, by position.
        is_capturing: whether a CUDA graph is being captured.
        to_host: copies a number from the device, which waits for it.
    """
    device = arguments[names.index("query")].device
    placed = list(arguments)
    for place in map(names.index, SEEDS):
        seed = placed[place]
        if is_capturing and seed.device != device:
            placed[place] = torch.full((), seed.item(), dtype=seed.dtype, device=device)
        elif not is_capturing and seed.device.type != "cpu":
            placed[place] = to_host(seed)
    return placed


def _to_host(seed: torch.Tensor) -> torch.Tensor:
    with allowed_waits():
        return seed.cpu()


def _define(attention: torch._ops.OpOverload) -> None:
    """Define the operator that takes the place of `attention`."""
    schema = attention._schema
    name = f"{NAMESPACE}::{schema.name.partition('::')[2]}"
    names = _names_of(attention)

    def run(*arguments: Any, **others: Any) -> Any:
        placed = place_seeds(names, arguments, is_capturing=torch.cuda.is_current_stream_capturing(), to_host=_to_host)
        return attention(*placed, **others)

    torch.library.define(name, str(schema).partition(schema.name)[2], tags=(torch.Tag.needs_exact_strides,))
    torch.library.impl(name, "CUDA", run)
    torch.library.register_fake(name, lambda *arguments, **others: attention(*arguments, **others))


for _attention in BACKWARDS:
    if not hasattr(getattr(torch.ops, NAMESPACE), _attention._schema.name.partition("::")[2]):
        _define(_attention)  # a definition survives a reload of this file
