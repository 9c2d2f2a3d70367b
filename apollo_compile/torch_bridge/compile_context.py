"""What Dynamo knows about the current compile: its id, and the code that was traced.

Graphs are named by the id that `TORCH_LOGS` and `tlparse` show. The first number identifies the code that is compiled,
the second counts its compiles; `torch._dynamo.reset()` restarts both. Where Dynamo passes more than one graph to the
backend in a compile, as for DDP's buckets, later ones are `0/0.2`, `0/0.3`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch._dynamo import eval_frame
from torch._dynamo.utils import get_metrics_context
from torch._guards import CompileContext, TracingContext
from torch._logging._internal import trace_structured

_RESUMED = "torch_dynamo_resume_in_"
"""Prefix of the names of the functions that Dynamo makes of the rest of a function after a graph break."""

_num_named: weakref.WeakKeyDictionary[CompileContext, Counter[int]] = weakref.WeakKeyDictionary()
"""Number of graphs that a compile has passed to the backend, per attempt: every attempt starts from the beginning."""

_outside = itertools.count(1)
"""Numbers of graphs that come without Dynamo, from callers of the backend itself."""


def compile_apart(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Return `torch.compile(function, ...)` with cache entries of its own, so that no recompile limit is shared."""
    compile_function: Callable[..., Callable[..., Any]] = torch.compile
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        return compile_function(function, **settings, isolate_recompiles=True)
    if isinstance(function, FunctionType):  # entries belong to code, so it gets a copy of that
        code, names = function.__code__.replace(), function.__globals__
        own = FunctionType(code, names, argdefs=function.__defaults__, closure=function.__closure__)
        own.__kwdefaults__ = function.__kwdefaults__
        function = functools.update_wrapper(own, function)
    return compile_function(function, **settings)


@contextmanager
def swappable_tensors() -> Iterator[None]:
    """Let Dynamo refer to no tensor of what it compiles in a `with`, as `torch.utils.swap_tensors` demands."""
    config: Any = torch._dynamo.config  # whose `patch` leaves a context variable behind in every call
    before = config.invalidate_compile_context_weakrefs
    config.invalidate_compile_context_weakrefs = True
    try:
        yield
    finally:
        config.invalidate_compile_context_weakrefs = before


def name_dynamo_graph() -> str:
    """Return a name for the graph that Dynamo passes to the backend now, unique within this compile."""
    context = CompileContext.try_get()
    if context is None or context.compile_id is None:
        return _numbered("-/-", next(_outside))
    counts = _num_named.setdefault(context, Counter())
    counts[context.attempt] += 1
    return _numbered(str(context.compile_id), counts[context.attempt])


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}.{number}"


def code_of(name: str) -> str:
    """Return the number of the code that a graph of this name is of; its graphs are of several compiles of it."""
    return name.partition("/")[0]


def recompile_reason() -> str:
    """Return why Dynamo compiles this code again, in a few words; empty for a first compile, or if it is unknown."""
    metrics = getattr(get_metrics_context(), "_metrics", {})
    reason = str(metrics.get("recompile_reason") or "")
    changed = _CHANGED_SIZE.search(reason)
    if changed is not None:
        return f"size {changed[2]} of {changed[1]} changed from {changed[3]} to {changed[4]}"
    return reason.partition(": ")[2].partition("\n")[0].partition("  #")[0][:_MAX_REASON].strip()


_CHANGED_SIZE = re.compile(r"tensor '(.+?)' size mismatch at index (\d+)\. expected (\d+), actual (\d+)")

_MAX_REASON = 100
"""Characters of a guard of Dynamo's, which may be long."""


def traced_code() -> frozenset[CodeType]:
    """Return the code that the graph was traced from, called functions included; empty without Dynamo."""
    return frozenset(TracingContext.get_traced_code() or ())


def is_part_of(code: CodeType, function: CodeType) -> bool:
    """Return whether traced code is a function, or the rest of that function after a graph break."""
    if code is function:
        return True
    if code.co_filename != function.co_filename or not code.co_name.startswith(f"{_RESUMED}{function.co_name}_at_"):
        return False
    return any(line == code.co_firstlineno for _, _, line in function.co_lines())


def original_callable(run: Any) -> Any:
    """Return the module or function that `torch.compile` was called with; an uncompiled `run` is returned itself."""
    while True:
        inner = getattr(run, "_torchdynamo_orig_callable", None) or getattr(run, "_orig_mod", None)
        if inner is None:
            return run
        run = inner


def owner_of(run: Any) -> Any:
    """Return the module or function that `torch.compile` was called with; for a method, the object that it is of."""
    original = original_callable(run)
    return getattr(original, "__self__", original)


def is_compiled(run: Any) -> bool:
    """Return whether `torch.compile` made a function or module, or the `forward` or the calls of a module."""
    ways = (run, getattr(run, "forward", None), getattr(run, "_compiled_call_impl", None))
    return any(original_callable(way) is not way for way in ways)


def called_now() -> weakref.ref[Callable[..., Any]] | None:
    """Return the module or function of `torch.compile` whose call Dynamo compiles for now; None if it is not known.

    It is found on the stack: Dynamo does not tell a backend, and the graphs of one call have nothing else in common.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == _ENTRY and frame.f_code.co_filename == eval_frame.__file__:
            called = inspect.unwrap(original_callable(frame.f_locals.get("fn")))
            return _refer_to(getattr(called, "__self__", called))
        frame = frame.f_back
    return None


def _refer_to(called: Any) -> weakref.ref[Callable[..., Any]] | None:
    try:
        return weakref.ref(called)
    except TypeError:  # such as a function of C
        return None


_ENTRY = "compile_wrapper"
"""The function that `torch.compile` returns; what it was given is its local variable `fn`."""


def written_arguments() -> frozenset[int]:
    """Return the positions of the arguments that the graph being compiled writes to, as AOTAutograd found."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None:
        return frozenset()
    return frozenset(index for index, item in enumerate(metadata.input_info) if item.mutates_data)


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to torch's structured trace, which `tlparse` shows; `text` is called only if tracing is on."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)
