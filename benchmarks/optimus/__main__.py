"""Print the computed figures beside the published ones, and name those that miss.

    python -m benchmarks.optimus

Nothing is run on a device; it takes about a minute. The exit code is 0 also where figures miss: `scaling.py` says which
parts of the published setting are assumptions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tabulate import tabulate
from tqdm import tqdm

from benchmarks.optimus.scaling import SIZES, Row, SizeResult, compare, simulate_size


def main() -> int:
    """Simulate all sizes and print the table."""
    results = [simulate_size(size) for size in tqdm(SIZES, desc="filling bubbles", file=sys.stderr)]
    print(format_comparison(compare(results), results))
    return 0


def format_comparison(rows: Sequence[Row], results: Sequence[SizeResult]) -> str:
    """Return every computed figure beside the published one; the last lines name those that miss."""
    cells = []
    for row in rows:
        digits = "{:.2f}" if row.is_relative or row.name.startswith("balanced") else "{:.1%}"
        difference = f"{row.difference:+.1%}" if row.is_relative or digits == "{:.1%}" else f"{row.difference:+.2f}"
        values = (digits.format(value) for value in (row.computed, row.published))
        cells.append((row.num_gpus, row.name, *values, difference, "" if row.is_within else "misses"))
    headers = ("GPUs", "figure", "computed", "published", "difference", "")
    sides = ("right", "left", "right", "right", "right", "left")
    table = tabulate(cells, headers=headers, colalign=sides, disable_numparse=True)
    plans = [
        f"encoder: pipeline depth {plan.pipeline_parallel}, tensor parallelism {plan.tensor_parallel}, "
        f"{plan.num_replicas} replicas per pipeline"
        for plan in dict.fromkeys(result.encoder_plan for result in results)
    ]
    explained = "simulated; times within 7 %, speed-ups within 0.03, shares within 1 point count as reproduced"
    missed = [f"{row.name} at {row.num_gpus}" for row in rows if not row.is_within]
    last = f"{len(missed)} of {len(rows)} miss" + (f": {'; '.join(missed)}" if missed else "")
    return "\n".join([table, *plans, explained, last])


if __name__ == "__main__":
    sys.exit(main())
