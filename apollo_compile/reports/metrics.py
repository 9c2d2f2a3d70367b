"""Numbers of a report for dashboards: one flat dictionary.

    ModelSummary -> {"apollo/step_ms": 49.7, ...}

Every value is a float, which TensorBoard, Weights & Biases and MLflow draw as a curve. A number that is not known yet
has no entry.

| Name                         | Value                                                                                |
| ---------------------------- | ------------------------------------------------------------------------------------ |
| apollo/settled               | 1 if no graph is being measured, else 0                                              |
| apollo/graphs_on_lanes       | graphs that run on lanes                                                             |
| apollo/graphs_in_turn        | graphs that run their segments one after the other                                   |
| apollo/graphs_in_inductor    | planned graphs that Inductor compiled as a whole                                     |
| apollo/fallbacks             | fallbacks, planned or not                                                            |
| apollo/step_ms               | milliseconds of a step in compiled graphs, measured by autotuning for its winners    |
| apollo/gain_over_serial      | time of the serial plan over `step_ms`, measured in the same rounds                  |
| apollo/gain_over_inductor    | time of Inductor or its traced step, on a GPU of torch.compile, over `step_ms`       |
| apollo/predicted_gain        | predicted time on one lane over the predicted time of the plans                      |
| apollo/overlap               | share of the graphs' time in which two or more lanes were busy, in the last step     |
| apollo/peak_bytes            | largest planned peak of buffers between segments of a graph                          |
"""

from __future__ import annotations

from collections.abc import Iterable

from apollo_compile.ir import Variant, Verdict
from apollo_compile.reports.values import GraphSummary, ModelSummary, Stage

PREFIX = "apollo/"

_WITHOUT_LANES = (Variant.SERIAL, Variant.INDUCTOR, Variant.LOOP, Variant.EAGER, Variant.TRACED)
"""Variants that do not run a graph's plan on its lanes."""


def metrics_of(report: ModelSummary) -> dict[str, float]:
    """Return the numbers that are known, by name; the table above has their meaning."""
    graphs, verdicts = report.graphs, [verdict for _, verdict in report.verdicts if verdict.is_measured]
    stages = {state.stage for state in report.states}
    found = {
        "settled": float(Stage.MEASURING not in stages) if stages else None,
        "graphs_on_lanes": sum(_is_on_lanes(graph) for graph in graphs),
        "graphs_in_turn": sum(
            graph.variant == Variant.SERIAL or (graph.variant == Variant.PLAN and graph.num_lanes < 2)
            for graph in graphs
        ),
        "graphs_in_inductor": sum(graph.variant == Variant.INDUCTOR for graph in graphs),
        "fallbacks": len(report.fallbacks),
        "step_ms": sum(verdict.standings[0].step_ns for verdict in verdicts) / 1e6 if verdicts else None,
        "gain_over_serial": _gain(verdicts, Variant.SERIAL),
        "gain_over_inductor": _gain(verdicts, Variant.INDUCTOR, Variant.TRACED),
        "predicted_gain": _ratio((graph.serial_ns, graph.predicted_ns) for graph in graphs),
        "overlap": _overlap(graphs),
        "peak_bytes": max((graph.peak_bytes for graph in graphs), default=None),
    }
    return {PREFIX + name: float(value) for name, value in found.items() if value is not None}


def _is_on_lanes(graph: GraphSummary) -> bool:
    return graph.num_lanes > 1 and graph.variant not in _WITHOUT_LANES


def _gain(verdicts: Iterable[Verdict], *variants: Variant) -> float | None:
    """Return the time of these variants over that of the winners; None if a comparison included none of them."""
    times = []
    for verdict in verdicts:
        ratio = next((standing.ratio for standing in verdict.standings if standing.name in variants), None)
        if ratio is None:
            return None
        times.append((verdict.standings[0].step_ns * ratio, verdict.standings[0].step_ns))
    return _ratio(times)


def _overlap(graphs: Iterable[GraphSummary]) -> float | None:
    """Return the measured overlap over the time of all graphs; None if a graph on lanes is not measured yet."""
    graphs = tuple(graphs)
    if any(_is_on_lanes(graph) and graph.measured is None for graph in graphs):
        return None
    lines = [(graph.latest, _is_on_lanes(graph)) for graph in graphs]
    return _ratio((line.overlap * line.duration_ns * is_on_lanes, line.duration_ns) for line, is_on_lanes in lines)


def _ratio(parts: Iterable[tuple[float, float]]) -> float | None:
    """Return the sum of the numerators over the sum of the denominators; None if the latter is 0."""
    above, below = (sum(column) for column in zip((0.0, 0.0), *parts, strict=True))
    return above / below if below else None
