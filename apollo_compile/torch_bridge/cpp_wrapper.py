"""Inductor's C++ code generator, changed so that threads without Python can call the generated code.

Note [native entry]: Inductor's C++ wrapper exports `inductor_entry_impl(inputs, outputs)`, but it releases the GIL on
entry and so must be entered with the GIL held. Lanes are threads without Python, so `_LaneWrapper` generates the same
code without that line and with C linkage. Everything else of the generated code is Inductor's. A piece that calls back
into Python (a custom operator) is compiled with the Python wrapper and runs under the GIL.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._inductor.codecache import CppWrapperCodeCache
from torch._inductor.codegen.common import device_codegens, init_backend_registration
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.virtualized import V

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.torch_bridge.signatures import ADVICE, Signatures, check_signatures

_CHANGES = (
    # Lanes look the entry up by its name, ...
    ("void inductor_entry_impl(", 'extern "C" __attribute__((visibility("default"))) void inductor_entry_impl('),
    # ... and hold no GIL that it could release.
    ("py::gil_scoped_release_simple release;", ""),
    # The C++ compiler is not waited for when the generated module is imported, but when it is first called.
    (
        "inductor_entry = CppWrapperCodeCache.load_pybinding(",
        "from apollo_compile.torch_bridge.joined_code import lane_entry, load_entry\nload_inductor_entry = load_entry(",
    ),
    ("_wrap_func(inductor_entry)", "_wrap_func(lambda handles: load_inductor_entry()(handles))"),
)
"""Text replacements in the generated code: texts changed less between releases than the methods that write them."""


class _LaneWrapper(CppWrapperCpu):
    """Inductor's C++ wrapper with an entry that threads without Python can call."""

    _calls_python = False

    @staticmethod
    def create(*_: Any) -> Any:
        return _LaneWrapper()  # type: ignore[no-untyped-call]

    def generate_scoped_gil_acquire(self, *args: Any) -> Any:
        self._calls_python = True
        return super().generate_scoped_gil_acquire(*args)  # type: ignore[no-untyped-call]

    def generate_end(self, result: Any) -> None:
        super().generate_end(result)  # type: ignore[no-untyped-call]
        for old, new in _CHANGES:
            _replace_once(result._lines, old, new)
        if self._calls_python:  # lanes enter Python through the Python wrapper only
            return
        constants = ", ".join(V.graph.constants)
        result.splice(
            f"""
            call.lane_body = lambda: (*lane_entry(load_inductor_entry()), [{constants}])
            """
        )


def _replace_once(lines: list[Any], old: str, new: str) -> None:
    found = [position for position, line in enumerate(lines) if isinstance(line, str) and old in line]
    if len(found) != 1:
        raise UnsupportedGraphError(
            f"torch {torch.__version__} generates other code than expected: {old!r} is in {len(found)} of its lines "
            f"instead of one; {ADVICE}"
        )
    lines[found[0]] = lines[found[0]].replace(old, new)


KNOWN_SIGNATURES: Signatures = {
    (CppWrapperCpu, "create"): ("is_subgraph, subgraph_name, parent_wrapper, partition_signatures",),
    (CppWrapperCpu, "generate_end"): ("self, result",),
    (CppWrapperCpu, "generate_scoped_gil_acquire"): (
        "self, declarations_before_scope, lines_in_scope",
        "self, declarations_before_scope, lines_in_scope, lines_before_acquire",
    ),
    (CppWrapperCodeCache, "_get_uncompiled_header"): ("device",),
}
"""Signatures of the overridden methods; an override accepts each of them."""


_is_for_lanes: contextvars.ContextVar[bool] = contextvars.ContextVar("apollo_is_for_lanes", default=False)
"""Whether the code that Inductor generates now is for lanes; like Inductor's settings, each thread has its own."""


@contextlib.contextmanager
def lane_wrapper() -> Iterator[None]:
    """Let Inductor generate CPU code through `_LaneWrapper`.

    Inductor looks it up in a process-wide table, and another thread may compile at the same time without our lock: a
    backward of plain Inductor compiles in its first call. So the temporary entry chooses by thread (`_is_for_lanes`).

    Raises:
        UnsupportedGraphError: this torch is not known to work with it.
    """
    check_signatures(KNOWN_SIGNATURES)
    init_backend_registration()
    usual = device_codegens["cpu"]

    class Chosen(usual.cpp_wrapper_codegen):  # type: ignore[name-defined, misc]
        """The registered code generator, except that threads that compile for lanes get `_LaneWrapper`."""

        @staticmethod
        def create(*args: Any, **kwargs: Any) -> Any:
            chosen: Any = _LaneWrapper if _is_for_lanes.get() else usual.cpp_wrapper_codegen
            return chosen.create(*args, **kwargs)

    ours = replace(usual, cpp_wrapper_codegen=Chosen)
    device_codegens["cpu"] = ours
    token = _is_for_lanes.set(True)
    try:
        with inductor_config.patch(cpp_wrapper=True):
            yield
    finally:
        _is_for_lanes.reset(token)
        if device_codegens["cpu"] is ours:  # else somebody registered another code generator meanwhile
            device_codegens["cpu"] = usual
