"""What torch knows of dynamic sizes, which it never lets go of.

    release_symbols_with(value)     tie it to the lifetime of a value

A ShapeEnv keeps the fake tensors that were traced, whose sizes refer to it from C++, where no garbage collector looks;
and caches of its methods, which all of them share, keep those that used them last. So a model that was compiled with
dynamic sizes and forgotten leaves its trace behind.
"""

from __future__ import annotations

import weakref

from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def release_symbols_with(value: object) -> None:
    """Let what torch knows of the sizes of the graph that is being compiled go when `value` does.

    While Dynamo has not made its guards from it, it is left alone: `value` may be dropped at once.
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
