"""Matmuls of bodies: oneDNN computes those for which it was measured to be faster, BLAS the others.

    find_matmuls(graph) -> list[Matmul]             in the graph of a body, before it is compiled
    Libraries(directory).choose(cases) -> cases     those for oneDNN; each is measured once, then remembered
    replace_with_onednn(graph, is_for_onednn)            in place

On a CPU, torch and Inductor call the BLAS that torch was built with for every float32 matmul. oneDNN, which every build
for x86 has too, has a longer call overhead and a faster kernel: on an EPYC core with AVX-512, matmuls of 10 us in MKL
took twice as long in oneDNN, and most matmuls of more than 1 ms in MKL took 5 to 20 % less. The crossover depends on
the machine, the shape, the layout of both matrices and the number of cores, so each matmul is measured, on matrices of
its shape.

Note [C++ template]: Inductor's own GEMM (`max_autotune_gemm_backends="CPP"`) is not among the libraries. It is made for
a right matrix that is packed once, at compile time; weights in training are inputs. Called on such matrices it took
about twice as long as the better library at every measured shape (docs/planning.md, section 7).

Note [transposed left]: the gradient of a weight is a matmul of a transposed gradient and a layer's input. oneDNN needs
the left matrix in row-major order, so a body also writes it in that order, which Inductor fuses into the code that
computes the gradient. The measurement adds a copy within the caches for that.

Note [large matmuls]: the gain at a matmul of a millisecond holds for larger ones too. So the longest dimension of a
large matmul is halved until it is below the limits, and many matmuls share one measurement.

Results differ between the two libraries as between any two orders of a sum. Matmuls stay with BLAS if the user wants
the same numbers every time, or allows float32 with less precision, which has rules of its own.
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
"""Smallest matmul that is measured; smaller ones take less time than the call overhead of oneDNN."""

MOST_FLOPS = 200_000_000
MOST_BYTES = 64 * 2**20
"""Limits of a matmul that is measured; it stands for larger ones: Note [large matmuls]."""

MARGIN = 0.02
"""Share of BLAS' time that oneDNN must save."""

LINEAR = "apollo_compile::linear"
"""The operator for matmuls that oneDNN computes; Inductor's patterns do not match it."""

_MEASURE_NS = 20_000_000
_LEAST_SAMPLES = 3

_FAR_BYTES = 8 * 2**20
"""Bytes that exceed the caches of one core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Matmul:
    """A matmul of two float32 matrices, with an optional bias that is added to each row."""

    rows: int
    inner: int
    """Columns of the left matrix, rows of the right one."""
    columns: int
    is_left_transposed: bool
    """Whether the left matrix is column-major."""
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
        """Name of the matmul in files."""
        marks = "T" * self.is_left_transposed, "T" * self.is_right_transposed, "+bias" * self.has_bias
        return f"{self.rows}x{self.inner}{marks[0]} {self.inner}x{self.columns}{marks[1]}{marks[2]}"


# ------------------------------------------------------------------------------------------------------- the graphs


def find_matmuls(graph: fx.Graph) -> list[Matmul]:
    """Return the matmuls in a graph after AOTAutograd that both libraries can compute."""
    return [matmul for matmul in map(_matmul_of, graph.nodes) if matmul is not None]


def replace_with_onednn(graph: fx.Graph, is_for_onednn: Callable[[Matmul], bool]) -> int:
    """Replace the matmuls for which `is_for_onednn` is true by calls of oneDNN; return their number.

    Arguments:
        graph: after AOTAutograd, with values; changed in place.
        is_for_onednn: called with each matmul that `find_matmuls` returns.
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
    """Whether the target is the operator of `onednn_linear`."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.name == LINEAR


def onednn_linear() -> torch._ops.OpOverload:
    """Return the operator `input @ weight.T + bias` of oneDNN: float32, row-major input, weight in either order."""
    namespace, _, name = LINEAR.partition("::")
    with _lock:
        if not hasattr(getattr(torch.ops, namespace), name):  # a definition survives a reload of this file
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
    """Return the matmul that a node computes, if both libraries can compute it."""
    if node.target not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) or node.kwargs:
        return None
    *biases, left, right = (argument.meta["val"] for argument in node.args)  # type: ignore[union-attr]
    values = (*biases, left, right)
    if any(value.dtype != torch.float32 or value.device.type != "cpu" for value in values):
        return None
    if not all(type(size) is int for value in values for size in (*value.shape, *value.stride())):
        return None  # dynamic sizes: comparing them would add guards
    (rows, inner), columns = left.shape, right.shape[1]
    are_transposed = [_is_transposed(value) for value in (left, right)]
    if None in are_transposed or any(bias.shape != (columns,) or bias.stride() != (1,) for bias in biases):
        return None
    return Matmul(
        rows=rows,
        inner=inner,
        columns=columns,
        is_left_transposed=bool(are_transposed[0]),
        is_right_transposed=bool(are_transposed[1]),
        has_bias=bool(biases),
    )


def _is_transposed(matrix: torch.Tensor) -> bool | None:
    """Return whether a matrix is column-major; None if it is a part of a larger matrix."""
    if matrix.is_contiguous():
        return False
    return True if matrix.t().is_contiguous() else None


# ---------------------------------------------------------------------------------------------------- the libraries


_lock = threading.RLock()
"""Held during a measurement: two at once would disturb each other."""


def _renew_lock() -> None:
    """In a forked child: a thread of the parent may have held it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class Libraries:
    """Measures and remembers which library is faster for which matmuls."""

    def __init__(self, directory: Path | None) -> None:
        """Store measurements in `directory`, which need not exist yet; None keeps them in this process only."""
        self._kept = None if directory is None else MatmulGains(directory)
        self._gains: dict[int, dict[str, float]] = {}
        """Speed-up of oneDNN over BLAS, by number of cores and name of the matmul."""
        self._unable: set[tuple[Matmul, int]] = set()
        """Matmuls and numbers of cores that could not be measured in this process."""

    def choose(self, cases: Iterable[tuple[Matmul, int]]) -> set[tuple[Matmul, int]]:
        """Return the matmuls and numbers of cores for which oneDNN is faster, after measuring those not yet known.

        During a compile, call it inside `interpret.real_tensors`.
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
    """Return the `Libraries` of this process for a directory."""
    return Libraries(directory)


def _sample_of(matmul: Matmul) -> Matmul:
    """Return the matmul that is measured in place of a large one: Note [large matmuls]."""
    while matmul.flops > MOST_FLOPS or matmul.num_bytes > MOST_BYTES:
        sizes = {"rows": matmul.rows, "inner": matmul.inner, "columns": matmul.columns}
        longest = max(sizes, key=lambda name: sizes[name])
        matmul = replace(matmul, **{longest: sizes[longest] // 2})  # type: ignore[arg-type]
    return matmul


def _measure_gain(matmul: Matmul, cores: int) -> float | None:
    """Return the speed-up of oneDNN over BLAS; None if one of them cannot compute the matmul."""
    threads = torch.get_num_threads()
    try:
        if cores != threads:
            torch.set_num_threads(cores)
        blas, onednn = _typical_times([_calls(matmul) for _ in range(-(-_FAR_BYTES // matmul.num_bytes))])
        if matmul.is_left_transposed:
            onednn += _writing_time(matmul)
    except RuntimeError as error:  # not every build of oneDNN supports every matmul
        _logger.info("%s stays with BLAS: %s", matmul.name, error)
        return None
    finally:
        if cores != threads:
            torch.set_num_threads(threads)
    _logger.debug("oneDNN is %.2fx as fast as BLAS on %d cores: %s", blas / onednn, cores, matmul.name)
    return blas / onednn


def _calls(matmul: Matmul) -> list[Callable[[], object]]:
    """Return a call of BLAS and a call of oneDNN, on new matrices."""
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
    """Return about the nanoseconds that it takes to write the left matrix a second time while it is computed."""
    left, again = _ones(matmul.rows, matmul.inner), _ones(matmul.rows, matmul.inner)
    (taken,) = _typical_times([[lambda: again.copy_(left)]])
    return taken


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float32, device="cpu")


def _typical_times(copies: Sequence[Sequence[Callable[[], object]]]) -> list[float]:
    """Return the median nanoseconds of each call.

    Calls alternate, because the speed of the machine changes over time. Copies alternate too, because in a step other
    matrices are used before the same matmul runs again.
    """
    for call in copies[0]:  # warm-up
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
