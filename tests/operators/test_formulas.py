"""Every formula agrees with torch's flop counter and with counted bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.inductor_prims  # registers the operators for seeds
from torch.utils.flop_counter import FlopCounterMode

from apollo_compile.ir import KernelKind, Work
from apollo_compile.operators.entry import WorkKind
from apollo_compile.operators.work import evaluate, node_work

aten = torch.ops.aten


def _num_bytes(*tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _work(target: Any, *args: Any, out: Any = None) -> Work:
    """Return what the formula says of a call, whose result is `out` where that is known already."""
    return evaluate(node_work(target, args, {}, target(*args) if out is None else out), {})


def _counted_flops(target: Any, *args: Any) -> int:
    """Return what torch counts in a call."""
    with FlopCounterMode(display=False) as counter:
        target(*args)
    return counter.get_total_flops()


def _convolution(*, stride: int = 1, padding: int = 0, transposed: bool = False) -> Callable[..., tuple[Any, ...]]:
    def call(image: Any, weight: Any) -> tuple[Any, ...]:
        return (image, weight, None, [stride, stride], [padding, padding], [1, 1], transposed, [0, 0], 1)

    return call


def _rand(*shape: int) -> Any:
    return torch.rand(shape)


def _zeros(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.int64)


COUNTED = [
    (aten.mm.default, (_rand(3, 5), _rand(5, 7))),
    (aten.addmm.default, (_rand(7), _rand(3, 5), _rand(5, 7))),
    (aten.addmm.default, (_rand(3, 7), _rand(3, 5), _rand(5, 7))),
    (aten.bmm.default, (_rand(4, 3, 5), _rand(4, 5, 7))),
    (aten.linear.default, (_rand(2, 3, 5), _rand(7, 5))),
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
    work = _work(target, *args)
    assert work.flops == _counted_flops(target, *args)
    assert work.bytes_read == _num_bytes(*(value for value in args if isinstance(value, torch.Tensor)))
    assert work.bytes_written == _num_bytes(target(*args))
    assert work.kernels == 1


@pytest.mark.parametrize("wanted", ([True, True, False], [False, True, False], [True, False, False]))
@pytest.mark.parametrize("transposed", (False, True))
def test_convolution_backward_agrees_with_the_flop_counter(wanted: list[bool], transposed: bool) -> None:
    """Each wanted gradient costs one forward pass, and what it does not need is not read."""
    image, weight = _rand(2, 4, 8, 8), _rand(4, 6, 3, 3) if transposed else _rand(6, 4, 3, 3)
    call = _convolution(stride=2, transposed=transposed)(image, weight)
    gradient = torch.rand_like(aten.convolution.default(*call))
    args = (gradient, image, weight, [0], *call[3:], wanted)
    work, out = _work(aten.convolution_backward.default, *args), aten.convolution_backward.default(*args)
    assert work.flops == _counted_flops(aten.convolution_backward.default, *args)
    assert work.bytes_read == _num_bytes(gradient) + wanted[0] * _num_bytes(weight) + wanted[1] * _num_bytes(image)
    assert work.bytes_written == _num_bytes(*(tensor for tensor in out if tensor is not None))
    assert work.kernels == sum(wanted)


@pytest.mark.parametrize(("target", "named", "general"), NAMED_CONVOLUTIONS, ids=("forward", "transposed"))
def test_a_named_convolution_costs_what_the_general_one_does(target: Any, named: Any, general: Any) -> None:
    """Which is what torch counts."""
    weight = _rand(4, 3, 3, 3) if general[0] else _rand(6, 2, 3, 3)
    same = (_rand(2, 4, 9, 8), weight, None, [2, 2], [1, 1])
    work, general = _work(target, *same, *named), (*same, [1, 1], *general)
    assert work.flops == _counted_flops(aten.convolution.default, *general)
    assert work == _work(aten.convolution.default, *general)


ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.mark.parametrize("shape", ((2, 2, 16, 32), (1, 4, 77, 64), (3, 1, 5, 8)))
def test_attention_costs_its_products(shape: tuple[int, ...]) -> None:
    """Two products forward and five backward, as the flop counter has it for other devices."""
    batch, heads, tokens, width = shape
    query, key, value = (_rand(*shape) for _ in range(3))
    out, logsumexp = ATTENTION(query, key, value)
    product = 2 * batch * heads * tokens * tokens * width
    args = (torch.rand_like(out), query, key, value, out, logsumexp, 0.0, False)
    forward, backward = _work(ATTENTION, query, key, value), _work(ATTENTION_BACKWARD, *args)
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)
    assert forward.bytes_read == _num_bytes(query, key, value)
    assert forward.bytes_written == _num_bytes(out, logsumexp)
    assert backward.bytes_written == 3 * _num_bytes(query)
    assert (forward.kernels, backward.kernels) == (1, 1)
    for name in ("flash", "efficient", "cudnn"):  # on CUDA there is one before the gradients and one after
        target = f"aten._scaled_dot_product_{name}_attention_backward.default"
        assert _work(target, *args, out=(query, key, value)).kernels == 3


_TABLE, _IDS = _rand(100, 16), torch.randint(0, 100, (4, 7))
_X = _rand(4, 6)
_BYTES = _num_bytes(_X)
ROWS = [
    (aten.view.default, (_X, [24]), WorkKind.VIEW, 0, 0, 0),
    (aten.expand.default, (_rand(1, 6), [4, 6]), WorkKind.VIEW, 0, 0, 0),
    (aten._local_scalar_dense.default, (_rand(1),), WorkKind.FREE, 0, 0, 0),
    (aten.full.default, ([4, 6], 0.0), WorkKind.CONSTANT, 0, 0, _BYTES),
    (aten.add.Tensor, (_X, _X), WorkKind.POINTWISE, 24, _BYTES, _BYTES),
    (aten.add_.Tensor, (_X.clone(), _X), WorkKind.POINTWISE, 24, 2 * _BYTES, _BYTES),
    (aten.mul.Tensor, (_X, _rand(6).expand(4, 6)), WorkKind.POINTWISE, 24, _BYTES + 24, _BYTES),
    (aten.gt.Scalar, (_X, 0), WorkKind.POINTWISE, 24, _BYTES, 24),
    (aten.max.other, (_X, _rand(4, 6)), WorkKind.POINTWISE, 24, 2 * _BYTES, _BYTES),
    (aten.addcmul.default, (_X, _X, _X), WorkKind.POINTWISE, 2 * 24, _BYTES, _BYTES),
    (aten.sqrt.default, (_X,), WorkKind.POINTWISE, 4 * 24, _BYTES, _BYTES),
    (aten.exp.default, (_X,), WorkKind.POINTWISE, 12 * 24, _BYTES, _BYTES),
    (aten.tanh.default, (_X,), WorkKind.POINTWISE, 20 * 24, _BYTES, _BYTES),
    (aten.special_bessel_j0.default, (_X,), WorkKind.POINTWISE, 30 * 24, _BYTES, _BYTES),
    (aten._foreach_add.Scalar, ([_X, _rand(3)], 1.0), WorkKind.POINTWISE, 24 + 3, _BYTES + 12, _BYTES + 12),
    (aten._foreach_addcmul.Scalar, ([_X], [_X], [_X]), WorkKind.POINTWISE, 2 * 24, _BYTES, _BYTES),
    (aten._foreach_sqrt.default, ([_X],), WorkKind.POINTWISE, 4 * 24, _BYTES, _BYTES),
    (aten._foreach_pow.Scalar, ([_X], 2), WorkKind.POINTWISE, 20 * 24, _BYTES, _BYTES),
    (aten.sum.dim_IntList, (_X, [1]), WorkKind.REDUCTION, 24, _BYTES, 16),
    (aten.max.dim, (_X, 1), WorkKind.REDUCTION, 24, _BYTES, 16 + 32),
    (aten.linalg_vector_norm.default, (_X,), WorkKind.REDUCTION, 2 * 24, _BYTES, 4),
    (aten.var_mean.correction, (_X, [1]), WorkKind.REDUCTION, 4 * 24, _BYTES, 32),
    (aten.native_layer_norm.default, (_X, [6], None, None, 1e-5), WorkKind.REDUCTION, 8 * 24, _BYTES, 96 + 16 + 16),
    (aten._softmax.default, (_X, 1, False), WorkKind.REDUCTION, 16 * 24, _BYTES, _BYTES),
    (aten._adaptive_avg_pool3d.default, (_rand(1, 4, 4, 4), [2, 2, 2]), WorkKind.REDUCTION, 64, 256, 32),
    (aten.cat.default, ([_X, _X.clone()], 0), WorkKind.COPY, 0, 2 * _BYTES, 2 * _BYTES),
    (aten.copy_.default, (_rand(4, 6), _X), WorkKind.COPY, 0, _BYTES, _BYTES),
    (aten.embedding.default, (_TABLE, _IDS), WorkKind.GATHER, 0, 28 * 8 + 28 * 64, 28 * 64),
    (aten.index.Tensor, (_TABLE, [_IDS]), WorkKind.GATHER, 0, 28 * 8 + 28 * 64, 28 * 64),
    (aten._embedding_bag.default, (_TABLE, _zeros(7), _zeros(1)), WorkKind.GATHER, 16, 6464, 64 + 0 + 8 + 8),
    (aten.upsample_bilinear2d.default, (_rand(1, 1, 3, 3), [6, 6], False), WorkKind.GATHER, 16 * 36, 36, 144),
    (aten.index_add.default, (_rand(5, 2), 0, _zeros(3), _rand(3, 2)), WorkKind.SCATTER, 6, 24 + 24 + 24, 24),
    (aten.index_put.default, (_rand(5, 2), [_zeros(3)], _rand(3, 2)), WorkKind.SCATTER, 6, 24 + 24 + 24, 24),
    (aten.col2im.default, (_rand(4, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]), WorkKind.SCATTER, 36, 288, 144),
    (aten.cumsum.default, (_X, 1), WorkKind.LOOKUP, 24, _BYTES, _BYTES),
    (aten.rand.default, ([4, 6],), WorkKind.RANDOM, 40 * 24, 0, _BYTES),
    (torch.ops.prims.inductor_seeds.default, (2, torch.device("cpu")), WorkKind.RANDOM, 2, 0, 16),
    (aten.mv.default, (_X, _rand(6)), WorkKind.MATMUL, 2 * 24, _BYTES + 24, 16),
    (aten.addmv.default, (_rand(4), _X, _rand(6)), WorkKind.MATMUL, 2 * 24, 16 + _BYTES + 24, 16),
    (aten.linear.default, (_X, _rand(5, 6)), WorkKind.MATMUL, 2 * 24 * 5, _BYTES + 120, 80),
    (aten._cdist_forward.default, (_X, _X, 2.0, None), WorkKind.UNKNOWN, 0, _BYTES, 64),
]


@pytest.mark.parametrize(
    ("target", "args", "kind", "flops", "read", "written"), ROWS, ids=[str(row[0]) for row in ROWS]
)
def test_flops_and_bytes_are_those_of_distinct_elements(
    target: Any, args: tuple[Any, ...], kind: WorkKind, flops: int, read: int, written: int
) -> None:
    """Views are free, gathers read what they pick, expanded dimensions count once, unknown operators count too."""
    formulas = node_work(target, args, {}, target(*args))
    work = evaluate(formulas, {})
    assert (formulas.kind, work.flops, work.bytes_read, work.bytes_written) == (kind, flops, read, written)


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
        work = _work(target, *args)
        (part,) = work.parts
        assert (part.kind, part.flops, work.bytes_written) == (KernelKind.SCATTER, gradient.numel(), values)
        assert work.bytes_read == 2 * values + _num_bytes(indices)
        assert work.kernels == part.launches == kernels
    filled = _work(aten.scatter.value, table, 0, indices, 1.0, out=table)
    assert (filled.flops, filled.bytes_written) == (indices.numel(), 4 * indices.numel())
    rows = torch.tensor([3, 5])
    for target, value in ((aten.index_fill.int_Scalar, 1.0), (aten.index_fill.int_Tensor, torch.tensor(1.0))):
        work = _work(target, table, 0, rows, value)
        assert (work.flops, work.bytes_written) == (2 * 16, 4 * 2 * 16)
        read = [tensor for tensor in (rows, value) if isinstance(tensor, torch.Tensor)]
        assert work.bytes_read == 4 * 2 * 16 + _num_bytes(*read)  # nothing else of the table


@pytest.mark.parametrize(
    ("name", "kernel", "tiles"),
    [
        ("one tile", lambda: (aten.mm.default, (_rand(128, 9), _rand(9, 128))), 1),
        ("a row more", lambda: (aten.mm.default, (_rand(129, 9), _rand(9, 128))), 2),
        ("both sides", lambda: (aten.addmm.default, (_rand(300), _rand(130, 9), _rand(9, 300))), 6),
        ("a batch", lambda: (aten.bmm.default, (_rand(5, 130, 9), _rand(5, 9, 7))), 10),
        ("rows of a batch", lambda: (aten.linear.default, (_rand(2, 65, 9), _rand(7, 9))), 2),
        ("a vector", lambda: (aten.mv.default, (_rand(300, 9), _rand(9))), 3),
        ("an image", lambda: (aten.convolution.default, _convolution()(_rand(2, 3, 18, 18), _rand(200, 3, 3, 3))), 8),
        ("a sum", lambda: (aten.sum.default, (_rand(300, 300),)), 0),
    ],
)
def test_products_have_output_tiles(name: str, kernel: Callable[[], tuple[Any, tuple[Any, ...]]], tiles: int) -> None:
    """Blocks of 128 x 128 of the result, per batch; a convolution has a row per position and a column per channel."""
    target, args = kernel()
    (part,) = _work(target, *args).parts
    assert part.tiles == tiles


def test_attention_has_a_tile_per_block_of_queries_and_head() -> None:
    """Forward and backward, wherever the query stands among the arguments."""
    query, key = _rand(2, 3, 200, 8), _rand(2, 3, 50, 8)
    out, logsumexp = ATTENTION(query, key, key)
    (forward,) = _work(ATTENTION, query, key, key).parts
    (backward,) = _work(ATTENTION_BACKWARD, out, query, key, key, out, logsumexp, 0.0, False).parts
    assert (forward.kind, forward.tiles) == (KernelKind.ATTENTION, 12)
    assert (backward.kind, backward.tiles) == (KernelKind.ATTENTION_BACKWARD, 12)
