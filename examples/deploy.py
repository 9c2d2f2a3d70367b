"""Train as a deployment plan says: torchrun --standalone --nproc-per-node 2 examples/deploy.py.

With --compare, the plan, data parallelism, divided layers, sharded state and a tower per rank are measured in turns.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import apollo_compile
from apollo_compile.errors import ConfigError
from apollo_compile.units import format_ns, seconds_to_ns


class TwoTowers(nn.Module):
    """Returns the similarities of images and texts."""

    def __init__(self, width: int, image: int, text: int) -> None:
        super().__init__()
        self.image, self.text = (
            nn.Sequential(
                *[
                    nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                    for _ in range(layers)
                ]
            )
            for layers in (image, text)
        )

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return a row per image and a column per text."""
        return self.image(image) @ self.text(text).T


class Job(NamedTuple):
    """A model with the whole batch of a step; the names of its modules, the largest first."""

    model: nn.Module
    batch: Mapping[str, torch.Tensor]
    modules: tuple[str, ...]


def make(name: str) -> Job:
    """Return a job: `towers`, `unequal` (ten times the layers, many samples), `wide` (few samples) or `clip`."""
    torch.manual_seed(0)  # the same weights and data everywhere
    if name == "clip":
        from transformers import CLIPConfig, CLIPModel

        size = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = CLIPConfig(
            text_config={**size, "vocab_size": 1000, "eos_token_id": 999},
            vision_config={**size, "image_size": 64, "patch_size": 16},
            attn_implementation="eager",
        )
        ids = torch.randint(3, 999, (16, 16))
        ids[:, -1] = 999
        batch = {"input_ids": ids, "pixel_values": torch.randn(16, 3, 64, 64)}
        return Job(CLIPModel(config), batch, ("vision_model", "text_model"))
    sizes = {"towers": (256, 4, 4, 64), "unequal": (128, 10, 1, 1024), "wide": (768, 4, 1, 16)}
    width, image, text, samples = sizes[name]
    batch = {"image": torch.randn(samples, width), "text": torch.randn(samples, width)}
    return Job(TwoTowers(width, image, text), batch, ("image", "text"))


def loss_fn(output: Any) -> torch.Tensor:
    """Return the contrastive loss, which needs the features of all samples."""
    scores = output if isinstance(output, torch.Tensor) else output.logits_per_text
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of the parameters that this rank has; make it after `apply`."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def train(
    model: nn.Module, batch: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, steps: int
) -> list[float]:
    """Return the loss of every step."""
    losses = []
    for _ in range(steps):
        loss = loss_fn(model(**batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(job: Job, plan: apollo_compile.DeploymentPlan, *, rounds: int) -> dict[str, float]:
    """Return the median seconds of a step by deployment, measured in turns."""
    size = dist.get_world_size()
    ways: dict[str, dict[str, Any]] = {
        "data parallel": {"devices": size},
        "divided layers": {"devices": size, "tensor": size},
        "sharded": {"devices": size, "is_sharded": True},
        "tower per rank": {"devices": 1},
    }
    plans = {"plan": plan}
    for way, division in ways.items():
        edited = plan
        try:
            for index, name in enumerate(job.modules):
                edited = edited.move(name, first=index % size if way == "tower per rank" else 0, **division)
        except ConfigError:  # a module that cannot be divided so
            continue
        plans[way] = edited
    models = {}
    for name, each in plans.items():
        model = each.apply(copy.deepcopy(job.model))
        models[name] = (model, make_optimizer(model))
    times: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):
        for name, (model, optimizer) in models.items():
            dist.barrier()
            begin = time.perf_counter()
            train(model, job.batch, optimizer, 3)
            dist.barrier()
            if number:  # the first round agrees about outputs
                times[name].append((time.perf_counter() - begin) / 3)
    if dist.get_rank() == 0:
        for name, each in plans.items():
            measured = format_ns(seconds_to_ns(statistics.median(times[name])))
            print(f"{name}: predicted {format_ns(each.deployment.step_ns)}, measured {measured}")
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Plan, train, and show that the numbers are those of one process."""
    parser = argparse.ArgumentParser(description="Train as a deployment plan says, under torchrun.")
    parser.add_argument("--model", choices=("towers", "unequal", "wide", "clip"), default="clip")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compare", action="store_true", help="measure other deployments too")
    parser.add_argument("--rounds", type=int, default=8, help="turns of every deployment with --compare")
    args = parser.parse_args()
    if "LOCAL_WORLD_SIZE" not in os.environ:
        sys.exit(
            "expected several processes: start it with torchrun --standalone --nproc-per-node 2 examples/deploy.py"
        )
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("gloo")
    job = make(args.model)
    plan = apollo_compile.deploy(job.model, job.batch, loss_fn=loss_fn, modules=job.modules)
    if dist.get_rank() == 0:
        print(plan, flush=True)
    alone = copy.deepcopy(job.model)
    expected = train(alone, job.batch, make_optimizer(alone), args.steps)
    if args.compare:
        compare(job, plan, rounds=args.rounds)
    model = plan.apply(job.model)
    losses = train(model, job.batch, make_optimizer(model), args.steps)
    state = plan.full_state_dict(model)
    if dist.get_rank() == 0:
        off = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
        far = max((state[name] - value).abs().max().item() for name, value in alone.state_dict().items())
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps on {dist.get_world_size()} processes")
        print(f"against one process: losses differ by at most {off:.1e}, parameters by {far:.1e}")
        if off > 1e-3 * max(expected):
            raise SystemExit("WRONG: these are not the losses of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
