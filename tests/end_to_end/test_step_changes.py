"""Training steps between which something changes: what is trained, what a batch holds, who holds the step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping

import torch
from torch import nn

from apollo_compile.step import compile_step

EAGER = {"runtime.bodies": "eager", "plan.autotune": False, "plan.replan": False, "plan.min_gain": 0.0}
"""Bodies that take no time to compile, and the program from the second step on."""


def loss_of(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a chain."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def batch_of(seed: int) -> Mapping[str, torch.Tensor]:
    """Return a batch for a chain."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 16, generator=generator) for name in ("x", "y")}


def test_copies_of_a_step_train_copies_of_the_model() -> None:
    """As where a module that holds its step is copied for an average of its weights, or saved whole."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 16))
    holder = {
        "model": model,
        "step": compile_step(model, loss_of, torch.optim.SGD(model.parameters()), options=EAGER),
    }
    holder["step"](batch_of(0))
    for copied in (copy.deepcopy(holder), pickle.loads(pickle.dumps(holder))):
        before = copy.deepcopy(model.state_dict())
        copied["step"](batch_of(1))
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert not torch.equal(copied["model"][0].weight, model[0].weight)
