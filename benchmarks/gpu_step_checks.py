"""Checks of whole steps and of the default on a GPU: do they give the loop's numbers, whatever users do with them?

They compile tiny models, and time nothing themselves. What else is checked, and in which order: `gpu_checks.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain

import torch
from torch import nn
from torch.nn import functional

from apollo_compile import backend
from apollo_compile.device.gpu.run.gpu import TorchGpu
from apollo_compile.session import registry
from apollo_compile.step import compile_step
from apollo_compile.tools.report import status
from benchmarks.gpu_training_checks import without_tf32
from benchmarks.harness.gpu_lanes import Outcome
from benchmarks.workloads.gpu import build_gpu_workload

STEP_OPTIONS = {"debug.strict": True, "plan.autotune": False, "plan.min_gain": 0.0, "plan.planner": "greedy"}
"""Run the program as soon as there is one, whatever is faster, and raise what would be hidden otherwise."""

STEPS = 24

LENGTHS = (24, 40, 56)
WIDTH = 256

MOST_STEPS = 400
"""Until the default has to have decided."""

DEFAULT_OPTIONS = {"debug.strict": True, "plan.compile_share": 1e3}
"""The default, but that it compiles at once."""

TOLERANCE = 1e-3
"""In float32, without TF32."""

Loop = tuple[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer], int, float | None]

LOOPS: Sequence[Loop] = (
    ("AdamW", lambda own: torch.optim.AdamW(own, lr=1e-4, eps=1e-3, fused=True), 1, None),
    ("SGD, 2 micro-batches, clipped", lambda own: torch.optim.SGD(own, lr=1e-3, momentum=0.9), 2, 0.5),
)
"""Name, optimizer, micro-batches and the largest norm of gradients."""


def steps_are_those_of_the_loop(gpu: TorchGpu) -> Outcome:
    """T14: losses and parameters of whole steps, whose loss reads a tensor besides model and batch, are the loop's.

    That tensor is replaced half-way, as a teacher that follows its student would be, and so is the learning rate.
    """
    worst: dict[str, float] = {}
    replays: list[int] = []
    for name, optimize, microbatches, clip in LOOPS:
        torch._dynamo.reset()
        workload = build_gpu_workload("clip_b32", batch=8, scale="tiny", device=str(gpu.device))
        eager, model = copy.deepcopy(workload.model), workload.model
        others = {"scale": torch.rand((), device=gpu.device) + 0.5}

        loss_fn = partial(_scaled_loss, others)
        optimizers = [optimize(list(each.parameters())) for each in (eager, model)]
        step = compile_step(
            model, loss_fn, optimizers[1], microbatches=microbatches, clip_grad_norm=clip, options=STEP_OPTIONS
        )
        differences = [0.0]
        with without_tf32():
            for number in range(STEPS):
                if number == STEPS // 2:
                    others["scale"] = torch.rand((), device=gpu.device) + 0.5
                    for group in chain.from_iterable(each.param_groups for each in optimizers):
                        group["lr"] *= 0.5
                batch = {key: each.roll(number, dims=1) for key, each in workload.inputs.items()}
                expected = _loop_step(eager, loss_fn, optimizers[0], batch, microbatches, clip)
                differences.append(abs(float(step(batch)) - expected))
        pairs = zip(eager.parameters(), model.parameters(), strict=True)
        worst[name] = max(*differences, *((one - other).abs().max().item() for one, other in pairs))
        replays.append(sum(tuner.program.variants.plan.num_replays for tuner in step.tuners))
    shown = ", ".join(f"{name} {difference:.1e}" for name, difference in worst.items())
    is_met = max(worst.values()) < TOLERANCE and min(replays) >= STEPS // 3
    return Outcome(is_met=is_met, text=f"{shown}; {replays} replays of {STEPS} steps each", numbers=worst)


def _scaled_loss(
    others: Mapping[str, torch.Tensor],
    call: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    part: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    return call(dict(part)) * others["scale"]


def _loop_step(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, torch.Tensor],
    microbatches: int,
    clip: float | None,
) -> float:
    """Take a step in eager; return its loss."""
    optimizer.zero_grad()
    total = 0.0
    for parts in zip(*(each.chunk(microbatches) for each in batch.values()), strict=True):
        loss = loss_fn(model, dict(zip(batch, parts, strict=True))) / microbatches
        loss.backward()
        total += loss.item()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return total


class Scaled(nn.Module):
    """Layers one after the other over sequences of any length, times a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        hidden = self.layers(x) * number
        return functional.mse_loss(hidden / x.shape[1], x)


def sizes_and_numbers_may_change(gpu: TorchGpu) -> Outcome:
    """T15: with the default, losses of sequences of several lengths, times a number on the host, are eager's."""
    torch._dynamo.reset()
    eager = Scaled().to(gpu.device)
    model = copy.deepcopy(eager)
    run = torch.compile(model, backend=backend.apollo, options=DEFAULT_OPTIONS)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (eager, model)]
    worst, taken = 0.0, 0
    generator = torch.Generator().manual_seed(0)
    with without_tf32():
        while taken < MOST_STEPS and (taken < 8 or registry.find_models(model)[-1].state().stage == "measuring"):
            for _ in range(8):
                length = LENGTHS[int(torch.randint(len(LENGTHS), (), generator=generator))]
                x = torch.randn(4, length, WIDTH, generator=generator).to(gpu.device)
                number = torch.rand((), generator=generator)
                losses = []
                for call, optimizer in zip((eager, run), optimizers, strict=True):
                    loss = call(x, number)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.detach())
                worst = max(worst, (losses[0] - losses[1]).abs().item())
                taken += 1
    graphs = [graph for made in registry.find_models(model) for graph in made.graphs]
    text = f"largest difference {worst:.1e} in {taken} steps of {len(graphs)} graphs; {status(model)}"
    return Outcome(is_met=worst < TOLERANCE, text=text, numbers={"worst": worst, "steps": taken})
