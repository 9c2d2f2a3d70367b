"""Matrix products of bodies: oneDNN computes those that it was measured to be faster at, BLAS the others.

    give_to_onednn(graph, is_faster)     in place, on the graph of a body before it is compiled
    Libraries(directory).is_onednn_faster(matmul, cores) -> bool           measured once, then remembered

On a CPU, torch and Inductor give every product of float32 matrices to the BLAS that torch was built with. oneDNN, which
every build for x86 has too, takes longer to call and less time to compute: on an EPYC core with AVX-512, what takes
MKL 10 us took oneDNN twice as long, and what takes MKL more than 1 ms mostly took oneDNN 5 to 20 % less. Where the
border is depends on the machine, the shape, how both matrices lie in memory and the number of cores, so each product is
measured, on matrices of its shape.

Note [transposed left]: the gradient of a weight is the product of a transposed gradient and a layer's input. oneDNN
wants the left matrix by rows, so a body writes it that way too, which Inductor fuses into what computes the gradient.
A copy within the caches stands for it.

Note [large products]: what decides between libraries does not change any more when a product takes milliseconds. So a
dimension of a large one is halved until it is no longer large, and many products share one measurement.

Numbers differ between the two as between any two orders of a sum. Products stay with BLAS where the user wants the same
numbers every time, or lets float32 be computed with less precision, which has rules of its own.
"""

from __future__ import annotations

import functools
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import fx

from apollo_compile.device import Fingerprint, machine_fingerprint
from apollo_compile.json_form import from_json, read_file, to_json, write_file

_logger = logging.getLogger(__name__)

LEAST_FLOPS = 2_000_000
"""Of a product that is measured. Smaller ones take less time than it takes to call oneDNN."""

MOST_FLOPS = 1_000_000_000
"""Of the product that stands for a larger one."""

MARGIN = 0.02
"""Share of BLAS' time that oneDNN must save."""

MAX_AGE_S = 7 * 24 * 3600
MAX_ENTRIES = 4096

NAMESPACE = "apollo"
"""Of the operator that stands for a product which oneDNN computes; Inductor's patterns do not know it."""

_FORMAT = 1
_MAX_BYTES = 2**20
_MEASURE_NS = 10_000_000
_LEAST_ROUNDS = 3

_FAR_BYTES = 8 * 2**20
"""More than the caches of one core hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Matmul:
    """The product of two float32 matrices, to each row of which a vector may be added."""

    rows: int
    inner: int
    """Columns of the left matrix, rows of the right one."""
    columns: int
    is_left_transposed: bool
    """Whether the left matrix lies in memory column by column."""
    is_right_transposed: bool
    has_bias: bool

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.inner * self.columns

    @property
    def num_bytes(self) -> int:
        """Size of all three matrices."""
        return 4 * (self.rows * self.inner + self.inner * self.columns + self.rows * self.columns)

    @property
    def name(self) -> str:
        """What it is called in files."""
        marks = "T" * self.is_left_transposed, "T" * self.is_right_transposed, "+bias" * self.has_bias
        return f"{self.rows}x{self.inner}{marks[0]} {self.inner}x{self.columns}{marks[1]}{marks[2]}"


# ------------------------------------------------------------------------------------------------------- the graphs


def give_to_onednn(graph: fx.Graph, is_faster: Callable[[Matmul], bool]) -> int:
    """Let oneDNN compute the products of a graph for which `is_faster` says so; return how many they are.

    Arguments:
        graph: of operators after AOTAutograd, with values; changed in place.
        is_faster: whether oneDNN is faster than BLAS.
    """
    count = 0
    for node in list(graph.nodes):
        matmul = _matmul_of(node)
        if matmul is None or not is_faster(matmul):
            continue
        *bias, left, right = node.args
        with graph.inserting_before(node):
            weight = graph.call_function(torch.ops.aten.permute.default, (right, [1, 0]))
            weight.meta["val"] = right.meta["val"].t()
            linear = graph.call_function(onednn_linear(), (left, weight, bias[0] if bias else None))
        linear.meta.update(node.meta)
        node.replace_all_uses_with(linear)
        graph.erase_node(node)
        count += 1
    return count


@functools.cache
def onednn_linear() -> torch._ops.OpOverload:
    """Return the operator `input @ weight.T + bias` of oneDNN: float32, input by rows, weight by rows or columns."""
    name = f"{NAMESPACE}::linear"
    torch.library.define(name, "(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
    torch.library.impl(name, "CPU", _call_onednn)
    torch.library.register_fake(name, _fake_linear)
    return torch.ops.apollo.linear.default


def _call_onednn(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(value, weight, bias, "none", [], "")
    return result


def _fake_linear(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return value.new_empty(value.shape[0], weight.shape[0])


def _matmul_of(node: fx.Node) -> Matmul | None:
    """Return the product that a node computes, if both libraries could."""
    if node.target not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) or node.kwargs:
        return None
    *biases, left, right = (argument.meta["val"] for argument in node.args)  # type: ignore[union-attr]
    values = (*biases, left, right)
    if any(value.dtype != torch.float32 or value.device.type != "cpu" for value in values):
        return None
    if not all(type(size) is int for value in values for size in (*value.shape, *value.stride())):
        return None  # it is for many sizes, and to compare them would be to fix them
    (rows, inner), columns = left.shape, right.shape[1]
    lies = [_is_transposed(value) for value in (left, right)]
    if None in lies or any(bias.shape != (columns,) or bias.stride() != (1,) for bias in biases):
        return None
    return Matmul(
        rows=rows,
        inner=inner,
        columns=columns,
        is_left_transposed=bool(lies[0]),
        is_right_transposed=bool(lies[1]),
        has_bias=bool(biases),
    )


def _is_transposed(matrix: torch.Tensor) -> bool | None:
    """Return whether a matrix lies in memory column by column; None where it is a part of a larger one."""
    if matrix.is_contiguous():
        return False
    return True if matrix.t().is_contiguous() else None


# ---------------------------------------------------------------------------------------------------- the libraries


def has_choice() -> bool:
    """Whether there is oneDNN and products may be given to it, as no wish of the user for certain numbers forbids."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):  # type: ignore[no-untyped-call]
        return False
    is_full = torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee")  # type: ignore[attr-defined]
    return is_full and not torch.are_deterministic_algorithms_enabled()


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    format: int
    fingerprint: Fingerprint
    made_at: float
    """Seconds since the epoch."""
    gains: dict[str, float]
    """How many times as fast oneDNN is as BLAS, by the name of a product."""


class Libraries:
    """Which library is the faster for which products."""

    def __init__(self, directory: Path | None) -> None:
        """Keep what is measured in `directory`, which need not exist yet; None keeps it in this process only."""
        self._directory = directory
        self._files: dict[int, _File] = {}

    def is_onednn_faster(self, matmul: Matmul, cores: int) -> bool:
        """Whether oneDNN computes a product on so many cores faster than BLAS does; measured where it is not known."""
        if matmul.flops < LEAST_FLOPS:
            return False
        sample = _sample_of(matmul)
        gains = self._file(cores).gains
        if sample.name not in gains:
            gains[sample.name] = _measure_gain(sample, cores)
            while len(gains) > MAX_ENTRIES:
                del gains[next(iter(gains))]
            self._keep(cores)
        return gains[sample.name] * (1 - MARGIN) > 1

    def _file(self, cores: int) -> _File:
        known = self._files.get(cores)
        if known is None:
            fingerprint = machine_fingerprint(cores)
            new = _File(format=_FORMAT, fingerprint=fingerprint, made_at=time.time(), gains={})
            known = self._files[cores] = self._read(cores, fingerprint) or new
        return known

    def _read(self, cores: int, fingerprint: Fingerprint) -> _File | None:
        if self._directory is None:
            return None
        path = self._path(self._directory, cores)
        try:
            file = from_json(_File, read_file(path, max_bytes=_MAX_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _logger.info("matrix products are measured anew: %s: %s", path, error)
            return None
        is_fresh = file.format == _FORMAT and 0 <= time.time() - file.made_at <= MAX_AGE_S
        return file if is_fresh and file.fingerprint == fingerprint else None

    def _keep(self, cores: int) -> None:
        if self._directory is None:
            return
        try:
            write_file(self._path(self._directory, cores), json.dumps(to_json(self._files[cores]), indent=1) + "\n")
        except OSError as error:
            _logger.info("the next process measures matrix products again: %s", error)

    @staticmethod
    def _path(directory: Path, cores: int) -> Path:
        return directory / f"matmul-{cores}.json"


@functools.cache
def libraries_in(directory: Path | None) -> Libraries:
    """Return what this process knows of libraries; the same for the same directory."""
    return Libraries(directory)


def _sample_of(matmul: Matmul) -> Matmul:
    """Return the product that stands for a large one: Note [large products]."""
    while matmul.flops > MOST_FLOPS:
        sizes = {"rows": matmul.rows, "inner": matmul.inner, "columns": matmul.columns}
        longest = max(sizes, key=lambda name: sizes[name])
        matmul = replace(matmul, **{longest: sizes[longest] // 2})  # type: ignore[arg-type]
    return matmul


def _measure_gain(matmul: Matmul, cores: int) -> float:
    """Return how many times as fast oneDNN is as BLAS.

    It is in the midst of a compile: `inductor.real_tensors` is around it.
    """
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(cores)
        blas, onednn = _typical_times([_calls(matmul) for _ in range(-(-_FAR_BYTES // matmul.num_bytes))])
        if matmul.is_left_transposed:
            onednn += _writing_time(matmul)
    except RuntimeError as error:  # not every build of oneDNN computes every product
        _logger.info("%s stays with BLAS: %s", matmul.name, error)
        return 0.0
    finally:
        torch.set_num_threads(threads)
    gain = blas / onednn
    _logger.debug("oneDNN is %.2fx as fast as BLAS on %d cores: %s", gain, cores, matmul.name)
    return gain


def _calls(matmul: Matmul) -> list[Callable[[], object]]:
    """Return the call of BLAS and that of oneDNN, on matrices of their own."""
    left = _ones(matmul.rows, matmul.inner)
    right = _ones(matmul.inner, matmul.columns)
    if matmul.is_right_transposed:
        right = _ones(matmul.columns, matmul.inner).t()
    weight = right.t()
    bias = _ones(matmul.columns) if matmul.has_bias else None
    given = _ones(matmul.inner, matmul.rows).t() if matmul.is_left_transposed else left
    return [
        lambda: torch.mm(given, right) if bias is None else torch.addmm(bias, given, right),
        lambda: _call_onednn(left, weight, bias),
    ]


def _writing_time(matmul: Matmul) -> float:
    """Return about how many nanoseconds it takes to write the left matrix once more while it is computed."""
    left, again = _ones(matmul.rows, matmul.inner), _ones(matmul.rows, matmul.inner)
    (taken,) = _typical_times([[lambda: again.copy_(left)]])
    return taken


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float32, device="cpu")


def _typical_times(copies: Sequence[Sequence[Callable[[], object]]]) -> list[float]:
    """Return the median of the nanoseconds of each call.

    Calls take turns, since the machine changes, and so do the copies: in a step too, other matrices are used before a
    product comes to its own again.
    """
    for calls in copies:  # the first time makes what is made once
        for call in calls:
            call()
    times: list[list[int]] = [[] for _ in copies[0]]
    begin, rounds = time.perf_counter_ns(), 0
    while rounds < _LEAST_ROUNDS or time.perf_counter_ns() - begin < _MEASURE_NS:
        for number, samples in enumerate(times):
            for calls in copies:
                start = time.perf_counter_ns()
                calls[number]()
                samples.append(time.perf_counter_ns() - start)
        rounds += 1
    return [statistics.median(samples) for samples in times]
