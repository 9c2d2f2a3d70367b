"""Numbers of reports for dashboards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apollo_compile.ir import Standing, Variant, Verdict
from apollo_compile.reports.summary import summarize
from apollo_compile.reports.values import Stage, State
from tests.reports.reports import VERDICT, report_of
from tests.reports.test_summary import NOTHING, RUN, compilation


def verdict_of(winner: str, **ratios: float) -> Verdict:
    """Return a verdict of steps that take 2 ms, with the ratios of the other variants by name of the member."""
    names = {winner: 1.0, **{Variant[name]: ratio for name, ratio in ratios.items()}}
    standings = [Standing(name=name, step_ns=2e6 * ratio, ratio=ratio, num_rounds=5) for name, ratio in names.items()]
    return Verdict(standings=tuple(standings), num_steps=30)


def test_all_numbers_of_a_settled_model_are_known() -> None:
    """One graph on lanes, one that falls back; 200 of the 1000 ns of the run had two lanes at work."""
    graph = summarize(compilation(), RUN)
    report = report_of(
        graph,
        fallbacks=(("1/0", "nothing to gain"),),
        verdicts=(("0/0", verdict_of(Variant.PLAN, SERIAL=1.5, INDUCTOR=1.2)),),
        states=(State(graph="0/0", stage=Stage.SETTLED), State(graph="1/0", stage=Stage.FALLS_BACK)),
    )
    assert report.metrics() == pytest.approx(
        {
            "apollo/settled": 1,
            "apollo/graphs_on_lanes": 1,
            "apollo/graphs_in_turn": 0,
            "apollo/graphs_in_inductor": 0,
            "apollo/fallbacks": 1,
            "apollo/step_ms": 2,
            "apollo/gain_over_serial": 1.5,
            "apollo/gain_over_inductor": 1.2,
            "apollo/predicted_gain": 560 / 510,
            "apollo/overlap": graph.latest.overlap,
            "apollo/peak_bytes": graph.peak_bytes,
        }
    )
    assert graph.latest.overlap > 0
    assert all(type(value) is float for value in report.metrics().values())


def test_what_is_not_known_yet_has_no_entry() -> None:
    """A plan without a measured run; nothing at all; a report of old, without states."""
    found = report_of(summarize(compilation(), NOTHING), states=(State(graph="0/0", stage=Stage.MEASURING),)).metrics()
    assert found["apollo/settled"] == 0
    assert not {"apollo/step_ms", "apollo/gain_over_serial", "apollo/overlap"} & found.keys()
    counts = {"graphs_on_lanes", "graphs_in_turn", "graphs_in_inductor", "fallbacks"}
    assert report_of().metrics() == {f"apollo/{name}": 0.0 for name in counts}


def test_gains_are_of_all_graphs_or_there_is_none() -> None:
    """Two models of 2 + 2 ms, whose segments in turn take 3 + 5 ms; only one of them was compared with Inductor."""
    verdicts = (verdict_of(Variant.PLAN, SERIAL=1.5), verdict_of(Variant.PLAN, SERIAL=2.5, INDUCTOR=1.1))
    found = report_of(verdicts=tuple(("0/0", verdict) for verdict in verdicts)).metrics()
    assert found["apollo/step_ms"] == 4
    assert found["apollo/gain_over_serial"] == pytest.approx(2)
    assert "apollo/gain_over_inductor" not in found
    step = report_of(verdicts=(("a step", verdict_of(Variant.PLAN, TRACED=1.2)),)).metrics()
    assert step["apollo/gain_over_inductor"] == pytest.approx(1.2)


def test_a_graph_on_one_lane_has_no_overlap() -> None:
    """Whether its plan is serial, or it runs a plan of lanes in turn, or in Inductor."""
    serial, lanes = summarize(compilation("****"), NOTHING), summarize(compilation(), RUN)
    graphs = (serial, *(replace(lanes, variant=variant) for variant in (Variant.SERIAL, Variant.INDUCTOR)))
    found = report_of(*graphs, verdicts=(("0/0", VERDICT),)).metrics()
    assert (found["apollo/graphs_on_lanes"], found["apollo/graphs_in_turn"]) == (0, 2)
    assert (found["apollo/graphs_in_inductor"], found["apollo/overlap"]) == (1, 0)
    assert found["apollo/gain_over_inductor"] == 1
    assert found["apollo/gain_over_serial"] == pytest.approx(1.25)
