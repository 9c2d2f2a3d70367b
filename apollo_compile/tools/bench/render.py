"""Render measurements as text tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tabulate import tabulate

from apollo_compile.units import format_bytes, format_ns

if TYPE_CHECKING:
    from apollo_compile.tools.bench.numbers import Measurement, NumericalDifference, VariantResult

COLUMNS = (
    "variant",
    "median step",
    "p10 .. p90",
    "min",
    "speed-up",
    "95 % interval",
    "first step",
    "peak memory",
    "loss",
)

MIN_ROUNDS = 5
"""Least number of rounds for which a bootstrap interval is shown."""


def format_measurement(measurement: Measurement) -> str:
    """Return a table with a row per variant; `speed-up` is over the baseline, differences are from the reference."""
    compared = measurement.task.compared
    table: str = tabulate(
        [_row(measurement, result) for result in measurement.results],
        headers=(*COLUMNS, compared),
        disable_numparse=True,
    )
    text = (
        f"{table}\n"
        f"speed-up: median of {measurement.baseline} over this median, above 1 is faster; "
        f"loss, {compared}: largest relative difference from {measurement.reference}\n"
        f"measured in {measurement.task.dtype} on {measurement.cpu}"
    )
    ran = [f"{result.variant}: {', '.join(result.ran)}" for result in measurement.results if result.ran]
    if ran:
        text += f"\nselected variants: {'; '.join(ran)}"
    return text


def _row(measurement: Measurement, result: VariantResult) -> tuple[str, ...]:
    summary, difference = result.summary, result.difference
    is_reference = result.variant == measurement.reference
    return (
        result.variant,
        format_ns(summary.median_ns),
        f"{format_ns(summary.p10_ns)} .. {format_ns(summary.p90_ns)}",
        format_ns(summary.min_ns),
        f"{summary.speedup:.2f}x",
        f"{summary.speedup_low:.2f} .. {summary.speedup_high:.2f}" if len(result.rounds_ns) >= MIN_ROUNDS else "-",
        f"{result.cold_s:.1f} s",
        "-" if result.peak_bytes is None else format_bytes(result.peak_bytes),
        "reference" if is_reference else f"{difference.loss_rel:.1e}",
        "reference" if is_reference else _show_gradients(difference),
    )


def _show_gradients(difference: NumericalDifference) -> str:
    if difference.unmatched:
        return f"{len(difference.unmatched)} unmatched"
    if difference.gradient_scale == 0:  # inference, or a constant loss, such as a contrastive loss of one sample
        return "all zero" if difference.gradient_rel == 0 else "should be zero"
    return f"{difference.gradient_rel:.1e}"
