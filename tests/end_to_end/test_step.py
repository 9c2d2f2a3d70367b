"""Training steps as one program: the numbers of the loop over micro-batches, whatever the model and the optimizer.

`step_cases` has many more trainings that are hard to get right.
"""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import re
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from apollo_compile.errors import ConfigError, TargetError
from apollo_compile.reports.report import Report
from apollo_compile.reports.values import Stage
from apollo_compile.session.step.split import split_evenly
from apollo_compile.step import Step
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
    state_of,
)


def test_batches_may_have_different_numbers_of_micro_batches() -> None:
    """A split into parts of one size runs one graph, and has a program for every number of parts."""
    twins = Twins(split=lambda batch, _: split_evenly(batch, len(batch["x"]) // 8))
    for seed in range(8):
        twins.take(chain_batch(seed, size=8 * (2 + seed % 2)))
    assert len(twins.step.verdicts) == 2 and ran_as_program(twins.step)


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


def test_variants_of_a_step_are_compared_and_one_stays() -> None:
    """The loop, the program and its segments in turn; numbers are right all the time."""
    twins = Twins(count=2, options={**EAGER, "plan.autotune": True, "plan.compile_share": 1e6})
    step, left = twins.step, []
    for seed in range(3000):
        twins.take(chain_batch(seed))
        left += [state.num_steps for state in step.states if state.stage is Stage.MEASURING]
        if step.tuners and step.tuners[0].is_settled and not step.tuners[0].is_more_to_come:
            break
    (verdict,) = step.verdicts
    for variant in ("loop over micro-batches", "loop in eager", "segments in turn", "Inductor, traced step"):
        assert variant in verdict
    assert re.search(r"settled after \d+ measured steps: .*as fast as .*\(.*\)", repr(step))
    assert status(step) in repr(step)
    assert len(left) > 10 and sum(later > before for before, later in itertools.pairwise(left)) < 0.05 * len(left)


def test_frequent_kinds_of_batches_get_programs_until_dynamo_compiles_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """Which it says once; further sizes run as those that are rare."""
    twins = Twins(layer)
    for seed, size in enumerate([size for size in range(4, 16) for _ in range(4)]):
        twins.take(chain_batch(seed, size))
    assert len(twins.step.tuners) == torch._dynamo.config.recompile_limit and not twins.step.reasons_for_loops
    assert sum("hit config" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("count", [1, 2])
def test_batches_whose_size_changes_in_every_step_are_compiled_for_all_sizes(count: int) -> None:
    """As lengths of texts do; once a size has come three times, it has a program."""
    twins = Twins(layer, count=count)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for seed, size in enumerate([*range(8, 30, 2), 12, 12, 12]):
        twins.take(chain_batch(seed, size))
        num_compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
        assert num_compiled <= (3 if seed < 12 else 4), "the first size, one for others, all sizes; and a frequent one"
    assert len(twins.step.tuners) == 2 and num_compiled == 4


def test_parts_of_different_sizes_are_compiled_for_all_sizes() -> None:
    """As where a batch is split by length."""

    def split(batch: Batch, count: int) -> list[Batch]:
        rows = len(batch["x"]) // 2 - 1
        return [{name: each[part] for name, each in batch.items()} for part in (slice(rows), slice(rows, None))]

    twins = Twins(layer, count=2, split=split)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for seed, size in enumerate(range(10, 40, 2)):
        twins.take(chain_batch(seed, size))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 6


def test_weights_are_read_in_every_step_of_a_loop_inside_of_autocast() -> None:
    """Autocast keeps its copies of weights as long as it is on, which a loop in eager would read."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = compile_step(model, chain_loss, optimizer, options={**EAGER, "plan.autotune": True})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [float(step(chain_batch(0))) for _ in range(60)]
    assert "eager" not in str(step.verdicts)
    assert all(later < earlier for earlier, later in itertools.pairwise(losses[:20]))


@pytest.mark.soak
def test_a_later_process_begins_with_what_was_found(tmp_path: Path) -> None:
    """The verdict about a step is kept as those about graphs are, for this class of optimizer."""
    options = {"device.cache": str(tmp_path)}
    verdicts = []
    for make_optimizer in (torch.optim.AdamW, torch.optim.AdamW, torch.optim.Adam):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        step = compile_step(model, chain_loss, make_optimizer(model.parameters()), microbatches=2, options=options)
        for seed in range(10_000):
            step(chain_batch(seed))
            if step.tuners and step.tuners[0].is_settled:
                break
        verdicts.append(step.tuners[0].verdict)
    first, second, other = verdicts
    assert first is not None and second is not None and other is not None
    assert second.is_remembered and second.winner == first.winner
    assert not first.is_remembered and not other.is_remembered


def test_a_loss_that_the_loss_function_keeps_has_its_value() -> None:
    """The usual way to log it: Dynamo stores what the graph returned, before a program has run."""
    model = Chain()
    logs: dict[str, torch.Tensor] = {}

    def keep(model: nn.Module, batch: Batch) -> torch.Tensor:
        loss = chain_loss(model, batch)
        logs["loss"] = loss
        return loss

    step = compile_step(model, keep, options=EAGER)
    for seed in range(4):
        loss = step(chain_batch(seed))
        torch.testing.assert_close(logs["loss"].detach(), loss)
    assert ran_as_program(step)


def test_every_step_of_a_process_may_be_a_program() -> None:
    """Dynamo's limit of compiles is for each of them, as in a sweep over settings."""
    steps = [compile_step(nn.Sequential(nn.Linear(16, 16)), chain_loss, options=EAGER) for _ in range(10)]
    for step in steps:
        for seed in range(2):
            step(chain_batch(seed, 4))
    assert all(ran_as_program(step) for step in steps)


def test_memory_is_traded_for_overlap_within_the_quota(caplog: pytest.LogCaptureFixture) -> None:
    """Micro-batches in turn need the least; a quota below that is refused with what would work."""
    wide = {name: torch.randn(64, 64) for name in ("x", "y")}

    def plan(quota: int | None) -> Step:
        torch._dynamo.reset()
        model = Chain(width=64)
        options = {**EAGER, **({} if quota is None else {"plan.memory_quota": quota})}
        step = compile_step(model, chain_loss, torch.optim.SGD(model.parameters()), microbatches=4, options=options)
        for _ in range(2):
            step(wide)
        return step

    (free,) = report(plan(None)).graphs
    with caplog.at_level(logging.WARNING, "apollo_compile"):
        assert "loop" in plan(100_000).verdicts[0]
    least = re.search(r"raise 'plan.memory_quota' to (\d+) bytes", caplog.text)
    assert least is not None
    tight, half = (report(plan(quota)).graphs[0] for quota in (int(least[1]), (int(least[1]) + free.peak_bytes) // 2))
    for summary in (tight, half):
        assert summary.memory_quota is not None
        assert summary.peak_bytes <= summary.memory_quota
    assert free.predicted_ns <= half.predicted_ns <= tight.predicted_ns


def breaks_the_graph(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss after a graph break."""
    torch._dynamo.graph_break()
    return chain_loss(model, batch)


def test_a_report_shows_the_phases_of_a_step() -> None:
    """Micro-batches overlap phase by phase, and what cannot be linked says why."""
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
    refused = compile_step(Chain(), breaks_the_graph, options=EAGER)
    refused(chain_batch(0))
    assert "falls back: loop over micro-batches" in str(report(refused))
    assert status(refused) == str(report(refused)).splitlines()[0]


def test_a_step_is_planned_without_training_as_it_will_be() -> None:
    """The same segments on the same lanes as the program that runs later; nothing has changed before."""
    model = Chain(dropout=0.5)
    own = torch.optim.AdamW(model.parameters())
    before = state_of(model)
    settings = {"microbatches": 2, "clip_grad_norm": 1.0, "options": EAGER}
    planned = explain_step(model, chain_loss, chain_batch(0), own, **settings)
    torch.testing.assert_close(state_of(model), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not own.state
    step = compile_step(model, chain_loss, own, **settings)
    for seed in range(2):
        step(chain_batch(seed))
    (expected,), (found,) = planned.graphs, report(step).graphs
    assert sorted(each.name for each in found.segments) == sorted(each.name for each in expected.segments)
    assert str(planned).startswith("planned")
    refused = explain_step(model, breaks_the_graph, chain_batch(0), own, **settings)
    assert "falls back: loop over micro-batches: the loss function is not one graph" in str(refused)


def test_a_step_that_keeps_gradients_is_planned_with_their_memory() -> None:
    """Of six layers whose gradients are larger than all else, none is alive longer than its update otherwise."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    own = torch.optim.AdamW(model.parameters())
    options = {**EAGER, "plan.planner": "serial"}
    planned = partial(explain_step, model, lambda m, x: m(x).square().mean(), torch.randn(2, 128), own, options=options)
    kept, released = (planned(keep_gradients=keeps).graphs[0].peak_bytes for keeps in (True, False))
    assert kept > 1.5 * released


def test_a_step_that_keeps_tensors_is_not_predicted_a_program() -> None:
    """It would not be linked either."""
    kept = []

    def keeps(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = chain_loss(model, batch)
        kept.append(loss * 2)
        return loss

    planned = explain_step(Chain(), keeps, chain_batch(0), options=EAGER)
    assert "loop over micro-batches: the loss function keeps tensors besides those that it returns" in str(planned)


@pytest.mark.parametrize(
    ("model", "loss_fn", "arguments", "problem"),
    [
        (Chain(), chain_loss, {"microbatches": "auto"}, "'auto'; expected a number of at least 1; it is no longer"),
        (Chain(), chain_loss, {"clip_grad_norm": -1.0}, r"clip_grad_norm is -1\.0; expected a norm above 0"),
        (Chain(), chain_loss, {"clip_grad_norm": "1"}, "clip_grad_norm is '1'; expected a norm above 0"),
        (torch.compile(Chain()), chain_loss, {}, "is compiled already"),
        (chain_loss, chain_loss, {}, r"of a function: expected a torch\.nn\.Module"),
        (Chain(), chain_loss, {"optimizer": chain_loss}, "optimizer is a function; expected an optimizer"),
        (Chain(), chain_loss, {"optimizer": torch.optim.SGD}, "optimizer is the class SGD; expected an optimizer"),
        (Chain(), torch.optim.SGD(layer().parameters()), {}, r"loss_fn is a SGD; expected a function, loss_fn\(model"),
    ],
)
def test_wrong_arguments_are_refused_in_words(
    model: Any, loss_fn: Any, arguments: dict[str, Any], problem: str
) -> None:
    """Before anything is compiled; `step_cases` has more."""
    with pytest.raises((ConfigError, TargetError), match=problem):
        compile_step(model, loss_fn, **arguments)


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
