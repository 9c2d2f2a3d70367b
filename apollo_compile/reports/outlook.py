"""Predict from plans alone whether apollo would be faster than `torch.compile`: the first line of `explain`.

    outlook_of(graphs) -> Outlook | None

Inductor's whole graph is predicted as the segments in turn, which are its kernels, and a fixed time: on a CPU, code of
a whole graph is called through Python, and its smaller matmuls are slower than those of segments. `WHOLE_NS` fits the
steps that `docs/benchmarks.md` has, on two cores of AMD and Intel; `tests/reports/test_outlook.py` compares every one
of them. Nothing was fitted for GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from apollo_compile.reports.values import GraphSummary, Stage, State
from apollo_compile.units import format_ns

WHOLE_NS = 2_500_000
"""Time by which Inductor's whole graph of a forward, or a backward, is slower than its segments in turn."""

SHORTEST_NS = 5_000_000
"""Time of a forward, or of a backward, below which nothing is predicted: no shorter steps were measured."""

SPREAD = (0.88, 1.32)
"""Measured over predicted ratios: nine of ten are between these."""

WORTH = 1.05
"""Predicted ratio from which apollo would help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """Predicted times of the graphs of one call, together."""

    whole_ns: int
    """Predicted time with `torch.compile`."""
    predicted_ns: int
    """Predicted time of the plans."""

    @property
    def ratio(self) -> float:
        """Predicted speed-up of the plans over `torch.compile`."""
        return self.whole_ns / self.predicted_ns

    @property
    def stage(self) -> Stage:
        """Whether the speed-up is worth a try."""
        return Stage.WOULD_HELP if self.ratio >= WORTH else Stage.WOULD_HARDLY_HELP

    def __str__(self) -> str:
        low, high = (self.ratio * each for each in SPREAD)
        times = f"{format_ns(self.whole_ns)} -> {format_ns(self.predicted_ns)}"
        return f"about {self.ratio:.2f}x over torch.compile ({times}); {low:.1f} to {high:.1f}"


def outlook_of(graphs: Iterable[GraphSummary]) -> Outlook | None:
    """Return the outlook for graphs on a CPU that run in segments; None for short ones, without one, and on a GPU."""
    planned = [graph for graph in graphs if graph.device.kind == "cpu" and graph.predicted_ns]
    if not planned:
        return None
    num_roles, serial_ns = len({graph.role for graph in planned}), sum(graph.serial_ns for graph in planned)
    if serial_ns < SHORTEST_NS * num_roles:
        return None
    predicted_ns = sum(graph.predicted_ns for graph in planned)
    return Outlook(whole_ns=serial_ns + WHOLE_NS * num_roles, predicted_ns=predicted_ns)


def planned_state(name: str, outlook: Outlook | None) -> State:
    """Return the state of a Dynamo graph that was only planned."""
    if outlook is None:
        return State(graph=name, stage=Stage.PLANNED, detail="only your own steps can tell whether it helps")
    return State(graph=name, stage=outlook.stage, detail=str(outlook))
