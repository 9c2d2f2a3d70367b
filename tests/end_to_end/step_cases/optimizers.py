"""Cases by optimizer: every class of torch with its settings, others, and what is done with them between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.end_to_end.step_cases.cases import CHANGE, End, Training, add_case, case
from tests.end_to_end.step_cases.models import WORDS, Texts, chain, word_entropy, words

EPS = 1e-3
"""With the default epsilon, gradients that are zero but for rounding become full steps in a random direction."""

Make = Callable[[Iterable[Any]], optim.Optimizer]

SETTINGS: Mapping[str, tuple[str, Make]] = {
    "SGD": ("Plain.", partial(optim.SGD, lr=0.1)),
    "SGD with momentum": ("A buffer for every parameter.", partial(optim.SGD, lr=0.1, momentum=0.9)),
    "SGD with Nesterov": (
        "Momentum looks ahead, and weights decay.",
        partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "SGD with dampening": ("The first step differs.", partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)),
    "SGD that maximizes": (
        "Gradients change their sign.",
        partial(optim.SGD, lr=0.01, maximize=True, weight_decay=0.1),
    ),
    "SGD with foreach": ("Lists of parameters.", partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True)),
    "SGD without foreach": ("Operator by operator.", partial(optim.SGD, lr=0.1, momentum=0.9, foreach=False)),
    "SGD with fused": ("One kernel.", partial(optim.SGD, lr=0.1, momentum=0.9, fused=True)),
    "Adam": ("Both moments.", partial(optim.Adam, lr=0.01, eps=EPS)),
    "Adam with amsgrad": ("The largest second moment.", partial(optim.Adam, lr=0.01, eps=EPS, amsgrad=True)),
    "Adam that maximizes": (
        "With a decay that is part of the gradient.",
        partial(optim.Adam, lr=0.01, eps=EPS, maximize=True, weight_decay=0.1),
    ),
    "Adam with foreach": ("Lists of parameters.", partial(optim.Adam, lr=0.01, eps=EPS, foreach=True)),
    "Adam without foreach": ("Operator by operator.", partial(optim.Adam, lr=0.01, eps=EPS, foreach=False)),
    "Adam with fused": ("One kernel, with amsgrad.", partial(optim.Adam, lr=0.01, eps=EPS, fused=True, amsgrad=True)),
    "AdamW": ("Weights decay by themselves.", partial(optim.AdamW, lr=0.01, eps=EPS)),
    "AdamW with amsgrad": ("With a large decay.", partial(optim.AdamW, lr=0.01, eps=EPS, amsgrad=True, weight_decay=1)),
    "AdamW with fused": (
        "One kernel that maximizes.",
        partial(optim.AdamW, lr=0.01, eps=EPS, fused=True, maximize=True),
    ),
    "Adamax": ("An infinity norm.", partial(optim.Adamax, lr=0.01, eps=EPS, weight_decay=0.1)),
    "NAdam": ("A product of momenta.", partial(optim.NAdam, lr=0.01, eps=EPS, weight_decay=0.1)),
    "NAdam with decoupled decay": (
        "And with foreach.",
        partial(optim.NAdam, lr=0.01, eps=EPS, weight_decay=0.1, decoupled_weight_decay=True, foreach=True),
    ),
    "RAdam": ("Its rule changes after some steps.", partial(optim.RAdam, lr=0.01, eps=EPS)),
    "RMSprop": ("Centered, with momentum.", partial(optim.RMSprop, lr=0.01, eps=EPS, centered=True, momentum=0.9)),
    "Rprop": ("Sizes of steps by signs of gradients.", partial(optim.Rprop, lr=0.01)),
    "Adagrad": ("The rate decays.", partial(optim.Adagrad, lr=0.1, lr_decay=0.1, eps=EPS)),
    "Adagrad with fused": ("One kernel, with a first sum.", partial(optim.Adagrad, lr=0.1, eps=EPS, fused=True)),
    "Adadelta": ("Two averages.", partial(optim.Adadelta, lr=0.5, rho=0.8, weight_decay=0.1, eps=EPS)),
    "ASGD": ("An average of weights from the third step on.", partial(optim.ASGD, lr=0.05, t0=2)),
    "Adafactor": ("Rows and columns of second moments; steps afterwards.", partial(optim.Adafactor, lr=0.01)),
}


def with_optimizer(make: Make, microbatches: int) -> Training:
    """Return a chain that is trained by an optimizer."""
    model = chain()
    return Training(model=model, optimizer=make(model.parameters()), microbatches=microbatches)


for number, (name, (says, make)) in enumerate(SETTINGS.items()):
    add_case(name, says, partial(with_optimizer, make, 1 + number % 3))


def add_tensor_rates() -> None:
    """Add optimizers whose learning rate is a tensor, which is written to between steps."""

    def make_training(make: Callable[..., optim.Optimizer]) -> Training:
        model, rate = chain(), torch.tensor(0.05)
        optimizer = make(model.parameters(), lr=rate)
        return Training(model=model, optimizer=optimizer, before=lambda number: rate.fill_(0.05 / (1 + number)))

    for make in (
        partial(optim.SGD, momentum=0.9),
        partial(optim.AdamW, eps=EPS),
        partial(optim.Adam, fused=True, eps=EPS),
    ):
        fused = " with fused" if "fused" in make.keywords else ""
        says = "Its learning rate is a tensor, which is written to between steps."
        add_case(f"{make.func.__name__}{fused} with a tensor for a rate", says, partial(make_training, make))


add_tensor_rates()


@case()
def muon() -> Training:
    """It orthogonalizes matrices, and takes nothing else."""
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
    return Training(model=model, optimizer=optim.Muon(model.parameters(), lr=0.01))


@case(end=End.REFUSED, reason="LBFGS.step needs closure")
def lbfgs() -> Training:
    """It needs a function that computes the loss again."""
    model = chain()
    return Training(model=model, optimizer=optim.LBFGS(model.parameters()))


@case(end=End.LOOP, reason="loop")
def sparse_adam() -> Training:
    """Gradients of an embedding are sparse, and there is one optimizer for it and one for the rest."""
    model = Texts(embedding=nn.Embedding(WORDS, 8, sparse=True))
    dense = [parameter for name, parameter in model.named_parameters() if "embedding" not in name]
    both = Both(optim.SparseAdam(model.embedding.parameters(), eps=EPS), optim.SGD(dense, lr=0.1))
    return Training(model=model, loss_fn=word_entropy, batch=words, optimizer=both)


class Both:
    """Two optimizers in one, which is none of torch's."""

    def __init__(self, *optimizers: optim.Optimizer) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        """Clear gradients of both."""
        for each in self.optimizers:
            each.zero_grad()

    def step(self) -> None:
        """Step both."""
        for each in self.optimizers:
            each.step()

    def state_dict(self) -> Mapping[str, Any]:
        """Return the states of both."""
        return {str(number): each.state_dict() for number, each in enumerate(self.optimizers)}


@case()
def two_optimizers_in_one() -> Training:
    """Each has some of the parameters."""
    model = chain()
    both = Both(optim.SGD(model[0].parameters(), lr=0.1), optim.AdamW(model[2].parameters(), eps=EPS))
    return Training(model=model, optimizer=both, microbatches=2)


class SignSGD(optim.Optimizer):
    """Goes a step of one size along each axis, unless a gradient is small."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step, and count it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.clamp(-1e-2, 1e-2).mul(100).round(), alpha=-group["lr"])
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1


@case()
def an_optimizer_of_the_user() -> Training:
    """It steps after the program."""
    model = chain()
    return Training(model=model, optimizer=SignSGD(model.parameters(), lr=1e-3), microbatches=2)


class Centered(optim.SGD):
    """Subtracts the mean of every gradient, in place."""

    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.sub_(parameter.grad.mean())
        return super().step(closure)


@case()
def an_optimizer_that_writes_to_gradients() -> Training:
    """A class that inherits from SGD, with a step that does more."""
    model = chain()
    return Training(model=model, optimizer=Centered(model.parameters(), lr=0.1, momentum=0.9), microbatches=2)


class Unchanged(optim.AdamW):
    """AdamW by another name."""


@case()
def an_optimizer_that_inherits_everything() -> Training:
    """Nobody knows what a subclass does with several parameters."""
    model = chain()
    return Training(model=model, optimizer=Unchanged(model.parameters(), eps=EPS))


class Lookahead:
    """Goes back halfway to where it was, every third step."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0
        self.slow = {p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]}

    def zero_grad(self) -> None:
        """Clear gradients."""
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """Take a step, and maybe go back."""
        self.optimizer.step()
        self.count += 1
        if self.count % 3 == 0:
            for parameter, slow in self.slow.items():
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of what it wraps, and slow weights."""
        return {"fast": self.optimizer.state_dict(), "slow": list(self.slow.values())}


@case()
def lookahead() -> Training:
    """A wrapper that is no optimizer of torch."""
    model = chain()
    return Training(model=model, optimizer=Lookahead(optim.SGD(model.parameters(), lr=0.1)))


def _raising(make: Callable[..., optim.Optimizer], **settings: Any) -> Training:
    model = chain()
    return Training(model=model, optimizer=make(model.parameters(), **settings), microbatches=2)


add_case(
    "a differentiable optimizer",
    "Its step writes to leaves that need gradients, and raises in every step, in eager too.",
    partial(_raising, optim.SGD, lr=0.1, differentiable=True),
    end=End.RAISES,
)
add_case(
    "a capturable optimizer on the host",
    "It raises in every step, in eager too.",
    partial(_raising, optim.Adam, capturable=True),
    end=End.RAISES,
)

# ---------------------------------------------------------------------------------------------------------- groups


@case()
def groups_with_settings_of_their_own() -> Training:
    """Biases do not decay, the head is faster, and one group maximizes."""
    model = chain()
    biases = [parameter for name, parameter in model.named_parameters() if "bias" in name]
    groups = [
        {"params": biases, "weight_decay": 0.0},
        {"params": [model[2].weight], "lr": 0.1, "amsgrad": True},
        {"params": [model[0].weight], "betas": (0.5, 0.9)},
    ]
    return Training(model=model, optimizer=optim.AdamW(groups, lr=0.01, eps=EPS), microbatches=2, clip_grad_norm=1.0)


@case()
def a_group_that_comes_later() -> Training:
    """As where the layers of a model are thawed one after the other."""
    model = chain()
    optimizer = optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)

    def add(number: int) -> None:
        if number == CHANGE:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})

    return Training(model=model, optimizer=optimizer, before=add, microbatches=2)


@case()
def a_group_that_goes() -> Training:
    """The user edits the list of groups."""
    model = chain()
    optimizer = optim.AdamW([{"params": each.parameters()} for each in (model[0], model[2])], eps=EPS)

    def drop(number: int) -> None:
        if number == CHANGE:
            for parameter in optimizer.param_groups.pop(1)["params"]:
                del optimizer.state[parameter]
            model[2].zero_grad()

    return Training(model=model, optimizer=optimizer, before=drop)


@case()
def a_parameter_moves_to_another_group() -> Training:
    """And takes its state with it."""
    model = chain()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.2, "momentum": 0.5}]
    optimizer = optim.SGD(groups, lr=0.05, momentum=0.9)

    def move(number: int) -> None:
        if number == CHANGE:
            optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())

    return Training(model=model, optimizer=optimizer, before=move, microbatches=3)


@case()
def parameters_without_an_optimizer() -> Training:
    """Their gradients stay, and are added up, since `zero_grad` does not know them."""
    model = chain()
    return Training(model=model, optimizer=optim.AdamW(model[2].parameters(), eps=EPS))


@case()
def parameters_of_another_model() -> Training:
    """The optimizer steps those too, by gradients that somebody left there."""
    model, other = chain(), nn.Linear(2, 2)
    optimizer = optim.SGD([*model.parameters(), *other.parameters()], lr=0.1, momentum=0.9)

    def leave_gradients(number: int) -> None:
        def fill(*_: Any) -> None:
            other.weight.grad = torch.full((2, 2), 1.0 + number)

        fill()

    return Training(model=model, optimizer=optimizer, before=leave_gradients, watched=lambda: list(other.parameters()))


# ------------------------------------------------------------------------------------------------------- schedulers


def _scheduled(make: Callable[[optim.Optimizer], Any], optimizer: Make) -> Training:
    model = chain()
    own = optimizer(model.parameters())
    scheduler = make(own)

    def advance(number: int) -> None:
        if number:
            scheduler.step()

    return Training(model=model, optimizer=own, before=advance, microbatches=2, watched=scheduler.get_last_lr)


SCHEDULERS: Mapping[str, tuple[str, Callable[[optim.Optimizer], Any], Make]] = {
    "a rate that decays": (
        "The scheduler replaces the optimizer's step by one that counts.",
        partial(optim.lr_scheduler.ExponentialLR, gamma=0.7),
        partial(optim.AdamW, lr=0.1, eps=EPS),
    ),
    "a cycle of rate and momentum": (
        "Momentum is another number in every step.",
        partial(optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=60),
        partial(optim.SGD, lr=0.1, momentum=0.9),
    ),
    "a rate that is zero at times": (
        "Weights stay, while moments go on.",
        partial(optim.lr_scheduler.LambdaLR, lr_lambda=lambda epoch: epoch % 3),
        partial(optim.Adam, lr=0.01, eps=EPS),
    ),
    "a warm-up before a cosine": (
        "One scheduler after the other.",
        lambda optimizer: optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                optim.lr_scheduler.LinearLR(optimizer, total_iters=4),
                optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
            ],
            milestones=[4],
        ),
        partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    ),
}

for name, (says, scheduler, make) in SCHEDULERS.items():
    add_case(name, says, partial(_scheduled, scheduler, make))


@case()
def settings_changed_by_hand() -> Training:
    """Weight decay and betas are other numbers in every step."""
    model = chain()
    optimizer = optim.AdamW(model.parameters(), lr=0.01, eps=EPS)

    def change(number: int) -> None:
        optimizer.param_groups[0].update(weight_decay=0.1 * number, betas=(0.9 - 0.01 * number, 0.99), amsgrad=False)

    return Training(model=model, optimizer=optimizer, before=change)


# ------------------------------------------------------------------------------------------------- state and hooks


@case()
def state_of_the_optimizer_is_loaded() -> Training:
    """From a checkpoint of some steps before."""
    model = chain()
    optimizer = optim.AdamW(model.parameters(), lr=0.01, eps=EPS)
    kept: list[Any] = []

    def load(number: int) -> None:
        if number == CHANGE - 3:
            kept.append(copy.deepcopy(optimizer.state_dict()))
        if number == CHANGE:
            optimizer.load_state_dict(kept[0])

    return Training(model=model, optimizer=optimizer, before=load, microbatches=2)


@case()
def state_of_the_optimizer_is_cleared() -> Training:
    """Moments begin again at zero."""
    model = chain()
    optimizer = optim.Adam(model.parameters(), lr=0.01, eps=EPS)
    return Training(
        model=model, optimizer=optimizer, before=lambda number: number == CHANGE and optimizer.state.clear()
    )


@case()
def state_of_the_optimizer_is_scaled() -> Training:
    """In place, by the user."""
    model = chain()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def scale(number: int) -> None:
        for state in optimizer.state.values():
            state["momentum_buffer"].mul_(0.5 if number % 2 else 1.5)

    return Training(model=model, optimizer=optimizer, before=scale)


@case()
def state_of_two_parameters_is_one_tensor() -> Training:
    """Two momenta share memory, so the order of updates matters."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))
    model[2].weight = nn.Parameter(torch.randn(6, 6))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shared = torch.zeros(6, 6)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = shared

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"]).square().mean()

    return Training(model=model, loss_fn=loss_fn, optimizer=optimizer)


@case(end=End.EITHER, reason="hooks")
def hooks_on_the_step_of_an_optimizer() -> Training:
    """They come, see all gradients, and go."""
    model = chain()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    handles: list[Any] = []

    def note(optimizer: optim.Optimizer, *_: Any) -> None:
        seen.append([parameter.grad.clone() for parameter in optimizer.param_groups[0]["params"]])

    def hook(number: int) -> None:
        if number == 4:
            handles.append(optimizer.register_step_pre_hook(note))
        if number == CHANGE:
            handles[0].remove()

    return Training(model=model, optimizer=optimizer, before=hook, watched=lambda: seen, microbatches=2)


@case(end=End.LOOP, reason="hooks")
def hooks_on_all_optimizers() -> Training:
    """Of the process, from the beginning; they count steps of this one."""
    model = chain()
    optimizer = optim.AdamW(model.parameters(), eps=EPS)
    count: list[int] = []

    class Around:
        def __enter__(self) -> None:
            self.handle = register_optimizer_step_post_hook(
                lambda stepped, *_: count.append(1) if stepped is optimizer else None
            )

        def __exit__(self, *_: Any) -> None:
            self.handle.remove()

    return Training(model=model, optimizer=optimizer, around=Around, watched=lambda: count)


@case(end=End.EITHER, reason="replaced")
def the_step_of_an_optimizer_is_replaced() -> Training:
    """On the object, by one that skips every other step."""
    model = chain()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    own, count = optimizer.step, [0]

    def skip(closure: Any = None) -> Any:
        count[0] += 1
        return own(closure) if count[0] % 2 else None

    def replace(number: int) -> None:
        if number == CHANGE:
            optimizer.step = skip  # type: ignore[method-assign]

    return Training(model=model, optimizer=optimizer, before=replace, watched=lambda: count)


@case()
def gradients_stay_zeros() -> Training:
    """`zero_grad` keeps tensors, and weights decay without gradients."""
    model = chain()

    class Kept(optim.AdamW):
        def zero_grad(self, set_to_none: bool = False) -> None:
            super().zero_grad(set_to_none=False)

    return Training(model=model, optimizer=Kept(model.parameters(), eps=EPS), microbatches=2)


@case()
def an_average_of_weights() -> Training:
    """Another model follows after every step."""
    model = chain()
    average = optim.swa_utils.AveragedModel(model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9))
    return Training(
        model=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        before=lambda number: average.update_parameters(model),
        watched=lambda: list(average.parameters()),
    )
