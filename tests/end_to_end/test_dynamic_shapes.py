"""Models whose inputs change their shapes: lanes for all of them, and the numbers of eager for each."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import pytest
import torch
from torch import fx, nn
from torch._inductor.codecache import PyCodeCache
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import apollo_compile
from apollo_compile import backend
from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import Variant
from apollo_compile.session import bodies as session_bodies
from apollo_compile.session import families, registry
from apollo_compile.session.buckets import MAX_BUCKETS, in_background
from tests.end_to_end.marks import needs_two_cores
from tests.end_to_end.models import assert_same_training, train

LANES = {
    "debug.strict": True,
    "device.profile": "cpu",
    "plan.min_gain": 0.0,
    "plan.remember": False,
    "plan.time_limit_s": 0.5,
}
EAGER_BODIES = {**LANES, "runtime.bodies": "eager"}
LENGTHS = ((17, 5), (40, 33), (9, 12), (64, 5), (17, 6), (41, 33), (2, 2), (200, 3))


def sizes(subject: str) -> pytest.MarkDecorator:
    """Mark a test that docs/robustness.md counts."""
    return pytest.mark.robustness("Dynamic shapes", subject)


class Pair(nn.Module):
    """Two encoders for sequences of different lengths; the loss reads a part that depends on both."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.left = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.right = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 8)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        tokens = self.left(self.embed(left)).reshape(-1, self.embed.embedding_dim)
        part = tokens[: left.shape[0] * left.shape[1] * 2 // 3 + 1]
        return self.head(part) * self.head(self.right(self.embed(right)).mean(dim=(0, 1))) / right.shape[1]


def batches(lengths: Sequence[tuple[int, int]], batch: int = 3) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens for both encoders."""
    generator = torch.Generator().manual_seed(0)
    for left, right in lengths:
        yield tuple(torch.randint(0, 50, (batch, length), generator=generator) for length in (left, right))  # type: ignore[misc]


def train_pair(lengths: Sequence[tuple[int, int]], **compile_options: object) -> object:
    """Train on one batch of every pair of lengths."""
    torch.manual_seed(0)
    inputs = batches(lengths)
    return train(Pair(), lambda run: run(*next(inputs)).square().mean(), steps=len(lengths), **compile_options)


@needs_two_cores
@sizes("lengths that change with every step")
def test_training_is_as_in_eager_at_every_length(caplog: pytest.LogCaptureFixture) -> None:
    """On lanes, with two graphs from Dynamo: the first shape's, and one for all others."""
    expected = train_pair(LENGTHS)
    torch._dynamo.utils.counters.clear()
    with caplog.at_level(logging.WARNING, logger="apollo_compile"):
        actual = train_pair(LENGTHS, backend="apollo", options=EAGER_BODIES)
    assert_same_training(expected, actual)  # type: ignore[arg-type]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert "Inductor" not in caplog.text
    model = registry.compiled_models()[-1]
    assert model.fallbacks == []
    traced = [graph for graph in model.graphs if not graph.is_resized]
    assert [graph.compilation.capture.role for graph in traced] == ["forward", "backward"]
    for graph in traced:
        assert len({assignment.lane for assignment in graph.compilation.plan.assignments}) > 1
        assert graph.trace().spans


@needs_two_cores
@sizes("a plan for every bucket of sizes")
def test_every_bucket_gets_a_plan_from_its_own_sizes() -> None:
    """The same segments and code; bytes, work and durations are those of the sizes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Pair()
    run = torch.compile(model, backend="apollo", dynamic=True, options=EAGER_BODIES)
    with torch.no_grad():
        for left, right in batches(((16, 12), (128, 12), (127, 12), (128, 12), (15, 12))):
            torch.testing.assert_close(run(left, right), model(left, right), rtol=1e-4, atol=1e-5)
            in_background(lambda: None).result(60)
    (found,) = registry.find_models(model)
    short, long = found.graphs
    assert sorted(dict(short.compilation.capture.sizes).values()) == [3, 12, 16]
    assert sorted(dict(long.compilation.capture.sizes).values()) == [3, 12, 127]
    assert short.bodies is long.bodies
    first, second = short.compilation.partition.graph, long.compilation.partition.graph
    assert [segment.name for segment in first.segments] == [segment.name for segment in second.segments]
    assert sum(s.work.flops for s in second.segments) > 3 * sum(s.work.flops for s in first.segments)
    assert long.compilation.plan.serial_ns > short.compilation.plan.serial_ns
    names = [graph.name for graph in apollo_compile.report(model).graphs]
    assert len(names) == 2 and "=16" in names[0] and "=127" in names[1]


@pytest.mark.soak
@needs_two_cores
@sizes("planning again from what is measured")
def test_a_plan_for_other_sizes_learns_without_a_step_that_waits() -> None:
    """It is measured and planned again, in the background."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Pair()
    run = torch.compile(model, backend="apollo", dynamic=True, options=EAGER_BODIES)
    with torch.no_grad():
        for left, right in batches(((16, 12),) + ((128, 12),) * 60):
            run(left, right)
            in_background(lambda: None).result(60)
    (found,) = registry.find_models(model)
    short, long = found.graphs
    assert not short.is_settled and short.num_replans == 0
    assert long.is_settled and long.compilation.observations.entries
    assert registry.is_settled(model)  # what ran last is, and nothing else is waited for


@pytest.mark.soak
@needs_two_cores
@sizes("a storm of batch sizes and lengths")
def test_a_storm_of_sizes_waits_for_no_plan_and_is_compiled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch and lengths change together, no pair comes twice: first while nothing can be planned, then for long."""
    blocked, free = 20, 4 * (MAX_BUCKETS + 4)
    shapes = [(2 + step % 5, 33 + step % 8, 17 + step % 4) for step in range(blocked)]
    shapes += [(2 + step % 2, 48 + 8 * (step // 4) + step % 4, 9 + step) for step in range(free)]
    assert len(set(shapes)) == len(shapes)
    compiled: list[int] = []
    own = session_bodies._compile_bodies
    monkeypatch.setattr(session_bodies, "_compile_bodies", lambda *a, **k: compiled.append(1) or own(*a, **k))
    gate = threading.Event()

    def train_on_shapes(**compile_options: object) -> object:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        step = itertools.count()

        def loss_of(run: Callable[..., torch.Tensor]) -> torch.Tensor:
            number = next(step)
            if compile_options and number >= blocked:
                if number == blocked:
                    assert not waiting.done()
                    assert not any(graph.is_resized for graph in registry.compiled_models()[-1].graphs)
                    gate.set()
                in_background(lambda: None).result(60)
            batch, *lengths = shapes[number]
            inputs = [torch.randint(0, 50, (batch, length), generator=generator) for length in lengths]
            return run(*inputs).square().mean()

        return train(Pair(), loss_of, steps=len(shapes), **compile_options)

    expected = train_on_shapes()
    torch._dynamo.utils.counters.clear()
    waiting = in_background(lambda: gate.wait(600))
    try:
        actual = train_on_shapes(backend="apollo", options={**EAGER_BODIES, "plan.planner": "greedy"})
    finally:
        gate.set()
    assert waiting.result(60)
    assert_same_training(expected, actual)  # type: ignore[arg-type]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert len(compiled) == 4  # forward and backward of both graphs
    families = registry.compiled_models()[-1].families
    assert [len(family.buckets) for family in families] == [MAX_BUCKETS] * 2
    assert len(registry.compiled_models()[-1].graphs) <= 2 * MAX_BUCKETS


@pytest.mark.soak
@needs_two_cores
@sizes("compiled code, and the comparison of variants")
def test_compiled_code_of_every_variant_serves_every_size() -> None:
    """The plan, its segments in turn, and Inductor's version, which is compiled after Dynamo has fixed its guards."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)) for name in "ab"})

    def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model["a"](x).mean(0) * model["b"](y).sum(0)).sum() / (x.shape[0] * 3 // 2)

    run = torch.compile(both, backend="apollo", dynamic=True, options=LANES)
    run(torch.randn(400, 64), torch.randn(405, 64)).backward()
    (found,) = registry.find_models(model)
    assert [graph.compilation.capture.role for graph in found.graphs] == ["forward", "backward"]
    assert all(body.entry_address is not None for graph in found.graphs for body in graph.bodies)
    for variant, rows in itertools.product((Variant.PLAN, Variant.SERIAL, Variant.INDUCTOR), (400, 31, 100, 2)):
        in_background(lambda: None).result(60)
        for graph in found.graphs:
            graph.autotuner = None  # nobody but this test decides
            graph.prepare()
            assert {Variant.INDUCTOR, Variant.SERIAL} <= set(graph.available)
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
@sizes("mark_dynamic")
def test_sizes_are_marked_by_hand() -> None:
    """`mark_dynamic` makes one dimension a symbol; the others stay as they are."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Pair()
    run = torch.compile(model, backend="apollo", options=EAGER_BODIES)
    for left, right in batches(((24, 7), (12, 7), (90, 7))):
        torch._dynamo.mark_dynamic(left, 1)
        torch.testing.assert_close(run(left, right), model(left, right), rtol=1e-4, atol=1e-5)
    (found,) = registry.find_models(model)
    assert found.fallbacks == []
    assert len(found.graphs[0].compilation.capture.sizes) == 1


def half(size: int) -> float:
    """Return a number that a graph computes as a symbolic one with a fraction."""
    return size / 2


@pytest.mark.parametrize(
    "op",
    [
        lambda size: size * 2,
        lambda size: size // 2,
        lambda size: int(size * 0.75),
        lambda size: math.ceil(size / 2),
        half,
    ],
    ids=["product", "quotient", "truncated", "ceiling", "fraction"],
)
def test_sizes_go_through_graph_breaks(op: Callable[[int], float]) -> None:
    """A number that one graph computes from sizes may be an input of the next; fractions are left to Inductor."""
    torch._dynamo.reset()
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
    if op is not half:
        assert [model.fallbacks for model in made] == [[]] * len(made)


@pytest.mark.parametrize("option", ["plan.memory_quota", "plan.planner", "deterministic"])
def test_who_asks_for_one_plan_gets_one(option: str) -> None:
    """A quota is for known sizes; a serial plan and the same numbers every time leave nothing to choose."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    values: dict[str, dict[str, object]] = {"plan.memory_quota": {option: 2**30}, "plan.planner": {option: "serial"}}
    options = {**EAGER_BODIES, **values.get(option, {})}
    run = torch.compile(model, backend="apollo", dynamic=True, options=options)
    torch.use_deterministic_algorithms(option == "deterministic")
    try:
        with torch.no_grad():
            for rows in (16, 90, 90, 90):
                x = torch.randn(rows, 4)
                torch.testing.assert_close(run(x), model(x))
                in_background(lambda: None).result(60)
    finally:
        torch.use_deterministic_algorithms(False)
    (found,) = registry.find_models(model)
    if option == "plan.memory_quota":
        assert all("memory quota" in reason for _, reason in found.fallbacks)
        assert found.graphs == []
    else:
        assert found.fallbacks == []
        assert [graph.is_resized for graph in found.graphs] == [False] * len(found.graphs)
        assert all(graph.is_settled for graph in found.graphs)


def _num_shape_envs() -> int:
    in_background(lambda: None).result(60)
    torch._dynamo.reset()
    for _ in range(2):  # models, then what was waiting for them
        gc.collect()
    return sum(type(item) is ShapeEnv for item in gc.get_objects())


def test_a_graph_that_gets_no_plans_by_size_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor runs it, so it is in no report as one with segments, and in no comparison."""

    def refuse(*args: object) -> None:
        raise UnsupportedGraphError("no formulas for this graph")

    monkeypatch.setattr(families, "read_formulas", refuse)
    layer, x = nn.Linear(8, 8), torch.ones(5, 8)
    run = torch.compile(layer, backend="apollo", options=EAGER_BODIES, dynamic=True)
    with torch.no_grad():
        torch.testing.assert_close(run(x), layer(x))
    report = apollo_compile.report(layer)
    assert [reason for _, reason in report.fallbacks] == ["no formulas for this graph"]
    assert report.graphs == ()
    (model,) = registry.find_models(layer)
    assert model.graphs == model.autotuned == model.families == []
    assert registry.variants_of(layer) == [Variant.INDUCTOR]


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
    torch._dynamo.reset()
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


def _jagged(lengths: Sequence[int]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(length, 8) for length in lengths], layout=torch.jagged)


@sizes("jagged nested tensors as inputs")
@pytest.mark.filterwarnings("ignore")  # of the cache of torch, which cannot have such tensors in its key
def test_a_ragged_size_is_refused_in_words() -> None:
    """Under `debug.strict` too; Inductor computes what eager does."""

    def mix(nested: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nested.cos() * 2, nested.values() * values

    run = torch.compile(mix, backend="apollo", dynamic=True, options=EAGER_BODIES)
    inputs = _jagged((3, 4)), torch.rand(7, 8)
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
