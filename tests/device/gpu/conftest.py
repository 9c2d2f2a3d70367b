"""The stub of libcuda, built once per session."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parents[3] / "runtime"


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the stub that the native tests use too."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler, so no stub of libcuda")
    made = tmp_path_factory.mktemp("stub") / "libstub_cuda.so"
    source = RUNTIME / "tests" / "stub_cuda.cpp"
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{RUNTIME / 'include'}", str(source), "-o", str(made)]
    subprocess.run(command, check=True, timeout=900)
    return made


@pytest.fixture
def stub(stub_library: Path, tmp_path: Path) -> Iterator[ctypes.CDLL]:
    """Return a driver of CUDA 13.0 of its own: the process keeps the device of every library that it ever opened."""
    own = tmp_path / "libstub_cuda.so"
    shutil.copy(stub_library, own)
    library = ctypes.CDLL(str(own))
    library.stub_log.restype = ctypes.c_char_p
    library.stub_sms_of_stream.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    library.stub_reset(13000)
    yield library
    library.stub_reset(13000)
