"""What every rank of the tests of whole steps does."""

from __future__ import annotations

import contextlib
import copy
import datetime
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import apollo_compile
from apollo_compile.cost_model.collectives import Link
from apollo_compile.errors import TargetError
from apollo_compile.ir import SegmentGraph
from apollo_compile.session.step import collectives
from apollo_compile.session.step.step import Step
from apollo_compile.target.compilation import Compilation
from apollo_compile.torch_bridge import sharded
from tests.distributed.work import (
    LANES,
    PATIENCE,
    SIZE,
    WIDTH,
    Reader,
    Result,
    Scenario,
    Towers,
    clip_loss,
    make_clip,
    whole_state,
)

STEPS = 10
NORM = 0.05
"""To which gradients are clipped; those of the models here are larger."""
LINK = Link(5e-4, 2e9)
"""Given, where tests look at plans: which lane is best for a sum depends on how long it takes."""
SMALL = 0.05
"""Megabytes of a bucket, for several of them in a small model."""

Batch = dict[str, torch.Tensor]


def make_chain() -> nn.Module:
    """Return layers of which each needs the one before, with running statistics in between."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)))


class Uneven(nn.Module):
    """A frozen layer, and layers that two ranks cannot cut into halves."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.narrow, self.wide = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.wide(self.narrow(self.frozen(x).tanh()))


def features_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean squared distance to targets."""
    return (model(batch["x"]) - batch["y"]).square().mean()


def features(rank: int, generator: torch.Generator) -> Batch:
    """Return a batch of vectors, of another mean on every rank."""
    return {name: torch.randn(16, WIDTH, generator=generator) + rank for name in ("x", "y")}


def pairs(rank: int, generator: torch.Generator) -> Batch:
    """Return a batch of pictures and texts."""
    return {
        "input_ids": torch.randint(3, 60, (8, 8), generator=generator),
        "pixel_values": torch.randn(8, 3, 8, 8, generator=generator),
    }


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[..., Batch]]] = {
    "towers": (Towers, features_loss, features),
    "chain": (make_chain, features_loss, features),
    "clip": (make_clip, clip_loss, pairs),
    "uneven": (Uneven, features_loss, features),
}
"""Model, loss function and batch, by name."""

CASES = [("towers", 1, None), ("towers", 2, NORM), ("chain", 1, NORM), ("chain", 2, NORM), ("clip", 2, NORM)]
"""Model, number of micro-batches, and norm to which gradients are clipped."""


def compare(
    rank: int, *, name: str, count: int, norm: float | None, wrap: Callable[[nn.Module], nn.Module], mesh: bool = False
) -> Result:
    """Take steps with a wrapped model, or one and a mesh, and train its copy by the loop under the wrapper."""
    make, loss_fn, draw = MODELS[name]
    torch.manual_seed(0)
    plain = make()
    model, other = copy.deepcopy(plain), wrap(plain)
    if mesh and rank > 0:
        torch.nn.init.zeros_(next(model.parameters()))  # rank 0 has others
    model = model if mesh else wrap(model)
    optimizer, of_other = (make_optimizer(name, each) for each in (model, other))
    ranks = init_device_mesh("cpu", (SIZE,)) if mesh else None
    step = compile_step(model, loss_fn, optimizer, microbatches=count, clip_grad_norm=norm, mesh=ranks)
    generator = torch.Generator().manual_seed(rank)
    batches = [draw(rank, generator) for _ in range(STEPS)]
    link = contextlib.nullcontext() if mesh else patch.object(collectives, "measure_link", return_value=LINK)
    with recorded() as sent, link:
        losses = [float(step(batch)) for batch in batches]
    expected = [train_by_loop(other, loss_fn, of_other, batch, count, norm) for batch in batches]
    return {"losses": losses, "expected losses": expected, "sent": sent, **both_states(model, other), **outcome(step)}


def both_states(model: nn.Module, other: nn.Module) -> Result:
    """Return what steps and the loop have trained, without the wrapper."""
    state, expected = (whole_state(getattr(each, "module", each)) for each in (model, other))
    return {"state": state, "expected state": expected}


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW, or SGD for models with parameters that cannot change the loss: AdamW makes steps of noise there."""
    if name == "towers":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_by_loop(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    count: int,
    norm: float | None,
) -> float:
    """Take a step that communicates in the backward of the last micro-batch; return the loss."""
    optimizer.zero_grad()
    total = 0.0
    for number in range(count):
        part = {name: each.chunk(count)[number] for name, each in batch.items()}
        is_last = number == count - 1
        silent = isinstance(model, DistributedDataParallel) and not is_last
        with model.no_sync() if silent else contextlib.nullcontext():
            loss = loss_fn(model, part) / count
            loss.backward()
        total += float(loss.detach())
    if norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
    optimizer.step()
    return total


def run_other_shapes(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> Result:
    """In the fifth step, rank 1 gets a batch of another shape and runs a loop, while rank 0 runs its program.

    The model is evaluated after every step.
    """
    torch.manual_seed(0)
    plain = Towers()
    model, other = wrap(copy.deepcopy(plain)), wrap(plain)
    optimizer, of_other = (make_optimizer("towers", each) for each in (model, other))
    step = compile_step(model, features_loss, optimizer)
    generator = torch.Generator().manual_seed(rank)
    batches = [features(rank, generator) for _ in range(6)]
    if rank == 1:
        batches[4] = {name: each[:10] for name, each in batches[4].items()}
    losses, expected, sent = [], [], []
    for batch in batches:
        with recorded() as sent_now:
            losses.append(float(step(batch)))
        sent += sent_now
        expected.append(train_by_loop(other, features_loss, of_other, batch, 1, None))
        with torch.no_grad():
            losses.append(float(features_loss(model, batches[0])))
            expected.append(float(features_loss(other, batches[0])))
    return {"losses": losses, "expected losses": expected, "sent": sent, **both_states(model, other), **outcome(step)}


def run_frozen(rank: int, *, is_sharded: bool) -> Result:
    """Freeze a layer, train it again, and freeze another one: with a mesh, and by hand, or under FSDP2."""
    torch.manual_seed(0)
    plain = Towers()
    model, other = copy.deepcopy(plain), plain
    if is_sharded:
        model, other = wrap_fsdp(model), wrap_fsdp(other)
    optimizer, of_other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
    step = compile_step(model, features_loss, optimizer, mesh=None if is_sharded else init_device_mesh("cpu", (SIZE,)))
    generator = torch.Generator().manual_seed(rank)
    losses, expected = [], []
    for frozen in ("left.0", "left.0", "", "", "right.0", "right.0", "left.0"):
        for each in (model, other):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(not frozen or frozen not in name)
        batch = features(rank, generator)
        losses.append(float(step(batch)))
        loss = features_loss(other, batch)
        loss.backward()
        for parameter in () if is_sharded else other.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad.div_(SIZE))
        of_other.step()
        of_other.zero_grad()
        expected.append(float(loss))
    return {"losses": losses, "expected losses": expected, **both_states(model, other), **outcome(step)}


def run_no_sync(rank: int) -> Result:
    """Without an optimizer: gradients of a step inside of `no_sync` stay local, and the next step averages the sum."""
    torch.manual_seed(0)
    model = wrap_ddp(Towers())
    step = compile_step(model, features_loss, None)
    generator = torch.Generator().manual_seed(rank)
    batches = [features(rank, generator) for _ in range(2)]
    found, expected = [], []
    for _ in range(3):  # the second round has a program
        with model.no_sync(), recorded() as sent:
            step(batches[0])
        step(batches[1])
        found.append(take_gradients(model))
        with model.no_sync():
            features_loss(model, batches[0]).backward()
        features_loss(model, batches[1]).backward()
        expected.append(take_gradients(model))
    return {"found": found, "expected": expected, "sent inside": sent, **outcome(step)}


def run_wrong_meshes(rank: int) -> Result:
    """A mesh of two dimensions, one for a model that has ranks already, and one for a model without parameters."""
    found: Result = {}
    line, square = init_device_mesh("cpu", (SIZE,)), init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("data", "rest"))
    models = {"square": (Towers(), square), "wrapped": (wrap_ddp(Towers()), line), "empty": (nn.Identity(), line)}
    for name, (model, mesh) in models.items():
        try:
            compile_step(model, features_loss, None, mesh=mesh)
        except TargetError as error:
            found[name] = str(error)
    return found


def run_failure(rank: int, *, is_sharded: bool) -> Result:
    """Rank 1 gets a damaged batch in a step that is a program, which raises before the first mean."""
    group = dist.new_group(timeout=PATIENCE)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(Reader(), nn.Linear(WIDTH, WIDTH))
    if is_sharded:
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    else:
        model = DistributedDataParallel(model, process_group=group)
    step = compile_step(model, features_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = features(rank, torch.Generator().manual_seed(rank))
    for _ in range(3):
        step(batch)
    before = own_state(model)
    _set_pg_timeout(datetime.timedelta(seconds=2), group)
    if rank == 1:
        batch["x"] = batch["x"] * float("nan")
    error = None
    begin = time.monotonic()
    try:
        step(batch)
    except Exception as raised:
        error = {"type": type(raised).__name__, "text": str(raised), "notes": getattr(raised, "__notes__", [])}
    seconds = time.monotonic() - begin
    dist.barrier()
    return {"error": error, "waited": seconds, "before": before, "state": own_state(model), **outcome(step)}


def own_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of what this rank has of a model."""
    return {
        name: (each.to_local() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in model.state_dict().items()
    }


def run_sharded_gradients(rank: int) -> Result:
    """Without an optimizer: gradients of steps add up in shards; those of one that does not sync, in the next one.

    Hooks on shards double the gradients of one in the last round.
    """
    torch.manual_seed(0)
    plain = Uneven()
    model, other = wrap_fsdp(copy.deepcopy(plain)), wrap_fsdp(plain)
    step = compile_step(model, features_loss, None)
    generator = torch.Generator().manual_seed(rank)
    found, expected = [], []
    for number in range(5):
        if number == 4:
            for each in (model, other):
                each.scale.register_post_accumulate_grad_hook(double_gradient)
        batches = [features(rank, generator) for _ in range(2)]
        for is_syncing, batch in zip((number == 1, True), batches, strict=True):
            for each in (model, other):
                each.set_requires_gradient_sync(is_syncing)
            step(batch)
            features_loss(other, batch).backward()
        found.append(take_gradients(model))
        expected.append(take_gradients(other))
    return {"found": found, "expected": expected, **outcome(step)}


def double_gradient(parameter: torch.Tensor) -> None:
    """Double the gradient of a parameter."""
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def run_refused(rank: int) -> Result:
    """Under FSDP2 with other settings: loops, with one reason."""
    square = init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("replicas", "shards"))
    settings: dict[str, dict[str, Any]] = {
        "mixed precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "a mesh of several dimensions": {"mesh": square},
    }
    found: Result = {}
    for name, options in settings.items():
        model = fully_shard(Towers(), **options)
        step = compile_step(model, features_loss, torch.optim.SGD(model.parameters(), lr=0.1))
        loss = step(features(rank, torch.Generator().manual_seed(rank)))
        found[name] = (step.reasons_for_loops, bool(loss.isfinite()))
    return found


def run_explained(rank: int) -> Result:
    """Rank 0 alone asks for the plan of a step that both take then."""
    torch.manual_seed(0)
    model = wrap_ddp(make_chain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, batch = own_state(model), features(rank, torch.Generator().manual_seed(rank))
    found: Result = {}
    if rank == 0:
        options = {**LANES, "runtime.bodies": "eager"}
        with recorded() as sent:
            report = apollo_compile.explain_step(model, features_loss, batch, optimizer, options=options)
        found = {"planned": [each.name for each in report.graphs[0].segments], "sent": sent}
    try:
        apollo_compile.explain_step(fully_shard(make_chain()), features_loss, batch)
    except TargetError as error:
        found["refused"] = str(error)
    step = compile_step(model, features_loss, optimizer)
    after = own_state(model)
    for _ in range(2):
        step(batch)
    (tuner,) = step.tuners
    names = [each.name for each in tuner.program.variants.compilation.partition.graph.segments]
    return {**found, "linked": names, "before": before, "after": after}


def run_joined(rank: int) -> Result:
    """Take a step beside which DDP's reducer would answer ranks without batches, or call a hook that comes late."""
    found: Result = {}
    for name in ("joined", "hooked"):
        model = DistributedDataParallel(Towers())
        step = compile_step(model, features_loss, torch.optim.SGD(model.parameters(), lr=0.1))
        if name == "hooked":
            model.register_comm_hook(None, allreduce_hook)
        try:
            with model.join(enable=name == "joined"):
                step(features(rank, torch.Generator().manual_seed(rank)))
        except TargetError as error:
            found[name] = str(error)
    return found


def run_unused(rank: int) -> Result:
    """A layer that the loss does not use: an error that names it, as of DDP, and a loop where DDP was told."""
    found: Result = {}
    for name, options in (("error", {}), ("verdicts", {"find_unused_parameters": True})):
        torch.manual_seed(0)
        model = DistributedDataParallel(Unused(), **options)
        step = compile_step(model, features_loss, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = features(rank, torch.Generator().manual_seed(rank))
        try:
            step(batch)
            step(batch)
            found[name] = step.verdicts
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return {**found, "state": whole_state(model)}


class Unused(nn.Module):
    """Two layers, of which one is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def wrap_ddp(model: nn.Module) -> nn.Module:
    """Return the model in DistributedDataParallel, with small buckets."""
    return DistributedDataParallel(model, bucket_cap_mb=SMALL)


def compile_step(model: nn.Module, loss_fn: Callable[..., Any], optimizer: Any, **settings: Any) -> Step:
    """Return a step with lanes."""
    return apollo_compile.compile_step(
        model, loss_fn, optimizer, options={**LANES, "runtime.bodies": "eager"}, **settings
    )


@contextlib.contextmanager
def recorded() -> Iterator[list[int]]:
    """Record the sizes of what this rank sends in collectives, in the order in which it begins them."""
    sent: list[int] = []

    def record(collective: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent.append(args[place].numel())
            return collective(*args, **kwargs)

        return call

    with (
        patch.object(dist, "all_reduce", record(dist.all_reduce, 0)),
        patch.object(sharded, "all_gather", record(sharded.all_gather, 1)),
        patch.object(sharded, "reduce_scatter", record(sharded.reduce_scatter, 1)),
    ):
        yield sent


def outcome(step: Step) -> Result:
    """Return what became of a step, as this rank sees it."""
    compilations: list[Compilation] = [tuner.program.variants.compilation for tuner in step.tuners]
    return {
        "verdicts": step.verdicts,
        "reasons": step.reasons_for_loops,
        "plans": [each.plan for each in compilations],
        "collectives": [
            [(s.name, each.plan.assignments[s.id].lane) for s in each.partition.graph.segments if s.has_collective]
            for each in compilations
        ],
        "summed": [modules_summed(each.partition.graph) for each in compilations],
    }


def modules_summed(graph: SegmentGraph) -> list[list[str]]:
    """Return, by collective, the modules whose gradients it takes."""
    return [
        sorted({graph.segments[other].module for other in graph.predecessors(segment.id)} - {""})
        for segment in graph.segments
        if segment.has_collective
    ]


def take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients, and leave none."""
    found = {
        name: each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
        for name, each in model.named_parameters()
        if each.grad is not None
    }
    model.zero_grad()
    return found


def wrap_fsdp(model: nn.Module) -> nn.Module:
    """Return the model with its parts sharded, each by itself."""
    for part in model.children():
        if next(part.parameters(), None) is not None:
            fully_shard(part)
    return fully_shard(model)


SCENARIOS: dict[int, dict[str, Scenario]] = {
    SIZE: {
        **{
            f"{kind}{name} {count} {norm}": partial(compare, name=name, count=count, norm=norm, wrap=wrap)
            for kind, wrap in (("", wrap_ddp), ("fsdp ", wrap_fsdp))
            for name, count, norm in CASES
        },
        "mesh": partial(compare, name="chain", count=2, norm=NORM, wrap=wrap_ddp, mesh=True),
        "wrong meshes": run_wrong_meshes,
        "frozen": partial(run_frozen, is_sharded=False),
        "fsdp frozen": partial(run_frozen, is_sharded=True),
        "fsdp uneven": partial(compare, name="uneven", count=2, norm=NORM, wrap=wrap_fsdp),
        "other shapes": partial(run_other_shapes, wrap=wrap_ddp),
        "fsdp other shapes": partial(run_other_shapes, wrap=wrap_fsdp),
        "fsdp gradients": run_sharded_gradients,
        "fsdp refused": run_refused,
        "explained": run_explained,
        "no sync": run_no_sync,
        "joined": run_joined,
        "unused": run_unused,
        "failure": partial(run_failure, is_sharded=False),
        "fsdp failure": partial(run_failure, is_sharded=True),
    }
}
"""By the number of ranks that run them; what leaves a process group behind that is of no use is last."""
