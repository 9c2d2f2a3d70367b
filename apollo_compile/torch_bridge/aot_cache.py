"""Compiled graphs as AOTAutograd's cache keeps them.

    may_cache()             whether it may, and can
    Cache                   what a caller tells `compile_with_inductor` about it
    given_back_by(cache)    what makes code of graphs that come out of the cache
    CachedGraph             a compiled graph: callable, and data while it is in the cache
    OUTPUT_CODE             the methods of torch that `CachedGraph` overrides

Note [bundles]: AOTAutograd's cache holds the result of tracing a Dynamo graph, splitting it in forward and backward,
and compiling both. It takes graphs of any kind that can become data and code again, but only where code is bundled with
the rest; so it is told that it is, while Inductor goes on keeping the code of pieces by itself. The backward compiles
with the forward then, since AOTAutograd would look at those settings again later, when they are no longer set.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._functorch._aot_autograd import aot_autograd_result
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, FXGraphCacheMiss
from torch._inductor.output_code import OutputCode

from apollo_compile.device.target import Run
from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.torch_bridge.signatures import Signatures, check_signatures

_logger = logging.getLogger(__name__)


Bundle = Callable[[], Any]
"""Returns a graph as data; raises `UnsupportedGraphError` if it cannot be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """How AOTAutograd's cache gives graphs back: Note [bundles]."""

    key: str
    """What shaped a graph besides itself, the settings of torch and what `compile_with_inductor` is told."""
    unbundle: Callable[[Any], Run]
    """Makes code of a bundle."""


_cache: contextvars.ContextVar[Cache] = contextvars.ContextVar("apollo_cache")
"""Where what AOTAutograd gives back now becomes code."""


@contextlib.contextmanager
def given_back_by(cache: Cache) -> Iterator[None]:
    """Let `cache` make code of the bundles that AOTAutograd gives back inside."""
    token = _cache.set(cache)
    try:
        yield
    finally:
        _cache.reset(token)


def may_cache() -> bool:
    """Whether AOTAutograd may keep results, as it does unless the user says no, and can keep those of any kind."""
    is_wanted = functorch_config.enable_autograd_cache and inductor_config.fx_graph_cache
    return bool(is_wanted) and hasattr(aot_autograd_result, "BundledOutputCodeLoadable") and _is_known_to_cache()


OUTPUT_CODE: Signatures = {
    (OutputCode, "__call__"): ("self, inputs",),
    (OutputCode, "prepare_for_serialization"): ("self",),
    (OutputCode, "post_compile"): ("self, example_inputs, constants, graph_kwargs",),
    (OutputCode, "set_triton_bundle"): ("self, triton_bundle",),
}


@functools.cache
def _is_known_to_cache() -> bool:
    try:
        check_signatures(OUTPUT_CODE)
    except UnsupportedGraphError as error:
        _logger.warning("graphs are not kept for the next process: %s", error)
        return False
    return True


class CachedGraph(OutputCode):
    """A compiled graph as AOTAutograd's cache knows it: callable, and data while it is there. See Note [bundles]."""

    def __init__(self, run: Run, bundle: Bundle | None) -> None:
        """Stand for `run`; without `bundle` it cannot be kept."""
        self._boxed_call = True  # AOTAutograd looks for it in `__dict__`
        self.run: Run | None = run
        self.bundle = bundle
        self.data: Any = None

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run the graph."""
        return self.run(inputs)  # type: ignore[misc, arg-type]

    def prepare_for_serialization(self) -> None:
        """Become data; this is a copy, which the cache made.

        Raises:
            BypassAOTAutogradCache: this graph is not to be kept.
        """
        if self.bundle is None:
            raise BypassAOTAutogradCache("apollo_compile does not keep a graph of this kind")
        try:
            self.data = self.bundle()
        except Exception as error:  # the next process compiles as this one did
            raise BypassAOTAutogradCache(f"{type(error).__name__}: {error}") from error
        self.run = self.bundle = None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """Become code again.

        Raises:
            FXGraphCacheMiss: it cannot; AOTAutograd compiles the whole anew.
        """
        try:
            self.run, self.data = _cache.get().unbundle(self.data), None
        except Exception as error:
            raise FXGraphCacheMiss(f"{type(error).__name__}: {error}") from error

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Bodies keep their kernels themselves."""
