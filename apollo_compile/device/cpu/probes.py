"""Microbenchmarks of torch kernels of segments, small to large.

    make_probes(counts) -> probes;  Probe.time(round, units);  .ns(units) -> time of one kernel

The kernels are matmuls, attention, convolutions, loops over vectors that are in the cache (near) or not (far), and
scatters. A short call is repeated within a round; a long call is measured in some rounds only.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from apollo_compile.device.cpu.matmul_libraries import call_as_bodies
from apollo_compile.ir import KernelKind

Probed: TypeAlias = Callable[[], object]

_BATCH_NS = 300_000
"""Approximate time for which a call is repeated in a round."""

_TURN_NS = 4_000_000
"""A longer call is measured in some rounds only."""


@dataclass(kw_only=True, slots=True, eq=False)
class Probe:
    """A call that runs one kernel, or several of the same size, with its times."""

    kind: KernelKind
    flops: int = 0
    """Flops of one kernel."""
    near_bytes: int = 0
    far_bytes: int = 0
    footprint: int = 0
    """Bytes touched between two reads of the same far bytes."""
    dtype: str = "float32"
    kernels: int = 1
    is_parallel: bool = False
    """Whether `parallel_ns` is fitted to its time."""
    call: Probed = lambda: None
    """Runs the kernels; does nothing for a compiled body, which `runtime.py` times."""
    times: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Nanoseconds of one kernel in all rounds, by number of units."""
    _expected_ns: float = 0.0

    @property
    def bytes_moved(self) -> int:
        """Bytes that one kernel moves."""
        return self.near_bytes + self.far_bytes

    def time(self, number: int, units: int) -> None:
        """Measure the call in a round; a long call is skipped in most rounds."""
        if not self._expected_ns:
            self._expected_ns = _time(self.call, 3)
        if number % max(1, round(self._expected_ns / _TURN_NS)) == 0:
            elapsed_ns = _time(self.call, max(1, round(_BATCH_NS / self._expected_ns)))
            self.times[units].append(elapsed_ns / self.kernels)

    def ns(self, units: int) -> float:
        """Return the mean time of one kernel over all rounds but the fastest and the slowest twentieth."""
        times, skip = sorted(self.times[units]), len(self.times[units]) // 20
        return statistics.fmean(times[skip : len(times) - skip])


def make_probes(counts: Sequence[int]) -> list[Probe]:
    """Return probes for these numbers of units; vector additions first, since the rates of the others need them."""
    probes = [_near_probe(kib) for kib in (48, 192, 768, 3072, 12288, 49152, 196608)]
    probes += [_far_probe(mib) for mib in (2, 4, 16, 64)]
    probes += [_matmul_probe(size, torch.float32) for size in (16, 32, 64)]  # too small for another library
    probes += [_float32_probe(size, counts) for size in (128, 256, 512)]
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        probes += [_matmul_probe(size, dtype) for size in (32, 128, 256)]
    probes += [_batched_probe(*shape) for shape in ((32, 16), (64, 32), (64, 64), (32, 128))]
    for shape in ((2, 2, 16, 16), (4, 4, 32, 16), (4, 4, 64, 32), (8, 4, 128, 64)):
        probes += _attention_probes(*shape)
    for sizes in ((4, 64, 64), (8, 128, 256)):
        probes += _convolution_probes(*sizes)
    probes += [_scatter_probe(rows) for rows in (64, 1024)]
    probes += [_scan_probe(columns) for columns in (16, 1024)]
    return probes


def _near_probe(kib: int) -> Probe:
    count = kib * 1024 // 12
    left, right, total = torch.ones(count), torch.ones(count), torch.empty(count)
    return Probe(kind=KernelKind.LOOP, near_bytes=12 * count, call=lambda: torch.add(left, right, out=total))


def _far_probe(mib: int) -> Probe:
    """Return a probe that cycles through `mib` MiB of vectors, so that each call reads vectors that are not cached."""
    count = 2**16  # torch uses one thread for shorter vectors
    pairs = itertools.cycle([(torch.ones(count), torch.ones(count)) for _ in range(mib * 2**20 // (8 * count))])
    total = torch.empty(count)

    def call() -> None:
        left, right = next(pairs)
        torch.add(left, right, out=total)

    return Probe(kind=KernelKind.LOOP, near_bytes=4 * count, far_bytes=8 * count, footprint=mib * 2**20, call=call)


def _matmul_probe(size: int, dtype: torch.dtype) -> Probe:
    """Return a probe of a linear layer's matmul with bias, and of the matmul of its weight gradient, by BLAS."""
    values, weight, total = (torch.ones(size, size, dtype=dtype) for _ in range(3))
    bias, transposed, weight_transposed = torch.ones(size, dtype=dtype), values.t(), weight.t()

    def call() -> None:
        torch.addmm(bias, values, weight_transposed, out=total)
        torch.mm(transposed, weight, out=total)

    return Probe(
        kind=KernelKind.MATMUL,
        dtype=str(dtype).removeprefix("torch."),
        flops=2 * size**3,
        near_bytes=3 * size**2 * dtype.itemsize,
        kernels=2,
        call=call,
    )


def _float32_probe(size: int, counts: Sequence[int]) -> Probe:
    """Return the same probe for float32, by the libraries that bodies use on each number of units."""
    calls = {count: call_as_bodies(size, count) for count in counts}
    return replace(_matmul_probe(size, torch.float32), call=lambda: calls[torch.get_num_threads()]())


def _batched_probe(batch: int, size: int) -> Probe:
    left, right, total = (torch.ones(batch, size, size) for _ in range(3))
    return Probe(
        kind=KernelKind.BATCHED_MATMUL,
        flops=2 * batch * size**3,
        near_bytes=12 * batch * size**2,
        call=lambda: torch.bmm(left, right, out=total),
    )


def _attention_probes(batch: int, heads: int, tokens: int, width: int) -> list[Probe]:
    shape = (batch, heads, tokens, width)
    query, key, value = torch.ones(shape), torch.ones(shape), torch.ones(shape)
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    run_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    out, logsumexp = run(query, key, value)
    flops, num_bytes = 4 * batch * heads * tokens**2 * width, 4 * query.numel()
    return [
        Probe(kind=KernelKind.ATTENTION, flops=flops, near_bytes=4 * num_bytes, call=lambda: run(query, key, value)),
        Probe(
            kind=KernelKind.ATTENTION_BACKWARD,
            flops=flops * 5 // 2,
            near_bytes=8 * num_bytes,
            call=lambda: run_backward(query, query, key, value, out, logsumexp, 0.0, False),
        ),
    ]


def _scatter_probe(rows: int) -> Probe:
    """Return a probe that adds rows of gradients to an embedding table."""
    table, gradient, indices = torch.zeros(1000, 64), torch.ones(rows, 64), torch.arange(rows) % 997
    return Probe(
        kind=KernelKind.SCATTER,
        flops=gradient.numel(),
        near_bytes=8 * gradient.numel(),
        call=lambda: torch.ops.aten.index_put_(table, [indices], gradient, True),
    )


def _scan_probe(columns: int) -> Probe:
    values = torch.ones(64, columns)
    return Probe(
        kind=KernelKind.LIBRARY,
        flops=values.numel(),
        near_bytes=8 * values.numel(),
        call=lambda: torch.cumsum(values, 1),
    )


def _convolution_probes(images: int, side: int, channels: int) -> list[Probe]:
    """Return probes of a convolution with 16 x 16 patches, and of its weight gradient."""
    shape: tuple[Any, ...] = ([16, 16], [0, 0], [1, 1], False, [0, 0], 1)
    run, run_backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    image, weight = torch.ones(images, 3, side, side), torch.ones(channels, 3, 16, 16)
    out = torch.ones(images, channels, side // 16, side // 16)
    flops = 2 * out.numel() * weight[0].numel()
    num_bytes = 4 * (image.numel() + weight.numel() + out.numel())
    return [
        Probe(kind=kind, flops=flops, near_bytes=num_bytes, call=call)
        for kind, call in (
            (KernelKind.CONVOLUTION, lambda: run(image, weight, None, *shape)),
            (
                KernelKind.CONVOLUTION_BACKWARD,
                lambda: run_backward(out, image, weight, [channels], *shape, [False, True, False]),
            ),
        )
    ]


def _time(call: Probed, repeats: int) -> float:
    call()  # loads code, touches pages, and brings its data back into the caches
    begin = time.perf_counter_ns()
    for _ in range(repeats):
        call()
    return (time.perf_counter_ns() - begin) / repeats
