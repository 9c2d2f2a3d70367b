"""Matrix products of bodies: oneDNN computes those that it was measured to be faster at, BLAS the others.

    find_matmuls(graph) -> list[Matmul]             in the graph of a body, before it is compiled
    Libraries(directory).choose(cases) -> cases     those for oneDNN; each is measured once, then remembered
    give_to_onednn(graph, is_for_onednn)            in place

On a CPU, torch and Inductor give every product of float32 matrices to the BLAS that torch was built with. oneDNN,
which every build for x86 has too, takes longer to call and less time to compute: on an EPYC core with AVX-512, what
takes MKL 10 us took oneDNN twice as long, and what takes MKL more than 1 ms mostly took oneDNN 5 to 20 % less. Where
the border is depends on the machine, the shape, how both matrices lie in memory and the number of cores, so each
product is measured, on matrices of its shape.

Note [C++ template]: Inductor's own GEMM (`max_autotune_gemm_backends="CPP"`) is not among the libraries. It is made for
a right matrix that is packed once, when it is compiled; weights in training are inputs. Called on such matrices it took
about twice as long as the better library at every shape that was measured (docs/planning.md, section 7).

Note [transposed left]: the gradient of a weight is the product of a transposed gradient and a layer's input. oneDNN
wants the left matrix by rows, so a body writes it that way too, which Inductor fuses into what computes the gradient.
A copy within the caches stands for that.

Note [large products]: a product that takes a millisecond tells as much as a larger one. So the longest dimension of a
large one is halved until it is large no longer, and many products share one measurement.

Numbers differ between the two as between any two orders of a sum. Products stay with BLAS where the user wants the same
numbers every time, or lets float32 be computed with less precision, which has rules of its own.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import fx

from apollo_compile.device.cpu.machine import machine_fingerprint
from apollo_compile.store.matmul_gains import MatmulGains

_logger = logging.getLogger(__name__)

LEAST_FLOPS = 2_000_000
"""Of a product that is measured. Smaller ones take less time than it takes to call oneDNN."""

MOST_FLOPS = 200_000_000
MOST_BYTES = 64 * 2**20
"""Of the product that stands for a larger one."""

MARGIN = 0.02
"""Share of BLAS' time that oneDNN must save."""

LINEAR = "apollo_compile::linear"
"""The operator that stands for a product which oneDNN computes; Inductor's patterns do not know it."""

_MEASURE_NS = 20_000_000
_LEAST_SAMPLES = 3

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


def find_matmuls(graph: fx.Graph) -> list[Matmul]:
    """Return the products in a graph of operators after AOTAutograd that both libraries could compute."""
    return [matmul for matmul in map(_matmul_of, graph.nodes) if matmul is not None]


def give_to_onednn(graph: fx.Graph, is_for_onednn: Callable[[Matmul], bool]) -> int:
    """Let oneDNN compute those products of a graph for which `is_for_onednn` says so; return how many they are.

    Arguments:
        graph: of operators after AOTAutograd, with values; changed in place.
        is_for_onednn: asked about what `find_matmuls` returns.
    """
    count = 0
    for node in list(graph.nodes):
        matmul = _matmul_of(node)
        if matmul is None or not is_for_onednn(matmul):
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


def is_linear(target: object) -> bool:
    """Whether it is the operator that oneDNN computes."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.name == LINEAR


def onednn_linear() -> torch._ops.OpOverload:
    """Return the operator `input @ weight.T + bias` of oneDNN: float32, input by rows, weight by rows or columns."""
    namespace, _, name = LINEAR.partition("::")
    with _lock:
        if not hasattr(getattr(torch.ops, namespace), name):  # what was defined stays when this file is loaded anew
            torch.library.define(LINEAR, "(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
            torch.library.impl(LINEAR, "CPU", _call_onednn)
            torch.library.register_fake(LINEAR, _fake_linear)
    return torch.ops.apollo_compile.linear.default


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


_lock = threading.RLock()
"""Held while anything is measured: two measurements at once would disturb each other."""


def _renew_lock() -> None:
    """In a forked child: a thread of the parent may have held it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class Libraries:
    """Which library is the faster for which products."""

    def __init__(self, directory: Path | None) -> None:
        """Keep what is measured in `directory`, which need not exist yet; None keeps it in this process only."""
        self._kept = None if directory is None else MatmulGains(directory)
        self._gains: dict[int, dict[str, float]] = {}
        """How many times as fast oneDNN is as BLAS, by number of cores and the name of a product."""
        self._unable: set[tuple[Matmul, int]] = set()
        """What could not be measured; another process may be able to."""

    def choose(self, cases: Iterable[tuple[Matmul, int]]) -> set[tuple[Matmul, int]]:
        """Return for which products and numbers of cores oneDNN is faster; what is not known is measured.

        It may be in the midst of a compile, if `interpret.real_tensors` is around it.
        """
        chosen: set[tuple[Matmul, int]] = set()
        measured: defaultdict[int, dict[str, float]] = defaultdict(dict)
        with _lock:
            for matmul, cores in dict.fromkeys(cases):
                if matmul.flops < LEAST_FLOPS:
                    continue
                sample, gains = _sample_of(matmul), self._known(cores)
                gain = gains.get(sample.name)
                if gain is None and (sample, cores) not in self._unable:
                    gain = _measure_gain(sample, cores)
                    if gain is None:
                        self._unable.add((sample, cores))
                    else:
                        gains[sample.name] = measured[cores][sample.name] = gain
                if gain is not None and gain * (1 - MARGIN) > 1:
                    chosen.add((matmul, cores))
            if self._kept is not None:
                for cores, new in measured.items():
                    self._gains[cores].update(self._kept.add(machine_fingerprint(cores), new))
        return chosen

    def _known(self, cores: int) -> dict[str, float]:
        if cores not in self._gains:
            kept = {} if self._kept is None else self._kept.recall(machine_fingerprint(cores))
            self._gains[cores] = dict(kept)
        return self._gains[cores]


@functools.cache
def libraries_in(directory: Path | None) -> Libraries:
    """Return what this process knows of libraries; the same for the same directory."""
    return Libraries(directory)


def _sample_of(matmul: Matmul) -> Matmul:
    """Return the product that stands for a large one: Note [large products]."""
    while matmul.flops > MOST_FLOPS or matmul.num_bytes > MOST_BYTES:
        sizes = {"rows": matmul.rows, "inner": matmul.inner, "columns": matmul.columns}
        longest = max(sizes, key=lambda name: sizes[name])
        matmul = replace(matmul, **{longest: sizes[longest] // 2})  # type: ignore[arg-type]
    return matmul


def _measure_gain(matmul: Matmul, cores: int) -> float | None:
    """Return how many times as fast oneDNN is as BLAS; None where one of them cannot."""
    threads = torch.get_num_threads()
    try:
        if cores != threads:
            torch.set_num_threads(cores)
        blas, onednn = _typical_times([_calls(matmul) for _ in range(-(-_FAR_BYTES // matmul.num_bytes))])
        if matmul.is_left_transposed:
            onednn += _writing_time(matmul)
    except RuntimeError as error:  # not every build of oneDNN computes every product
        _logger.info("%s stays with BLAS: %s", matmul.name, error)
        return None
    finally:
        if cores != threads:
            torch.set_num_threads(threads)
    _logger.debug("oneDNN is %.2fx as fast as BLAS on %d cores: %s", blas / onednn, cores, matmul.name)
    return blas / onednn


def _calls(matmul: Matmul) -> list[Callable[[], object]]:
    """Return the call of BLAS and that of oneDNN, on matrices of their own."""
    left = _ones(matmul.rows, matmul.inner)
    given = _ones(matmul.inner, matmul.rows).t() if matmul.is_left_transposed else left
    if matmul.is_right_transposed:
        right = _ones(matmul.columns, matmul.inner).t()
    else:
        right = _ones(matmul.inner, matmul.columns)
    weight, bias = right.t(), _ones(matmul.columns) if matmul.has_bias else None
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
    for call in copies[0]:  # the first time makes what is made once
        call()
    times: list[list[int]] = [[] for _ in copies[0]]
    begin = time.perf_counter_ns()
    for calls in itertools.cycle(copies):
        for call, samples in zip(calls, times, strict=True):
            start = time.perf_counter_ns()
            call()
            samples.append(time.perf_counter_ns() - start)
        if len(times[0]) >= _LEAST_SAMPLES and time.perf_counter_ns() - begin >= _MEASURE_NS:
            break
    return [statistics.median(samples) for samples in times]
