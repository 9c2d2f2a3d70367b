"""The compiled loss function: which batches have a graph of their own, and what is not one graph, or fails."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from apollo_compile.ir import Variant
from tests.end_to_end import twins

SGD = partial(torch.optim.SGD, lr=0.1)


def batch_of(seed: int) -> twins.Batch:
    """Return texts of different lengths, padded to the same one, with a number."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(8, 6, 16, generator=generator),
        "lengths": torch.randint(1, 6, (8,), generator=generator),
        "mask": torch.full((8,), seed % 2, dtype=torch.bool),
        "t": torch.full((8,), 2.0 + seed),
    }


def asks_for_a_number(model: nn.Module, batch: twins.Batch) -> torch.Tensor:
    """Return a loss that depends on whether anything is masked."""
    loss = model(batch["x"]).square().mean()
    if batch["mask"].sum().item() > 0:  # here
        return loss * 2
    return loss


def cuts_by_a_number(model: nn.Module, batch: twins.Batch) -> torch.Tensor:
    """Return the loss of as many words as a tensor says."""
    x = model(batch["x"][:, : batch["lengths"][0].item()])
    return (x @ x.mT).square().mean()  # here


def divides_by_a_number(model: nn.Module, batch: twins.Batch) -> torch.Tensor:
    """Return a loss that depends on the reciprocal of a number."""
    scores = model(batch["x"]).mT
    return functional.cross_entropy(scores, scores.argmax(1), label_smoothing=1 / float(batch["t"][0]))  # here


def trims_to_the_longest(model: nn.Module, batch: twins.Batch) -> torch.Tensor:
    """Return the loss of attention over texts trimmed to the longest of them."""
    x = model(batch["x"][:, : int(batch["lengths"].max())])
    return functional.scaled_dot_product_attention(x, x, x).square().mean()  # here


def loops_as_often_as_a_number_says(model: nn.Module, batch: twins.Batch) -> torch.Tensor:
    """Return the loss of a model that is applied several times."""
    x = batch["x"]
    for _ in range(batch["lengths"][0].item()):  # here
        x = model(x)
    return x.square().mean()


def lists_what_is_long(model: nn.Module, batch: twins.Batch) -> torch.Tensor:
    """Return a loss that depends on a list whose length only its numbers say."""
    return plain_loss(model, batch) * sum(batch["lengths"][batch["lengths"] > 1].tolist())  # here


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


def fails_backward(model: nn.Module, batch: twins.Batch) -> torch.Tensor:
    """Return a loss of which Inductor compiles only the forward."""
    loss: torch.Tensor = Compared.apply(model(batch["x"][:, : int(batch["lengths"].max())])).square().mean()  # type: ignore[no-untyped-call]
    return loss


def plain_loss(model: nn.Module, batch: twins.Batch) -> torch.Tensor:
    """Return the loss of a model."""
    return model(batch["x"]).square().mean()  # type: ignore[no-any-return]


class Hooked(nn.Sequential):
    """Installs a hook in its first forward, under a lock that Dynamo cannot trace, as models of Hugging Face do."""

    has_hook = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a vector per row."""
        if not self.has_hook:
            with threading.Lock():
                self.register_forward_hook(Hooked.double)
                self.has_hook = True
        return super().forward(x)

    @staticmethod
    def double(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        """Return twice the output."""
        return output * 2


def laid_out(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return a tensor like `x`, with other strides for fewer than three rows."""
    return torch.empty_like(x) if num_rows > 2 else x.new_empty(x.shape[::-1]).permute(2, 1, 0)


@torch.library.custom_op("apollo_test::times_rows", mutates_args=())
def times_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return `x` times a number of rows."""
    return laid_out(x, len(rows)).copy_(x * len(rows))


@times_rows.register_fake
def _(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Assume many rows where their number is not known, as a wrong kernel does."""
    count = rows.shape[0]
    return laid_out(x, count if type(count) is int else 8)


times_rows.register_autograd(
    lambda ctx, grad: (grad * ctx.num_rows, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "num_rows", inputs[1].shape[0]),
)


def counts_rows(model: nn.Module, batch: twins.Batch) -> torch.Tensor:
    """Return a loss whose graph does not say how many rows there are."""
    scaled: torch.Tensor = times_rows(model(batch["x"]), batch["x"][batch["lengths"] > 2].detach())
    return scaled.square().mean()


def cumulative_norm() -> nn.Module:
    """Return a model that reads the number of batches that it has seen."""
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(6, momentum=None))


def line_of(function: Callable[..., Any]) -> str:
    """Return a pattern of the place of the marked line of a function or class."""
    lines, first = inspect.getsourcelines(function)
    (number,) = (number for number, line in enumerate(lines, first) if line.endswith("# here\n"))
    return f"{re.escape(__file__)}:{number}: "


FORMS = [
    *((each, twins.layer, line_of(each)) for each in (asks_for_a_number, cuts_by_a_number, divides_by_a_number)),
    *((each, twins.layer, line_of(each)) for each in (trims_to_the_longest, lists_what_is_long)),
    (loops_as_often_as_a_number_says, twins.layer, line_of(loops_as_often_as_a_number_says)),
    pytest.param(
        *(fails_backward, twins.layer, line_of(Compared)),
        marks=pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo does
    ),
    (plain_loss, cumulative_norm, r"batchnorm\.py:\d+: "),
]


@pytest.mark.parametrize(("loss_fn", "make", "place"), FORMS, ids=lambda each: getattr(each, "__name__", "at"))
def test_a_loss_function_that_reads_a_number_runs_in_pieces_and_a_line_says_where(
    loss_fn: Callable[..., torch.Tensor], make: Callable[[], nn.Module], place: str, info_log: pytest.LogCaptureFixture
) -> None:
    """Losses, parameters and buffers are those of the loop in eager, also where another number comes later."""
    pair = twins.Twins(make, loss_fn, SGD, count=2)
    for seed in range(3):
        pair.take(batch_of(seed))
    (line,) = {each.getMessage() for each in info_log.records if "stays a loop" in each.getMessage()}
    assert re.search(f"the loss function is not one graph: .* in .*{place}", line), line
    assert [verdict.partition(":")[0] for verdict in pair.step.verdicts] == [Variant.LOOP]


def test_a_model_that_installs_hooks_in_its_first_forward_has_a_program() -> None:
    """Eager computes the loss for the first micro-batch."""
    pair = twins.Twins(lambda: Hooked(nn.Linear(16, 16)), plain_loss, SGD, count=2)
    for seed in range(3):
        pair.take(batch_of(seed))
    assert pair.step.verdicts == [Variant.PLAN]


@pytest.mark.parametrize("first", [5, 1])
def test_where_a_check_in_compiled_code_fails_the_step_trains_in_pieces(first: int) -> None:
    """The check fails for one micro-batch, or for both."""
    pair = twins.Twins(twins.layer, counts_rows, SGD, count=2)
    for seed in range(3):
        pair.take({**batch_of(seed), "lengths": torch.tensor([*4 * [first], *4 * [1]])})
    (verdict,) = pair.step.verdicts
    assert re.search("not one graph: AssertionError: expected size 4==4, stride", verdict), verdict


def test_a_program_stays_where_code_that_is_no_graph_comes_later(info_log: pytest.LogCaptureFixture) -> None:
    """Steps that the new code is part of run in pieces and are not compiled again; batches of the other kind do not."""

    def loss_fn(model: nn.Module, batch: twins.Batch) -> torch.Tensor:
        return asks_for_a_number(model, batch) if batch["x"].shape[1] == 6 and is_asked else plain_loss(model, batch)

    is_asked = False
    pair = twins.Twins(twins.layer, loss_fn, SGD)
    kinds = [batch_of(0), {**batch_of(1), "x": batch_of(1)["x"][:, :3]}]
    for number in range(12):
        is_asked = number >= 8
        pair.take(kinds[number % 2])
    assert sum("stays a loop" in each.getMessage() for each in info_log.records) == 1
    assert Variant.PLAN in pair.step.verdicts


class RefusedError(Exception):
    """An error of the user's."""


def test_errors_of_the_loss_function_reach_the_user_after_one_call() -> None:
    """They are those of eager, whatever was evaluated before, and the next batch is one graph."""
    num_calls = 0

    def loss_fn(model: nn.Module, batch: twins.Batch) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if batch["x"].shape[1] == 5:
            raise RefusedError("five")
        return plain_loss(model, batch)

    model, batch = twins.layer(), batch_of(0)
    step = twins.compile_step(model, loss_fn, SGD(model.parameters()), options=twins.EAGER)
    before = twins.state_of(model)
    with pytest.raises(RefusedError, match=r"^five$"):
        step({**batch, "x": batch["x"][:, :5]})
    assert num_calls == 1
    with pytest.raises(RuntimeError, match=r"fake tensor|cannot be multiplied"):
        step({**batch, "x": batch["x"][..., :4]})
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    for seed in range(3):
        step(batch_of(seed))
    assert step.verdicts == [Variant.PLAN]


def test_frequent_kinds_of_batches_get_programs_until_dynamo_compiles_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """The limit is said once, with what changed; further sizes run as rare ones do."""
    pair = twins.Twins(twins.layer)
    for seed, size in enumerate([size for size in range(4, 16) for _ in range(4)]):
        pair.take(twins.chain_batch(seed, size))
    limit = torch._dynamo.config.recompile_limit
    assert len(pair.step.tuners) == limit
    (reason,) = pair.step.reasons_for_loops
    assert re.fullmatch(f"{limit} graphs .* Dynamo's limit, one again, since size 0 of .* changed from 9 to 10", reason)
    assert sum("hit config" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("count", [1, 2])
def test_batches_whose_size_changes_in_every_step_are_compiled_for_all_sizes(count: int) -> None:
    """As lengths of texts do; once a size has come three times, it has a program."""
    pair = twins.Twins(twins.layer, count=count)
    counters.clear()
    for seed, size in enumerate([*range(8, 30, 2), 12, 12, 12]):
        pair.take(twins.chain_batch(seed, size))
        most = 3 if seed < 12 else 4  # the first size, one for others, all sizes; and a frequent one
        assert counters["stats"]["unique_graphs"] <= most
    assert len(pair.step.tuners) == 2 and counters["stats"]["unique_graphs"] == 4


def test_parts_of_different_sizes_are_compiled_for_all_sizes() -> None:
    """As where a batch is split by length."""

    def split(batch: twins.Batch, count: int) -> list[twins.Batch]:
        rows = len(batch["x"]) // 2 - 1
        return [{name: each[part] for name, each in batch.items()} for part in (slice(rows), slice(rows, None))]

    pair = twins.Twins(twins.layer, count=2, split=split)
    counters.clear()
    for seed, size in enumerate(range(10, 40, 2)):
        pair.take(twins.chain_batch(seed, size))
    assert counters["stats"]["unique_graphs"] <= 6


def test_every_step_of_a_process_may_be_a_program() -> None:
    """Dynamo's limit of compiles is for each of them, as in a sweep over settings."""
    steps = [twins.compile_step(twins.layer(), twins.chain_loss, options=twins.EAGER) for _ in range(10)]
    for step in steps:
        for seed in range(2):
            step(twins.chain_batch(seed, 4))
    assert all(twins.ran_as_program(step) for step in steps)
