"""What lanes need to take part in a profile of `torch.profiler`.

Note [threads in a profile]: a profiler records the thread on which it was started, by callbacks and a state that belong
to that thread. Another one takes part with copies of both, as those of autograd and of `torch.jit.fork` do through
`at::ThreadLocalState`. `enableProfilerInChildThread` is no way: it remembers the callbacks of one thread only, so that
with a second one the first would keep them for ever. Names are mangled, but have been the same for years.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler

from apollo_compile.torch_bridge.handles import address_of

_FUNCTIONS = {
    "has_callbacks": "_ZN2at12hasCallbacksEv",
    "callbacks": "_ZN2at24get_record_function_tls_Ev",
    "set_callbacks": "_ZN2at24set_record_function_tls_ERKNS_17RecordFunctionTLSE",
    "clear_callbacks": "_ZN2at25clearThreadLocalCallbacksEv",
    "state": "_ZN3c1020ThreadLocalDebugInfo7currentEv",
    "set_state": "_ZN3c1020ThreadLocalDebugInfo22_forceCurrentDebugInfoESt10shared_ptrIS0_E",
    "begin": "aoti_record_function_start",
    "end": "aoti_record_function_end",
}


def is_profiling() -> bool:
    """Whether a profiler records in this process; as cheap as reading a variable."""
    return profiler._is_profiler_enabled


def named(name: str | None) -> AbstractContextManager[Any]:
    """Return a context in which what is launched has a name in profiles; None gives it none."""
    return contextlib.nullcontext() if name is None else torch.profiler.record_function(name)


@functools.cache
def profiler_functions() -> Mapping[str, int] | None:
    """Return the addresses; None if this release of torch lacks one of the functions."""
    found = {name: address_of(symbol, default=0) for name, symbol in _FUNCTIONS.items()}
    return found if all(found.values()) else None
