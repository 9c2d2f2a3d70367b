"""Attention inside of a checkpoint on a CPU, without a state of random numbers.

A checkpoint that computes attention again saves the state of random numbers before, as a node that segments cannot run.
The kernel for a CPU has no dropout, so it needs none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._functorch import partitioners


@contextlib.contextmanager
def stateless_attention() -> Iterator[None]:
    """Save no state of random numbers for attention on a CPU, in a `with`."""
    save_states: Any = getattr(partitioners, "functionalize_rng_ops", None)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def save_others(joint_module: fx.GraphModule, *args: Any) -> Any:
        for node in joint_module.graph.find_nodes(op="call_function", target=attention):
            node.meta.pop("recompute", None)  # what is computed again is decided by now
        return save_states(joint_module, *args)

    with patch.object(partitioners, "functionalize_rng_ops", save_others, create=save_states is None):
        yield
