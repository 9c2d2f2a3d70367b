"""Modes that a user puts torch in for a while, and that a program of a whole step would not follow."""

from __future__ import annotations

import torch
from torch._dynamo import eval_frame
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from apollo_compile.torch_bridge.private_attributes import has_saved_tensor_hooks

_RUNS_EAGER = ("force_eager", "eager_on_recompile")
"""Stances with which `torch.compile` calls functions as they are."""


def is_each_operator_seen() -> bool:
    """Return whether a dispatch mode, such as `FlopCounterMode`, sees each operator that this thread runs.

    Dynamo compiles nothing then, and a function that it has skipped for that it skips for good. Torch's own flag is for
    all threads, and stays set where two of them leave their modes in another order than they entered them.
    """
    return any(not mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack())


def mode_against_programs() -> str | None:
    """Return which mode a program would not follow, in words; None if there is none."""
    if is_each_operator_seen():
        return "a dispatch mode is to see each operator"
    if torch.is_anomaly_enabled():
        return "torch looks for anomalies in each backward function"
    if has_saved_tensor_hooks():
        return "hooks are to see each tensor that is saved for the backward"
    stance = eval_frame._stance
    if stance.stance in _RUNS_EAGER or stance.backend is not None:
        return f"torch.compiler.set_stance asks for {(stance.backend or stance.stance)!r}"
    return None
