"""Learners of reinforcement learning, in plain torch: several training steps in one function, then the targets.

    build_learner(name, size) -> Learner        networks, a batch, and the phases of an update
    Update(learner, make_step)                  takes one update per call, with steps as `make_step` makes them
    make_loop(model, loss_fn, optimizer, ...)   such a step as users write it, in eager or with a compiled loss

| name    | phases                      | side by side                                     |
| ------- | --------------------------- | ------------------------------------------------ |
| sac     | critics, actor, temperature | two critics and their targets                    |
| redq    | the same                    | ten critics and their targets                    |
| dreamer | world model, actor, critic  | decoder, reward, end and prior behind the model  |

All random numbers are in the batch, so that an update can be repeated.

Sources: Haarnoja et al., "Soft actor-critic algorithms and applications", 2018, https://arxiv.org/abs/1812.05905;
Chen et al., "Randomized ensembled double Q-learning", ICLR 2021, https://arxiv.org/abs/2101.05982;
Hafner et al., "Mastering diverse domains through world models", 2023, https://arxiv.org/abs/2301.04104
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

Batch = Mapping[str, Tensor]
LossFunction = Callable[[nn.Module, Batch], Tensor]
Draw = Callable[..., Tensor]
"""Draws normal numbers of a shape."""
MakeStep = Callable[[nn.Module, LossFunction, torch.optim.Optimizer], Callable[[Batch], Tensor]]

DISCOUNT = 0.99
EPS = 1e-3
"""Of Adam: by default it turns gradients that are zero but for rounding into full steps in a random direction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One of the training steps of an update."""

    name: str
    loss_fn: LossFunction
    trained: str
    """A module or a parameter of the model."""
    every: int = 1
    """It is taken in the first of so many updates."""
    rate: float = 3e-4
    fused: bool | None = True
    """Whether Adam has the fused kernel; None leaves that to torch."""

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return Adam over what is trained."""
        parameters = [p for name, p in model.named_parameters() if name.split(".")[0] == self.trained]
        return torch.optim.Adam(parameters, lr=self.rate, eps=EPS, fused=self.fused)


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """All networks in one module, a batch, the phases of an update in order, and targets that follow networks."""

    name: str
    model: nn.Module
    batch: Batch
    phases: tuple[Phase, ...]
    targets: tuple[str, str]
    """The module that follows, and the one that it follows."""
    rate: float
    """How far, in every update."""


class Update:
    """Takes the phases of a learner and moves its targets; returns the losses by the names of phases."""

    def __init__(self, learner: Learner, make_step: MakeStep) -> None:
        model, self.phases, self.rate = learner.model, learner.phases, learner.rate
        self.optimizers = [phase.make_optimizer(model) for phase in self.phases]
        self.steps = [
            make_step(model, phase.loss_fn, optimizer)
            for phase, optimizer in zip(self.phases, self.optimizers, strict=True)
        ]
        self.targets, self.followed = (list(model.get_submodule(name).parameters()) for name in learner.targets)
        self.count = 0
        """Updates that were taken."""

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Take one update."""
        losses = {}
        for phase, step in zip(self.phases, self.steps, strict=True):
            if self.count % phase.every == 0:
                losses[phase.name] = step(batch)
        with torch.no_grad():
            torch._foreach_lerp_(self.targets, self.followed, self.rate)
        self.count += 1
        return losses


def make_loop(
    model: nn.Module, loss_fn: LossFunction, optimizer: torch.optim.Optimizer, **compiled: Any
) -> Callable[[Batch], Tensor]:
    """Return a step as users write it; with arguments for `torch.compile` the loss is compiled."""
    compute = torch.compile(loss_fn, **compiled) if compiled else loss_fn

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = compute(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# ----------------------------------------------------------------------------------------------- actors and critics


def _mlp(given: int, width: int, made: int, *, is_normed: bool = False) -> nn.Sequential:
    """Return two hidden layers and a last one."""
    layers: list[nn.Module] = []
    for size in (given, width):
        layers += [nn.Linear(size, width), *([nn.LayerNorm(width), nn.SiLU()] if is_normed else [nn.ReLU()])]
    return nn.Sequential(*layers, nn.Linear(width, made))


class SoftActorCritic(nn.Module):
    """An actor, critics and their targets, and the temperature."""

    def __init__(self, *, state: int, action: int, width: int, critics: int) -> None:
        super().__init__()
        self.actor = _mlp(state, width, 2 * action)
        self.critics = nn.ModuleList(_mlp(state + action, width, 1) for _ in range(critics))
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = nn.Parameter(torch.zeros(()))


def _act(actor: nn.Module, state: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return actions before they are squashed, and the logarithm of the density of squashed ones."""
    mean, log_std = actor(state).chunk(2, dim=-1)
    log_std = log_std.clamp(-5, 2)
    raw = mean + log_std.exp() * noise
    squashed = 2 * (math.log(2) - raw - functional.softplus(-2 * raw))
    return raw, (-0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - squashed).sum(-1)


def _critic_loss(model: Any, batch: Batch) -> Tensor:
    """Return the errors of all critics; what they should say is the least value of the chosen targets."""
    with torch.no_grad():
        raw, log_density = _act(model.actor, batch["next_state"], batch["next_noise"])
        following = torch.cat([batch["next_state"], raw.tanh()], dim=-1)
        values = torch.stack([target(following).squeeze(-1) for target in model.targets])
        least = torch.where(batch["chosen"][:, None], values, torch.inf).amin(0)
        soft = least - model.log_temperature.exp() * log_density
        wanted = batch["reward"] + DISCOUNT * (1 - batch["done"]) * soft
    given = torch.cat([batch["state"], batch["action"]], dim=-1)
    return torch.stack([functional.mse_loss(critic(given).squeeze(-1), wanted) for critic in model.critics]).sum()


def _actor_loss(model: Any, batch: Batch) -> Tensor:
    """Return the loss of the actor's actions, whose value is the least of two critics, or the mean of more."""
    raw, log_density = _act(model.actor, batch["state"], batch["noise"])
    given = torch.cat([batch["state"], raw.tanh()], dim=-1)
    values = torch.stack([_call_frozen(critic, given).squeeze(-1) for critic in model.critics])
    value = values.mean(0) if len(values) > 2 else values.amin(0)
    return (model.log_temperature.exp().detach() * log_density - value).mean()


def _call_frozen(module: nn.Module, x: Tensor) -> Tensor:
    """Call a module whose parameters get no gradients."""
    return torch.func.functional_call(module, {name: p.detach() for name, p in module.named_parameters()}, (x,))


def _temperature_loss(model: Any, batch: Batch) -> Tensor:
    """Return how far the actor is from the wanted entropy, minus one per action."""
    with torch.no_grad():
        _, log_density = _act(model.actor, batch["state"], batch["noise"])
    return -(model.log_temperature.exp() * (log_density - batch["action"].shape[-1])).mean()


def _soft_actor_critic(
    name: str, draw: Draw, *, batch: int, state: int, action: int, width: int, critics: int, every: int
) -> Learner:
    shapes = {"state": state, "action": action, "next_state": state, "noise": action, "next_noise": action}
    inputs = {key: draw(batch, size) for key, size in shapes.items()}
    inputs |= {"action": inputs["action"].tanh(), "reward": draw(batch), "done": (draw(batch) > 2).float()}
    return Learner(
        name=name,
        model=SoftActorCritic(state=state, action=action, width=width, critics=critics),
        batch={**inputs, "chosen": torch.arange(critics) < 2},
        phases=(
            Phase(name="critics", loss_fn=_critic_loss, trained="critics"),
            Phase(name="actor", loss_fn=_actor_loss, trained="actor", every=every),
            Phase(name="temperature", loss_fn=_temperature_loss, trained="log_temperature", every=every),
        ),
        targets=("targets", "critics"),
        rate=0.005,
    )


# --------------------------------------------------------------------------------------------------- a world model


class WorldModel(nn.Module):
    """Pictures are encoded, a recurrent state is unrolled over time, and heads tell pictures, rewards and ends."""

    def __init__(
        self, *, rows: int, picture: int, depth: int, deter: int, hidden: int, groups: int, classes: int, actions: int
    ) -> None:
        super().__init__()
        self.classes, self.deter, self.stoch = classes, deter, groups * classes
        self.width = deter + self.stoch
        """Of a state: what is remembered, and what was drawn."""
        sizes = [depth * 2**level for level in range(4)]
        edge = picture // 16
        encoder: list[nn.Module] = []
        decoder: list[nn.Module] = []
        for given, made in zip((3, *sizes), sizes, strict=False):
            encoder += [nn.Conv2d(given, made, 4, 2, 1), nn.GroupNorm(1, made), nn.SiLU()]
            decoder = [nn.SiLU(), nn.ConvTranspose2d(made, given, 4, 2, 1), *decoder]
        self.encoder = nn.Sequential(*encoder, nn.Flatten())
        flat = sizes[-1] * edge**2
        self.decoder = nn.Sequential(nn.Linear(self.width, flat), nn.Unflatten(1, (sizes[-1], edge, edge)), *decoder)
        self.before = nn.Sequential(nn.Linear(self.stoch + actions, hidden), nn.LayerNorm(hidden), nn.SiLU())
        self.gates = nn.Sequential(nn.Linear(hidden + deter, 3 * deter), nn.LayerNorm(3 * deter))
        self.prior = _mlp(deter, hidden, self.stoch, is_normed=True)
        self.posterior = _mlp(deter + flat, hidden, self.stoch, is_normed=True)
        self.reward, self.goes_on = (_mlp(self.width, hidden, 1, is_normed=True) for _ in range(2))
        self.register_buffer("states", torch.zeros(rows, self.width))
        """All states of the latest batch, from which an actor goes on."""

    def forward(self, pictures: Tensor, actions: Tensor, rewards: Tensor, goes_on: Tensor, gumbel: Tensor) -> Tensor:
        """Return the loss of a batch, of (samples, steps, ...)."""
        seen = self.encoder(pictures.flatten(0, 1)).unflatten(0, pictures.shape[:2])
        state = seen.new_zeros(len(seen), self.width)
        states, posteriors = [], []
        for step in range(seen.shape[1]):
            deter = self.remember(state, actions[:, step])
            posteriors.append(self._probabilities(self.posterior(torch.cat([deter, seen[:, step]], dim=-1))))
            state = torch.cat([deter, self._draw(posteriors[-1], gumbel[:, step])], dim=-1)
            states.append(state)
        found, after = torch.stack(states, dim=1).flatten(0, 1), torch.stack(posteriors, dim=1).flatten(0, 1)
        before = self._probabilities(self.prior(found[:, : self.deter]))
        self.states.copy_(found.detach())
        picture = (self.decoder(found) - pictures.flatten(0, 1)).square().sum((1, 2, 3)).mean()
        reward = functional.mse_loss(self.reward(found).squeeze(-1), rewards.flatten())
        end = functional.binary_cross_entropy_with_logits(self.goes_on(found).squeeze(-1), goes_on.flatten())
        dynamics = _divergence(after.detach(), before)
        representation = _divergence(after, before.detach())
        return picture + reward + end + dynamics + 0.1 * representation

    def remember(self, state: Tensor, action: Tensor) -> Tensor:
        """Return what is remembered one step later."""
        deter, stoch = state.split([self.deter, self.stoch], dim=-1)
        given = self.before(torch.cat([stoch, action], dim=-1))
        reset, new, update = self.gates(torch.cat([given, deter], dim=-1)).chunk(3, dim=-1)
        update = (update - 1).sigmoid()
        return update * (reset.sigmoid() * new).tanh() + (1 - update) * deter

    def imagine(self, state: Tensor, action: Tensor, gumbel: Tensor) -> Tensor:
        """Return the next state without a picture of it."""
        deter = self.remember(state, action)
        return torch.cat([deter, self._draw(self._probabilities(self.prior(deter)), gumbel)], dim=-1)

    def _probabilities(self, logits: Tensor) -> Tensor:
        return 0.99 * logits.unflatten(-1, (-1, self.classes)).softmax(-1) + 0.01 / self.classes

    def _draw(self, probabilities: Tensor, gumbel: Tensor) -> Tensor:
        """Return classes that were drawn, with the gradients of their probabilities."""
        drawn = functional.one_hot((probabilities.log() + gumbel).argmax(-1), self.classes).to(probabilities.dtype)
        return (drawn + probabilities - probabilities.detach()).flatten(1)


def _divergence(one: Tensor, other: Tensor) -> Tensor:
    return (one * (one.log() - other.log())).sum((1, 2)).clamp(min=1.0).mean()


class Dreamer(nn.Module):
    """A world model, an actor and a critic that learn from what it imagines, and a slow copy of the critic."""

    def __init__(self, *, horizon: int, actions: int, hidden: int, rows: int, **numbers: int) -> None:
        super().__init__()
        self.world = WorldModel(actions=actions, hidden=hidden, rows=rows, **numbers)
        width = self.world.width
        self.actor = _mlp(width, hidden, 2 * actions, is_normed=True)
        self.critic = _mlp(width, hidden, 1, is_normed=True)
        self.slow = copy.deepcopy(self.critic).requires_grad_(False)
        self.register_buffer("imagined", torch.zeros(horizon, rows, width))
        self.register_buffer("returns", torch.zeros(horizon, rows))


WORLD_INPUTS = ("pictures", "actions", "rewards", "goes_on", "gumbel")


def _world_loss(model: Any, batch: Batch) -> Tensor:
    return model.world(*(batch[name] for name in WORLD_INPUTS))


def _dream_loss(model: Any, batch: Batch) -> Tensor:
    """Imagine, keep states and returns for the critic, and return the loss of the actions that were chosen."""
    world, states, chosen = model.world, [model.world.states], []
    with torch.no_grad():
        for noise, gumbel in zip(batch["dream_noise"], batch["dream_gumbel"], strict=True):
            raw, _ = _act(model.actor, states[-1], noise)
            chosen.append(raw)
            states.append(world.imagine(states[-1], raw.tanh(), gumbel))
        along = torch.stack(states)
        values = model.critic(along).squeeze(-1)
        rewards = world.reward(along[1:]).squeeze(-1)
        kept = DISCOUNT * world.goes_on(along[1:]).squeeze(-1).sigmoid()
        returns = [values[-1]]
        for reward, keep, value in zip(reversed(rewards), reversed(kept), reversed(values[1:]), strict=True):
            returns.append(reward + keep * (0.05 * value + 0.95 * returns[-1]))
        gained = torch.stack(returns[:0:-1])
        model.imagined.copy_(along[:-1])
        model.returns.copy_(gained)
        advantage = (gained - values[:-1]) / (gained.quantile(0.95) - gained.quantile(0.05)).clamp(min=1.0)
    mean, log_std = model.actor(along[:-1]).chunk(2, dim=-1)
    log_std = log_std.clamp(-5, 2)
    log_density = -0.5 * ((torch.stack(chosen) - mean) * (-log_std).exp()).square() - log_std
    return -(advantage * log_density.sum(-1) + 3e-4 * log_std.sum(-1)).mean()


def _value_loss(model: Any, batch: Batch) -> Tensor:
    """Return the error of the critic's values; they are to stay near those of its slow copy."""
    values = model.critic(model.imagined)
    with torch.no_grad():
        slow = model.slow(model.imagined)
    return functional.mse_loss(values.squeeze(-1), model.returns) + functional.mse_loss(values, slow)


def _dreamer(name: str, draw: Draw, *, batch: int, steps: int, **numbers: int) -> Learner:
    size, actions, horizon, rows = numbers["picture"], numbers["actions"], numbers["horizon"], batch * steps
    drawn = (numbers["groups"], numbers["classes"])
    return Learner(
        name=name,
        model=Dreamer(rows=rows, **numbers),
        batch={
            "pictures": draw(batch, steps, 3, size, size).sigmoid(),
            "actions": draw(batch, steps, actions).tanh(),
            "rewards": draw(batch, steps),
            "goes_on": (draw(batch, steps) < 2).float(),
            "gumbel": _gumbel(draw(batch, steps, *drawn)),
            "dream_noise": draw(horizon, rows, actions),
            "dream_gumbel": _gumbel(draw(horizon, rows, *drawn)),
        },
        phases=(
            Phase(name="world model", loss_fn=_world_loss, trained="world", rate=1e-4),
            Phase(name="actor", loss_fn=_dream_loss, trained="actor", rate=3e-5),
            Phase(name="critic", loss_fn=_value_loss, trained="critic", rate=3e-5),
        ),
        targets=("slow", "critic"),
        rate=0.02,
    )


def _gumbel(normal: Tensor) -> Tensor:
    """Return numbers with the distribution of Gumbel, from normal ones."""
    return -torch.special.log_ndtr(normal).neg().log()


# --------------------------------------------------------------------------------------------------------- by name

_CRITICS_OF = ("batch", "state", "action", "width", "critics", "every")
_DREAMER_OF = ("batch", "steps", "horizon", "picture", "depth", "deter", "hidden", "groups", "classes", "actions")

_SIZES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "sac": {"tiny": (8, 5, 2, 16, 2, 2), "small": (256, 17, 6, 256, 2, 1)},
    "redq": {"tiny": (8, 5, 2, 16, 10, 2), "small": (256, 17, 6, 256, 10, 20)},
    "dreamer": {
        "tiny": (2, 3, 2, 16, 2, 8, 8, 2, 4, 2),
        "small": (8, 8, 5, 64, 8, 128, 128, 16, 16, 6),
        "base": (16, 16, 15, 64, 32, 512, 512, 32, 32, 6),
    },
}
"""The original unrolls its world model over 64 steps, which compilers take many minutes for."""

LEARNERS = tuple(_SIZES)


def build_learner(name: str, size: str = "tiny", *, batch: int | None = None, seed: int = 0) -> Learner:
    """Return a learner; equal arguments give equal weights and inputs. `batch` overrides the batch size."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    build, names = (_dreamer, _DREAMER_OF) if name == "dreamer" else (_soft_actor_critic, _CRITICS_OF)
    numbers: dict[str, Any] = dict(zip(names, _SIZES[name][size], strict=True))
    numbers |= {"batch": batch} if batch else {}
    return build(name, lambda *shape: torch.randn(shape, generator=generator), **numbers)
