"""Models with code in and around placed modules that autograd has to be right for, and ranks that train them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import apollo_compile
from apollo_compile.cost_model.collectives import Link
from apollo_compile.errors import DeploymentError
from tests.distributed.deploy_work import BATCH, SIZE, WIDTH, join, place

STEPS = 3
PLACES = ("data parallel", "apart", "sharded")
NAMES = ("image", "text")


def layers() -> nn.Sequential:
    """Return a tower."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


class Towers(nn.Module):
    """Two towers, and a scale between them."""

    def __init__(self, image: nn.Module | None = None) -> None:
        super().__init__()
        self.image, self.text = image or layers(), layers()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        """Return the output of the first tower."""
        return self.image(image)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.encode(image * self.scale) @ self.text(text).T / WIDTH


class Shares(Towers):
    """Has one tower under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.text = self.image


class CheckpointAround(Towers):
    """Computes a tower again in the backward."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.image, image, use_reentrant=self.is_reentrant)


class WritesAfterwards(Towers):
    """Writes to the input of a frozen tower, which the backward does not need."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH).requires_grad_(False))

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        found = image + 1
        found += self.image(found)
        return found


class Reversed(torch.autograd.Function):
    """Returns its input, and turns the gradient around."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


class ReversesGradients(Towers):
    """Gives a copy of a tower's output to a function with a backward of its own."""

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Reversed.apply(self.image(image).clone())  # type: ignore[no-untyped-call]
        return found


class CheckpointInside(nn.Module):
    """A tower that computes its layers again in the backward, by a function with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=True)


class Experts(nn.Module):
    """A tower in which a sample chooses its layer; the samples of a rank may all choose the same."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([layers(), layers(), layers()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(x)
        for chosen, expert in zip((x[:, 0] > 0, x[:, 0] <= 0), self.experts, strict=False):
            if chosen.any():
                found[chosen] = expert(x[chosen])
        return found


class AssignsData(nn.Module):
    """A tower that gives its parameter another memory."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.gain, nn.Parameter)
        self.gain.data = self.gain.data.clamp(max=1.2)
        return x * self.gain


class Pools(nn.Module):
    """A tower that returns one vector for all samples when it does not train."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training else x.mean(0, keepdim=True)


class Fails(nn.Module):
    """A tower that fails in one phase of a step, if it is told so."""

    phase = ""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.phase == "forward":
            self.fail()
        found: torch.Tensor = self.layers(x)
        if self.phase == "backward":
            found.register_hook(self.fail)
        return found

    def fail(self, *_: Any) -> None:
        """Raise an error of the user's."""
        raise ValueError(f"no {self.phase}")


FAILURES = [("forward", 0, "apart"), ("forward", 1, "data parallel"), ("backward", 1, "data parallel")]
"""Phases and steps in which a tower fails on the second rank, and places."""

Case = tuple[Callable[[], nn.Module], Callable[[], contextlib.AbstractContextManager[Any]]]
CASES: dict[str, Case] = {
    "saved tensors elsewhere": (Towers, torch.autograd.graph.save_on_cpu),
    "checkpoint around": (lambda: CheckpointAround(is_reentrant=False), contextlib.nullcontext),
    "reentrant checkpoint around": (lambda: CheckpointAround(is_reentrant=True), contextlib.nullcontext),
    "reentrant checkpoint inside": (lambda: Towers(CheckpointInside()), contextlib.nullcontext),
    "a function of the user's": (ReversesGradients, contextlib.nullcontext),
    "two names of a tower": (Shares, contextlib.nullcontext),
    "experts": (lambda: Towers(Experts()), contextlib.nullcontext),
    "gradients of the input": (Towers, contextlib.nullcontext),
    "gradients of some parameters": (Towers, contextlib.nullcontext),
    "a write afterwards": (WritesAfterwards, contextlib.nullcontext),
    "an assignment of data": (lambda: Towers(AssignsData()), contextlib.nullcontext),
}
"""Models, and the context of their forwards."""

UNSUPPORTED = {
    ("an assignment of data", "sharded"),
    ("experts", "sharded"),
    ("gradients of some parameters", "sharded"),
    ("gradients of some parameters", "apart"),
}
"""FSDP2 cannot have them, and a rank without a module has no graph of its parameters: docs/deploy.md."""
PAIRS = [(case, where) for case in CASES for where in PLACES if (case, where) not in UNSUPPORTED]


def train(model: nn.Module, batch: dict[str, torch.Tensor], case: str) -> list[float]:
    """Return losses, and a sum of the input's gradients where these are asked for."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with CASES[case][1]():
            loss = nn.functional.cross_entropy(model(**batch), torch.arange(BATCH))
        if case == "gradients of the input":
            found.append(torch.autograd.grad(loss, batch["image"], retain_graph=True)[0].square().sum().item())
        some = [*model.get_submodule("image").parameters()] if case == "gradients of some parameters" else None
        loss.backward(inputs=some)
        optimizer.step()
        found.append(loss.item())
    return found


def fail(phase: str, step: int, where: str, options: dict[str, Any]) -> list[str]:
    """Return the errors of two steps, of which one fails on the second rank; the ranks of a group do not go on."""
    model, found = Towers(Fails()), list[str]()
    batch = {"image": torch.randn(BATCH, WIDTH), "text": torch.randn(BATCH, WIDTH)}
    plan = place(apollo_compile.deploy(model, batch, **options), ("text", "image"), where)
    model = plan.apply(model, DeviceMesh.from_group(dist.new_group(), "cpu"))
    for number in range(3):
        Fails.phase = phase if number == step and dist.get_rank() == 1 else ""
        try:
            model(**batch).mean().backward()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    Fails.phase = ""
    return found


def run_rank(rank: int, port: int, folder: Path) -> None:
    """Train all models as one process and on groups of ranks, and write what this rank saw."""
    join(rank, port, SIZE)
    options: dict[str, Any] = {"loss_fn": torch.mean, "modules": NAMES, "link": Link(1e-4, 1e9), "seconds": 0.1}
    found: dict[tuple[str, str], Any] = {}
    for case, (make, _) in CASES.items():
        torch.manual_seed(1)
        model = make()
        order = torch.randn(BATCH, WIDTH)[:, :1].sort(0).values
        batch = {"image": torch.cat([order, torch.randn(BATCH, WIDTH - 1)], 1), "text": torch.randn(BATCH, WIDTH)}
        batch["image"].requires_grad_(case == "gradients of the input")
        plan = apollo_compile.deploy(model, batch, **options)
        alone = copy.deepcopy(model)
        found[case, ""] = (train(alone, batch, case), dict(alone.state_dict()))
        for where in (where for own, where in PAIRS if own == case):
            own = place(plan, ("image",) if case == "two names of a tower" else NAMES, where)
            placed = own.apply(copy.deepcopy(model))
            found[case, where] = (train(placed, batch, case), dict(own.full_state_dict(placed)))
    pools = Towers(Pools())
    place(apollo_compile.deploy(pools, batch, **options), NAMES, "data parallel").apply(pools).eval()
    try:
        pools(**batch)
    except DeploymentError as error:
        found["pools", ""] = str(error)
    for phase, step, where in FAILURES:
        found[phase, str(step)] = fail(phase, step, where, options)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()
