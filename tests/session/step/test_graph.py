"""The graph of a step: what its plan takes of memory, and what stays when no more is there."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from apollo_compile.session.step.split import split_evenly
from apollo_compile.step import Step
from apollo_compile.tools.report import report
from apollo_compile.torch_bridge import aot_graph
from tests.end_to_end.twins import EAGER, Batch, Chain, chain_loss, compile_step, ran_as_program, state_of


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


def test_weights_are_cast_once_and_gradients_while_they_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast, the numbers are to the last bit those of a program in which every micro-batch casts."""
    monkeypatch.setattr(aot_graph, "FEWEST_UNCAST", 64**2)

    def autocast_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return chain_loss(model, batch)

    made, num_casts, trained = [], [], []
    for options in (EAGER, {**EAGER, "partition.casts": "together"}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Chain(width=64)
        step = compile_step(
            model,
            autocast_loss,
            torch.optim.SGD(model.parameters()),
            microbatches=4,
            options=options,
            split=lambda batch, _: split_evenly(batch, len(batch["x"]) // 4),
        )
        for size in (16, 16, 16, 4, 4):  # the last as one micro-batch
            step({name: torch.randn(size, 64) for name in ("x", "y")})
        assert ran_as_program(step)
        segments = report(step).graphs[0].segments
        casts = [segment.name for segment in segments if ":casts" in segment.name]
        assert all(name.endswith("@0") for name in casts)
        num_casts.append(len(casts))
        made.append(sum(segment.memory_bytes for segment in segments if ":backward" in segment.name))
        trained.append((state_of(model), [parameter.grad for parameter in model.parameters()]))
    assert num_casts == [3, 0]
    assert made[0] < made[1]  # bfloat16 instead of float32
    torch.testing.assert_close(*trained, rtol=0, atol=0)
