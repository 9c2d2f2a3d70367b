"""Device memory of the stand-in for a GPU: pools as torch's caching allocator keeps them for CUDA graphs.

    Arena.new_pool() -> Pool
    Pool.allocate(stream, num_bytes) -> Block,  Pool.free(block)
    Arena.tensors_like(made, pool, stream) -> tensors in the pool;  freed when their storages die
    at_address(tensor)  -> the tensor without owning its memory, as a captured kernel refers to it
    aliases(tensors, keep)  -> the same that keep something else alive instead

A pool gets segments; a segment belongs to one stream for as long as it exists, and is cut into blocks. A freed block
merges with its free neighbours and is given to the next allocation of the same stream and pool that it is large enough
for, the smallest and first such block: so addresses repeat. Segments go back to the arena when nothing refers to their
pool any more, and are then given to other pools; what they held is overwritten at once.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

ROUNDING = 512
"""Sizes of blocks are multiples of this many bytes."""
SEGMENT_BYTES = 2048
"""Sizes of segments are multiples of this."""
_CHUNK_BYTES = 1 << 24
_POISON = 0xFF
"""A byte of poison: four or eight of them are NaN."""

Key = Any
"""What tells streams apart."""


def poison(address: int, num_bytes: int) -> None:
    """Overwrite memory with NaN."""
    ctypes.memset(address, _POISON, num_bytes)


@dataclass(eq=False)
class Block:
    """A range of a segment, free or of one storage."""

    address: int
    num_bytes: int
    segment: Segment
    is_free: bool = True

    @property
    def stream(self) -> Key:
        """Return the stream that may use it again."""
        return self.segment.stream


@dataclass(eq=False)
class Segment:
    """Memory of one pool and stream; its blocks are in the order of their addresses and have no gaps."""

    address: int
    num_bytes: int
    stream: Key
    blocks: list[Block] = field(default_factory=list)


class Pool:
    """Memory that captures share."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.segments: list[Segment] = []
        self.owned: dict[int, Block] = {}
        """Blocks in use, by address."""
        self._ranges: list[tuple[int, int]] = []
        weakref.finalize(self, arena.take_back, self._ranges).atexit = False

    def allocate(self, stream: Key, num_bytes: int) -> Block:
        """Return a block of at least that size."""
        size = -(-max(1, num_bytes) // ROUNDING) * ROUNDING
        free = [
            block
            for segment in self.segments
            if segment.stream == stream
            for block in segment.blocks
            if block.is_free and block.num_bytes >= size
        ]
        block = min(free, key=lambda each: (each.num_bytes, each.address)) if free else self._grow(stream, size)
        if block.num_bytes > size:
            blocks = block.segment.blocks
            rest = Block(block.address + size, block.num_bytes - size, block.segment)
            blocks.insert(blocks.index(block) + 1, rest)
            block.num_bytes = size
        block.is_free = False
        self.owned[block.address] = block
        return block

    def free(self, block: Block) -> None:
        """Make a block free, and merge it with its neighbours."""
        assert not block.is_free, "freed twice"
        del self.owned[block.address]
        blocks = block.segment.blocks
        place = blocks.index(block)
        begin = place - 1 if place and blocks[place - 1].is_free else place
        end = place + 2 if place + 1 < len(blocks) and blocks[place + 1].is_free else place + 1
        merged = Block(blocks[begin].address, sum(each.num_bytes for each in blocks[begin:end]), block.segment)
        blocks[begin:end] = [merged]

    def bytes_of(self, stream: Key) -> int:
        """Return the bytes of the segments of a stream."""
        return sum(segment.num_bytes for segment in self.segments if segment.stream == stream)

    def _grow(self, stream: Key, size: int) -> Block:
        num_bytes = -(-size // SEGMENT_BYTES) * SEGMENT_BYTES
        segment = Segment(self.arena.take(num_bytes), num_bytes, stream)
        segment.blocks.append(Block(segment.address, num_bytes, segment))
        self.segments.append(segment)
        self._ranges.append((segment.address, num_bytes))
        return segment.blocks[0]


class Arena:
    """All memory of a device that captures allocate."""

    def __init__(self) -> None:
        self.on_free: Callable[[Pool, Block], None] = lambda pool, block: None
        """Told of every block just before it is freed."""
        self._chunks: list[torch.Tensor] = []
        self._next = self._end = 0
        self._unused: list[tuple[int, int]] = []

    def new_pool(self) -> Pool:
        return Pool(self)

    def take(self, num_bytes: int) -> int:
        """Return the address of a new segment: one that was given back if it has just that size."""
        for place, (address, size) in enumerate(self._unused):
            if size == num_bytes:
                del self._unused[place]
                return address
        if self._next + num_bytes > self._end:
            chunk = torch.empty(max(_CHUNK_BYTES, num_bytes) + SEGMENT_BYTES, dtype=torch.uint8)
            self._chunks.append(chunk)
            self._next = -(-chunk.data_ptr() // ROUNDING) * ROUNDING
            self._end = chunk.data_ptr() + chunk.numel()
        address, self._next = self._next, self._next + num_bytes
        return address

    def take_back(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Take the segments of a pool that nothing refers to."""
        for address, num_bytes in ranges:
            poison(address, num_bytes)
        self._unused.extend(ranges)

    def tensors_like(self, made: Sequence[torch.Tensor], pool: Pool, stream: Key) -> list[torch.Tensor]:
        """Return tensors in the pool with the layouts of these; those that share a storage share a block."""
        storages: dict[int, torch.UntypedStorage] = {}
        return [self._place(tensor, storages, pool, stream) for tensor in made]

    def _place(
        self, tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage], pool: Pool, stream: Key
    ) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return tensor.detach()
        if storage.data_ptr() not in storages:
            block = pool.allocate(stream, storage.nbytes())
            memory = (ctypes.c_char * storage.nbytes()).from_address(block.address)
            weakref.finalize(memory, self._free, pool, block).atexit = False
            storages[storage.data_ptr()] = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return _in_storage(tensor, storages[storage.data_ptr()])

    def _free(self, pool: Pool, block: Block) -> None:
        self.on_free(pool, block)
        pool.free(block)


def at_address(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor at the same address that does not keep the memory alive."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return tensor.detach()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return _in_storage(tensor, torch.frombuffer(memory, dtype=torch.uint8).untyped_storage())


def aliases(tensors: Sequence[torch.Tensor], keep: object) -> list[torch.Tensor]:
    """Return tensors at the same addresses, whose storages keep `keep` alive; shared storages stay shared."""
    storages: dict[int, torch.UntypedStorage] = {}
    found = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in storages:
            memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
            weakref.finalize(memory, lambda kept: None, keep).atexit = False
            storages[storage.data_ptr()] = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        found.append(_in_storage(tensor, storages[storage.data_ptr()]) if storage.nbytes() else tensor.detach())
    return found


def _in_storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
