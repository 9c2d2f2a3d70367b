"""Cases by loss function: it reads numbers, differentiates, has effects, or returns something else."""

from __future__ import annotations

import logging
import random as python_random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.end_to_end.step_cases import models
from tests.end_to_end.step_cases.cases import CHANGE, EITHER, RAISES, Training, add, case, loop, loss, refused, train
from tests.end_to_end.step_cases.models import CLASSES, Batch, Texts, Wrapped, chain, momentum, mse, off, rows, words

_logger = logging.getLogger(__name__)

READS = loop("stays a loop")
"""What reads a number of a tensor is not one graph."""
NOT_ONE_GRAPH = loop("not one graph")
AS_TORCH_COMPILE = refused("does not currently support double backward", RuntimeError)
"""Of a loss whose backward torch.compile refuses too."""
TEXTS = {"model": Texts, "batch": words}

# ----------------------------------------------------------------------------------------------------- numbers read

logged: list[float] = []


@loss(**READS)
def a_loss_that_is_logged_as_a_number(model: nn.Module, batch: Batch) -> torch.Tensor:
    """It is read inside of the loss function, and kept."""
    loss = mse(model, batch)
    logged.append(loss.item())
    return loss


@loss(**READS)
def a_term_only_where_a_mask_has_something(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A branch on a number that is read."""
    mask, loss = batch["y"] > 1, mse(model, batch)
    if mask.sum().item() > 0:
        loss = loss + model(batch["x"])[mask].square().mean()
    return loss


def _or_its_root(loss: torch.Tensor) -> torch.Tensor:
    return loss.sqrt() if loss > 1.2 else loss


add("a branch on a tensor", "Another loss where it is large.", loss=lambda m, b: _or_its_root(mse(m, b)), **READS)
add("a division by a number", loss=lambda m, batch: mse(m, batch) / float(batch["x"].abs().sum()))
add("a mask by indices", loss=lambda m, batch: (m(batch["x"])[batch["y"] > 0] - 1).square().mean(), **READS)


@loss(**TEXTS, **READS)
def texts_cut_to_the_longest(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A padded batch is trimmed to the length of its longest text."""
    longest = int((batch["words"] != 0).sum(-1).max())
    return nn.functional.cross_entropy(model(batch["words"][:, : max(longest, 1)]), batch["y"])


@loss(**TEXTS, **READS)
def texts_one_by_one(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Slices by a list of lengths."""
    lengths = (batch["words"] != 0).sum(-1).clamp(min=1).tolist()
    scores = [model(text[:length][None]) for text, length in zip(batch["words"], lengths, strict=True)]
    return nn.functional.cross_entropy(torch.cat(scores), batch["y"])


@loss()
def an_array_of_numpy(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Weights of samples come from NumPy."""
    norms = batch["x"].norm(dim=-1).numpy()
    weights = torch.from_numpy(norms / norms.sum())
    return (off(model, batch).square().mean(-1) * weights).sum()


@loss(**READS)
def a_check_for_numbers_that_are_none(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Which none is."""
    loss = mse(model, batch)
    if torch.isnan(loss).any():
        raise ValueError("the loss is not a number")
    return loss


@loss(**EITHER)
def an_assertion_about_values(model: nn.Module, batch: Batch) -> torch.Tensor:
    """One that holds, which the graph checks."""
    torch._assert_async(batch["x"].abs().max() < 100)
    return mse(model, batch)


# ------------------------------------------------------------------------------------------------------- differentiates


@loss(**AS_TORCH_COMPILE)
def a_penalty_of_gradients(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Gradients of the input are part of the loss."""
    x = batch["x"].detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return mse(model, batch) + gradient.square().sum(-1).sqrt().sub(1).square().mean()


@loss(**AS_TORCH_COMPILE)
def a_penalty_of_gradients_of_weights(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A second derivative of parameters."""
    loss = mse(model, batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * sum(each.square().sum() for each in gradients)


@loss(**EITHER)
def a_gradient_by_torch_func(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Of the input, with `grad` inside of `vmap`."""
    gradient = torch.func.vmap(torch.func.grad(lambda x: model(x).square().sum()))(batch["x"])
    return mse(model, batch) + 0.01 * gradient.square().mean()


@loss(**EITHER)
def a_derivative_forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Along a direction, with `jvp`."""
    _, change = torch.func.jvp(model, (batch["x"],), (torch.ones_like(batch["x"]),))
    return mse(model, batch) + 0.1 * change.square().mean()


@loss()
def a_step_inside_of_a_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Meta-learning: the loss after one step of gradient descent, by `functional_call`."""
    weights = dict(model.named_parameters())

    def loss_of(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(torch.func.functional_call(model, weights, (batch["x"],)), batch["y"])

    gradients = torch.func.grad(loss_of)(weights)
    return loss_of({name: weight - 0.1 * gradients[name] for name, weight in weights.items()})


@loss(**NOT_ONE_GRAPH)
def a_backward_inside(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Gradients of another loss are there before those of this one are added."""
    (0.1 * model(batch["x"]).mean()).backward()
    return mse(model, batch)


# ------------------------------------------------------------------------------------------------------------ effects

kept: list[Any] = []
total = {"weight": 1.0}


@loss(**NOT_ONE_GRAPH)
def a_line_is_printed(model: nn.Module, batch: Batch) -> torch.Tensor:
    """In every call, or the loop."""
    print("a step")
    return mse(model, batch)


@loss(**NOT_ONE_GRAPH)
def a_line_is_logged(model: nn.Module, batch: Batch) -> torch.Tensor:
    """By Python's logging."""
    _logger.debug("a step of %d samples", len(batch["x"]))
    return mse(model, batch)


@loss(**loop("keeps tensors besides those that it returns"))
def the_loss_is_kept(model: nn.Module, batch: Batch) -> torch.Tensor:
    """In a list, detached."""
    loss = mse(model, batch)
    kept[:] = [loss.detach()]
    return loss


add("a weight is global", "It is one, and stays so.", loss=lambda m, batch: mse(m, batch) * total["weight"])


def _throw_dice(model: nn.Module, batch: Batch) -> torch.Tensor:
    return mse(model, batch) * (0.5 if python_random.Random(int(batch["x"].shape[0])).random() > 0.5 else 1.0)


add("Python throws dice", loss=_throw_dice, **NOT_ONE_GRAPH)


@case(**EITHER)
def a_weight_that_another_step_changes() -> Training:
    """A number that the loss function refers to, and that grows from step to step."""
    weight = [1.0]
    grow = lambda _, number: weight.__setitem__(0, 1.0 + number // 4)  # noqa: E731
    return train(loss=lambda m, batch: mse(m, batch) * weight[0], before=grow)


@case()
def a_weight_in_a_tensor_that_grows() -> Training:
    """The same as a tensor, which is written to."""
    weight = torch.ones(())
    return train(loss=lambda m, batch: mse(m, batch) * weight, before=lambda _, number: weight.fill_(1 + 0.1 * number))


@case()
def a_tensor_that_is_replaced() -> Training:
    """The loss function refers to another one in every step."""
    weights: dict[str, torch.Tensor] = {}
    return train(
        loss=lambda m, batch: (off(m, batch).square() * weights["now"]).mean(),
        before=lambda _, number: weights.update(now=torch.full((CLASSES,), 1.0 + 0.1 * number)),
    )


@loss(count=3)
def noise_in_the_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Random numbers are drawn outside of the model."""
    time = torch.rand(len(batch["x"]), 1)
    noise = torch.randn_like(batch["x"])
    return (model(batch["x"] * time + noise * (1 - time)) - batch["y"]).square().mean()


# ------------------------------------------------------------------------------------------------------- other forms


@dataclass
class WithMargin:
    """A loss function that is a method of an object with settings."""

    margin: float

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return off(model, batch).abs().sub(self.margin).relu().mean()

    __call__ = loss


def _weighted(own: Any, model: nn.Module, batch: Batch) -> torch.Tensor:
    return (off(model, batch).square() * own.weights).mean()


def _scaled(model: nn.Module, batch: Batch, scale: float) -> torch.Tensor:
    return scale * mse(model, batch)


module = Wrapped(_weighted, weights=nn.Parameter(torch.ones(CLASSES), requires_grad=False))
add("a method is the loss function", "Of an object.", loss=WithMargin(0.1).loss)
add("an object is the loss function", "Which can be called.", loss=WithMargin(0.1))
add("a module is the loss function", "With a frozen parameter of its own.", loss=module)
add("a partial function is the loss function", "With a number.", loss=partial(_scaled, scale=0.5))


@case(**loop("requires gradients|loop"))
def a_parameter_of_the_loss_function() -> Training:
    """It is trained by the same optimizer, but does not belong to the model."""
    model, scale = chain(), nn.Parameter(torch.tensor(1.0))
    optimizer = momentum([*model.parameters(), scale])
    return train(model, lambda m, b: mse(m, b) * scale.exp() - scale, by=optimizer, watched=lambda _: scale)


@loss()
def a_tuple_that_begins_with_the_loss(model: nn.Module, batch: Batch) -> Any:
    """And ends with scores."""
    out = model(batch["x"])
    return nn.functional.mse_loss(out, batch["y"]), out.detach()


for name, returned, loss_fn in (
    ("a loss of shape one", "Tensor of shape \\[1\\]", lambda m, batch: mse(m, batch)[None]),
    ("a dictionary without a loss", "dict", lambda m, batch: {"mse": mse(m, batch)}),
    ("a number of python", "float", lambda m, batch: 1.0),
):
    add(name, loss=loss_fn, **refused(f"returned a {returned} as the loss"))
add("a dictionary that has the loss", loss=lambda m, batch: {"loss": mse(m, batch), "size": batch["x"].shape[0]})
add("a loss in float64", loss=lambda m, batch: nn.functional.mse_loss(m(batch["x"]).double(), batch["y"].double()))
add("a loss without a graph", loss=lambda m, batch: mse(m, batch).detach(), **RAISES)
add("a loss that is not finite", loss=lambda m, batch: mse(m, batch) / (batch["x"] * 0).sum(), **EITHER)
add("weights that decay by the loss", loss=lambda m, b: mse(m, b) + 0.01 * sum(p.abs().sum() for p in m.parameters()))
add("two calls of the model", loss=lambda m, batch: mse(m, batch) + (m(batch["x"]) + m(-batch["x"])).square().mean())


@loss()
def a_contrast_between_samples(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Each with all others of its micro-batch."""
    features = nn.functional.normalize(model(batch["x"]), dim=-1)
    return nn.functional.cross_entropy(features @ features.T / 0.1, torch.arange(len(features)))


says = "Matrix multiplications in bfloat16."
add("autocast inside of the loss", says, loss=models.autocast_mse, rtol=1e-2, atol=1e-3)


@loss(count=1)
def a_part_under_inference_mode(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Targets are made by the model itself."""
    with torch.inference_mode():
        target = model(batch["x"]).clone()
    return nn.functional.mse_loss(model(batch["x"]), 0.5 * target.clone())


@loss(**NOT_ONE_GRAPH)
def saved_tensors_are_packed(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What the backward reads is kept in float16 or elsewhere."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda packed: packed * 1):
        return mse(model, batch)


@loss(**EITHER)
def weights_are_clamped_in_the_forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    """In place, under `no_grad`, as critics do."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.3, 0.3)
    return mse(model, batch)


@loss(**EITHER)
def the_mode_is_switched_inside(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Evaluation for targets, training for the rest."""
    model.eval()
    with torch.no_grad():
        target = model(batch["x"])
    model.train()
    return nn.functional.mse_loss(model(batch["x"]), batch["y"] - 0.1 * target)


@loss(batch=lambda n: {**rows(n), "t": words(n)["words"][:, :2].clamp(1, CLASSES - 1)}, **NOT_ONE_GRAPH)
def a_loss_of_aligned_texts(model: nn.Module, batch: Any) -> torch.Tensor:
    """CTC, whose lengths are tensors."""
    lengths = torch.full((len(batch["t"]),), 5), torch.full((len(batch["t"]),), 2)
    return nn.functional.ctc_loss(model(batch["x"]).log_softmax(-1).expand(5, -1, -1), batch["t"], *lengths)


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

    return train(Texts, loss_fn, batch=batch, count=3)


@case(**EITHER)
def the_loss_function_changes_its_mind() -> Training:
    """It has another loss after some steps, by a flag."""
    flags = {"late": False}

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        out = off(model, batch)
        return out.abs().mean() if flags["late"] else out.square().mean()

    return train(loss=loss_fn, before=lambda _, number: flags.update(late=number >= CHANGE))
