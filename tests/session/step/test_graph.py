"""The graph of a step: what its plan takes of memory, and what stays when no more is there."""

from __future__ import annotations

import re

import pytest
import torch

from apollo_compile.step import Step
from apollo_compile.tools.report import report
from tests.end_to_end.twins import EAGER, Chain, chain_loss, compile_step


def test_memory_is_traded_for_overlap_within_the_quota(caplog: pytest.LogCaptureFixture) -> None:
    """Micro-batches in turn need the least; a quota below that is refused with what would work."""
    wide = {name: torch.randn(64, 64) for name in ("x", "y")}

    def plan(**quota: int) -> Step:
        torch._dynamo.reset()
        model, options = Chain(width=64), {**EAGER, **quota}
        step = compile_step(model, chain_loss, torch.optim.SGD(model.parameters()), microbatches=4, options=options)
        for _ in range(2):
            step(wide)
        return step

    (free,) = report(plan()).graphs
    assert "loop" in plan(**{"plan.memory_quota": 100_000}).verdicts[0]
    least = re.search(r"raise 'plan.memory_quota' to (\d+) bytes", caplog.text)
    tight, half = (
        report(plan(**{"plan.memory_quota": quota})).graphs[0]
        for quota in (int(least[1]), (int(least[1]) + free.peak_bytes) // 2)
    )
    for summary in (tight, half):
        assert summary.peak_bytes <= summary.memory_quota
    assert free.predicted_ns <= half.predicted_ns <= tight.predicted_ns
