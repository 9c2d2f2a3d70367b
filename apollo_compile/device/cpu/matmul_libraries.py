"""Selection of the library for each matmul: oneDNN where it was measured to be faster on this CPU, else BLAS.

    Libraries(directory).choose(cases) -> what oneDNN saves per case; each is measured once, then remembered
    call_as_bodies(size, cores) -> a call of the libraries that bodies would use, for calibration

oneDNN has a longer call overhead than BLAS and a faster kernel: on an EPYC core with AVX-512, matmuls of 10 us in MKL
took twice as long in oneDNN, and most matmuls of more than 1 ms in MKL took 5 to 20 % less. The crossover depends on
the machine, the shape, the layout of both matrices and the number of cores, so each matmul is measured, on matrices of
its shape. For a transposed left matrix, the time of a copy within the caches is added: Note [transposed left] in
`torch_bridge/onednn.py`.

Note [C++ template]: Inductor's own GEMM (`max_autotune_gemm_backends="CPP"`) is not among the libraries. It needs a
right matrix that is packed at compile time, but weights in training are inputs. On unpacked matrices it took about
twice as long as the better library at every measured shape (docs/planning.md, section 7).

There is one file of times per number of cores, shared by the processes of a machine. It expires as a whole, `MAX_AGE_S`
after its first entry was measured, or when the fingerprint of the machine changes.

Note [large matmuls]: the gain at a matmul of a millisecond holds for larger ones too. So the longest dimension of a
large matmul is halved until it is below the limits, and many matmuls share one measurement, scaled by their operations.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from apollo_compile.device.cpu.machine import machine_fingerprint
from apollo_compile.store.files import MAX_AGE_S, Dated, FileFormat, Store
from apollo_compile.target.fingerprint import Fingerprint
from apollo_compile.target.matmul import Matmul
from apollo_compile.torch_bridge.onednn import call_onednn
from apollo_compile.torch_bridge.settings import has_onednn

_logger = logging.getLogger(__name__)

LEAST_FLOPS = 2_000_000
"""Smallest matmul that is measured; smaller ones take less time than the call overhead of oneDNN."""

MOST_FLOPS = 200_000_000
MOST_BYTES = 64 * 2**20
"""Limits of a matmul that is measured; larger matmuls use its result: Note [large matmuls]."""

MARGIN = 0.02
"""Share of BLAS's time that oneDNN must save."""

MAX_ENTRIES = 4096
"""Matmuls in a file; the youngest are kept."""

_MEASURE_NS = 20_000_000
_LEAST_SAMPLES = 5

_FAR_BYTES = 8 * 2**20
"""Bytes that exceed the caches of one core."""

_lock = threading.RLock()
"""Held during a measurement: concurrent measurements would disturb each other."""


def _renew_lock() -> None:
    """Replace the lock in a forked child; a thread of the parent may have held it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryTimes:
    """How long one matmul takes, in nanoseconds."""

    blas: float
    onednn: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _TimesFile(Dated):
    fingerprint: Fingerprint
    times: Mapping[str, LibraryTimes]
    """By name of a matmul, the youngest last."""


_FORMAT = FileFormat(kind="file of matmul times", number=2, content=_TimesFile, max_bytes=2**20)


class Libraries:
    """Selects a library per matmul; measures each once and remembers the result."""

    def __init__(self, directory: Path | None) -> None:
        """Store measurements in `directory`, which need not exist yet; None keeps them in this process only."""
        names = "matmul-{key}.json"
        self._store = None if directory is None else Store(directory, _FORMAT, names=names, max_age_s=MAX_AGE_S)
        self._times: dict[int, dict[str, LibraryTimes]] = {}
        """By number of cores and name of the matmul."""
        self._unable: set[tuple[Matmul, int]] = set()
        """Matmuls and numbers of cores that could not be measured in this process."""

    def choose(self, cases: Iterable[tuple[Matmul, int]]) -> dict[tuple[Matmul, int], float]:
        """Return the matmuls and numbers of cores for which oneDNN is faster, and the nanoseconds that it saves.

        Those not yet known are measured. During a compile, call it inside `interpret.real_tensors`.
        """
        chosen: dict[tuple[Matmul, int], float] = {}
        measured: defaultdict[int, dict[str, LibraryTimes]] = defaultdict(dict)
        with _lock:
            for matmul, cores in dict.fromkeys(cases):
                if matmul.flops < LEAST_FLOPS:
                    continue
                sample, known = _sample_of(matmul), self._known(cores)
                times = known.get(sample.name)
                if times is None and (sample, cores) not in self._unable:
                    times = _measure(sample, cores)
                    if times is None:
                        self._unable.add((sample, cores))
                    else:
                        known[sample.name] = measured[cores][sample.name] = times
                if times is not None and times.onednn < (1 - MARGIN) * times.blas:
                    chosen[matmul, cores] = (times.blas - times.onednn) * matmul.flops / sample.flops
            for cores, new in measured.items():
                self._keep(cores, new)
        return chosen

    def _known(self, cores: int) -> dict[str, LibraryTimes]:
        if cores not in self._times:
            kept = None if self._store is None else self._store.read(str(cores)).content
            is_known = kept is not None and kept.fingerprint == machine_fingerprint(cores)
            self._times[cores] = dict(kept.times) if kept is not None and is_known else {}
        return self._times[cores]

    def _keep(self, cores: int, new: Mapping[str, LibraryTimes]) -> None:
        """Write times that were just measured, and take over those of other processes."""
        fingerprint = machine_fingerprint(cores)

        def add(before: _TimesFile | None) -> _TimesFile:
            if before is None or before.fingerprint != fingerprint:
                before = _TimesFile(made_at=time.time(), fingerprint=fingerprint, times={})
            merged = [*((name, times) for name, times in before.times.items() if name not in new), *new.items()]
            return replace(before, times=dict(merged[-MAX_ENTRIES:]))

        if self._store is not None:
            try:
                self._times[cores].update(self._store.update(str(cores), add).times)
            except OSError as error:
                _logger.info("measured matmuls are not kept: %s; the next process measures them again", error)


@functools.cache
def libraries_in(directory: Path | None) -> Libraries:
    """Return the `Libraries` of this process for a directory."""
    return Libraries(directory)


def call_as_bodies(size: int, cores: int) -> Callable[[], object]:
    """Return a call of two matmuls of square matrices: a linear layer, and the gradient of its weight.

    Each is by the library that a body would use, measured now. Settings of this process that keep matmuls with BLAS do
    not count, since profiles outlive it.
    """
    calls = []
    for is_gradient in (False, True):
        lies = {"is_left_transposed": is_gradient, "is_right_transposed": not is_gradient, "has_bias": not is_gradient}
        matmul = Matmul(rows=size, inner=size, columns=size, **lies)
        blas, onednn = _calls(matmul)
        if not (has_onednn() and Libraries(None).choose([(matmul, cores)])):
            calls.append(blas)
            continue
        calls.append(onednn)
        if is_gradient:
            calls.append(_copy_of_left(matmul))
    return lambda: [call() for call in calls]


def _sample_of(matmul: Matmul) -> Matmul:
    """Return the matmul that is measured in place of a large one: Note [large matmuls]."""
    while matmul.flops > MOST_FLOPS or matmul.num_bytes > MOST_BYTES:
        sizes = {"rows": matmul.rows, "inner": matmul.inner, "columns": matmul.columns}
        longest = max(sizes, key=lambda name: sizes[name])
        matmul = replace(matmul, **{longest: sizes[longest] // 2})  # type: ignore[arg-type]
    return matmul


def _measure(matmul: Matmul, cores: int) -> LibraryTimes | None:
    """Return the times of both libraries; None if one of them cannot compute the matmul."""
    threads = torch.get_num_threads()
    try:
        if cores != threads:
            torch.set_num_threads(cores)
        blas, onednn = _least_times([_calls(matmul) for _ in range(-(-_FAR_BYTES // matmul.num_bytes))])
        if matmul.is_left_transposed:
            onednn += _least_times([[_copy_of_left(matmul)]])[0]
    except RuntimeError as error:  # not every build of oneDNN supports every matmul
        _logger.info("BLAS is used for %s: oneDNN could not be measured: %s", matmul.name, error)
        return None
    finally:
        if cores != threads:
            torch.set_num_threads(threads)
    _logger.debug("oneDNN is %.2fx as fast as BLAS on %d cores: %s", blas / onednn, cores, matmul.name)
    return LibraryTimes(blas=blas, onednn=onednn)


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
        lambda: call_onednn(left, weight, bias),
    ]


def _copy_of_left(matmul: Matmul) -> Callable[[], object]:
    """Return a call that takes about as long as writing the left matrix a second time."""
    left, again = _ones(matmul.rows, matmul.inner), _ones(matmul.rows, matmul.inner)
    return lambda: again.copy_(left)


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float32, device="cpu")


def _least_times(copies: Sequence[Sequence[Callable[[], object]]]) -> list[float]:
    """Return the least time in nanoseconds of each call, as other processes only lengthen a call.

    Calls alternate, because the speed of the machine changes over time. Copies alternate too, because a step uses other
    matrices before the same matmul runs again.
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
    return [float(min(samples)) for samples in times]
