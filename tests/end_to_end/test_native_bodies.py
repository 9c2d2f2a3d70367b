"""Bodies that lanes run without the GIL: on every release of torch that is tested, or with one warning why not."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._inductor.codecache import CppWrapperCodeCache
from torch._inductor.codegen.cpp import CppTile2DKernel
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.output_code import OutputCode
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.session import registry
from apollo_compile.target.target import CompiledBody
from apollo_compile.torch_bridge.bodies import compile_bodies
from apollo_compile.torch_bridge.overrides import check_overrides
from tests.end_to_end.models import STRICT, TwoTowers, assert_trains_as_in_eager, two_tower_loss

OVERRIDDEN: list[tuple[type, str]] = [
    (CppWrapperCpu, "create"),
    (CppWrapperCpu, "generate_end"),
    (CppWrapperCpu, "generate_scoped_gil_acquire"),
    (CppWrapperCodeCache, "_get_uncompiled_header"),
    (CppTile2DKernel, "store"),
    (OutputCode, "post_compile"),
]


def compile_each(*functions: Callable[..., Any], of: torch.Tensor) -> Sequence[CompiledBody]:
    """Return bodies of functions that were to be native."""
    graphs = [make_fx(function, tracing_mode="fake")(of) for function in functions]
    pieces = [("test", each, [node.meta["val"] for node in each.graph.find_nodes(op="placeholder")]) for each in graphs]
    with torch.no_grad():
        return compile_bodies(pieces, native=True, is_inference=True)


def test_every_body_of_a_model_is_native(caplog: pytest.LogCaptureFixture) -> None:
    """With this torch: forward and backward, on lanes, without a word."""
    options = {**STRICT, "plan.min_gain": 1.0}
    assert_trains_as_in_eager(TwoTowers(depth=1), two_tower_loss, steps=2, backend="apollo", options=options)
    compiled = registry.compiled_models()[-1]
    assert [len(graph.compilation.plan.lanes) > 1 for graph in compiled.graphs] == [True, True]
    bodies = [body for graph in compiled.graphs for body in graph.bodies]
    assert all(body.entry_address is not None and body.keeps_python is None for body in bodies)
    own = [record for record in caplog.records if record.name.startswith("apollo_compile")]
    assert [record for record in own if record.levelno >= logging.WARNING] == []


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="a warning of this torch is ignored")
def test_the_filters_of_warnings_stay_those_of_the_user() -> None:
    """Python shows warnings again that it shows once, after a change of the filters."""
    filters = list(warnings.filters)
    compile_each(lambda x: (x.sin(),), of=torch.ones(4))
    assert warnings.filters == filters


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


def test_a_body_that_a_new_torch_writes_otherwise_is_lost_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not half changed: a text that is to be replaced and is not there costs the native form, and says which.

    `tools/test_doctor.py` has a method with other parameters, and `session/test_bodies.py` the line of the log.
    """
    end = CppWrapperCpu.generate_end

    def write_otherwise(self: Any, result: Any) -> None:
        end(self, result)
        result._lines = [
            line.replace("load_pybinding", "load") if isinstance(line, str) else line for line in result._lines
        ]

    monkeypatch.setattr(CppWrapperCpu, "generate_end", write_otherwise)
    x = torch.randn(8)
    with fresh_cache():
        (body,) = compile_each(lambda x: (x.sin() + 1,), of=x)
    assert body.keeps_python is not None and body.keeps_python.is_lost and body.entry_address is None
    assert "load_pybinding(' is in 0 of its lines" in body.keeps_python.reason
    torch.testing.assert_close(body.function([x]), [x.sin() + 1])


@torch.library.custom_op("apollo_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    """Return half of `x`."""
    return x / 2


halved.register_fake(torch.empty_like)


def test_a_body_that_calls_python_is_not_lost() -> None:
    """A custom operator is Python by its nature; the others are native."""
    x = torch.randn(8)
    body, other = compile_each(lambda x: (halved(x) + 1,), lambda x: (x * 2,), of=x)
    assert other.keeps_python is None and other.entry_address is not None
    assert body.keeps_python is not None and not body.keeps_python.is_lost and body.entry_address is None
    torch.testing.assert_close(body.function([x]), [x / 2 + 1])


def _mask_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x @ y
    z[x > 0] = 0.0
    return z.sum(-1).mean()


def _mask_function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = (x @ y).sin() * (y @ x).cos()
    z[x > 0] = 0.0
    return z.sum(-1).mean()


@pytest.mark.parametrize("function", [_mask_product, _mask_function])
def test_a_write_to_an_expanded_gradient_changes_one_element(
    function: Callable[..., torch.Tensor], lanes: dict[str, Any]
) -> None:
    """Inductor writes to the memory of all: gradients of the product were wrong, and strides between segments."""
    found = []
    for run in (function, torch.compile(function, **lanes)):
        x, y = (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
        found.append(torch.autograd.grad(run(x.requires_grad_(), y.requires_grad_()), (x, y)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    model = registry.compiled_models()[-1]
    assert model.graphs and not model.fallbacks


def test_outputs_under_inference_mode_are_inference_tensors() -> None:
    """Dynamo compiles code again for tensors of the other kind, as where outputs are the next inputs."""
    function = torch.compile(lambda x, y: (x @ x, y @ y), backend="apollo", options=STRICT)
    with torch.inference_mode():
        outputs = function(*function(torch.eye(8), torch.ones(8, 8)))
    (found,) = registry.find_models(function)
    assert found.graphs[0].compilation.plan.uses_lanes
    assert all(each.is_inference() for each in outputs)
