"""The C++ compiler of Inductor: its names, and whether an error says that it cannot compile on this machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch._inductor.config as inductor_config
from torch._inductor import exc


def compiler_complaint(error: BaseException) -> str | None:
    """Return in one line why C++ code cannot be compiled, if that is the cause of `error`; None if not.

    Causes are that there is no compiler, that it failed, or that its input could not be written, as on a disk that is
    full or read-only.
    """
    seen: BaseException | None = error
    is_cause = True  # a mere `__context__` may have been handled before the error was raised
    while seen is not None:
        match seen:
            case exc.InvalidCxxCompiler():
                return str(seen)
            case exc.CppCompileError():
                lines = [line.strip() for line in seen.output.splitlines() if line.strip()] or ["no output"]
                told = next((line for line in lines if "error" in line.lower()), lines[-1])
                return f"{seen.cmd[0]} failed: {told}"
            case PermissionError(filename=str(name)) if name in compilers():
                return f"{name} is not executable"
            case OSError() if is_cause:
                return f"{type(seen).__name__}: {seen}"
        cause = getattr(seen, "inner_exception", None) or seen.__cause__
        is_cause = is_cause and cause is not None
        seen = cause or seen.__context__
    return None


def compilers() -> Sequence[str]:
    """Return the names under which Inductor looks for a C++ compiler; `CXX` is one of them, if it is set."""
    names = inductor_config.cpp.cxx
    return [name for name in (names if isinstance(names, list | tuple) else [names]) if name]
