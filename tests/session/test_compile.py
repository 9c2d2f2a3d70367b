"""What falls back is exactly what torch.compile makes of it: code, caches, memory, modes and options."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd import graph_compile
from torch._inductor.utils import run_and_get_code

import apollo_compile
from apollo_compile.config import load_config
from apollo_compile.errors import ConfigError, UnsupportedGraphError
from apollo_compile.ir import Role
from apollo_compile.session import compile as session_compile
from apollo_compile.session import registry
from apollo_compile.session.planning import reason_to_fall_back
from apollo_compile.target.compilation import Compilation
from apollo_compile.torch_bridge import bodies
from tests.end_to_end.models import STRICT, assert_trains_as_in_eager, train
from tests.end_to_end.step_cases.models import Wrapped
from tests.failures import raising

SIZES_BY_DATA = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
USUAL = {"debug.strict": True, "plan.remember": False, "partition.granularity": "module"}


def chosen() -> tuple[nn.Module, torch.Tensor]:
    """Return a model with a size that depends on data, and a batch.

    A product is saved for the backward, and a mask that ours would make again.
    """
    weight = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum() + (x[None] @ own.weight).relu().flip(0).exp()

    return Wrapped(forward, weight=weight), torch.randn(256)


def product() -> tuple[nn.Module, torch.Tensor]:
    """Return one segment, which takes so long that Python between kernels does not count, and a batch."""
    return nn.Linear(1024, 1024, bias=False), torch.randn(512, 1024)


@pytest.fixture
def no_caches() -> Iterator[None]:
    """Let everything be compiled, whatever an earlier test has compiled."""
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


def code_of(model: Callable[..., torch.Tensor], x: torch.Tensor, **options: Any) -> list[str]:
    """Return what Inductor writes for a training step, but for the number of the graph in this process."""
    torch._dynamo.reset()
    run = torch.compile(model, **options)

    def step() -> None:
        output = run(x)
        if output.requires_grad:
            output.square().mean().backward()

    _, code = run_and_get_code(step)
    return [re.sub(r"AOT ID: \['\d+_", "AOT ID: ['", text) for text in code]


@pytest.mark.parametrize("kind", ["nothing to gain", "a shape that depends on data", "a device without lanes"])
@pytest.mark.parametrize("mode", [None, pytest.param("max-autotune-no-cudagraphs", marks=pytest.mark.soak)])
def test_the_code_is_that_of_torch_compile(
    kind: str, mode: str | None, no_caches: None, info_log: pytest.LogCaptureFixture
) -> None:
    """Forward and backward, whatever the reason and the mode; one line for both says why, and nothing is wrong."""
    model, x = product() if kind == "nothing to gain" else chosen()
    if kind == "a device without lanes":
        model, x = nn.GELU(), x.to("meta")
    with SIZES_BY_DATA:
        expected = code_of(model, x, backend="inductor", mode=mode)
        assert code_of(model, x, backend="apollo", options={**USUAL, **({"mode": mode} if mode else {})}) == expected
    found = registry.compiled_models()[-1]
    ((name, reason),) = found.fallbacks
    assert found.graphs == [] and name == found.name and reason in str(apollo_compile.report())
    (line,) = [record for record in info_log.records if "fall" in record.getMessage()]
    assert (line.levelno, line.getMessage()) == (logging.INFO, f"{name} falls back to torch.compile: {reason}")
    assert [record for record in info_log.records if record.levelno >= logging.WARNING] == []


def count_traces(tracer: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an element whenever AOTAutograd traces a graph."""
    trace, traced = getattr(graph_compile, tracer), []
    monkeypatch.setattr(graph_compile, tracer, lambda *args, **kwargs: (traced.append(1), trace(*args, **kwargs))[1])
    return traced


def attend(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Write attention out: passes of Inductor trace the pattern, and what replaces it, to compare them."""
    query, key, value = (layer(x).view(2, -1, 4, 8).permute(0, 2, 1, 3) for layer in own.inputs)
    return (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1) @ value


def test_the_code_is_that_of_torch_compile_where_passes_trace_patterns(
    no_caches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the graph itself is traced once."""
    monkeypatch.setattr(session_compile, "reason_to_fall_back", lambda *args, **kwargs: "for this test")
    traced = count_traces("aot_dispatch_autograd_graph", monkeypatch)
    model, x = Wrapped(attend, inputs=nn.ModuleList(nn.Linear(32, 32) for _ in range(3))), torch.randn(64, 32)
    code_of(model, x, backend="inductor")  # the first compile of a process traces patterns of its own
    traced.clear()
    expected = code_of(model, x, backend="inductor")
    by_torch = len(traced)
    assert by_torch > 1
    assert code_of(model, x, backend="apollo", options=USUAL) == expected
    assert len(traced) - by_torch == 2 * by_torch - 1
    assert registry.compiled_models()[-1].falls_back


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_a_graph_that_falls_back_is_traced_once(grad: bool, no_caches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as by torch.compile, and trains alike; one that reads sizes from tensors is traced twice."""
    traced = count_traces("aot_dispatch_autograd_graph" if grad else "aot_dispatch_base_graph", monkeypatch)
    model, x = product()
    for backend, options in (("inductor", None), ("apollo", USUAL)):
        torch._dynamo.reset()
        traced.clear()
        with torch.set_grad_enabled(grad):
            output = torch.compile(model, backend=backend, options=options)(x)
        assert len(traced) == 1, backend
        torch.testing.assert_close(output, model(x), rtol=1e-4, atol=1e-4)
    assert registry.compiled_models()[-1].falls_back
    with SIZES_BY_DATA, torch.set_grad_enabled(grad):
        traced.clear()
        model, x = chosen()
        torch.compile(model, backend="apollo", options=USUAL)(x)
        assert len(traced) == 2


def test_modes_and_options_of_inductor_reach_what_falls_back(no_caches: None) -> None:
    """As options of ours with a prefix; the mode comes first, as it does in torch."""
    model, x = chosen()
    options = {"cpp.simdlen": 1, "triton.cudagraphs": False}
    with SIZES_BY_DATA:
        expected = code_of(model, x, backend="inductor", options=options)
        assert expected != code_of(model, x, backend="inductor")
        own = {"inductor": {"cpp.simdlen": 1}, "inductor.triton.cudagraphs": False, "mode": "reduce-overhead"}
        assert code_of(model, x, backend="apollo", options={**USUAL, **own}) == expected


def test_modes_and_options_of_inductor_reach_the_bodies_of_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a backward that is compiled later as well, when the call that set them is long over."""
    seen = []
    compile_fx_inner = bodies.compile_fx_inner

    def watch(*args: Any, **kwargs: Any) -> Any:
        settings = inductor_config.max_autotune, inductor_config.coordinate_descent_tuning, inductor_config.cpp.simdlen
        seen.append((kwargs.get("is_backward", False), *settings))
        return compile_fx_inner(*args, **kwargs)

    monkeypatch.setattr(bodies, "compile_fx_inner", watch)
    options = {**STRICT, "plan.remember": False, "inductor.cpp.simdlen": 1, "inductor.max_autotune": False}
    options["mode"] = "max-autotune-no-cudagraphs"
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(8, 8)
    output = torch.compile(model, backend="apollo", options=options)(x)
    assert seen and set(seen) == {(False, False, True, 1)}
    output.square().mean().backward()
    assert set(seen) == {(False, False, True, 1), (True, False, True, 1)}
    torch.testing.assert_close(output, model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"mode": "fastest"}, "Unrecognized mode=fastest"),
        ({"options": {"mode": "fastest"}}, "Unrecognized mode=fastest"),
        ({"options": {"inductor.max_autotun": True}}, "Unexpected optimization option max_autotun"),
        ({"options": {"inductor.max_autotune": "yes"}}, "Unexpected type of attr max_autotune"),
    ],
)
def test_a_mode_or_option_that_inductor_does_not_have_is_an_error(arguments: dict[str, Any], expected: str) -> None:
    """In Inductor's words, before anything is compiled."""
    with pytest.raises(BackendCompilerFailed, match=expected) as caught:
        torch.compile(torch.sin, backend="apollo", **arguments)(torch.ones(3))
    assert isinstance(caught.value.inner_exception, ConfigError)


def test_a_fallback_comes_from_torchs_own_caches_and_leaves_its_code_there(own_cache: None) -> None:
    """Whoever goes from one backend to the other compiles nothing again."""
    model, x = product()

    def train_with(name: str, **options: Any) -> tuple[int, int]:
        counters.clear()
        train(model, lambda run: run(x).square().mean(), steps=1, backend=name, **options)
        return counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]

    assert train_with("apollo", options=USUAL) == (0, 2)
    assert train_with("inductor") == (1, 0)
    assert train_with("apollo", options=USUAL)[1] == 0


def test_a_backward_of_a_fallback_uses_up_what_was_saved_as_torchs_does() -> None:
    """It reuses the memory of saved tensors, and so says that it cannot run twice."""
    model, x = chosen()

    def twice(name: str, **options: Any) -> str:
        torch._dynamo.reset()
        run = torch.compile(model, backend=name, **options)
        with SIZES_BY_DATA:
            run(x).square().mean().backward()
            with pytest.raises(RuntimeError) as caught:
                run(x).square().mean().backward(retain_graph=True)
        return str(caught.value)

    assert "donated" in twice("inductor")
    assert twice("apollo", options=USUAL) == twice("inductor")


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("torch_bridge.joint_passes.keep_reads", "falls back to torch.compile: "),
        ("session.planning.compile_partition", "falls back to torch.compile: "),
        ("session.backend.find_break", "torch.compile alone runs a graph, since apollo failed: "),
    ],
    ids=["a pass over the graph", "planning", "the backend"],
)
def test_a_defect_of_ours_is_no_end_of_training(
    place: str, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is one warning and a fallback, wherever it is; whoever asks for defects gets it raised."""
    monkeypatch.setattr(f"apollo_compile.{place}", raising(ValueError("a defect")))
    model, x = product()
    loss = lambda run: run(x).square().mean()  # noqa: E731
    assert_trains_as_in_eager(model, loss, steps=2, backend="apollo", options={"plan.remember": False})
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{says}ValueError: a defect" in line
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="ValueError: a defect"):
        torch.compile(model, backend="apollo", options=USUAL)(x)


def test_where_dynamo_breaks_a_graph_for_its_backward_nothing_warns_of_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The shape of the gradient of what is written at a mask depends on data; Dynamo leaves the write to eager."""

    def weigh(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        masked = x * 2
        masked[x[:, 0] > 0] = token
        return masked.cos().sum()

    token = torch.ones(4, requires_grad=True)
    x = torch.tensor([[1.0], [-1.0], [2.0]]).expand(3, 4)
    (expected,) = torch.autograd.grad(weigh(x, token), token)
    compiled = torch.compile(weigh, backend="apollo", options={"runtime.bodies": "eager", "plan.remember": False})
    (found,) = torch.autograd.grad(compiled(x, token), token)
    torch.testing.assert_close(found, expected)
    assert not [record for record in caplog.records if record.name.startswith("apollo_compile")]


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_graph_that_saves_values_of_a_size_that_is_read_from_a_tensor_falls_back_for_that_reason(
    info_log: pytest.LogCaptureFixture,
) -> None:
    """Nothing fails on the way: strides of such values are known to no one before the graph runs."""
    model = Wrapped(lambda own, x, length: own.layer(x[:, : length.item()]).exp(), layer=nn.Linear(16, 16))
    loss = lambda run: run(torch.ones(2, 5, 16), torch.tensor(3)).square().mean()  # noqa: E731
    assert_trains_as_in_eager(model, loss, steps=2, backend="apollo", options={"debug.strict": True})
    (line,) = [record.getMessage() for record in info_log.records if "falls back" in record.getMessage()]
    assert "no input of the graph says what" in line


def test_a_backward_that_inductor_compiles_alone_reuses_no_memory(
    own_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where torch.compile has left code for the same graph that does: then `retain_graph` works."""
    plan_graph = session_compile.plan_graph

    def refuse_backward(graph_module: fx.GraphModule, *, role: Role, **kwargs: Any) -> Compilation:
        if role is Role.BACKWARD:
            raise UnsupportedGraphError("the backward is Inductor's, for this test")
        return plan_graph(graph_module, role=role, **kwargs)

    monkeypatch.setattr(session_compile, "plan_graph", refuse_backward)
    torch.manual_seed(0)
    weight, x, gradient = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64), torch.randn(64, 64)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).sin()

    def gradients(run: Callable[..., torch.Tensor], count: int) -> list[torch.Tensor]:
        output = run(x)
        return [torch.autograd.grad(output, weight, gradient, retain_graph=count > 1)[0] for _ in range(count)]

    (expected,) = gradients(function, 1)
    gradients(torch.compile(function), 1)
    torch._dynamo.reset()
    options = {"runtime.bodies": "eager", "plan.autotune": False, "runtime.recompute_masks": False}
    for found in gradients(torch.compile(function, backend="apollo", options=options), 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found_model = registry.compiled_models()[-1]
    assert len(found_model.graphs) == 1 and not found_model.falls_back


class Pieces(nn.Module):
    """Pairs of branches with a graph break behind each; all but the last one take next to no time."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 8, 8, 8, 512)
        self.pairs = nn.ModuleList(nn.ModuleList(nn.Linear(width, width) for _ in range(2)) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.sum_of(0, x)
        torch._dynamo.graph_break()
        total = total + self.sum_of(1, x)
        torch._dynamo.graph_break()
        total = total + self.sum_of(2, x)
        torch._dynamo.graph_break()
        total = total + self.sum_of(3, x)
        torch._dynamo.graph_break()
        return total + self.sum_of(4, x)

    def sum_of(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the similarities of what a pair makes of `x`."""
        left, right = self.pairs[number]
        part = x[:, : left.in_features]
        return (left(part) @ right(part).T).sum()


def test_of_many_graphs_those_that_save_next_to_nothing_are_left_to_inductor() -> None:
    """From the third on; a plan with a gain stays."""
    model, x = Pieces(), torch.randn(2048, 512)
    options = {"debug.strict": True, "runtime.bodies": "eager", "partition.granularity": "module"}
    run = torch.compile(model, backend="apollo", options=options)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-2)
    found = registry.models_of_call(model)
    assert [each.num_before for each in found] == [0, 1, 2, 3, 4]
    known = [(each.graphs[0].compilation, each.num_before) for each in found]
    reasons = [reason_to_fall_back(made, load_config(), num_before=number) or "" for made, number in known]
    expected = "not worth compiling: it is graph 3 of a call that falls into many, and lanes would save 0 ns of its "
    assert reasons[2].startswith(expected) and "is graph 4 of" in reasons[3]
    assert not any("not worth compiling" in reasons[number] for number in (0, 1, 4))
