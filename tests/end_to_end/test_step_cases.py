"""A training step beside the loop in eager, for trainings that are hard to get right, with every variant in turn.

The cases are in `step_cases`, by subject. After every step, losses, parameters, buffers, gradients, the optimizer's
state and the batch are compared.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from apollo_compile.step import Step, compile_step
from tests.end_to_end.step_cases import batches, changes, losses, modules, optimizers, parameters, precision, settings
from tests.end_to_end.step_cases.cases import MAX_STEPS, MAX_STEPS_COMPILED, STEPS, TABLE, Case, End, Training
from tests.end_to_end.step_cases.compare import copy_values, find_difference
from tests.end_to_end.step_cases.turns import Turns, compile_nothing, offers, take_turns

SUBJECTS = (optimizers, parameters, modules, losses, batches, changes, precision, settings)
"""What fills the table."""

OPTIONS = {
    "debug.strict": True,
    "plan.replan": False,
    "plan.min_gain": 0.0,
    "plan.time_limit_s": 0.2,
    "partition.min_segment_share": 0.05,
}
"""Defects are raised, and plans have lanes where there are any."""

_EVERY_TIME = """
a tuple; a batch with everything; two sizes in turn; weights by words; a layer is frozen; everything is saved and loaded
an error in the forward; deterministic algorithms; autocast around the step; a term only where a mask has something
a division by a number; a loss in float64; a penalty of gradients; batch norm with a cumulative average; dropout
attention with a causal mask; an embedding with padding; checkpointing; a hook that comes and goes; a reversed gradient
SGD with Nesterov; Adam with fused; AdamW with amsgrad; NAdam; a rate that decays; groups with settings of their own
hooks on the step of an optimizer; bfloat16 with SGD; a parameter without dimensions in bfloat16, clipped
a weight every other column, with SGD; tied weights; two parameters in one memory, with AdamW; weight norm
a teacher that follows; gradients are added up, 3 micro-batches; 3 micro-batches of two towers
autocast: memory of weights is written to; autocast: a weight read inside and outside; the loss is kept
parameters without an optimizer; weights are loaded by assignment; the step of an optimizer is replaced
an optimizer of the user; settings of modules change; the model is switched to evaluation
two parameters with one gradient, clipped; a tensor that is replaced; a weight that another step changes
a number that grows from step to step; 2 micro-batches of two towers; a NaN while anomalies are looked for
a dispatch mode comes and goes; a teacher outside of the model; a dataclass split evenly
"""
EVERY_TIME = frozenset(_EVERY_TIME.strip().replace("\n", "; ").split("; "))
"""A tenth of the cases, some of every subject; the others run in `make soak`."""


def parameter_of(case: Case) -> Any:
    """Return a case as a parameter of the test, which is counted by itself."""
    marks = [pytest.mark.robustness("Training steps", case.name, says=case.says)]
    return pytest.param(case, id=case.name, marks=marks if case.name in EVERY_TIME else [*marks, pytest.mark.soak])


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]) -> Iterator[Turns]:
    """Let all variants of steps take turns, and put down which did."""
    turns = take_turns(monkeypatch)
    yield turns
    record_property("variants", dict(turns.num_steps))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # of Dynamo, which does so
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("case", [parameter_of(case) for case in TABLE.values()])
def test_steps_are_those_of_the_loop_in_eager(
    case: Case, turns: Turns, monkeypatch: pytest.MonkeyPatch, info_log: pytest.LogCaptureFixture
) -> None:
    """In each of the steps, whichever variant takes it; where a step has to be a loop, a line says why."""
    if not case.is_compiled:
        compile_nothing(monkeypatch)
    ours, theirs = make_alike(case), make_alike(case)
    bodies = {} if case.is_compiled else {"runtime.bodies": "eager"}
    with torch._inductor.config.patch(fallback_random=True):
        if case.end is End.REFUSED:
            check_refusal(case, ours, theirs)
            return
        step = compile_training(ours, {**OPTIONS, **bodies, **case.options})
        for number in itertools.takewhile(lambda number: is_needed(case, step, turns, number), itertools.count()):
            problem = take_both(case, step, ours, theirs, number)
            assert problem is None, f"step {number} as {' and '.join(turns.latest) or 'the first loop'}: {problem}"
            turns.latest.clear()
    check_end(case, step, turns, info_log.text)


def is_needed(case: Case, step: Step, turns: Turns, number: int) -> bool:
    """Return whether a case needs the step of this number: a program has a variant that has not taken any."""
    if number < STEPS or case.end is not End.PROGRAM:
        return number < STEPS
    is_covered = step.tuners and not any(turns.missing(tuner) for tuner in step.tuners)
    return not is_covered and number < (MAX_STEPS_COMPILED if case.is_compiled else MAX_STEPS)


def make_alike(case: Case) -> Training:
    """Make a copy of a training with the same random numbers as the other one."""
    torch.manual_seed(0)
    return case.make()


def compile_training(training: Training, options: dict[str, Any]) -> Step:
    """Compile the steps of a training."""
    chosen = {name: getattr(training, name) for name in ("microbatches", "clip_grad_norm", "split", "weigh")}
    of = (training.model, training.loss_fn, training.optimizer)
    return compile_step(*of, keep_gradients=True, options=options, **chosen)


def take_both(case: Case, step: Step, ours: Training, theirs: Training, number: int) -> str | None:
    """Take one step of both copies; return where they differ."""
    found = []
    for training, take in ((ours, step), (theirs, theirs.take_step)):
        torch.manual_seed(number)
        training.before(training, number)
        batch = training.batch(number)
        loss: Any = None
        error: Exception | None = None
        with training.around():
            try:
                loss = take(batch)
            except Exception as raised:
                error = raised
        found.append((loss, error, training.observe(batch), torch.get_rng_state()))
    (loss, error, state, randomness), (wanted_loss, wanted_error, wanted_state, wanted_randomness) = found
    if type(error) is not type(wanted_error):
        raise AssertionError(f"step {number} raised {error!r}, eager {wanted_error!r}") from error
    if (error is not None) is not (case.end is End.RAISES) and not case.fails:
        raise AssertionError(f"step {number}, in eager too, raised {error!r}") from error
    if error is not None:  # gradients of some micro-batches may be there
        state.pop("gradients"), wanted_state.pop("gradients")
    elif not torch.equal(randomness, wanted_randomness):
        return "random numbers go on otherwise than in eager"
    return find_difference({"loss": loss, **state}, {"loss": wanted_loss, **wanted_state}, case.rtol, case.atol)


def check_end(case: Case, step: Step, turns: Turns, log: str) -> None:
    """Check that variants took the steps that they are to take, and that a line says why others were loops."""
    if case.end in (End.PROGRAM, End.EITHER):
        assert turns.has_left_the_loop, f"all steps were loops: {step.verdicts}"
    else:
        assert not turns.has_left_the_loop, turns.num_steps
    if case.end is End.PROGRAM:
        assert not step.reasons_for_loops
        assert "a loop" not in log
        offered = {str(variant) for tuner in step.tuners for variant in offers(tuner)}
        assert offered <= turns.num_steps.keys(), f"none of {sorted(offered - turns.num_steps.keys())} took a step"
    if case.end in (End.LOOP, End.EITHER):
        assert re.search(case.reason, log), f"no line says {case.reason!r}: {log}"


def check_refusal(case: Case, ours: Training, theirs: Training) -> None:
    """Check that a step is refused with an error that says why, and has changed nothing."""
    batch = ours.batch(0)
    before = copy_values(theirs.observe(theirs.batch(0)))
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(case.errors, match=case.reason))
        compile_training(ours, {**OPTIONS, "runtime.bodies": "eager", **case.options})(batch)
    after = copy_values(ours.observe(batch))
    after.pop("gradients"), before.pop("gradients")  # where a backward fails, some may be there
    assert find_difference(after, before, 0, 0) is None


def test_the_table_has_cases_enough_and_a_tenth_runs_every_time() -> None:
    """The others run with the marker `soak`."""
    assert len(TABLE) >= 300
    assert TABLE.keys() >= EVERY_TIME
    assert len(EVERY_TIME) >= len(TABLE) // 10
