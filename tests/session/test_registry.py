"""Compiled models are found by what they were compiled for."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import apollo_compile
from apollo_compile.ir import Variant
from apollo_compile.reports.values import Stage, State
from apollo_compile.session import registry
from apollo_compile.torch_bridge.storages import storages_of


class Similarities(nn.Module):
    """A module without parameters."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x @ y.T
        torch._dynamo.graph_break()
        return z @ y


def similarities(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the similarities of all pairs, in two graphs."""
    z = x @ y.T
    torch._dynamo.graph_break()
    return z @ y


class Scores(nn.Module):
    """A module with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.query(x) @ self.key(x).T


SERIAL = {"plan.planner": "serial", "plan.autotune": False, "runtime.bodies": "eager"}


def compile_by(way: str, model: nn.Module) -> Any:
    """Return what is called, and `report` is asked for, where a model is compiled in one of the ways that there are."""
    if way == "module":
        return torch.compile(model, backend="apollo", options=SERIAL)
    if way == "in place":
        model.compile(backend="apollo", options=SERIAL)
    else:
        model.forward = torch.compile(model.forward, backend="apollo", options=SERIAL)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("way", ["module", "in place", "forward"])
def test_another_instance_of_a_class_has_the_graphs_that_it_shares(way: str) -> None:
    """As in cross validation; its state says so, also when the first instance is gone. One in eager has none."""
    torch._dynamo.reset()
    x = torch.ones(4, 8)
    first, second, eager = compile_by(way, Scores()), compile_by(way, Scores()), Scores()
    first(x).sum().backward()
    known = registry.find_models(first)
    second(x).sum().backward()
    assert not registry.find_models(second), "Dynamo compiled again"
    graphs, metrics = apollo_compile.report(first).graphs, apollo_compile.report(first).metrics()
    assert len(graphs) == 2 and known
    assert "another instance" not in apollo_compile.status(first)
    del first
    gc.collect()
    found = apollo_compile.report(second)
    assert (found.graphs, found.metrics()) == (graphs, metrics)
    assert apollo_compile.status(second).endswith("compiled for another instance of Scores")
    assert str(found).startswith(f"{apollo_compile.status(second)}\n")
    for none in (eager, torch.compile(nn.Linear(8, 8), backend="apollo")):  # one of another class has not run
        assert apollo_compile.status(none).startswith("nothing compiled for this model has run yet")


def test_a_model_whose_parameters_were_exchanged_keeps_its_graphs() -> None:
    """All of them are other tensors then; the compiled code still runs."""
    torch._dynamo.reset()
    model, x = Scores(), torch.ones(4, 8)
    run = torch.compile(model, backend="apollo", options=SERIAL)
    run(x).sum().backward()
    known, status = registry.find_models(model), apollo_compile.status(run)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    assert known and registry.find_models(model) == registry.find_models(run) == known
    assert apollo_compile.status(run) == status


@pytest.mark.parametrize(
    "run", [similarities, Similarities(), Similarities().forward], ids=["function", "module", "method"]
)
def test_what_has_no_parameters_has_a_report(run: Any) -> None:
    """By its code, behind a graph break too; compiled or not."""
    inputs = (torch.ones(64, 64), torch.ones(64, 64))
    compiled = torch.compile(run, backend="apollo", options=SERIAL)
    others = registry.find_models(run)  # torch keeps the graph before a break, a reset notwithstanding
    with torch.no_grad():
        torch.compile(nn.Linear(64, 64), backend="apollo", options=SERIAL)(inputs[0])
        compiled(*inputs)
    graphs = apollo_compile.report(compiled).graphs
    assert len(graphs) == len(others) + 2
    assert apollo_compile.report(run).graphs == graphs


def test_a_graph_whose_only_call_raised_is_not_measured() -> None:
    """A step that a user catches and goes on from: the graphs that run are settled."""
    torch._dynamo.reset()
    model = nn.Linear(8, 8)
    compiled = torch.compile(model, backend="apollo", options=SERIAL)
    with torch.no_grad():
        compiled(torch.ones(4, 8))
        with pytest.raises(RuntimeError, match="dtype"):
            compiled(torch.ones(4, 8, dtype=torch.float64))
        for _ in range(20):
            compiled(torch.ones(4, 8))
    assert len(registry.find_models(model)) == 2
    assert apollo_compile.status(model).startswith("settled")
    assert apollo_compile.report(model).metrics()["apollo/settled"] == 1.0


@dataclass(eq=False)
class Known:
    """What the registry asks of a compiled model."""

    name: str = "0/0"
    storages: frozenset[Any] = frozenset()
    code: frozenset[CodeType] = frozenset()
    called: Any = None
    variants: tuple[Variant, ...] = ()
    fallbacks: tuple[str, ...] = ()
    stage: Stage = Stage.SETTLED
    has_run: bool = True

    def __post_init__(self) -> None:
        self.graphs = [SimpleNamespace(has_run=self.has_run)]
        registry.register(self)  # type: ignore[arg-type]

    def running_variants(self) -> list[Variant]:
        """Return what runs."""
        return list(self.variants)

    def state(self) -> State:
        """Return how far it is."""
        return State(graph=self.name, stage=self.stage)


def test_a_model_is_found_by_any_tensor_of_its_state_while_it_lives() -> None:
    """Of the module itself, of a method, and of the compiled module; another one has other tensors."""
    layer, other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    known = [Known(storages=storages_of([tensor])) for tensor in (layer.weight, layer.running_mean)]
    for same in (layer, layer.forward, torch.compile(layer)):
        assert registry.find_models(same) == known
    assert registry.find_models(other) == []
    del known
    assert registry.find_models(layer) == []


def test_variants_of_a_model_are_those_of_all_its_graphs_and_what_never_ran_decides_nothing() -> None:
    """Each once; what falls back is Inductor's."""
    layer = nn.Linear(2, 2)
    own = storages_of(layer.parameters())
    first = Known(storages=own, variants=(Variant.PLAN, Variant.SERIAL), fallbacks=("1/0 backward", "2/0"))
    idle = Known(storages=own, stage=Stage.MEASURING, has_run=False)
    assert registry.variants_of(layer) == [Variant.PLAN, Variant.SERIAL, Variant.INDUCTOR]
    assert registry.is_settled(layer)
    busy = Known(storages=own, stage=Stage.MEASURING)
    assert not registry.is_settled(layer) and registry.find_models(layer) == [first, idle, busy]


def test_graphs_of_a_call_are_counted_by_their_code() -> None:
    """A code that was compiled again counts once, and that of the graph itself does not."""
    called, other = nn.Linear(2, 2), nn.Linear(2, 2)
    known = [Known(name=name, called=weakref.ref(called)) for name in ("0/0", "0/1", "1/0", "2/0")]
    known.append(Known(name="3/0", called=weakref.ref(other)))
    assert registry.num_graphs_of(weakref.ref(called), besides="2/1") == 2
    assert registry.num_graphs_of(None, besides="2/1") == 0
    assert registry.models_of_call(other) == known[4:]
