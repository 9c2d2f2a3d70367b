"""Training steps as one program: the numbers of the loop over micro-batches, whatever the model and the optimizer.

`step_cases` has many more trainings that are hard to get right.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from apollo_compile.reports.report import Report
from apollo_compile.session.step.split import split_evenly
from apollo_compile.tools.explain_step import explain_step
from apollo_compile.tools.report import report, status
from tests.end_to_end.twins import (
    EAGER,
    Batch,
    Chain,
    Twins,
    chain_batch,
    chain_loss,
    compile_step,
    layer,
    ran_as_program,
    run_loop,
)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("clip", [None, 0.1])
def test_programs_give_the_bits_of_the_compiled_loop_with_deterministic_algorithms(clip: float | None) -> None:
    """Sums, the norm and the optimizer do the same arithmetic in the same order."""
    model = Chain(dropout=0.5)
    expected = copy.deepcopy(model)
    own, others = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, expected))
    step = compile_step(model, chain_loss, own, microbatches=4, clip_grad_norm=clip, options=EAGER)
    run = torch.compile(lambda part: chain_loss(expected, part), backend="apollo", options=EAGER, dynamic=False)
    for seed in range(4):
        torch.manual_seed(seed)
        loss = step(chain_batch(seed))
        torch.manual_seed(seed)
        wanted = run_loop(expected, lambda _, part: run(part), split_evenly(chain_batch(seed), 4), others, clip)
        assert torch.equal(loss, wanted)
        assert all(map(torch.equal, model.parameters(), expected.parameters()))
    assert ran_as_program(step)


def test_one_tensor_may_be_there_twice_and_not_the_next_time() -> None:
    """As where labels are the inputs themselves at first."""
    twins = Twins()
    for seed in range(4):
        batch = chain_batch(seed)
        twins.take({**batch, "y": batch["x"]} if seed < 2 else batch)


def test_parameters_can_be_swapped_between_steps() -> None:
    """Swap as `load_state_dict` may; torch refuses where somebody refers to a parameter weakly."""
    twins = Twins(layer)
    for seed in range(4):
        if seed == 2:
            for each in twins.both:
                each.zero_grad()
                torch.utils.swap_tensors(each[0].weight, nn.Parameter(0.5 * each[0].weight.detach()))
        twins.take(chain_batch(seed))
    assert ran_as_program(twins.step)


def test_a_report_shows_the_phases_of_a_step() -> None:
    """Micro-batches overlap phase by phase."""
    model = Chain()
    step = compile_step(model, chain_loss, torch.optim.SGD(model.parameters()), microbatches=2, options=EAGER)
    for seed in range(3):
        step(chain_batch(seed))
    shown = report(step)
    (summary,) = shown.graphs
    assert summary.branches == ("forward", "backward", "update")
    assert summary.measured is not None
    assert {pair.first for pair in summary.pairs} <= set(summary.branches)
    assert str(shown).startswith("settled")
    assert status(step) == str(shown).splitlines()[0]
    assert shown.metrics()["apollo/settled"] == 1
    assert Report.from_json(shown.to_json()) == shown


class Trainer:
    """Knows its step, whose loss function is a method of it."""

    def __init__(self) -> None:
        self.model = Chain()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = compile_step(self.model, self.loss_of, optimizer, options={**EAGER, "plan.autotune": True})

    def loss_of(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss."""
        return chain_loss(model, batch)


def test_a_trainer_whose_loss_function_knows_its_step_goes_with_it() -> None:
    """And all that was linked, although Dynamo keeps graphs; also while programs are compared with what calls that."""
    trainer = Trainer()
    for _ in range(1000):
        trainer.step(chain_batch(0))
        if trainer.step.tuners and "measuring" in trainer.step.verdicts[0]:
            break
    model, step = trainer.model, trainer.step
    references = list(map(weakref.ref, (trainer, step, model, step.tuners[0], model.layers[0][0].weight)))
    del trainer, model, step
    gc.collect()
    assert [reference() for reference in references] == 5 * [None]


class Output(NamedTuple):
    loss: torch.Tensor


class OwnLoss(nn.Module):
    """A model that returns its loss, as those of Hugging Face do, by attribute or by name."""

    def __init__(self, is_named: bool) -> None:
        super().__init__()
        self.chain, self.is_named = Chain(), is_named

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = chain_loss(self.chain, {"x": x, "y": y})
        return {"loss": loss} if self.is_named else Output(loss=loss)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_model_that_computes_its_loss_needs_no_loss_function(is_named: bool) -> None:
    """It is called with the entries of the batch by name; the plan before training has the same segments."""
    model = OwnLoss(is_named)
    same = copy.deepcopy(model.chain)
    step = compile_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1), options=EAGER)
    optimizer = torch.optim.SGD(same.parameters(), lr=0.1)
    for seed in range(3):
        loss = step(chain_batch(seed))
        torch.testing.assert_close(loss, run_loop(same, chain_loss, [chain_batch(seed)], optimizer))
    assert len(explain_step(model, None, chain_batch(0), options=EAGER).graphs) == 1


def test_copies_of_a_step_train_copies_of_the_model() -> None:
    """As where a module that holds its step is copied for an average of its weights, or saved whole."""
    model = layer()
    step = compile_step(model, chain_loss, torch.optim.SGD(model.parameters()), options=EAGER)
    holder = {"model": model, "step": step}
    step(chain_batch(0))
    for copied in (copy.deepcopy(holder), pickle.loads(pickle.dumps(holder))):
        before = copy.deepcopy(model.state_dict())
        copied["step"](chain_batch(1))
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert not torch.equal(copied["model"][0].weight, model[0].weight)


def test_a_step_that_was_never_taken_says_so() -> None:
    """Say nothing about compiled models that are to be called."""
    step = compile_step(layer(), chain_loss)
    assert repr(step) == "<step of Sequential, measuring: no step is compiled yet>"
    assert status(step) == str(report(step)).strip() == "measuring: no step is compiled yet"


def test_a_step_that_is_disabled_says_so() -> None:
    """It is a loop over what torch.compile makes, with nothing to report."""
    twins = Twins(optimize=partial(torch.optim.SGD, lr=0.1), options={"disable": True})
    for seed in range(3):
        twins.take(chain_batch(seed))
    line = "falls back: loop over micro-batches: the option disable or APOLLO_DISABLE is set"
    assert status(twins.step) == line
    assert line in repr(twins.step) and line in str(report(twins.step))


def test_a_step_without_measuring_counts_only_the_steps_until_its_plans_are_final() -> None:
    """The variants do not take turns after the loop, so no steps of a comparison are left."""
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    options = {**EAGER, "plan.autotune": False, "plan.replan": True, "partition.min_segment_share": 0.01}
    step = compile_step(model, lambda model, x: model(x).square().mean(), options=options)
    step(torch.randn(2, 16))
    line = status(step)
    assert line.endswith("the loop first") and int(line.split()[2]) < 50, line
