"""Inductor's C++ code generator, changed so that threads without Python can call what it makes.

    is_available    whether it can be had
    lane_wrapper    let Inductor generate CPU code for lanes

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

import torch._inductor.config as inductor_config

_LOAD_NOW = (
    "inductor_entry = CppWrapperCodeCache.load_pybinding(",
    "from torch._inductor.async_compile import AsyncCompile, get_compile_threads\n"
    "load_inductor_entry = CppWrapperCodeCache.load_pybinding_async("
    "submit_fn=AsyncCompile.submit if get_compile_threads() > 1 else None, ",
)
"""In the generated module: do not wait for the C++ compiler when it is imported, ...

With one compile thread, `submit` would compile at once, under a lock that the compile itself takes again: that would
wait for itself.
"""

_CALL_NOW = ("_wrap_func(inductor_entry)", "_wrap_func(lambda handles: load_inductor_entry()(handles))")
"""... but when it is first called."""


def _make_lane_wrapper() -> type | None:
    """Return the code generator of Note [native entry], or None where this torch has other hooks."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    hooks = ("_write_jit_entry_point_signature", "_write_input_preamble", "_generate_end_jit")
    if not all(hasattr(CppWrapperCpu, hook) for hook in hooks):
        return None

    class LaneWrapper(CppWrapperCpu):
        """Inductor's C++ wrapper with an entry that threads without Python can call."""

        @staticmethod
        def create(
            is_subgraph: bool, subgraph_name: str | None, parent_wrapper: Any, partition_signatures: Any = None
        ) -> Any:
            return LaneWrapper()  # type: ignore[no-untyped-call]

        @staticmethod
        def _write_jit_entry_point_signature(prefix: Any) -> None:
            prefix.splice(
                """
                extern "C" __attribute__((visibility("default")))
                void inductor_entry_impl(AtenTensorHandle* input_handles, AtenTensorHandle* output_handles) {
                """
            )

        def _write_input_preamble(self) -> None:
            from torch._inductor.virtualized import V

            count = len(V.graph.graph_inputs) + len(V.graph.constants)
            self.prefix.splice_jit(f"auto inputs = steal_from_raw_handles_to_raii_handles(input_handles, {count});")

        def generate_scoped_gil_acquire(self, *args: Any) -> Any:
            self._calls_python = True
            return super().generate_scoped_gil_acquire(*args)  # type: ignore[no-untyped-call]

        def _generate_end_jit(self, result: Any) -> None:
            from torch._inductor.virtualized import V

            super()._generate_end_jit(result)  # type: ignore[no-untyped-call]
            for position, line in enumerate(result._lines):
                if isinstance(line, str):
                    result._lines[position] = line.replace(*_LOAD_NOW, 1).replace(*_CALL_NOW, 1)
            if getattr(self, "_calls_python", False):  # lanes enter Python through the Python wrapper only
                return
            constants = ", ".join(V.graph.constants)
            result.splice(
                f"""
                call.lane_body = lambda: (load_inductor_entry().__self__.__file__, [{constants}])
                """
            )

    return LaneWrapper


_LaneWrapper = _make_lane_wrapper()


def is_available() -> bool:
    """Whether this torch has what the code generator overrides."""
    return _LaneWrapper is not None


_PRECOMPILED = "torch/csrc/inductor/cpp_wrapper/cpu.h>\n#include <torch/csrc/inductor/cpp_prefix.h"
"""What Inductor puts between `#include <` and `>`: both headers of a body, where it precompiles the first alone."""


_is_for_lanes: contextvars.ContextVar[bool] = contextvars.ContextVar("apollo_is_for_lanes", default=False)
"""Whether what Inductor generates now is for lanes; like Inductor's settings, each thread has its own."""


@contextlib.contextmanager
def lane_wrapper() -> Iterator[None]:
    """Let Inductor generate CPU code through `_LaneWrapper`, and precompile the headers of wrapper and kernels.

    Both are looked up in tables of the process, and another thread may compile meanwhile without asking for our lock:
    a backward of plain Inductor compiles in its first call. So what stands there for as long asks which thread it is.
    """
    from torch._inductor.codecache import CppWrapperCodeCache
    from torch._inductor.codegen.common import device_codegens, init_backend_registration

    init_backend_registration()
    usual = device_codegens["cpu"]
    header: Any = CppWrapperCodeCache.__dict__.get("_get_uncompiled_header")

    class Chosen(usual.cpp_wrapper_codegen):  # type: ignore[name-defined, misc]
        """What others find there, apart from which code generator a graph gets."""

        @staticmethod
        def create(*args: Any, **kwargs: Any) -> Any:
            chosen: Any = _LaneWrapper if _is_for_lanes.get() else usual.cpp_wrapper_codegen
            return chosen.create(*args, **kwargs)

    def choose_header(cls: type, device: str) -> Any:
        return _PRECOMPILED if _is_for_lanes.get() else header.__get__(None, cls)(device)

    ours = replace(usual, cpp_wrapper_codegen=Chosen)
    device_codegens["cpu"] = ours
    if header is not None:
        CppWrapperCodeCache._get_uncompiled_header = classmethod(choose_header)  # type: ignore[method-assign, assignment]
    token = _is_for_lanes.set(True)
    try:
        with inductor_config.patch(cpp_wrapper=True):
            yield
    finally:
        _is_for_lanes.reset(token)
        if device_codegens["cpu"] is ours:  # else somebody registered another code generator meanwhile
            device_codegens["cpu"] = usual
        if header is not None:
            CppWrapperCodeCache._get_uncompiled_header = header  # type: ignore[method-assign]
