"""Cases by batch: what it is made of, how it is split and weighed, who writes to it, and how sizes change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.end_to_end.step_cases import cases
from tests.end_to_end.step_cases.cases import CHANGE, EITHER, RAISES, Training, case, loop, refused
from tests.end_to_end.step_cases.models import SAMPLES, WIDTH, Batch, adamw, chain, mse, off, random, rows, words

train, add, add_texts = (partial(made, by=adamw) for made in (cases.train, cases.add, cases.add_texts))


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


def _split_sample(batch: Sample, count: int) -> Sequence[Sample]:
    return [Sample(x, y) for x, y in zip(batch.x.chunk(count), batch.y.chunk(count), strict=True)]


def _loss_of_sample(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch.x), batch.y)


def _squares(model: nn.Module, batch: Batch) -> torch.Tensor:
    return off(model, batch).square().sum() / 10


def _nested(number: int) -> Any:
    x, y = rows(number).values()
    return ({"deep": [{"x": x}, None]}, [y], "text", 2, 0.5, True)


def _nested_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inner, (y,), text, power, scale, flag = batch
    out = model(inner["deep"][0]["x"])
    return (out - y).abs().pow(power).mean() * scale * len(text) * (1 if flag else 0)


def _masked(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (off(model, batch).square().mean(-1) * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)


def _every_other(number: int) -> dict[str, Any]:
    made = rows(number, 2 * SAMPLES)
    return {"x": made["x"][::2], "y": made["y"].T.contiguous().T[::2]}


def _views(number: int) -> dict[str, Any]:
    both = torch.cat([*rows(number).values()], 1)
    return {"x": both[:, :WIDTH], "y": both[:, WIDTH:], "both": both}


def _made_in_inference_mode(number: int) -> dict[str, Any]:
    with torch.inference_mode():
        return {name: value * 1 for name, value in rows(number).items()}


def _bytes(number: int) -> dict[str, Any]:
    return {**rows(number), "x": torch.randint(256, (SAMPLES, WIDTH), generator=random(number), dtype=torch.uint8)}


def _with_samples(change: Callable[[torch.Tensor], torch.Tensor], number: int) -> dict[str, Any]:
    return {**rows(number), "x": change(rows(number)["x"])}


sample = {"batch": lambda n: Sample(**rows(n)), "loss": _loss_of_sample, **EITHER}
pair = partial(add, loss=lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]))
pair("a tuple", "Of samples and targets.", batch=lambda n: tuple(rows(n).values()), count=3)
pair("a list", "Which is none of samples.", batch=lambda n: list(rows(n).values()))
add("a tuple with names", "Its fields are attributes.", batch=lambda n: Pair(**rows(n)), loss=_loss_of_sample)
add("a batch with everything", batch=_nested, loss=_nested_loss)
add("a dataclass", "Split by the user.", split=_split_sample, **sample)
add("a dataclass split evenly", "Each part has a piece of its tensors.", **sample)
add("a dataclass, whole", "One micro-batch needs no split.", count=1, **sample)
for name, batch, loss in (
    ("a tensor alone", lambda n: rows(n)["y"], lambda m, x: (m(torch.cat([x, x[:, :2]], 1)) - x).square().mean()),
    ("one tensor twice", lambda n: 2 * (rows(n)["x"],), lambda m, b: (m(b[0]) - b[1][:, :4]).square().mean()),
    ("samples in float64", partial(rows, dtype=torch.float64), lambda m, b: (m(b["x"].float()) - b["y"]).norm()),
    ("whole numbers of one byte", _bytes, lambda m, b: (m(b["x"] / 255) - b["y"]).square().mean()),
    ("a mask", lambda n: {**rows(n), "mask": rows(n)["x"][:, 0] > 0}, _masked),
):
    add(name, batch=batch, loss=loss)
views = {"batch": _views, "loss": lambda m, b: mse(m, b) + 0.1 * (m(b["x"]) * b["both"][:, :4]).mean()}
add("tensors that are views of one another", **views)
add("samples that are not dense", "Every other row, and columns first.", batch=_every_other, count=3)
add("expanded samples", batch=partial(_with_samples, lambda x: x[:1].expand(SAMPLES, WIDTH)))
add("conjugates and negatives", batch=partial(_with_samples, lambda x: torch.complex(x, x).conj().imag), **EITHER)
add(
    "sparse samples",
    batch=partial(_with_samples, lambda x: x.relu().to_sparse()),
    loss=lambda m, b: (m(b["x"].to_dense()) - b["y"]).square().mean(),
    count=1,
    **loop("loop"),
)
add("tensors made in inference mode", batch=_made_in_inference_mode, **RAISES)
names = refused("one for every sample")
add("a list with an element for every sample", batch=lambda n: {**rows(n), "names": SAMPLES * ["a"]}, **names)


@case()
def parameters_in_the_batch() -> Training:
    """A prompt that is frozen comes with the batch and belongs to the model."""
    model = chain()
    model.prompt = nn.Parameter(torch.randn(SAMPLES, WIDTH), requires_grad=False)
    return train(
        model,
        lambda m, b: mse(m, {"x": b["x"] + b["prompt"], "y": b["y"]}),
        batch=lambda n: {**rows(n), "prompt": model.prompt},
        count=1,
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

    return train(batch=fill)


@case()
def the_batch_is_always_the_same() -> Training:
    """Object and values."""
    batch = rows(0)
    return train(batch=lambda number: batch, count=1)


def _masks_in_place(model: nn.Module, batch: Batch) -> torch.Tensor:
    batch["x"][:, 0] = 0
    return mse(model, batch)


def _adds_an_entry(model: nn.Module, batch: Any) -> torch.Tensor:
    batch["out"] = len(batch["x"])
    return mse(model, batch)


add("a loss that writes to the batch", loss=_masks_in_place, **loop("writes to something else than the buffers"))
add("a loss that adds to a dictionary", "An entry is new.", loss=_adds_an_entry, count=1, **EITHER)
add(
    "samples that require gradients",
    batch=lambda n: {name: value.requires_grad_(name == "x") for name, value in rows(n).items()},
    count=1,
    **loop("requires gradients|need gradients|loop"),
)


@case(**EITHER)
def samples_that_require_gradients_later() -> Training:
    """The first steps have none of these."""
    leaves: list[torch.Tensor] = []

    def batch(number: int) -> Any:
        made = rows(number)
        leaves[:] = [made["x"].requires_grad_(number >= CHANGE)]
        return made

    return train(batch=batch, count=1, watched=lambda _: [leaf.grad for leaf in leaves])


# ------------------------------------------------------------------------------------------------------------- sizes

for name, says, sizes, count, ends in (
    ("two sizes in turn", "Each has a program.", (8, 12), 2, {}),
    ("a last batch that is small", "Once in a while.", (12, 12, 12, 12, 12, 4), 2, {}),
    ("three sizes, one of them one", "A size of one is special to Dynamo.", (3, 6, 9), 3, {}),
    ("batches of four micro-batches of one", "Each is a single sample.", (4,), 4, {}),
    ("sizes that never come again", "All are loops but the first.", tuple(range(4, 40, 2)), 2, loop()),
):
    add(name, says, batch=lambda n, sizes=sizes: rows(n, sizes[n % len(sizes)]), count=count, **ends)


def _split_unevenly(batch: Batch, count: int) -> Sequence[Batch]:
    return [{name: value[a:b] for name, value in batch.items()} for a, b in itertools.pairwise((0, 2, 2, 7, SAMPLES))]


def _split_all_but_temperature(batch: Batch, count: int) -> Sequence[Batch]:
    parts = zip(batch["x"].chunk(count), batch["y"].chunk(count), strict=True)
    return [{"x": x, "y": y, "temperature": batch["temperature"]} for x, y in parts]


add_texts("texts padded to other lengths", batch=lambda n: words(n, length=3 + n % 7), count=3, **EITHER)
add("a batch without samples", "It cannot be split.", batch=partial(rows, size=0), **refused("sizes"))
add("a micro batch without samples", loss=_squares, batch=partial(rows, size=0), count=1)
add("micro batches of different sizes", loss=_squares, split=_split_unevenly, count=4, **loop())
add("samples that cannot be divided", "Twelve by five.", count=5, **refused("a multiple of 5"))
add("a tensor without dimensions", batch=lambda n: {**rows(n), "temperature": torch.tensor(0.5)}, **refused("sizes"))
add(
    "a tensor without dimensions that is shared",
    batch=lambda n: {**rows(n), "temperature": torch.tensor(0.5 + n)},
    loss=lambda m, b: mse(m, b) / b["temperature"],
    split=_split_all_but_temperature,
    count=3,
)
add(
    "a split along words",
    split=lambda b, count: [{name: value[i::count] for name, value in b.items()} for i in range(count)],
    count=4,
)

# ----------------------------------------------------------------------------------------------------------- weights

add_texts("weights by words", count=3, weigh=lambda part: float((part["words"] != 0).sum()))
add("weights of which some are zero or negative", count=3, weigh=lambda part: float(part["x"][0, 0].sign()) + 0.5)
add("weights without a sum", "Nothing to divide by.", weigh=lambda part: 0.0, **refused("finite sum other than zero"))

# ----------------------------------------------------------------------------------------------- numbers and flags

LIMIT = loop(
    "graphs of the loss function are compiled, Dynamo's limit, one again, since .*; pass a number that changes"
)


def _flagged(model: nn.Module, batch: Any) -> torch.Tensor:
    error = mse(model, batch)
    return error + model(-batch["x"]).square().mean() if batch["is_symmetric"] else error


for kind, number_of in (("number", lambda n: n), ("fraction", lambda n: 1 / (1 + n))):
    add(
        f"a {kind} that grows from step to step",
        batch=lambda n, number_of=number_of: {**rows(n), "number": number_of(n)},
        loss=lambda m, b: mse(m, b) * (1 + b["number"]),
        **LIMIT,
    )
add("a flag that changes", batch=lambda n: {**rows(n), "is_symmetric": n % 6 < 3}, loss=_flagged)
add(
    "a task by name",
    model=lambda: nn.ModuleDict({"body": nn.Linear(WIDTH, 8), "a": nn.Linear(8, 4), "b": nn.Linear(8, 4)}),
    batch=lambda n: {**rows(n), "task": "ab"[n % 6 // 3]},
    loss=lambda m, b: nn.functional.mse_loss(m[b["task"]](m["body"](b["x"]).tanh()), b["y"]),
    **EITHER,
)
