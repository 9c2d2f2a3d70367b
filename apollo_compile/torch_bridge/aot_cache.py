"""Compiled graphs in AOTAutograd's cache.

Note [bundles]: AOTAutograd's cache holds the result of tracing a Dynamo graph, splitting it into forward and backward,
and compiling both. It accepts any kind of compiled graph that can be serialized and loaded, but only with the setting
`bundled_autograd_cache`; so that is set for AOTAutograd, while Inductor keeps caching the code of pieces by itself. The
backward is then compiled with the forward, because AOTAutograd would read these settings again in a later compile, when
they are no longer set.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._functorch._aot_autograd import aot_autograd_result
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, FXGraphCacheMiss
from torch._inductor.output_code import OutputCode

from apollo_compile.target.target import Run
from apollo_compile.torch_bridge.signatures import Signatures, once_known

Bundle = Callable[[], Any]
"""Returns a graph as data; raises `UnsupportedGraphError` if it cannot be serialized."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """How graphs are stored in and loaded from AOTAutograd's cache: Note [bundles]."""

    key: str
    """Everything that shaped the code besides the graph, torch's settings and arguments of `compile_with_inductor`."""
    unbundle: Callable[[Any], Run]
    """Makes code of the data that a `Bundle` returned."""


_cache: contextvars.ContextVar[Cache] = contextvars.ContextVar("apollo_cache")
"""Loads the graphs that AOTAutograd takes from its cache now."""


@contextlib.contextmanager
def unbundled_by(cache: Cache) -> Iterator[None]:
    """Load graphs with `cache` when AOTAutograd finds them in its cache inside this context."""
    token = _cache.set(cache)
    try:
        yield
    finally:
        _cache.reset(token)


def may_cache() -> bool:
    """Whether AOTAutograd's cache is enabled, as it is by default, and accepts any kind of compiled graph."""
    is_wanted = functorch_config.enable_autograd_cache and inductor_config.fx_graph_cache
    return bool(is_wanted) and hasattr(aot_autograd_result, "BundledOutputCodeLoadable") and _is_known()


OUTPUT_CODE: Signatures = {
    (OutputCode, "__call__"): ("self, inputs",),
    (OutputCode, "prepare_for_serialization"): ("self",),
    (OutputCode, "post_compile"): ("self, example_inputs, constants, graph_kwargs",),
    (OutputCode, "set_triton_bundle"): ("self, triton_bundle",),
}


_is_known = once_known(OUTPUT_CODE, "graphs are not kept for the next process", logging.WARNING)


class CachedGraph(OutputCode):
    """A compiled graph that AOTAutograd's cache can store: Note [bundles]."""

    def __init__(self, run: Run, bundle: Bundle | None) -> None:
        """Wrap `run`; without `bundle` it cannot be stored."""
        self._boxed_call = True  # AOTAutograd looks for it in `__dict__`
        self.run: Run | None = run
        self.bundle = bundle
        self.data: Any = None

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run the graph."""
        return self.run(inputs)  # type: ignore[misc, arg-type]

    def prepare_for_serialization(self) -> None:
        """Replace the code by data; AOTAutograd calls this on a copy.

        Raises:
            BypassAOTAutogradCache: this graph cannot be stored.
        """
        if self.bundle is None:
            raise BypassAOTAutogradCache("apollo_compile does not keep a graph of this kind")
        try:
            self.data = self.bundle()
        except Exception as error:  # the next process compiles as this one did
            raise BypassAOTAutogradCache(f"{type(error).__name__}: {error}") from error
        self.run = self.bundle = None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """Load the code from the data.

        Raises:
            FXGraphCacheMiss: the data cannot be loaded; AOTAutograd then compiles forward and backward again.
        """
        try:
            self.run, self.data = _cache.get().unbundle(self.data), None
        except Exception as error:
            raise FXGraphCacheMiss(f"{type(error).__name__}: {error}") from error

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Do nothing: bodies keep their kernels themselves."""
