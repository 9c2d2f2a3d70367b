"""Fused kernels of optimizers beside the plain update; `test_optimizers.py` tests which of them is chosen."""

from __future__ import annotations

import pytest
import torch

from apollo_compile.torch_bridge.upstream_bugs import fused_updates
from apollo_compile.torch_bridge.upstream_bugs.fused_updates import differs_from_plain
from tests.torch_bridge.upstream_bugs.defects import assert_as_listed
from tests.torch_settings import changed

CPU = torch.device("cpu")


def test_torch_leaves_most_parameters_of_lower_precision_as_they_were() -> None:
    """Of 256 elements, all are in full vectors."""
    parameter = torch.nn.Parameter(torch.zeros(256, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()
    assert_as_listed("fused_updates.py", is_there=bool((parameter == 0).any()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.Adagrad, {}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(value),
)
def test_kernels_of_full_precision_do_what_the_plain_update_does(
    kind: type[torch.optim.Optimizer], settings: dict[str, object], dtype: torch.dtype
) -> None:
    """Those that steps choose."""
    assert not differs_from_plain(kind, settings, dtype, CPU)


def test_another_default_dtype_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain update counts steps in it, the fused one in float32."""
    monkeypatch.setattr(fused_updates, "_differs", fused_updates._differs.__wrapped__)
    with changed(torch.set_default_dtype, torch.float64, torch.float32):
        assert not differs_from_plain(torch.optim.Adam, {}, torch.float64, CPU)


def test_a_kernel_that_computes_something_else_is_found() -> None:
    """Here one that forgets its momentum; the settings of a group tell which kernel it is."""

    class Forgetful(torch.optim.SGD):
        """Forgets the momentum where it is fused."""

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            """Take a step."""
            if self.param_groups[0]["fused"]:
                self.state.clear()
            super().step(closure)

    assert differs_from_plain(Forgetful, {"momentum": 0.9}, torch.float32, CPU)
    assert not differs_from_plain(Forgetful, {"momentum": 0.0}, torch.float32, CPU)
