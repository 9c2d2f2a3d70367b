"""Private CUDA interfaces of torch, all of which do nothing on a machine without CUDA.

    units_left_out(count)           tell libraries to leave some SMs alone in what they launch
    compiled_without(count)         tell Inductor to leave some SMs alone in the code it generates
    clear_workspaces()              free the workspaces of cuBLAS
    reset_cuda_graphs()             free the CUDA graphs that Inductor captured for fallbacks
    find_uncapturable(graph)        name an operator that must not be in a CUDA graph

Public functions of `torch.cuda` are used where they are needed, in `device/gpu/`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import fx

from apollo_compile.operators.writes import resizes_storage


def reset_cuda_graphs() -> None:
    """Free the CUDA graphs that Inductor keeps for fallbacks, as `torch._dynamo.reset` does."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


def find_uncapturable(graph_module: fx.GraphModule) -> str | None:
    """Return the name of an operator that must not be in a CUDA graph; None where there is none.

    That is an operator with the tag `cudagraph_unsafe`, or one that resizes the storage of an input.
    """
    calls = [node for node in graph_module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    unsafe = (n.target for n in calls if torch.Tag.cudagraph_unsafe in n.target.tags or resizes_storage(n))
    return next(map(str, unsafe), None)


def clear_workspaces() -> None:
    """Return the workspaces of cuBLAS to the allocator; its next call allocates new ones."""
    torch._C._cuda_clearCublasWorkspaces()


_get_left_out: Callable[[], int | None] = getattr(torch._C, "_get_sm_carveout_experimental", lambda: None)


_set_left_out: Callable[[int | None], None] | None = getattr(torch._C, "_set_sm_carveout_experimental", None)


_units_lock = threading.RLock()
"""Guards the number of SMs left out, a process-wide setting of torch; held during launches."""


@contextlib.contextmanager
def units_left_out(count: int) -> Iterator[None]:
    """Ask kernels that are launched inside to leave `count` SMs of the device alone.

    It is a hint, which scaled GEMMs of cuBLASLt and FlashAttention 3 follow. Kernels that query the device see all SMs.
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
    """Let Inductor generate code on this thread that leaves `count` SMs alone: persistent grids fill the others.

    Inductor reads the process-wide number of `units_left_out`. Setting that for a whole compile would block launches of
    all other threads, so the getter is patched to return `count` on this thread only. `compile_lock()` is held.
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
