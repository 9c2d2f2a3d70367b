"""Which variants take the steps of a program: they are compared, and the fastest stays."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from apollo_compile.ir import Role, Variant
from apollo_compile.reports.values import Stage
from apollo_compile.session import registry
from apollo_compile.session.step.tuning import StepTuner
from apollo_compile.session.warm_start import WarmStart
from apollo_compile.tools.report import status
from tests.autotune.machine import earlier
from tests.end_to_end.step_cases.turns import compile_nothing
from tests.end_to_end.twins import EAGER, Twins, chain_batch, chain_loss, compile_step
from tests.session.step.towers import COMPARED, batch_of, loss_of, make_towers


def test_variants_of_a_step_are_compared_and_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop, the program and its segments in turn; numbers are right all the time."""
    compile_nothing(monkeypatch)
    twins = Twins(count=2, options=COMPARED)
    step, left = twins.step, []
    for seed in range(3000):
        twins.take(chain_batch(seed))
        left += [state.num_steps for state in step.states if state.stage is Stage.MEASURING]
        if step.tuners and step.tuners[0].is_settled and not step.tuners[0].is_more_to_come:
            break
    (verdict,) = step.verdicts
    for variant in (Variant.LOOP, Variant.EAGER, Variant.SERIAL, Variant.TRACED):
        assert variant in verdict
    assert re.search(r"settled after \d+ measured steps: .*as fast as .*\(.*\)", repr(step))
    assert status(step) in repr(step)
    assert len(left) > 10 and sum(later > before for before, later in itertools.pairwise(left)) < 0.1 * len(left)


@pytest.mark.soak
def test_a_later_process_begins_with_what_was_found(tmp_path: Path) -> None:
    """The verdict about a step is kept as those about graphs are, for this class of optimizer."""
    verdicts = []
    for make_optimizer in (torch.optim.AdamW, torch.optim.AdamW, torch.optim.Adam):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        options = {"device.cache": str(tmp_path)}
        step = compile_step(model, chain_loss, make_optimizer(model.parameters()), microbatches=2, options=options)
        for seed in range(10_000):
            step(chain_batch(seed))
            if step.tuners and step.tuners[0].is_settled:
                break
        verdicts.append(step.tuners[0].verdict)
    first, second, other = verdicts
    assert first is not None and second is not None and other is not None
    assert second.winner in first.close and (second.is_remembered or len(first.close) > 1)
    assert not first.is_remembered and not other.is_remembered


@pytest.mark.parametrize(("margin", "bodies"), [(1.0, "native"), (0.01, "eager")], ids=["by far", "by little"])
def test_where_the_loop_won_in_an_earlier_process_its_graphs_are_compared(
    margin: float, bodies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, or once the variants of the step that were close to it have lost again; the step is settled then."""
    compile_nothing(monkeypatch)
    found = SimpleNamespace(verdict=earlier(Variant.LOOP, Variant.PLAN, margin=margin))
    # The loop's graphs are new.
    monkeypatch.setattr(WarmStart, "recall", lambda _, capture, __: found if capture.role is Role.STEP else None)
    model = make_towers()
    options = {**EAGER, "runtime.bodies": bodies, "plan.autotune": True}
    step = compile_step(model, loss_of, microbatches=2, options=options)
    while not step.tuners:
        step(batch_of(0))
    (compiled,) = registry.find_models(model)
    assert compiled.tuner.is_paused == (margin < 0.05)
    (tuner,), before = step.tuners, ""
    while not tuner.is_settled:
        before = status(step)
        step(batch_of(0))
    assert compiled.tuner.is_settled and "measuring" in before and "settled" in status(step)
    if margin > 0.05:  # nothing but the loop ran
        assert compiled.verdict is not None and tuner.current is Variant.LOOP
        assert re.search(r"about \d+ steps? .*left: graphs of the loop over micro-batches: \S+", before)
        assert f"measured in an earlier run; its graphs: {compiled.verdict.winner}" in status(step)


@pytest.fixture
def every_variant(monkeypatch: pytest.MonkeyPatch) -> set[Variant]:
    """Note which variants ran steps."""
    ran: set[Variant] = set()
    begin = StepTuner.begin_step

    def note(tuner: StepTuner, number: int) -> Variant:
        variant = begin(tuner, number)
        ran.add(variant)
        return variant

    monkeypatch.setattr(StepTuner, "begin_step", note)
    return ran


def test_a_step_does_not_wait_for_a_compile_that_its_training_does_not_pay_for(every_variant: set[Variant]) -> None:
    """Within the first steps of a run, Inductor compiles no whole step to compare with."""
    step = compile_step(make_towers(), loss_of, options={**EAGER, "plan.autotune": True})
    while not (step.tuners and step.tuners[0].is_settled):
        step(batch_of(0))
    assert Variant.TRACED not in every_variant and step.tuners[0].is_more_to_come


@pytest.mark.parametrize(
    ("bodies", "count", "norm"),
    [
        ("eager", 1, False),
        ("native", 1, False),
        *(pytest.param("eager", count, True, marks=pytest.mark.soak) for count in (1, 2)),
        *(pytest.param("native", *rest, marks=pytest.mark.soak) for rest in ((1, True), (2, False), (2, True))),
    ],
)
def test_a_seed_decides_the_numbers_whatever_runs(
    bodies: str, count: int, norm: bool, every_variant: set[Variant]
) -> None:
    """The same seed before every step: one loss, and one state of the generator behind it."""
    model = nn.Sequential(make_towers(dropout=0.5, depth=1), nn.BatchNorm1d(16) if norm else nn.Identity())
    step = compile_step(model, loss_of, microbatches=count, options={**COMPARED, "runtime.bodies": bodies})
    found = set()
    for _ in range(3000):
        model.zero_grad()
        torch.manual_seed(1)
        loss = float(step(batch_of(0)))
        norm_of_gradient = float(next(model.parameters()).grad.norm())
        found.add((round(loss, 4), round(norm_of_gradient, 4), int(torch.get_rng_state().sum())))
        if step.tuners and step.tuners[0].is_settled and not step.tuners[0].is_more_to_come:
            break
    assert len(found) == 1 and {Variant.LOOP, Variant.TRACED} < every_variant
