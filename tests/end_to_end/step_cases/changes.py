"""Cases by what changes between steps: what is trained, modes, weights, errors, and the state of torch."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

from tests.end_to_end.step_cases.cases import CHANGE, EITHER, RAISES, Training, add, loop, train
from tests.end_to_end.step_cases.models import CLASSES, WIDTH, Batch, Towers, adamw, chain, mse, rows, sgd
from tests.torch_settings import changed

# ---------------------------------------------------------------------------------------------------- what is trained


def _frozen_first() -> nn.Sequential:
    model = chain()
    model[0].requires_grad_(False)
    return model


def _insert_layer(training: Training) -> None:
    training.model.insert(1, nn.Linear(8, 8))
    training.optimizer.add_param_group({"params": list(training.model[1].parameters())})


def _remove_layer(training: Training) -> None:
    training.model.zero_grad()
    del training.model[1]


def _swap_towers(training: Training, number: int) -> None:
    training.model.left.requires_grad_(number % 6 < 3)
    training.model.right.requires_grad_(number % 6 >= 3)


def _reload(training: Training) -> None:
    file = io.BytesIO()
    torch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, file)
    for _ in range(2):
        file.seek(0)
        state = torch.load(file)
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])


def _copy_model(training: Training) -> None:
    for made in (copy.deepcopy(training.model), pickle.loads(pickle.dumps(training.model))):
        for parameter in made.parameters():
            parameter.data.zero_()


@torch.no_grad()
def _disturb(training: Training, number: int) -> None:
    for parameter in training.model.parameters():
        parameter.add_(0.01 * torch.randn_like(parameter)).clamp_(-0.5, 0.5)


def _set_data(change: Callable[[torch.Tensor], torch.Tensor], training: Training) -> None:
    training.model[0].weight.data = change(training.model[0].weight.data)


add("a layer is frozen", "Its gradient goes too.", change=lambda t: t.model[0].requires_grad_(False).zero_grad())
add("a layer is frozen and clipped", change=lambda t: t.model[0].requires_grad_(False), clip=0.1)
add("a layer is thawed", change=lambda t: t.model[0].requires_grad_(True), model=_frozen_first, count=3)
add("a parameter is another one", change=lambda t: setattr(t.model[2], "bias", nn.Parameter(torch.ones(CLASSES))))
halve_data = partial(_set_data, lambda data: 0.5 * data)
add("the data of a parameter is replaced", change=halve_data)
add("the data of a parameter has another layout", change=partial(_set_data, lambda data: data.T.contiguous().T))
add("a layer comes in between", "The optimizer gets its parameters.", change=_insert_layer, by=adamw)
add("a layer goes", change=_remove_layer, model=lambda: chain(nn.Linear(8, 8), nn.Tanh()))
add("a layer is swapped for another", change=lambda t: t.model.__setitem__(0, nn.Linear(WIDTH, 8)), count=1)
add("everything is saved and loaded", "Model and optimizer, through a file.", change=_reload, by=adamw)
add("the model is copied", "By `deepcopy` and by pickle; copies are changed, the model is not.", change=_copy_model)
assigns = {**EITHER, "reason": "the model assigns some"}  # its pruned weight, in every forward
add("weights are pruned", change=lambda t: prune.l1_unstructured(t.model[0], "weight", amount=0.5), **assigns)
dtyped = {"batch": lambda n: rows(n, dtype=torch.float64 if n >= CHANGE else torch.float32), "by": sgd}
add("the model changes its dtype", change=lambda t: t.model.double(), **dtyped, **EITHER)
add("layers are trained by turns", "As in a GAN.", model=Towers, by=adamw, before=_swap_towers)
add("weights are written to", "By the user before every step.", by=adamw, before=_disturb)


def _loading(of: Callable[[], nn.Module], **settings: Any) -> Training:
    model = of()
    state = copy.deepcopy(model.state_dict())
    return train(model, change=lambda t: t.model.load_state_dict(state, **settings))


add("weights are loaded", "In place.", _loading, of=lambda: chain(nn.BatchNorm1d(8), nn.Tanh()))
add("weights are loaded by assignment", "Parameters are other objects.", _loading, of=chain, assign=True)

# -------------------------------------------------------------------------------------------------------------- modes


def _set_numbers(training: Training) -> None:
    training.model[1].momentum, training.model[2].p = 0.5, 0.25


def _switch(part: Callable[[Any], nn.Module], training: Training, number: int) -> None:
    part(training.model).train(number % 6 < 3)


switched = partial(add, model=lambda: chain(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh()), **EITHER)
says = "And back; a step of evaluation is a loop or a program of its own."
switched("the model is switched to evaluation", says, before=partial(_switch, lambda model: model))
switched("a part of the model is switched to evaluation", "And back.", before=partial(_switch, lambda model: model[1]))
switched("settings of modules change", change=_set_numbers)

# ------------------------------------------------------------------------------------------------------------- errors

FAILS = {3, 4, 5, 6, 9, 10, 12}
"""Steps that fail, of every variant one."""


def _failing(number: int, first: int = 0) -> dict[str, Any]:
    return {**rows(number), "fails": (torch.arange(12) >= first) & (number in FAILS)}


def _fails_with_an_index(model: nn.Module, batch: Batch) -> torch.Tensor:
    found = nn.functional.embedding(batch["fails"].long() * 7, torch.zeros(3, CLASSES))
    return mse(model, {"x": batch["x"], "y": batch["y"] + found})


class FailsBackward(torch.autograd.Function):
    """The identity, whose backward looks something up that may not be there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * nn.functional.embedding(ctx.saved_tensors[0], torch.ones(3, 1)), None


def _fails_backward(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(FailsBackward.apply(model(batch["x"]), batch["fails"].long() * 7), batch["y"])


def _fails_late_in_backward(model: Any, batch: Batch) -> torch.Tensor:
    x = FailsBackward.apply(batch["x"] @ model.left[0].weight[:WIDTH, :WIDTH], batch["fails"].long() * 7)
    return nn.functional.mse_loss(model(x), batch["y"])


def _fails_in_python(model: nn.Module, batch: Any) -> torch.Tensor:
    if len(batch["x"]) == 3:
        raise ValueError("three samples")
    return mse(model, batch)


failing = partial(add, by=adamw, fails=True)
of_towers = partial(failing, model=Towers, batch=_failing)
of_towers("an error in the forward", "An index is out of range, and weights stay.", loss=_fails_with_an_index)
of_towers("an error in the backward, clipped", "The optimizer waits.", loss=_fails_backward, clip=1.0)
of_towers("an error in the backward", "At its beginning, so no gradient was final.", loss=_fails_backward, count=1)
of_towers("an error late in the backward", "Nothing was updated.", loss=_fails_late_in_backward, count=1, clip=1.0)
small = {"batch": lambda n: rows(n, 3 if n in (0, 5, 9) else 12), "count": 1}
failing("an error of the users", loss=_fails_in_python, **small, **EITHER)
failing("an error in the second micro batch", loss=_fails_with_an_index, batch=partial(_failing, first=6))
broken = {"before": lambda t, number: t.optimizer.param_groups[0].update(lr="0.1" if number in FAILS else 0.1)}
add("an error of the optimizer", by=sgd, fails=True, clip=1.0, **broken)
failing("a key is missing at times", batch=lambda n: {"x": rows(n)["x"]} if n in (4, 9) else rows(n))

# ------------------------------------------------------------------------------------------------- the state of torch


bfloat16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
deterministic = partial(changed, torch.use_deterministic_algorithms, True, False)
within = partial(add, model=Towers, by=adamw)
within("autocast around the step", around=bfloat16, rtol=2e-2, atol=2e-3, **EITHER)
within("gradients are off around the step", "Backward raises, in eager too.", around=torch.no_grad, **RAISES)
within("inference mode around the step", "Backward raises, in eager too.", around=torch.inference_mode, **RAISES)
within("gradients are on around the step", "As they are.", around=torch.enable_grad)
within("deterministic algorithms", "Nothing is compared.", around=deterministic, rtol=1e-6, atol=1e-7)
anomalies = partial(changed, torch.autograd.set_detect_anomaly, True, False)
follows_no_mode = loop("torch looks for anomalies")
within(
    "anomalies are looked for",
    "By backward functions, which programs do not have.",
    around=anomalies,
    **follows_no_mode,
)
within("another device by default", "The same one, in fact.", around=partial(torch.device, "cpu"))


def _at_times(inside: Callable[[], Any], **settings: Any) -> Training:
    count = itertools.count(1)
    return train(Towers, by=adamw, around=lambda: inside() if next(count) % 4 > 1 else nullcontext(), **settings)


def _loss_with_nan_in_backward(model: nn.Module, batch: Any) -> torch.Tensor:
    return mse(model, batch) + 0 * (batch["factor"].mean() * model.left[0].weight.square().sum()).sqrt()


def _with_nan_at_times(number: int) -> dict[str, Any]:
    return {**rows(number), "factor": torch.full((12,), float(number not in FAILS))}


finds = {"loss": _loss_with_nan_in_backward, "batch": _with_nan_at_times, "fails": True}
within("a NaN while anomalies are looked for", "An error says so.", around=anomalies, **finds, **follows_no_mode)
at_times = partial(add, make=_at_times, **EITHER)
at_times("autocast comes and goes", inside=bfloat16)
at_times("a dispatch mode comes and goes", "It counts.", inside=FlopCounterMode, reason="to see each operator")
eager = partial(torch.compiler.set_stance, "force_eager")
at_times("torch.compile is told to run eager at times", inside=eager, reason="set_stance asks for 'force_eager'")

add("dynamo forgets everything", "As a notebook might ask it to.", change=lambda _: torch._dynamo.reset())
add("another default dtype", around=partial(changed, torch.set_default_dtype, torch.float64, torch.float32))
