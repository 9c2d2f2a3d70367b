"""Which inputs of a loss function are the same for all micro-batches, and in all steps: by their memory."""

from __future__ import annotations

import torch

from apollo_compile.session.step.sightings import FEWEST_STEPS, Others, Sightings

FIXED, NEW, BATCH = range(3)
"""A tensor that stays, one that is made for every step, and one for every micro-batch."""


def see(sightings: Sightings, steps: range, fixed: torch.Tensor, parts: int = 2) -> None:
    """Take steps of a loop."""
    for step in steps:
        new, batch = torch.ones(2), torch.ones(2 * parts)
        for part in batch.chunk(parts):
            sightings.note(step, {FIXED: fixed.view(2), NEW: new, BATCH: part})


def test_what_stays_what_is_shared_and_what_is_neither() -> None:
    """Views of the same memory are the same, and a new tensor is another one wherever it is."""
    sightings, fixed = Sightings(), torch.ones(2)
    see(sightings, range(FEWEST_STEPS - 1), fixed)
    assert sightings.others() == Others(shared=frozenset({FIXED, NEW}))
    see(sightings, range(FEWEST_STEPS - 1, FEWEST_STEPS), fixed)
    assert sightings.others() == Others(shared=frozenset({FIXED, NEW}), settled=frozenset({FIXED}))
    assert sightings.others(besides={FIXED}) == Others(shared=frozenset({NEW}))
    see(sightings, range(FEWEST_STEPS, 2 * FEWEST_STEPS - 1), torch.ones(2))
    assert sightings.others().settled == frozenset()


def test_what_was_different_once_is_never_shared() -> None:
    """Neither where it was seen nor where a program was given it."""
    sightings, fixed = Sightings(), torch.ones(2)
    see(sightings, range(FEWEST_STEPS), fixed)
    sightings.separate([NEW])
    see(sightings, range(FEWEST_STEPS, 2 * FEWEST_STEPS), fixed, parts=1)
    assert sightings.others().shared == {FIXED}


def test_one_micro_batch_shares_everything() -> None:
    """There is no other that could have something else."""
    sightings = Sightings()
    see(sightings, range(2), torch.ones(2), parts=1)
    assert sightings.others().shared == {FIXED, NEW, BATCH}


def test_inputs_in_memory_of_the_model_are_found() -> None:
    """Whatever part of it they are."""
    sightings, parameter = Sightings(), torch.ones(4)
    see(sightings, range(1), parameter[2:])
    assert sightings.is_in([torch.ones(1), parameter]) and not sightings.is_in([torch.ones(4)])
