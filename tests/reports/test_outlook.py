"""What `explain` predicts about the steps of the benchmark is near what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from apollo_compile.ir import Role
from apollo_compile.reports.outlook import SPREAD, outlook_of, planned_state
from apollo_compile.reports.values import Stage
from tests.reports.test_report import small

ROOT = Path(__file__).parents[2]
PREDICTED = json.loads((ROOT / "benchmarks" / "results" / "outlook.json").read_text())
"""By `explain` of the workloads at size small, on two cores: nanoseconds of a step on one lane and by its plans."""


def predict(serial_ns: int, predicted_ns: int, kind: str = "cpu") -> Any:
    """Return the outlook for a forward and a backward that take so long together."""
    (graph,) = small().graphs
    device = replace(graph.device, kind=kind)
    half = replace(graph, serial_ns=serial_ns // 2, predicted_ns=predicted_ns // 2, device=device)
    return outlook_of([replace(half, role=Role.FORWARD), replace(half, role=Role.BACKWARD)])


def measured() -> Iterator[tuple[tuple[str, int], float]]:
    """Yield model, batch, and how many times as fast as Inductor apollo was, for every published comparison."""
    for name in ("lanes", "modes", "modes_xeon", "modes_xeon_batch4"):
        content = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        for run in content.get("runs", [content]):
            for each in run["measurements"]:
                times = {result["variant"]: result["summary"]["median_ns"] for result in each["results"]}
                arguments = each["task"]["arguments"]
                yield (arguments["name"], arguments["batch"]), times["inductor"] / times["apollo"]


def test_predictions_are_near_what_was_measured() -> None:
    """As `docs/benchmarks.md` says: half of them are near, and nineteen of twenty on the right side of 1."""
    outlooks = {(each["model"], each["batch"]): predict(each["serial_ns"], each["predicted_ns"]) for each in PREDICTED}
    pairs = [(outlooks[key].ratio, ratio) for key, ratio in measured() if key in outlooks]
    assert len(pairs) > 40
    errors = sorted(abs(told / ratio - 1) for told, ratio in pairs)
    num_wrong = sum((told > 1) != (ratio > 1) for told, ratio in pairs)
    told_by_docs = (
        f"Half of the predictions are within 7 %, nine of ten within 20 %, and all but {num_wrong} of the {len(pairs)} "
        "comparisons are on the predicted side of 1"
    )
    assert num_wrong <= 0.05 * len(pairs)
    assert told_by_docs in " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    assert errors[len(errors) // 2] < 0.07 and errors[int(0.9 * len(errors))] < 0.20
    low, high = SPREAD
    assert sum(low <= ratio / told <= high for told, ratio in pairs) >= 0.85 * len(pairs)


def test_the_line_says_whether_apollo_would_help() -> None:
    """Times and ratio agree; nothing is told of steps shorter than those that were measured, and of GPUs."""
    helps = planned_state("0/0", predict(70_000_000, 55_000_000))
    assert str(helps) == "would help: about 1.36x over torch.compile (75.00 ms -> 55.00 ms); 1.2 to 1.8"
    assert planned_state("0/0", predict(10_000_000_000, 10_000_000_000)).stage is Stage.WOULD_HARDLY_HELP
    assert predict(9_900_000, 9_000_000) is None
    assert predict(70_000_000, 55_000_000, "cuda") is None
    assert planned_state("0/0", None).stage is Stage.PLANNED
