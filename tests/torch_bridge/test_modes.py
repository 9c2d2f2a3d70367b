"""Modes of torch that a program would not follow."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu
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
        (save_on_cpu, "hooks are to see each tensor that is saved for the backward"),
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


def test_modes_of_other_threads_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does torch's flag, which stays set for good where threads leave modes in another order than they entered."""
    with ThreadPoolExecutor(1) as other, count():
        assert is_each_operator_seen() and not other.submit(is_each_operator_seen).result()
    monkeypatch.setattr(torch.utils._python_dispatch, "_is_in_non_infra_torch_dispatch_mode", True)
    assert not is_each_operator_seen()
