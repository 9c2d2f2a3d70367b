"""Synthetic segment graphs: training steps of made-up models of transformer layers, from 10 to 500 segments.

    synthetic_graphs() -> SegmentGraph by name

Shapes:
    branches        towers that meet in one loss; a layer's backward is one segment
    split           the same with every weight gradient a segment beside the chain of input gradients
    microbatches    an encoder before a language model, for several microbatches that share nothing
    microbatches, split
    layered         random: every segment reads one to three of the layer before it, now and then one from further back

A layer of width w on t tokens has the products of a transformer layer, 24 t w^2 flops over weights of 24 w^2 bytes, and
loops over its activations, all in bfloat16. Equal arguments give equal graphs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from apollo_compile.ir import BodyId, Buffer, BufferId, Kernel, KernelKind, Role, Segment, SegmentGraph, SegmentId, Work

_BYTES = 2
"""Bytes of a number."""
_TILE = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A transformer layer."""

    tokens: int
    """In the whole batch."""
    width: int

    def work(self, passes: int) -> Work:
        """Return the work of one pass (forward, input gradients or weight gradients), or of several.

        Four products, of which two are wide, and four loops between them.
        """
        tokens, width = self.tokens, self.width
        kernels = [self._product(3 * width), self._product(width), self._product(4 * width), self._product(4 * width)]
        loop = Kernel(dtype="bfloat16", flops=10 * tokens * width, bytes_moved=3 * _BYTES * tokens * width, count=4)
        return _work(*kernels, loop, passes=passes)

    def _product(self, columns: int) -> Kernel:
        weights, activations = self.width * columns, self.tokens * (self.width + columns)
        return Kernel(
            kind=KernelKind.MATMUL,
            dtype="bfloat16",
            flops=2 * self.tokens * weights,
            bytes_moved=_BYTES * (weights + activations),
            bytes_from_outside=_BYTES * weights,
            tiles=-(-self.tokens // _TILE) * -(-columns // _TILE),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """A chain of equal layers, of which every segment has some."""

    layer: Layer
    num_segments: int
    layers_per_segment: int = 1


def synthetic_graphs() -> dict[str, SegmentGraph]:
    """Return the graphs by name, which ends in the number of segments; small ones first within a shape."""
    image = Layer(tokens=16 * 257, width=1024)
    text = Layer(tokens=16 * 77, width=768)
    audio = Layer(tokens=24 * 229, width=768)
    speech = Layer(tokens=2048, width=2048)
    eyes = Layer(tokens=2 * 577, width=1024)
    pair, trio, all_six = (image, text), (image, text, audio), (image, text, audio, text, eyes, audio)
    found = [
        _branches("branches", pair, num_segments=3, layers=8),
        _branches("branches", trio, num_segments=6, layers=4),
        _branches("branches", all_six, num_segments=12, layers=2),
        _branches("split", pair, num_segments=5, layers=5, split=True),
        _branches("split", trio, num_segments=12, layers=2, split=True),
        _branches("split", trio, num_segments=24, layers=1, split=True),
        _branches("split", all_six, num_segments=27, layers=1, split=True),
        _microbatches("microbatches", eyes, speech, count=2, num_segments=(2, 2)),
        _microbatches("microbatches", eyes, speech, count=4, num_segments=(3, 4)),
        _microbatches("microbatches", eyes, speech, count=8, num_segments=(4, 8)),
        _microbatches("microbatches split", eyes, speech, count=4, num_segments=(3, 4), split=True),
        _microbatches("microbatches split", eyes, speech, count=8, num_segments=(4, 8), split=True),
        _layered(num_segments=10, seed=1),
        _layered(num_segments=40, seed=2),
        _layered(num_segments=120, seed=3),
        _layered(num_segments=500, seed=4),
    ]
    return {graph.name: graph for graph in found}


# ---------------------------------------------------------------------------------------------------------- shapes


def _branches(
    name: str, layers_of: Sequence[Layer], *, num_segments: int, layers: int, split: bool = False
) -> SegmentGraph:
    drawing = _Drawing()
    towers = [Tower(layer=layer, num_segments=num_segments, layers_per_segment=layers) for layer in layers_of]
    loss = drawing.add(_loss(), [drawing.forward(tower, None) for tower in towers])
    for tower in towers:
        drawing.backward(tower, loss, split=split)
    return drawing.graph(name)


def _microbatches(
    name: str, encoder: Layer, decoder: Layer, *, count: int, num_segments: tuple[int, int], split: bool = False
) -> SegmentGraph:
    drawing = _Drawing()
    eyes = Tower(layer=encoder, num_segments=num_segments[0], layers_per_segment=-(-24 // num_segments[0]))
    speech = Tower(layer=decoder, num_segments=num_segments[1], layers_per_segment=-(-16 // num_segments[1]))
    for _ in range(count):
        seen = drawing.forward(eyes, None)
        loss = drawing.add(_loss(), [drawing.forward(speech, seen)])
        heard = drawing.backward(speech, loss, split=split)
        drawing.backward(eyes, heard, split=split)
    return drawing.graph(name)


def _layered(*, num_segments: int, seed: int) -> SegmentGraph:
    rng = random.Random(seed)
    drawing = _Drawing()
    before: list[int] = []
    while drawing.num_segments < num_segments:
        size = min(rng.choice((1, 2, 3, 4, 6)), num_segments - drawing.num_segments)
        level = []
        for _ in range(size):
            readable = rng.sample(before, min(len(before), rng.choice((1, 1, 2, 3))))
            if before and rng.random() < 0.15:
                readable.append(rng.randrange(min(before) + 1))
            layer = Layer(tokens=2 ** rng.randrange(7, 14), width=rng.choice((256, 512, 768, 1024, 2048)))
            level.append(drawing.add(layer.work(rng.randrange(1, 4)), sorted(set(readable))))
        before = level
    return drawing.graph("layered")


class _Drawing:
    """A graph in the making: every segment makes one buffer, and those that read nothing else read the input."""

    def __init__(self) -> None:
        self._works: list[Work] = []
        self._reads: list[list[int]] = []

    @property
    def num_segments(self) -> int:
        return len(self._works)

    def add(self, work: Work, reads: Sequence[int]) -> int:
        """Add a segment that reads outputs of others; return its number."""
        self._works.append(work)
        self._reads.append(list(reads))
        return len(self._works) - 1

    def forward(self, tower: Tower, start: int | None) -> int:
        """Add the forward of a tower behind a segment; return its last segment."""
        last = [] if start is None else [start]
        for _ in range(tower.num_segments):
            last = [self.add(tower.layer.work(tower.layers_per_segment), last)]
        return last[0]

    def backward(self, tower: Tower, start: int, *, split: bool) -> int:
        """Add the backward of a tower behind a segment; return its last segment of input gradients."""
        last = start
        for _ in range(tower.num_segments):
            before = last
            last = self.add(tower.layer.work(tower.layers_per_segment * (1 if split else 2)), [before])
            if split:
                self.add(tower.layer.work(tower.layers_per_segment), [before])
        return last

    def graph(self, name: str) -> SegmentGraph:
        """Return the graph; its name ends in the number of segments."""
        inputs = [[BufferId(other + 1) for other in reads] or [BufferId(0)] for reads in self._reads]
        readers: list[list[SegmentId]] = [[] for _ in range(self.num_segments + 1)]
        for segment, reads in enumerate(inputs):
            for buffer in reads:
                readers[buffer].append(SegmentId(segment))
        buffers = tuple(
            Buffer(
                id=BufferId(index),
                name=f"v{index}",
                producer=SegmentId(index - 1) if index else None,
                readers=tuple(found),
                num_bytes=2**20,
                is_output=not found,
            )
            for index, found in enumerate(readers)
        )
        segments = tuple(
            Segment(
                id=SegmentId(index),
                name=f"s{index}",
                module="",
                body=BodyId(index),
                inputs=tuple(reads),
                outputs=(BufferId(index + 1),),
                after=(),
                work=work,
            )
            for index, (work, reads) in enumerate(zip(self._works, inputs, strict=True))
        )
        return SegmentGraph(
            name=f"{name} {self.num_segments}",
            role=Role.INFERENCE,
            segments=segments,
            buffers=buffers,
            inputs=(BufferId(0),),
            outputs=tuple(buffer.id for buffer in buffers if buffer.is_output),
        )


def _loss() -> Work:
    return _work(Kernel(dtype="bfloat16", flops=2**27, bytes_moved=2**24), passes=8)


def _work(*kernels: Kernel, passes: int) -> Work:
    parts = tuple(replace(kernel, count=kernel.count * passes) for kernel in kernels)
    moved = sum(kernel.bytes_moved * kernel.count for kernel in parts)
    return Work(
        flops=sum(kernel.flops * kernel.count for kernel in parts),
        bytes_read=moved // 2,
        bytes_written=moved - moved // 2,
        kernels=sum(kernel.count for kernel in parts),
        parts=parts,
    )
