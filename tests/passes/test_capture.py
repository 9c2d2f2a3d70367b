from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.variables.streams  # registers the operators of streams
import torch._inductor.inductor_prims  # registers the operators for seeds
from torch import fx
from torch._higher_order_ops.effects import with_effects
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import Capture, Node, NodeKind, Role, Work
from apollo_compile.ir.check import check_capture
from apollo_compile.passes.capture import capture_graph, module_path, read_formulas, resize_capture
from apollo_compile.passes.partition import partition_graph

aten = torch.ops.aten
inductor = torch.ops.inductor
prims = torch.ops.prims
collectives = torch.ops._c10d_functional


class Hand:
    """Writes a post-AOT graph by hand, with fake tensors as metadata."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._mode = FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=True))

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        """Add a graph input."""
        node = self.graph.placeholder(name)
        with self._mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def call(self, target: Callable[..., Any], *args: Any, module: str = "", **kwargs: Any) -> fx.Node:
        """Add the call of an operator."""
        node = self.graph.call_function(target, args, kwargs)
        with self._mode:
            node.meta["val"] = target(*fx.map_arg(args, _value), **fx.map_arg(kwargs, _value))
        if module:
            node.meta["nn_module_stack"] = {"key": (f"L['self'].{module}", torch.nn.Module)}
        return node

    def module(self, outputs: Sequence[fx.Node | None]) -> fx.GraphModule:
        """Finish the graph."""
        self.graph.output(tuple(outputs))
        return fx.GraphModule({}, self.graph)

    def capture(self, *outputs: fx.Node | None) -> Capture:
        """Finish the graph and read it."""
        return capture(self.module(outputs))


@pytest.fixture
def hand() -> Hand:
    """A graph to be written."""
    return Hand()


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def valued(node: fx.Node, value: Any) -> fx.Node:
    """Give a node another value."""
    node.meta["val"] = value
    return node


def capture(graph_module: fx.GraphModule) -> Capture:
    """Read and check a graph."""
    made = capture_graph(graph_module, name="test", role=Role.INFERENCE)
    check_capture(made)
    return made


def by_name(made: Capture, name: str | fx.Node) -> Node:
    """Return the node with that name."""
    return next(node for node in made.nodes if node.name == str(name))


def after(made: Capture, node: fx.Node) -> set[str]:
    """Return the names of what `node` must come after."""
    return {made.nodes[other].name for other in by_name(made, node).after}


# --------------------------------------------------------------------------------------------------------- modules


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("L['self']", ""),
        ("L['self'].encoder.layers.3.mlp", "encoder.layers.3.mlp"),
        ("L['self'].layers[3][0]", "layers.3.0"),
        ("L['self']._modules['encoder']._modules['layers'][12].fc1", "encoder.layers.12.fc1"),
        ("L['self']._modules['encoder']._modules['0']", "encoder.0"),
        ("L['self'].heads[\"image\"].fc", "heads.image.fc"),
        ("L['self']._orig_mod.encoder", "encoder"),
        ("L['self'].encoder._orig_mod.layers[0]", "encoder.layers.0"),
        ("L['self'].encoder._orig_mod", "encoder"),
        ("L['self']._modules['_orig_mod']._modules['fc']", "fc"),
        ("_orig_mod.encoder.layers.0", "encoder.layers.0"),
        ("L['model'].encoder", "encoder"),
        ("G['model'].encoder", "encoder"),
        ("L['compute'].__closure__[1].cell_contents.model.layers[3]", "model.layers.3"),
        ("L['step'].__closure__[1].cell_contents.__closure__[0].cell_contents.fc", "fc"),
        ("L['fns'][0].__closure__[2].cell_contents['image'].fc", "0.closure2.image.fc"),
        ("L['compute'].__closure__[0].cell_contents['image'].fc", "image.fc"),
        ("self.encoder.fc", "encoder.fc"),
        ("_self.encoder.fc", "encoder.fc"),
        ("_orig_mod", ""),
        ("", ""),
        ("encoder.my_orig_mod.fc", "encoder.my_orig_mod.fc"),
        ("encoder.self_attention", "encoder.self_attention"),
    ],
)
def test_a_module_path_is_the_fqn_that_the_user_knows(path: str, expected: str) -> None:
    """Without Dynamo's source, `_modules`, brackets and wrappers."""
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"outer": ("L['self']", torch.nn.Module), "inner": (path, torch.nn.Module)}
    assert module_path(node) == expected


def test_a_backward_node_has_the_module_of_its_forward() -> None:
    """AOTAutograd copies it under another name; a node's own stack comes first."""
    node = fx.Graph().placeholder("x")
    assert module_path(node) == ""
    node.meta["nn_module_stack"] = {}
    assert module_path(node) == ""
    node.meta["fwd_nn_module_stack"] = {"key": ("L['self'].decoder[1]", torch.nn.Module)}
    assert module_path(node) == "decoder.1"
    node.meta["nn_module_stack"] = {"key": ("L['self'].encoder", torch.nn.Module)}
    assert module_path(node) == "encoder"


def test_modules_of_several_models_begin_with_the_variables_that_hold_them() -> None:
    """Where code calls one model only, or everything belongs to `self`, they do not."""

    def modules(*paths: str) -> list[str]:
        hand = Hand()
        value = hand.input("x", 2)
        for path in paths:
            value = hand.call(aten.neg.default, value)
            value.meta["nn_module_stack"] = {"key": (path, torch.nn.Module)}
        return [node.module for node in hand.capture(value).nodes[1:]]

    assert modules("L['image'].layers[0]", "G['text'].layers[0]") == ["image.layers.0", "text.layers.0"]
    assert modules("L['image']", "L['self'].head") == ["image", "head"]
    assert modules("L['image'].layers[0]", "L['image'].head") == ["layers.0", "head"]
    inner = "L['compute'].__closure__"
    found = modules(f"{inner}[0].cell_contents.layers[2]", f"{inner}[1].cell_contents.layers[2]")
    assert found == ["compute.closure0.layers.2", "compute.closure1.layers.2"]
    assert modules(f"{inner}[0].cell_contents.layers[2]", f"{inner}[0].cell_contents.head") == ["layers.2", "head"]


def test_what_autograd_made_is_told_apart_in_whole_steps_only(hand: Hand) -> None:
    """A graph with the backward alone has nothing to tell it from."""
    second = hand.call(aten.neg.default, hand.call(aten.neg.default, hand.input("x", 2)))
    second.meta["autograd_backward"] = True
    graph_module = hand.module([second])
    for role in Role:
        made = capture_graph(graph_module, name="test", role=role)
        assert [node.is_backward for node in made.nodes] == [False, False, role is Role.STEP]


# ----------------------------------------------------------------------------------------------------------- kinds


def test_views_and_factories_are_cheap_and_copies_and_draws_are_not(hand: Hand) -> None:
    """The schema of `_unsafe_view` hides that it is a view, and a clone of `rand` would be another draw."""
    x, cpu = hand.input("x", 4, 6), torch.device("cpu")
    views = [
        hand.call(aten.view.default, x, [24]),
        hand.call(aten.permute.default, x, [1, 0]),
        hand.call(aten.t.default, x),
        hand.call(aten.expand.default, x, [2, 4, 6]),
        hand.call(aten.slice.Tensor, x, 0, 0, 2),
        hand.call(aten.select.int, x, 0, 1),
        hand.call(aten.as_strided.default, x, [2], [1]),
        hand.call(aten.unsqueeze.default, x, 0),
        hand.call(aten.detach.default, x),
        hand.call(aten._unsafe_view.default, x, [24]),
    ]
    factories = [
        hand.call(aten.full.default, [2], 1.0, device=cpu, pin_memory=False),
        hand.call(aten.arange.start_step, 0, 4, 1, device=cpu),
        hand.call(aten.scalar_tensor.default, 1.0, device=cpu),
        hand.call(prims.iota.default, 4, start=0, step=1, dtype=torch.int64, device=cpu, requires_grad=False),
    ]
    computed = [
        hand.call(aten.clone.default, x),
        hand.call(aten.add.Tensor, x, 1),
        hand.call(aten.cat.default, [x, x]),
        hand.call(prims.convert_element_type.default, x, torch.float64),
        hand.call(aten.full_like.default, x, 1),
        hand.call(aten.rand.default, [2], device=cpu),
    ]
    made = hand.capture(*computed)
    assert by_name(made, x).kind is NodeKind.INPUT
    assert {by_name(made, node).kind for node in (*views, *factories)} == {NodeKind.CHEAP}
    assert {by_name(made, node).kind for node in computed} == {NodeKind.COMPUTE}
    assert {by_name(made, node).work.kernels for node in views} == {0}


def test_values_of_multi_output_operators_are_projections(hand: Hand) -> None:
    """Those of a split are views of a view: cheap."""
    x = hand.input("x", 4, 6)
    pair = hand.call(aten.topk.default, x, 2)
    values, indices = hand.call(operator.getitem, pair, 0), hand.call(operator.getitem, pair, 1)
    pieces = hand.call(aten.split.Tensor, x, 2)
    piece = hand.call(operator.getitem, pieces, 1)
    made = hand.capture(values, indices, piece)
    assert by_name(made, pair).kind is NodeKind.COMPUTE
    assert by_name(made, values).kind is by_name(made, indices).kind is NodeKind.PROJECTION
    assert by_name(made, pieces).kind is by_name(made, piece).kind is NodeKind.CHEAP
    assert by_name(made, values).num_bytes == 4 * 2 * 4
    assert by_name(made, indices).num_bytes == 4 * 2 * 8
    assert by_name(made, pair).num_bytes == 4 * 2 * 4 + 4 * 2 * 8


def test_a_seed_is_drawn_and_looked_up_in_one_place(hand: Hand) -> None:
    """The number of a seed would tell equal layers apart, so that the lookup stays with the draw."""
    seeds = hand.call(prims.inductor_seeds.default, 2, torch.device("cpu"))
    lookup = hand.call(prims.inductor_lookup_seed.default, seeds, 1)
    made = hand.capture(hand.call(prims.inductor_random.default, [4], lookup, "rand"))
    assert [node.kind for node in made.nodes] == [NodeKind.COMPUTE, NodeKind.PROJECTION, NodeKind.COMPUTE]
    assert made.nodes[2].after == ()


def test_a_constant_of_the_graph_is_cheap(hand: Hand) -> None:
    """It is an attribute of the module; two attributes are two signatures."""
    hand.graph.output(tuple(valued(hand.graph.get_attr(name), torch.ones(2)) for name in ("one", "two")))
    made = capture(fx.GraphModule({"one": torch.ones(2), "two": torch.zeros(2)}, hand.graph))
    assert [node.kind for node in made.nodes] == [NodeKind.CHEAP] * 2
    assert made.nodes[0].signature != made.nodes[1].signature


# ----------------------------------------------------------------------------------------------------------- values


def test_inputs_follow_the_arguments_without_repeats_and_signatures_point_into_them(hand: Hand) -> None:
    """So that `a - b` and `b - a` have one signature on other inputs, and `a * a` has one input."""
    a, b = hand.input("a", 2), hand.input("b", 2)
    forth, back = hand.call(aten.sub.Tensor, a, b), hand.call(aten.sub.Tensor, b, a)
    square = hand.call(aten.mul.Tensor, b, b)
    joined = hand.call(aten.cat.default, [square, a, square], dim=0)
    made = hand.capture(forth, back, joined)
    assert (by_name(made, forth).inputs, by_name(made, back).inputs) == ((0, 1), (1, 0))
    assert by_name(made, forth).signature == by_name(made, back).signature == "aten.sub.Tensor(%0, %1)"
    assert by_name(made, square).inputs == (1,)
    assert by_name(made, joined).signature == "aten.cat.default([%0, %1, %0], dim=0)"


def test_a_value_is_described_by_dtype_shape_and_strides(hand: Hand) -> None:
    """Bodies are shared between segments whose inputs agree in these."""
    x = hand.input("x", 2, 3, dtype=torch.float16)
    made = hand.capture(hand.call(aten.clone.default, hand.call(aten.t.default, x)))
    assert [node.value for node in made.nodes[:2]] == ["float16[2, 3] strides [3, 1]", "float16[3, 2] strides [1, 3]"]
    assert made.nodes[0].num_bytes == 12


def test_outputs_may_be_none_inputs_aliases_and_repeats(hand: Hand) -> None:
    """In the order of the return."""
    x = hand.input("x", 4)
    view, value = hand.call(aten.view.default, x, [2, 2]), hand.call(aten.neg.default, x)
    assert hand.capture(None, x, view, value, value, None).outputs == (None, 0, 1, 2, 2, None)


# ------------------------------------------------------------------------------------------------------------ order


def test_random_draws_stay_in_order_among_themselves_and_so_do_side_effects(hand: Hand) -> None:
    """Each comes after the one before; what does not draw is free. The effects are assertions, which return nothing."""
    x, flag = hand.input("x", 4), hand.input("flag", dtype=torch.bool)
    first = hand.call(aten._assert_async.msg, flag, "first")
    seeds = hand.call(prims.inductor_seeds.default, 1, torch.device("cpu"))
    bernoulli = hand.call(aten.bernoulli.p, x, 0.5)
    between = hand.call(aten.neg.default, x)
    second = hand.call(aten._assert_async.msg, flag, "second")
    rand = hand.call(aten.rand.default, [4], device=torch.device("cpu"))
    dropout = hand.call(aten.native_dropout.default, x, 0.5, True)
    made = hand.capture(bernoulli, between, rand, hand.call(operator.getitem, dropout, 0))
    assert after(made, seeds) == after(made, first) == set()
    assert after(made, second) == {str(first)}
    assert after(made, bernoulli) == {"inductor_seeds_default"}
    assert after(made, between) == set()
    assert after(made, rand) == {"bernoulli_p"}
    assert after(made, dropout) == {"rand_default"}


def test_a_mutation_comes_after_earlier_readers_and_before_later_ones(hand: Hand) -> None:
    """Through views, too, whichever of them is written to; readers of other storages and views themselves are free."""
    state, other = hand.input("state", 4), hand.input("other", 4)
    plain = hand.call(aten.neg.default, state)
    view = hand.call(aten.view.default, state, [2, 2])
    deep = hand.call(aten.t.default, view)
    through_view = hand.call(aten.sum.default, deep)
    unrelated = hand.call(aten.exp.default, other)
    new = hand.call(aten.add.Tensor, other, 1)
    write = hand.call(aten.copy_.default, state, new)
    later_view = hand.call(aten.view.default, state, [4, 1])
    later = hand.call(aten.cos.default, later_view)
    later_through_old_view = hand.call(aten.sin.default, deep)
    again = hand.call(aten.copy_.default, hand.call(aten.slice.Tensor, state, 0, 0, 2), hand.input("part", 2))
    last = hand.call(aten.exp.default, state)
    made = hand.capture(plain, through_view, unrelated, later, later_through_old_view, last)
    assert after(made, plain) == after(made, through_view) == after(made, new) == set()
    assert after(made, write) == {str(plain), str(through_view)}
    assert after(made, later) == after(made, later_through_old_view) == {str(write)}
    assert by_name(made, view).after == by_name(made, later_view).after == ()
    assert after(made, unrelated) == set()
    assert {str(later), str(later_through_old_view), str(write)} <= after(made, again)
    assert after(made, last) == {str(again)}


def test_a_number_read_from_a_tensor_is_cheap_and_read_before_the_tensor_is_written(hand: Hand) -> None:
    """Each segment reads for itself, so all that use the number, or one made of it, come before the write."""
    x = hand.input("x", 4)
    first, second = (hand.input(name, dtype=torch.int64) for name in ("first", "second"))
    numbers = [hand.call(aten._local_scalar_dense.default, tensor) for tensor in (first, second)]
    total = hand.call(operator.add, *numbers)
    product = hand.call(aten.mul.Tensor, x, total)
    write = hand.call(aten.copy_.default, second, first)
    later = hand.call(aten.mul.Tensor, x, hand.call(aten._local_scalar_dense.default, second))
    made = hand.capture(product, later)
    assert {by_name(made, number).kind for number in (*numbers, total)} == {NodeKind.CHEAP}
    assert after(made, write) == {str(product)}
    assert after(made, later) == {str(write)}


@pytest.mark.parametrize("is_freed", [False, True])
def test_a_number_that_is_used_after_its_tensor_was_written_to_is_refused(is_freed: bool, hand: Hand) -> None:
    """A segment behind the write would read the new number, or freed memory."""
    x, counter = hand.input("x", 4), hand.input("counter", dtype=torch.int64)
    number = hand.call(aten._local_scalar_dense.default, counter)
    total = hand.call(operator.add, number, 1)
    if is_freed:
        hand.call(inductor.resize_storage_bytes_.default, counter, 0)
    else:
        hand.call(aten.copy_.default, counter, hand.input("new", dtype=torch.int64))
    later = hand.call(aten.mul.Tensor, x, total)
    with pytest.raises(UnsupportedGraphError, match="needs a number read from counter, which was written to or freed"):
        hand.capture(later)


def test_memory_is_freed_after_all_readers_of_inputs_and_before_later_ones(hand: Hand) -> None:
    """An input may share its storage. What the graph made is free of that, and so is memory that is given."""
    x, other, third = hand.input("x", 4), hand.input("other", 4), hand.input("third", 4)
    reader = hand.call(aten.neg.default, hand.call(aten.view.default, x, [2, 2]))
    sharing = hand.call(aten.exp.default, other)
    inner = hand.call(aten.sin.default, sharing)
    returned = hand.call(aten.view.default, third, [4, 1])
    free = hand.call(inductor.resize_storage_bytes_.default, x, 0)
    later = hand.call(aten.cos.default, other)
    allocate = hand.call(inductor.resize_storage_bytes_.default, x, 16)
    apart = hand.call(aten.cos.default, sharing)
    fill = hand.call(aten.copy_.default, x, apart)
    made = hand.capture(reader, inner, returned, later, fill)
    assert after(made, free) == {str(reader), str(sharing), str(returned)}
    assert after(made, later) == {str(free)}
    assert after(made, allocate) == {str(reader), str(free)}
    assert after(made, apart) == set()
    assert after(made, fill) >= {str(allocate)}
    assert [node.name for node in made.nodes if node.is_alone] == [str(free), str(allocate)]


def test_memory_that_is_filled_later_is_made_once(hand: Hand) -> None:
    """Of a factory whose memory something writes to, no segment has a copy of its own."""
    x, full = hand.input("x", 4), hand.input("full", 4)
    made, filled = hand.call(aten.full.default, [4], 1.0), hand.call(aten.full.default, [4], 1.0)
    write = hand.call(aten.copy_.default, filled, full)
    reader = hand.call(aten.add.Tensor, filled, hand.call(aten.mul.Tensor, x, made))
    found = hand.capture(write, reader)
    assert by_name(found, made).kind is NodeKind.CHEAP
    assert by_name(found, filled).kind is NodeKind.COMPUTE
    assert after(found, reader) == {str(write)}


def test_what_an_operator_returns_of_what_it_wrote_to_is_the_same_memory(hand: Hand) -> None:
    """Readers of its result come before the next write, as readers of its argument do.

    What is read already is not named again: `after` is for order without a value.
    """
    state, new = hand.input("state", 4), hand.input("new", 4)
    first = hand.call(aten.copy_.default, state, new)
    reader = hand.call(aten.neg.default, hand.call(aten.view.default, first, [2, 2]))
    direct = hand.call(aten.exp.default, first)
    second = hand.call(aten.copy_.default, state, direct)
    made = hand.capture(reader, second)
    assert after(made, direct) == set()
    assert after(made, second) == {str(first), str(reader)}


def sum_over_ranks(hand: Hand, value: fx.Node) -> fx.Node:
    """Add the sum of a value over all ranks, not yet waited for; no process group is needed for that."""
    return hand.call(collectives.all_reduce.default, value, "sum", "group")


needs_distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)


@needs_distributed
def test_collectives_stay_in_order(hand: Hand) -> None:
    """Ranks must agree on the order, whatever the values are; random draws do not wait for them."""
    x, y = hand.input("x", 4), hand.input("y", 4)
    first = sum_over_ranks(hand, x)
    waited = hand.call(collectives.wait_tensor.default, first)
    draw = hand.call(aten.rand.default, [4])
    second = sum_over_ranks(hand, y)
    made = hand.capture(waited, hand.call(collectives.wait_tensor.default, second), draw)
    assert after(made, first) == set()
    assert after(made, second) == {str(first)}
    assert after(made, draw) == set()
    assert [node.name for node in made.nodes if node.is_collective] == [str(first), str(second)]


@needs_distributed
def test_a_collective_and_its_wait_are_one_piece(hand: Hand) -> None:
    """Between the two, nothing but the body that has both keeps their memory; what starts later ends later."""
    sums = [sum_over_ranks(hand, hand.input(name, 4)) for name in ("x", "y")]
    waits = [hand.call(collectives.wait_tensor.default, each) for each in sums]
    made = hand.capture(*waits)
    assert [by_name(made, wait).kind for wait in waits] == [NodeKind.PROJECTION] * 2
    segments = partition_graph(made).nodes_by_segment
    for collective, wait in zip(sums, waits, strict=True):
        (owner,) = [nodes for nodes in segments if by_name(made, collective).id in nodes]
        assert by_name(made, wait).id in owner


@needs_distributed
def test_a_collective_without_its_wait_is_refused(hand: Hand) -> None:
    """A wait for what another graph started is refused too."""
    first, other = sum_over_ranks(hand, hand.input("x", 4)), Hand()
    with pytest.raises(UnsupportedGraphError, match=rf"does not wait for the result of collective {first} "):
        hand.capture(first)
    wait = other.call(collectives.wait_tensor.default, other.input("x", 4))
    with pytest.raises(
        UnsupportedGraphError, match="waits for x, which is not the result of a collective of this graph"
    ):
        other.capture(wait)


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (torch.sin, r"has a dynamic shape, and no input .* says what s\d+, s"),
        (lambda x: x.nonzero() + 1, r"^nonzero has a dynamic shape, and no input .* says what u0 is"),
    ],
    ids=["of inputs", "of data"],
)
def test_a_shape_that_no_input_explains_is_refused(function: Callable[..., torch.Tensor], reason: str) -> None:
    """Dynamo passes the sizes of dynamic shapes as inputs; code for a symbol that nobody gives could not run."""
    graph_module = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.ones(3, 5))
    if function is not torch.sin:
        graph_module.graph.find_nodes(op="placeholder")[0].meta["val"] = torch.ones(3, 5)
    with pytest.raises(UnsupportedGraphError, match=reason):
        capture(graph_module)


def test_a_number_that_only_another_graph_has_read_is_refused(hand: Hand) -> None:
    """As the forward reads it and the backward takes it; on a GPU no lane could stop to read one."""
    count = hand.input("count", dtype=torch.int64)
    number = hand.call(aten._local_scalar_dense.default, count)
    graph_module = hand.module([hand.call(aten.mul.Tensor, hand.input("x", 4), number)])
    assert capture(graph_module).outputs
    count.meta["val"] = torch.empty((), dtype=torch.int64, device="meta")  # any device that is no CPU
    with pytest.raises(UnsupportedGraphError, match=r"^_local_scalar_dense_default is a number, and no input .* u0 is"):
        capture_graph(graph_module, name="g", role=Role.FORWARD, device=torch.device("meta"))
    count.meta["val"] = number.meta["val"]
    with pytest.raises(UnsupportedGraphError, match=r"^count is a number, and no input of the graph says what u0 is"):
        capture(graph_module)


def symbolic_hand() -> tuple[Hand, fx.Node, fx.Node]:
    """Return a graph with a size, called s, and a tensor of s rows and 4 columns."""
    traced = make_fx(torch.sin, tracing_mode="symbolic")(torch.randn(30, 4))
    x = traced.graph.find_nodes(op="placeholder")[0].meta["val"]
    hand = Hand()
    size = valued(hand.graph.placeholder("s"), x.shape[0])
    return hand, size, valued(hand.graph.placeholder("x"), x.new_empty((x.shape[0], 4)))


def test_sizes_are_inputs_that_nodes_name_apart() -> None:
    """A node is told the symbols in its own shape and in those of what it reads; arithmetic on sizes is cheap."""
    hand, size, rows = symbolic_hand()
    number = size.meta["val"]
    twice = valued(hand.graph.call_function(operator.mul, (size, 2)), number * 2)
    total = valued(hand.graph.call_function(aten.sum.default, (rows,)), torch.empty(()))
    empty = rows.meta["val"].new_empty((number * 2, 4))
    zeros = valued(hand.graph.call_function(aten.full.default, ([twice, 4], 0.0)), empty)
    result = hand.capture(total)
    found = {node.name: node for node in result.nodes}
    assert found["s"].kind is NodeKind.INPUT and found["s"].sizes == ()
    assert found[twice.name].kind is found[zeros.name].kind is NodeKind.CHEAP
    assert found[twice.name].inputs == ()
    assert found[zeros.name].inputs == (found[twice.name].id,)
    assert {found[name].sizes for name in (twice.name, zeros.name, total.name)} == {(found["s"].id,)}
    assert found["x"].num_bytes == 30 * 4 * 4
    assert result.sizes == ((str(number), 30),)


def test_bytes_and_work_are_those_of_the_sizes_asked_for() -> None:
    """Nothing else depends on them."""
    hand, size, rows = symbolic_hand()
    graph_module = hand.module([valued(hand.graph.call_function(aten.sin.default, (rows,)), rows.meta["val"])])
    name = str(size.meta["val"])
    captured = capture(graph_module)
    formulas = read_formulas(graph_module, captured)
    assert resize_capture(captured, formulas, {name: 30}, name="test") == captured
    one, many = (resize_capture(captured, formulas, {name: number}, name="test") for number in (1, 1000))
    assert many.nodes[-1].num_bytes == 1000 * one.nodes[-1].num_bytes == 1000 * 4 * 4
    assert many.nodes[-1].work.flops == 1000 * one.nodes[-1].work.flops > 0
    for first, second in zip(one.nodes, many.nodes, strict=True):
        assert replace(first, num_bytes=0, work=Work()) == replace(second, num_bytes=0, work=Work())
    assert one.sizes == ((name, 1),)


def negated(hand: Hand) -> fx.Node:
    """Add an input and its negative."""
    return hand.call(aten.neg.default, hand.input("x", 2, 2))


META, SPARSE = torch.empty(2, device="meta"), torch.sparse_coo_tensor(size=(2, 2), check_invariants=True)
ON_META, IS_SPARSE = "^{node} is on device meta", "^{node} has layout torch.sparse_coo"
REFUSED: dict[str, tuple[Callable[[Hand], fx.Node], str]] = {
    "an input on another device": (
        lambda hand: valued(hand.input("x", 2), META),
        f"{ON_META}; all lanes of this graph are on cpu$",
    ),
    "a computation on another device": (lambda hand: valued(negated(hand), META), ON_META),
    "a factory on another device": (lambda hand: hand.call(aten.full.default, [2], 1.0, device=META.device), ON_META),
    "a constant on another device": (lambda hand: valued(hand.graph.get_attr("constant"), META), ON_META),
    "one bad value of two": (
        lambda hand: valued(hand.call(aten.topk.default, hand.input("x", 4), 2), (torch.empty(2), META)),
        ON_META,
    ),
    "a sparse input": (lambda hand: valued(hand.input("x", 2, 2), SPARSE), IS_SPARSE),
    "a sparse result": (lambda hand: valued(negated(hand), SPARSE), IS_SPARSE),
    "an effect token": (
        lambda hand: hand.graph.call_function(
            with_effects, (hand.input("token", 0), aten.neg.default, hand.input("x", 2))
        ),
        "^node {node} carries an effect token; segments cannot order it: it is aten.neg.default$",
    ),
    "a call of a method": (
        lambda hand: hand.graph.call_method("neg", (hand.input("x", 2),)),
        "^node {node} is a call_method",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_segment_can_hold_is_refused(name: str) -> None:
    """Segments exchange strided tensors of one device, and have no order but that of values."""
    build, reason = REFUSED[name]
    hand = Hand()
    node = build(hand)
    hand.graph.output((node,))
    with pytest.raises(UnsupportedGraphError, match=reason.format(node=node)):
        capture(fx.GraphModule({"constant": torch.ones(2)}, hand.graph))


def test_an_output_that_is_a_number_is_refused_and_none_are_enough(hand: Hand) -> None:
    """The message shows the number; an empty graph is captured."""
    hand.graph.output((hand.input("x", 2), 3))
    with pytest.raises(UnsupportedGraphError, match="the graph returns 3, a int, not a tensor"):
        capture(fx.GraphModule({}, hand.graph))
    made = Hand().capture()
    assert (made.nodes, made.outputs, made.name, made.role) == ((), (), "test", Role.INFERENCE)


@pytest.mark.robustness("Special operators", "streams of the user's in a graph")
def test_streams_of_the_users_are_refused(record_property: Callable[[str, object], None], hand: Hand) -> None:
    """A plan places all work itself, so a graph with `torch.cuda.stream` in it is Inductor's, which honours them."""
    x = hand.input("x", 2)
    hand.call(torch.ops.streams.fork.default, 0, 1)
    y = hand.call(aten.neg.default, x)
    hand.call(torch.ops.streams.join.default, 1, 0)
    with pytest.raises(UnsupportedGraphError, match=r"^node fork_default .* stream chosen by the user") as refusal:
        hand.capture(y)
    record_property("reasons", [str(refusal.value)])  # as of a graph that runs


def test_a_tensor_of_a_dynamic_size_counts_as_reading_what_its_number_was_read_from(hand: Hand) -> None:
    """It has a size and a number; what is made of it comes before the tensor of the number is overwritten."""
    size, scale = hand.input("size", 3, dtype=torch.int64), hand.input("scale")
    rows = hand.call(torch.ops.aten.sym_size.int, size, 0)
    number = hand.call(torch.ops.aten._local_scalar_dense.default, scale)
    full = hand.call(torch.ops.aten.full.default, [rows], number)
    reader = hand.call(torch.ops.aten.sin.default, full)
    writer = hand.call(torch.ops.aten.copy_.default, scale, hand.call(torch.ops.aten.mul.Tensor, scale, 2))
    assert after(hand.capture(reader, writer), writer) >= {reader.name}


@pytest.mark.parametrize("count", [3, 4])
def test_four_equal_parts_of_a_value_are_made_where_it_is_made(count: int, hand: Hand) -> None:
    """By name or by split; three are the queries, keys and values of their reader."""
    x = hand.input("x", 2, 4, 3)
    value = hand.call(aten.relu.default, x)
    split = hand.call(aten.split.Tensor, value, 1, 1)
    taken = [
        *(hand.call(aten.select.int, value, 1, place) for place in range(count)),
        *(hand.call(aten.slice.Tensor, x, 1, place, place + 1) for place in range(count)),
        *(hand.call(operator.getitem, split, place) for place in range(count)),
    ]
    made = hand.capture(*(hand.call(aten.exp.default, each) for each in taken))
    assert {by_name(made, each).kind for each in taken} == {NodeKind.PART if count == 4 else NodeKind.CHEAP}
    bodies = {segment.body for segment in partition_graph(made).graph.segments if "exp" in segment.name}
    assert len(bodies) <= (2 if count == 4 else 9)


@pytest.mark.parametrize("count", [3, 4])
def test_parts_put_into_zeros_belong_to_the_segments_that_add_them(count: int, hand: Hand) -> None:
    """As in the backward of a loop that reads four parts of a value; into a value that is computed they are work."""
    gradient = hand.input("gradient", 2, 3)
    zeros = hand.call(aten.full.default, [2, 4, 3], 0)
    computed = hand.call(aten.exp.default, hand.input("x", 2, 4, 3))
    put, kept = (
        [hand.call(aten.select_scatter.default, base, gradient, 1, place) for place in range(count)]
        for base in (zeros, computed)
    )
    made = hand.capture(*(hand.call(aten.exp.default, each) for each in (*put, *kept)))
    assert {by_name(made, each).kind for each in put} == {NodeKind.CHEAP if count == 4 else NodeKind.COMPUTE}
    assert {by_name(made, each).kind for each in kept} == {NodeKind.COMPUTE}


def test_parts_of_what_is_written_to_are_taken_where_they_are_read(hand: Hand) -> None:
    """Of an input that the graph writes to at its end, and of a view of it."""
    x = hand.input("x", 4, 3)
    turned = hand.call(aten.permute.default, x, [1, 0])
    taken = [
        *(hand.call(aten.select.int, x, 0, place) for place in range(4)),
        *(hand.call(aten.slice.Tensor, turned, 1, place, place + 1) for place in range(4)),
    ]
    results = [hand.call(aten.exp.default, each) for each in taken]
    made = hand.capture(*results, hand.call(aten.copy_.default, x, hand.call(aten.exp.default, x)))
    assert {by_name(made, each).kind for each in taken} == {NodeKind.CHEAP}


def test_parts_between_aligned_addresses_are_taken_where_they_are_read(hand: Hand) -> None:
    """But on a CPU: code that Inductor compiles for one would read the others at wrong addresses."""
    x = hand.input("x", 2, 4)
    taken = [hand.call(aten.select.int, x, 1, place) for place in range(4)]
    graph_module = hand.module([hand.call(aten.exp.default, each) for each in taken])
    for node in graph_module.graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            node.meta["val"] = torch.empty(value.shape, device="meta").as_strided(
                value.shape, value.stride(), value.storage_offset()
            )
    made = capture_graph(graph_module, name="test", role=Role.INFERENCE, device=torch.device("meta"))
    assert {by_name(made, each.name).kind for each in taken} == {NodeKind.CHEAP}
