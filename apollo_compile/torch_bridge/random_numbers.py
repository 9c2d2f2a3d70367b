"""Random numbers of a vector at once, in Inductor's C++ code.

Inductor draws one number after the other, each with all ten rounds of Philox, which in a model with dropout can take
longer than its matmuls. The rounds are the same arithmetic for every number, so here each is taken for a whole vector,
where the CPU has AVX2 or AVX-512. The numbers are the same to the bit: those of `normalized_rand_cpu`, the first of the
four that Philox makes of a counter.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
https://doi.org/10.1145/2063384.2063405
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor.codegen import cpp
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP
from torch._inductor.utils import IndentedBuffer
from torch._inductor.virtualized import V

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.torch_bridge.signatures import Signatures, check_signatures

_logger = logging.getLogger(__name__)

RAND: Signatures = {(cpp.CppVecOverrides, "rand"): ("seed, offset",)}

_DRAW = """\
[&]()
{{
    constexpr int size = {size};
    {integer} offset[size];
    float result[size];
    {offset}.store(offset);
#if defined(__AVX2__)
#if defined(__AVX512F__)
    typedef uint64_t Words __attribute__((vector_size(64)));
    const auto times = [](Words x, Words y) {{ return (Words)_mm512_mul_epu32((__m512i)x, (__m512i)y); }};
#else
    typedef uint64_t Words __attribute__((vector_size(32)));
    const auto times = [](Words x, Words y) {{ return (Words)_mm256_mul_epu32((__m256i)x, (__m256i)y); }};
#endif
    constexpr int count = sizeof(Words) / sizeof(uint64_t);
    static_assert(size % count == 0);
    for (int first = 0; first < size; first += count) {{
        Words a, b = {{}}, c = {{}}, d = {{}};
        for (int i = 0; i < count; i++) a[i] = static_cast<uint32_t>(offset[first + i]);
        uint32_t key_a = static_cast<uint32_t>({seed}), key_b = 0;
        for (int round = 0; round < 10; round++) {{
            const Words one = times(a, Words{{}} + 0xD2511F53), other = times(c, Words{{}} + 0xCD9E8D57);
            a = (other >> 32) ^ b ^ key_a;
            b = other;
            c = (one >> 32) ^ d ^ key_b;
            d = one;
            key_a += 0x9E3779B9;
            key_b += 0xBB67AE85;
        }}
        for (int i = 0; i < count; i++) result[first + i] = uint32_to_uniform_float(static_cast<uint32_t>(a[i]));
    }}
#else
    for (int i = 0; i < size; i++) result[i] = normalized_rand_cpu({seed}, offset[i]);
#endif
    return {vector}::loadu(result);
}}
()"""
"""Philox with counters (offset, 0, 0, 0) and the key (seed, 0): products of the lower halves of words, whose upper
halves need not be cleared."""


@contextlib.contextmanager
def numbers_at_once() -> Iterator[None]:
    """Let C++ code draw the uniform numbers of a vector at once; under `compile_lock`.

    With a torch whose method has changed, they are drawn as Inductor does, which takes longer.
    """
    if not _is_known():
        yield
        return
    overrides: Any = cpp.CppVecOverrides
    usual = overrides.__dict__["rand"]
    overrides.rand = staticmethod(_rand)
    try:
        yield
    finally:
        overrides.rand = usual


@functools.cache
def _is_known() -> bool:
    """Whether this torch is known to work with it; if not, say so once per process."""
    try:
        check_signatures(RAND)
    except UnsupportedGraphError as error:
        _logger.info("random numbers are drawn one after the other, which takes longer: %s", error)
        return False
    return True


def _rand(seed: Any, offset: Any) -> Any:
    """Return an expression for a vector of numbers, as `CppVecOverrides.rand` does."""
    kernel: Any = V.kernel
    count = kernel._get_num_vectors(dtype=torch.float32)
    code = IndentedBuffer()
    code.splice(
        _DRAW.format(
            size=kernel.tiling_factor,
            integer=DTYPE_TO_CPP[offset.dtype],
            offset=offset,
            seed=seed,
            vector="at::vec::Vectorized<float>" if count == 1 else f"at::vec::VectorizedN<float, {count}>",
        )
    )
    return code
