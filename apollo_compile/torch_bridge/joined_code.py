"""C++ code of native bodies: an entry with a name of its own for each, and several bodies per call of the compiler.

Note [joined bodies]: of the 1.3 s that g++ takes for a small body, 0.9 s go into reading the headers, although they are
precompiled, and into linking. So all code that gets ready while the compiler works is compiled next, in one file with a
namespace per body. Inductor asks for a library per body: the files of these names are links to the one library, so its
caches know every body alone, and a later process may join others. Where joined code does not compile, Inductor compiles
the bodies one by one, and says which one fails.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppWrapperCodeCache
from torch._inductor.cpp_builder import CppBuilder

_logger = logging.getLogger(__name__)

_BINDING, _ENTRY = "inductor_entry_cpp", "inductor_entry_impl"
"""Names in Inductor's code: of what Python calls, and of what lanes call."""

_PRECOMPILED = "torch/csrc/inductor/cpp_wrapper/cpu.h>\n#include <torch/csrc/inductor/cpp_prefix.h"
"""Text that Inductor puts between `#include <` and `>`: both headers of a body, so that both are precompiled."""

_MOST_JOINED = 16
"""Bodies in one file: the compiler's memory grows with it."""

_SHARED_MACROS = r"(?:PY_SSIZE_T_CLEAN\b|(?:un)?likely\()"
"""Macros of Inductor's code for Python, the same in all bodies."""

_ALONE = re.compile(rf"^\s*#\s*define (?!{_SHARED_MACROS})|RAIIAtenRecordFunctionHandle", re.MULTILINE)
"""Code that is compiled alone: macros know no namespaces, and profiles show the names of kernels."""

_KERNEL = re.compile(r'^extern "C"(?! __attribute__)', re.MULTILINE)
"""Linkage of kernels, which have the same names in all bodies; entries have an attribute."""

_Task = Callable[[], None]


def load_entry(*, main_code: str, **kwargs: Any) -> Callable[[], Any]:
    """Compile the C++ code of a body, and return a function that waits for it and returns its entry for Python.

    Its arguments are those of Inductor's `load_pybinding_async`. Code that Inductor generates for lanes calls it.
    """
    digest = hashlib.sha256(main_code.encode()).hexdigest()[:16]

    def named(text: str) -> str:
        return text.replace(_BINDING, f"{_BINDING}_{digest}").replace(_ENTRY, f"{_ENTRY}_{digest}")

    class Code(CppWrapperCodeCache):
        """Inductor's, with other names."""

        entry_function = named(CppWrapperCodeCache.entry_function)
        call_entry_function = named(CppWrapperCodeCache.call_entry_function)
        extra_parse_arg = named(CppWrapperCodeCache.extra_parse_arg)

        @classmethod
        def _get_uncompiled_header(cls, device: str) -> str:
            return _PRECOMPILED

    joiner = _joiner.get()
    submit = joiner.submit if joiner is not None else AsyncCompile.submit if get_compile_threads() > 1 else None
    load: Callable[[], Any] = Code.load_pybinding_async(main_code=named(main_code), submit_fn=submit, **kwargs)
    return load


def lane_entry(function: Any) -> tuple[str, str]:
    """Return the library of an entry for Python, and the name of the entry for lanes in it."""
    return function.__self__.__file__, function.__name__.replace(_BINDING, _ENTRY)


@contextlib.contextmanager
def joined() -> Iterator[Callable[[], None]]:
    """Join the code of bodies that are generated inside; yield what compiles the rest when all are generated."""
    joiner = _Joiner()
    token = _joiner.set(joiner)
    try:
        yield joiner.finish
    finally:
        _joiner.reset(token)
        joiner.give_up()


class _Joiner:
    """Collects code while the compiler works."""

    def __init__(self) -> None:
        self._waiting: list[tuple[_Task, Future[None]]] = []
        self._running: list[Future[None]] = []

    def submit(self, task: _Task) -> Future[None]:
        """Take Inductor's task to compile one body; start the compiler on all that waits if it is idle.

        One core is left for what generates code.
        """
        future: Future[None] = Future()
        self._waiting.append((task, future))
        self._running = [each for each in self._running if not each.done()]
        if len(self._running) < get_compile_threads() - 1:
            self._start(self._take(_MOST_JOINED))
        return future

    def finish(self) -> None:
        """Compile what waits, on all cores."""
        num_files = max(get_compile_threads(), -(-len(self._waiting) // _MOST_JOINED))
        while self._waiting:
            self._start(self._take(-(-len(self._waiting) // num_files)))
            num_files -= 1

    def give_up(self) -> None:
        """Leave what waits to whoever needs it."""
        for _, future in self._take(len(self._waiting)):
            future.set_result(None)

    def _take(self, count: int) -> list[tuple[_Task, Future[None]]]:
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def _start(self, taken: Sequence[tuple[_Task, Future[None]]]) -> None:
        compile_all = functools.partial(_compile_joined, taken)
        if get_compile_threads() > 1:
            self._running.append(AsyncCompile.pool().submit(compile_all))
        else:
            compile_all()


_joiner: contextvars.ContextVar[_Joiner | None] = contextvars.ContextVar("apollo_joiner", default=None)
"""Joiner of the code that this thread generates now."""


def _compile_joined(taken: Sequence[tuple[_Task, Future[None]]]) -> None:
    """Compile tasks, those of the same command together; whoever waits for one finds its library, or compiles it."""
    try:
        by_command: dict[str, list[CppBuilder]] = {}
        for task, _ in taken:
            builder = _builder_of(task)
            if builder is not None:
                command = builder.get_command_line()
                for own in (_source_of(builder), builder.get_target_file_path()):
                    command = command.replace(own, "")
                by_command.setdefault(command, []).append(builder)
        for builders in by_command.values():
            if len(builders) > 1:
                _compile_together(builders)
    except Exception as error:
        _logger.info("%d bodies are compiled one by one: %s: %s", len(taken), type(error).__name__, error)
    for task, future in taken:
        try:
            task()  # does nothing where the library is there
            future.set_result(None)
        except Exception as error:
            future.set_exception(error)


def _builder_of(task: _Task) -> CppBuilder | None:
    """Return what compiles a single file; None where a task is more, or its code has to be alone."""
    builders = task.args[-1] if isinstance(task, functools.partial) and task.args else ()
    builder = builders[0] if isinstance(builders, Sequence) and len(builders) == 1 else None
    if not isinstance(builder, CppBuilder) or Path(builder.get_target_file_path()).exists():
        return None
    return None if _ALONE.search(Path(_source_of(builder)).read_text()) else builder


def _source_of(builder: CppBuilder) -> str:
    return str(Path(builder.get_target_file_path()).with_suffix(".cpp"))


def _compile_together(builders: Sequence[CppBuilder]) -> None:
    """Compile the sources of several libraries into one, and link it to all their names."""
    headers, codes = dict[str, None](), []
    for number, builder in enumerate(builders):
        lines = Path(_source_of(builder)).read_text().splitlines()
        headers.update(dict.fromkeys(line for line in lines if line.startswith("#include")))
        code = "\n".join(line for line in lines if not line.startswith("#include"))
        codes.append(f"namespace body{number} {{\n{_KERNEL.sub('', code)}\n}}")
    folder = Path(builders[0].get_target_file_path()).parent
    with tempfile.TemporaryDirectory(dir=folder) as place:
        source = Path(place, "joined.cpp")
        source.write_text("\n".join([*headers, *codes]) + "\n")
        joined = CppBuilder("joined", str(source), builders[0]._build_option, place)
        joined.build()
        for builder in builders:
            _link(joined.get_target_file_path(), builder.get_target_file_path())


def _link(library: str, name: str) -> None:
    """Give a library one more name, at once; where that exists, another thread or process has compiled the body."""
    try:
        os.link(library, name)
    except FileExistsError:
        pass
    except OSError:  # this file system has no links
        with tempfile.NamedTemporaryFile(dir=Path(name).parent, delete=False) as copied:
            shutil.copy(library, copied.name)  # with its permissions
        os.replace(copied.name, name)
