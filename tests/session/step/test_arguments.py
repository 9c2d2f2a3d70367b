"""Wrong arguments of a step are refused in words, before anything is compiled; `step_cases` has more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from apollo_compile.errors import ConfigError, TargetError
from apollo_compile.session.step.arguments import check_arguments
from tests.end_to_end.twins import Chain, chain_loss

MODEL = Chain()
RIGHT: dict[str, Any] = {
    "model": MODEL,
    "loss_fn": chain_loss,
    "optimizer": torch.optim.SGD(MODEL.parameters()),
    "microbatches": 2,
    "clip_grad_norm": 1.0,
}


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("microbatches", "auto", "'auto'; expected a number of at least 1; it is no longer searched for"),
        ("microbatches", True, "microbatches is True; expected a number of at least 1$"),
        ("clip_grad_norm", -1.0, r"clip_grad_norm is -1\.0; expected a norm above 0"),
        ("clip_grad_norm", "1", "clip_grad_norm is '1'; expected a norm above 0"),
        ("model", torch.compile(MODEL), "is compiled already"),
        ("model", chain_loss, r"of a function: expected a torch\.nn\.Module"),
        ("optimizer", chain_loss, "optimizer is a function; expected an optimizer"),
        ("optimizer", torch.optim.SGD, "optimizer is the class SGD; expected an optimizer"),
        ("optimizer", torch.optim.LBFGS(MODEL.parameters()), r"LBFGS\.step needs closure, which a compiled step does"),
        ("loss_fn", RIGHT["optimizer"], r"loss_fn is a SGD; expected a function, loss_fn\(model"),
    ],
)
def test_a_wrong_argument_is_refused_in_words(name: str, value: object, problem: str) -> None:
    """With what was expected; the others are right."""
    check_arguments(**RIGHT)
    with pytest.raises((ConfigError, TargetError), match=problem):
        check_arguments(**{**RIGHT, name: value})
