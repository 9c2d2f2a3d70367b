"""Segments are counted by what crosses fused groups."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from apollo_compile.cost_model.fusion import _group, _Values, segment_needs
from apollo_compile.ir import Kernel, KernelKind, Node, NodeId, NodeKind, Work

_SIZE = 100


def _node(
    number: int, target: str, inputs: tuple[int, ...] = (), *, size: int = _SIZE, read: int | None = None
) -> Node:
    """A node whose inputs are all of the standard size; views cost nothing."""
    is_view = target.startswith(("aten.view.", "aten.slice."))
    if read is None:
        read = _SIZE * len(inputs)
    return Node(
        id=NodeId(number),
        name=f"n{number}",
        kind=NodeKind.CHEAP if is_view else NodeKind.COMPUTE,
        target=target,
        inputs=tuple(NodeId(value) for value in inputs),
        num_bytes=size,
        work=Work() if is_view else Work(flops=10, bytes_read=read, bytes_written=size, kernels=1),
    )


ADD, MM, VIEW, FULL = "aten.add.Tensor", "aten.mm.default", "aten.view.default", "aten.full.default"
EXP, SUM, PUT = "aten.exp.default", "aten.sum.dim_IntList", "aten.index_put.default"
GROUPED: dict[str, tuple[list[Node], tuple[int, int, int]]] = {
    "of a chain of loops, the ends alone move bytes": (
        [_node(2, ADD, (0, 1)), _node(3, EXP, (2,)), _node(4, EXP, (3,)), _node(5, SUM, (4,), size=10)],
        (200, 10, 1),
    ),
    "a product stands alone between two groups": (
        [_node(1, EXP, (0,)), _node(2, MM, (1, 0)), _node(3, EXP, (2,))],
        (100 + 200 + 100, 300, 3),
    ),
    "a residual around a product is not fused, which would be a cycle": (
        [_node(1, EXP, (0,)), _node(2, MM, (1,)), _node(3, ADD, (1, 2))],
        (100 + 100 + 200, 300, 3),
    ),
    "a view stands for what it looks at": (
        [_node(1, EXP, (0,)), _node(2, VIEW, (1,)), _node(3, EXP, (2,))],
        (100, 100, 1),
    ),
    "a slice is read for its own size": (
        [_node(1, MM, (0,)), _node(2, "aten.slice.Tensor", (1,), size=20), _node(3, EXP, (2,), size=20, read=20)],
        (100 + 20, 100 + 20, 2),
    ),
    "a loop computes constants for itself": ([_node(1, FULL, (), read=0), _node(2, ADD, (0, 1))], (100, 100, 1)),
    "a scatter needs constants in memory": ([_node(1, FULL, (), read=0), _node(2, PUT, (1, 0))], (200, 200, 2)),
    "a chain that is computed again joins its only reader, long before the product": (
        [_node(1, EXP, (0,)), _node(2, EXP, (1,)), _node(3, MM, (9, 8)), _node(4, ADD, (2, 3))],
        (400, 200, 2),
    ),
    "readers of one value share its read": (
        [_node(1, MM, (0,)), _node(2, EXP, (1,)), _node(3, SUM, (1,), size=10)],
        (100 + 100, 100 + 100 + 10, 2),
    ),
    "a gather reads what it picks": (
        [_node(1, MM, (0,), size=1000), _node(2, "aten.index.Tensor", (1,), read=60, size=50)],
        (100 + 60, 1000 + 50, 2),
    ),
    "a reduction with two results stays in the group of their readers": (
        [
            _node(1, "aten.var_mean.correction", (0,), size=20),
            *(_node(number, "getitem", (1,), size=10, read=0) for number in (2, 3)),
            _node(4, "aten.sub.Tensor", (0, 2), read=110),
            _node(5, "aten.mul.Tensor", (3, 4), read=110),
        ],
        (100, 100, 1),
    ),
    "a library call stands alone": (
        [_node(1, EXP, (0,)), _node(2, "aten.convolution_backward.default", (1,)), _node(3, EXP, (2,))],
        (300, 300, 3),
    ),
    "what nobody knows stands alone": ([_node(1, EXP, (0,)), _node(2, "users.own.default", (1,))], (200, 200, 2)),
}
"""Nodes, with bytes read and written, and kernels."""


@pytest.mark.parametrize("name", GROUPED)
def test_what_crosses_groups_is_counted(name: str) -> None:
    """Within a group nothing moves."""
    nodes, expected = GROUPED[name]
    work = segment_needs(nodes).work
    assert (work.bytes_read, work.bytes_written, work.kernels) == expected
    assert work.flops == sum(node.work.flops for node in nodes)


def test_a_saved_value_is_written_although_it_is_fused() -> None:
    """The caller says what the segment returns, directly or through a view."""
    nodes = [_node(1, EXP, (0,)), _node(2, VIEW, (1,)), _node(3, EXP, (1,))]
    assert segment_needs(nodes).work.bytes_written == 100
    assert segment_needs(nodes, outputs=[NodeId(1)]).work.bytes_written == 200
    assert segment_needs(nodes, outputs=[NodeId(2)]).work.bytes_written == 200


def test_the_workspace_is_what_crosses_groups_and_is_not_returned() -> None:
    """Nothing inside a group, and no result; what the next group reads last is there until it has run."""
    assert segment_needs([_node(2, ADD, (0, 1)), _node(3, EXP, (2,)), _node(4, EXP, (3,))]).workspace_bytes == 0
    products = [_node(1, EXP, (0,)), _node(2, MM, (1, 0)), _node(3, MM, (2, 0), size=40), _node(4, MM, (3, 0))]
    assert segment_needs(products).workspace_bytes == 100 + 100  # while the first product runs
    assert segment_needs(products, outputs=[NodeId(1)]).workspace_bytes == 100 + 40  # while the second one runs
    assert segment_needs(products, outputs=[NodeId(1), NodeId(2), NodeId(3)]).workspace_bytes == 0
    kept = [*products[:3], _node(4, MM, (3, 1))]
    assert segment_needs(kept).workspace_bytes == 100 + 100 + 40  # the first value waits for the last product
    viewed = [_node(1, MM, (0, 0)), _node(2, VIEW, (1,)), _node(3, MM, (2, 0))]
    assert segment_needs(viewed).workspace_bytes == 100
    assert segment_needs(viewed, outputs=[NodeId(2)]).workspace_bytes == 0  # a view of it is returned
    shared = [_node(1, EXP, (0,)), _node(2, MM, (1,)), _node(3, EXP, (0,))]
    assert segment_needs(shared).workspace_bytes == 100  # the readers of one input are a group before the product
    table = [_node(1, PUT, (0,), size=500), _node(2, MM, (1,))]
    table[0] = replace(table[0], work=replace(table[0].work, bytes_written=10))
    assert segment_needs(table).workspace_bytes == 500  # all of what a scatter writes a few rows of


@pytest.mark.parametrize("seed", range(50))
def test_fused_groups_never_form_a_cycle(seed: int) -> None:
    """On random segments: the groups, contracted, can be ordered; fusion never adds bytes or kernels."""
    rng = random.Random(seed)
    nodes = []
    for number in range(1, 30):
        inputs = rng.sample(range(number), min(number, rng.randint(1, 2)))
        nodes.append(_node(number, rng.choice((ADD, EXP, SUM, MM, PUT, VIEW)), tuple(sorted(inputs))))
    group_by_node = _group(nodes, values := _Values(nodes))
    pairs = ((value, node.id) for node in nodes if node.id in group_by_node for value in values.read_by(node))
    edges = {(group_by_node[value], group_by_node[node]) for value, node in pairs if value in group_by_node}
    edges = {(first, second) for first, second in edges if first != second}
    waiting = set(group_by_node.values())
    while ready := {group for group in waiting if not any(a in waiting for a, b in edges if b == group)}:
        waiting -= ready
    assert not waiting
    work, alone = segment_needs(nodes).work, sum((node.work for node in nodes), Work())
    assert work.kernels <= alone.kernels and work.flops == alone.flops
    assert work.bytes_read <= alone.bytes_read and work.bytes_written <= alone.bytes_written


# ------------------------------------------------------------------------------------------------------------ kernels


def test_a_segment_knows_its_kernels_one_by_one() -> None:
    """Loop, product, loop: each with its own bytes, what comes from outside apart, launches, and equal ones counted."""
    parts = (Kernel(kind=KernelKind.MATMUL, dtype="bfloat16", flops=10, tiles=3, launches=2),)
    product = Work(flops=10, bytes_read=200, bytes_written=100, kernels=2, parts=parts)
    work = segment_needs([_node(1, EXP, (0,)), replace(_node(2, MM, (1, 0)), work=product), _node(3, EXP, (2,))]).work
    assert work.parts == (
        Kernel(flops=10, bytes_moved=200, bytes_from_outside=100),
        replace(parts[0], bytes_moved=300, bytes_from_outside=100),
        Kernel(flops=10, bytes_moved=200),
    )
    assert work.kernels == 4
    (part,) = segment_needs([_node(2, EXP, (0,)), _node(3, EXP, (1,))]).work.parts
    assert part == Kernel(flops=10, bytes_moved=200, bytes_from_outside=100, count=2)


@pytest.mark.parametrize("seed", range(50))
def test_the_kernels_add_up_to_the_totals(seed: int) -> None:
    """Flops, bytes and number, whatever the graph; a sum of works keeps that."""
    rng = random.Random(seed)
    nodes: list[Node] = []
    for number in range(4, rng.randrange(6, 30)):
        target = rng.choice((ADD, MM, EXP, SUM, PUT, VIEW, FULL))
        inputs = () if target == FULL else tuple(sorted(rng.sample(range(number), 1 if target == VIEW else 2)))
        made = _node(number, target, inputs)
        nodes.append(replace(made, work=replace(made.work, flops=0)) if target == FULL else made)
    work = segment_needs(nodes, outputs=[NodeId(rng.randrange(4, 4 + len(nodes)))]).work
    for total in (work, work + work):
        assert sum(part.count for part in total.parts) == total.kernels
        assert sum(part.count * part.flops for part in total.parts) == total.flops
        assert sum(part.count * part.bytes_moved for part in total.parts) == total.bytes_read + total.bytes_written
        assert all(0 <= part.bytes_from_outside <= part.bytes_moved for part in total.parts)
    assert len((work + work).parts) == len(work.parts)
