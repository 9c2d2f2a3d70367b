"""What is known of an operator: `Operator`, and a function for each sort of operator that makes one."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from apollo_compile.ir import KernelKind
from apollo_compile.operators import formulas
from apollo_compile.operators.call import Call, Expr, Formula


class WorkKind(enum.StrEnum):
    """What sort of work an operator is."""

    VIEW = "view"
    """Free: its value is its first input, or a part or another form of it."""
    FREE = "free"
    """Free otherwise: computes a number on the host, checks something, or tells the compiler something."""
    CONSTANT = "constant"
    """Makes a tensor from no tensor's values; compilers fold it into its readers."""
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
    """Sorts, scans and searches: a library call whose order depends on the values."""
    UNKNOWN = "unknown"
    """Counted by its bytes alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """What is known of an operator; what torch itself says of it (its schema, its tags) is not repeated."""

    kind: WorkKind
    flops: Formula = formulas.nothing
    read: Formula = formulas.all_inputs
    """Bytes."""
    written: Formula = formulas.all_outputs
    """Bytes."""
    tiles: Formula = formulas.nothing
    launches: Formula = formulas.one
    """Kernels, where nothing is fused with it."""
    kernel: KernelKind = KernelKind.LOOP
    is_fusible: bool = True
    """Whether Inductor computes it in a loop together with its neighbours, on every device; else it is a call, or a
    loop whose result is complete only when it has ended."""
    reads_only: str = ""
    """What it does instead of writing, of one without outputs that declares no write: Note [Undeclared writes]."""
    writes: tuple[str, ...] = ()
    """Arguments that it writes to though its schema does not say so."""
    resizes_storage: bool = False
    """Whether it changes how much memory an argument has: Note [Resized storages]."""
    draws: bool = False
    """Whether it advances a random generator though it has no tag for that."""
    stays_with_input: bool = False
    """Whether it runs where its first input is computed, whoever reads it."""
    waits: bool = False
    """Whether it waits for a collective."""


def view() -> Operator:
    """Its value is its first input, or a part or another form of it."""
    return Operator(kind=WorkKind.VIEW, read=formulas.nothing, written=formulas.nothing, launches=formulas.nothing)


def free(*, reads_only: str = "", stays_with_input: bool = False, waits: bool = False) -> Operator:
    """No work on the device."""
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
    """Written if at all: its readers compute it again."""
    return Operator(kind=WorkKind.CONSTANT, read=formulas.nothing, launches=formulas.nothing)


def pointwise(flops: int) -> Operator:
    """`flops` an element."""
    return Operator(kind=WorkKind.POINTWISE, flops=formulas.per_output(flops))


def pointwise_on_lists(flops: int) -> Operator:
    """`flops` an element of every tensor of a list."""
    return Operator(kind=WorkKind.POINTWISE, flops=formulas.per_output_of_all(flops))


def reduction(flops: int, *, is_fusible: bool = True) -> Operator:
    """`flops` an element of the input."""
    return Operator(kind=WorkKind.REDUCTION, flops=formulas.per_input(flops), is_fusible=is_fusible)


def copy(read: Formula = formulas.all_inputs, *, is_fusible: bool = True) -> Operator:
    """Moves elements."""
    return Operator(kind=WorkKind.COPY, read=read, is_fusible=is_fusible)


def gather(flops: int = 0, read: Formula = formulas.all_inputs, *, is_fusible: bool = True) -> Operator:
    """Reads at addresses that are computed or read; `flops` an element of the result."""
    return Operator(
        kind=WorkKind.GATHER,
        flops=formulas.per_output(flops) if flops else formulas.nothing,
        read=read,
        is_fusible=is_fusible,
    )


def scatter(values: formulas.Elements, *, replaces: bool = True, launches: Formula = formulas.one) -> Operator:
    """Values and indices are read, and what the values are added to is read and written: nothing else of the target.

    Arguments:
        values: the elements and bytes that are written.
        replaces: whether the first input is what they are written to.
        launches: kernels.
    """

    def flops(call: Call) -> Expr:
        return values(call)[0]

    def read(call: Call) -> Expr:
        target = call.inputs[0].num_bytes if replaces else formulas.nothing(call)
        return formulas.all_inputs(call) - target + values(call)[1]

    def written(call: Call) -> Expr:
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
    """`flops` a number that is drawn."""
    return Operator(kind=WorkKind.RANDOM, flops=formulas.per_output(flops), is_fusible=is_fusible, draws=draws)


def lookup() -> Operator:
    """A sort, a scan or a search."""
    return Operator(kind=WorkKind.LOOKUP, flops=formulas.per_input(1), kernel=KernelKind.LIBRARY, is_fusible=False)


def matmul(flops: Formula, tiles: Formula = formulas.matmul_tiles, kernel: KernelKind = KernelKind.MATMUL) -> Operator:
    """A product of matrices."""
    return Operator(kind=WorkKind.MATMUL, flops=flops, tiles=tiles, kernel=kernel, is_fusible=False)


def convolution(flops: Formula) -> Operator:
    """A convolution, forward."""
    return Operator(
        kind=WorkKind.CONVOLUTION,
        flops=flops,
        tiles=formulas.convolution_tiles,
        kernel=KernelKind.CONVOLUTION,
        is_fusible=False,
    )


def convolution_backward() -> Operator:
    """The gradients of a convolution."""
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
    """Scaled dot product attention: query, key and value come first."""
    return Operator(
        kind=WorkKind.ATTENTION,
        flops=formulas.attention_flops,
        tiles=formulas.attention_tiles(0),
        kernel=KernelKind.ATTENTION,
        is_fusible=False,
    )


def attention_backward(launches: int) -> Operator:
    """The gradients of attention: its own gradient comes first, then query, key and value."""
    return Operator(
        kind=WorkKind.ATTENTION,
        flops=formulas.attention_backward_flops,
        tiles=formulas.attention_tiles(1),
        launches=formulas.launches(launches),
        kernel=KernelKind.ATTENTION_BACKWARD,
        is_fusible=False,
    )


def by_bytes(*, writes: tuple[str, ...] = (), resizes_storage: bool = False) -> Operator:
    """A call of its own, counted by its bytes for want of a better formula."""
    return Operator(
        kind=WorkKind.UNKNOWN,
        kernel=KernelKind.LIBRARY,
        is_fusible=False,
        writes=writes,
        resizes_storage=resizes_storage,
    )
