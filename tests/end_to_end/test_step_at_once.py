"""Micro-batches at once: a rival of programs that take them apart, with a loss for each of them all the same."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.device.cpu import target
from apollo_compile.errors import TargetError
from apollo_compile.ir import Variant
from apollo_compile.step import Step, compile_step

Batch = Mapping[str, torch.Tensor]

OPTIONS = {"runtime.bodies": "eager", "debug.strict": False}
IGNORED = -100
MAX_STEPS = 3000


def make_model(*more: nn.Module) -> nn.Sequential:
    """Return a small model of words."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 32), *more, nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))


def make_batch(seed: int, size: int = 8) -> Batch:
    """Return words and targets, of which a different number counts in every sample."""
    generator = torch.Generator().manual_seed(seed)
    words, targets = (torch.randint(16, (size, 5), generator=generator) for _ in range(2))
    targets[torch.rand(targets.shape, generator=generator) < 0.4] = IGNORED
    targets[:, 0] = 1
    return {"words": words, "targets": targets}


def mean_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean over the words that count."""
    return nn.functional.cross_entropy(
        model(batch["words"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED
    )


def contrastive_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a loss that compares each sample with all others of its micro-batch."""
    features = nn.functional.normalize(model(batch["words"]).mean(1), dim=-1)
    return nn.functional.cross_entropy(features @ features.T, torch.arange(len(features)))


def count_words(batch: Batch) -> float:
    """Return how many words of a micro-batch count."""
    return float((batch["targets"] != IGNORED).sum())


def take_loop(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Batch], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    count: int,
    weigh: Callable[[Batch], float],
) -> torch.Tensor:
    """Take one step as users write it, with gradients clipped to 1."""
    pieces = zip(*(value.chunk(count) for value in batch.values()), strict=True)
    parts = [dict(zip(batch, piece, strict=True)) for piece in pieces]
    weights = [weigh(part) for part in parts]
    optimizer.zero_grad()
    total = torch.zeros(())
    for part, weight in zip(parts, weights, strict=True):
        loss = loss_fn(model, part) * (weight / sum(weights))
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


def is_next(step: Step, variant: Variant) -> bool:
    """Whether the next step is taken so, because it is still compiled or measured by itself."""
    return bool(step.tuners) and step.tuners[0].begin_step(0) is variant


@pytest.mark.parametrize(("loss_fn", "weigh"), [(mean_loss, count_words), (contrastive_loss, lambda _: 1.0)])
def test_every_micro_batch_keeps_a_loss_of_its_own(
    loss_fn: Callable[[nn.Module, Batch], torch.Tensor], weigh: Callable[[Batch], float]
) -> None:
    """Also where micro-batches count differently, or samples are compared with each other, whatever runs the step."""
    torch._dynamo.reset()
    model = make_model()
    expected = copy.deepcopy(model)
    own, others = (torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-3) for each in (model, expected))
    step = compile_step(model, loss_fn, own, microbatches=4, weigh=weigh, clip_grad_norm=1.0, options=OPTIONS)
    number = 0
    while (
        len(step.verdicts) < 2 or number < 10
    ):  # the second is of the step of all at once, and everything runs in turn
        batch = make_batch(number)
        wanted = take_loop(expected, loss_fn, others, batch, 4, weigh)
        torch.testing.assert_close(step(batch), wanted, rtol=1e-4, atol=1e-5)
        number += 1
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-4)
    assert is_next(step, Variant.AT_ONCE)


class Scale(nn.Module):
    """Scales what it is given by the number of its calls, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count the call, and scale."""
        self.calls.add_(1)
        scaled: torch.Tensor = x * (1 + 0.1 * self.calls)
        return scaled


kept: dict[str, torch.Tensor] = {}


def keep_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Keep the loss, for whoever logs it."""
    kept["loss"] = mean_loss(model, batch)
    return kept["loss"]


def loss_under_autocast(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss with matrix multiplications in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mean_loss(model, batch)


class StraightThrough(torch.autograd.Function):
    """Takes the sign, and hands gradients on as they come."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the sign."""
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return what it is given."""
        return grad


class Sign(nn.Module):
    """Takes the sign of what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return it, with a gradient."""
        out: torch.Tensor = StraightThrough.apply(x)
        return out


class FrequentWords(nn.Module):
    """Adds an embedding whose gradients depend on how often a word is in the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32, scale_grad_by_freq=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the embedding of words that are found in x."""
        out: torch.Tensor = x + self.embedding((x[..., 0] > 0).long())
        return out


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Batch], torch.Tensor], str]] = {
    "random numbers": (lambda: nn.Dropout(0.5), mean_loss, "draws random numbers or has effects"),
    "buffers": (Scale, mean_loss, "writes to buffers"),
    "a kept loss": (nn.Identity, keep_loss, "no micro-batches at once to compare with: NotImplementedError: "),
    "autocast": (nn.Identity, loss_under_autocast, "autocast is on"),
    "a backward of the user's": (Sign, mean_loss, "it calls an autograd.Function"),
    "what vmap does otherwise": (
        FrequentWords,
        mean_loss,
        "gradients differ from those of the loop: one of ",
    ),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # of Dynamo, which does so
@pytest.mark.parametrize("case", REFUSED)
def test_what_would_train_otherwise_is_not_run_at_once(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """One line says why, another rival takes the place, and nothing is a warning."""
    make, loss_fn, reason = REFUSED[case]
    torch._dynamo.reset()
    model = make_model(make())
    step = compile_step(model, loss_fn, torch.optim.SGD(model.parameters()), microbatches=2, options=OPTIONS)
    with caplog.at_level(logging.INFO, "apollo_compile"):
        for number in range(MAX_STEPS):
            step(make_batch(number))
            if reason in caplog.text:
                break
    assert step.tuners
    assert reason in caplog.text
    assert not is_next(step, Variant.AT_ONCE)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_modes_of_modules_may_change_while_micro_batches_run_at_once() -> None:
    """Statistics that are trained from then on are those of the loop, and so are gradients."""
    torch._dynamo.reset()
    model = make_model(nn.BatchNorm1d(5).eval())
    expected = copy.deepcopy(model)
    own, others = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, expected))
    step = compile_step(model, mean_loss, own, microbatches=2, clip_grad_norm=1.0, options=OPTIONS)
    number = num_at_once = 0
    while num_at_once < 3:
        num_at_once += is_next(step, Variant.AT_ONCE)
        step(make_batch(number))
        take_loop(expected, mean_loss, others, make_batch(number), 2, lambda _: 1.0)
        number += 1
    for each in (model, expected):
        each[1].train()
    for later in range(4):
        wanted = take_loop(expected, mean_loss, others, make_batch(later), 2, lambda _: 1.0)
        torch.testing.assert_close(step(make_batch(later)), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-4)


def test_all_micro_batches_have_to_fit_into_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever splits a batch may do so for want of memory."""
    torch._dynamo.reset()
    monkeypatch.setattr(target, "free_bytes", lambda: 1000)
    model = make_model()
    step = compile_step(model, mean_loss, torch.optim.SGD(model.parameters()), microbatches=2, options=OPTIONS)
    with caplog.at_level(logging.INFO, "apollo_compile"):
        while not step.tuners:
            step(make_batch(0))
    assert "1000 B are free" in caplog.text
    assert is_next(step, Variant.TRACED)


@pytest.mark.soak
def test_a_later_process_begins_at_once_and_changes_are_seen(tmp_path: Path) -> None:
    """The verdict is kept; then a layer is thawed, the batch has other sizes, and the model is dropped."""
    options = {"device.cache": str(tmp_path)}
    for process in range(2):
        torch._dynamo.reset()
        model = make_model()
        model[0].weight.requires_grad_(False)
        expected = copy.deepcopy(model)
        own, others = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, expected))
        step = compile_step(model, mean_loss, own, microbatches=4, clip_grad_norm=1.0, options=options)
        for number in range(MAX_STEPS):
            take_loop(expected, mean_loss, others, make_batch(number), 4, lambda _: 1.0)
            step(make_batch(number))
            if step.tuners and all(tuner.is_settled for tuner in step.tuners):
                break
        assert step.verdicts[0].startswith(Variant.AT_ONCE), "its lead is large enough for any machine"
        assert ("earlier training loop" in step.verdicts[0]) is (process == 1)
    for each in (model, expected):
        each[0].weight.requires_grad_()
    for number, size in enumerate((8, 8, 16, 16, 8)):
        batch = make_batch(number, size)
        wanted = take_loop(expected, mean_loss, others, batch, 4, lambda _: 1.0)
        torch.testing.assert_close(step(batch), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-4)
    with pytest.raises(TargetError, match="a multiple of 4"):
        step(make_batch(0, 6))
    references = [weakref.ref(model), weakref.ref(step), weakref.ref(own)]
    del model, step, own
    gc.collect()
    assert [reference() for reference in references] == 3 * [None]
