"""Cases by optimizer: every class of torch with its settings, others, and what is done with them between steps."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from apollo_compile.errors import ApolloError
from tests.end_to_end.step_cases.cases import CHANGE, EITHER, RAISES, Training, add, case, loop, refused, train
from tests.end_to_end.step_cases.models import EPS, WORDS, Make, Texts, adamw, chain, momentum, sgd, word_entropy, words

adam, nadam = (partial(make, lr=0.01, eps=EPS) for make in (optim.Adam, optim.NAdam))
fast = partial(optim.AdamW, eps=EPS)

OPTIMIZERS: dict[str, Make] = {
    "SGD": sgd,
    "SGD with momentum": momentum,
    "SGD with Nesterov": partial(momentum, nesterov=True, weight_decay=0.1),
    "SGD with dampening": partial(momentum, dampening=0.5),
    "SGD that maximizes": partial(sgd, lr=0.01, maximize=True, weight_decay=0.1),
    "SGD with foreach": partial(momentum, foreach=True),
    "SGD without foreach": partial(momentum, foreach=False),
    "SGD with fused": partial(momentum, fused=True),
    "Adam": adam,
    "Adam with amsgrad": partial(adam, amsgrad=True),
    "Adam that maximizes": partial(adam, maximize=True, weight_decay=0.1),
    "Adam with foreach": partial(adam, foreach=True),
    "Adam without foreach": partial(adam, foreach=False),
    "Adam with fused": partial(adam, fused=True, amsgrad=True),
    "AdamW": adamw,
    "AdamW with amsgrad": partial(adamw, amsgrad=True, weight_decay=1),
    "AdamW with fused": partial(adamw, fused=True, maximize=True),
    "Adamax": partial(optim.Adamax, lr=0.01, eps=EPS, weight_decay=0.1),
    "NAdam": partial(nadam, weight_decay=0.1),
    "NAdam with decoupled decay": partial(nadam, weight_decay=0.1, decoupled_weight_decay=True, foreach=True),
    "RAdam": partial(optim.RAdam, lr=0.01, eps=EPS),  # its rule changes after some steps
    "RMSprop": partial(optim.RMSprop, lr=0.01, eps=EPS, centered=True, momentum=0.9),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "Adagrad": partial(optim.Adagrad, lr=0.1, lr_decay=0.1, eps=EPS),
    "Adagrad with fused": partial(optim.Adagrad, lr=0.1, eps=EPS, fused=True),
    "Adadelta": partial(optim.Adadelta, lr=0.5, rho=0.8, weight_decay=0.1, eps=EPS),
    "ASGD": partial(optim.ASGD, lr=0.05, t0=2),  # averages weights from the third step on
    "Adafactor": partial(optim.Adafactor, lr=0.01),  # keeps rows and columns of second moments
}
for number, (name, make) in enumerate(OPTIMIZERS.items()):
    add(name, by=make, count=1 + number % 3)


def _with_tensor_rate(make: Make) -> Training:
    rate = torch.tensor(0.05)
    return train(by=partial(make, lr=rate), before=lambda _, number: rate.fill_(0.05 / (1 + number)), count=1)


for name, make in (("SGD", momentum), ("AdamW", fast), ("Adam with fused", partial(adam, fused=True))):
    says = "Its learning rate is a tensor, which is written to between steps."
    add(f"{name} with a tensor for a rate", says, partial(_with_tensor_rate, make))


def _without_biases() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))


add("muon", model=_without_biases, by=partial(optim.Muon, lr=0.01), count=1)
add("lbfgs", by=optim.LBFGS, count=1, **refused("LBFGS.step needs closure", ApolloError))


class Both:
    """Two optimizers in one, which is none of torch's."""

    def __init__(self, *optimizers: optim.Optimizer) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def state_dict(self) -> Mapping[str, Any]:
        return {str(number): each.state_dict() for number, each in enumerate(self.optimizers)}


@case(**loop("loop"))
def sparse_adam() -> Training:
    """Gradients of an embedding are sparse, and there is one optimizer for it and one for the rest."""
    model = Texts(embedding=nn.Embedding(WORDS, 8, sparse=True))
    dense = [parameter for name, parameter in model.named_parameters() if "embedding" not in name]
    both = Both(optim.SparseAdam(model.embedding.parameters(), eps=EPS), sgd(dense))
    return train(model, word_entropy, batch=words, by=both, count=1)


both = {"by": lambda model: Both(sgd(model[0].parameters()), fast(model[2].parameters()))}
add("two optimizers in one", params=lambda model: model, **both)


class SignSGD(optim.Optimizer):
    """Goes a step of one size along each axis, unless a gradient is small."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.clamp(-1e-2, 1e-2).mul(100).round(), alpha=-group["lr"])
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1


class Centered(optim.SGD):
    """Subtracts the mean of every gradient, in place."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.sub_(parameter.grad.mean())
        return super().step(closure)


class Unchanged(optim.AdamW):
    """AdamW by another name."""


class Kept(optim.AdamW):
    """AdamW that keeps the tensors of gradients."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)


class Lookahead:
    """Goes back halfway to where it was, every third step."""

    def __init__(self, params: Iterable[Any]) -> None:
        self.optimizer, self.count = sgd(params), 0
        self.slow = {p: p.detach().clone() for group in self.optimizer.param_groups for p in group["params"]}

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % 3 == 0:
            for parameter, slow in self.slow.items():
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)

    def state_dict(self) -> Mapping[str, Any]:
        return {"fast": self.optimizer.state_dict(), "slow": list(self.slow.values())}


add("an optimizer of the user", "It steps after the program.", by=partial(SignSGD, lr=0.001), count=2)
add("an optimizer that writes to gradients", by=partial(Centered, lr=0.1, momentum=0.9), count=2)
add("an optimizer that inherits everything", by=partial(Unchanged, eps=EPS), count=1)
add("gradients stay zeros", "Weights decay without gradients then.", by=partial(Kept, eps=EPS), count=2)
add("lookahead", "A wrapper that is no optimizer of torch.", by=Lookahead, count=1)
add("a differentiable optimizer", by=partial(sgd, differentiable=True), count=2, **RAISES)
add("a capturable optimizer on the host", by=partial(optim.Adam, capturable=True), count=2, **RAISES)

# ---------------------------------------------------------------------------------------------------------- groups


def _groups_of_three(model: nn.Sequential) -> list[dict[str, Any]]:
    return [
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0},
        {"params": [model[2].weight], "lr": 0.1, "amsgrad": True},
        {"params": [model[0].weight], "betas": (0.5, 0.9)},
    ]


def _groups_by_layer(model: nn.Sequential, **settings: Any) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters()}, {"params": model[2].parameters(), **settings}]


def _groups_of_two_models(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": model.parameters()}, {"params": nn.Linear(2, 2).parameters()}]


def _add_group(training: Training) -> None:
    training.optimizer.add_param_group({"params": list(training.model[2].parameters()), "lr": 0.01})


def _drop_group(training: Training) -> None:
    for parameter in training.optimizer.param_groups.pop(1)["params"]:
        del training.optimizer.state[parameter]
    training.model[2].zero_grad()


def _move_parameter(training: Training) -> None:
    first, second = training.optimizer.param_groups
    second["params"].append(first["params"].pop())


def _leave_gradients(training: Training, number: int) -> None:
    training.optimizer.param_groups[1]["params"][0].grad = torch.full((2, 2), 1.0 + number)


add("groups with settings of their own", by=adamw, params=_groups_of_three, clip=1.0)
add("a group that comes later", params=lambda model: model[0].parameters(), change=_add_group)
add("a group that goes", by=fast, params=_groups_by_layer, change=_drop_group, count=1)
moving = {"by": partial(momentum, lr=0.05), "params": partial(_groups_by_layer, lr=0.2, momentum=0.5), "count": 3}
add("a parameter moves to another group", change=_move_parameter, **moving)
add("parameters without an optimizer", by=fast, params=lambda model: model[2].parameters(), count=1)
others = {"params": _groups_of_two_models, "watched": lambda t: t.optimizer.param_groups[1]["params"]}
add("parameters of another model", before=_leave_gradients, count=1, **others)

# ------------------------------------------------------------------------------------------------------- schedulers


rates = optim.lr_scheduler


def _scheduled(make: Make, optimizer: Make) -> Training:
    model = chain()
    own = optimizer(model.parameters())
    scheduler = make(own)
    return train(
        model, by=own, before=lambda _, number: number and scheduler.step(), watched=lambda _: scheduler.get_last_lr()
    )


def _warm_up(own: optim.Optimizer) -> Any:
    both = [rates.LinearLR(own, total_iters=4), rates.CosineAnnealingLR(own, T_max=10)]
    return rates.SequentialLR(own, both, milestones=[4])


for name, scheduler, make in (
    ("a rate that decays", partial(rates.ExponentialLR, gamma=0.7), partial(optim.AdamW, lr=0.1, eps=EPS)),
    ("a cycle of rate and momentum", partial(rates.OneCycleLR, max_lr=0.1, total_steps=60), momentum),
    ("a rate that is zero at times", partial(rates.LambdaLR, lr_lambda=lambda epoch: epoch % 3), adam),
    ("a warm-up before a cosine", _warm_up, partial(momentum, nesterov=True)),
):
    add(name, make=partial(_scheduled, scheduler, make))


def _set_by_hand(training: Training, number: int) -> None:
    settings = {"weight_decay": 0.1 * number, "betas": (0.9 - 0.01 * number, 0.99), "amsgrad": False}
    training.optimizer.param_groups[0].update(settings)


add("settings changed by hand", by=adamw, before=_set_by_hand, count=1)

# ------------------------------------------------------------------------------------------------- state and hooks


def _keep_and_load(training: Training, number: int) -> None:
    if number == CHANGE - 3:
        training.notes.append(copy.deepcopy(training.optimizer.state_dict()))
    if number == CHANGE:
        training.optimizer.load_state_dict(training.notes[0])


def _scale_state(training: Training, number: int) -> None:
    for state in training.optimizer.state.values():
        state["momentum_buffer"].mul_(0.5 if number % 2 else 1.5)


add("state of the optimizer is loaded", by=adamw, before=_keep_and_load)
add("state of the optimizer is cleared", by=adam, change=lambda t: t.optimizer.state.clear(), count=1)
add("state of the optimizer is scaled", "In place, by the user.", before=_scale_state, count=1)


@case()
def state_of_two_parameters_is_one_tensor() -> Training:
    """Two momenta share memory, so the order of updates matters."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    optimizer, shared = momentum(model.parameters()), torch.zeros(6, 6)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = shared
    return train(model, lambda m, batch: m(batch["x"]).square().mean(), by=optimizer, count=1)


@case(**EITHER, reason="hooks")
def hooks_on_the_step_of_an_optimizer() -> Training:
    """They come, see all gradients, and go."""
    seen: list[Any] = []

    def note(optimizer: optim.Optimizer, *_: Any) -> None:
        seen.append([parameter.grad.clone() for parameter in optimizer.param_groups[0]["params"]])

    def hook(training: Training, number: int) -> None:
        if number == 4:
            training.notes.append(training.optimizer.register_step_pre_hook(note))
        if number == CHANGE:
            training.notes[0].remove()

    return train(by=sgd, before=hook, watched=lambda _: seen)


@case(**loop("hooks"))
def hooks_on_all_optimizers() -> Training:
    """Of the process, from the beginning; they count steps of this one."""
    model = chain()
    optimizer = fast(model.parameters())
    count: list[int] = []

    @contextmanager
    def around() -> Iterator[None]:
        handle = register_optimizer_step_post_hook(lambda stepped, *_: stepped is optimizer and count.append(1))
        yield
        handle.remove()

    return train(model, by=optimizer, around=around, watched=lambda _: count, count=1)


@case(**EITHER, reason="replaced")
def the_step_of_an_optimizer_is_replaced() -> Training:
    """On the object, by one that skips every other step."""
    model, count = chain(), [0]
    optimizer = sgd(model.parameters())
    own = optimizer.step

    def skip(closure: Any = None) -> Any:
        count[0] += 1
        return own(closure) if count[0] % 2 else None

    replace = lambda _: setattr(optimizer, "step", skip)  # noqa: E731
    return train(model, by=optimizer, change=replace, watched=lambda _: count, count=1)


@case()
def an_average_of_weights() -> Training:
    """Another model follows after every step."""
    model = chain()
    average = optim.swa_utils.AveragedModel(model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9))
    following = {"before": lambda *_: average.update_parameters(model), "watched": lambda _: [*average.parameters()]}
    return train(model, by=sgd, count=1, **following)
