"""Shape environments of dynamic sizes, which torch never frees.

    release_symbols_with(value)     tie the shape environment to the lifetime of a value

A ShapeEnv keeps the fake tensors that were traced, and their sizes refer to it from C++, a cycle that the garbage
collector does not see; and caches of its methods, shared by all ShapeEnvs, keep those that used them last. So a model
that was compiled with dynamic sizes and deleted leaks its trace.
"""

from __future__ import annotations

import weakref

from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def release_symbols_with(value: object) -> None:
    """Release the shape environment of the graph that is being compiled when `value` is freed.

    It is left alone until Dynamo has made its guards from it, because `value` may be freed at once.
    """
    context = TracingContext.try_get()
    shape_env = context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None
    if shape_env is not None:
        weakref.finalize(value, _release_symbols, weakref.ref(shape_env)).atexit = False


def _release_symbols(reference: weakref.ref[ShapeEnv]) -> None:
    shape_env = reference()
    if shape_env is None or not shape_env.frozen:
        return
    shape_env.tracked_fakes = None
    for method in vars(ShapeEnv).values():
        clear = getattr(method, "cache_clear", None)
        if clear is not None:
            clear()
