"""The loss is found in whatever a loss function returns, and the rest is combined over micro-batches.

What becomes of outputs in a step is tested in `end_to_end/test_step_outputs.py`.
"""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apollo_compile.errors import TargetError
from apollo_compile.session.step.returned import Outputs, loss_in

LOSS = torch.tensor(2.0)


@pytest.mark.parametrize(
    "returned", [LOSS, (LOSS, torch.ones(3)), [LOSS], {"loss": LOSS, "logits": torch.ones(3)}, {"a": 1, "loss": LOSS}]
)
def test_the_loss_is_found(returned: Any) -> None:
    """Alone, first, or by its name."""
    assert loss_in(returned) is LOSS


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (torch.ones(3), r"a Tensor of shape \[3\] as the loss"),
        (2.0, "returned a float as the loss"),
        ({"logits": LOSS}, "returned a dict as the loss"),
        ((torch.ones(2), LOSS), r"a Tensor of shape \[2\]"),
        (UserDict(loss=LOSS), "returned a UserDict; expected a dict, tuple or list"),
        ({"loss": LOSS, "more": UserDict()}, "returned a UserDict"),
    ],
)
def test_anything_else_is_refused(returned: Any, problem: str) -> None:
    """With its type, and what was expected."""
    with pytest.raises(TargetError, match=problem):
        loss_in(returned)


def test_outputs_are_combined_by_their_kind() -> None:
    """Means of scalars by weight; other tensors are stacked; what differs otherwise is a list."""
    notes = SimpleNamespace(lengths=[3, 5]), SimpleNamespace(lengths=[4])
    parts = [
        {"loss": torch.tensor(1.0), "accuracy": 0.5, "logits": torch.zeros(2), "ids": torch.tensor(1), "name": "a"},
        {"loss": torch.tensor(3.0), "accuracy": 1.0, "logits": torch.ones(2), "ids": torch.tensor(2), "name": "a"},
    ]
    for part, note in zip(parts, notes, strict=True):
        part["note"] = note
    made = Outputs(parts, [0.25, 0.75]).combined
    assert made["loss"] == 0.25 * 1 + 0.75 * 3
    assert made["accuracy"] == 0.25 * 0.5 + 0.75
    assert torch.equal(made["logits"], torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert torch.equal(made["ids"], torch.tensor([1, 2]))  # whole numbers have no mean
    assert made["name"] == "a" and made["note"] == list(notes)


def test_one_micro_batch_returns_what_it_returned_and_none_nothing() -> None:
    """Neither is combined."""
    returned = object()
    assert Outputs([returned], [1.0]).combined is returned and Outputs().combined is None


def test_other_structures_are_refused() -> None:
    """A metric that only some micro-batches have cannot be combined."""
    with pytest.raises(TargetError, match="outputs of 2 structures for 2 micro-batches"):
        _ = Outputs([{"loss": LOSS}, {"loss": LOSS, "more": LOSS}], [0.5, 0.5]).combined
