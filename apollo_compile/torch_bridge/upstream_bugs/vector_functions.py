"""Vector functions of MKL, which are inaccurate where two threads call one for the first time.

    choose_vector_kernels()     once per process, before lanes compute

On a CPU, torch computes functions such as tanh by MKL, in float32 and float64. MKL chooses the kernel of a function in
its first call. A second thread that calls the function meanwhile gets a kernel of half the digits for this one call:
sin was off by 1.5e-4 in 5 of 90 processes on two busy cores. Lanes make such first calls at the same time, so all
functions are called before lanes start.
"""

from __future__ import annotations

import functools

import torch
from torch.utils._python_dispatch import _disable_current_modes

_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp"),
    *("log", "log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc"),
)
"""Functions that torch takes from MKL."""


@functools.cache
def choose_vector_kernels() -> None:
    """Let MKL choose the kernels of all functions that torch calls."""
    with _disable_current_modes():  # a compile with fake tensors may be in progress
        for dtype in (torch.float32, torch.float64):
            value = torch.full((1,), 0.5, dtype=dtype, device="cpu")
            for name in _FUNCTIONS:
                getattr(torch, name)(value)
