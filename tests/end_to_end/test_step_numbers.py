"""Training steps whose loss function reads numbers from tensors, or fails: what is not one graph runs in pieces."""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from apollo_compile.ir import Variant
from apollo_compile.tools.explain_step import explain_step
from tests.end_to_end.twins import EAGER, Batch, Twins, compile_step, layer

SGD = partial(torch.optim.SGD, lr=0.1)


def batch_of(seed: int) -> Batch:
    """Return texts of different lengths, padded to the same one, with a number."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(8, 6, 16, generator=generator),
        "lengths": torch.randint(1, 6, (8,), generator=generator),
        "mask": torch.full((8,), seed % 2, dtype=torch.bool),
        "t": torch.full((8,), 2.0 + seed),
    }


def asks_for_a_number(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a loss that depends on whether anything is masked."""
    loss = model(batch["x"]).square().mean()
    if batch["mask"].sum().item() > 0:  # here
        return loss * 2
    return loss


def cuts_by_a_number(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of as many words as a tensor says."""
    x = model(batch["x"][:, : batch["lengths"][0].item()])
    return (x @ x.mT).square().mean()  # here


def cuts_by_a_list(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of texts of different lengths."""
    first, second = batch["lengths"][:2].tolist()
    texts = [model(batch["x"][:1, :first]), model(batch["x"][1:2, :second])]
    return sum(((text @ text.mT).square().mean() for text in texts), torch.zeros(()))  # here


def divides_by_a_number(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a loss that depends on the reciprocal of a number."""
    scores = model(batch["x"]).mT
    return functional.cross_entropy(scores, scores.argmax(1), label_smoothing=1 / float(batch["t"][0]))  # here


def trims_to_the_longest(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of attention over texts trimmed to the longest of them."""
    x = model(batch["x"][:, : int(batch["lengths"].max())])
    return functional.scaled_dot_product_attention(x, x, x).square().mean()  # here


def loops_as_often_as_a_number_says(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of a model that is applied several times."""
    x = batch["x"]
    for _ in range(batch["lengths"][0].item()):  # here
        x = model(x)
    return x.square().mean()


class Compared(torch.autograd.Function):
    """Passes its input on, with a gradient that Inductor cannot compute for a size that is read from a tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return a copy."""
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Compare every pair."""
        (x,) = ctx.saved_tensors
        return (x @ x.mT).softmax(-1) @ gradient  # here


def fails_backward(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a loss of which Inductor compiles only the forward."""
    loss: torch.Tensor = Compared.apply(model(batch["x"][:, : int(batch["lengths"].max())])).square().mean()  # type: ignore[no-untyped-call]
    return loss


def plain_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of a model."""
    return model(batch["x"]).square().mean()  # type: ignore[no-any-return]


def cumulative_norm() -> nn.Module:
    """Return a model that reads the number of batches that it has seen."""
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(6, momentum=None))


def line_of(function: Callable[..., Any]) -> str:
    """Return a pattern of the place of the marked line of a function or class."""
    lines, first = inspect.getsourcelines(function)
    (number,) = (number for number, line in enumerate(lines, first) if line.endswith("# here\n"))
    return f"{re.escape(__file__)}:{number}: "


FORMS = [
    (asks_for_a_number, layer, line_of(asks_for_a_number)),
    (cuts_by_a_number, layer, line_of(cuts_by_a_number)),
    (cuts_by_a_list, layer, line_of(cuts_by_a_list)),
    (divides_by_a_number, layer, line_of(divides_by_a_number)),
    (trims_to_the_longest, layer, line_of(trims_to_the_longest)),
    (loops_as_often_as_a_number_says, layer, line_of(loops_as_often_as_a_number_says)),
    pytest.param(
        *(fails_backward, layer, line_of(Compared)),
        marks=pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo does
    ),
    (plain_loss, cumulative_norm, r"batchnorm\.py:\d+: "),
]


@pytest.mark.parametrize(("loss_fn", "make", "place"), FORMS, ids=lambda each: getattr(each, "__name__", "at"))
def test_a_loss_function_that_reads_a_number_runs_in_pieces_and_a_line_says_where(
    loss_fn: Callable[..., torch.Tensor], make: Callable[[], nn.Module], place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Losses, parameters and buffers are those of the loop in eager, also where another number comes later."""
    twins = Twins(make, loss_fn, SGD, count=2)
    with caplog.at_level(logging.INFO, logger="apollo_compile"):
        for seed in range(3):
            twins.take(batch_of(seed))
    (line,) = {each.getMessage() for each in caplog.records if "stays a loop" in each.getMessage()}
    assert re.search(f"the loss function is not one graph: .* in .*{place}", line), line
    assert [verdict.partition(":")[0] for verdict in twins.step.verdicts] == [Variant.LOOP]


@pytest.mark.parametrize(("loss_fn", "make", "place"), [FORMS[0], FORMS[-1]])
def test_such_a_step_is_explained_as_a_loop(
    loss_fn: Callable[..., torch.Tensor], make: Callable[[], nn.Module], place: str
) -> None:
    """With the reason and the place, as it will run."""
    (state,) = explain_step(make(), loss_fn, batch_of(0), microbatches=2, options=EAGER).states
    assert re.search(f"{Variant.LOOP}: the loss function is not one graph: .* in .*{place}", state.detail)


def test_a_number_that_a_program_reads_is_that_of_its_batch() -> None:
    """A loss that only computes with the number is one graph, whose program reads it in every step."""

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        return plain_loss(model, batch) * (1 / float(batch["t"][0]))

    twins = Twins(layer, loss_fn, SGD, count=2)
    for seed in range(4):
        twins.take(batch_of(seed))
    assert twins.step.verdicts == [Variant.PLAN]


def test_a_program_stays_where_code_that_is_no_graph_comes_later(caplog: pytest.LogCaptureFixture) -> None:
    """Steps that the new code is part of run in pieces and are not compiled again; batches of the other kind do not."""

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        return asks_for_a_number(model, batch) if batch["x"].shape[1] == 6 and is_asked else plain_loss(model, batch)

    is_asked = False
    twins = Twins(layer, loss_fn, SGD)
    kinds = [batch_of(0), {**batch_of(1), "x": batch_of(1)["x"][:, :3]}]
    with caplog.at_level(logging.INFO, logger="apollo_compile"):
        for number in range(12):
            is_asked = number >= 8
            twins.take(kinds[number % 2])
    assert sum("stays a loop" in each.getMessage() for each in caplog.records) == 1
    assert Variant.PLAN in twins.step.verdicts


class RefusedError(Exception):
    """An error of the user's."""


def test_errors_of_the_loss_function_reach_the_user_after_one_call() -> None:
    """They are those of eager, whatever was evaluated before, and the next batch is one graph."""
    num_calls = 0

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if batch["x"].shape[1] == 5:
            raise RefusedError("five")
        return plain_loss(model, batch)

    torch._dynamo.reset()
    model = layer()
    step = compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), options=EAGER)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RefusedError, match=r"^five$"):
        step({**batch_of(0), "x": batch_of(0)["x"][:, :5]})
    assert num_calls == 1
    with pytest.raises(RuntimeError, match=r"fake tensor|cannot be multiplied"):
        step({**batch_of(0), "x": batch_of(0)["x"][..., :4]})
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    for seed in range(3):
        step(batch_of(seed))
    assert step.verdicts == [Variant.PLAN]
