"""What every rank of the tests does: `run_rank` is called in processes of their own, and writes what it saw."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from apollo_compile import backend, select
from apollo_compile.device import default_profile, save_profile
from tests.end_to_end.models import NEVER_AS_LONG_NS

SIZE = 2
"""Ranks of most scenarios."""
STEPS = 20
CONTEST_STEPS = 3 * 2 * select.MIN_ROUNDS * select.STEPS_PER_TURN + 10
"""Enough for three contests of two, where none goes on beyond the least number of rounds."""
WIDTH = 256
"""Of layers that are worth a lane; how long they compile does not depend on it."""
PATIENCE = datetime.timedelta(seconds=600)
"""After which a rank that waits for another one fails; compiling on a busy machine takes most of it."""

LANES = {
    "debug.strict": True,
    "device.profile": "cpu",
    "device.units": 2,
    "plan.contest": False,
    "plan.min_gain": 0.0,
    "plan.planner": "greedy",
    "plan.time_limit_s": 0.1,
    "partition.granularity": "module",
    "partition.min_segment_share": 0.08,
}
"""Plans with lanes on every machine with two cores, though each rank has one core of its own there."""

Result = dict[str, Any]


def make_clip() -> nn.Module:
    """Return a CLIP model of a few thousand parameters; the same at every call."""
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 64, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = CLIPConfig(
        text_config={**tower, **text}, vision_config={**tower, "image_size": 8, "patch_size": 4}, projection_dim=32
    )
    torch.manual_seed(0)
    model = CLIPModel(config)
    model.logit_scale = nn.Parameter(model.logit_scale.detach().reshape(1))  # FSDP2 takes no scalars
    return model


def clip_batches(rank: int) -> list[dict[str, torch.Tensor]]:
    """Return the batches of a rank, one per step."""
    generator = torch.Generator().manual_seed(rank)
    return [
        {
            "input_ids": torch.randint(3, 60, (4, 8), generator=generator),
            "pixel_values": torch.randn(4, 3, 8, 8, generator=generator),
        }
        for _ in range(STEPS)
    ]


def clip_loss(run: Callable[..., Any], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the contrastive loss of a batch."""
    logits = run(**batch).logits_per_image
    target = torch.arange(len(logits))
    return (nn.functional.cross_entropy(logits, target) + nn.functional.cross_entropy(logits.T, target)) / 2


class Towers(nn.Module):
    """Two independent pairs of layers that meet in a product."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of what the towers make."""
        return self.left(x) * self.right(x)


class Pair(nn.Module):
    """Two independent layers that meet in a product, summed over all ranks if `communicates`."""

    def __init__(self, communicates: bool = False) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.communicates = communicates

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        left, right = self.left(x).tanh(), self.right(x).tanh()
        if self.communicates:
            left = funcol.all_reduce(left, "sum", dist.group.WORLD)
            right = funcol.all_reduce(right, "sum", dist.group.WORLD)
        return left.cos() * right


class Chain(nn.Module):
    """Layers one after the other, each as large as the smallest bucket of DDP: 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*shape) for shape in 2 * [(WIDTH, 1024), (1024, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the last layer makes."""
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def inputs(rank: int) -> torch.Tensor:
    """Return the random inputs of a rank."""
    return torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(100 + rank))


# ------------------------------------------------------------------------------------------------------- references


def train_reference() -> Result:
    """Train CLIP eagerly in one process: every step averages the gradients of the ranks' batches."""
    model = make_clip()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [clip_batches(rank) for rank in range(SIZE)]
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [clip_loss(model, batches[rank][step]) for rank in range(SIZE)]
        (sum(parts) / SIZE).backward()  # type: ignore[union-attr]
        losses.append([float(part.detach()) for part in parts])
        optimizer.step()
    return {"losses": losses, "state": {name: value.clone() for name, value in model.state_dict().items()}}


# --------------------------------------------------------------------------------------------------------- scenarios


def train_ddp(rank: int, folder: Path) -> Result:
    """CLIP under DDP; the ranks believe different things of the machine, that no machine is as slow as."""
    file = folder / f"profile{rank}.json"
    save_profile(dataclasses.replace(default_profile(2), name="wrong", launch_ns=(rank + 1) * NEVER_AS_LONG_NS), file)
    model = make_clip()
    run = torch.compile(DistributedDataParallel(model), backend="apollo", options={**LANES, "device.profile": file})
    return _train_clip(rank, model, run, lambda: model.state_dict())


def train_buckets(rank: int, folder: Path) -> Result:
    """A model of several buckets, which Dynamo cuts into a graph for each."""
    torch.manual_seed(0)
    model = Chain()
    alone = [_gradients(copy.deepcopy(model), inputs(other)) for other in range(SIZE)]
    expected = {name: sum(result[name] for result in alone) / SIZE for name, _ in model.named_parameters()}
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
    run = torch.compile(wrapped, backend="apollo", options={**LANES, "runtime.bodies": "eager"})
    found = []
    for _ in range(2):
        model.zero_grad()
        found.append(_gradients(model, inputs(rank), run))
    return {
        "expected": {**expected, "output": alone[rank]["output"]},
        "found": found,
        "is_settled": backend.is_settled(wrapped),
        "reported": [graph.role for graph in backend.report(wrapped).graphs],
        **_graphs(model),
    }


def train_fsdp(rank: int, folder: Path) -> Result:
    """CLIP under FSDP2, its parameters sharded as one group, so that both towers are in one graph.

    Its bodies are not compiled: those of DDP are, which are the same but for what the ranks exchange.
    """
    model = make_clip()
    fully_shard(model, mesh=init_device_mesh("cpu", (SIZE,)))
    options = {**LANES, "plan.replan": False, "runtime.bodies": "eager"}
    run = torch.compile(model, backend="apollo", options=options)
    return _train_clip(
        rank, model, run, lambda: {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in _state(model)}
    )


def run_tensor_parallel(rank: int, folder: Path) -> Result:
    """Layers split over the ranks; DTensor puts the collectives into the graphs.

    The ranks have different numbers of lanes, so each runs another plan, in its own time.
    """
    torch.manual_seed(0)
    model = Towers()
    expected = _gradients(copy.deepcopy(model), inputs(0))
    mesh = init_device_mesh("cpu", (SIZE,))
    for tower in (model.left, model.right):
        parallelize_module(tower, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    run = torch.compile(model, backend="apollo", options={**LANES, "device.units": 2 - rank})
    return {"expected": expected, "found": _gradients(model, inputs(0), run), **_graphs(model)}


def run_branches(rank: int, folder: Path) -> Result:
    """Collectives that the user wrote into two branches; compiled code has those of tensor parallelism."""
    torch.manual_seed(0)
    model = Pair(communicates=True)
    run = torch.compile(model, backend="apollo", options={**LANES, "runtime.bodies": "eager"})
    with torch.no_grad():
        return {"expected": model(inputs(rank)), "found": [run(inputs(rank)) for _ in range(5)], **_graphs(model)}


def run_contest(rank: int, folder: Path) -> Result:
    """A model under DDP whose ways compete; notes which way every step ran on every graph."""
    select.MAX_ROUNDS = select.MIN_ROUNDS
    torch.manual_seed(0)
    model = Pair()
    options = {**LANES, "plan.contest": True, "plan.replan": False}
    run = torch.compile(DistributedDataParallel(model), backend="apollo", options=options)
    ways = []
    for _ in range(CONTEST_STEPS):
        run(inputs(rank)).square().mean().backward()
        ways.append([graph.way for entry in backend.find_models(model) for graph in entry.graphs])
    (entry,) = backend.find_models(model)
    verdict = entry.selection.verdict
    settled = None if verdict is None else (verdict.winner, verdict.choice, verdict.num_steps)
    return {"ways": ways, "verdict": settled, **_graphs(model)}


def run_dynamic(rank: int, folder: Path) -> Result:
    """A model under DDP whose batches are of other sizes in every step, and on every rank."""
    torch.manual_seed(0)
    alone, model = Pair(), Pair()
    model.load_state_dict(alone.state_dict())
    run = torch.compile(DistributedDataParallel(model), backend="apollo", dynamic=True, options=LANES)
    expected, found = [], []
    for size in (96, 128, 64):
        for other in range(SIZE):
            (alone(inputs(other)[: size - 8 * other]).square().mean() / SIZE).backward()
        run(inputs(rank)[: size - 8 * rank]).square().mean().backward()
        for each, gradients in ((alone, expected), (model, found)):
            gradients.append([parameter.grad for parameter in each.parameters()])
            each.zero_grad(set_to_none=True)
    return {"expected": expected, "found": found, **_graphs(model)}


def run_absent(rank: int, folder: Path) -> Result:
    """Only rank 1 has this modality: it compiles and plans without the others, which meet it afterwards."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    x = torch.ones(2, 8)
    if rank == 1:
        run = torch.compile(model, backend="apollo", options={**LANES, "runtime.bodies": "eager"})
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x))
    dist.barrier()
    return _graphs(model)


SCENARIOS: dict[int, dict[str, Callable[[int, Path], Result]]] = {
    SIZE: {
        "ddp": train_ddp,
        "buckets": train_buckets,
        "fsdp": train_fsdp,
        "tensor parallel": run_tensor_parallel,
        "contest": run_contest,
        "dynamic": run_dynamic,
    },
    3: {"branches": run_branches, "absent": run_absent},
}
"""By the number of ranks that run them."""


def run_rank(rank: int, size: int, port: int, folder: Path) -> None:
    """Run all scenarios of `size` ranks one after the other, and write what this rank saw of each."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # gloo else looks the machine's name up, which need not have an address
    torch.set_num_threads(2)
    log = _Lines()
    logging.getLogger("apollo_compile").addHandler(log)
    logging.getLogger("apollo_compile").setLevel(logging.INFO)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    try:
        for name, scenario in SCENARIOS[size].items():
            torch._dynamo.reset()
            log.lines.clear()
            result = scenario(rank, folder)
            torch.save({**result, "log": list(log.lines)}, folder / f"{name} {rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


class _Lines(logging.Handler):
    """Keeps what the package logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def _train_clip(
    rank: int, model: nn.Module, run: Callable[..., Any], state: Callable[[], dict[str, torch.Tensor]]
) -> Result:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for batch in clip_batches(rank):
        optimizer.zero_grad()
        loss = clip_loss(run, batch)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    return {"losses": losses, "state": {n: v.detach().clone() for n, v in state().items()}, **_graphs(model)}


def _gradients(model: nn.Module, x: torch.Tensor, run: Callable[..., Any] | None = None) -> Result:
    output = (model if run is None else run)(x)
    output.square().mean().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "output": output.detach().clone(),
        **{n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in found.items() if g is not None},
    }


def _graphs(model: nn.Module) -> Result:
    """Return what was compiled for a model, as the rank sees it."""
    models = backend.find_models(model)
    return {
        "plans": [graph.compilation.plan for entry in models for graph in entry.graphs],
        "collectives": [
            [s.id for s in graph.compilation.partition.graph.segments if s.has_collective]
            for entry in models
            for graph in entry.graphs
        ],
        "replans": [graph.num_replans for entry in models for graph in entry.graphs],
        "handed_over": [reason for entry in models for reason in entry.handed_over],
    }


def _state(model: nn.Module) -> list[tuple[str, Any]]:
    return list(model.state_dict().items())
