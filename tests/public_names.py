"""A program of a user that has every public name; it is not run: `make check` has its types checked, strictly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset

import apollo_compile
from apollo_compile.errors import ApolloError, TargetError


def loss_fn(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a micro-batch."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def train(model: nn.Module, batch: dict[str, torch.Tensor], folder: Path) -> float:
    """Train on a batch, as a model and as whole steps, and keep all reports."""
    options: dict[str, object] = {"plan.seed": 1, "device.units": 2}
    assert not set(options) - set(apollo_compile.known_options())
    before: apollo_compile.Report = apollo_compile.explain(model, (batch["x"],), options=options, profile="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    planned = apollo_compile.explain_step(model, loss_fn, batch, optimizer, microbatches=2, options=options)
    step = apollo_compile.compile_step(
        model, loss_fn, optimizer, microbatches=2, clip_grad_norm=1.0, weigh=lambda part: len(part["y"])
    )
    loss: torch.Tensor = step(batch)
    after = apollo_compile.report(step)
    metrics = {**after.metrics(), "status": apollo_compile.status(step)}
    after.save_html(folder / "report.html")
    after.save_trace(folder / "report.trace.json")
    (folder / "report.json").write_text(after.to_json())
    print(apollo_compile.Report.load(folder / "report.json"))
    names: list[str] = [graph.name for graph in after.graphs]
    print(
        metrics, before, planned.why("0"), after.diff(before), names, [graph.possible_gain for graph in planned.graphs]
    )
    return loss.item()


def balance(model: nn.Module, samples: TensorDataset, tokens: list[int], folder: Path) -> None:
    """Deal samples among ranks by what each takes."""
    example = {"x": torch.ones(1, 96, dtype=torch.long)}
    try:
        costs: apollo_compile.ModuleCosts = apollo_compile.module_costs(model, example, sizes={"tokens": ("x", 1)})
    except TargetError as error:
        raise SystemExit(f"cannot predict costs: {error}") from error
    costs = apollo_compile.share_costs(costs)
    costs.corrected({"encoder": 1.5}).save(folder / "costs.json")
    seconds = apollo_compile.ModuleCosts.load(folder / "costs.json").phases({"tokens": tokens}, encoders=["encoder"])
    sampler = apollo_compile.BalancedBatchSampler(seconds, batch_size=8, micro_batches=2, seed=1)
    sampler.set_epoch(1)
    print(sampler.balance(steps=4, phases=["encoder", "rest"]), sampler.num_steps, sampler.digest, costs.names)
    for batch in DataLoader(samples, batch_sampler=sampler):
        loss = apollo_compile.weigh_loss(model(batch).mean(), len(batch), total=32)
        loss.backward()  # type: ignore[no-untyped-call]
    resumed: dict[str, object] = sampler.state_dict()
    sampler.load_state_dict(resumed)


def train_pipeline(schedule: Schedule1F1B, encoder: nn.Sequential, images: list[torch.Tensor | None]) -> object:
    """Train on a batch, with an encoder in the bubbles of a pipeline."""
    filled = apollo_compile.BubbleEncoder(
        segments=list(encoder), feeds="images", features=torch.empty(4, 8, 64), forward_ns=[1, 5], backward_ns=[2, 10]
    )
    times = apollo_compile.StageTimes(forward_ns=(10, 10), backward_ns=(20, 20))
    step = apollo_compile.fill_bubbles(schedule, filled, times=times)
    step(encoder_inputs={"images": images})
    unknown = apollo_compile.BubbleEncoder(segments=list(encoder), feeds="images", features=torch.empty(4, 8, 64))
    measured = apollo_compile.fill_bubbles(schedule, unknown)
    measured(encoder_inputs={"images": images})
    return None if measured.prediction is None else measured.prediction.durations.times.forward_ns


def train_deployed(model: nn.Module, batch: dict[str, torch.Tensor], folder: Path) -> Mapping[str, torch.Tensor]:
    """Plan which devices compute which modules, and run the model so."""
    plan: apollo_compile.DeploymentPlan = apollo_compile.deploy(
        model, batch, loss_fn=lambda output: nn.functional.cross_entropy(output, batch["y"]), seconds=1.0
    )
    plan.move("encoder", first=0, devices=2).save(folder / "plan.json")
    edited = apollo_compile.DeploymentPlan.load(folder / "plan.json")
    print(plan.diff(edited), edited.to_svg())
    deployed: nn.Module = edited.apply(model)
    return edited.full_state_dict(deployed)


def balance_stream(keys: Iterator[int]) -> list[list[int]]:
    """The same for samples that come one by one."""
    stream = ((key, (1e-3, 2e-3)) for key in keys)
    try:
        return list(apollo_compile.BalancedStreamSampler(stream, batch_size=8, even_counts=True))
    except ApolloError as error:
        raise SystemExit(str(error)) from error
