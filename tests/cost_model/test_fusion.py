"""Segments are counted by what crosses fused groups."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from apollo_compile.cost_model.fusion import segment_needs
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
GETITEM = "getitem"


def _totals(work: Work) -> tuple[int, int, int]:
    return work.bytes_read, work.bytes_written, work.kernels


def test_a_pointwise_chain_is_one_kernel() -> None:
    """Only its ends move bytes: two inputs from outside, one result."""
    chain = [_node(2, ADD, (0, 1)), _node(3, EXP, (2,)), _node(4, EXP, (3,)), _node(5, SUM, (4,), size=10)]
    work = segment_needs(chain).work
    assert _totals(work) == (200, 10, 1)
    assert work.flops == 40


def test_a_product_stands_alone_between_two_groups() -> None:
    """Its operands are written by one group and its result is read by the next."""
    nodes = [_node(1, EXP, (0,)), _node(2, MM, (1, 0)), _node(3, EXP, (2,))]
    # read: exp 100, mm 200, exp 100; written: 100 each
    assert _totals(segment_needs(nodes).work) == (400, 300, 3)


def test_a_residual_is_not_fused_around_a_product() -> None:
    """A -> mm -> b and a -> b: fusing a with b would make a cycle."""
    nodes = [_node(1, EXP, (0,)), _node(2, MM, (1,)), _node(3, ADD, (1, 2))]
    assert _totals(segment_needs(nodes).work) == (100 + 100 + 200, 300, 3)


def test_a_view_stands_for_what_it_looks_at() -> None:
    """Views cost nothing and do not end a group; a slice is read for its own size."""
    nodes = [_node(1, EXP, (0,)), _node(2, VIEW, (1,)), _node(3, EXP, (2,))]
    assert _totals(segment_needs(nodes).work) == (100, 100, 1)
    nodes = [_node(1, MM, (0,)), _node(2, "aten.slice.Tensor", (1,), size=20), _node(3, EXP, (2,), size=20, read=20)]
    assert _totals(segment_needs(nodes).work) == (100 + 20, 100 + 20, 2)


def test_a_saved_value_is_written_although_it_is_fused() -> None:
    """The caller says what the segment returns, directly or through a view."""
    nodes = [_node(1, EXP, (0,)), _node(2, VIEW, (1,)), _node(3, EXP, (1,))]
    assert segment_needs(nodes).work.bytes_written == 100
    assert segment_needs(nodes, outputs=[NodeId(1)]).work.bytes_written == 200
    assert segment_needs(nodes, outputs=[NodeId(2)]).work.bytes_written == 200


def test_the_workspace_is_what_crosses_groups_and_is_not_returned() -> None:
    """Nothing inside a group, and no result; what the next group reads last is there until it has run."""
    chain = [_node(2, ADD, (0, 1)), _node(3, EXP, (2,)), _node(4, EXP, (3,))]
    assert segment_needs(chain).workspace_bytes == 0
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
    assert (
        segment_needs(shared).workspace_bytes == 100
    )  # two readers of one input are one group, which runs before the product
    table = [_node(1, PUT, (0,), size=500), _node(2, MM, (1,))]
    table[0] = replace(table[0], work=replace(table[0].work, bytes_written=10))
    assert segment_needs(table).workspace_bytes == 500  # all of what a scatter writes a few rows of


def test_constants_belong_to_their_readers() -> None:
    """A loop computes them for itself; a product or scatter needs them in memory."""
    fused = [_node(1, FULL, (), read=0), _node(2, ADD, (0, 1))]
    assert _totals(segment_needs(fused).work) == (100, 100, 1)
    scattered = [_node(1, FULL, (), read=0), _node(2, PUT, (1, 0))]
    assert _totals(segment_needs(scattered).work) == (200, 200, 2)


def test_a_recomputed_chain_joins_its_only_reader() -> None:
    """Backward passes recompute activations from what was saved, long before a product's result needs them."""
    nodes = [_node(1, EXP, (0,)), _node(2, EXP, (1,)), _node(3, MM, (9, 8)), _node(4, ADD, (2, 3))]
    assert segment_needs(nodes).work.kernels == 2


def test_readers_of_one_value_share_its_read() -> None:
    """Two loops over the same tensor follow each other in one function."""
    nodes = [_node(1, MM, (0,)), _node(2, EXP, (1,)), _node(3, SUM, (1,), size=10)]
    assert _totals(segment_needs(nodes).work) == (100 + 100, 100 + 100 + 10, 2)


def test_a_gather_reads_what_it_picks() -> None:
    """The table is larger than the bytes read from it."""
    nodes = [_node(1, MM, (0,), size=1000), _node(2, "aten.index.Tensor", (1,), read=60, size=50)]
    assert segment_needs(nodes).work.bytes_read == 100 + 60


def test_several_results_are_read_through_getitem() -> None:
    """A reduction with two results stays in the group of its readers."""
    nodes = [
        _node(1, "aten.var_mean.correction", (0,), size=20),
        _node(2, GETITEM, (1,), size=10, read=0),
        _node(3, GETITEM, (1,), size=10, read=0),
        _node(4, "aten.sub.Tensor", (0, 2), read=110),
        _node(5, "aten.mul.Tensor", (3, 4), read=110),
    ]
    assert segment_needs(nodes).work.kernels == 1


@pytest.mark.parametrize("target", ("aten.mm.default", "aten.convolution_backward.default", "users.own.default"))
def test_calls_stand_alone(target: str) -> None:
    """Library calls, and what nothing is known of; a pointwise operator between two others does not."""
    ends = _node(1, EXP, (0,)), _node(3, EXP, (2,))
    assert segment_needs([ends[0], _node(2, target, (1,)), ends[1]]).work.kernels == 3
    assert segment_needs([ends[0], _node(2, "aten.mul.Tensor", (1,)), ends[1]]).work.kernels == 1


@pytest.mark.parametrize("seed", range(50))
def test_fused_groups_never_form_a_cycle(seed: int) -> None:
    """On random segments: the groups, contracted, can be ordered; fusion never adds bytes or kernels."""
    from apollo_compile.cost_model.fusion import _group, _Values

    rng = random.Random(seed)
    nodes = [
        _node(
            number,
            rng.choice((ADD, EXP, SUM, MM, PUT, VIEW)),
            tuple(sorted(rng.sample(range(number), min(number, rng.randint(1, 2))))),
        )
        for number in range(1, 30)
    ]
    group_by_node = _group(nodes, values := _Values(nodes))
    edges = {
        (group_by_node[value], group_by_node[node.id])
        for node in nodes
        if node.id in group_by_node
        for value in values.read_by(node)
        if value in group_by_node and group_by_node[value] != group_by_node[node.id]
    }
    waiting = set(group_by_node.values())
    while ready := {group for group in waiting if not any(a in waiting for a, b in edges if b == group)}:
        waiting -= ready
    assert not waiting
    work, alone = segment_needs(nodes).work, sum((node.work for node in nodes), Work())
    assert work.kernels <= alone.kernels and work.flops == alone.flops
    assert work.bytes_read <= alone.bytes_read and work.bytes_written <= alone.bytes_written


# ------------------------------------------------------------------------------------------------------------ kernels


def test_a_segment_knows_its_kernels_one_by_one() -> None:
    """Loop, product, loop: each with its own bytes, and what comes from outside the segment apart."""
    product = Work(
        flops=10,
        bytes_read=200,
        bytes_written=100,
        kernels=1,
        parts=(Kernel(kind=KernelKind.MATMUL, dtype="bfloat16", flops=10, tiles=3),),
    )
    nodes = [_node(1, EXP, (0,)), replace(_node(2, MM, (1, 0)), work=product), _node(3, EXP, (2,))]
    loop = Kernel(flops=10, bytes_moved=200, bytes_from_outside=100)
    assert segment_needs(nodes).work.parts == (
        loop,
        Kernel(kind=KernelKind.MATMUL, dtype="bfloat16", flops=10, bytes_moved=300, bytes_from_outside=100, tiles=3),
        Kernel(flops=10, bytes_moved=200),
    )


def test_a_call_that_launches_several_kernels_counts_as_several() -> None:
    """A loop before it is one, and stays it."""
    gradients = Work(flops=10, bytes_read=200, bytes_written=100, kernels=2, parts=(Kernel(flops=10, launches=2),))
    nodes = [_node(1, EXP, (0,)), replace(_node(2, MM, (1, 0)), work=gradients)]
    work = segment_needs(nodes).work
    assert [part.launches for part in work.parts] == [1, 2]
    assert work.kernels == 3


def test_equal_kernels_are_counted() -> None:
    """Two readers of different values from outside."""
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
