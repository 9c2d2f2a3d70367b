"""Models whose inputs change their shapes: lanes for all of them, and the numbers of eager for each."""

from __future__ import annotations

import gc
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor.codecache import PyCodeCache
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from apollo_compile import backend
from apollo_compile.ir import Variant
from apollo_compile.session import registry
from tests.end_to_end.marks import needs_two_cores
from tests.end_to_end.models import assert_trains_as_in_eager, train
from tests.end_to_end.step_cases.models import Wrapped
from tests.session.trained import AUTOTUNED

LANES = {**AUTOTUNED, "plan.replan": True}
EAGER_BODIES = {**LANES, "runtime.bodies": "eager"}
LENGTHS = ((17, 5), (40, 33), (9, 12), (64, 5), (17, 6), (41, 33), (2, 2), (200, 3))


def sizes(subject: str) -> pytest.MarkDecorator:
    """Mark a test that docs/robustness.md counts."""
    return pytest.mark.robustness("Dynamic shapes", subject)


def pair() -> Wrapped:
    """Return two encoders for sequences of different lengths; the loss reads a part that depends on both."""

    def forward(self: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        tokens = self.left(self.embed(left)).reshape(-1, 16)
        part = tokens[: left.shape[0] * left.shape[1] * 2 // 3 + 1]
        return self.head(part) * self.head(self.right(self.embed(right)).mean(dim=(0, 1))) / right.shape[1]

    left, right = (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2))
    return Wrapped(forward, embed=nn.Embedding(50, 16), head=nn.Linear(16, 8), left=left, right=right)


def batches(lengths: Sequence[tuple[int, int]], batch: int = 3) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens for both encoders."""
    generator = torch.Generator().manual_seed(0)
    for left, right in lengths:
        yield tuple(torch.randint(0, 50, (batch, length), generator=generator) for length in (left, right))  # type: ignore[misc]


@needs_two_cores
@sizes("lengths that change with every step")
def test_training_is_as_in_eager_at_every_length(caplog: pytest.LogCaptureFixture) -> None:
    """On lanes, with two graphs from Dynamo: the first shape's, and one for all others."""
    torch._dynamo.utils.counters.clear()
    inputs = itertools.cycle(batches(LENGTHS))
    options = {"backend": "apollo", "options": EAGER_BODIES}
    assert_trains_as_in_eager(pair(), lambda run: run(*next(inputs)).square().mean(), steps=len(LENGTHS), **options)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert "Inductor" not in caplog.text
    model = registry.compiled_models()[-1]
    assert model.fallbacks == []
    assert [graph.compilation.capture.role for graph in model.graphs] == ["forward", "backward"]
    for graph in model.graphs:
        assert len({assignment.lane for assignment in graph.compilation.plan.assignments}) > 1
        assert graph.trace().spans


@pytest.mark.soak
@needs_two_cores
@sizes("compiled code, and the comparison of variants")
def test_compiled_code_of_every_variant_serves_every_size() -> None:
    """The plan, its segments in turn, and Inductor's version, which is compiled after Dynamo has fixed its guards."""
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)) for name in "ab"})

    def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model["a"](x).mean(0) * model["b"](y).sum(0)).sum() / (x.shape[0] * 3 // 2)

    run = torch.compile(both, backend="apollo", dynamic=True, options=LANES)
    run(torch.randn(400, 64), torch.randn(405, 64)).backward()
    (found,) = registry.find_models(model)
    assert [graph.compilation.capture.role for graph in found.graphs] == ["forward", "backward"]
    assert all(body.entry_address is not None for graph in found.graphs for body in graph.bodies)
    for variant, rows in itertools.product((Variant.PLAN, Variant.SERIAL, Variant.INDUCTOR), (400, 31, 100, 2)):
        for graph in found.graphs:
            graph.tuner = None  # nobody but this test decides
            graph.prepare()
            assert {Variant.INDUCTOR, Variant.SERIAL} <= set(graph.variants.available)
            graph.use(variant)
        x, y = torch.randn(rows, 64), torch.randn(rows + 5, 64)
        results = []
        for function in (both, run):
            model.zero_grad()
            loss = function(x, y)
            loss.backward()
            results.append((loss.detach(), [parameter.grad for parameter in model.parameters()]))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@needs_two_cores
@pytest.mark.skipif(
    not hasattr(ShapeEnv, "error_on_new_guards"), reason="this torch cannot compare Inductor's graph for dynamic sizes"
)
@sizes("the comparison of variants")
def test_variants_are_compared_by_times_for_as_many_elements() -> None:
    """Whatever sizes come; then the winner runs, and other sizes are no drift."""
    model = pair()
    run = torch.compile(model, backend="apollo", dynamic=True, options={**LANES, "plan.compile_share": 1e-6})
    with torch.no_grad():
        for left, right in batches(LENGTHS * 1000):
            torch.testing.assert_close(run(left, right), model(left, right), rtol=1e-4, atol=1e-5)
            if registry.is_settled(model):
                break
    (found,) = registry.find_models(model)
    assert found.verdict is not None and found.verdict.standings[0].num_rounds >= 5
    assert registry.variants_of(model) == [found.verdict.winner]


@needs_two_cores
@sizes("mark_dynamic")
def test_sizes_are_marked_by_hand() -> None:
    """`mark_dynamic` makes one dimension a symbol; the others stay as they are."""
    model = pair()
    run = torch.compile(model, backend="apollo", options=EAGER_BODIES)
    for left, right in batches(((24, 7), (12, 7), (90, 7))):
        torch._dynamo.mark_dynamic(left, 1)
        torch.testing.assert_close(run(left, right), model(left, right), rtol=1e-4, atol=1e-5)
    (found,) = registry.find_models(model)
    assert found.fallbacks == []
    assert len(found.graphs[0].compilation.capture.sizes) == 1


NUMBERS: dict[str, Callable[[int], float]] = {
    "product": lambda size: size * 2,
    "quotient": lambda size: size // 2,
    "truncated": lambda size: int(size * 0.75),
    "ceiling": lambda size: math.ceil(size / 2),
    "fraction": lambda size: size / 2,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_sizes_go_through_graph_breaks(name: str) -> None:
    """A number that one graph computes from sizes may be an input of the next; fractions are left to Inductor."""
    op = NUMBERS[name]
    weight = torch.ones(4, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        rows = op(x.shape[0])
        y = (x * weight).sin().sum(dim=0)
        torch._dynamo.graph_break()
        return y * rows + x[: int(rows) // 3 + 1].cos().sum(dim=0)

    run = torch.compile(function, backend="apollo", dynamic=True, options=EAGER_BODIES)
    others = registry.compiled_models()
    for rows in (7, 12, 30):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(run(x), function(x))
    made = [model for model in registry.compiled_models() if model not in others]
    assert any(graph.compilation.capture.sizes for model in made for graph in model.graphs)
    if name != "fraction":
        assert [model.fallbacks for model in made] == [[]] * len(made)


def test_a_size_that_turns_out_to_be_fixed_is_a_number_that_the_graph_returns() -> None:
    """The code asks for it after it has computed with it; the other size changes."""
    model = nn.Linear(4, 4)

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        fixed, changing = x.shape[0] + 1, x.shape[0] + y.shape[0]
        product = model(x).sin() @ model(y).cos().T
        return product * 2 if x.shape[0] == 2 else product, fixed, changing

    run = torch.compile(function, backend="apollo", dynamic=True, options=EAGER_BODIES)
    for rows in (5, 7):
        x, y = torch.randn(2, 4), torch.randn(rows, 4)
        found, expected = run(x, y), function(x, y)
        torch.testing.assert_close(found, expected)
        slopes = [torch.autograd.grad(outputs[0].sum(), model.weight) for outputs in (found, expected)]
        torch.testing.assert_close(*slopes)
    (entry,) = registry.find_models(model)
    assert [len(entry.graphs), entry.fallbacks] == [2, []]


@pytest.mark.parametrize("option", ["plan.memory_quota", "plan.planner", "deterministic"])
def test_who_asks_for_one_plan_gets_one(option: str, request: pytest.FixtureRequest) -> None:
    """A quota is for known sizes; a serial plan and the same numbers every time leave nothing to choose."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    values: dict[str, dict[str, object]] = {"plan.memory_quota": {option: 2**30}, "plan.planner": {option: "serial"}}
    run = torch.compile(model, backend="apollo", dynamic=True, options={**EAGER_BODIES, **values.get(option, {})})
    if option == "deterministic":
        request.getfixturevalue(option)
    with torch.no_grad():
        for rows in (16, 90, 90, 90):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(run(x), model(x))
    (found,) = registry.find_models(model)
    if option == "plan.memory_quota":
        assert all("memory quota" in reason for _, reason in found.fallbacks)
        assert found.graphs == []
    else:
        assert found.fallbacks == []
        assert all(graph.is_settled for graph in found.graphs)


def _num_shape_envs() -> int:
    torch._dynamo.reset()
    for _ in range(2):  # models, then what was waiting for them
        gc.collect()
    return sum(type(item) is ShapeEnv for item in gc.get_objects())


@sizes("models that are forgotten")
def test_what_torch_knows_of_sizes_is_forgotten_with_the_model() -> None:
    """By itself torch keeps it for good, with all fake tensors."""

    def train_layer() -> None:
        inputs = (torch.ones(rows, 8) for rows in (5, 6))
        options = {"backend": "apollo", "options": EAGER_BODIES, "dynamic": True}
        train(nn.Linear(8, 8), lambda run: run(next(inputs)).sum(), steps=2, **options)

    train_layer()
    before = _num_shape_envs()
    for _ in range(3):
        train_layer()
    assert _num_shape_envs() <= before


@sizes("a result of the backend that nobody keeps")
def test_sizes_are_guarded_where_the_compiled_graph_is_dropped_at_once() -> None:
    """Dynamo makes its guards after the backend: that two sizes are the same is one of them."""
    rows = []

    def dropping(graph_module: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        rows.append(str(inputs))
        backend.apollo(graph_module, inputs, options=EAGER_BODIES)
        for _ in range(2):
            gc.collect()
        return graph_module.forward

    run = torch.compile(lambda x, y: x.sum(1) + y.sum(1).flip(0)[: x.shape[0]], backend=dropping, dynamic=True)
    for left, right in ((4, 4), (5, 5), (5, 7)):
        x, y = torch.randn(left, 3), torch.randn(right, 3)
        torch.testing.assert_close(run(x, y), x.sum(1) + y.sum(1).flip(0)[:left])
    assert len(rows) == 2


def _lane_modules() -> set[ModuleType]:
    modules = {*PyCodeCache.modules, *sys.modules.values()}
    return {
        each for each in modules if "torch._inductor" in each.__name__ and hasattr(vars(each).get("call"), "lane_body")
    }


def test_the_python_side_of_native_bodies_goes_with_them() -> None:
    """Inductor keeps every module that it ever loaded."""
    before = _lane_modules()
    x = torch.ones(5, 8)
    train(nn.Linear(8, 8), lambda run: run(x).sum(), steps=1, backend="apollo", options=LANES, dynamic=True)
    graphs = registry.compiled_models()[-1].graphs
    assert any(body.entry_address is not None for graph in graphs for body in graph.bodies)
    assert _lane_modules() <= before


@sizes("jagged nested tensors as inputs")
@pytest.mark.filterwarnings("ignore")  # of the cache of torch, which cannot have such tensors in its key
def test_a_ragged_size_is_refused_in_words() -> None:
    """Under `debug.strict` too; Inductor computes what eager does."""

    def mix(nested: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nested.cos() * 2, nested.values() * values

    run = torch.compile(mix, backend="apollo", dynamic=True, options=EAGER_BODIES)
    jagged = torch.nested.nested_tensor([torch.ones(length, 8) for length in (3, 4)], layout=torch.jagged)
    inputs = jagged, torch.rand(7, 8)
    (nested, product), (expected, expected_product) = run(*inputs), mix(*inputs)
    torch.testing.assert_close((nested.values(), product), (expected.values(), expected_product))
    ((_, reason),) = registry.compiled_models()[-1].fallbacks
    assert "is the ragged size of a jagged nested tensor" in reason


@sizes("jagged nested tensors, made inside")
def test_a_nested_tensor_that_the_graph_makes_runs_in_segments() -> None:
    """From values and offsets, for batches of other lengths."""
    weight = torch.rand(8, 8)

    def embed(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.nested_tensor_from_jagged(values, offsets)
        return ((nested @ weight).tanh() * nested.cos()).values()

    run = torch.compile(embed, backend="apollo", dynamic=True, options=EAGER_BODIES)
    for lengths in ((3, 4), (5, 2, 6)):
        offsets = torch.tensor([0, *itertools.accumulate(lengths)])
        values = torch.rand(sum(lengths), 8)
        torch.testing.assert_close(run(values, offsets), embed(values, offsets), rtol=1e-4, atol=1e-5)
    models = registry.compiled_models()
    assert any(graph.has_run for graph in models[-1].graphs) and not models[-1].fallbacks
