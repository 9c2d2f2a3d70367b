from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile import ir
from apollo_compile.config import PartitionConfig
from apollo_compile.ir.check import check_capture, check_partition
from apollo_compile.passes.capture import capture_graph
from apollo_compile.passes.partition import partition_graph
from apollo_compile.passes.partition.labels import layer_of
from apollo_compile.session.planning import role_of
from apollo_compile.torch_bridge.bodies import extract_body
from apollo_compile.torch_bridge.frontend import compile_with_inductor
from apollo_compile.torch_bridge.layouts import report_output_strides
from benchmarks.workloads.gpu import build_gpu_workload
from tests.end_to_end.models import Tower, TwoTowers, two_tower_inputs
from tests.end_to_end.step_cases.models import Wrapped
from tests.end_to_end.test_whole_step_functions import by_backward
from tests.failures import raising

aten = torch.ops.aten

LAYER = PartitionConfig()
MODULE = PartitionConfig(granularity="module")
APART = PartitionConfig(weight_gradients="apart", min_segment_share=0.0)
FINE = PartitionConfig(min_segment_share=0.0, max_segment_share=0.0)
"""Cuts at every border of a layer, however small it is; in graphs without names, one segment per computing node."""

# ---------------------------------------------------------------------------------------------- graphs from Inductor


@dataclass
class Recorded:
    """A graph after Inductor's joint-graph passes, and real inputs as they were before a run."""

    graph_module: fx.GraphModule
    role: ir.Role
    inputs: list[torch.Tensor] = field(default_factory=list)
    static: frozenset[int] = frozenset()
    _boxed_call: bool = True

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the graph in eager, as AOTAutograd calls a compiled one."""
        self.inputs = copies(inputs)
        arguments = list(inputs)
        inputs.clear()
        return Eager(self.graph_module).run(*arguments)  # type: ignore[no-any-return]

    @functools.cached_property
    def captured(self) -> ir.Capture:
        """The graph as plain data, checked."""
        name = f"test_{self.role}"
        made = capture_graph(self.graph_module, name=name, role=self.role, static=self.static)
        check_capture(made)
        return made

    @functools.cached_property
    def expected(self) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
        """Outputs of the uncut graph, and its inputs after the run."""
        inputs = copies(self.inputs)
        torch.manual_seed(0)
        with torch.no_grad():
            outputs = Eager(self.graph_module).run(*inputs)
        return list(outputs), inputs


class Eager(fx.Interpreter):
    """Runs a graph; numbers drawn from a seed depend on the seed only, as in compiled code."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.prims.inductor_random.default:
            size, seed, mode = args
            return getattr(torch, mode)(size, generator=torch.Generator().manual_seed(int(seed)))
        if target is torch.ops.prims.inductor_randint.default:
            low, high, size, seed = args
            return torch.randint(low, high, size, generator=torch.Generator().manual_seed(int(seed)))
        return super().call_function(target, args, kwargs)


def record(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], *, recompute_masks: bool = True, train: bool = True
) -> dict[ir.Role, Recorded]:
    """Return the graphs of a model or function, by role."""
    torch._dynamo.reset()
    graphs: dict[ir.Role, Recorded] = {}

    def inner_compile(graph_module: fx.GraphModule, _: Any, **kwargs: Any) -> tuple[Recorded, None]:
        role = role_of(graph_module, kwargs)
        assert role not in graphs, "a graph break: the model does not test what it should"
        graphs[role] = Recorded(graph_module, role, static=frozenset(kwargs.get("static_input_idxs") or ()))
        report_output_strides(graph_module)
        return graphs[role], None

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_with_inductor(graph_module, example_inputs, inner_compile, recompute_masks=recompute_masks)

    with torch.set_grad_enabled(train):
        result = torch.compile(function, backend=backend, dynamic=False)(*copies(inputs))
        if train:
            results = [r for r in (result if isinstance(result, tuple) else (result,)) if r.requires_grad]
            if results:  # else the function is a whole step
                sum((r * r).sum() for r in results).backward()  # type: ignore[union-attr]
    return graphs


def hand(function: Callable[..., Any], *inputs: torch.Tensor) -> Recorded:
    """Return the graph that plain tracing gives, without the names of modules; it returns a tuple."""

    def boxed(*arguments: torch.Tensor) -> tuple[Any, ...]:
        result = function(*arguments)
        return result if isinstance(result, tuple) else (result,)

    graph_module = make_fx(boxed, tracing_mode="fake")(*inputs)
    graph_module.graph.eliminate_dead_code()
    return Recorded(graph_module, ir.Role.INFERENCE, copies(inputs))


def copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies with the same strides."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t.detach()) for t in tensors]


# ---------------------------------------------------------------------------------------------------------- oracle


def run_bodies(recorded: Recorded, partition: ir.Partition) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    """Return the outputs of the bodies, run in the order of segment ids, and the inputs after the run."""
    bodies = [extract_body(recorded.graph_module, body) for body in partition.bodies]
    inputs = copies(recorded.inputs)
    values: dict[int, torch.Tensor] = dict(zip(partition.graph.inputs, inputs, strict=True))
    torch.manual_seed(0)
    for segment in partition.graph.segments:
        piece, fakes = bodies[segment.body]
        arguments = [values[buffer] for buffer in segment.inputs]
        assert [layout(a) for a in arguments] == [layout(f) for f in fakes], f"{segment.name} takes other layouts"
        with torch.no_grad():
            outputs = Eager(piece).run(*arguments)
        values.update(zip(segment.outputs, outputs, strict=True))
    return [None if buffer is None else values[buffer] for buffer in partition.graph.outputs], inputs


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a body may rely on."""
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def assert_bit_equal(left: Sequence[torch.Tensor | None], right: Sequence[torch.Tensor | None], what: str) -> None:
    """Compare values, layouts and which of them are None."""
    assert len(left) == len(right)
    for position, (expected, actual) in enumerate(zip(left, right, strict=True)):
        where = f"{what} {position}"
        assert (expected is None) == (actual is None), where
        if expected is None or actual is None:
            continue
        assert layout(expected) == layout(actual), where
        assert torch.equal(bits(expected), bits(actual)), where


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, so that NaN equals NaN."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_replays(recorded: Recorded, config: PartitionConfig) -> ir.Partition:
    """Check the partition of a graph against the uncut graph, and that it comes out the same twice."""
    made = recorded.captured
    partition = partition_graph(made, config=config)
    check_partition(partition, made)
    assert partition_graph(made, config=config) == partition
    outputs, inputs = recorded.expected
    actual_outputs, actual_inputs = run_bodies(recorded, partition)
    assert_bit_equal(outputs, actual_outputs, "output")
    assert_bit_equal(inputs, actual_inputs, "input after the run")
    return partition


def closure(graph: ir.SegmentGraph) -> list[set[int]]:
    """Return, per segment, all segments before it."""
    before: list[set[int]] = []
    for segment in graph.segments:
        direct = graph.predecessors(segment.id)
        before.append(set(direct).union(*(before[other] for other in direct)))
    return before


def assert_independent(graph: ir.SegmentGraph, first: str, second: str) -> None:
    """Check that there are segments of both modules and no path between them."""
    sides = [[s for s in graph.segments if f"{s.module}.".startswith(f"{name}.")] for name in (first, second)]
    assert all(sides), [s.name for s in graph.segments]
    assert_no_paths(graph, *sides)


def assert_no_paths(graph: ir.SegmentGraph, these: Sequence[ir.Segment], those: Sequence[ir.Segment]) -> None:
    """Check that no segment of the one side waits for one of the other."""
    before = closure(graph)
    for left, right in itertools.product(these, those):
        assert left.id not in before[right.id] and right.id not in before[left.id], f"{left.name}, {right.name}"


# ---------------------------------------------------------------------------------------------------------- models


def normalised(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Run two branches whose statistics are mutated in training."""
    own.calls.add_(1)
    return own.left(x) + own.right(x) * own.calls


def attend(own: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Run one head with a mask from outside."""
    q, k, v = own.qkv(x).chunk(3, dim=-1)
    scores = (q @ k.transpose(-1, -2) / 3.0).masked_fill(mask, float("-inf"))
    return x + own.out(scores.softmax(-1) @ v)


def masked(own: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Run two stacks that share a mask, made inside, a lifted constant and a table of positions."""
    steps = torch.arange(5)
    mask = steps[None, :] > steps[:, None]
    scale = torch.tensor([1.0, 2.0] * 4)
    x, y = x * scale + own.positions, y * scale + own.positions
    return own.first[0](x, mask) * own.second[0](y, mask)


def tied(own: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Run one encoder for two inputs, and an embedding that is the output layer as well."""
    return own.head(own.encoder(own.embedding(x))) + own.head(own.encoder(own.embedding(y)))


def many_outputs(own: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return inputs, views of values and of inputs, and the same value twice."""
    first = own.layers[0](x)
    second = own.layers[1](first.relu())
    third = own.layers[2](second.t().reshape(-1, 8))
    return first.t(), second.view(2, -1), y, x[1:], second[0], third, third, third.unsqueeze(0), y.sin()[:, 1:]


def multi_output(own: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values of multi-output operators that are used in other modules."""
    values, indices = own.fc[0](own.norms[0](x)).topk(4, dim=-1)
    largest, where = own.fc[1](x).max(dim=1)
    left, right = own.fc[2](own.norms[1](x)).split(4, dim=-1)
    variance, mean = torch.var_mean(left * values, dim=0)
    first = (right.gather(1, indices % 4) + variance).sum(1) + largest
    return first, mean * where.float().mean(), values.sort(dim=0).values


def growing(own: Any, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Run a chain whose layers differ in width, with an inplace update of an input in the middle."""
    for layer in own.down:
        x = layer(x).tanh()
    state.mul_(0.9).add_(x.detach().mean(0))
    x = x + state
    for layer in own.up:
        x = layer(x).sigmoid() + x.repeat(1, 2)
    return x


def functional(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute two independent chains without any module."""
    left, right = x, x
    for _ in range(3):
        left = (left @ a).relu() + left
        right = (right @ b).tanh() * right
    return left @ right.t()


def sized(*shape: int) -> torch.Tensor:
    """Return the same random numbers for one shape on every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def tokens(count: int) -> torch.Tensor:
    """Return token ids."""
    return torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(count))


def linears(*widths: tuple[int, int]) -> nn.ModuleList:
    """Return layers of these widths."""
    return nn.ModuleList(nn.Linear(*each) for each in widths)


def branch() -> nn.Sequential:
    """Return two layers with statistics."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(2)))


def stack() -> nn.ModuleList:
    """Return one layer of attention."""
    return nn.ModuleList([Wrapped(attend, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8))])


def with_tied_weights() -> nn.Module:
    """Return a model whose embedding and head are one matrix."""
    model = Wrapped(tied, embedding=nn.Embedding(11, 8), encoder=Tower(8, 2), head=nn.Linear(8, 11, bias=False))
    model.head.weight = model.embedding.weight
    return model


MODELS: dict[str, tuple[Callable[[], Callable[..., Any]], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "towers": (lambda: TwoTowers(8, 2), lambda: (sized(6, 8), sized(6, 8))),
    "dropout": (lambda: TwoTowers(8, 2, dropout=0.4), lambda: (sized(6, 8), sized(6, 8))),
    "stack": (lambda: Tower(8, 4, dropout=0.1), lambda: (sized(6, 8),)),
    "batchnorm": (
        lambda: Wrapped(normalised, left=branch(), right=branch(), calls=torch.zeros(())),
        lambda: (sized(6, 8),),
    ),
    "masked": (
        lambda: Wrapped(masked, first=stack(), second=stack(), positions=torch.randn(5, 8)),
        lambda: (sized(2, 5, 8), sized(2, 5, 8)),
    ),
    "tied": (with_tied_weights, lambda: (tokens(1), tokens(2))),
    "many_outputs": (lambda: Wrapped(many_outputs, layers=linears(*[(8, 8)] * 3)), lambda: (sized(4, 8), sized(4, 8))),
    "multi_output": (
        lambda: Wrapped(
            multi_output, norms=nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)]), fc=linears(*[(8, 8)] * 3)
        ),
        lambda: (sized(6, 8),),
    ),
    "growing": (
        lambda: Wrapped(growing, down=linears((32, 16), (16, 8)), up=linears((8, 16), (16, 32))),
        lambda: (sized(6, 32), sized(8)),
    ),
    "functional": (lambda: functional, lambda: (sized(6, 8), sized(8, 8), sized(8, 8))),
}


WITH_MASKS = ("dropout", "masked")
"""Models whose forward saves other values when masks and views are not recomputed."""


@functools.cache
def graphs_of(name: str, *, train: bool, recompute_masks: bool) -> dict[ir.Role, Recorded]:
    """Return the graphs of a model; several tests read them and none changes them."""
    torch.manual_seed(0)
    make_model, make_inputs = MODELS[name]
    model, inputs = make_model(), list(make_inputs())
    if isinstance(model, nn.Module):
        return record(model.train(train), inputs, recompute_masks=recompute_masks, train=train)
    if train:
        weights = [nn.Parameter(value) for value in inputs[1:]]
        return record(lambda x: model(x, *weights), inputs[:1], recompute_masks=recompute_masks)
    return record(model, inputs, recompute_masks=recompute_masks, train=False)


@pytest.mark.parametrize("config", (LAYER, FINE, MODULE, APART), ids=("layer", "fine", "module", "apart"))
@pytest.mark.parametrize("train", (True, False), ids=("training", "inference"))
@pytest.mark.parametrize("name", MODELS)
def test_bodies_replay_bit_for_bit(name: str, train: bool, config: PartitionConfig) -> None:
    """Forward and backward, with recomputed masks and, where it matters, with saved ones; and evaluation."""
    for recompute_masks in (True, False) if train and name in WITH_MASKS else (True,):
        graphs = graphs_of(name, train=train, recompute_masks=recompute_masks)
        assert set(graphs) == ({ir.Role.FORWARD, ir.Role.BACKWARD} if train else {ir.Role.INFERENCE})
        for recorded in graphs.values():
            assert_replays(recorded, config)


def test_models_test_what_they_should() -> None:
    """Seeds, mutated inputs, shared bodies, values without names are really there."""
    captures = {name: graphs_of(name, train=True, recompute_masks=True)[ir.Role.FORWARD].captured for name in MODELS}
    targets = {name: {node.target for node in made.nodes} for name, made in captures.items()}
    assert "prims.inductor_random.default" in targets["dropout"]
    assert "prims.inductor_lookup_seed.default" in targets["dropout"]
    assert "aten.copy_.default" in targets["batchnorm"] & targets["growing"]
    assert {ir.NodeKind.PROJECTION} <= {node.kind for node in captures["multi_output"].nodes}
    assert not any(node.module for node in captures["functional"].nodes)
    many = captures["many_outputs"]
    assert {ir.NodeKind.CHEAP, ir.NodeKind.INPUT} <= {many.nodes[output].kind for output in many.outputs}
    assert any(
        o is None for o in graphs_of("masked", train=True, recompute_masks=True)[ir.Role.BACKWARD].captured.outputs
    )


def test_random_draws_from_the_global_generator_replay() -> None:
    """With Inductor's fallback to torch's own random numbers, order is all that keeps them equal."""
    torch.manual_seed(0)
    with torch._inductor.config.patch(fallback_random=True):
        graphs = record(TwoTowers(8, 1, dropout=0.4), (sized(6, 8), sized(6, 8)))
    assert [node for node in graphs[ir.Role.FORWARD].captured.nodes if node.after]
    for recorded in graphs.values():
        for config in (LAYER, FINE, MODULE):
            assert_replays(recorded, config)


# -------------------------------------------------------------------------------------------------- graphs by tracing


def test_outputs_may_be_inputs_views_and_constants() -> None:
    """Of an input, of a value, of both, and values that nobody computed."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        value = aten.mm.default(x, y)
        constant = aten.full.default([2], 3.0)
        view = aten.t.default(value)
        return x, aten.t.default(x), value, view, aten.neg.default(view), constant, aten.neg.default(constant), view

    for config in (LAYER, FINE, MODULE):
        assert_replays(hand(function, sized(3, 3), sized(3, 3)), config)


def test_a_returned_view_stays_with_its_value_and_is_cloned_for_others() -> None:
    """The segment that makes the value returns the view; a reader elsewhere takes the value, not the view."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        value = aten.mm.default(x, x)
        view = aten.t.default(value)
        return view, aten.mm.default(view, x)

    partition = assert_replays(hand(function, sized(3, 3)), FINE)
    assert len(partition.graph.segments) == 2
    first, second = partition.graph.segments
    assert [partition.graph.buffers[b].name for b in first.outputs] == ["mm", "t"]
    assert "mm" in [partition.graph.buffers[b].name for b in second.inputs]


def test_a_graph_of_views_alone_has_a_segment_and_one_that_does_nothing_has_none() -> None:
    """Something must run to make views; how little it is makes them one segment."""
    recorded = hand(lambda x: (aten.t.default(x), aten.view.default(x, [9])), sized(3, 3))
    assert len(assert_replays(recorded, LAYER).graph.segments) == 1
    assert len(assert_replays(recorded, FINE).graph.segments) == 2
    graph = assert_replays(hand(lambda x: x, sized(3)), LAYER).graph
    assert graph.segments == () and graph.outputs == graph.inputs


@pytest.mark.parametrize("config", (LAYER, FINE, MODULE), ids=("layer", "fine", "module"))
def test_mutations_between_readers_replay(config: PartitionConfig) -> None:
    """Reads of the old value, through a view too, a write, reads of the new value, and a second write."""

    def function(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        view = aten.t.default(state)
        old = aten.mm.default(view, x)
        also_old = aten.mm.default(state, x)
        aten.copy_.default(state, aten.mm.default(x, x))
        new = aten.mm.default(view, x)
        aten.copy_.default(state, aten.add.Tensor(new, old))
        return old, also_old, new, aten.neg.default(state)

    recorded = hand(function, sized(3, 3), sized(3, 3))
    partition = assert_replays(recorded, config)
    whole, inputs = recorded.expected
    assert not torch.equal(inputs[0], recorded.inputs[0])
    assert not torch.equal(whole[0], whole[2])  # type: ignore[arg-type]
    if config is FINE:
        assert any(segment.after for segment in partition.graph.segments)


@pytest.mark.parametrize("config", (LAYER, FINE, MODULE), ids=("layer", "fine", "module"))
@pytest.mark.parametrize("is_named", [False, True])
def test_what_resizes_a_storage_is_alone(config: PartitionConfig, is_named: bool) -> None:
    """However small it is, and though it is all that some readers are waited for by; neighbours of its kind join it."""

    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = aten.mm.default(aten.mm.default(x, y), y)
        torch.ops.inductor.resize_storage_bytes_(x, 0)
        torch.ops.inductor.resize_storage_bytes_(y, 0)
        return made, aten.mm.default(z, z)

    recorded = hand(function, *(torch.ones(64, 64) for _ in range(3)))
    for node in recorded.graph_module.graph.nodes if is_named else ():
        node.meta["nn_module_stack"] = {"key": ("L['self'].layers.0", nn.Module)}
    capture = recorded.captured
    partition = partition_graph(capture, config=config)
    check_partition(partition, capture)
    contents = [{capture.nodes[node].target for node in nodes} for nodes in partition.nodes_by_segment]
    resizes = [content for content in contents if "inductor.resize_storage_bytes_.default" in content]
    assert all(len(content) == 1 for content in resizes)
    assert len(resizes) == (2 if config is FINE and not is_named else 1)


def test_layouts_wiring_and_constants_tell_bodies_apart() -> None:
    """Transposed inputs have other strides; `a - b` is one body with `b - a`, not with `a - a` or another factor."""

    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mm, sub, mul = aten.mm.default, aten.sub.Tensor, aten.mul.Tensor
        products = (mm(a, a), mm(b, b), mm(c, c))
        return *products, sub(a, c), sub(c, a), sub(a, a), sub(a, c, alpha=2), mul(a, 2.0), mul(a, 3.0)

    segments = assert_replays(hand(function, sized(3, 3), sized(3, 3).t(), sized(3, 3)), FINE).graph.segments
    assert [segment.body for segment in segments] == [0, 1, 0, 2, 2, 3, 4, 5, 6]
    assert segments[3].inputs == segments[4].inputs[::-1]


# ---------------------------------------------------------------------------------------------------- independence


@pytest.mark.parametrize("role", (ir.Role.FORWARD, ir.Role.BACKWARD, ir.Role.INFERENCE))
@pytest.mark.parametrize("config", (LAYER, FINE, MODULE, APART), ids=("layer", "fine", "module", "apart"))
@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("towers", "image", "text"),
        ("dropout", "image", "text"),
        ("batchnorm", "left", "right"),
        ("masked", "first", "second"),
    ],
)
def test_independent_branches_stay_independent(
    name: str, first: str, second: str, config: PartitionConfig, role: ir.Role
) -> None:
    """Whatever they share: inputs, seeds, masks, constants; they meet in joins only."""
    recorded = graphs_of(name, train=role is not ir.Role.INFERENCE, recompute_masks=True)[role]
    assert_independent(partition_graph(recorded.captured, config=config).graph, first, second)


@pytest.mark.parametrize("role", (ir.Role.FORWARD, ir.Role.BACKWARD, ir.Role.INFERENCE))
def test_two_uses_of_one_encoder_can_run_beside_each_other(role: ir.Role) -> None:
    """With enough lanes, their matrix products take about half of the time."""
    made = graphs_of("tied", train=role is not ir.Role.INFERENCE, recompute_masks=True)[role].captured

    def weight(node: ir.Node) -> int:
        return flops_of_products(node) if node.module.startswith("encoder") else 0

    total = sum(weight(node) for node in made.nodes)
    longest = longest_path_of_segments(partition_graph(made, config=LAYER), made, weight)
    assert 0 < longest_path_of_nodes(made, weight) <= longest <= 0.6 * total


@pytest.mark.parametrize("role", (ir.Role.FORWARD, ir.Role.BACKWARD, ir.Role.INFERENCE))
def test_chains_without_names_stay_independent(role: ir.Role) -> None:
    """Structure alone: some two segments have no path between them."""
    recorded = graphs_of("functional", train=role is not ir.Role.INFERENCE, recompute_masks=True)[role]
    for config in (LAYER, FINE, MODULE):
        graph = partition_graph(recorded.captured, config=config).graph
        before = closure(graph)
        pairs = [(a.id, b.id) for a in graph.segments for b in graph.segments if a.id < b.id]
        assert any(a not in before[b] for a, b in pairs), [segment.name for segment in graph.segments]


# ------------------------------------------------------------------------------------------------------ granularity


def test_equal_layers_share_a_body() -> None:
    """In both towers; in training the layers at the ends may save and take other values."""
    towers = graphs_of("towers", train=False, recompute_masks=True)[ir.Role.INFERENCE].captured
    body = {segment.name: segment.body for segment in partition_graph(towers, config=LAYER).graph.segments}
    assert body["image.layers.0"] == body["image.layers.1"] == body["text.layers.0"]
    for recorded in graphs_of("stack", train=True, recompute_masks=True).values():
        partition = partition_graph(recorded.captured, config=LAYER)
        assert len(partition.bodies) < len(partition.graph.segments)


def test_a_stack_has_a_segment_per_layer() -> None:
    """Named after it, in order, if the sums between them are too small to count; whole modules make it one segment."""
    made = graphs_of("stack", train=False, recompute_masks=True)[ir.Role.INFERENCE].captured
    layers = partition_graph(made, config=PartitionConfig(min_segment_share=0.05)).graph.segments
    assert [segment.module for segment in layers] == [f"layers.{i}" for i in range(4)]
    assert len(partition_graph(made, config=MODULE).graph.segments) == 1


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("", ""),
        ("head", "head"),
        ("vision.embeddings", "vision.embeddings"),
        ("vision.embeddings.patch.conv", "vision.embeddings"),
        ("text.encoder.layers.3", "text.encoder.layers.3"),
        ("text.encoder.layers.3.mlp.fc1", "text.encoder.layers.3"),
        ("text.encoder.layers.12.experts.5.fc", "text.encoder.layers.12"),
        ("0", "0"),
        ("0.fc", "0"),
        ("layers.7", "layers.7"),
        ("block3.conv1.weight", "block3.conv1"),
    ],
)
def test_a_layer_is_the_path_up_to_its_first_number_else_two_names(module: str, expected: str) -> None:
    """Experts inside a layer belong to the layer."""
    assert layer_of(module) == expected


# ---------------------------------------------------------------------------------------------------- random graphs

MODULES = ("", "", "a.layers.0", "a.layers.0.fc", "a.layers.1.fc", "b.layers.0", "b.layers.1", "head", "a.embed.x")


def random_capture(rng: random.Random) -> ir.Capture:
    """Return a random graph: named, unnamed or in between; with projections, clones, order and odd outputs."""
    count, reach = rng.randrange(1, 40), rng.choice((3, 8, 40))
    num_inputs = rng.randrange(0, min(count, 5) + 1)
    modules = rng.choice((("",), MODULES, MODULES[1:], MODULES[2:]))
    cheap_share, after_share = rng.choice((0.0, 0.2, 0.6)), rng.choice((0.0, 0.0, 0.1, 0.3))
    nodes: list[ir.Node] = []
    multi: list[ir.NodeId] = []
    readable: list[ir.NodeId] = []
    computing: list[ir.NodeId] = []
    module = ""
    for index in range(count):
        inputs: tuple[ir.NodeId, ...] = ()
        later: tuple[ir.NodeId, ...] = ()
        kind, work = ir.NodeKind.INPUT, ir.Work()
        if rng.random() < 0.3:
            module = rng.choice(modules)
        if index >= num_inputs:
            draw = rng.random()
            near = readable[-reach:]
            inputs = tuple(sorted(rng.sample(near, min(len(near), rng.choice((0, 1, 1, 1, 2, 2, 3))))))
            if multi and draw < 0.15:
                kind, inputs = ir.NodeKind.PROJECTION, (rng.choice(multi),)
            elif draw < 0.15 + cheap_share:
                kind = ir.NodeKind.CHEAP
            else:
                kind = ir.NodeKind.COMPUTE
                flops = rng.choice((0, 1, 10, 1000))
                kernel = ir.Kernel(kind=ir.KernelKind.MATMUL if flops == 1000 else ir.KernelKind.LOOP, flops=flops)
                work = ir.Work(flops=flops, bytes_read=rng.choice((0, 8)), bytes_written=4, kernels=1, parts=(kernel,))
                if computing and rng.random() < after_share:
                    later = tuple(sorted(set(rng.choices(computing, k=2)) - set(inputs)))
                computing.append(ir.NodeId(index))
        is_multi = kind is ir.NodeKind.COMPUTE and rng.random() < 0.15
        (multi if is_multi else readable).append(ir.NodeId(index))
        nodes.append(
            ir.Node(
                id=ir.NodeId(index),
                name=f"n{index}",
                kind=kind,
                target=kind.value,
                inputs=inputs,
                after=later,
                module="" if kind is ir.NodeKind.INPUT else module,
                num_bytes=rng.choice((0, 4, 400)),
                work=work,
                signature="" if kind is ir.NodeKind.INPUT else f"op{rng.randrange(2)}_{len(inputs)}",
                value=rng.choice(("f32[2]", "f32[2]", "f32[3]")),
            )
        )
    outputs = [rng.choice([None, *readable]) for _ in range(rng.randrange(0, 6))]
    role = rng.choice(list(ir.Role))
    if role is ir.Role.STEP:
        begin, end = sorted(rng.choices(range(count), k=2))
        nodes = [replace(node, is_backward=begin <= node.id < end) for node in nodes]
        nodes = [replace(node, module="" if node.id >= end else node.module) for node in nodes]
    return ir.Capture(name="random", role=role, nodes=tuple(nodes), outputs=tuple(outputs))


@pytest.mark.parametrize("seed", range(200))
def test_every_graph_has_a_legal_partition(seed: int) -> None:
    """For all ways to cut and thresholds from nothing to everything; twice the same.

    In a backward, no segment waits for gradients of weights that are apart; elsewhere there are none.
    """
    rng = random.Random(seed)
    made = random_capture(rng)
    check_capture(made)
    least, most = rng.choice((0.0, 0.005, 0.2, 1.0)), rng.choice((0.0, 0.1, 0.5, 1.0))
    apart, backward, counts = {"weight_gradients": "apart"}, replace(made, role=ir.Role.BACKWARD), []
    for graph, options in ((made, {"granularity": "module"}), (made, {}), (made, apart), (backward, apart)):
        config = PartitionConfig(**options, min_segment_share=least, max_segment_share=most)
        partition = partition_graph(graph, config=config)
        check_partition(partition, graph)
        assert partition_graph(graph, config=config) == partition
        counts.append(len(partition.graph.segments))
        weights = {segment.id for segment in partition.graph.segments if ":weights" in segment.name}
        waited_for = {other for each in partition.graph.segments for other in partition.graph.predecessors(each.id)}
        assert options is apart or not weights
        assert least or graph is not backward or weights.isdisjoint(waited_for), "nothing was too small to be apart"
    assert counts[0] <= counts[1]


# ------------------------------------------------------------------------------------------------------ whole steps


@functools.cache
def whole_step(num_parts: int) -> Recorded:
    """Return the graph of a step of two towers with SGD."""
    torch.manual_seed(0)
    step = by_backward(TwoTowers(8, 2, dropout=0.2), num_parts)
    with torch._dynamo.config.patch(trace_autograd_ops=True):  # type: ignore[no-untyped-call]
        return record(step, (sized(6, 8), sized(6, 8)))[ir.Role.STEP]


@pytest.mark.parametrize("num_parts", (1, 2))
@pytest.mark.parametrize("config", (LAYER, FINE, MODULE, APART), ids=("layer", "fine", "module", "apart"))
def test_bodies_replay_whole_steps_bit_for_bit(num_parts: int, config: PartitionConfig) -> None:
    """Forward, backward, sums of gradients, and writes to parameters that every micro-batch has read."""
    assert len(assert_replays(whole_step(num_parts), config).graph.segments) > 1


@pytest.mark.parametrize("num_parts", (1, 2))
@pytest.mark.parametrize("config", (LAYER, FINE, APART), ids=("layer", "fine", "apart"))
def test_towers_of_a_whole_step_are_independent_but_for_the_loss(num_parts: int, config: PartitionConfig) -> None:
    """No layer of one tower waits for a layer of the other; by work, little else is there."""
    graph = partition_graph(whole_step(num_parts).captured, config=config).graph
    backwards = [s for s in graph.segments if s.name.partition("#")[0].endswith((":backward", ":weights"))]
    image, text = ([s for s in backwards if s.name.startswith(f"{tower}.layers")] for tower in ("image", "text"))
    assert len(image) >= 2 * num_parts and len(text) >= 2 * num_parts
    assert_no_paths(graph, image, text)
    work = [(bool(node.module), node.work.flops) for node in whole_step(num_parts).captured.nodes if node.is_backward]
    assert sum(flops for is_named, flops in work if is_named) > 0.9 * sum(flops for _, flops in work)


@pytest.mark.parametrize("config", (PartitionConfig(min_segment_share=0.0), APART), ids=("layer", "apart"))
def test_updates_of_a_layer_are_one_segment_however_many_parameters_it_has(config: PartitionConfig) -> None:
    """They wait for the backwards of all micro-batches of their layer, and nothing waits for them.

    Gradients of weights that are apart stay so: those of the first micro-batch need not wait for those of the second.
    """
    graph = partition_graph(whole_step(2).captured, config=config).graph
    before = closure(graph)
    for layer in (f"{tower}.layers.{index}" for tower in ("image", "text") for index in range(2)):
        own = [segment for segment in graph.segments if segment.module == layer]
        *_, last = (segment for segment in own if segment.name.partition("#")[0] == f"{layer}:update")
        backwards, weights = ({s.id for s in own if part in s.name} for part in (":backward", ":weights"))
        assert len(backwards) >= 2 and backwards <= before[last.id] and not any(last.id in each for each in before)
        assert last.phase is ir.Phase.UPDATE
        assert sum(":update" in segment.name for segment in own) <= 2, "one for the first gradient, one for the sum"
        assert len(weights) >= 2 * (config is APART) and not any(backwards <= before[each] for each in weights)


@pytest.mark.parametrize("config", (LAYER, APART), ids=("layer", "apart"))
def test_what_only_a_backward_needs_is_computed_there(config: PartitionConfig) -> None:
    """Normalised values and masks depend on the forward alone; made there, they would be written and kept."""
    made = whole_step(1).captured
    partition = partition_graph(made, config=config)
    for segment, content in zip(partition.graph.segments, partition.nodes_by_segment, strict=True):
        if segment.phase is ir.Phase.FORWARD and segment.module:
            assert not any(made.nodes[node].is_backward for node in content), segment.name


# ------------------------------------------------------------------------------------------------ casts of weights


def test_casts_of_weights_are_segments_that_read_weights_only() -> None:
    """One for every layer; unless asked for, they are part of their layer."""
    model = TwoTowers()

    def call(*inputs: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(*inputs)

    recorded = record(call, two_tower_inputs())[ir.Role.FORWARD]
    config = PartitionConfig(casts="apart")
    assert_replays(recorded, config)
    graph = partition_graph(recorded.captured, config=config).graph
    casts = [segment for segment in graph.segments if segment.name.endswith(":casts")]
    parameters = [graph.inputs[place] for place in recorded.static]
    assert len(casts) == len({segment.module for segment in casts}) >= 4
    assert all(set(segment.inputs) <= set(parameters) for segment in casts)
    together = partition_graph(recorded.captured, config=LAYER).graph
    assert not any(segment.name.endswith(":casts") for segment in together.segments)


# ------------------------------------------------------------------------------------------------ weight gradients


def test_weight_gradients_apart_are_waited_for_by_nothing() -> None:
    """Where inputs need gradients, half of the products are left in a layer, and the other half goes to its weights."""
    made = graphs_of("stack", train=True, recompute_masks=True)[ir.Role.BACKWARD].captured
    partition = partition_graph(made, config=APART)
    graph = partition.graph
    waited_for = {other for segment in graph.segments for other in graph.predecessors(segment.id)}
    flops = {
        segment.name: sum(flops_of_products(made.nodes[node]) for node in partition.nodes_by_segment[segment.id])
        for segment in graph.segments
    }
    for layer in (f"layers.{i}" for i in range(4)):
        (weights,) = [segment for segment in graph.segments if segment.name == f"{layer}:weights"]
        assert weights.module == layer and weights.id not in waited_for and flops[weights.name] > 0
        if layer != "layers.0":
            assert flops[weights.name] == sum(
                flops[segment.name] for segment in graph.segments if segment.module == layer and segment != weights
            )
    longest = longest_path_of_segments(partition, made, flops_of_products)
    assert longest < longest_path_of_segments(partition_graph(made, config=LAYER), made, flops_of_products)


@pytest.mark.parametrize("name", ("flava", "imagebind"))
def test_a_first_layer_and_its_positions_do_not_wait_for_each_other(name: str) -> None:
    """Its norm reads tokens and positions, whose gradient comes from that norm; all of that is for weights alone."""
    workload = build_gpu_workload(name, batch=2, scale="tiny", device="cpu")

    def call(*inputs: torch.Tensor) -> Any:
        return workload.model(dict(zip(workload.inputs, inputs, strict=True)))

    made = record(call, list(workload.inputs.values()))[ir.Role.BACKWARD].captured
    for granularity in ("layer", "module"):
        config = PartitionConfig(granularity=granularity, weight_gradients="apart")
        check_partition(partition_graph(made, config=config), made)


@pytest.mark.parametrize("answer", (True, False))
def test_the_caller_says_whether_weight_gradients_are_better_apart(answer: bool) -> None:
    """It is asked with both graphs, once."""
    made = graphs_of("stack", train=True, recompute_masks=True)[ir.Role.BACKWARD].captured
    asked: list[tuple[ir.SegmentGraph, ir.SegmentGraph]] = []

    def is_better(apart: ir.SegmentGraph, together: ir.SegmentGraph) -> bool:
        asked.append((apart, together))
        return answer

    auto = PartitionConfig(min_segment_share=0.0)
    found = partition_graph(made, config=auto, is_better=is_better)
    ways = [partition_graph(made, config=replace(auto, weight_gradients=way)) for way in ("apart", "together")]
    assert asked == [(ways[0].graph, ways[1].graph)]
    assert found == ways[0 if answer else 1]
    assert partition_graph(made, config=auto) == ways[1], "nobody was there to ask"


@pytest.mark.parametrize(
    ("name", "role", "config"),
    [
        ("stack", ir.Role.FORWARD, LAYER),
        ("stack", ir.Role.BACKWARD, MODULE),
        ("stack", ir.Role.BACKWARD, PartitionConfig(weight_gradients="together")),
        ("stack", ir.Role.BACKWARD, PartitionConfig(min_segment_share=1.0)),
        ("functional", ir.Role.BACKWARD, LAYER),
    ],
    ids=("forward", "whole modules", "together", "all is small", "no names"),
)
def test_nobody_is_asked_about_weight_gradients(name: str, role: ir.Role, config: PartitionConfig) -> None:
    """There is nothing to choose."""
    is_better = raising(AssertionError("asked"))
    made = graphs_of(name, train=True, recompute_masks=True)[role].captured
    names = [segment.name for segment in partition_graph(made, config=config, is_better=is_better).graph.segments]
    assert not any(":weights" in name for name in names)


@pytest.mark.parametrize("seed", range(200))
def test_lossless_contraction_costs_no_parallelism(seed: int) -> None:
    """Without names and without the rule for tiny pieces, the longest path is as long as that of the nodes."""
    made = random_capture(random.Random(seed))
    made = replace(made, nodes=tuple(replace(node, module="") for node in made.nodes))
    for granularity in ("layer", "module"):
        config = PartitionConfig(granularity=granularity, min_segment_share=0.0, max_segment_share=1.0)
        partition = partition_graph(made, config=config)
        check_partition(partition, made)
        expected = longest_path_of_nodes(made, flops_and_bytes)
        assert longest_path_of_segments(partition, made, flops_and_bytes) == expected


def longest_path_of_nodes(made: ir.Capture, weight: Callable[[ir.Node], int]) -> int:
    """Return the most work that must be done one after the other."""
    return longest_path((weight(node), (*node.inputs, *node.after)) for node in made.nodes)


def longest_path_of_segments(partition: ir.Partition, made: ir.Capture, weight: Callable[[ir.Node], int]) -> int:
    """Return the same for segments, which start only when all that they need is there."""
    weights = (sum(weight(made.nodes[node]) for node in own) for own in partition.nodes_by_segment)
    return longest_path((own, partition.graph.predecessors(ir.SegmentId(s))) for s, own in enumerate(weights))


def longest_path(pieces: Iterable[tuple[int, Iterable[int]]]) -> int:
    """Return the largest weight of a path through pieces, each with its own weight and with those before it."""
    ends: list[int] = []
    for weight, before in pieces:
        ends.append(weight + max((ends[other] for other in before), default=0))
    return max(ends, default=0)


def flops_and_bytes(node: ir.Node) -> int:
    """Return the work of a node as one number; clones of cheap nodes have none."""
    return node.work.flops + 2 * (node.work.bytes_read + node.work.bytes_written)


def flops_of_products(node: ir.Node) -> int:
    """Return the flops of matrix products only."""
    return node.work.flops if node.target.startswith(("aten.mm.", "aten.addmm.", "aten.bmm.")) else 0
