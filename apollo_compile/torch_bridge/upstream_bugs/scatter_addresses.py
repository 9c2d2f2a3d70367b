"""Values that Inductor's C++ code adds at the wrong addresses.

    fixed_scatters()            use a code generator without the defect, while something compiles; check STORE before
    adds_at_addresses(node)     whether the defect can affect an operator
    STORE                       the method of torch that is overridden

In a tiled loop, the offset within the tile is added twice to addresses that depend on values: by the store of a tile,
and by the atomic addition that it calls, which is used in code for several threads. So `x.index_add(0, where,
y.T[None])` writes to other rows, or beyond the tensor. Here such a store leaves the offset to the addition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor.codegen import cpp

_ADDITIONS = (
    "aten.index_put.",
    "aten._unsafe_index_put.",
    "aten._unsafe_masked_index_put_accumulate.",
    "aten.index_add.",
    "aten.scatter_add.",
    "aten.scatter_reduce.",
    "aten.embedding_dense_backward.",
)
"""Name prefixes of operators whose code may add at addresses that it reads."""


def adds_at_addresses(node: fx.Node) -> bool:
    """Whether the code of an operator may add at addresses that it reads."""
    return str(node.target).startswith(_ADDITIONS)


STORE: Mapping[tuple[type, str], tuple[str, ...]] = {
    (cpp.CppTile2DKernel, "store"): ("self, name, index, value, mode",)
}
"""Signature of the method that `fixed_scatters` replaces."""


@contextlib.contextmanager
def fixed_scatters() -> Iterator[None]:
    """Let C++ code for several threads add transposed values at the right addresses; under `compile_lock`."""
    if "index_expr" not in vars(cpp.CppTile2DOverrides):  # then it is added once
        yield
        return
    tiles: Any = cpp.CppTile2DKernel
    vectors: Any = cpp.CppVecKernel
    wrong = tiles.store

    def store(kernel: Any, name: Any, index: Any, value: Any, mode: Any = None) -> Any:
        is_atomic = mode == "atomic_add" and (inductor_config.cpp.dynamic_threads or kernel.num_threads != 1)
        if is_atomic and not kernel.need_vec_transpose(kernel.rename_indexing(index)):
            return vectors.store(kernel, name, index, value, mode)
        return wrong(kernel, name, index, value, mode)

    with patch.object(tiles, "store", store):
        yield
