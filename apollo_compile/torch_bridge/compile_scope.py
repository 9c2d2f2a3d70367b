"""What is in force while Inductor compiles for us: a lock, settings, and what it must not see or assume.

    compile_lock()              guards Inductor's process-wide state
    as_piece(units)             hide what belongs to the whole graph
    native_code()               generate code that lanes can run without Python
    within_guards(fakes)        rely on no more about dynamic sizes than Dynamo checks
    body_options()              settings that every body shares
    shared_kwargs(kwargs)       arguments of AOTAutograd that hold for a piece too
    CACHE_KEY_TAG               our part of Inductor's cache keys

Note [pieces of a graph]: three facts of the whole graph must be hidden while a piece compiles, and are put back after:
`TracingContext.output_strides` (Inductor asserts that it is empty), `fw_metadata.bw_donated_idxs` (names inputs of the
whole backward; a piece would reuse memory that another piece still reads), and AOTAutograd's cache (Inductor would
leave the code of pieces to it). The first two shape the generated code but are not in Inductor's cache key, hence a key
tag of our own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._guards import TracingContext

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.torch_bridge.cpp_wrapper import lane_wrapper
from apollo_compile.torch_bridge.upstream_bugs.scatter_addresses import right_scatters

_lock = threading.RLock()


def _renew_lock() -> None:
    """In a forked child: a thread of the parent may have held it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


@contextlib.contextmanager
def compile_lock() -> Iterator[None]:
    """Guard Inductor's process-wide configuration and code generator tables while something compiles."""
    with _lock:
        yield


def _own_code() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    return digest.hexdigest()


CACHE_KEY_TAG = f"apollo-{_own_code()[:16]}"
"""Part of Inductor's cache key while a body compiles: other code in this package may generate other code.

The number of threads goes behind it: how deep loops are made parallel depends on it, and with `cpp.dynamic_threads`
Inductor's own key does not hold it. So does the number of SMs where code is for a part of a GPU.
"""


@contextlib.contextmanager
def as_piece(units: int | None = None) -> Iterator[None]:
    """Hide what belongs to the whole graph, and keep what is made here apart from other code; under `compile_lock`.

    See Note [pieces of a graph]. Inductor keeps the times of kernels that it chose among, and not on how many SMs they
    were measured; so those of a part of the device are neither looked up nor kept.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    strides = context.output_strides if context is not None else None
    donated = metadata.bw_donated_idxs if metadata is not None else None
    tag = f"{CACHE_KEY_TAG}-{torch.get_num_threads()}" + (f"-on-{units}" if units is not None else "")
    try:
        if context is not None:
            context.output_strides = None
        if metadata is not None:
            metadata.bw_donated_idxs = None
        with (
            right_scatters(),
            torch.compiler.config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
            functorch_config.patch(bundled_autograd_cache=False),
            inductor_config.patch({} if units is None else {"autotune_local_cache": False}),
        ):
            yield
    finally:
        if context is not None:
            context.output_strides = strides
        if metadata is not None:
            metadata.bw_donated_idxs = donated


@contextlib.contextmanager
def native_code() -> Iterator[None]:
    """Let Inductor generate code of bodies that lanes can run without Python."""
    with inductor_config.patch(body_options()), lane_wrapper():
        yield


def body_options() -> dict[str, Any]:
    """Options that every body shares.

    Thread counts are the lane's business, not baked into the code. On a GPU one CUDA graph over all lanes is ours, and
    a reduction whose blocks wait for each other, as many as the device has SMs, would hang on a lane with fewer.
    """
    return {
        "cpp.dynamic_threads": True,
        "triton.cudagraphs": False,
        "triton.cooperative_reductions": False,
        "triton.force_cooperative_reductions": False,
    }


@contextlib.contextmanager
def within_guards(fakes: Sequence[Any], *, is_late: bool = False) -> Iterator[None]:
    """Let what is compiled inside rely on no more about dynamic sizes than Dynamo checks, once that is fixed.

    Arguments:
        fakes: inputs of what is compiled.
        is_late: it is fixed, though nothing says so any more.

    Raises:
        UnsupportedGraphError: the compiler asks for more, or this torch cannot tell.
    """
    sizes = [fake for fake in fakes if isinstance(fake, torch.SymInt)]
    if not sizes or not (is_late or sizes[0].node.shape_env.frozen):
        yield
        return
    shape_env = sizes[0].node.shape_env
    if not hasattr(shape_env, "error_on_new_guards"):
        raise UnsupportedGraphError(f"torch {torch.__version__} does not tell when code is for some dynamic sizes only")
    try:
        with shape_env.error_on_new_guards():
            yield
    except Exception as error:
        if "Guard attempted" not in str(error):
            raise
        raise UnsupportedGraphError(f"Inductor's code would be for some of the dynamic sizes only: {error}") from error


def shared_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of AOTAutograd's arguments for the whole graph that hold for a piece of it too."""
    return {key: kwargs[key] for key in ("is_backward", "is_inference", "graph_id") if key in kwargs}
