"""Executors written as text, for the tests of the native runtime."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C import _aoti

from apollo_compile import _native

Tensors = list[torch.Tensor]


def tensor_addresses() -> dict[str, int]:
    """Return the addresses of the functions that copy and drop a handle, as keyword arguments."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))

    def address(name: str) -> int:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value

    return {
        "clone_address": address("aoti_torch_new_tensor_handle"),
        "destroy_address": address("aoti_torch_delete_tensor_object"),
    }


def give(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return handles of the tensors."""
    return _aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))


def take(handles: Sequence[Any]) -> Tensors:
    """Return the tensors of the handles, which are gone afterwards."""
    return _aoti.alloc_tensors_by_stealing_from_void_ptrs(list(handles))


def body(function: Callable[[Tensors], Tensors]) -> Callable[[list[Any]], list[Any]]:
    """Make a body of a function from a list of tensors, which it may empty, to a list of tensors."""

    def run(handles: list[Any]) -> list[Any]:
        return give(function(take(handles)))

    return run


class Runner:
    """An executor that takes and returns tensors; `lanes` has one string of instructions per lane.

    `"wait 0; 2: 1 2! -> 3; record 1; release 0"` launches segment 2 with body 2 in the middle: it is lent buffer 1,
    takes buffer 2 and writes buffer 3. `wrap` makes what the native executor calls of a body.
    """

    def __init__(
        self,
        lanes: _native.Lanes,
        program: Sequence[str],
        bodies: Sequence[Any],
        *,
        outputs: Sequence[int],
        wrap: Callable[[Any], Any] = body,
    ) -> None:
        self.native = _native.Executor(
            lanes,
            instructions=[_encode(line) for line in program],
            num_buffers=8,
            num_events=4,
            inputs=[0],
            outputs=outputs,
            bodies=list(map(wrap, bodies)),
            **tensor_addresses(),
        )

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor | None]:
        outputs = self.native.run(give(inputs))
        made = iter(take([handle for handle in outputs if handle is not None]))
        return [None if handle is None else next(made) for handle in outputs]


def _encode(line: str) -> list[int]:
    code: list[int] = []
    for instruction in filter(None, (part.strip() for part in line.split(";"))):
        word, _, rest = instruction.partition(" ")
        if word.endswith(":"):
            sources, _, targets = rest.partition("->")
            segment = int(word[:-1])
            inputs = [(int(text.rstrip("!")), int(text.endswith("!"))) for text in sources.split()]
            outputs = [int(text) for text in targets.split()]
            code += [_native.LAUNCH, segment, segment, len(inputs), *(number for pair in inputs for number in pair)]
            code += [len(outputs), *outputs]
        else:
            code += [{"record": _native.RECORD, "wait": _native.WAIT, "release": _native.RELEASE}[word], int(rest)]
    return code


JOIN = ["wait 0; wait 1; 2: 1! 2! -> 3", "0: 0 -> 1; record 0", "1: 0 -> 2; record 1"]
"""Segments 0 and 1 read the input on lanes 1 and 2; segment 2 reads both on the caller lane."""


def count_threads(expected: int) -> int:
    """Return the threads of this process; the kernel may list one for a moment after it was joined."""
    deadline = time.monotonic() + 60
    while (count := len(os.listdir("/proc/self/task"))) > expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return count
