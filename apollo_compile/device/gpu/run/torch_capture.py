"""Capture a CUDA graph with torch's own class.

    capture_with_torch(work, rehearsal, ...) -> TorchRecording
    alias_tensors(tensors, recording) -> tensors at the same addresses that do not own their memory

`torch.cuda.graph` waits for the device and empties the allocator's cache before every capture; here both happen only
where memory is short. See Note [captures that fail] in `torch_bridge/cuda_private.py`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from apollo_compile.device.gpu.run.live_captures import LiveCaptures
from apollo_compile.torch_bridge.cuda_private import (
    RECOVERS_FROM_CAPTURES,
    allocating_from,
    clear_workspaces,
    forget_capture,
    refused_waits,
    release_pool,
)


class TorchRecording:
    """A CUDA graph of torch."""

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        self.graph = graph
        self.pool = pool
        """The handle of its memory pool."""

    def replay(self) -> None:
        """Launch the graph on torch's current stream, random numbers included."""
        self.graph.replay()

    def bytes_of(self, stream: torch.cuda.Stream) -> int:
        """Return the bytes of the pool's allocator segments that belong to the stream."""
        return sum(each["total_size"] for each in self.segments() if each["stream"] == stream.cuda_stream)

    def segments(self) -> list[dict[str, Any]]:
        """Return the pool's allocator segments from `torch.cuda.memory_snapshot`."""
        found: list[dict[str, Any]] = torch.cuda.memory_snapshot(self.pool)  # type: ignore[no-untyped-call]
        return found


def alias_tensors(tensors: Sequence[torch.Tensor], recording: TorchRecording) -> list[torch.Tensor]:
    """Return tensors at the same addresses; their storages keep the recording, and with it its pool, alive."""
    storages: dict[int, torch.UntypedStorage] = {}
    found = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            found.append(tensor.detach())
            continue
        if storage.data_ptr() not in storages:
            window = bytes_at(storage.data_ptr(), storage.nbytes(), tensor.device, keeps=recording)
            storages[storage.data_ptr()] = window.untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        found.append(empty.set_(storages[storage.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride()))
    return found


def bytes_at(address: int, num_bytes: int, device: torch.device, *, keeps: object = None) -> torch.Tensor:
    """Return device memory as a tensor of bytes that does not own it, but keeps an object alive."""
    return torch.as_tensor(_Window(address, num_bytes, keeps), device=device)


class _Window:
    """Bytes on the device; torch makes a tensor of them by the CUDA array interface, and keeps this object with it."""

    def __init__(self, address: int, num_bytes: int, keeps: object) -> None:
        self._keeps = keeps
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def capture_with_torch(
    work: Callable[[torch.cuda.Stream], None],
    rehearsal: Callable[[torch.cuda.Stream], None] | None,
    *,
    is_apart: bool = False,
    device: torch.device,
    pool: Any | None,
    origin: torch.cuda.Stream,
    streams: Collection[int],
    captures: LiveCaptures,
) -> TorchRecording:
    """Rehearse and capture.

    Arguments:
        work: makes the launches that are captured, from the stream that it gets.
        rehearsal: launches the same on other data; it runs.
        is_apart: whether the rehearsal takes memory from outside of the pool.
        device: the device.
        pool: the handle of a memory pool with a CUDA graph whose free memory is reused; None makes a new pool.
        origin: the stream on which the capture begins and ends.
        streams: CUstreams that nobody else uses; those that cuBLAS uses get a workspace in the pool, which is free for
            the next capture there.
        captures: the CUDA graphs on the device, which end with a failure that torch does not recover from.

    Raises:
        Exception: whatever `work`, `rehearsal` or a failed capture raised.
    """
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    graph = torch.cuda.CUDAGraph()
    with _fresh_workspaces(streams), contextlib.ExitStack() as held:
        if rehearsal is not None:
            _rehearse(rehearsal, device, None if is_apart else pool, origin, held)
            if is_apart:
                clear_workspaces(streams)  # which are not in the pool
        try:
            _capture(work, graph, pool, origin)
        except _FailedCaptureError as error:
            forget_capture(graph, device, pool, origin)
            if not RECOVERS_FROM_CAPTURES:
                captures.turn_off(_reason(error.__cause__))
            raise error.__cause__ from None  # type: ignore[misc]
    return TorchRecording(graph, pool)


class _FailedCaptureError(Exception):
    """A capture did not begin or end as it should; the cause says why."""


def _rehearse(
    rehearsal: Callable[[torch.cuda.Stream], None],
    device: torch.device,
    pool: Any | None,
    origin: torch.cuda.Stream,
    held: contextlib.ExitStack,
) -> None:
    """Run it with memory of the pool, which lives until `held` ends; if that is too little, with an empty cache.

    Without a pool, memory is taken as for any launch.
    """

    def run() -> None:
        with contextlib.ExitStack() as allocating:
            if pool is not None:
                allocating.enter_context(allocating_from(device.index, pool))
                held.callback(release_pool, device.index, pool)
            _run_between(rehearsal, torch.cuda.current_stream(device), origin)

    with contextlib.suppress(torch.OutOfMemoryError):
        run()
        return
    torch.cuda.empty_cache()  # while memory is taken from a pool, torch 2.11 does not do so by itself
    run()


def _run_between(
    rehearsal: Callable[[torch.cuda.Stream], None], caller: torch.cuda.Stream, origin: torch.cuda.Stream
) -> None:
    """Run it from the stream of the capture, behind earlier launches on the caller's stream, and before later ones."""
    origin.wait_stream(caller)
    try:
        with torch.cuda.stream(origin), refused_waits():
            rehearsal(origin)
    finally:
        caller.wait_stream(origin)


def _capture(
    work: Callable[[torch.cuda.Stream], None], graph: torch.cuda.CUDAGraph, pool: Any, origin: torch.cuda.Stream
) -> None:
    """Capture the launches of `work` into `graph`.

    Raises:
        _FailedCaptureError: torch could not begin or end the capture.
        Exception: whatever `work` raised; then the capture has ended well.
    """
    has_ended = False
    with torch.cuda.stream(origin), _no_collection():
        try:
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                work(origin)
            finally:
                graph.capture_end()
                has_ended = True
        except Exception as error:
            if has_ended:
                graph.reset()
                raise
            raise _FailedCaptureError from error.__context__ or error  # the error of `work` says more


def _reason(error: BaseException | None) -> str:
    return (
        f"a capture of a CUDA graph failed ({type(error).__name__}: {error}), from which torch {torch.__version__} "
        "does not recover; use torch 2.13 or later, or turn 'device.cuda_lanes' off"
    )


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: destroying a CUDA graph or an event invalidates the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _fresh_workspaces(streams: Collection[int]) -> Iterator[None]:
    """Make cuBLAS allocate workspaces on these streams from the pool of the capture, and free them at its end."""
    clear_workspaces(streams)
    try:
        yield
    finally:
        clear_workspaces(streams)
