"""Memory of a CUDA graph, by lane.

    ledger_of(captured) -> GraphLedger    by lane the bytes of the pool, and the bytes of outputs that stay there

The rest of the pool is temporary: values between bodies, workspaces of libraries, and gaps. CUDA graphs that share a
pool overlay each other, so the bytes of the pool are those of all of them; count them once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from apollo_compile.device.gpu.run.captured import Captured
from apollo_compile.device.gpu.run.copies import storage_address
from apollo_compile.ir import LaneId, Role, Variant


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneLedger:
    """Memory on the stream of one lane; lane 0 is the stream on which captures begin."""

    lane: LaneId
    held_bytes: int
    """Whole segments of the allocator, for all CUDA graphs of the pool."""
    kept_bytes: int
    """Part of `held_bytes` for outputs that stay there: saved ones of a forward, or gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphLedger:
    """Memory of one CUDA graph."""

    role: Role
    variant: Variant | None
    copied_in_bytes: int
    """Size of the tensors that inputs are copied to, outside of the pool."""
    copied_out_bytes: int
    """Size of the outputs that a replay copies out, outside of the pool."""
    lanes: tuple[LaneLedger, ...]


def ledger_of(captured: Captured) -> GraphLedger:
    """Return the memory of a CUDA graph that can still be replayed."""
    recording, kept = captured.recording, captured.kept
    assert recording is not None, "a released CUDA graph has no memory"
    by_lane = dict.fromkeys(captured.streams, 0)
    lane_of = {stream: lane for lane, stream in captured.streams.items()}
    for address, num_bytes in _storages(kept.viewed).items():
        stream = captured.stream_of.get(address)  # None for a view of an input in place
        if stream is not None:
            by_lane[lane_of[stream]] += num_bytes
    return GraphLedger(
        role=captured.role,
        variant=captured.variant,
        copied_in_bytes=sum(_storages(captured.copied_in.values()).values()),
        copied_out_bytes=sum(each.source.nbytes for each in kept.copied),
        lanes=tuple(
            LaneLedger(lane=lane, held_bytes=recording.bytes_of(stream), kept_bytes=by_lane[lane])
            for lane, stream in captured.streams.items()
        ),
    )


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the storages of tensors, by address."""
    return {storage_address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
