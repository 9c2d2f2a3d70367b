"""Bodies that lanes run without the GIL: on every release of torch that is tested, or with one warning why not."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.codecache import CppWrapperCodeCache
from torch._inductor.codegen.cpp import CppTile2DKernel
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.output_code import OutputCode
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.session import bodies as session_bodies
from apollo_compile.session import registry
from apollo_compile.target.target import CompiledBody
from apollo_compile.torch_bridge.bodies import compile_bodies
from apollo_compile.torch_bridge.overrides import check_overrides
from tests.end_to_end.models import STRICT, TwoTowers, assert_trains_as_in_eager, two_tower_inputs, two_tower_loss

OVERRIDDEN: list[tuple[type, str]] = [
    (CppWrapperCpu, "create"),
    (CppWrapperCpu, "generate_end"),
    (CppWrapperCpu, "generate_scoped_gil_acquire"),
    (CppWrapperCodeCache, "_get_uncompiled_header"),
    (CppTile2DKernel, "store"),
    (OutputCode, "post_compile"),
]


@pytest.fixture(autouse=True)
def _a_process_that_warned_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_bodies, "_num_warnings", itertools.count())


def compile_one(function: Callable[..., Any], *inputs: torch.Tensor) -> CompiledBody:
    """Return a body of `function` that was to be native."""
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        (body,) = compile_bodies([("test", graph, fakes)], native=True, is_inference=True)
    return body


def train_towers(**options: Any) -> None:
    """Train two towers as in eager, on lanes."""
    assert_trains_as_in_eager(TwoTowers(depth=1), two_tower_loss, steps=2, backend="apollo", options=options)


def test_every_body_of_a_model_is_native(caplog: pytest.LogCaptureFixture) -> None:
    """With this torch: forward and backward, on lanes, without a word."""
    train_towers(**STRICT, **{"plan.min_gain": 1.0})
    compiled = registry.compiled_models()[-1]
    assert [len(graph.compilation.plan.lanes) > 1 for graph in compiled.graphs] == [True, True]
    bodies = [body for graph in compiled.graphs for body in graph.bodies]
    assert all(body.entry_address is not None and body.keeps_python is None for body in bodies)
    own = [record for record in caplog.records if record.name.startswith("apollo_compile")]
    assert [record for record in own if record.levelno >= logging.WARNING] == []


def test_overrides_are_of_what_this_torch_has() -> None:
    """A release with other methods fails here first: look at what changed, then add what they take to those known."""
    check_overrides()


@pytest.mark.parametrize(("owner", "name"), OVERRIDDEN, ids=[name for _, name in OVERRIDDEN])
def test_an_override_of_something_else_is_refused(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other parameters, or no such method: the error names both sides and what to do."""
    monkeypatch.setattr(owner, name, staticmethod(lambda buffer, where: None))
    with pytest.raises(UnsupportedGraphError, match=rf"expected {name}\(.*has {name}\(buffer, where\).*versions\.md"):
        check_overrides()
    monkeypatch.setattr(owner, name, None)
    with pytest.raises(UnsupportedGraphError, match="has no such method"):
        check_overrides()


def test_a_model_that_loses_native_bodies_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A release of torch with another signature: what it costs, why, what to do; once for forward and backward."""
    monkeypatch.setattr(CppWrapperCpu, "generate_end", lambda self, result, where: None)
    with caplog.at_level(logging.INFO, logger="apollo_compile"):
        train_towers(**STRICT)
    told = [record for record in caplog.records if "lanes take turns under the GIL" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.WARNING, logging.INFO]
    message = told[0].getMessage()
    assert re.match(r"\d+/\d+ forward: (\d) of \1 bodies could", message)
    assert "generate_end(self, result, where)" in message
    assert "'apollo doctor'" in message and "docs/versions.md" in message
    compiled = registry.compiled_models()[-1]
    reasons = [body.keeps_python for graph in compiled.graphs for body in graph.bodies]
    assert all(reason is not None and reason.is_lost for reason in reasons)


def test_a_body_that_a_new_torch_writes_otherwise_is_lost_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not half changed: a text that is to be replaced and is not there costs the native form, and says which."""
    end = CppWrapperCpu.generate_end

    def write_otherwise(self: Any, result: Any) -> None:
        end(self, result)
        result._lines = [
            line.replace("load_pybinding", "load") if isinstance(line, str) else line for line in result._lines
        ]

    monkeypatch.setattr(CppWrapperCpu, "generate_end", write_otherwise)
    x = torch.randn(8)
    with fresh_cache():
        body = compile_one(lambda x: (x.sin() + 1,), x)
    assert body.keeps_python is not None and body.keeps_python.is_lost and body.entry_address is None
    assert "load_pybinding(' is in 0 of its lines" in body.keeps_python.reason
    torch.testing.assert_close(body.function([x]), [x.sin() + 1])


@torch.library.custom_op("apollo_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    """Return half of `x`."""
    return x / 2


halved.register_fake(torch.empty_like)


class Halves(nn.Module):
    """A tower that calls Python, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = TwoTowers(depth=1)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.towers(halved(image), text)


def test_a_body_that_calls_python_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A custom operator is Python by its nature; the other bodies are native."""
    inputs, model = two_tower_inputs(), Halves()
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="apollo_compile"):
        torch.testing.assert_close(
            torch.compile(model, backend="apollo", options=STRICT)(*inputs), model(*inputs), rtol=1e-4, atol=1e-4
        )
    (line,) = (record for record in caplog.records if "GIL" in record.getMessage())
    assert line.levelno == logging.INFO and "segments that call Python run under the GIL" in line.getMessage()
    (graph,) = registry.compiled_models()[-1].graphs
    assert [body.keeps_python is None for body in graph.bodies].count(False) == 1 < len(graph.bodies)
