"""What Dynamo says about the compile that is going on: its id, and the code that was traced.

    name_dynamo_graph() -> "0/0";    traced_code() -> code objects;    written_arguments() -> positions
    original_callable(run) -> what `torch.compile` was called with
    is_part_of(code, function) -> whether a traced code object is of a function

Graphs are named by the id that `TORCH_LOGS` and `tlparse` show. The first number is of the code that is compiled, the
second counts its compiles; `torch._dynamo.reset()` begins both anew. Where Dynamo hands over more than one graph in a
compile, as for DDP's buckets, later ones are `0/0.2`, `0/0.3`.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from types import CodeType
from typing import Any

from torch._guards import CompileContext, TracingContext

_RESUMED = "torch_dynamo_resume_in_"
"""How Dynamo calls what it makes of the rest of a function behind a graph break, before the function's name."""

_num_named: weakref.WeakKeyDictionary[CompileContext, Counter[int]] = weakref.WeakKeyDictionary()
"""How many graphs a compile has handed over in each of its attempts: a later one starts from the beginning."""

_outside = itertools.count(1)
"""Numbers of the graphs that came without Dynamo, from who calls the backend directly."""


def name_dynamo_graph() -> str:
    """Return the name of the graph that Dynamo hands over now; no other graph of this compile has it."""
    context = CompileContext.try_get()
    if context is None or context.compile_id is None:
        return _numbered("-/-", next(_outside))
    counts = _num_named.setdefault(context, Counter())
    counts[context.attempt] += 1
    return _numbered(str(context.compile_id), counts[context.attempt])


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}.{number}"


def traced_code() -> frozenset[CodeType]:
    """Return the code that the graph was traced from, functions that it calls included; empty without Dynamo."""
    return frozenset(TracingContext.get_traced_code() or ())


def is_part_of(code: CodeType, function: CodeType) -> bool:
    """Return whether traced code is a function's, or what Dynamo made of its rest behind a graph break."""
    if code is function:
        return True
    if code.co_filename != function.co_filename or not code.co_name.startswith(f"{_RESUMED}{function.co_name}_at_"):
        return False
    return any(line == code.co_firstlineno for _, _, line in function.co_lines())


def original_callable(run: Any) -> Any:
    """Return the module or function that was given to `torch.compile`; what was not compiled is returned as it is."""
    while True:
        inner = getattr(run, "_torchdynamo_orig_callable", None) or getattr(run, "_orig_mod", None)
        if inner is None:
            return run
        run = inner


def written_arguments() -> frozenset[int]:
    """Return the positions of the arguments that the graph being compiled writes to, as AOTAutograd found."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None:
        return frozenset()
    return frozenset(index for index, item in enumerate(metadata.input_info) if item.mutates_data)
