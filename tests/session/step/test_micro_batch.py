"""Forward and backward are joined by the names of their values; where that cannot be, the reason is in words."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import Partition, Role
from apollo_compile.session.step.micro_batch import GraphCode, join_graphs
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.lanes import lane_catalogue
from apollo_compile.target.target import Contract
from apollo_compile.trials import TrialStep, write_program
from tests.reports.test_summary import compilation

WEIGHT, STATISTIC, X = torch.ones(2, requires_grad=True), torch.ones(2), torch.ones(2)
OWNED = {id(WEIGHT), id(STATISTIC)}


def code_of(taken: str, made: str, **contract: Any) -> GraphCode:
    """Return a graph of one segment that takes and makes values of these names; `-` is a place without one."""
    takes, makes = taken.split(), [name for name in made.split() if name != "-"]
    step = TrialStep(body=0, reads=tuple(range(len(takes))), lane=0, makes=len(makes))
    written, _ = write_program("g", [step], lane_catalogue(1), num_inputs=len(takes), role=Role.FORWARD)
    named = zip(written.buffers, [*takes, *makes], strict=True)
    buffers = tuple(replace(buffer, name=name, is_output=name in makes) for buffer, name in named)
    number_of = {each.name: each.id for each in buffers}
    outputs = tuple(None if name == "-" else number_of[name] for name in made.split())
    partition = Partition(graph=replace(written, buffers=buffers, outputs=outputs), bodies=(), nodes_by_segment=())
    return GraphCode(compilation=cast(Compilation, SimpleNamespace(partition=partition)), contract=Contract(**contract))


FORWARD = code_of("weight statistic x", "loss product", user_outputs=frozenset({0}))
BACKWARD = code_of("product tangents_1", "gradient - -")
RIGHT: dict[str, Any] = {"forward": FORWARD, "backward": BACKWARD, "inputs": [WEIGHT, STATISTIC, X], "owned": OWNED}


def test_a_micro_batch_has_its_state_and_what_is_trained_of_it() -> None:
    """The rest of its inputs is its own."""
    micro = join_graphs("0/0", **RIGHT, dtypes=[torch.float64])
    assert (list(micro.state), list(micro.parameters)) == ([0, 1], [0])
    assert micro.parameters[0] is WEIGHT
    assert (micro.num_inputs, micro.returned, micro.loss_dtype) == (3, [0], torch.float64)
    assert micro.device == torch.device("cpu")


FORWARD_THAT_RETURNS = replace(FORWARD, contract=Contract(user_outputs=frozenset({0, 1})))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"inputs": [WEIGHT, X]},
            "takes 3 tensors and the backward makes 3 gradients for 2 inputs of 0/0: some of them",
        ),
        ({"inputs": [WEIGHT, STATISTIC, 3]}, "for 3 inputs of 0/0: some of them share memory, or are no plain tensors"),
        (
            {"forward": replace(FORWARD, contract=Contract(written_inputs=frozenset({2})))},
            "writes to something else than the buffers of the model",
        ),
        (
            {"owned": {id(STATISTIC)}},
            r"something else than parameters of the model requires gradients: a tensor with \d+ elements? of "
            "torch.float32; detach it, or make it a parameter of the model",
        ),
        ({"inputs": [WEIGHT * 2, STATISTIC, X], "owned": None}, "update it under `torch.no_grad"),
        ({"backward": code_of("product", "gradient - -")}, "0 outputs of the loss function need gradients; expected"),
        ({"backward": code_of("tangents_1 tangents_2", "gradient - -")}, "2 outputs of the loss function need"),
        (
            {"forward": FORWARD_THAT_RETURNS},
            "returns 2 tensors to the caller where Dynamo expects 1: some of them share",
        ),
        ({"backward": code_of("sum tangents_1", "gradient - -")}, "reads sum, which the forward does not return"),
        (
            {"backward": code_of("product tangents_1", "gradient - -", written_inputs=None)},
            "0/0 writes to other tensors than its inputs",
        ),
    ],
)
def test_graphs_that_do_not_fit_together_are_refused_in_words(changed: dict[str, Any], reason: str) -> None:
    """Each for a reason of its own."""
    given = {**RIGHT, **changed}
    given["owned"] = given["owned"] or set(map(id, given["inputs"]))
    with pytest.raises(UnsupportedGraphError, match=reason):
        join_graphs("0/0", **given)


def test_a_graph_as_one_segment_runs_inductors_code_of_the_whole() -> None:
    """The segment makes each returned value once, and none that is an input."""
    made = compilation()
    graph = made.partition.graph
    (first, *_), (last,) = graph.inputs, graph.outputs
    partition = replace(made.partition, graph=replace(graph, outputs=(last, first, None, last)))
    code = GraphCode(compilation=replace(made, partition=partition), contract=Contract())
    whole = code.as_single_segment(lambda inputs: [X, WEIGHT, WEIGHT, WEIGHT])
    (segment,), (body,) = whole.graph.segments, whole.bodies
    assert len(segment.outputs) == 1 and body.function([]) == [X]
    assert whole.compilation.partition.nodes_by_segment == (tuple(node.id for node in made.capture.nodes),)
