"""Two chains of tasks on lanes, scheduled exactly, and what that adds to the bound."""

from __future__ import annotations

import itertools
import random

import pytest

from apollo_compile.planner import bounds
from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.problem import Problem
from apollo_compile.planner.two_chains import Chain, shortest_makespan
from tests.builders import a_task
from tests.planner.oracle import find_optimum

LANES = (frozenset({0, 1, 2}), frozenset({0}), frozenset({1, 2}), frozenset({0, 1}), frozenset({2}))


def exhaustive(one: Chain, other: Chain) -> int:
    """Try every mode of every task and every order, each task as early as those before it in the order allow."""
    chains = (one, other)
    tasks = [(chain, task) for chain in (0, 1) for task in range(len(chains[chain].modes))]
    best = None
    for first in itertools.combinations(range(len(tasks)), len(one.modes)):
        positions = [iter(range(len(chain.modes))) for chain in chains]
        order = [(chain, next(positions[chain])) for chain in (int(slot not in first) for slot in range(len(tasks)))]
        for modes in itertools.product(*(chains[chain].modes[task] for chain, task in order)):
            placed: list[tuple[int, int, int]] = []
            for (chain, task), (lane, duration) in zip(order, modes, strict=True):
                blocking = [end for c, where, end in placed if c == chain or LANES[where] & LANES[lane]]
                placed.append((chain, lane, max([chains[chain].heads[task], *blocking]) + duration))
            makespan = max(end + chains[chain].tail for chain, _, end in placed)
            best = makespan if best is None else min(best, makespan)
    return best


def random_chain(rng: random.Random, length: int, heads: int, tail: int) -> Chain:
    """Tasks that are faster on more atoms, by a random amount."""
    modes = []
    for _ in range(length):
        lanes = rng.sample(range(len(LANES)), rng.randrange(1, 4))
        work, scaling = rng.randrange(6, 40), rng.random()
        modes.append(tuple((lane, max(1, round(work / len(LANES[lane]) ** scaling))) for lane in lanes))
    return Chain(
        modes=tuple(modes),
        heads=tuple(sorted(rng.randrange(heads + 1) for _ in range(length))),
        tail=rng.randrange(tail + 1),
    )


@pytest.mark.parametrize("lengths", [(1, 1), (3, 2), (2, 4)])
@pytest.mark.parametrize("seed", range(12))
def test_two_chains_take_as_long_as_exhaustive_search_says(lengths: tuple[int, int], seed: int) -> None:
    """With heads and tails and without."""
    rng = random.Random(seed)
    heads, tail = (0, 0) if seed % 3 == 0 else (60, 30)
    one, other = (random_chain(rng, length, heads, tail) for length in lengths)
    assert shortest_makespan(one, other, LANES) == exhaustive(one, other)


def test_towers_behind_a_stem_and_before_a_head_are_bounded_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the linear program is loose: it runs a layer half on many atoms and half on few."""
    towers = (a_task(50, 110, 70, before=before) for before in ((0,), (1,), (0,), (3,)))
    problem = Problem(tasks=(a_task(50), *towers, a_task(50, before=(2, 4))), lanes=LANES, atom_sizes=(1, 1, 1))
    assert lower_bound(problem) == find_optimum(problem)
    monkeypatch.setattr(bounds, "shortest_makespan", lambda *_: None)
    assert lower_bound(problem) < (find_optimum(problem) or 0)


@pytest.mark.parametrize(("length", "is_left"), [(40, False), (150, True)])
def test_what_takes_too_long_is_left(length: int, is_left: bool) -> None:
    """The linear program's bound remains."""
    rng = random.Random(0)
    one, other = (random_chain(rng, length, 0, 0) for _ in range(2))
    assert (shortest_makespan(one, other, LANES) is None) == is_left
