"""Models that fall into many graphs: one line says into how many, why, and what to compile instead."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import apollo_compile
from apollo_compile.torch_bridge.compile_context import compile_apart

OPTIONS = {"runtime.bodies": "eager", "plan.planner": "greedy", "plan.autotune": False}
FLOOR = -1e9


class Eye(nn.Module):
    """Looks at its values between layers, as encoders do that take pictures of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """Break the graph in every line."""
        x = self.layers[0](x) if x.sum().item() > FLOOR else x
        x = self.layers[1](x) if x.sum().item() > FLOOR else x
        x = self.layers[2](x) if x.sum().item() > FLOOR else x
        x = self.layers[3](x) if x.sum().item() > FLOOR else x
        x = self.layers[4](x) if x.sum().item() > FLOOR else x
        x = self.layers[5](x) if x.sum().item() > FLOOR else x
        x = self.layers[6](x) if x.sum().item() > FLOOR else x
        return self.layers[7](x) if x.sum().item() > FLOOR else x


class Sighted(nn.Module):
    """A language model, which breaks nowhere, behind an eye."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2))
        self.eye, self.language = Eye(), nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return a vector per row."""
        return self.language(self.eye(x))


@dataclass(frozen=True)
class Trained:
    """A model after two calls, and what was logged meanwhile."""

    model: Sighted
    run: Callable[[Tensor], Tensor]
    lines: Sequence[str]


@pytest.fixture(scope="module")
def trained() -> Iterator[Trained]:
    """Compile once, without a backward: there are many graphs."""
    torch._dynamo.reset()
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("apollo_compile").addHandler(handler)
    model = Sighted()
    run = torch.compile(model, backend="apollo", options=OPTIONS)
    with torch.no_grad():
        for _ in range(2):
            run(torch.randn(4, 8))
    logging.getLogger("apollo_compile").removeHandler(handler)
    yield Trained(model, run, lines)
    torch._dynamo.reset()


def test_a_model_warns_once_of_many_graphs(trained: Trained) -> None:
    """As soon as there are many, with the line of code and what to compile; the second call says nothing."""
    (line,) = (line for line in trained.lines if "falls into" in line)
    assert line.startswith("Sighted falls into more than 8 graphs, between which nothing overlaps: 1 of 8 graph breaks")
    assert f"{__file__}:30 in forward: x = self.layers[0](x) if x.sum().item() > FLOOR else x (" in line
    assert line.endswith("; compile language instead, where no graph broke so far (66% of the parameters)")
    assert "\n" not in line


def test_a_report_has_the_line_with_all_graphs(trained: Trained) -> None:
    """In the text and on the page; sentences about single graphs do not repeat it."""
    report, counter = apollo_compile.report(trained.run), CompileCounter()
    compile_apart(trained.model, backend=counter)(torch.randn(4, 8))
    assert f"Sighted falls into {counter.frame_count} graphs" in report.fragments and "so far" not in report.fragments
    assert str(report).count(report.fragments) == 1
    assert report.fragments.split(" in forward")[0] in report.to_html()
    assert "Try to remove" not in str(report)


def test_what_is_named_compiles_whole(trained: Trained) -> None:
    """Dynamo itself says so."""
    torch.compile(trained.model.language, backend="eager", fullgraph=True)(torch.randn(4, 8))


def test_explain_names_modules_of_a_function_by_its_own_names() -> None:
    """Without training."""
    torch._dynamo.reset()
    model = Sighted()

    def predict(x: Tensor) -> Tensor:
        return model(x).relu()

    with torch.no_grad():
        report = apollo_compile.explain(predict, (torch.randn(4, 8),), options=OPTIONS)
    assert "predict falls into" in report.fragments and "; compile model.language instead" in report.fragments


def test_a_few_graphs_are_nothing_to_talk_about() -> None:
    """One break is in the report like any other."""
    torch._dynamo.reset()

    def look(x: Tensor) -> Tensor:
        return x.exp() if x.sum().item() > FLOOR else x

    report = apollo_compile.explain(look, (torch.randn(4, 8),), options=OPTIONS)
    assert report.breaks and not report.fragments


def test_a_step_speaks_of_its_loss_function(caplog: pytest.LogCaptureFixture) -> None:
    """The line names modules as the model does."""
    torch._dynamo.reset()
    step = apollo_compile.compile_step(Sighted(), lambda model, x: model(x).square().mean(), options=OPTIONS)
    for _ in range(2):  # in eager, and in pieces
        step(torch.randn(4, 8))
    (line,) = (each for each in caplog.messages if "falls into" in each)
    assert line.startswith("loss_function falls into more than 8") and "; compile model.language instead" in line
