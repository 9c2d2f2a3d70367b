"""Private CUDA interfaces of torch, all of which do nothing on a machine without CUDA.

    units_left_out(count)           tell libraries of SMs that are not for what they launch
    compiled_without(count)         tell Inductor of them while it generates code
    clear_workspaces()              let cuBLAS take its workspaces anew
    reset_cuda_graphs()             let go of what Inductor captured for fallbacks
    find_uncapturable(graph)        name an operator that must not be in a CUDA graph

What `torch.cuda` offers publicly is used where it is needed, in `device/gpu/`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import fx

from apollo_compile.operators.writes import resizes_storage


def reset_cuda_graphs() -> None:
    """Let go of the CUDA graphs that Inductor keeps for what falls back; `torch._dynamo.reset` asks for it."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


def find_uncapturable(graph_module: fx.GraphModule) -> str | None:
    """Return the name of an operator that must not be in a CUDA graph; None where there is none.

    That is one that says so, and one after which an input has other memory.
    """
    calls = [node for node in graph_module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    unsafe = (n.target for n in calls if torch.Tag.cudagraph_unsafe in n.target.tags or resizes_storage(n))
    return next(map(str, unsafe), None)


def clear_workspaces() -> None:
    """Give the workspaces of cuBLAS back to the allocator; the next call of it takes new ones."""
    torch._C._cuda_clearCublasWorkspaces()


_get_left_out: Callable[[], int | None] = getattr(torch._C, "_get_sm_carveout_experimental", lambda: None)


_set_left_out: Callable[[int | None], None] | None = getattr(torch._C, "_set_sm_carveout_experimental", None)


_units_lock = threading.RLock()
"""Guards the number of SMs left out, which torch keeps for the whole process; held while something is launched."""


@contextlib.contextmanager
def units_left_out(count: int) -> Iterator[None]:
    """Let what is launched inside leave `count` SMs of the device alone, as far as it asks.

    It is a hint: scaled products of cuBLASLt and FlashAttention 3 follow it. Who asks the device is told of all SMs.
    """
    if not count or _set_left_out is None:
        yield
        return
    with _units_lock:
        before = _get_left_out()
        _set_left_out(count)
        try:
            yield
        finally:
            _set_left_out(before)


@contextlib.contextmanager
def compiled_without(count: int) -> Iterator[None]:
    """Let the code that Inductor makes on this thread leave `count` SMs alone: persistent grids fill the others.

    Inductor asks torch for the number that libraries are told. To set that for as long as a compile takes would keep
    all other threads from launching, so Inductor gets an answer of its own, on this thread alone. `compile_lock()` is
    held.
    """
    if not count:
        yield
        return
    own = threading.get_ident()
    torch._C._get_sm_carveout_experimental = lambda: count if threading.get_ident() == own else _get_left_out()
    try:
        yield
    finally:
        torch._C._get_sm_carveout_experimental = _get_left_out
