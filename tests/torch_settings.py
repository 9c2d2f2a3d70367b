"""Settings of torch that a test changes for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch


@contextmanager
def changed(change: Callable[[Any], Any], inside: Any, outside: Any) -> Iterator[None]:
    """Set something by a function of torch, and set it back, whatever happens."""
    change(inside)
    try:
        yield
    finally:
        change(outside)


def threads(count: int) -> AbstractContextManager[None]:
    """Let torch use so many threads."""
    return changed(torch.set_num_threads, count, torch.get_num_threads())


def bfloat16_matmuls() -> AbstractContextManager[None]:
    """Let oneDNN multiply in bfloat16: a property, which monkeypatch cannot put back."""
    matmul = torch.backends.mkldnn.matmul
    return changed(partial(setattr, matmul, "fp32_precision"), "bf16", matmul.fp32_precision)
