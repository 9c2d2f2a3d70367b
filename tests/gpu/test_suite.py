"""Every check of the GPU suite, one by one; `python -m benchmarks.gpu_suite` runs them with a budget."""

from __future__ import annotations

import pytest

from apollo_compile.device.gpu.run.gpu import TorchGpu
from benchmarks.gpu_checks import CHECKS
from benchmarks.harness.gpu_lanes import Check


@pytest.mark.parametrize(("name", "check"), CHECKS.items(), ids=CHECKS)
def test_what_has_to_hold_on_a_gpu_does(name: str, check: Check) -> None:
    """See the check's own words."""
    outcome = check(TorchGpu(0))
    assert outcome.is_met, f"{name}: {outcome.text}"
