"""What every rank of the tests does: `run_rank` is called in processes of their own, and writes what it saw."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import importlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import apollo_compile
from apollo_compile.ir import Variant
from apollo_compile.planner import apart
from apollo_compile.session import bodies, planning, registry
from apollo_compile.store.profiles import default_profile, save_profile
from tests.end_to_end.models import NEVER_AS_LONG_NS

SIZE = 2
"""Ranks of most scenarios."""
STEPS = 20
FEW_STEPS = 3
LEARNING_RATE = 3.0
"""For losses as small as those of the models here; a hundred steps do not learn everything."""
WIDTH = 256
"""Of layers that are worth a lane; how long they compile does not depend on it."""
PATIENCE = datetime.timedelta(seconds=600)
"""After which a rank that waits for another one fails; compiling on a busy machine takes most of it."""

LANES = {
    "debug.strict": True,
    "device.profile": "cpu",
    "device.units": 2,
    "plan.autotune": False,
    "plan.min_gain": 0.0,
    "plan.planner": "greedy",
    "plan.time_limit_s": 0.1,
    "partition.granularity": "module",
    "partition.min_segment_share": 0.08,
}
"""Plans with lanes on every machine with two cores, though each rank has one core of its own there."""

Result = dict[str, Any]

Scenario = Callable[[int], Result]
"""Returns what a rank saw."""


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
        return self.left(x) * self.right(x)


class Pair(nn.Module):
    """Two independent layers that meet in a product, after a sum over the ranks of `group` if there is one."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.left(x).tanh(), self.right(x).tanh()
        if self.group is not None:
            left, right = (funcol.all_reduce(branch, "sum", self.group) for branch in (left, right))
        return left.cos() * right


class Reader(nn.Module):
    """Fails where its input is damaged, in an operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return read(x)


@torch.library.custom_op("apollo_tests::read", mutates_args=())
def read(x: torch.Tensor) -> torch.Tensor:
    """Return what is read, if it is numbers."""
    if x.isnan().any():
        raise ValueError("this batch is damaged")
    return x.clone()


@read.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Chain(nn.Module):
    """Layers one after the other, each as large as the smallest bucket of DDP: 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*shape) for shape in 2 * [(WIDTH, 1024), (1024, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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


def train_ddp(rank: int) -> Result:
    """CLIP under DDP."""
    model = make_clip()
    options = {**LANES, "device.profile": _wrong_profile(rank)}
    run = torch.compile(DistributedDataParallel(model), backend="apollo", options=options)
    return _train_clip(rank, model, run)


def train_buckets(rank: int) -> Result:
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
        "is_settled": registry.is_settled(wrapped),
        "reported": [graph.role for graph in apollo_compile.report(wrapped).graphs],
        **_graphs(model),
    }


def train_fsdp(rank: int) -> Result:
    """CLIP under FSDP2, its parameters sharded as one group, so that both towers are in one graph."""
    model = make_clip()
    fully_shard(model, mesh=init_device_mesh("cpu", (SIZE,)))
    options = {**LANES, "runtime.bodies": "eager"}
    result = _train_clip(rank, model, torch.compile(model, backend="apollo", options=options))
    reported = {graph.name for graph in apollo_compile.report().graphs}  # by a parameter it finds none
    names = [graph.compilation.capture.name for graph in registry.compiled_models()[-1].graphs]
    return {**result, "reported": [name in reported for name in names]}


def train_fsdp_natively(rank: int) -> Result:
    """The same with native bodies, which DDP's run has compiled, and plans made anew.

    The memory of parameters goes and comes again behind every forward and every backward.
    """
    model = make_clip()
    fully_shard(model, mesh=init_device_mesh("cpu", (SIZE,)), reshard_after_forward=True)
    options = {**LANES, "device.profile": _wrong_profile(rank)}
    result = _train_clip(rank, model, torch.compile(model, backend="apollo", options=options))
    (entry,) = registry.find_models(model)
    return {**result, "native": [body.entry_address is not None for graph in entry.graphs for body in graph.bodies]}


def train_tensor_parallel(rank: int) -> Result:
    """Layers split over the ranks; DTensor puts the collectives into the graphs.

    The ranks have different numbers of lanes, so each runs another plan, in its own time.
    """
    alone, model = _twice(Towers)
    _split_layers(model)
    run = torch.compile(model, backend="apollo", options={**LANES, "device.units": 2 - rank})
    expected, found = _train(alone, FEW_STEPS, [inputs(0)]), _train(model, FEW_STEPS, [inputs(0)], run)
    return {"expected": expected, "found": found, **_graphs(model)}


def train_tensor_parallel_mixed(rank: int) -> Result:
    """Layers that are split: rank 0 runs its plans, and rank 1 the whole graphs as Inductor compiles them."""
    alone, model = _twice(Towers)
    _split_layers(model)
    run = torch.compile(model, backend="apollo", options={**LANES, "plan.autotune": True})
    first = _train(model, FEW_STEPS, [inputs(0)], run)
    replicated = {n: v.to_local().clone() for n, v in model.state_dict().items() if v.placements[0].is_replicate()}
    (entry,) = registry.find_models(model)
    for graph in entry.graphs:
        graph.prepare()
        graph.use((Variant.PLAN, Variant.INDUCTOR)[rank])
    expected = [_train(alone, FEW_STEPS, [inputs(0)]) for _ in range(2)]
    return {
        "replicated": replicated,
        "found": {**_named("first", first), **_named("second", _train(model, FEW_STEPS, [inputs(0)], run))},
        "expected": {**_named("first", expected[0]), **_named("second", expected[1])},
        "variants": [graph.variant for graph in entry.graphs],
        "is_settled": registry.is_settled(run),
        **_graphs(model),
    }


def _named(name: str, result: Result) -> Result:
    return {f"{name} {key}": value for key, value in result.items()}


def run_branches(rank: int) -> Result:
    """Collectives that the user wrote into two branches; compiled code has those of tensor parallelism."""
    torch.manual_seed(0)
    model = Pair(dist.group.WORLD)
    run = torch.compile(model, backend="apollo", options={**LANES, "runtime.bodies": "eager"})
    with torch.no_grad():
        return {"expected": model(inputs(rank)), "found": [run(inputs(rank)) for _ in range(5)], **_graphs(model)}


def run_dynamic(rank: int) -> Result:
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


def run_absent(rank: int) -> Result:
    """Only rank 1 has this modality: it compiles and plans without the others, which meet it afterwards."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    x = torch.ones(2, 8)
    if rank == 1:
        run = torch.compile(model, backend="apollo", options={**LANES, "runtime.bodies": "eager"})
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x))
    dist.barrier()
    return _graphs(model)


def run_with_fault(fault: Callable[[], AbstractContextManager[Any]], rank: int) -> Result:
    """A graph with collectives, of which rank 1 cannot make what rank 0 does."""
    torch.manual_seed(0)
    model = Pair(dist.group.WORLD)
    options = {**LANES, "debug.strict": False, "plan.planner": "cp_sat", "runtime.bodies": "eager"}
    run = torch.compile(model, backend="apollo", options=options)
    apart.stop_planner()
    with torch.no_grad(), fault() if rank == 1 else nullcontext():
        return {"expected": model(inputs(rank)), "found": [run(inputs(rank)) for _ in range(3)], **_graphs(model)}


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("out of luck")


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "compile": partial(patch.object, bodies, "interpret_bodies", _fail),
    "planner": partial(patch.multiple, apart, COMMAND=("no such program",), _num_failures=0),
    "capture": partial(patch.object, planning, "capture_graph", _fail),
}
"""What goes wrong on one rank, by the name of its scenario. What keeps a graph from being counted is last."""


def run_damaged_batch(rank: int) -> Result:
    """Rank 1 gets a damaged batch, which raises before the first collective of its graph; rank 0 waits in that."""
    group = dist.new_group(timeout=PATIENCE)
    torch.manual_seed(0)
    model, other = nn.Sequential(Reader(), Pair(group)), Pair(dist.group.WORLD)
    options = {**LANES, "runtime.bodies": "eager"}
    run, run_other = (torch.compile(each, backend="apollo", options=options) for each in (model, other))
    x, error = inputs(rank), None
    with torch.no_grad():
        run(x)
        _set_pg_timeout(datetime.timedelta(seconds=1), group)
        try:
            run(x * math.nan if rank == 1 else x)
        except Exception as raised:
            error = {"type": type(raised).__name__, "text": str(raised), "notes": getattr(raised, "__notes__", [])}
        dist.barrier()
        return {"error": error, "expected": other(x), "found": run_other(x), **_graphs(model)}


SCENARIOS: dict[int, dict[str, Scenario]] = {
    SIZE: {
        "ddp": train_ddp,
        "buckets": train_buckets,
        "fsdp": train_fsdp,
        "fsdp, native": train_fsdp_natively,
        "tensor parallel, mixed": train_tensor_parallel_mixed,
        "tensor parallel": train_tensor_parallel,
        "dynamic": run_dynamic,
        **{name: partial(run_with_fault, fault) for name, fault in FAULTS.items()},
        "damaged batch": run_damaged_batch,
    },
    3: {"branches": run_branches, "absent": run_absent},
}
"""By the number of ranks that run them."""


def run_rank(rank: int, module: str, size: int, port: int, folder: Path) -> None:
    """Run the `SCENARIOS` of a module for `size` ranks one after the other, and write what this rank saw of each."""
    scenarios: Mapping[int, Mapping[str, Scenario]] = importlib.import_module(module).SCENARIOS
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), XDG_CACHE_HOME=str(folder))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # gloo else looks the machine's name up, which need not have an address
    torch.set_num_threads(2)
    log = _Lines()
    logging.getLogger("apollo_compile").addHandler(log)
    logging.getLogger("apollo_compile").setLevel(logging.INFO)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    try:
        for name, scenario in scenarios[size].items():
            torch._dynamo.reset()
            log.lines.clear()
            begin = time.monotonic()
            result = scenario(rank)
            result |= {"log": list(log.lines), "seconds": time.monotonic() - begin}
            torch.save(result, folder / f"{name} {rank}.pt")
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


_Model = TypeVar("_Model", bound=nn.Module)


def _twice(make: Callable[[], _Model]) -> tuple[_Model, _Model]:
    """Return two models with the same weights: one that trains alone, and one for the ranks."""
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def _split_layers(model: Towers) -> None:
    """Split the layers of both towers over the ranks."""
    mesh = init_device_mesh("cpu", (SIZE,))
    for tower in (model.left, model.right):
        parallelize_module(tower, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _wrong_profile(rank: int) -> Path:
    """Return the file of what this rank believes of the machine: another thing than the others, and all are wrong."""
    file = Path(os.environ["XDG_CACHE_HOME"]) / f"profile{rank}.json"
    save_profile(dataclasses.replace(default_profile(2), name="wrong", launch_ns=(rank + 1) * NEVER_AS_LONG_NS), file)
    return file


def _train_clip(rank: int, model: nn.Module, run: Callable[..., Any]) -> Result:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for batch in clip_batches(rank):
        optimizer.zero_grad()
        loss = clip_loss(run, batch)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    return {"losses": losses, "state": whole_state(model), **_graphs(model)}


def _train(
    model: nn.Module, steps: int, batches: Sequence[torch.Tensor], run: Callable[..., Any] | None = None
) -> Result:
    """Train on the same batches in every step; return the last output and gradients, and what was learnt."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = [(model if run is None else run)(x) for x in batches]
        (sum(output.square().mean() for output in outputs) / len(batches)).backward()
        gradients = {f"gradient of {n}": _whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return {"output": outputs[0].detach().clone(), **gradients, **whole_state(model)}


def _gradients(model: nn.Module, x: torch.Tensor, run: Callable[..., Any] | None = None) -> Result:
    output = (model if run is None else run)(x)
    output.square().mean().backward()
    found = {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach().clone(), **found}


def assert_close(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], atol: float = 1e-5) -> None:
    """Check that tensors are those expected, but for rounding."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=atol, msg=lambda t, k=key: f"{k}: {t}")


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the parameters and buffers of a model, whole ones of what is sharded."""
    return {name: _whole(value) for name, value in model.state_dict().items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, of all its shards if it has some."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _graphs(model: nn.Module) -> Result:
    """Return what was compiled for a model, as the rank sees it."""
    models = registry.find_models(model)
    return {
        "plans": [graph.compilation.plan for entry in models for graph in entry.graphs],
        "collectives": [
            [s.id for s in graph.compilation.partition.graph.segments if s.has_collective]
            for entry in models
            for graph in entry.graphs
        ],
        "replans": [graph.num_replans for entry in models for graph in entry.graphs],
        "fallbacks": [reason for entry in models for reason in entry.fallbacks],
    }
