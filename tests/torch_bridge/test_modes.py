"""Modes of torch that a program would not follow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from apollo_compile.torch_bridge.modes import is_each_operator_seen, mode_against_programs

count = partial(FlopCounterMode, display=False)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        (nullcontext, None),
        (torch.inference_mode, None),
        (partial(torch.device, "cpu"), None),
        (torch.overrides.TorchFunctionMode, None),
        (partial(torch.compiler.set_stance, "fail_on_recompile"), None),
        (partial(torch.compiler.set_stance, "eager_then_compile"), None),
        (count, "a dispatch mode is to see each operator"),
        (torch.autograd.detect_anomaly, "torch looks for anomalies in each backward function"),
        (partial(torch.compiler.set_stance, "force_eager"), "torch.compiler.set_stance asks for 'force_eager'"),
        (partial(torch.compiler.set_stance, force_backend="eager"), "torch.compiler.set_stance asks for 'eager'"),
    ],
)
def test_what_a_program_would_not_follow_is_named(
    mode: Callable[[], AbstractContextManager[Any]], reason: str | None
) -> None:
    """Inside of a mode, and no longer behind it."""
    with mode():
        assert mode_against_programs() == reason
        assert is_each_operator_seen() is (mode is count)
    assert mode_against_programs() is None
