"""The six public workloads train with backend="apollo" as in eager, and no program of theirs has a race."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from apollo_compile.session import registry
from apollo_compile.session.graph import CompiledGraph
from apollo_compile.session.model import CompiledModel
from benchmarks.workloads import Workload, build
from tests.end_to_end.models import STRICT, assert_as_accurate, train
from tests.races import find_races, without_each_wait

pytestmark = pytest.mark.slow

NAMES = ("clip", "flava", "clap", "llava", "whisper", "vit_control")
ALWAYS = ("clip",)
"""Two towers, and an encoder with a decoder: trained in every run, operator by operator."""


def _loss_of(workload: Workload, run: Callable[..., Any]) -> torch.Tensor:
    return workload.loss(run(**workload.inputs))


def _in_float64(workload: Workload) -> Workload:
    def cast(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    inputs = {name: cast(value) for name, value in workload.inputs.items()}
    return replace(workload, model=copy.deepcopy(workload.model).double(), inputs=inputs)


@pytest.mark.parametrize(
    ("name", "bodies"),
    [
        *(pytest.param(name, "eager", marks=() if name in ALWAYS else pytest.mark.soak) for name in NAMES),
        *(pytest.param(name, "native", marks=pytest.mark.soak) for name in NAMES),
    ],
)
def test_five_training_steps_and_inference_equal_eager(name: str, bodies: str) -> None:
    """Loss, gradients, state and outputs under no_grad agree; no program has a race, no operator an unknown cost.

    Programs are the same whether bodies are compiled or not, and compiling them takes most of the time, the more the
    finer the cut is; `make demo` compares the gradients of a compiled CLIP.
    """
    others = registry.compiled_models()
    workload = build(name, "tiny")
    options = {**STRICT, "runtime.bodies": bodies, "partition.granularity": "layer" if bodies == "eager" else "module"}
    eager = train(workload.model, lambda run: _loss_of(workload, run))
    apollo = train(workload.model, lambda run: _loss_of(workload, run), backend="apollo", options=options)
    compiled = _compiled(others)
    exact = _in_float64(workload)
    assert_as_accurate(train(exact.model, lambda run: _loss_of(exact, run)), eager, apollo)

    run = torch.compile(workload.model, backend="apollo", options=options)
    with torch.no_grad():
        torch.testing.assert_close(_loss_of(workload, run), _loss_of(workload, workload.model), rtol=1e-4, atol=1e-5)

    compiled += _compiled(others)
    assert {graph.compilation.capture.role for graph in compiled} == {"forward", "backward", "inference"}
    rng = random.Random(0)
    for item in compiled:
        assert item.compilation.capture.without_formula == ()
        program, graph = item.compilation.program, item.compilation.partition.graph
        assert [defect for _ in range(20) for defect in find_races(program, graph, rng)] == []
        assert all(find_races(broken, graph, rng) for broken in without_each_wait(program))


def _compiled(others: list[CompiledModel]) -> list[CompiledGraph]:
    return [graph for model in registry.compiled_models() if model not in others for graph in model.graphs]
