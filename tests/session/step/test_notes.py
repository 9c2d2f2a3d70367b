"""Graphs of a loss function keep nothing of a batch alive; that a program takes their inputs: `test_step.py`."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import torch

from apollo_compile.session.step.notes import LossGraph, Notes

WEIGHT = torch.nn.Parameter(torch.ones(2))


def graph_of(notes: Notes) -> LossGraph:
    """Return a graph that multiplies."""
    compiled = lambda weight, x: (x.detach().sum(), (weight * x).sum())  # noqa: E731
    return LossGraph(compiled=compiled, model=cast(Any, None), notes=weakref.ref(notes))


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
    assert alive() is None and graph.inputs[0] is WEIGHT
    notes.begin_loop(1, 1)
    assert notes.latest is None


def test_a_graph_outlives_its_step() -> None:
    """Dynamo keeps it; then it runs, and has no outcomes."""
    notes = Notes(set)
    graph = graph_of(notes)
    notes.outcomes[graph] = {1: "a reason"}
    assert graph.outcomes == {1: "a reason"}
    del notes
    gc.collect()
    assert graph.outcomes == {} and graph(WEIGHT, torch.ones(2))[1] == 2


def test_a_graph_that_is_refused_holds_no_tensor_of_the_model() -> None:
    """Dynamo keeps it for good, and its inputs are not asked for again."""
    notes = Notes(lambda: {id(WEIGHT)})
    graph = graph_of(notes)
    graph.compiled = lambda weight, x: ((weight * x).sum(), 3)
    notes.begin_loop(0, 1)
    assert graph(WEIGHT, torch.ones(2))[1] == 3
    assert graph.is_decided and graph.refusal and graph.inputs is None
