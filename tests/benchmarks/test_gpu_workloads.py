"""Models of GPU size, tiny ones of the same shape trained on a CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.workloads.gpu import SHAPES, build_gpu_workload


@pytest.mark.parametrize("name", SHAPES)
def test_workloads_train(name: str) -> None:
    """Every parameter gets a gradient; equal arguments give equal numbers."""
    losses = []
    for _ in range(2):
        workload = build_gpu_workload(name, batch=2, scale="tiny", device="cpu")
        loss = workload.model(workload.inputs)
        loss.backward()
        assert all(parameter.grad is not None for parameter in workload.model.parameters())
        losses.append(loss.item())
    assert losses[0] == losses[1] and losses[0] > 0


def test_full_workloads_have_the_numbers_of_the_published_models() -> None:
    """Parameters in millions; embeddings are not among them."""
    with torch.device("meta"):
        from benchmarks.workloads.gpu import Multimodal

        millions = {
            name: sum(p.numel() for p in Multimodal(shape).parameters()) / 1e6 for name, shape in SHAPES.items()
        }
    assert millions["clip_b32"] == pytest.approx(124, abs=3)
    assert millions["clip_l14"] == pytest.approx(389, abs=6)
    assert millions["imagebind"] == pytest.approx(278, abs=6)
