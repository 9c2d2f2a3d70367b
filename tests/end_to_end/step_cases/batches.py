"""Cases by batch: what it is made of, how it is split and weighed, who writes to it, and how sizes change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn, optim

from apollo_compile.errors import TargetError
from tests.end_to_end.step_cases.cases import CHANGE, End, Training, add_case, case
from tests.end_to_end.step_cases.models import (
    SAMPLES,
    WIDTH,
    Batch,
    Texts,
    chain,
    mse,
    random,
    rows,
    word_entropy,
    words,
)

adamw = partial(optim.AdamW, lr=0.01, eps=1e-3)

Loss = Callable[[nn.Module, Any], torch.Tensor]


def train(
    batch: Callable[[int], Any],
    loss_fn: Loss = mse,
    *,
    model: nn.Module | None = None,
    microbatches: int = 2,
    **settings: Any,
) -> Training:
    """Return the training of a chain on batches."""
    model = model or chain()
    return Training(
        model=model,
        loss_fn=loss_fn,
        batch=batch,
        optimizer=adamw(model.parameters()),
        microbatches=microbatches,
        **settings,
    )


def pair_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the error for a pair of samples and targets."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


# ------------------------------------------------------------------------------------------------------------- forms


class Pair(NamedTuple):
    """Samples and targets."""

    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Sample:
    """Samples, targets and a name."""

    x: torch.Tensor
    y: torch.Tensor
    name: str = "samples"


def split_sample(batch: Sample, count: int) -> Sequence[Sample]:
    """Cut both tensors."""
    return [Sample(x, y) for x, y in zip(batch.x.chunk(count), batch.y.chunk(count), strict=True)]


def loss_of_sample(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the error of attributes."""
    return nn.functional.mse_loss(model(batch.x), batch.y)


def flat(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples and targets."""
    made = rows(number)
    return made["x"], made["y"]


def nested(number: int) -> Any:
    """Return a batch with dictionaries in a list in a tuple, and what is no tensor."""
    x, y = flat(number)
    return ({"deep": [{"x": x}, None]}, [y], "text", 2, 0.5, True)


def nested_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the error, with what is no tensor."""
    inner, (y,), text, power, scale, flag = batch
    out = model(inner["deep"][0]["x"])
    return (out - y).abs().pow(power).mean() * scale * len(text) * (1 if flag else 0)


add_case("a tuple", "Of samples and targets.", lambda: train(flat, pair_loss, microbatches=3))
add_case("a list", "Which is none of samples.", lambda: train(lambda n: list(flat(n)), pair_loss))
add_case("a tuple with names", "Its fields are attributes.", lambda: train(lambda n: Pair(*flat(n)), loss_of_sample))
add_case(
    "a batch with everything",
    "Nested, and with a text, numbers, a flag and nothing.",
    lambda: train(nested, nested_loss),
)
add_case(
    "a dataclass",
    "Split by the user.",
    lambda: train(lambda n: Sample(*flat(n)), loss_of_sample, split=split_sample),
    end=End.EITHER,
    reason="",
)
add_case(
    "a dataclass, whole",
    "One micro-batch needs no split.",
    lambda: train(lambda n: Sample(*flat(n)), loss_of_sample, microbatches=1),
    end=End.EITHER,
    reason="",
)
add_case(
    "a tensor alone",
    "Samples that are their own targets.",
    lambda: train(lambda n: rows(n)["y"], lambda m, x: (m(torch.cat([x, x[:, :2]], 1)) - x).square().mean()),
)
add_case(
    "one tensor twice",
    "As samples and as targets.",
    lambda: train(lambda n: 2 * (rows(n)["x"],), lambda m, b: (m(b[0]).sum(-1) - b[1].sum(-1)).square().mean()),
)
add_case(
    "samples in float64",
    "Cast by the loss function.",
    lambda: train(partial(rows, dtype=torch.float64), lambda m, b: (m(b["x"].float()) - b["y"]).square().mean()),
)
add_case(
    "whole numbers of one byte",
    "As images are kept.",
    lambda: train(
        lambda n: {
            "x": torch.randint(256, (SAMPLES, WIDTH), generator=random(n), dtype=torch.uint8),
            "y": rows(n)["y"],
        },
        lambda m, b: (m(b["x"] / 255) - b["y"]).square().mean(),
    ),
)
add_case(
    "a mask",
    "Which samples count is a boolean tensor.",
    lambda: train(
        lambda n: {**rows(n), "mask": rows(n)["x"][:, 0] > 0},
        lambda m, b: ((m(b["x"]) - b["y"]).square().mean(-1) * b["mask"]).sum() / b["mask"].sum().clamp(min=1),
    ),
)


def _every_other(number: int) -> dict[str, Any]:
    made = rows(number, 2 * SAMPLES)
    return {"x": made["x"][::2], "y": made["y"].T.contiguous().T[::2]}


add_case(
    "samples that are not dense", "Every other row, and columns first.", lambda: train(_every_other, microbatches=3)
)
add_case(
    "expanded samples",
    "All are one row of memory.",
    lambda: train(lambda n: {"x": rows(n)["x"][:1].expand(SAMPLES, WIDTH), "y": rows(n)["y"]}),
)


def _views(number: int) -> dict[str, Any]:
    both = torch.cat([rows(number)["x"], rows(number)["y"]], 1)
    return {"x": both[:, :WIDTH], "y": both[:, WIDTH:], "both": both}


add_case(
    "tensors that are views of one another",
    "Samples and targets are columns of one tensor.",
    lambda: train(_views, lambda m, b: mse(m, b) + 0.1 * (m(b["x"]) * b["both"][:, :4]).mean()),
)
add_case(
    "conjugates and negatives",
    "Tensors that are only marked so.",
    lambda: train(lambda n: {"x": torch.complex(rows(n)["x"], rows(n)["x"]).conj().imag, "y": rows(n)["y"]}),
    end=End.EITHER,
    reason="",
)
add_case(
    "sparse samples",
    "In coordinates.",
    lambda: train(
        lambda n: {"x": rows(n)["x"].relu().to_sparse(), "y": rows(n)["y"]},
        lambda m, b: (m(b["x"].to_dense()) - b["y"]).square().mean(),
        microbatches=1,
    ),
    end=End.LOOP,
    reason="loop",
)
add_case(
    "tensors made in inference mode",
    "By an encoder that is not trained.",
    lambda: train(_made_in_inference_mode),
    end=End.RAISES,
)


def _made_in_inference_mode(number: int) -> dict[str, Any]:
    with torch.inference_mode():
        return {name: value * 1 for name, value in rows(number).items()}


@case(end=End.REFUSED, errors=TargetError, reason="one for every sample")
def a_list_with_an_element_for_every_sample() -> Training:
    """It would not be split."""
    return train(lambda number: {**rows(number), "names": SAMPLES * ["a"]})


@case()
def parameters_in_the_batch() -> Training:
    """A prompt that is frozen comes with the batch and belongs to the model."""
    model = chain()
    model.prompt = nn.Parameter(torch.randn(SAMPLES, WIDTH), requires_grad=False)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    return train(
        lambda number: {**rows(number), "prompt": model.prompt},
        lambda m, b: nn.functional.mse_loss(m[2](m[1](m[0](b["x"] + b["prompt"]))), b["y"]),
        model=model,
        microbatches=1,
    )


# ----------------------------------------------------------------------------------------------------- who writes


@case()
def one_batch_that_is_filled_for_every_step() -> Training:
    """The same tensors, as of a loader that copies into pinned memory."""
    buffers = rows(0)

    def fill(number: int) -> Any:
        for name, value in rows(number).items():
            buffers[name].copy_(value)
        return buffers

    return train(fill, microbatches=2)


@case()
def the_batch_is_always_the_same() -> Training:
    """Object and values."""
    batch = rows(0)
    return train(lambda number: batch, microbatches=1)


@case(end=End.LOOP, reason="writes to something else than the buffers")
def a_loss_that_writes_to_the_batch() -> Training:
    """It masks samples in place."""

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        batch["x"][:, 0] = 0
        return mse(model, batch)

    return train(rows, loss_fn, microbatches=2)


@case(end=End.EITHER, reason="")
def a_loss_that_adds_to_a_dictionary() -> Training:
    """An entry of the batch is new."""

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        batch["out"] = len(batch["x"])
        return mse(model, batch)

    return train(lambda number: dict(rows(number)), loss_fn, microbatches=1)


@case(end=End.LOOP, reason="requires gradients|need gradients|loop")
def samples_that_require_gradients() -> Training:
    """As for attacks, which read them."""
    return train(
        lambda number: {name: value.requires_grad_(name == "x") for name, value in rows(number).items()}, microbatches=1
    )


@case(end=End.EITHER, reason="")
def samples_that_require_gradients_later() -> Training:
    """The first steps have none of these."""
    leaves: list[torch.Tensor] = []

    def batch(number: int) -> Any:
        made = rows(number)
        leaves[:] = [made["x"].requires_grad_(number >= CHANGE)]
        return made

    return train(batch, microbatches=1, watched=lambda: [leaf.grad for leaf in leaves])


# ------------------------------------------------------------------------------------------------------------- sizes


def _sized(sizes: Sequence[int], number: int) -> Any:
    return rows(number, sizes[number % len(sizes)])


SIZES: dict[str, tuple[str, Sequence[int], int, dict[str, Any]]] = {
    "two sizes in turn": ("Each has a program.", (8, 12), 2, {}),
    "a last batch that is small": ("Once in a while.", (12, 12, 12, 12, 12, 4), 2, {}),
    "three sizes, one of them one": ("A size of one is special to Dynamo.", (3, 6, 9), 3, {}),
    "batches of four micro-batches of one": ("Each is a single sample.", (4,), 4, {}),
    "sizes that never come again": (
        "All are loops but the first.",
        tuple(range(4, 40, 2)),
        2,
        {"end": End.LOOP},
    ),
}
for name, (says, sizes, microbatches, settings) in SIZES.items():
    add_case(
        name,
        says,
        partial(
            lambda sizes, microbatches: train(partial(_sized, sizes), microbatches=microbatches), sizes, microbatches
        ),
        **settings,
    )


@case(end=End.EITHER, reason="")
def texts_padded_to_other_lengths() -> Training:
    """Another one in every step."""
    return train(lambda number: words(number, length=3 + number % 7), word_entropy, model=Texts(), microbatches=3)


@case(end=End.REFUSED, errors=TargetError, reason="sizes")
def a_batch_without_samples() -> Training:
    """It cannot be split."""
    return train(partial(rows, size=0))


@case()
def a_micro_batch_without_samples() -> Training:
    """Its loss is a sum, which is zero."""

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        return (model(batch["x"]) - batch["y"]).square().sum() / 10

    return train(partial(rows, size=0), loss_fn, microbatches=1)


@case(end=End.LOOP, reason="")
def micro_batches_of_different_sizes() -> Training:
    """As the user splits them, one of them empty."""

    def split(batch: Batch, count: int) -> Sequence[Batch]:
        borders = (0, 2, 2, 7, SAMPLES)
        return [{name: value[a:b] for name, value in batch.items()} for a, b in itertools.pairwise(borders)]

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        return (model(batch["x"]) - batch["y"]).square().sum() / 10

    return train(rows, loss_fn, split=split, microbatches=4)


@case(end=End.REFUSED, errors=TargetError, reason="a multiple of 5")
def samples_that_cannot_be_divided() -> Training:
    """Twelve by five."""
    return train(rows, microbatches=5)


@case(end=End.REFUSED, errors=TargetError, reason="sizes")
def a_tensor_without_dimensions() -> Training:
    """It has no samples."""
    return train(lambda number: {**rows(number), "temperature": torch.tensor(0.5)})


@case()
def a_tensor_without_dimensions_that_is_shared() -> Training:
    """The user's split gives it to all micro-batches."""

    def split(batch: Batch, count: int) -> Sequence[Batch]:
        parts = zip(batch["x"].chunk(count), batch["y"].chunk(count), strict=True)
        return [{"x": x, "y": y, "temperature": batch["temperature"]} for x, y in parts]

    return train(
        lambda number: {**rows(number), "temperature": torch.tensor(0.5 + number)},
        lambda m, b: mse(m, b) / b["temperature"],
        split=split,
        microbatches=3,
    )


@case()
def a_split_along_words() -> Training:
    """Strides of samples instead of blocks of them."""
    return train(
        rows,
        split=lambda b, count: [{name: value[i::count] for name, value in b.items()} for i in range(count)],
        microbatches=4,
    )


# ----------------------------------------------------------------------------------------------------------- weights


@case()
def weights_by_words() -> Training:
    """A micro-batch counts as much as it has words."""
    return train(
        words, word_entropy, model=Texts(), microbatches=3, weigh=lambda part: float((part["words"] != 0).sum())
    )


@case()
def weights_of_which_some_are_zero_or_negative() -> Training:
    """Their sum is not."""
    return train(rows, microbatches=3, weigh=lambda part: float(part["x"][0, 0].sign()) + 0.5)


@case(end=End.REFUSED, errors=TargetError, reason="finite sum other than zero")
def weights_without_a_sum() -> Training:
    """Nothing to divide by."""
    return train(rows, weigh=lambda part: 0.0)


# ----------------------------------------------------------------------------------------------- numbers and flags


@case(end=End.LOOP, reason="graphs of the loss function are compiled, Dynamo's limit")
def a_number_that_grows_from_step_to_step() -> Training:
    """Dynamo compiles the second one for all, or a graph for each."""
    return train(
        lambda number: {**rows(number), "epoch": number}, lambda m, b: mse(m, b) * (1 + b["epoch"]), microbatches=2
    )


@case(end=End.LOOP, reason="graphs of the loss function are compiled, Dynamo's limit")
def a_fraction_that_grows_from_step_to_step() -> Training:
    """Such as a temperature, a float of Python's."""
    return train(
        lambda number: {**rows(number), "t": 1 / (1 + number)}, lambda m, b: mse(m, b) * b["t"], microbatches=2
    )


@case()
def a_flag_that_changes() -> Training:
    """It switches a term of the loss on and off, and both have a graph."""

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = mse(model, batch)
        return loss + model(-batch["x"]).square().mean() if batch["is_symmetric"] else loss

    return train(lambda number: {**rows(number), "is_symmetric": number % 6 < 3}, loss_fn, microbatches=2)


@case(end=End.EITHER, reason="")
def a_task_by_name() -> Training:
    """A text says which head is used, and the other one gets no gradients."""
    model = nn.ModuleDict({"body": nn.Linear(WIDTH, 8), "a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        out = model[batch["task"]](model["body"](batch["x"]).tanh())
        return nn.functional.mse_loss(out, batch["y"])

    return train(lambda number: {**rows(number), "task": "ab"[number % 6 // 3]}, loss_fn, model=model, microbatches=2)
