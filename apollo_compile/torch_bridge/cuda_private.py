"""Private interfaces of torch for lanes and CUDA graphs.

Public functions of `torch.cuda` are used where they are needed, in `device/gpu/`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

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


RECOVERS_FROM_CAPTURES: bool = torch.__version__ >= (2, 13)  # type: ignore[operator]
"""Whether torch is as before after a capture that failed at its end. See Note [captures that fail]."""

# Note [captures that fail]: something that a capture forbids, such as waiting for the device, invalidates it, and
# `capture_end` raises. What that leaves behind depends on torch (aten/src/ATen/cuda/CUDAGraph.cpp):
#
# * 2.11, 2.12: `capture_end` raises before it tells the allocator and the generator. The allocator then keeps the pool
#   of the capture for good, no longer frees what `record_stream` held, and raises in `empty_cache`; the generator says
#   "Offset increment outside graph capture" at the next random number, and in every replay of any CUDA graph. The pull
#   request that mends the allocator (pytorch 180395) is in 2.13; so is a state of the generator for every capture.
# * 2.13: memory of the pool stays reserved (pytorch 190348, in 2.14).
#
# So before a capture its launches are rehearsed, up to 2.12 with torch's debug mode that refuses to wait for the
# device, which holds for all threads of the process meanwhile. If a capture fails all the same, torch is made to forget
# it as well as can be done from here, all our CUDA graphs are released, and up to 2.12 there are no lanes any more.


def refused_waits() -> contextlib.AbstractContextManager[None]:
    """Let torch refuse to wait for the device, where a capture that did so would leave torch broken."""
    return contextlib.nullcontext() if RECOVERS_FROM_CAPTURES else _waits("error")


def allowed_waits() -> contextlib.AbstractContextManager[None]:
    """Wait for the device all the same: what is inside is not part of a capture."""
    return _waits("default")


@contextlib.contextmanager
def _waits(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def allocating_from(device: int, pool: Any) -> Iterator[None]:
    """Let this thread allocate from the pool of CUDA graphs with that handle; who calls it releases the pool."""
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device, pool)


def release_pool(device: int, pool: Any) -> None:
    """Undo that `allocating_from` keeps the pool alive."""
    torch._C._cuda_releasePool(device, pool)


_failed: list[Any] = []
"""CUDA graphs whose capture failed: torch's allocator of pinned memory may ask them for their capture until the end."""


def forget_capture(graph: Any, device: torch.device, pool: Any, origin: Any) -> None:
    """Make torch forget a capture that failed in `capture_begin` or `capture_end`, as well as it can be done.

    From 2.13 on, it does so when `graph` ends.

    Arguments:
        graph: the CUDA graph; else it is kept for good.
        device: the device of the capture.
        pool: the handle of its memory pool.
        origin: the stream that was captured.
    """
    if RECOVERS_FROM_CAPTURES:
        return
    _failed.append(graph)
    with contextlib.suppress(RuntimeError):  # where the capture had not begun
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    try:
        _capture_something(device, origin)
    except RuntimeError:
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())  # the clone is not in a capture


def _capture_something(device: torch.device, origin: Any) -> None:
    """Capture one kernel: at the end of any capture, the generator is out of it again."""
    value = torch.zeros(1, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(origin):
        graph.capture_begin(capture_error_mode="thread_local")
        value.zero_()
        graph.capture_end()


def clear_workspaces(streams: Iterable[int]) -> None:
    """Return the workspaces of cuBLAS on these CUstreams to the allocator; its next call there allocates new ones.

    Those of other streams may be in use by CUDA graphs that others captured, so all are cleared only if torch cannot
    clear some.
    """
    clear = _workspace_clearer()
    if clear is None:
        torch._C._cuda_clearCublasWorkspaces()
        return
    for stream in streams:
        clear(ctypes.c_void_p(stream))


@functools.cache
def _workspace_clearer() -> Callable[[ctypes.c_void_p], None] | None:
    """Return `at::cuda::clearCublasWorkspacesForStream`, which has no binding; None if torch does not have it."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
        clear: Any = library["_ZN2at4cuda30clearCublasWorkspacesForStreamEP11CUstream_st"]
    except (OSError, AttributeError):
        return None
    clear.argtypes, clear.restype = [ctypes.c_void_p], None
    return clear  # type: ignore[no-any-return]


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
