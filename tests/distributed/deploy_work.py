"""What both ranks of the deployments do: `run_rank` is called in processes of their own, and writes what it saw."""

from __future__ import annotations

import copy
import datetime
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import apollo_compile
from apollo_compile.cost_model.collectives import Link
from apollo_compile.distributed.deploy import build as deploy_build
from apollo_compile.errors import ApolloError
from benchmarks.workloads import build

SIZE, STEPS, BATCH, WIDTH = 2, 10, 8, 16
PATIENCE = datetime.timedelta(seconds=120)
Batch = Mapping[str, torch.Tensor]


def tower(layers: int) -> nn.Module:
    """Return a tower of linear layers."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers)))


class Towers(nn.Module):
    """Two towers, and a parameter between them."""

    def __init__(self, image: int, text: int) -> None:
        super().__init__()
        self.image, self.text = tower(image), tower(text)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.scale * self.image(image) @ self.text(text).T


class Chain(nn.Module):
    """An encoder, code with a parameter, and a reader that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.reader = tower(3), tower(3)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        features = self.reader(self.encoder(image) + self.shift) + self.reader(text)
        return features @ features.T


class Pair(nn.Module):
    """Returns a mapping with two tensors, of which one is not used after it, and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tower(2)
        self.unused = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, *, note: str) -> dict[str, Any]:
        features = self.layers(x)
        return {"note": note, "logits": self.unused(features), "pooled": features, "rows": x.argmax(1)}


class Mixed(nn.Module):
    """A frozen encoder, and a module with an output of several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.pair = tower(2).requires_grad_(False), Pair()

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        found = self.pair(text, note="kept")
        assert found["note"] == "kept"
        return self.frozen(image) @ (found["pooled"] + found["rows"][:, None] / WIDTH).T


class Gated(nn.Module):
    """Two linear layers side by side, one that reads them, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH, bias=False)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x + self.shift))


class Blocks(nn.Module):
    """A tower of gated blocks that is called twice, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(Gated(), nn.LayerNorm(WIDTH), Gated())
        self.text = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.image(image) @ self.image(self.text(text)).T


class Meeting(nn.Module):
    """Returns its input; if ranks meet, the first one waits until the second has run."""

    notes: dist.Store
    has_begun = False

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Meeting.has_begun and self.is_first:
            Meeting.notes.wait(["second"], PATIENCE)
        elif Meeting.has_begun:
            Meeting.notes.set("second", "")
        return x


class Late(Towers):
    """A small module reads the first tower before the second is called."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.small = nn.Linear(WIDTH, WIDTH)
        self.image, self.text = (
            nn.Sequential(each, Meeting(is_first=each is self.image)) for each in (self.image, self.text)
        )

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.small(self.image(image)) @ self.text(text).T


class Writing(Towers):
    """Writes to the input of a tower before the output is used, if it is told so."""

    is_told = False

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        found = self.image(image)
        if self.is_told:
            image.add_(0)
        return found @ self.text(text).T


class Scenario(NamedTuple):
    """A model, its batch and its loss."""

    model: nn.Module
    batch: Batch
    loss_fn: Callable[[Any], torch.Tensor]
    names: tuple[str, ...]
    """Modules to place."""
    rate: float = 0.05
    """Learning rate."""


def diagonal_loss(scores: torch.Tensor) -> torch.Tensor:
    """Return the contrastive loss, which needs all samples."""
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def make(kind: str) -> Scenario:
    """Return a scenario, the same on both ranks."""
    torch.manual_seed(1)
    if kind in ("clip", "act"):
        workload = build(kind, "tiny", batch=4)
        names = ("vision_model", "text_model") if kind == "clip" else ("backbone", "encoder.0")
        return Scenario(workload.model, workload.inputs, workload.loss, names, 1e-4 if kind == "act" else 0.05)
    batch = {"image": torch.randn(BATCH, WIDTH), "text": torch.randn(BATCH, WIDTH)}
    model, names = {
        "ten to one": lambda: (Towers(10, 1), ("image", "text")),
        "chain": lambda: (Chain(), ("encoder", "reader")),
        "mixed": lambda: (Mixed(), ("frozen", "pair")),
        "blocks": lambda: (Blocks(), ("image", "text")),
    }[kind]()
    return Scenario(model, batch, diagonal_loss, names)


KINDS = ("clip", "act", "ten to one", "chain", "mixed", "blocks")
DIVISIONS: dict[str, dict[str, Any]] = {
    "data parallel": {"devices": 2},
    "linear layers": {"devices": 2, "tensor": 2},
    "sharded": {"devices": 2, "is_sharded": True},
}
PLACES = [
    (kind, where)
    for kind in KINDS
    for where in ("plan", *DIVISIONS, "apart", "apart the other way", "one device")
    if where != "linear layers" or kind in ("clip", "blocks")
]
"""Kinds, and the edits of their plan; of the other kinds, no linear layers can be divided."""


def place(plan: apollo_compile.DeploymentPlan, names: tuple[str, ...], where: str) -> apollo_compile.DeploymentPlan:
    """Return the plan, edited."""
    for index, name in enumerate(names) if where != "plan" else ():
        first = {"apart": index % 2, "apart the other way": 1 - index % 2, "one device": 1}.get(where, 0)
        plan = plan.move(name, first=first, **DIVISIONS.get(where, {"devices": 1}))
    return plan


def train(model: nn.Module, scenario: Scenario, *, backwards: int = 1) -> list[float]:
    """Return the losses of some steps; in a step, gradients of several backwards add up."""
    optimizer = torch.optim.SGD(model.parameters(), lr=scenario.rate, momentum=0.9, weight_decay=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(backwards):
            loss = scenario.loss_fn(model(**scenario.batch))
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def bytes_here(parameter: torch.Tensor) -> int:
    """Return the size of this rank's part."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes


FOUR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two replicas of two": ({"devices": 4, "tensor": 2}, {"devices": 4, "is_sharded": True}),
    "one replica of four": ({"devices": 4, "tensor": 4}, {"devices": 2, "tensor": 2}),
    "halves": ({"devices": 2, "is_sharded": True}, {"devices": 4, "tensor": 2}),
}
"""Divisions of two modules over four ranks."""


def join(rank: int, port: int, size: int) -> dist.Store:
    """Join the group with one thread. Modules are timed briefly, since no numbers depend on the plan."""
    torch.set_num_threads(1)
    deploy_build.WARM_UPS, deploy_build.LEAST, deploy_build.BUDGET_S = 1, 2, 0.0
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    return store


def train_and_resume(plan: apollo_compile.DeploymentPlan, scenario: Scenario) -> dict[str, list[Any]]:
    """Return losses, norms, and states of the model and its optimizer, with clipping, in one process and divided.

    Half of the steps run on each of two divisions, with a checkpoint between them.
    """

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        vectors = [each for each in model.parameters() if each.dim() < 2]
        matrices = {"params": [each for each in model.parameters() if each.dim() > 1], "weight_decay": 0.1}
        return torch.optim.AdamW([{"params": vectors, "weight_decay": 0.0}, matrices], lr=0.01)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[..., torch.Tensor]) -> list[float]:
        seen = []
        for _ in range(STEPS // 2):
            loss = scenario.loss_fn(model(**scenario.batch))
            optimizer.zero_grad()
            loss.backward()
            seen += [loss.item(), clip(max_norm=0.1).item()]
            optimizer.step()
        return seen

    alone = copy.deepcopy(scenario.model)
    optimizer = make_optimizer(alone)
    clip = functools.partial(nn.utils.clip_grad_norm_, list(alone.parameters()))
    seen = steps(alone, optimizer, clip) + steps(alone, optimizer, clip)
    found = {"alone": [seen, dict(alone.state_dict()), get_optimizer_state_dict(alone, optimizer)]}
    for name, after in zip(FOUR, [*FOUR][1:] + [*FOUR][:1], strict=True):
        order = FOUR[name], FOUR[after]
        state, optimizer_state, seen = scenario.model.state_dict(), None, []
        for image, text in order:
            edited = plan.move("image", first=0, **image).move("text", first=4 - text["devices"], **text)
            model = copy.deepcopy(scenario.model)
            model.load_state_dict(state)
            edited.apply(model)
            optimizer = make_optimizer(model)
            if optimizer_state is not None:
                edited.load_optimizer_state_dict(model, optimizer, optimizer_state)
            seen += steps(model, optimizer, functools.partial(edited.clip_grad_norm_, model))
            state, optimizer_state = edited.full_state_dict(model), edited.full_optimizer_state_dict(model, optimizer)
        found[name] = [seen, dict(state), optimizer_state]
    return found


def run_one_of_four(rank: int, port: int, folder: Path) -> None:
    """Train on four ranks, with two backwards per step, and write what this rank saw."""
    join(rank, port, 4)
    scenario = make("blocks")
    link = Link(1e-4, 1e9)
    plan = apollo_compile.deploy(
        scenario.model, scenario.batch, loss_fn=scenario.loss_fn, modules=scenario.names, link=link, seconds=1
    )
    alone = copy.deepcopy(scenario.model)
    found: dict[str, Any] = {"": (train(alone, scenario, backwards=2), alone.state_dict())}
    for name, (image, text) in FOUR.items():
        model = copy.deepcopy(scenario.model)
        edited = plan.move("image", first=0, **image).move("text", first=4 - text["devices"], **text)
        losses = train(edited.apply(model), scenario, backwards=2)
        found[name] = (losses, dict(plan.full_state_dict(model)))
    found["resumed"] = train_and_resume(plan, scenario)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def run_rank(rank: int, port: int, folder: Path) -> None:
    """Run all scenarios, and write what this rank saw."""
    store = join(rank, port, SIZE)
    found: dict[str, Any] = {}
    for kind in KINDS:
        scenario = make(kind)
        alone = copy.deepcopy(scenario.model)
        link = Link(1e-4, 1e9)  # measuring is for one of them
        plan = apollo_compile.deploy(
            scenario.model,
            scenario.batch,
            loss_fn=scenario.loss_fn,
            modules=scenario.names,
            link=None if kind == "ten to one" else link,
            seconds=1,
        )
        losses = train(alone, scenario)
        found[kind] = {"plan": plan, "losses": losses, "state": alone.state_dict(), "places": {}}
        for where in (where for own, where in PLACES if own == kind):
            model = copy.deepcopy(scenario.model)
            applied = place(plan, scenario.names, where).apply(model)
            assert applied is model
            losses = train(model, scenario)
            parameters = {name: list(model.get_submodule(name).parameters()) for name in scenario.names}
            is_meta = {name: own[0].is_meta for name, own in parameters.items()}
            num_bytes = {name: sum(map(bytes_here, own)) for name, own in parameters.items()}
            with torch.no_grad():
                scores = scenario.loss_fn(model(**scenario.batch)).item()
            state = dict(plan.full_state_dict(model))
            found[kind]["places"][where] = {
                **{"losses": losses, "state": state, "is_meta": is_meta, "scores": scores, "bytes": num_bytes}
            }
        with torch.no_grad():
            found[kind]["scores"] = scenario.loss_fn(alone(**scenario.batch)).item()
    found["accumulated"] = accumulate()
    found["late"] = train_late(store)
    found["shared"] = {(kind, where): share(kind, where) for kind, where, _ in SHARED}
    found["errors"] = errors()
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def train_late(notes: dist.Store) -> list[list[float]]:
    """Return losses of one process, and of a tower per rank, of which one waits for the other in a step."""
    torch.manual_seed(1)
    batch = {"image": torch.randn(BATCH, WIDTH), "text": torch.randn(BATCH, WIDTH)}
    scenario = Scenario(Late(), batch, diagonal_loss, ("image", "text"))
    alone = copy.deepcopy(scenario.model)
    options: dict[str, Any] = {"loss_fn": diagonal_loss, "modules": scenario.names, "link": Link(1e-4, 1e9)}
    model = place(apollo_compile.deploy(scenario.model, batch, **options, seconds=1), scenario.names, "apart")
    model = model.apply(scenario.model)
    scores = model(**batch)  # ranks learn in it what modules return
    Meeting.notes, Meeting.has_begun = notes, True
    assert torch.allclose(model(**batch), scores)
    Meeting.has_begun = False
    return [train(alone, scenario), train(model, scenario)]


SHARED = [
    ("chain", "both devices", 2),
    ("chain", "one device", 2),
    ("mixed", "both devices", 0),  # an output gets no gradient, so its module runs by itself
]
"""Kinds, groups of two modules that share the units of their devices, and graphs of the ranks that compute them."""


def share(kind: str, where: str) -> dict[str, Any]:
    """Return losses and states of one process and of modules that share devices, and the names of reported graphs."""
    torch.set_num_threads(2)
    scenario = make(kind)
    options: dict[str, Any] = {"loss_fn": diagonal_loss, "modules": scenario.names, "link": Link(1e-4, 1e9)}
    plan = apollo_compile.deploy(scenario.model, scenario.batch, **options, seconds=1)
    alone, model = copy.deepcopy(scenario.model), copy.deepcopy(scenario.model)
    for name in scenario.names:
        group = {"devices": 2, "first": 0} if where == "both devices" else {"devices": 1, "first": 1}
        plan = plan.move(name, **group, units=1)
    plan.apply(model, options={"runtime.bodies": "eager", "debug.strict": True})
    losses = [train(each, scenario) for each in (alone, model)]
    state, graphs = dict(plan.full_state_dict(model)), apollo_compile.report(model).graphs
    torch.set_num_threads(1)
    return {"losses": losses, "states": [dict(alone.state_dict()), state], "graphs": [graph.name for graph in graphs]}


def accumulate() -> list[list[float]]:
    """Return losses of one process and of data parallelism, with two backwards per step."""
    scenario = make("ten to one")
    alone = copy.deepcopy(scenario.model)
    mesh = init_device_mesh("cpu", (SIZE,))
    plan = apollo_compile.deploy(
        scenario.model, scenario.batch, mesh=mesh, loss_fn=scenario.loss_fn, link=Link(1e-4, 1e9), seconds=1
    )
    plan = place(plan, tuple(g.module for g in plan.deployment.groups if g.module in scenario.names), "data parallel")
    model = plan.apply(scenario.model, mesh)
    return [train(alone, scenario, backwards=2), train(model, scenario, backwards=2)]


def errors() -> dict[str, str]:
    """Return the messages of mistakes, which all ranks make."""
    found = {}

    def note(name: str, work: Callable[[], object]) -> None:
        try:
            work()
            found[name] = "none"
        except ApolloError as error:
            found[name] = f"{type(error).__name__}: {error}"

    scenario = make("mixed")
    link = Link(1e-4, 1e9)

    def deploy(model: nn.Module, **options: Any) -> apollo_compile.DeploymentPlan:
        return apollo_compile.deploy(
            model, scenario.batch, loss_fn=diagonal_loss, **{"link": link, "seconds": 1, **options}
        )

    plan = place(deploy(scenario.model, modules=scenario.names), scenario.names, "data parallel")
    note("simulated", lambda: deploy(scenario.model, mesh=4, modules=scenario.names).apply(scenario.model))
    note("no link", lambda: deploy(scenario.model, mesh=4, link=None))
    note("no module", lambda: deploy(scenario.model, modules=["vision"]))
    some = init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("all", "one"))["one"]
    note("some ranks", lambda: deploy(scenario.model, mesh=some))
    note("nested", lambda: deploy(scenario.model, modules=["pair", "pair.layers"]))
    note("memory", lambda: deploy(scenario.model, modules=scenario.names, memory=1000))
    model = plan.apply(copy.deepcopy(scenario.model))
    note("twice", lambda: plan.apply(model))
    optimizer = torch.optim.AdamW(model.parameters())
    state = plan.full_optimizer_state_dict(model, optimizer)
    note(
        "other groups", lambda: plan.load_optimizer_state_dict(model, torch.optim.AdamW(model.pair.parameters()), state)
    )
    note("early optimizer", lambda: plan.full_optimizer_state_dict(model, torch.optim.AdamW(Towers(1, 1).parameters())))
    note("other model", lambda: plan.apply(Towers(1, 1)))
    note("small batch", lambda: model(image=torch.randn(1, WIDTH), text=torch.randn(1, WIDTH)))
    x = torch.ones(BATCH, WIDTH)
    found["unused"] = str(torch.allclose(*(each.pair(x, note="x")["logits"] for each in (model, scenario.model))))
    twice = Towers(2, 2)
    place(deploy(twice, modules=["image", "text"]), ("image", "text"), "data parallel").apply(twice)
    loss = diagonal_loss(twice(**scenario.batch))
    loss.backward(retain_graph=True)
    once = [each.grad.clone() for each in twice.parameters() if each.grad is not None]
    loss.backward()
    grads = [each.grad for each in twice.parameters() if each.grad is not None]
    found["kept graph"] = str(all(torch.allclose(two, 2 * one) for one, two in zip(once, grads, strict=True)))
    tied = Towers(2, 2)
    tied.text[0][0].weight = tied.image[0][0].weight  # type: ignore[union-attr, index, assignment]
    note("tied", lambda: deploy(tied))
    normed = Towers(2, 2)
    normed.image = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    statistics = deploy(normed, modules=["image", "text"])
    note("batch norm", lambda: statistics.move("image", first=0, devices=2))
    note("no pairs", lambda: statistics.move("text", first=0, devices=2, tensor=2))
    place(statistics, ("image", "text"), "apart").apply(normed)
    whole = statistics.full_state_dict(normed)
    found["counted"] = str(
        whole["image.1.num_batches_tracked"].item() == 0 and not any(v.is_meta for v in whole.values())
    )
    writing = Writing(2, 2)
    place(deploy(writing, modules=["image", "text"]), ("image", "text"), "apart").apply(writing)
    with torch.no_grad():
        writing(**scenario.batch)
        writing.is_told = True
        note("written", lambda: writing(**scenario.batch))
    blocks = make("blocks")
    divided = deploy(blocks.model, modules=blocks.names).move("image", first=0, devices=2, tensor=2)
    blocks.model.image[2].up = nn.Identity()  # type: ignore[union-attr, operator]
    note("no layer", lambda: divided.apply(blocks.model))
    dropping = Towers(2, 2)
    dropping.image = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    calm = deploy(dropping.eval(), modules=["image", "text"]).move("image", first=0, devices=2, tensor=2)
    noisy = calm.apply(dropping).train()
    note("random", lambda: noisy(**scenario.batch))
    return found
