"""The benchmark workloads build, run and repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.workloads import build  # noqa: E402
from benchmarks.workloads.act import Act  # noqa: E402
from benchmarks.workloads.gpu import NAMES, SHAPES, Multimodal, build_gpu_workload  # noqa: E402
from benchmarks.workloads.policies import DiffusionPolicy, Vla  # noqa: E402
from benchmarks.workloads.specs import SPECS  # noqa: E402


@pytest.mark.parametrize("name", SPECS)
def test_a_tiny_workload_trains_one_step(name: str) -> None:
    """Loss and gradients are finite, and every named branch exists."""
    workload = build(name, "tiny")
    loss = workload.loss(workload.model(**workload.inputs))
    loss.backward()
    gradients = [p.grad for p in workload.model.parameters() if p.grad is not None]
    assert loss.ndim == 0 and torch.isfinite(loss)
    assert gradients and all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    modules = [module for module, _ in workload.model.named_modules()]
    assert all(any(module.split(".")[-1] == branch for module in modules) for branch in workload.branches)


@pytest.mark.parametrize("name", ("clip", "clap", "chain"))
def test_equal_arguments_give_equal_workloads(name: str) -> None:
    """Weights, buffers and inputs depend on the seed alone."""
    first, second = build(name, "tiny", seed=3), build(name, "tiny", seed=3)
    for (key, value), other in zip(first.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        assert torch.equal(value, other), key
    torch.testing.assert_close(first.inputs, second.inputs, rtol=0, atol=0)


def test_the_batch_size_can_be_overridden() -> None:
    """Every tensor has the batch size asked for."""
    assert {value.shape[0] for value in build("llava", "tiny", batch=3).inputs.values()} == {3}


@pytest.mark.parametrize("name", NAMES)
def test_models_of_gpu_size_train(name: str) -> None:
    """Tiny ones of the same shape, on a CPU: what is trained gets a gradient; equal arguments give equal numbers."""
    losses = []
    for _ in range(2):
        workload = build_gpu_workload(name, batch=2, scale="tiny", device="cpu")
        loss = workload.model(workload.inputs)
        loss.backward()
        assert all((p.grad is not None) == p.requires_grad for p in workload.model.parameters())
        losses.append(loss.item())
    assert losses[0] == losses[1] and losses[0] > 0


def _policy(make: Callable[..., Any], name: str) -> Any:
    return make(**SPECS[name]["sizes"]["base"]["config"])


@pytest.mark.parametrize(
    ("make", "millions", "off"),
    [
        pytest.param(lambda: _policy(Act, "act"), 52, 1, id="act"),
        pytest.param(lambda: _policy(DiffusionPolicy, "diffusion_policy"), 278, 5, id="diffusion_policy"),
        pytest.param(lambda: _policy(Vla, "vla").vision, 86, 1, id="vla"),
        pytest.param(lambda: Multimodal(SHAPES["clip_b32"]), 124, 3, id="clip_b32"),
        pytest.param(lambda: Multimodal(SHAPES["clip_l14"]), 389, 6, id="clip_l14"),
        pytest.param(lambda: Multimodal(SHAPES["imagebind"]), 278, 6, id="imagebind"),
    ],
)
def test_workloads_have_the_sizes_of_the_published_models(make: Callable[[], Any], millions: int, off: int) -> None:
    """Parameters, without embeddings; of the third policy the vision tower, which is frozen."""
    with torch.device("meta"):
        assert sum(p.numel() for p in make().parameters()) / 1e6 == pytest.approx(millions, abs=off)
