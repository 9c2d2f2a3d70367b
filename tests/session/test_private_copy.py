"""A private copy computes what its model computes, and nothing that it does shows in the model."""

from __future__ import annotations

import random
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from apollo_compile.errors import TargetError
from apollo_compile.session.private_copy import PrivateCopy, same_random_states, with_batch

Pair = namedtuple("Pair", ["x", "scale"])


class Counting(nn.Module):
    """Counts its calls in a buffer and in a list; two names are of one layer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.again = self.linear
        self.register_buffer("calls", torch.zeros(()))
        self.log: list[int] = []
        self.state: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what both names of the layer make of `x`."""
        self.calls += 1
        self.log.append(len(x))
        return self.again(self.linear(x))


def test_a_call_changes_the_copy_only() -> None:
    """Buffers, attributes and gradients; parameters share memory, and submodules stay shared."""
    model, x = Counting(), torch.randn(2, 4)
    private = PrivateCopy(model)
    private.run(x).sum().backward()
    assert (model.calls, model.log, model.linear.weight.grad) == (0, [], None)
    copied: Any = private.run
    assert (copied.calls, copied.log) == (1, [2]) and copied.again is copied.linear
    assert copied.linear.weight.data_ptr() == model.linear.weight.data_ptr()
    assert torch.equal(copied(x), model(x))


def test_a_method_takes_its_module_along() -> None:
    """And a function is what it is."""
    model = Counting()
    method: Any = PrivateCopy(model.forward).run
    method(torch.ones(1, 4))
    assert method.__self__ is not model
    assert model.log == []
    assert PrivateCopy(torch.relu).run is torch.relu
    assert PrivateCopy(torch.relu).state() == ()


def test_what_cannot_be_copied_is_named() -> None:
    """With the way out; what is said of inputs: `test_dry_run.py`."""
    model = nn.Linear(2, 2)
    model.rows = (row for row in ())  # type: ignore[assignment, var-annotated]
    with pytest.raises(TargetError, match=r"cannot copy the model, a Linear, .*check attributes besides tensors"):
        PrivateCopy(model)


def test_attributes_that_autograd_made_are_copied_without_their_history() -> None:
    """Torch does not copy results of autograd; the weight of the older `weight_norm` is one."""
    model = Counting()
    model.state = [model.linear.weight * 2]
    copied: Any = PrivateCopy(model).run
    assert copied.state[0].is_leaf and copied.state[0].requires_grad
    assert torch.equal(copied.state[0], model.state[0])


def test_random_numbers_go_on_as_if_nothing_had_been_drawn() -> None:
    """Of Python, NumPy and torch, also after an error."""

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    seed()
    expected = draw()
    seed()
    with pytest.raises(IndexError, match="Dimension out of range"), same_random_states():
        torch.ones(int(draw()[0])).sum(dim=3)
    assert draw() == expected


def test_another_batch_repeats_rows() -> None:
    """Of tensors with the most common first dimension, in whatever they are."""
    x, table = torch.arange(6.0).reshape(3, 2).requires_grad_(), torch.zeros(7, 2)
    (pair, more), named = with_batch(((Pair(x, 2.0), [x, table]), {"mask": torch.ones(3, dtype=torch.bool)}), 5)
    assert isinstance(pair, Pair)
    assert torch.equal(pair.x, x[[0, 1, 2, 0, 1]])
    assert pair.x.requires_grad
    assert (pair.scale, more[1] is table, named["mask"].shape) == (2.0, True, (5,))


@pytest.mark.parametrize(("call", "batch"), [(((torch.tensor(1.0), 3), {}), 2), (((torch.ones(2),), {}), 0)])
def test_a_batch_that_is_none_is_refused(call: Any, batch: int) -> None:
    """Nothing has a first dimension, or it would be empty."""
    with pytest.raises(TargetError, match=f"cannot try batch {batch}: expected a batch of at least 1"):
        with_batch(call, batch)
