"""Which device a Dynamo graph is on, and what is said where no lanes of it can take the graph."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from apollo_compile.device.open import reason_without_lanes  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        (["cpu"], None),
        (
            ["cpu", "cuda"],
            "it has tensors on cuda:0, and lanes run on the CPU only, since option 'device.cuda_lanes' is off",
        ),
        (["xpu"], "it has tensors on xpu:0, and lanes run on the CPU only"),
        (["cpu", "mps"], "it has tensors on mps:0, and lanes run on the CPU only"),
        (["cuda", "xpu"], "it has tensors on cuda:0, xpu:0, and lanes run on the CPU only"),
    ],
)
def test_an_option_for_cuda_is_named_on_cuda_only(kinds: list[str], reason: str | None) -> None:
    """It would help nowhere else."""
    with FakeTensorMode():
        tensors = [torch.empty(2, device=kind) for kind in kinds]
    assert reason_without_lanes(tensors, CPU) == reason
