"""Tensor handles of AOTInductor's C interface, which compiled bodies take and return.

Lanes are threads without Python: they call bodies with handles, and torch through these addresses.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from apollo_compile.errors import UnsupportedGraphError


@functools.cache
def tensor_api() -> tuple[int, int]:
    """Return the addresses of torch's C functions that clone and delete a tensor handle."""
    return address_of("aoti_torch_new_tensor_handle"), address_of("aoti_torch_delete_tensor_object")


@functools.cache
def error_text_address() -> int:
    """Return the address of torch's C function that gives the text of a thread's last error; 0 in older releases."""
    return address_of("torch_exception_get_what_without_backtrace", default=0)


def address_of(name: str, default: int | None = None) -> int:
    """Return the address of a function of torch's library, or `default` if there is none.

    Raises:
        UnsupportedGraphError: there is none, and no default.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    function = getattr(library, name, None)
    if function is None:
        if default is None:
            raise UnsupportedGraphError(f"torch {torch.__version__} has no function {name}; lanes need torch 2.11 on")
        return default
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def to_handles(tensors: list[torch.Tensor]) -> list[Any]:
    """Return one owned handle per tensor."""
    return torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)


def from_handles(handles: list[Any]) -> list[torch.Tensor]:
    """Return the tensors behind owned handles, and consume the handles."""
    return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(handles)


def prepare_lane_thread(num_threads: int) -> None:
    """Set what a new thread does not inherit: its thread quota for OpenMP and MKL, and no autograd."""
    torch.get_num_threads()  # the first use on a thread sets the process-wide default: let it happen before, not after
    torch.set_num_threads(num_threads)
    torch._C._set_grad_enabled(False)
