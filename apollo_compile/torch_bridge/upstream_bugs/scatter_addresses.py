"""Values that Inductor's C++ code adds at the wrong addresses.

    right_scatters()            a code generator without the defect, while something compiles
    adds_at_addresses(node)     whether it may make a difference for an operator
    STORE                       the method of torch that is overridden

A loop over tiles has its place in the tile added to addresses twice where they depend on what was read: by the store of
a tile, and by the atomic addition that it calls, which is there for code that several threads run. So
`x.index_add(0, where, y.T[None])` writes to other rows, or behind the tensor. Here such a store leaves it to the
addition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor.codegen import cpp

from apollo_compile.torch_bridge.signatures import Signatures, check_signatures

_ADDITIONS = (
    "aten.index_put.",
    "aten._unsafe_index_put.",
    "aten._unsafe_masked_index_put_accumulate.",
    "aten.index_add.",
    "aten.scatter_add.",
    "aten.scatter_reduce.",
    "aten.embedding_dense_backward.",
)
"""Beginnings of the names of operators whose code may add at addresses that it reads."""


def adds_at_addresses(node: fx.Node) -> bool:
    """Whether the code of an operator may add at addresses that it reads."""
    return str(node.target).startswith(_ADDITIONS)


STORE: Signatures = {(cpp.CppTile2DKernel, "store"): ("self, name, index, value, mode",)}


@contextlib.contextmanager
def right_scatters() -> Iterator[None]:
    """Let C++ code for several threads add transposed values at the right addresses; under `compile_lock`."""
    if "index_expr" not in vars(cpp.CppTile2DOverrides):  # then it is added once
        yield
        return
    check_signatures(STORE)
    tiles: Any = cpp.CppTile2DKernel
    vectors: Any = cpp.CppVecKernel
    wrong = tiles.store

    def store(kernel: Any, name: Any, index: Any, value: Any, mode: Any = None) -> Any:
        is_atomic = mode == "atomic_add" and (inductor_config.cpp.dynamic_threads or kernel.num_threads != 1)
        if is_atomic and not kernel.need_vec_transpose(kernel.rename_indexing(index)):
            return vectors.store(kernel, name, index, value, mode)
        return wrong(kernel, name, index, value, mode)

    tiles.store = store
    try:
        yield
    finally:
        tiles.store = wrong
