"""Node formulas agree with torch's flop counter and with counted bytes, and know the operators of real graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from apollo_compile.ir import KernelKind  # noqa: E402
from apollo_compile.operators.work import WorkKind, evaluate, node_work, work_of  # noqa: E402

aten = torch.ops.aten


def _num_bytes(*tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _convolution(*, stride: int = 1, padding: int = 0, transposed: bool = False) -> Callable[..., tuple[Any, ...]]:
    def call(image: Any, weight: Any) -> tuple[Any, ...]:
        return (image, weight, None, [stride, stride], [padding, padding], [1, 1], transposed, [0, 0], 1)

    return call


def _rand(*shape: int) -> Any:
    return torch.rand(shape)


COUNTED = [
    (aten.mm.default, (_rand(3, 5), _rand(5, 7))),
    (aten.mm.default, (_rand(64, 128), _rand(128, 32))),
    (aten.mm.default, (_rand(1, 1), _rand(1, 1))),
    (aten.addmm.default, (_rand(7), _rand(3, 5), _rand(5, 7))),
    (aten.addmm.default, (_rand(3, 7), _rand(3, 5), _rand(5, 7))),
    (aten.bmm.default, (_rand(4, 3, 5), _rand(4, 5, 7))),
    (aten.bmm.default, (_rand(1, 17, 32), _rand(1, 32, 17))),
    (aten.baddbmm.default, (_rand(4, 3, 7), _rand(4, 3, 5), _rand(4, 5, 7))),
    (aten.convolution.default, _convolution()(_rand(2, 3, 9, 8), _rand(5, 3, 3, 3))),
    (aten.convolution.default, _convolution(stride=16)(_rand(4, 3, 64, 64), _rand(64, 3, 16, 16))),
    (aten.convolution.default, _convolution(padding=1)(_rand(1, 8, 6, 6), _rand(4, 8, 3, 3))),
    (aten.convolution.default, _convolution(stride=2, transposed=True)(_rand(2, 4, 5, 5), _rand(4, 6, 3, 3))),
]

NAMED_CONVOLUTIONS = [
    (aten.conv2d.default, ([1, 1], 2), (False, [0, 0], 2)),
    (aten.conv_transpose2d.input, ([0, 0], 2, [1, 1]), (True, [0, 0], 2)),
]
"""What follows image, weight, bias, stride and padding, and what follows the dilation in `aten.convolution`."""


@pytest.mark.parametrize(("target", "args"), COUNTED, ids=lambda value: str(value) if callable(value) else "")
def test_products_agree_with_the_flop_counter(target: Any, args: tuple[Any, ...]) -> None:
    """Flops equal torch's count; bytes are the tensors read and written once."""
    with FlopCounterMode(display=False) as counter:
        out = target(*args)
    work = evaluate(node_work(target, args, {}, out), {})
    assert work.flops == counter.get_total_flops()
    assert work.bytes_read == _num_bytes(*(value for value in args if isinstance(value, torch.Tensor)))
    assert work.bytes_written == _num_bytes(out)
    assert work.kernels == 1


@pytest.mark.parametrize("wanted", ([True, True, False], [False, True, False], [True, False, False]))
@pytest.mark.parametrize("transposed", (False, True))
def test_convolution_backward_agrees_with_the_flop_counter(wanted: list[bool], transposed: bool) -> None:
    """Each wanted gradient costs one forward pass, and what it does not need is not read."""
    image, weight = _rand(2, 4, 8, 8), _rand(4, 6, 3, 3) if transposed else _rand(6, 4, 3, 3)
    call = _convolution(stride=2, transposed=transposed)(image, weight)
    gradient = torch.rand_like(aten.convolution.default(*call))
    args = (gradient, image, weight, [0], *call[3:], wanted)
    with FlopCounterMode(display=False) as counter:
        out = aten.convolution_backward.default(*args)
    work = evaluate(node_work(aten.convolution_backward.default, args, {}, out), {})
    assert work.flops == counter.get_total_flops()
    assert work.bytes_read == _num_bytes(gradient) + wanted[0] * _num_bytes(weight) + wanted[1] * _num_bytes(image)
    assert work.bytes_written == _num_bytes(*(tensor for tensor in out if tensor is not None))
    assert work.kernels == sum(wanted)


@pytest.mark.parametrize("shape", ((2, 2, 16, 32), (1, 4, 77, 64), (3, 1, 5, 8)))
def test_attention_costs_its_products(shape: tuple[int, ...]) -> None:
    """Two products forward and five backward, as the flop counter has it for other devices."""
    batch, heads, tokens, width = shape
    query, key, value = (_rand(*shape) for _ in range(3))
    forward_op = aten._scaled_dot_product_flash_attention_for_cpu.default
    out, logsumexp = forward_op(query, key, value)
    product = 2 * batch * heads * tokens * tokens * width
    forward = evaluate(node_work(forward_op, (query, key, value), {}, (out, logsumexp)), {})
    backward_op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    args = (torch.rand_like(out), query, key, value, out, logsumexp, 0.0, False)
    backward = evaluate(node_work(backward_op, args, {}, backward_op(*args)), {})
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)
    assert forward.bytes_read == _num_bytes(query, key, value)
    assert forward.bytes_written == _num_bytes(out, logsumexp)
    assert backward.bytes_written == 3 * _num_bytes(query)
    assert (forward.kernels, backward.kernels) == (1, 1)
    for name in ("flash", "efficient", "cudnn"):  # on CUDA there is one before the gradients and one after
        target = f"aten._scaled_dot_product_{name}_attention_backward.default"
        assert evaluate(node_work(target, args, {}, (query, key, value)), {}).kernels == 3


_TABLE, _IDS = _rand(100, 16), torch.randint(0, 100, (4, 7))
_X = _rand(4, 6)
BYTES = [
    (aten.add.Tensor, (_X, _X), WorkKind.POINTWISE, _num_bytes(_X), _num_bytes(_X)),
    (aten.add_.Tensor, (_X.clone(), _X), WorkKind.POINTWISE, 2 * _num_bytes(_X), _num_bytes(_X)),
    (aten.mul.Tensor, (_X, _rand(6).expand(4, 6)), WorkKind.POINTWISE, _num_bytes(_X) + 24, _num_bytes(_X)),
    (aten.gt.Scalar, (_X, 0), WorkKind.POINTWISE, _num_bytes(_X), 24),
    (aten.view.default, (_X, [24]), WorkKind.VIEW, 0, 0),
    (aten.expand.default, (_rand(1, 6), [4, 6]), WorkKind.VIEW, 0, 0),
    (aten.sum.dim_IntList, (_X, [1]), WorkKind.REDUCTION, _num_bytes(_X), 16),
    (aten.var_mean.correction, (_X, [1]), WorkKind.REDUCTION, _num_bytes(_X), 32),
    (aten._softmax.default, (_X, 1, False), WorkKind.REDUCTION, _num_bytes(_X), _num_bytes(_X)),
    (aten.max.dim, (_X, 1), WorkKind.REDUCTION, _num_bytes(_X), 16 + 32),
    (aten.max.other, (_X, _rand(4, 6)), WorkKind.POINTWISE, 2 * _num_bytes(_X), _num_bytes(_X)),
    (aten.native_layer_norm.default, (_X, [6], None, None, 1e-5), WorkKind.REDUCTION, _num_bytes(_X), 96 + 16 + 16),
    (aten.embedding.default, (_TABLE, _IDS), WorkKind.GATHER, 28 * 8 + 28 * 64, 28 * 64),
    (aten.index.Tensor, (_TABLE, [_IDS]), WorkKind.GATHER, 28 * 8 + 28 * 64, 28 * 64),
    (aten.cat.default, ([_X, _X.clone()], 0), WorkKind.COPY, 2 * _num_bytes(_X), 2 * _num_bytes(_X)),
    (aten.copy_.default, (_rand(4, 6), _X), WorkKind.COPY, _num_bytes(_X), _num_bytes(_X)),
    (aten.full.default, ([4, 6], 0.0), WorkKind.CONSTANT, 0, _num_bytes(_X)),
    (aten.cumsum.default, (_X, 1), WorkKind.LOOKUP, _num_bytes(_X), _num_bytes(_X)),
    (aten.rand.default, ([4, 6],), WorkKind.RANDOM, 0, _num_bytes(_X)),
    (aten.special_bessel_j0.default, (_X,), WorkKind.POINTWISE, _num_bytes(_X), _num_bytes(_X)),
    (aten._cdist_forward.default, (_X, _X, 2.0, None), WorkKind.UNKNOWN, _num_bytes(_X), 64),
]


@pytest.mark.parametrize(("target", "args", "kind", "read", "written"), BYTES, ids=[str(row[0]) for row in BYTES])
def test_bytes_are_those_of_distinct_elements(
    target: Any, args: tuple[Any, ...], kind: WorkKind, read: int, written: int
) -> None:
    """Views are free, gathers read what they pick, expanded dimensions count once, unknown operators count too."""
    work = node_work(target, args, {}, target(*args))
    assert work.kind is kind
    assert (evaluate(work, {}).bytes_read, evaluate(work, {}).bytes_written) == (read, written)


def test_formulas_keep_shape_symbols_until_they_get_hints() -> None:
    """One formula serves every batch size, and a missing hint is named."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(torch.mm, tracing_mode="symbolic")(_rand(8, 5), _rand(5, 7)).graph
    (work,) = (work_of(node) for node in graph.nodes if node.target is aten.mm.default)
    left, right = (node.meta["val"] for node in graph.nodes if node.op == "placeholder")
    rows, inner, columns = (size.node.expr for size in (*left.shape, right.shape[1]))
    for batch in (1, 8, 100):
        measured = evaluate(work, {rows: batch, inner: 5, columns: 7})
        assert (measured.flops, measured.bytes_written) == (batch * 5 * 7 * 2, batch * 7 * 4)
    with pytest.raises(ValueError, match=f"no hint for {rows}"):
        evaluate(work, {inner: 5, columns: 7})


def test_a_name_finds_the_same_rule_as_the_operator() -> None:
    """Products carry operator names only."""
    args = (_rand(3, 5), _rand(5, 7))
    out = _rand(3, 7)
    assert node_work("aten.mm.default", args, {}, out) == node_work(aten.mm.default, args, {}, out)


@pytest.mark.parametrize(
    ("name", "kernel", "tiles"),
    [
        ("one tile", lambda: (aten.mm.default, (_rand(128, 9), _rand(9, 128))), 1),
        ("a row more", lambda: (aten.mm.default, (_rand(129, 9), _rand(9, 128))), 2),
        ("both sides", lambda: (aten.addmm.default, (_rand(300), _rand(130, 9), _rand(9, 300))), 6),
        ("a batch", lambda: (aten.bmm.default, (_rand(5, 130, 9), _rand(5, 9, 7))), 10),
        ("a vector", lambda: (aten.mv.default, (_rand(300, 9), _rand(9))), 3),
        ("an image", lambda: (aten.convolution.default, _convolution()(_rand(2, 3, 18, 18), _rand(200, 3, 3, 3))), 8),
        ("a sum", lambda: (aten.sum.default, (_rand(300, 300),)), 0),
    ],
)
def test_products_have_output_tiles(name: str, kernel: Callable[[], tuple[Any, tuple[Any, ...]]], tiles: int) -> None:
    """Blocks of 128 x 128 of the result, per batch; a convolution has a row per position and a column per channel."""
    target, args = kernel()
    (part,) = evaluate(node_work(target, args, {}, target(*args)), {}).parts
    assert part.tiles == tiles


def test_attention_has_a_tile_per_block_of_queries_and_head() -> None:
    """Forward and backward, wherever the query stands among the arguments."""
    query, key = _rand(2, 3, 200, 8), _rand(2, 3, 50, 8)
    forward_op = aten._scaled_dot_product_flash_attention_for_cpu.default
    out, logsumexp = forward_op(query, key, key)
    forward = evaluate(node_work(forward_op, (query, key, key), {}, (out, logsumexp)), {})
    backward_op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    args = (out, query, key, key, out, logsumexp, 0.0, False)
    backward = evaluate(node_work(backward_op, args, {}, backward_op(*args)), {})
    assert [(part.kind, part.tiles) for part in (*forward.parts, *backward.parts)] == [
        (KernelKind.ATTENTION, 12),
        (KernelKind.ATTENTION_BACKWARD, 12),
    ]


@pytest.mark.parametrize("dtype", ("float32", "float64", "bfloat16"))
def test_a_kernel_knows_what_its_operands_are(dtype: str) -> None:
    """Devices differ in speed by dtype and kind; the numbers are the node's."""
    left, right = (torch.ones(4, 4, dtype=getattr(torch, dtype)) for _ in range(2))
    work = evaluate(node_work(aten.mm.default, (left, right), {}, left @ right), {})
    (part,) = work.parts
    assert (part.kind, part.dtype, part.flops, part.count) == (KernelKind.MATMUL, dtype, work.flops, 1)
    assert part.bytes_moved == work.bytes_read + work.bytes_written
    assert part.bytes_from_outside == work.bytes_read


def test_views_and_constants_are_no_kernels() -> None:
    """They have no part in the time."""
    assert evaluate(node_work(aten.view.default, (_X, [24]), {}, _X.view(24)), {}).parts == ()
    assert evaluate(node_work(aten.full.default, ([4, 6], 0.0), {}, _X), {}).parts == ()


@pytest.mark.parametrize(("target", "named", "general"), NAMED_CONVOLUTIONS, ids=("forward", "transposed"))
def test_a_named_convolution_costs_what_the_general_one_does(target: Any, named: Any, general: Any) -> None:
    """Which is what torch counts."""
    weight = _rand(4, 3, 3, 3) if general[0] else _rand(6, 2, 3, 3)
    same = (_rand(2, 4, 9, 8), weight, None, [2, 2], [1, 1])
    args, general = (*same, *named), (*same, [1, 1], *general)
    out = target(*args)
    with FlopCounterMode(display=False) as counter:
        aten.convolution.default(*general)
    work = evaluate(node_work(target, args, {}, out), {})
    assert work.flops == counter.get_total_flops()
    assert work == evaluate(node_work(aten.convolution.default, general, {}, out), {})


def test_a_scatter_costs_what_it_writes() -> None:
    """The gradient of an embedding touches the rows that were looked up, not the table."""
    gradient, indices = _rand(4, 7, 16), torch.randint(0, 100, (4, 7))
    table = torch.zeros(100, 16)
    values = _num_bytes(gradient)
    cases = [
        (aten.embedding_dense_backward.default, (gradient, indices, 100, -1, False), 2),  # zeros first
        (aten.index_put.default, (table, [indices], gradient, True), 1),
    ]
    for target, args, kernels in cases:
        work = evaluate(node_work(target, args, {}, target(*args)), {})
        (part,) = work.parts
        assert (part.kind, part.flops, work.bytes_written) == (KernelKind.SCATTER, gradient.numel(), values)
        assert work.bytes_read == 2 * values + _num_bytes(indices)
        assert work.kernels == part.launches == kernels
    filled = evaluate(node_work(aten.scatter.value, (table, 0, indices, 1.0), {}, table), {})
    assert (filled.flops, filled.bytes_written) == (indices.numel(), 4 * indices.numel())
    rows = torch.tensor([3, 5])
    for target, value in ((aten.index_fill.int_Scalar, 1.0), (aten.index_fill.int_Tensor, torch.tensor(1.0))):
        work = evaluate(node_work(target, (table, 0, rows, value), {}, table), {})
        assert (work.flops, work.bytes_written) == (2 * 16, 4 * 2 * 16)
        read = [tensor for tensor in (rows, value) if isinstance(tensor, torch.Tensor)]
        assert work.bytes_read == 4 * 2 * 16 + _num_bytes(*read)  # nothing else of the table


def test_an_operator_without_a_formula_is_counted_by_bytes_and_named() -> None:
    """In the capture and its text; a graph that has formulas for all names none."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from apollo_compile.ir import Role
    from apollo_compile.ir.text import format_capture
    from apollo_compile.passes.capture import capture_graph

    def distances(left: Any, right: Any) -> tuple[Any, ...]:
        return (torch.ops.aten._cdist_forward(left, right, 2.0, None) + 1,)

    traced = make_fx(distances, tracing_mode="fake")(_rand(4, 6), _rand(5, 6))
    made = capture_graph(traced, name="distances", role=Role.INFERENCE)
    assert made.without_formula == ("aten._cdist_forward.default",)
    assert "counted by bytes alone: aten._cdist_forward.default" in format_capture(made)
    (work,) = (node.work for node in made.nodes if node.target in made.without_formula)
    assert (work.flops, work.bytes_read, work.bytes_written, work.kernels) == (0, 4 * (24 + 30), 4 * 20, 1)

    traced = make_fx(lambda left, right: (left + right,), tracing_mode="fake")(_X, _X)
    made = capture_graph(traced, name="sum", role=Role.INFERENCE)
    assert made.without_formula == ()
    assert "counted by bytes alone" not in format_capture(made)
