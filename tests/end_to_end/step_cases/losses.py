"""Cases by loss function: it reads numbers, differentiates, has effects, or returns something else."""

from __future__ import annotations

import functools
import logging
import random as python_random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from apollo_compile.errors import TargetError
from tests.end_to_end.step_cases.cases import CHANGE, End, Training, add_case, case
from tests.end_to_end.step_cases.models import (
    CLASSES,
    Batch,
    Texts,
    chain,
    mse,
    random,
    rows,
    words,
)

_logger = logging.getLogger(__name__)

AS_TORCH_COMPILE: dict[str, Any] = {
    "end": End.REFUSED,
    "errors": RuntimeError,
    "reason": "does not currently support double backward",
}
"""Of a loss whose backward torch.compile refuses too."""

sgd = partial(optim.SGD, lr=0.1, momentum=0.9)

Loss = Callable[[nn.Module, Batch], Any]


def train(loss_fn: Loss, model: nn.Module | None = None, microbatches: int = 2, **settings: Any) -> Training:
    """Return the training of a chain for a loss."""
    model = model or chain()
    return Training(
        model=model, loss_fn=loss_fn, optimizer=sgd(model.parameters()), microbatches=microbatches, **settings
    )


def add_loss(loss_fn: Loss, **settings: Any) -> Loss:
    """Add a case of a chain and this loss, called by its name."""
    says = (loss_fn.__doc__ or "").strip()
    microbatches = settings.pop("microbatches", 2)
    add_case(loss_fn.__name__.replace("_", " "), says, partial(train, loss_fn, microbatches=microbatches), **settings)
    return loss_fn


def of_texts(loss_fn: Loss) -> Training:
    """Return the training of a model of texts for a loss."""
    return train(loss_fn, Texts(), batch=words)


def add_text_loss(loss_fn: Loss, **settings: Any) -> Loss:
    """Add a case of texts and this loss, called by its name."""
    says = (loss_fn.__doc__ or "").strip()
    add_case(loss_fn.__name__.replace("_", " "), says, partial(of_texts, loss_fn), **settings)
    return loss_fn


loss_case = functools.partial(functools.partial, add_loss)
"""Decorator of a loss function that makes a case of it."""
text_case = functools.partial(functools.partial, add_text_loss)

READS = {"end": End.LOOP, "reason": "stays a loop"}
"""What reads a number of a tensor is not one graph."""

# ----------------------------------------------------------------------------------------------------- numbers read

logged: list[float] = []


@loss_case(**READS)
def a_loss_that_is_logged_as_a_number(model: nn.Module, batch: Batch) -> torch.Tensor:
    """It is read inside of the loss function, and kept."""
    loss = mse(model, batch)
    logged.append(loss.item())
    return loss


@loss_case(**READS)
def a_term_only_where_a_mask_has_something(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A branch on a number that is read."""
    mask = batch["y"] > 1
    loss = mse(model, batch)
    if mask.sum().item() > 0:
        loss = loss + model(batch["x"])[mask].square().mean()
    return loss


@loss_case(**READS)
def a_branch_on_a_tensor(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Another loss where it is large."""
    loss = mse(model, batch)
    return loss.sqrt() if loss > 1.2 else loss


@loss_case()
def a_division_by_a_number(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A tensor becomes a number of Python's."""
    return mse(model, batch) / float(batch["x"].abs().sum())


@loss_case(**READS)
def a_mask_by_indices(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Its result has a size that nobody knows before."""
    out = model(batch["x"])
    return (out[batch["y"] > 0] - 1).square().mean()


@text_case(**READS)
def texts_cut_to_the_longest(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A padded batch is trimmed to the length of its longest text."""
    longest = int((batch["words"] != 0).sum(-1).max())
    return nn.functional.cross_entropy(model(batch["words"][:, : max(longest, 1)]), batch["y"])


@text_case(**READS)
def texts_one_by_one(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Slices by a list of lengths."""
    lengths = (batch["words"] != 0).sum(-1).clamp(min=1).tolist()
    scores = [model(text[:length][None]) for text, length in zip(batch["words"], lengths, strict=True)]
    return nn.functional.cross_entropy(torch.cat(scores), batch["y"])


@loss_case()
def an_array_of_numpy(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Weights of samples come from NumPy."""
    norms = batch["x"].norm(dim=-1).numpy()
    weights = torch.from_numpy(norms / norms.sum())
    return ((model(batch["x"]) - batch["y"]).square().mean(-1) * weights).sum()


@loss_case(**READS)
def a_check_for_numbers_that_are_none(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Which none is."""
    loss = mse(model, batch)
    if torch.isnan(loss).any():
        raise ValueError("the loss is not a number")
    return loss


@loss_case(end=End.EITHER, reason="")
def an_assertion_about_values(model: nn.Module, batch: Batch) -> torch.Tensor:
    """One that holds, which the graph checks."""
    torch._assert_async(batch["x"].abs().max() < 100)
    return mse(model, batch)


# ------------------------------------------------------------------------------------------------------- differentiates


@loss_case(**AS_TORCH_COMPILE)
def a_penalty_of_gradients(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Gradients of the input are part of the loss."""
    x = batch["x"].detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return mse(model, batch) + gradient.square().sum(-1).sqrt().sub(1).square().mean()


@loss_case(**AS_TORCH_COMPILE)
def a_penalty_of_gradients_of_weights(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A second derivative of parameters."""
    loss = mse(model, batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * sum(each.square().sum() for each in gradients)


@loss_case(end=End.EITHER, reason="")
def a_gradient_by_torch_func(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Of the input, with `grad` inside of `vmap`."""
    gradient = torch.func.vmap(torch.func.grad(lambda x: model(x).square().sum()))(batch["x"])
    return mse(model, batch) + 0.01 * gradient.square().mean()


@loss_case(end=End.EITHER, reason="")
def a_derivative_forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Along a direction, with `jvp`."""
    _, change = torch.func.jvp(model, (batch["x"],), (torch.ones_like(batch["x"]),))
    return mse(model, batch) + 0.1 * change.square().mean()


@loss_case()
def a_step_inside_of_a_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Meta-learning: the loss after one step of gradient descent, by `functional_call`."""
    weights = dict(model.named_parameters())

    def loss_of(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        out = torch.func.functional_call(model, weights, (batch["x"],))
        return nn.functional.mse_loss(out, batch["y"])

    gradients = torch.func.grad(loss_of)(weights)
    return loss_of({name: weight - 0.1 * gradients[name] for name, weight in weights.items()})


@loss_case(end=End.LOOP, reason="not one graph")
def a_backward_inside(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Gradients of another loss are there before those of this one are added."""
    (0.1 * model(batch["x"]).mean()).backward()
    return mse(model, batch)


# ------------------------------------------------------------------------------------------------------------ effects

kept: list[Any] = []
total = {"calls": 0, "weight": 1.0}


def _with_globals(loss_fn: Loss, microbatches: int) -> Training:
    """Begin with globals as they are at first; both copies see the same."""
    total.update(calls=0, weight=1.0)
    kept.clear()
    return train(loss_fn, microbatches=microbatches)


def prints(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss, printed in words."""
    print("a step")
    return mse(model, batch)


def logs(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss, with a line for a log that nobody reads."""
    _logger.debug("a step of %d samples", len(batch["x"]))
    return mse(model, batch)


def keeps(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss, which a list keeps."""
    loss = mse(model, batch)
    kept[:] = [loss.detach()]
    return loss


def weighs_by_global(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss, times a number that is global."""
    return mse(model, batch) * total["weight"]


def throws_dice(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss, or half of it, as Python's random numbers have it."""
    return mse(model, batch) * (0.5 if python_random.Random(int(batch["x"].shape[0])).random() > 0.5 else 1.0)


add_case(
    "a line is printed",
    "In every call, or the loop.",
    partial(_with_globals, prints, 2),
    end=End.LOOP,
    reason="not one graph",
)
add_case(
    "a line is logged", "By Python's logging.", partial(_with_globals, logs, 2), end=End.LOOP, reason="not one graph"
)
add_case(
    "the loss is kept",
    "In a list, detached.",
    partial(_with_globals, keeps, 2),
    end=End.LOOP,
    reason="returns other tensors besides the loss",
)
add_case("a weight is global", "It is one, and stays so.", partial(_with_globals, weighs_by_global, 2))
add_case(
    "Python throws dice",
    "With a generator of its own.",
    partial(_with_globals, throws_dice, 2),
    end=End.LOOP,
    reason="not one graph",
)


@case(end=End.EITHER, reason="")
def a_weight_that_another_step_changes() -> Training:
    """A number that the loss function refers to, and that grows from step to step."""
    weight = [1.0]

    def grow(number: int) -> None:
        weight[0] = 1.0 + (number // 4)

    return train(lambda model, batch: mse(model, batch) * weight[0], before=grow)


@case()
def a_weight_in_a_tensor_that_grows() -> Training:
    """The same as a tensor, which is written to."""
    weight = torch.ones(())
    return train(lambda model, batch: mse(model, batch) * weight, before=lambda number: weight.fill_(1 + 0.1 * number))


@case()
def a_tensor_that_is_replaced() -> Training:
    """The loss function refers to another one in every step."""
    weights: dict[str, torch.Tensor] = {}

    def replace(number: int) -> None:
        weights["now"] = torch.full((CLASSES,), 1.0 + 0.1 * number)

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        return ((model(batch["x"]) - batch["y"]).square() * weights["now"]).mean()

    return train(loss_fn, before=replace)


@case()
def noise_in_the_loss() -> Training:
    """Random numbers are drawn outside of the model."""

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        time = torch.rand(len(batch["x"]), 1)
        noise = torch.randn_like(batch["x"])
        out: torch.Tensor = model(batch["x"] * time + noise * (1 - time))
        return (out - batch["y"]).square().mean()

    return train(loss_fn, microbatches=3)


# ------------------------------------------------------------------------------------------------------- other forms


class WithMargin:
    """A loss function that is a method of an object with settings."""

    def __init__(self, margin: float) -> None:
        self.margin = margin

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return errors beyond the margin."""
        return (model(batch["x"]) - batch["y"]).abs().sub(self.margin).relu().mean()

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the same."""
        return self.loss(model, batch)


class LossModule(nn.Module):
    """A loss that has a parameter, which is not the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(CLASSES), requires_grad=False)

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the weighted loss."""
        return ((model(batch["x"]) - batch["y"]).square() * self.weights).mean()


add_case("a method is the loss function", "Of an object.", lambda: train(WithMargin(0.1).loss))
add_case("an object is the loss function", "Which can be called.", lambda: train(WithMargin(0.1)))
add_case("a module is the loss function", "With a frozen parameter of its own.", lambda: train(LossModule()))


@case()
def a_partial_function_is_the_loss_function() -> Training:
    """With a number for an argument."""

    def loss_fn(model: nn.Module, batch: Batch, scale: float) -> torch.Tensor:
        return scale * mse(model, batch)

    return train(partial(loss_fn, scale=0.5))


@case(end=End.LOOP, reason="requires gradients|loop")
def a_parameter_of_the_loss_function() -> Training:
    """It is trained by the same optimizer, but does not belong to the model."""
    model, scale = chain(), nn.Parameter(torch.tensor(1.0))
    return Training(
        model=model,
        loss_fn=lambda m, batch: mse(m, batch) * scale.exp() - scale,
        optimizer=sgd([*model.parameters(), scale]),
        microbatches=2,
        watched=lambda: scale,
    )


@loss_case(end=End.LOOP, reason="other tensors besides the loss")
def a_tuple_that_begins_with_the_loss(model: nn.Module, batch: Batch) -> Any:
    """And ends with scores."""
    out = model(batch["x"])
    return nn.functional.mse_loss(out, batch["y"]), out.detach()


@loss_case()
def a_loss_in_float64(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Of a model in float32."""
    return nn.functional.mse_loss(model(batch["x"]).double(), batch["y"].double())


@loss_case(end=End.REFUSED, errors=TargetError, reason=r"returned a Tensor of shape \[1\] as the loss")
def a_loss_of_shape_one(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Which has a dimension."""
    return mse(model, batch)[None]


@loss_case(end=End.REFUSED, errors=TargetError, reason="returned a dict as the loss")
def a_dictionary_of_losses(model: nn.Module, batch: Batch) -> Any:
    """Nobody knows which of them is the loss."""
    return {"loss": mse(model, batch)}


@loss_case(end=End.REFUSED, errors=TargetError, reason="returned a float as the loss")
def a_number_of_python(model: nn.Module, batch: Batch) -> Any:
    """It has no gradient."""
    return 1.0


@loss_case(end=End.RAISES)
def a_loss_without_a_graph(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Backward raises, in eager too."""
    return mse(model, batch).detach()


@loss_case(end=End.EITHER)
def a_loss_that_is_not_finite(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Gradients are infinite or not a number, and so are weights from then on."""
    return mse(model, batch) / (batch["x"] * 0).sum()


@loss_case()
def weights_that_decay_by_the_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A sum over all parameters."""
    return mse(model, batch) + 0.01 * sum(parameter.abs().sum() for parameter in model.parameters())


@loss_case()
def two_calls_of_the_model(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Samples and their negatives."""
    return mse(model, batch) + (model(batch["x"]) + model(-batch["x"])).square().mean()


@loss_case()
def a_contrast_between_samples(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Each with all others of its micro-batch."""
    features = nn.functional.normalize(model(batch["x"]), dim=-1)
    return nn.functional.cross_entropy(features @ features.T / 0.1, torch.arange(len(features)))


@loss_case(rtol=1e-2, atol=1e-3)
def autocast_inside_of_the_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Matrix multiplications in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(batch["x"])
    return nn.functional.mse_loss(out.float(), batch["y"])


@loss_case(microbatches=1)
def a_part_under_inference_mode(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Targets are made by the model itself."""
    with torch.inference_mode():
        target = model(batch["x"]).clone()
    return nn.functional.mse_loss(model(batch["x"]), 0.5 * target.clone())


@loss_case(end=End.LOOP, reason="not one graph")
def saved_tensors_are_packed(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What the backward reads is kept in float16 or elsewhere."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda packed: packed * 1):
        return mse(model, batch)


@loss_case(end=End.EITHER, reason="")
def weights_are_clamped_in_the_forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    """In place, under `no_grad`, as critics do."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.3, 0.3)
    return mse(model, batch)


@loss_case(end=End.EITHER, reason="")
def the_mode_is_switched_inside(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Evaluation for targets, training for the rest."""
    model.eval()
    with torch.no_grad():
        target = model(batch["x"])
    model.train()
    return nn.functional.mse_loss(model(batch["x"]), batch["y"] - 0.1 * target)


@case(end=End.LOOP, reason="not one graph")
def a_loss_of_aligned_texts() -> Training:
    """CTC, whose lengths are tensors."""

    def batch(number: int) -> dict[str, Any]:
        return {**rows(number), "t": torch.randint(1, CLASSES, (12, 2), generator=random(number))}

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        scores = model(batch["x"]).log_softmax(-1).expand(5, -1, -1)
        lengths = torch.full((len(batch["t"]),), 5), torch.full((len(batch["t"]),), 2)
        return nn.functional.ctc_loss(scores, batch["t"], *lengths)

    return train(loss_fn, batch=batch)


@case()
def smooth_labels_and_weights_of_classes() -> Training:
    """And targets that are ignored."""
    weights = torch.rand(CLASSES)

    def batch(number: int) -> dict[str, Any]:
        made = words(number)
        made["y"][::3] = -100
        return made

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["words"]), batch["y"], weight=weights, label_smoothing=0.1)

    return train(loss_fn, Texts(), batch=batch, microbatches=3)


@case(end=End.EITHER, reason="")
def the_loss_function_changes_its_mind() -> Training:
    """It has another loss after some steps, by a flag."""
    flags = {"late": False}

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        out = model(batch["x"])
        return (out - batch["y"]).abs().mean() if flags["late"] else (out - batch["y"]).square().mean()

    return train(loss_fn, before=lambda number: flags.update(late=number >= CHANGE))
