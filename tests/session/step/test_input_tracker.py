"""Which inputs of a loss function are the same for all micro-batches, and in all steps: by their memory."""

from __future__ import annotations

import torch

from apollo_compile.session.step.input_tracker import FEWEST_STEPS, InputTracker, SharedInputs

FIXED, NEW, BATCH = range(3)
"""A tensor that stays, one that is made for every step, and one for every micro-batch."""


def see(tracker: InputTracker, steps: range, fixed: torch.Tensor, parts: int = 2) -> None:
    """Take steps of a loop."""
    for step in steps:
        new, batch = torch.ones(2), torch.ones(2 * parts)
        for part in batch.chunk(parts):
            tracker.note(step, {FIXED: fixed.view(2), NEW: new, BATCH: part})


def test_what_stays_what_is_shared_and_what_is_neither() -> None:
    """Views of the same memory are the same, and a new tensor is another one wherever it is."""
    tracker, fixed = InputTracker(), torch.ones(2)
    see(tracker, range(FEWEST_STEPS - 1), fixed)
    assert tracker.shared_inputs() == SharedInputs(shared=frozenset({FIXED, NEW}))
    see(tracker, range(FEWEST_STEPS - 1, FEWEST_STEPS), fixed)
    assert tracker.shared_inputs() == SharedInputs(shared=frozenset({FIXED, NEW}), stable=frozenset({FIXED}))
    assert tracker.shared_inputs(besides={FIXED}) == SharedInputs(shared=frozenset({NEW}))
    see(tracker, range(FEWEST_STEPS, 2 * FEWEST_STEPS - 1), torch.ones(2))
    assert tracker.shared_inputs().stable == frozenset()


def test_what_was_different_once_is_never_shared() -> None:
    """Inputs that a step had apart, or that `separate` named, stay apart; one micro-batch alone shares everything."""
    alone = InputTracker()
    see(alone, range(2), torch.ones(2), parts=1)
    assert alone.shared_inputs().shared == {FIXED, NEW, BATCH}
    tracker, fixed = InputTracker(), torch.ones(2)
    see(tracker, range(FEWEST_STEPS), fixed)
    tracker.separate([NEW])
    see(tracker, range(FEWEST_STEPS, 2 * FEWEST_STEPS), fixed, parts=1)
    assert tracker.shared_inputs().shared == {FIXED}


def test_inputs_in_memory_of_the_model_are_found() -> None:
    """Whatever part of it they are."""
    tracker, parameter = InputTracker(), torch.ones(4)
    see(tracker, range(1), parameter[2:])
    assert tracker.is_in([torch.ones(1), parameter]) and not tracker.is_in([torch.ones(4)])
