"""Explaining a model plans it as compiling does, and leaves no trace of itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import apollo_compile
from apollo_compile.errors import TargetError
from apollo_compile.tools.explain import explain
from tests.end_to_end.models import Tower, TwoTowers, two_tower_inputs
from tests.end_to_end.step_cases.models import Wrapped

GREEDY = {"plan.planner": "greedy", "plan.time_limit_s": 0.2}


class Busy(nn.Module):
    """Everything that a forward may change: buffers, attributes, random states; and a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        y = self.norm(self.linear(x))
        if y.sum().item() > -1e9:
            y = y + torch.rand_like(y)
        return y


class Moving(Busy):
    """The graph is busy, and writes to a parameter too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data.mul_(0.5)
        return super().forward(x)


class Scaled(nn.Linear):
    """A layer whose output is scaled by a number that Dynamo does not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * y.sum().item()


@pytest.mark.parametrize("through_method", [False, True], ids=["module", "method"])
def test_nothing_of_a_model_changes(through_method: bool) -> None:
    """Parameters, gradients, buffers, attributes, mode, inputs, random state; and later compiles see static shapes."""
    model, x = Moving(), torch.randn(4, 8)
    called = model.forward if through_method else model
    model.linear.weight.grad = torch.ones(8, 8)
    state = copy.deepcopy(model.state_dict())
    before = torch.get_rng_state()
    versions = [parameter._version for parameter in model.parameters()]
    kept = x.clone()
    report = explain(called, (x,), options=GREEDY)
    explain(called, (torch.randn(3, 8, generator=torch.Generator()),), options=GREEDY)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [parameter._version for parameter in model.parameters()] == versions
    assert torch.equal(model.linear.weight.grad, torch.ones(8, 8)) and model.linear.bias.grad is None
    assert (model.num_calls, model.training) == (0, True)
    assert torch.equal(x, kept)
    assert report.breaks
    shapes: list[Any] = []

    def look(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        shapes.append([size for tensor in inputs if isinstance(tensor, torch.Tensor) for size in tensor.shape])
        return graph_module

    torch.compile(model, backend=look)(torch.randn(5, 8))
    assert all(isinstance(size, int) for sizes in shapes for size in sizes)


def test_the_plan_is_the_one_that_is_compiled() -> None:
    """Forward and backward, segment by segment."""
    halves = {name: nn.Linear(64, 64, bias=False) for name in ("left", "right")}  # no C++ compiler is needed
    model = Wrapped(lambda own, x, y: own.left(x) @ own.right(y).T, **halves)
    inputs = (torch.randn(64, 64), torch.randn(64, 64))
    options = {**GREEDY, "plan.autotune": False, "plan.replan": False, "runtime.bodies": "python"}
    planned = explain(model, inputs, options=options)
    assert [graph.role for graph in planned.graphs] == ["forward", "backward"]
    assert all(graph.measured is None for graph in planned.graphs)
    run = torch.compile(model, backend="apollo", options=options)
    for _ in range(2):  # the first one is cold
        run(*inputs).sum().backward()
    compiled = apollo_compile.report(run)
    assert all(graph.measured is not None for graph in compiled.graphs)
    for ours, theirs in zip(planned.graphs, compiled.graphs, strict=True):
        assert [(s.name, s.lane, s.predicted_ns) for s in ours.segments] == [
            (s.name, s.lane, s.predicted_ns) for s in theirs.segments
        ]


def test_without_gradients_there_is_no_backward() -> None:
    """As when it is called; a function and a compiled model are as good as a module."""
    model, inputs = TwoTowers(), two_tower_inputs()
    with torch.no_grad():
        (graph,) = explain(torch.compile(model), inputs, options=GREEDY).graphs
        assert graph.role == "inference"
        report = explain(lambda x, y: x @ y.T, inputs, options={**GREEDY, "plan.autotune": False})
    assert [graph.name for graph in report.graphs] == ["1/0 inference"]
    assert str(report).startswith("planned: only your own steps can tell whether it helps\n")


def test_a_break_is_named_with_its_line_and_what_removes_it() -> None:
    """And the remedy removes it; `test_fragments.py` has the breaks of compiled models."""
    model, x = Busy(), torch.randn(4, 8)
    (found,) = explain(model, (x,), options=GREEDY).breaks
    assert found.code == "if y.sum().item() > -1e9:"
    assert (found.file, found.function) == (__file__, "forward")
    flag = "torch._dynamo.config.capture_scalar_outputs = True"
    assert found.remedies[0] == flag

    with torch.no_grad():
        assert explain(Scaled(8, 8), (x,), options=GREEDY).breaks[0].remedies[0] == flag
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            assert explain(Scaled(8, 8), (x,), options=GREEDY).breaks == ()


def test_a_graph_that_is_inductors_has_its_plan_in_the_report() -> None:
    """So that a reader sees why there is nothing to gain: from a dry run, and from a real one."""
    layer, x = nn.Linear(1024, 1024), torch.ones(512, 1024)
    with torch.no_grad():
        planned = explain(layer, (x,), options=GREEDY)
        run = torch.compile(layer, backend="apollo", options=GREEDY)
        run(x)
    for report in (planned, apollo_compile.report(run)):
        (graph,) = report.graphs
        assert graph.variant == "Inductor"
        assert [f"{name} inference" for name, _ in report.fallbacks] == [graph.name]
        assert "Nothing can overlap" in str(report) and "nothing to gain" in str(report)
        assert str(report).startswith("falls back: nothing to gain: ")


@pytest.mark.parametrize(("bodies", "variant"), [("native", "plan"), ("python", "Inductor")])
def test_a_chain_runs_in_segments_where_they_are_code_of_their_own(bodies: str, variant: str) -> None:
    """No plan of it has lanes, and its kernels are large; bodies that Python calls are no faster than the graph."""
    chain, x = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]), torch.ones(512, 1024)
    with torch.no_grad():
        (graph,) = explain(chain, (x,), options={**GREEDY, "runtime.bodies": bodies}).graphs
    assert graph.variant == variant and {segment.lane for segment in graph.segments} == {0}


def compare(own: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """Run encoders that meet in one loss, as those of ImageBind do."""
    first, *others = (encoder(x) for encoder, x in zip(own.encoders, inputs, strict=True))
    return sum((first @ other.T).sum() for other in others)


def test_four_encoders_run_at_once_where_there_are_units_for_them() -> None:
    """On the SMs of a GPU that is not here, as its profile says; two cores run two at once."""
    model, inputs = Wrapped(compare, encoders=nn.ModuleList(Tower(64, 2) for _ in range(4))), 4 * (torch.ones(64, 64),)
    with torch.no_grad():
        (there,) = explain(model, inputs, profile="h200", options=GREEDY).graphs
        (here,) = explain(model, inputs, options=GREEDY).graphs
    assert (there.device.kind, there.device.units, here.device.units) == ("cuda", 132, 2)
    assert here.num_lanes <= 2 < there.num_lanes


def test_what_cannot_be_planned_is_one_error_and_a_plan_that_cannot_be_made_is_a_reason() -> None:
    """The error says what failed and what to do; for the reason, the backend would fall back, too."""
    x = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(TargetError, match=r"cannot copy the inputs(.|\n)*call detach\(\)"):
        explain(nn.Linear(2, 2), (x * 2,))
    with pytest.raises(TargetError, match="Dynamo found nothing to compile"):
        explain(lambda: 3)
    with pytest.raises(TargetError, match="cannot plan a str: expected a module"):
        explain("model.py:build")  # type: ignore[arg-type]
    with pytest.raises(TargetError, match=r"args is a Tensor: expected a tuple, as in explain\(model, \(x,\)\)"):
        explain(nn.Linear(2, 2), torch.ones(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="kwargs is a Tensor: expected a mapping"):
        explain(nn.Bilinear(2, 2, 2), (torch.ones(2, 2),), torch.ones(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="no report of a Tensor: expected a compiled module or function"):
        apollo_compile.report(torch.ones(2))  # type: ignore[arg-type]
    report = explain(nn.Linear(64, 64), (torch.randn(8, 64),), options={"plan.memory_quota": 1})
    assert report.fallbacks and all("InfeasiblePlanError" in reason for _, reason in report.fallbacks)
