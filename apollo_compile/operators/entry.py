"""Entries of the operator table: `Operator`, and a constructor for each kind of operator."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from apollo_compile.ir import KernelKind
from apollo_compile.operators import formulas
from apollo_compile.operators.call import Expr, Formula, OperatorCall


class WorkKind(enum.StrEnum):
    """Kinds of work of operators."""

    VIEW = "view"
    """No work: its result is its first input, or a view of it."""
    FREE = "free"
    """No work for another reason: it computes a number on the host, checks something, or is a hint for the compiler."""
    CONSTANT = "constant"
    """Makes a tensor without reading one; compilers fold it into its readers."""
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    COPY = "copy"
    GATHER = "gather"
    SCATTER = "scatter"
    RANDOM = "random"
    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    LOOKUP = "lookup"
    """Sorts, scans and searches: library calls whose memory accesses depend on the values."""
    UNKNOWN = "unknown"
    """An operator without a formula: its work is its bytes alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """Properties of an operator that its schema and its tags in torch do not have."""

    kind: WorkKind
    flops: Formula = formulas.nothing
    read: Formula = formulas.all_inputs
    """Bytes read."""
    written: Formula = formulas.all_outputs
    """Bytes written."""
    tiles: Formula = formulas.nothing
    launches: Formula = formulas.one
    """Kernels that it launches if nothing is fused with it."""
    kernel: KernelKind = KernelKind.LOOP
    is_fusible: bool = True
    """Whether Inductor fuses it into a loop with its neighbours on every device; else it is a library call, or a loop
    whose result is complete only when the loop has ended."""
    reads_only: str = ""
    """Purpose of an operator without outputs that writes nothing, such as "asserts": Note [Undeclared writes]."""
    writes: tuple[str, ...] = ()
    """Arguments that it writes to although its schema does not declare it."""
    resizes_storage: bool = False
    """Whether it changes the size of the storage of an argument: Note [Resized storages]."""
    draws: bool = False
    """Whether it advances a random generator although it does not have the tag."""
    stays_with_input: bool = False
    """Whether it belongs to the segment that computes its first input, not to its readers."""
    waits: bool = False
    """Whether it waits for a collective."""
    takes_part: bool = False
    """Whether it is a view of a part of its input, at a place that its arguments say."""
    puts_part: bool = False
    """Replaces one part of its first input, at a place that its arguments say."""


def view(*, takes_part: bool = False) -> Operator:
    """Return the entry of an operator whose result is its first input or a view of it."""
    return Operator(
        kind=WorkKind.VIEW,
        read=formulas.nothing,
        written=formulas.nothing,
        launches=formulas.nothing,
        takes_part=takes_part,
    )


def free(*, reads_only: str = "", stays_with_input: bool = False, waits: bool = False) -> Operator:
    """Return the entry of an operator without work on the device."""
    return Operator(
        kind=WorkKind.FREE,
        read=formulas.nothing,
        written=formulas.nothing,
        launches=formulas.nothing,
        reads_only=reads_only,
        stays_with_input=stays_with_input,
        waits=waits,
    )


def constant() -> Operator:
    """Return the entry of a constant factory: at most written, since its readers recompute it."""
    return Operator(kind=WorkKind.CONSTANT, read=formulas.nothing, launches=formulas.nothing)


def pointwise(flops: int, *, is_fusible: bool = True) -> Operator:
    """Return the entry of a pointwise operator of `flops` per element."""
    return Operator(kind=WorkKind.POINTWISE, flops=formulas.per_output(flops), is_fusible=is_fusible)


def pointwise_on_lists(flops: int) -> Operator:
    """Return the entry of a pointwise operator on lists, of `flops` per element of every tensor."""
    return Operator(kind=WorkKind.POINTWISE, flops=formulas.per_output_of_all(flops))


def reduction(flops: int, *, is_fusible: bool = True) -> Operator:
    """Return the entry of a reduction of `flops` per element of the input."""
    return Operator(kind=WorkKind.REDUCTION, flops=formulas.per_input(flops), is_fusible=is_fusible)


def copy(read: Formula = formulas.all_inputs, *, is_fusible: bool = True, puts_part: bool = False) -> Operator:
    """Return the entry of an operator that only moves elements."""
    return Operator(kind=WorkKind.COPY, read=read, is_fusible=is_fusible, puts_part=puts_part)


def gather(flops: int = 0, read: Formula = formulas.all_inputs, *, is_fusible: bool = True) -> Operator:
    """Return the entry of an operator that reads at computed addresses, with `flops` per element of the result."""
    return Operator(
        kind=WorkKind.GATHER,
        flops=formulas.per_output(flops) if flops else formulas.nothing,
        read=read,
        is_fusible=is_fusible,
    )


def scatter(values: formulas.Elements, *, replaces: bool = True, launches: Formula = formulas.one) -> Operator:
    """Return the entry of an operator that reads and writes only the addressed elements of its target.

    Arguments:
        values: the elements and bytes that are written.
        replaces: whether the first input is the target.
        launches: kernels that it launches.
    """

    def flops(call: OperatorCall) -> Expr:
        return values(call)[0]

    def read(call: OperatorCall) -> Expr:
        target = call.inputs[0].num_bytes if replaces else formulas.nothing(call)
        return formulas.all_inputs(call) - target + values(call)[1]

    def written(call: OperatorCall) -> Expr:
        return values(call)[1]

    return Operator(
        kind=WorkKind.SCATTER,
        flops=flops,
        read=read,
        written=written,
        launches=launches,
        kernel=KernelKind.SCATTER,
        is_fusible=False,
    )


def random(flops: int, *, is_fusible: bool, draws: bool = False) -> Operator:
    """Return the entry of a random operator of `flops` per number."""
    return Operator(kind=WorkKind.RANDOM, flops=formulas.per_output(flops), is_fusible=is_fusible, draws=draws)


def lookup() -> Operator:
    """Return the entry of a sort, a scan or a search."""
    return Operator(kind=WorkKind.LOOKUP, flops=formulas.per_input(1), kernel=KernelKind.LIBRARY, is_fusible=False)


def matmul(flops: Formula, tiles: Formula = formulas.matmul_tiles, kernel: KernelKind = KernelKind.MATMUL) -> Operator:
    """Return the entry of a matmul."""
    return Operator(kind=WorkKind.MATMUL, flops=flops, tiles=tiles, kernel=kernel, is_fusible=False)


def convolution(flops: Formula) -> Operator:
    """Return the entry of a forward convolution."""
    return Operator(
        kind=WorkKind.CONVOLUTION,
        flops=flops,
        tiles=formulas.convolution_tiles,
        kernel=KernelKind.CONVOLUTION,
        is_fusible=False,
    )


def convolution_backward() -> Operator:
    """Return the entry of the gradients of a convolution."""
    return Operator(
        kind=WorkKind.CONVOLUTION,
        flops=formulas.convolution_backward_flops,
        read=formulas.convolution_backward_read,
        tiles=formulas.convolution_backward_tiles,
        launches=formulas.convolution_backward_launches,
        kernel=KernelKind.CONVOLUTION_BACKWARD,
        is_fusible=False,
    )


def attention() -> Operator:
    """Return the entry of scaled dot product attention; query, key and value are the first arguments."""
    return Operator(
        kind=WorkKind.ATTENTION,
        flops=formulas.attention_flops,
        tiles=formulas.attention_tiles(0),
        kernel=KernelKind.ATTENTION,
        is_fusible=False,
    )


def attention_backward(launches: int) -> Operator:
    """Return the entry of attention's gradients; the first arguments are output gradient, query, key and value."""
    return Operator(
        kind=WorkKind.ATTENTION,
        flops=formulas.attention_backward_flops,
        tiles=formulas.attention_tiles(1),
        launches=formulas.launches(launches),
        kernel=KernelKind.ATTENTION_BACKWARD,
        is_fusible=False,
    )


def by_bytes(*, writes: tuple[str, ...] = (), resizes_storage: bool = False) -> Operator:
    """Return the entry of a library call without a formula, whose work is its bytes alone."""
    return Operator(
        kind=WorkKind.UNKNOWN,
        kernel=KernelKind.LIBRARY,
        is_fusible=False,
        writes=writes,
        resizes_storage=resizes_storage,
    )
