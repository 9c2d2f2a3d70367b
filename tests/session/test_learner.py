"""A graph learns its durations, and is planned again until its plan is final.

Where runs have no spans, bodies are timed instead: `test_captured.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from apollo_compile.config import load_config
from apollo_compile.ir import BodyId
from apollo_compile.session.learner import MAX_REPLANS, OBSERVED_RUNS, SKIPPED_RUNS, Learner
from apollo_compile.session.variants import Variants
from tests.reports.test_summary import compilation
from tests.session.test_variants import CODE, Device


def learner_on(factor: float, *, pinned: bool = False, strict: bool = False) -> tuple[Learner, Variants]:
    """Return what learns of a diamond, whose segments have a body each and take `factor` times as long as planned."""
    made, device = compilation(), cast(Any, Device(factor=factor))
    graph = made.partition.graph
    own = tuple(replace(each, body=BodyId(each.id)) for each in graph.segments)
    partition = replace(made.partition, graph=replace(graph, segments=own))
    variants = Variants(replace(made, partition=partition, plan=replace(made.plan, pinned=pinned)), CODE, device)
    config = load_config({"plan.planner": "greedy", "plan.time_limit_s": 0.1, "debug.strict": strict})
    return Learner(variants, device, config, is_settled=False), variants


def run_until_settled(learner: Learner, variants: Variants) -> int:
    """Run until the plan is final; return how often."""
    num_runs = 0
    while not learner.is_settled:
        left = learner.runs_left
        variants.run([])
        learner.after_run()
        num_runs += 1
        assert learner.runs_left < left
    assert learner.runs_left == 0
    return num_runs


@pytest.mark.parametrize(("factor", "pinned"), [(1.0, False), (3.0, True)], ids=["its durations hold", "the user's"])
def test_a_plan_that_stays_is_final_after_the_first_runs(factor: float, pinned: bool) -> None:
    """The first run is cold, and no measurement. A plan of the user stays however wrong its durations are."""
    learner, variants = learner_on(factor, pinned=pinned)
    assert learner.is_cold
    assert run_until_settled(learner, variants) == SKIPPED_RUNS + OBSERVED_RUNS
    assert not learner.is_cold and learner.num_replans == 0
    assert [entry.count for entry in learner.observations.entries] == 4 * [OBSERVED_RUNS]


def test_a_plan_whose_durations_are_wrong_is_made_again_a_few_times() -> None:
    """With the measured ones, which are wrong again on this device."""
    learner, variants = learner_on(3.0)
    first = variants.compilation
    assert run_until_settled(learner, variants) == (1 + MAX_REPLANS) * (SKIPPED_RUNS + OBSERVED_RUNS)
    assert learner.num_replans == MAX_REPLANS
    assert variants.compilation.plan.makespan_ns > 3 * first.plan.makespan_ns
    assert variants.compilation.observations.entries


@pytest.mark.parametrize("strict", [False, True])
def test_a_plan_that_cannot_be_measured_is_kept(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    """One warning says why, and nothing is tried again; a defect is raised where the user wants that."""
    learner, variants = learner_on(3.0, strict=strict)
    cast(Any, variants.plan).trace = lambda: [][0]
    if strict:
        with pytest.raises(IndexError):
            run_until_settled(learner, variants)
        return
    assert run_until_settled(learner, variants) == SKIPPED_RUNS + 1
    assert learner.failure == "IndexError: list index out of range" and learner.num_replans == 0
    assert caplog.text.count("test keeps its plan, since measuring or replanning failed: IndexError") == 1
