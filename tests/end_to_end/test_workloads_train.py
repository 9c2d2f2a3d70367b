"""The six public workloads train with backend="apollo" as in eager, and no program of theirs has a race."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from apollo_compile import backend
from apollo_compile.ir import Program, Wait
from benchmarks.workloads import Workload, build
from tests.end_to_end.models import STRICT, assert_as_accurate, train
from tests.races import find_races

pytestmark = pytest.mark.slow

NAMES = ("clip", "flava", "clap", "llava", "whisper", "vit_control")


def _loss_of(workload: Workload, run: Callable[..., Any]) -> torch.Tensor:
    return workload.loss(run(**workload.inputs))


def _in_float64(workload: Workload) -> Workload:
    def cast(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    inputs = {name: cast(value) for name, value in workload.inputs.items()}
    return replace(workload, model=copy.deepcopy(workload.model).double(), inputs=inputs)


@pytest.mark.parametrize("name", NAMES)
def test_five_training_steps_and_inference_equal_eager(name: str) -> None:
    """Loss, every gradient and the state agree; so do outputs under no_grad; and the oracle finds no race."""
    workload = build(name, "tiny")
    eager = train(workload.model, lambda run: _loss_of(workload, run))
    apollo = train(workload.model, lambda run: _loss_of(workload, run), backend="apollo", options=STRICT)
    exact = _in_float64(workload)
    assert_as_accurate(train(exact.model, lambda run: _loss_of(exact, run)), eager, apollo)

    run = torch.compile(workload.model, backend="apollo", options=STRICT)
    with torch.no_grad():
        torch.testing.assert_close(_loss_of(workload, run), _loss_of(workload, workload.model), rtol=1e-4, atol=1e-5)

    rng = random.Random(0)
    compiled = [graph for model in backend.find_models(workload.model) for graph in model.graphs]
    assert {graph.compilation.capture.role for graph in compiled} >= {"inference"}
    programs = [(graph.compilation.program, graph.compilation.partition.graph) for graph in _all_graphs()]
    for program, graph in programs:
        assert [defect for _ in range(5) for defect in find_races(program, graph, rng)] == []
        for position in _waits(program):
            assert find_races(_without(program, position), graph, rng) != []


def _all_graphs() -> list[backend.CompiledGraph]:
    return [graph for model in backend.compiled_models() for graph in model.graphs]


def _waits(program: Program) -> list[tuple[int, int]]:
    return [
        (lane, index)
        for lane, instructions in enumerate(program.instructions)
        for index, instruction in enumerate(instructions)
        if isinstance(instruction, Wait)
    ]


def _without(program: Program, position: tuple[int, int]) -> Program:
    lane, index = position
    instructions = list(program.instructions)
    instructions[lane] = instructions[lane][:index] + instructions[lane][index + 1 :]
    return replace(program, instructions=tuple(instructions))


def test_dropout_in_a_workload_is_reproducible_with_a_fixed_seed() -> None:
    """Two runs with one seed give the same losses to the bit, another seed gives others."""
    workload = build("clip", "tiny", dropout=0.2)

    def losses(seed: int) -> list[float]:
        torch.manual_seed(seed)
        found = train(workload.model, lambda run: _loss_of(workload, run), backend="apollo", options=STRICT, steps=3)
        return [float(loss) for loss in found[0]]

    first = losses(5)
    assert losses(5) == first
    assert losses(6) != first
