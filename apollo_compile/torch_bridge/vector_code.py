"""Vectors at once where Inductor's C++ code goes through their elements one by one: random numbers and masks.

Inductor draws one number after the other, each with all ten rounds of Philox, which in a model with dropout can take
longer than its matmuls. The rounds are the same arithmetic for every number, so here each is taken for a whole vector,
where the CPU has AVX2 or AVX-512. The numbers are the same to the bit: those of `normalized_rand_cpu`, the first of the
four that Philox makes of a counter.

A mask that is stored, as of a dropout or of a ReLU without gradients of weights, goes through an array of bytes that is
four times as long, and one that is loaded is branched on; here both are loops that C++ compilers make vectors of.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
https://doi.org/10.1145/2063384.2063405
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor.codegen import cpp
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP, cexpr_index
from torch._inductor.utils import IndentedBuffer
from torch._inductor.virtualized import V

from apollo_compile.torch_bridge.signatures import Signatures, once_known

VECTORS: Signatures = {
    (cpp.CppVecOverrides, "rand"): ("seed, offset",),
    (cpp.CppVecKernel, "_get_vec_load_line"): ("self, var, index, dtype, load_mask",),
    (cpp.CppVecKernel, "_get_store_line"): ("self, value, var, index, dtype, accu_store",),
}

_SLOWER = "random numbers and masks are handled one element after the other, which takes longer"
_is_known = once_known(VECTORS, _SLOWER, logging.INFO)

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

_LOAD = (
    "[](const bool* from, int count) {{ alignas(64) int words[{size}] = {{}}; "
    "for (int i = 0; i < count; i++) words[i] = from[i] ? -1 : 0; "
    "return at::vec::VecMask<int, {vectors}>(at::vec::VectorizedN<int, {vectors}>::loadu(words))"
    ".template cast<float, {vectors}>(); }}({address}, {num_elems})"
)
"""A mask of so many vectors of floats. It is one line, since Inductor finds equal loads by their lines."""

_STORE = """\
[](const auto& mask, bool* to, int count)
{{
    constexpr int size = std::decay_t<decltype(mask)>::size(), vectors = size / at::vec::Vectorized<int>::size();
    alignas(64) int words[size];
    at::vec::VectorizedN<int, vectors>(mask.template cast<int, vectors>()).store(words);
    for (int i = 0; i < count; i++) to[i] = words[i] != 0;
}}
({mask}, {address}, {num_elems});"""


@contextlib.contextmanager
def vectors_at_once() -> Iterator[None]:
    """Let C++ code draw uniform numbers, load and store masks a vector at once; under `compile_lock`."""
    if not _is_known():
        yield
        return
    load, store = (vars(owner)[name] for owner, name in VECTORS if owner is cpp.CppVecKernel)

    def load_line(kernel: Any, var: Any, index: Any, dtype: torch.dtype, load_mask: Any = None) -> Any:
        if dtype is not torch.bool:
            return load(kernel, var, index, dtype, load_mask)
        return _LOAD.format(**_words_for(kernel, var, index))

    def store_line(kernel: Any, value: Any, var: Any, index: Any, dtype: torch.dtype, accu_store: bool = False) -> Any:
        is_next = kernel._try_get_const_stride(index, kernel.itervars[kernel.tiling_idx]) == 1
        if dtype is not torch.bool or getattr(value, "dtype", None) is not dtype or not is_next or accu_store:
            return store(kernel, value, var, index, dtype, accu_store)
        code = IndentedBuffer()
        code.splice(_STORE.format(mask=value, **_words_for(kernel, var, index)))
        return code

    with contextlib.ExitStack() as stack:
        for (owner, name), own in zip(VECTORS, (staticmethod(_rand), load_line, store_line), strict=True):
            stack.enter_context(patch.object(owner, name, own))
        yield


def _words_for(kernel: Any, var: Any, index: Any) -> dict[str, Any]:
    """Return how many elements a vector of a loop has, how many of them are used, and where they are in memory."""
    place = {"address": f"{var} + {cexpr_index(index)}", "num_elems": cexpr_index(kernel.num_elems)}  # type: ignore[no-untyped-call]
    return {"size": kernel.tiling_factor, "vectors": kernel._get_num_vectors(torch.float), **place}


def _rand(seed: Any, offset: Any) -> Any:
    """Return an expression for a vector of numbers, as `CppVecOverrides.rand` does."""
    kernel: Any = V.kernel
    integer, vector = DTYPE_TO_CPP[offset.dtype], kernel._get_vec_type(torch.float)
    code = IndentedBuffer()
    code.splice(_DRAW.format(size=kernel.tiling_factor, integer=integer, offset=offset, seed=seed, vector=vector))
    return code
