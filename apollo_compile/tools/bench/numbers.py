"""Statistics of the measured steps: speed-ups with intervals, and differences from a reference.

collect(task, cold_s, numbers, times, peaks, ran) -> Measurement
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from apollo_compile.device.cpu.machine import cpu_description
from apollo_compile.tools.bench.task import MeasuredTask

_NUM_RESAMPLES = 2000
_TINY = 1.2e-38  # the smallest normal float32

LOSS = "\0loss"
"""Name of the loss in a digest, which no parameter can have."""


class Numbers(TypedDict):
    """Values of a child to compare with the reference."""

    loss: float
    digest: str
    """Path of a file with an array per parameter, written by `save_digest`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Step times of one variant, and its speed-up over the baseline."""

    median_ns: float
    min_ns: float
    p10_ns: float
    p90_ns: float
    speedup: float
    """Median of the baseline over this median: above 1 is faster than the baseline."""
    speedup_low: float
    """Lower end of the 95 % bootstrap interval of the speed-up, over rounds."""
    speedup_high: float
    """Upper end of this interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericalDifference:
    """Differences of the first step's loss and gradients from the reference."""

    loss_abs: float
    loss_rel: float
    gradient_abs: float
    """Largest absolute difference of an element."""
    gradient_rel: float
    """Largest relative difference of a parameter: largest difference over largest element (see `compare_digests`)."""
    worst: str
    """The parameter with the largest relative difference."""
    gradient_scale: float
    """Largest element of the reference's gradients; if it is zero, the comparison is meaningless."""
    unmatched: tuple[str, ...]
    """Parameters with a nonzero gradient on one side only; AOTAutograd makes zero gradients where eager has none."""

    def is_within(self, tolerance: float) -> bool:
        """Return whether the values match the reference up to a relative `tolerance`; NaN never matches."""
        return not self.unmatched and self.loss_rel <= tolerance and self.gradient_rel <= tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantResult:
    """All measurements of one variant."""

    variant: str
    cold_s: float
    """Duration of the first step, compile included."""
    rounds_ns: tuple[tuple[int, ...], ...]
    """Timed steps by round."""
    peak_bytes: int | None
    """Largest resident memory of the process in its timed steps; None if unknown."""
    loss: float
    summary: Summary
    difference: NumericalDifference
    ran: tuple[str, ...] = ()
    """Distinct variants that apollo selected (`apollo_compile.ir.Variant`); empty for other backends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One task, measured with several variants."""

    task: MeasuredTask
    baseline: str
    reference: str
    cpu: str
    """Model, vendor and features of the CPU."""
    results: tuple[VariantResult, ...]

    def by_variant(self) -> dict[str, VariantResult]:
        """Return the results by the name of their variant."""
        return {result.variant: result for result in self.results}


def summarize(rounds_ns: Sequence[Sequence[int]], baseline_ns: Sequence[Sequence[int]]) -> Summary:
    """Return statistics of step times by round, compared with the baseline in the same rounds."""
    own, base = np.asarray(rounds_ns, dtype=np.float64), np.asarray(baseline_ns, dtype=np.float64)
    picks = np.random.default_rng(0).integers(len(own), size=(_NUM_RESAMPLES, len(own)))
    ratios = _medians(base, picks) / _medians(own, picks)  # the same rounds of both, since a disturbance affects both
    low, high = np.percentile(ratios, (2.5, 97.5))
    p10, median, p90 = np.percentile(own, (10, 50, 90))
    return Summary(
        median_ns=float(median),
        min_ns=float(own.min()),
        p10_ns=float(p10),
        p90_ns=float(p90),
        speedup=float(np.median(base) / median),
        speedup_low=float(low),
        speedup_high=float(high),
    )


def compare_digests(digest: Mapping[str, Any], reference: Mapping[str, Any]) -> NumericalDifference:
    """Compare loss and gradients of one step with those of the reference.

    A gradient that is zero in exact arithmetic, such as the gradient of a key's bias, is noise. So the scale of a
    parameter is its largest element, but at least a thousandth of the model's largest gradient.
    """
    names = sorted((set(digest) & set(reference)) - {LOSS})
    scale = max((_largest(reference[name]) for name in names), default=0.0)
    floor = 1e-3 * scale
    gradient_abs, gradient_rel, worst = 0.0, 0.0, ""
    for name in names:
        difference = _largest(digest[name] - reference[name])
        relative = difference / max(_largest(reference[name]), floor, _TINY)
        gradient_abs = max(gradient_abs, difference) if difference == difference else difference
        if not relative <= gradient_rel:  # NaN counts as the worst difference
            gradient_rel, worst = (relative, name) if gradient_rel == gradient_rel else (gradient_rel, worst)
    loss, expected = float(digest[LOSS]), float(reference[LOSS])
    return NumericalDifference(
        loss_abs=abs(loss - expected),
        loss_rel=abs(loss - expected) / max(abs(expected), _TINY),
        gradient_abs=gradient_abs,
        gradient_rel=gradient_rel,
        worst=worst,
        gradient_scale=scale,
        unmatched=tuple(
            sorted(name for name in set(digest) ^ set(reference) if _largest({**digest, **reference}[name]))
        ),
    )


def to_json(measurement: Measurement) -> dict[str, Any]:
    """Return a measurement as plain data."""
    return asdict(measurement)


def collect(
    task: MeasuredTask,
    cold_s: Mapping[str, float],
    numbers: Mapping[str, Numbers],
    times: Mapping[str, Sequence[tuple[int, ...]]],
    peaks: Mapping[str, int | None],
    ran: Mapping[str, tuple[str, ...]],
) -> Measurement:
    """Return the measurement of a task.

    Arguments:
        task: the measured task.
        cold_s: by variant, seconds of the first step.
        numbers: by variant, values to compare with the reference.
        times: by variant, nanoseconds of the timed steps by round.
        peaks: by variant, largest resident memory in bytes.
        ran: by variant, the variants that apollo selected.
    """
    names = tuple(numbers)
    baseline = "inductor" if "inductor" in names else names[0]
    reference = "eager" if "eager" in names else names[0]
    expected = _load_digest(numbers[reference])
    results = tuple(
        VariantResult(
            variant=name,
            cold_s=cold_s[name],
            rounds_ns=tuple(times[name]),
            peak_bytes=peaks[name],
            loss=numbers[name]["loss"],
            summary=summarize(times[name], times[baseline]),
            difference=compare_digests(_load_digest(numbers[name]), expected),
            ran=ran[name],
        )
        for name in names
    )
    return Measurement(task=task, baseline=baseline, reference=reference, cpu=cpu_description(), results=results)


def _load_digest(numbers: Numbers) -> dict[str, npt.NDArray[np.float32]]:
    with np.load(numbers["digest"]) as arrays:
        names = json.loads(str(arrays["names"]))
        return {name: arrays[f"a{number}"] for number, name in enumerate(names)} | {LOSS: np.asarray(numbers["loss"])}


def save_digest(path: Path, values: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """Write an array for each parameter to a file."""
    # A parameter may be named `file`, which is an argument of savez, so arrays are numbered.
    arrays: dict[str, Any] = {f"a{number}": array for number, array in enumerate(values.values())}
    np.savez(path, names=np.asarray(json.dumps(list(values))), **arrays)


def _medians(rounds_ns: npt.NDArray[np.float64], picks: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    medians: npt.NDArray[np.float64] = np.median(rounds_ns[picks].reshape(len(picks), -1), axis=1)
    return medians


def _largest(array: npt.NDArray[np.float32]) -> float:
    return float(np.abs(array).max()) if array.size else 0.0
