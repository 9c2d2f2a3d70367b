"""The graph of a step: what its plan takes of memory, and what stays when no more is there."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from apollo_compile.step import Step
from apollo_compile.tools.report import report
from tests.end_to_end.twins import EAGER, Batch, Chain, chain_loss, compile_step, state_of


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


def test_weights_are_cast_once_for_all_micro_batches() -> None:
    """Under autocast, and the numbers are to the last bit those of a program in which every micro-batch casts them."""

    def autocast_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return chain_loss(model, batch)

    trained = []
    for options in (EAGER, {**EAGER, "partition.weight_casts": "together"}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Chain(width=64)
        step = compile_step(model, autocast_loss, torch.optim.SGD(model.parameters()), microbatches=4, options=options)
        for _ in range(4):
            step({name: torch.randn(16, 64) for name in ("x", "y")})
        (graph,) = report(step).graphs
        casts = [segment.name for segment in graph.segments if ":casts" in segment.name]
        assert all(name.endswith("@0") for name in casts)
        trained.append((len(casts), state_of(model)))
    (count, shared), (none, own) = trained
    assert (count, none) == (3, 0)
    torch.testing.assert_close(shared, own, rtol=0, atol=0)
