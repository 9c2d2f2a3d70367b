"""Bodies whose C++ code is compiled together."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.cpp_builder import CppBuilder

from apollo_compile.target.target import CompiledBody
from apollo_compile.torch_bridge import joined_code
from tests.end_to_end.test_native_bodies import compile_each
from tests.failures import raising

Function = Callable[[torch.Tensor], tuple[torch.Tensor]]


@pytest.fixture
def functions() -> Sequence[Function]:
    """Return functions that no cache knows; kernels of the first two have one name."""
    number = random.random()
    return [
        lambda x: (x.sin() + number,),
        lambda x: (x.sin() + (number + 1),),
        lambda x: ((x.cos() + number).sum(-1),),
        lambda x: ((x @ x + number).relu(),),
    ]


@pytest.fixture(params=[1, 2])
def compiled_files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the names of the files that the C++ compiler gets, with one compile thread and with two."""
    files: list[str] = []
    build = CppBuilder.build

    def note(builder: CppBuilder) -> None:
        if builder._name == "joined" or builder._name.endswith(".main"):
            files.append(builder._name)
        build(builder)

    monkeypatch.setattr(CppBuilder, "build", note)
    with inductor_config.patch(compile_threads=request.param):
        yield files


def compile_all(functions: Sequence[Function]) -> Sequence[CompiledBody]:
    """Compile native bodies, and compare what they return with eager."""
    x = torch.randn(8, 8)
    bodies = compile_each(*functions, of=x)
    for body, function in zip(bodies, functions, strict=True):
        torch.testing.assert_close(tuple(body.function([x])), function(x))
    return bodies


def libraries(bodies: Sequence[CompiledBody]) -> list[Path]:
    """Return the libraries of native bodies."""
    return [Path(body.library._name) for body in bodies if body.library is not None]


def test_bodies_share_a_file_of_code_and_have_a_library_each(
    functions: Sequence[Function], compiled_files: list[str]
) -> None:
    """Whatever their kernels are called; a later process finds each by itself."""
    bodies = compile_all(functions)
    paths = libraries(bodies)
    assert len(set(paths)) == len(functions)
    assert "joined" in compiled_files and len(compiled_files) < len(functions)
    assert len({path.stat().st_ino for path in paths}) == len(compiled_files)
    assert len({body.entry_address for body in bodies}) == len(functions)
    for path, body in zip(paths, bodies, strict=True):
        assert ctypes.cast(ctypes.CDLL(str(path))[body.entry_name], ctypes.c_void_p).value == body.entry_address
    compiled_files.clear()
    paths[0].unlink()
    compile_all([functions[0], *functions[2:]])
    assert len(compiled_files) <= 1


@pytest.mark.parametrize("compiled_files", [1], indirect=True)
@pytest.mark.parametrize("problem", ["a macro", "no links", "no compiler for joined files"])
def test_what_cannot_be_joined_is_compiled_all_the_same(
    problem: str, functions: Sequence[Function], compiled_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A macro is known in all namespaces; some file systems have no links; joined code may not compile."""
    refuse = raising(PermissionError("not permitted"))
    match problem:
        case "a macro":
            monkeypatch.setattr(joined_code, "_ALONE", joined_code.re.compile("cos"))
        case "no links":
            monkeypatch.setattr(joined_code.os, "link", refuse)
        case _:
            monkeypatch.setattr(joined_code, "_compile_together", refuse)
    paths = libraries(compile_all(functions))
    assert len({path.stat().st_ino for path in paths}) == (2 if problem == "a macro" else 4)
    assert len(compiled_files) == {"a macro": 2, "no links": 1}.get(problem, 4)


@pytest.mark.usefixtures("compiled_files")
def test_code_that_does_not_compile_fails_alone(functions: Sequence[Function], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are native; that one runs under the GIL, and says what the compiler said."""
    write = joined_code.load_entry

    def break_one(*, main_code: str, **kwargs: Any) -> Callable[[], Any]:
        return write(main_code=main_code.replace(".cos()", ".no_such_function()", 1), **kwargs)

    monkeypatch.setattr(joined_code, "load_entry", break_one)
    bodies = compile_all(functions)
    assert [body.keeps_python is None for body in bodies] == [True, True, False, True]
    assert bodies[2].keeps_python is not None and "C++ compile error" in bodies[2].keeps_python.reason


@pytest.mark.usefixtures("compiled_files")
def test_what_is_not_waited_for_is_left_to_whoever_needs_it() -> None:
    """An error in the midst of generating code keeps nobody waiting for ever."""
    futures: list[Any] = []

    def generate() -> None:
        with joined_code.joined():
            joiner = joined_code._joiner.get()
            futures.extend(joiner.submit(lambda: None) for _ in range(3))
            raise ValueError("an error of the generator")

    with pytest.raises(ValueError, match="generator"):
        generate()
    assert [future.result(timeout=60) for future in futures] == [None] * 3
