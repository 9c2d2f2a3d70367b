"""Cases by what changes between steps: what is trained, modes, weights, errors, and the state of torch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.nn.utils import prune

from tests.end_to_end.step_cases.cases import CHANGE, End, Training, add_case, case
from tests.end_to_end.step_cases.models import CLASSES, WIDTH, Batch, Towers, chain, mse, rows

sgd = partial(optim.SGD, lr=0.1, momentum=0.9)
adamw = partial(optim.AdamW, lr=0.01, eps=1e-3)


def at(when: int, change: Callable[[], object]) -> Callable[[int], None]:
    """Return what changes something before one step."""

    def before(number: int) -> None:
        if number == when:
            change()

    return before


def train(model: nn.Module, change: Callable[[], object], microbatches: int = 2, **settings: Any) -> Training:
    """Return the training of a model that something happens to in the middle."""
    return Training(
        model=model, optimizer=sgd(model.parameters()), before=at(CHANGE, change), microbatches=microbatches, **settings
    )


# ---------------------------------------------------------------------------------------------------- what is trained


@case()
def a_layer_is_frozen() -> Training:
    """Its gradient goes with it."""
    model = chain()
    return train(model, lambda: model[0].requires_grad_(False).zero_grad())


@case()
def a_layer_is_frozen_and_clipped() -> Training:
    """Its last gradient is left there, and counts, until the optimizer clears it."""
    model = chain()
    return train(model, lambda: model[0].requires_grad_(False), clip_grad_norm=0.1)


@case()
def a_layer_is_thawed() -> Training:
    """And gets gradients for the first time."""
    model = chain()
    model[0].requires_grad_(False)
    return train(model, lambda: model[0].requires_grad_(True), microbatches=3)


@case()
def layers_are_trained_by_turns() -> Training:
    """As generator and critic are."""
    model = Towers()

    def swap(number: int) -> None:
        model.left.requires_grad_(number % 6 < 3)
        model.right.requires_grad_(number % 6 >= 3)

    return Training(model=model, optimizer=adamw(model.parameters()), before=swap, microbatches=2)


@case()
def a_parameter_is_another_one() -> Training:
    """Which the optimizer does not know; the old one stays with it."""
    model = chain()
    return train(model, lambda: setattr(model[2], "bias", nn.Parameter(torch.ones(CLASSES))))


@case()
def the_data_of_a_parameter_is_replaced() -> Training:
    """It is the same parameter in other memory."""
    model = chain()
    return train(model, lambda: setattr(model[0].weight, "data", 0.5 * model[0].weight.data))


@case()
def the_data_of_a_parameter_has_another_layout() -> Training:
    """It is transposed from then on."""
    model = chain()
    return train(model, lambda: setattr(model[0].weight, "data", model[0].weight.data.T.contiguous().T))


@case()
def a_layer_comes_in_between() -> Training:
    """The optimizer gets its parameters."""
    model = chain()
    optimizer = adamw(model.parameters())

    def insert() -> None:
        model.insert(1, nn.Linear(8, 8))
        optimizer.add_param_group({"params": list(model[1].parameters())})

    return Training(model=model, optimizer=optimizer, before=at(CHANGE, insert), microbatches=2)


@case()
def a_layer_goes() -> Training:
    """Its parameters stay with the optimizer, without gradients."""
    model = chain(nn.Linear(8, 8), nn.Tanh())

    def remove() -> None:
        model.zero_grad()
        del model[1]

    return train(model, remove)


@case()
def a_layer_is_swapped_for_another() -> Training:
    """Of the same kind."""
    model = chain()

    def swap() -> None:
        model[0] = nn.Linear(WIDTH, 8)

    return train(model, swap, microbatches=1)


@case()
def weights_are_loaded() -> Training:
    """From a checkpoint, in place."""
    model = chain(nn.BatchNorm1d(8), nn.Tanh())
    state = copy.deepcopy(model.state_dict())
    return train(model, lambda: model.load_state_dict(state))


@case()
def weights_are_loaded_by_assignment() -> Training:
    """Parameters are other objects then, which the optimizer does not have."""
    model = chain()
    state = copy.deepcopy(model.state_dict())
    return train(model, lambda: model.load_state_dict(state, assign=True))


@case()
def everything_is_saved_and_loaded() -> Training:
    """Model and optimizer, through a file."""
    model = chain()
    optimizer = adamw(model.parameters())

    def reload() -> None:
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        for _ in range(2):
            file.seek(0)
            state = torch.load(file)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

    return Training(model=model, optimizer=optimizer, before=at(CHANGE, reload), microbatches=2)


@case()
def the_model_is_copied() -> Training:
    """By `deepcopy` and by pickle; copies are changed, the model is not."""
    model = chain()

    def copy_model() -> None:
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for parameter in made.parameters():
                parameter.data.zero_()

    return train(model, copy_model)


@case()
def weights_are_written_to() -> Training:
    """By the user, before every step: noise, and a clamp."""
    model = chain()

    @torch.no_grad()
    def disturb(number: int) -> None:
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter)).clamp_(-0.5, 0.5)

    return Training(model=model, optimizer=adamw(model.parameters()), before=disturb, microbatches=2)


@case(end=End.EITHER, reason="outputs of the loss function need gradients")
def weights_are_pruned() -> Training:
    """By a mask, which makes them of other parameters."""
    model = chain()

    def prune_some() -> None:
        prune.l1_unstructured(model[0], "weight", amount=0.5)

    return train(model, prune_some)


@case(end=End.EITHER, reason="")
def the_model_changes_its_dtype() -> Training:
    """To float64, with its batches."""
    model = chain()

    def batch(number: int) -> dict[str, Any]:
        return rows(number, dtype=torch.float64 if number >= CHANGE else torch.float32)

    return Training(
        model=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        before=at(CHANGE, model.double),
        batch=batch,
        microbatches=2,
    )


# -------------------------------------------------------------------------------------------------------------- modes


def _switching(modules: Callable[[nn.Sequential], nn.Module]) -> Training:
    model = chain(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())

    def switch(number: int) -> None:
        modules(model).train(number % 6 < 3)

    return Training(model=model, optimizer=sgd(model.parameters()), before=switch, microbatches=2)


add_case(
    "the model is switched to evaluation",
    "And back; a step of evaluation is a loop or a program of its own.",
    partial(_switching, lambda model: model),
    end=End.EITHER,
    reason="",
)
add_case(
    "a part of the model is switched to evaluation",
    "And back.",
    partial(_switching, lambda model: model[1]),
    end=End.EITHER,
    reason="",
)


@case(end=End.EITHER, reason="")
def settings_of_modules_change() -> Training:
    """A probability and a momentum, which are numbers of Python."""
    model = chain(nn.BatchNorm1d(8), nn.Dropout(0.5))

    def change() -> None:
        model[1].momentum, model[2].p = 0.5, 0.25

    return train(model, change)


# ------------------------------------------------------------------------------------------------------------- errors


def _failing(
    when: set[int], microbatches: int, loss_fn: Callable[[nn.Module, Any], torch.Tensor], **settings: Any
) -> Training:
    model = Towers()
    return Training(
        model=model,
        loss_fn=loss_fn,
        optimizer=adamw(model.parameters()),
        batch=lambda number: {**rows(number), "fails": torch.full((12,), number in when)},
        microbatches=microbatches,
        **settings,
    )


FAILS = {3, 4, 5, 6, 9, 10, 12}
"""Steps that fail, of every variant one."""


def fails_with_an_index(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Look words up that are not there, in some steps."""
    table = torch.zeros(3, CLASSES)
    found = nn.functional.embedding(batch["fails"].long() * 7, table)
    return mse(model, {"x": batch["x"], "y": batch["y"] + found})


class FailsBackward(torch.autograd.Function):
    """The identity, whose backward looks something up that may not be there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return what is given."""
        ctx.save_for_backward(places)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient, times ones that are looked up."""
        return gradient * nn.functional.embedding(ctx.saved_tensors[0], torch.ones(3, CLASSES)), None


def fails_backward(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Fail in the first operators of the backward."""
    out = FailsBackward.apply(model(batch["x"]), batch["fails"].long() * 7)
    return nn.functional.mse_loss(out, batch["y"])


def fails_late_in_backward(model: Any, batch: Batch) -> torch.Tensor:
    """Fail in the backward of one tower, when gradients of the head are final."""
    places = batch["fails"].long()[:, None].expand(-1, WIDTH) * 7
    x = FailsBackwardWide.apply(batch["x"] @ model.left[0].weight[:WIDTH, :WIDTH], places)
    return nn.functional.mse_loss(model(x), batch["y"])


class FailsBackwardWide(FailsBackward):
    """The same for samples."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient, times ones that are looked up."""
        return gradient * nn.functional.embedding(ctx.saved_tensors[0], torch.ones(3, 1))[..., 0], None


def fails_in_python(model: nn.Module, batch: Any) -> torch.Tensor:
    """Raise an error of the user's, by the size of the batch."""
    if len(batch["x"]) == 3:
        raise ValueError("three samples")
    return mse(model, batch)


add_case(
    "an error in the forward",
    "An index is out of range in some steps, which leave weights as they were.",
    partial(_failing, FAILS, 2, fails_with_an_index),
    fails=True,
)
add_case(
    "an error in the backward, clipped",
    "The optimizer waits for all gradients.",
    partial(_failing, FAILS, 2, fails_backward, clip_grad_norm=1.0),
    fails=True,
)
add_case(
    "an error in the backward",
    "At its beginning, so no gradient was final.",
    partial(_failing, FAILS, 1, fails_backward),
    fails=True,
)
add_case(
    "an error late in the backward",
    "Nothing was updated before, since gradients are clipped together.",
    partial(_failing, FAILS, 1, fails_late_in_backward, clip_grad_norm=1.0),
    fails=True,
)


@case(end=End.EITHER, fails=True)
def an_error_of_the_users() -> Training:
    """For batches of one size, in Python, so it is no graph."""
    model = chain()
    return Training(
        model=model,
        loss_fn=fails_in_python,
        optimizer=adamw(model.parameters()),
        batch=lambda number: rows(number, 3 if number in (0, 5, 9) else 12),
    )


@case(fails=True)
def an_error_in_the_second_micro_batch() -> Training:
    """The first one is fine."""
    model = chain()

    def batch(number: int) -> dict[str, Any]:
        fails = torch.arange(12) >= 6
        return {**rows(number), "fails": fails & (number in FAILS)}

    return Training(
        model=model, loss_fn=fails_with_an_index, optimizer=adamw(model.parameters()), batch=batch, microbatches=2
    )


@case(fails=True)
def an_error_of_the_optimizer() -> Training:
    """A setting is wrong for some steps, which fails before anything is updated."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def break_settings(number: int) -> None:
        optimizer.param_groups[0]["lr"] = "0.1" if number in FAILS else 0.1

    return Training(model=model, optimizer=optimizer, before=break_settings, microbatches=2, clip_grad_norm=1.0)


@case(fails=True)
def a_key_is_missing_at_times() -> Training:
    """The batch has no targets."""
    model = chain()
    return Training(
        model=model,
        optimizer=adamw(model.parameters()),
        batch=lambda number: {
            name: value for name, value in rows(number).items() if name == "x" or number not in (4, 9)
        },
        microbatches=2,
    )


# ------------------------------------------------------------------------------------------------- the state of torch


def _around(around: Callable[[], Any], **settings: Any) -> Training:
    model = Towers()
    return Training(model=model, optimizer=adamw(model.parameters()), around=around, microbatches=2, **settings)


class Deterministic:
    """Inside of it, algorithms are deterministic."""

    def __enter__(self) -> None:
        """Begin."""
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: Any) -> None:
        """End."""
        torch.use_deterministic_algorithms(False)


AROUND: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
    "autocast around the step": (
        "Matrix multiplications in bfloat16.",
        partial(torch.autocast, "cpu", dtype=torch.bfloat16),
        {"rtol": 2e-2, "atol": 2e-3, "end": End.EITHER, "reason": ""},
    ),
    "gradients are off around the step": (
        "Backward raises, in eager too.",
        torch.no_grad,
        {"end": End.RAISES},
    ),
    "inference mode around the step": (
        "Backward raises, in eager too.",
        torch.inference_mode,
        {"end": End.RAISES},
    ),
    "gradients are on around the step": ("As they are.", torch.enable_grad, {}),
    "deterministic algorithms": ("Programs run, and nothing is compared.", Deterministic, {"rtol": 1e-6, "atol": 1e-7}),
    "anomalies are looked for": (
        "In the backward.",
        partial(torch.autograd.set_detect_anomaly, True),
        {"end": End.EITHER, "reason": ""},
    ),
    "another device by default": ("The same one, in fact.", lambda: torch.device("cpu"), {}),
}
for name, (says, around, settings) in AROUND.items():
    add_case(name, says, partial(_around, around), **settings)


@case(end=End.EITHER, reason="")
def autocast_comes_and_goes() -> Training:
    """Around some steps."""
    count = [0]

    def around() -> Any:
        count[0] += 1
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=count[0] % 4 < 2)

    return _around(around)


@case()
def dynamo_forgets_everything() -> Training:
    """In the middle, as a notebook might ask it to."""
    model = chain()
    return train(model, torch._dynamo.reset)


@case()
def another_default_dtype() -> Training:
    """Of numbers that become tensors, from one step on; the step before sets it back."""
    model = chain()

    class Around:
        def __enter__(self) -> None:
            torch.set_default_dtype(torch.float64)

        def __exit__(self, *_: Any) -> None:
            torch.set_default_dtype(torch.float32)

    return Training(model=model, optimizer=sgd(model.parameters()), around=Around, microbatches=2)
