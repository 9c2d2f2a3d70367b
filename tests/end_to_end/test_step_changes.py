"""Training steps between which something changes: what is trained, what a batch holds, who holds the step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from apollo_compile.ir import Variant
from tests.end_to_end.twins import EAGER, chain_batch, chain_loss, compile_step


def test_an_error_of_the_loss_function_says_nothing_of_the_next_batch() -> None:
    """As where one batch lacks its labels: the error is the user's, and the next batch is one graph."""
    model = nn.Sequential(nn.Linear(16, 16))
    step = compile_step(model, chain_loss, options=EAGER)
    for seed, names in enumerate(("x", "xy", "xy", "x", "xy")):
        batch = {name: chain_batch(seed)[name] for name in names}
        if names == "x":
            with pytest.raises(KeyError, match="y"):
                step(batch)
        else:
            step(batch)
    assert step.verdicts == [Variant.PLAN]


def thaw(model: nn.Sequential) -> None:
    """Train a layer that was frozen."""
    model[1].requires_grad_(True)


def freeze(model: nn.Sequential) -> None:
    """Train a layer no more."""
    model[0].requires_grad_(False)


def add_layer(model: nn.Sequential) -> None:
    """Put a new layer behind the others."""
    model.append(nn.Linear(16, 16))


@pytest.mark.parametrize("change", [thaw, freeze, add_layer])
def test_what_is_trained_may_change_before_inductor_traces_the_step(change: Callable[[nn.Sequential], None]) -> None:
    """Its gradients are of the parameters that the program has, and only guards of the loss function know of others."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 16))
    step = compile_step(model, chain_loss, options={**EAGER, "plan.autotune": True, "plan.compile_share": 1e6})
    while not (step.tuners and step.tuners[0].is_settled):
        step(chain_batch(0))
    while step.tuners[0].begin_step(0) is not Variant.TRACED:  # if nothing changes
        pass
    change(model)
    model.zero_grad()
    expected = copy.deepcopy(model)
    step(chain_batch(1))
    chain_loss(expected, chain_batch(1)).backward()
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_copies_of_a_step_train_copies_of_the_model() -> None:
    """As where a module that holds its step is copied for an average of its weights, or saved whole."""
    model = nn.Sequential(nn.Linear(16, 16))
    holder = {
        "model": model,
        "step": compile_step(model, chain_loss, torch.optim.SGD(model.parameters()), options=EAGER),
    }
    holder["step"](chain_batch(0))
    for copied in (copy.deepcopy(holder), pickle.loads(pickle.dumps(holder))):
        before = copy.deepcopy(model.state_dict())
        copied["step"](chain_batch(1))
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert not torch.equal(copied["model"][0].weight, model[0].weight)
