"""Names of Dynamo graphs: the id that Dynamo gives every compile, as `TORCH_LOGS` and `tlparse` show it.

    name_dynamo_graph() -> "0/0"

The first number is of the code that is compiled, the second counts its compiles; `torch._dynamo.reset()` begins both
anew. Where Dynamo hands over more than one graph in a compile, as for DDP's buckets, later ones are `0/0.2`, `0/0.3`.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter

from torch._guards import CompileContext

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
