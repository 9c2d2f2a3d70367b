"""Graphs of a loss function run, or only note their inputs, and keep nothing of a batch alive."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from apollo_compile.session.step.notes import LossGraph, Notes, NotLinkedError

WEIGHT = torch.nn.Parameter(torch.ones(2))


def graph_of(notes: Notes, *, is_linked: bool = False) -> LossGraph:
    """Return a graph that multiplies; a linked one knows its device."""
    micro = SimpleNamespace(device=torch.device("cpu")) if is_linked else None
    return LossGraph(
        compiled=lambda weight, x: (x.detach().sum(), (weight * x).sum()),
        model=cast(Any, None),
        notes=weakref.ref(notes),
        micro=cast(Any, micro),
        dtypes=[torch.float64, torch.float32],
    )


def test_a_loop_runs_the_graph_and_learns_where_the_loss_is() -> None:
    """It is the output that has a graph; the model's tensors are kept, and those of the batch are not."""
    notes = Notes(lambda: {id(WEIGHT)})
    graph = graph_of(notes)
    notes.begin_loop(0, 1)
    batch = torch.full((2,), 3.0)
    alive = weakref.ref(batch)
    assert graph(WEIGHT, batch)[1] == 6
    assert (notes.latest, graph.loss, graph.dtypes) == (graph, 1, [torch.float32, torch.float32])
    del batch
    gc.collect()
    assert alive() is None
    assert graph.inputs is not None
    assert graph.inputs[0] is WEIGHT
    notes.begin_loop(1, 1)
    assert notes.latest is None


def test_a_linked_graph_notes_its_inputs() -> None:
    """Its outputs are tensors of the right dtypes that get their values later."""
    notes = Notes(lambda: {id(WEIGHT)})
    graph = graph_of(notes, is_linked=True)
    x = torch.ones(2)
    with notes.noting() as noted:
        outputs = graph(WEIGHT, x)
    ((only),) = noted
    assert only.graph is graph
    assert only.inputs[1] is x
    assert [each.dtype for each in outputs] == [torch.float64, torch.float32]
    assert all(mine is other for mine, other in zip(outputs, only.outputs, strict=True))
    assert graph(WEIGHT, x)[1] == 2  # runs again


def test_a_graph_that_is_not_linked_ends_the_noting() -> None:
    """Then the step is a loop, in which graphs run."""
    notes = Notes(set)
    graph = graph_of(notes)
    with pytest.raises(NotLinkedError), notes.noting():
        graph(WEIGHT, torch.ones(2))
    assert graph(WEIGHT, torch.ones(2))[1] == 2


def test_a_graph_outlives_its_step() -> None:
    """Dynamo keeps it; then it runs, and has no outcomes."""
    notes = Notes(set)
    graph = graph_of(notes)
    notes.outcomes[graph] = {1: "a reason"}
    assert graph.outcomes == {1: "a reason"}
    del notes
    gc.collect()
    assert graph.outcomes == {}
    assert graph(WEIGHT, torch.ones(2))[1] == 2


def test_a_graph_that_is_refused_holds_no_tensor_of_the_model() -> None:
    """Dynamo keeps it for good, and its inputs are not asked for again."""
    notes = Notes(lambda: {id(WEIGHT)})
    graph = graph_of(notes)
    graph.compiled = lambda weight, x: ((weight * x).sum(), 3)
    notes.begin_loop(0, 1)
    assert graph(WEIGHT, torch.ones(2))[1] == 3
    assert graph.is_decided and graph.refusal and graph.inputs is None
