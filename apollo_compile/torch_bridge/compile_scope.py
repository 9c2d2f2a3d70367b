"""Settings and locks while Inductor compiles for us.

Note [pieces of a graph]: three parts of the state of the whole graph are hidden while a piece compiles, and restored
afterwards: `TracingContext.output_strides` (Inductor asserts that it is empty), `fw_metadata.bw_donated_idxs` (names
inputs of the whole backward; a piece would reuse memory that another piece still reads), and AOTAutograd's cache
(Inductor would not cache the code of pieces itself). The first two affect the generated code but are not in Inductor's
cache key, hence a key tag of our own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._guards import TracingContext
from torch.torch_version import TorchVersion

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.torch_bridge.cpp_wrapper import lane_wrapper
from apollo_compile.torch_bridge.signatures import check_signatures
from apollo_compile.torch_bridge.upstream_bugs.scatter_addresses import STORE, fixed_scatters
from apollo_compile.torch_bridge.vector_code import vectors_at_once

_lock = threading.RLock()


def _renew_lock() -> None:
    """In a forked child: a thread of the parent may have held it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def compile_lock() -> contextlib.AbstractContextManager[Any]:
    """Return the guard of Inductor's process-wide configuration and code generator tables while something compiles."""
    return _lock


def _own_code() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    return digest.hexdigest()


CACHE_KEY_TAG = f"apollo-{_own_code()[:16]}"
"""Part of Inductor's cache key while a body compiles: a hash of this package, which shapes the generated code.

The number of threads is appended, because it decides how many loop levels are parallelized, and with
`cpp.dynamic_threads` it is not part of Inductor's own key.
"""


def fixed_code_generator() -> contextlib.AbstractContextManager[None]:
    """Return the context in which Inductor's C++ code has no known defect; under `compile_lock`."""
    check_signatures(STORE)
    return fixed_scatters()


@contextlib.contextmanager
def own_code_generator() -> Iterator[None]:
    """Generate C++ code with all that is different here, under cache keys of our own; under `compile_lock`."""
    tag = f"{CACHE_KEY_TAG}-{torch.get_num_threads()}"
    with fixed_code_generator(), vectors_at_once(), torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        yield


@contextlib.contextmanager
def as_piece() -> Iterator[None]:
    """Hide state of the whole graph (Note [pieces of a graph]), and generate code of our own; under `compile_lock`."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    with contextlib.ExitStack() as stack:
        for owner, name in ((context, "output_strides"), (metadata, "bw_donated_idxs")):
            if owner is not None:
                stack.enter_context(patch.object(owner, name, None))
        with own_code_generator(), functorch_config.patch(bundled_autograd_cache=False):
            yield


@contextlib.contextmanager
def native_code() -> Iterator[None]:
    """Let Inductor generate code of bodies that lanes can run without Python."""
    if TorchVersion(torch.__version__) < "2.13":  # 2.12 warns of each matmul
        warnings.filterwarnings("ignore", message="CUTLASS backend is not supported")
    with inductor_config.patch(body_options()), lane_wrapper():
        yield


def body_options() -> dict[str, Any]:
    """Return Inductor's settings for all bodies.

    The lane sets the number of threads at run time; it is not compiled into the code. On a GPU we capture one CUDA
    graph over all lanes ourselves. A cooperative reduction launches as many blocks as the device has SMs, which wait
    for each other, and would hang on a lane with fewer SMs. Before torch 2.13 Inductor's C++ template of `bmm` is for
    one number of threads, whatever `dynamic_threads` says.
    """
    is_old = TorchVersion(torch.__version__) < "2.13"
    return {
        **({"max_autotune_gemm_backends": "ATEN,TRITON"} if is_old else {}),
        "cpp.dynamic_threads": True,
        "triton.cudagraphs": False,
        "triton.cooperative_reductions": False,
        "triton.force_cooperative_reductions": False,
    }


@contextlib.contextmanager
def within_guards(fakes: Sequence[Any], *, is_late: bool = False) -> Iterator[None]:
    """Refuse new guards on dynamic sizes inside, once Dynamo has made its guards and could not check more.

    Arguments:
        fakes: inputs of the graph that is compiled.
        is_late: Dynamo has made its guards, although the shape environment does not say so any more.

    Raises:
        UnsupportedGraphError: the compiler needs another guard, or this torch cannot report that.
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
    """Return AOTAutograd's arguments for the whole graph that are valid for a piece of it too."""
    return {key: kwargs[key] for key in ("is_backward", "is_inference", "graph_id") if key in kwargs}
