from __future__ import annotations

import random
from dataclasses import replace

import pytest

from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.problem import ExecutionMode, Problem, ResourceHold, Task
from tests.builders import a_task, on_halves, realistic_problems
from tests.planner.oracle import SMALL, find_optimum, ratios_to_optimum


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", SMALL)
def test_the_bound_never_exceeds_the_optimum(kind: str, seed: int) -> None:
    """Exhaustive search knows the truth."""
    problem = SMALL[kind](random.Random(seed))
    optimum = find_optimum(problem)
    assert optimum is None or lower_bound(problem) <= optimum


def test_the_bound_is_tight_on_average() -> None:
    """Within 8 % of the optimum of small random problems, for which paths and loads are hardest to combine."""
    ratios = ratios_to_optimum(5, 2, lambda problem, seed: lower_bound(problem))
    assert sum(ratios) / len(ratios) >= 0.92


@pytest.mark.parametrize("speedup", [1.3, 1.5, 1.8])
def test_the_bound_of_two_unequal_chains_mixes_path_and_load(speedup: float) -> None:
    """61 % and 39 % of the work: side by side until the short one ends, then on all units, is optimal.

    Neither the critical path (610) nor the area (500 x speedup) shows it; only their combination does.
    """
    on_one = round(10 * speedup)
    tasks = [a_task(10, on_one, on_one, before=() if index in (0, 61) else (index - 1,)) for index in range(100)]
    best = 390 * speedup + 220
    assert 0.999 * best <= lower_bound(on_halves(tasks)) <= best


def test_the_bound_adds_what_lies_before_and_behind_a_bottleneck() -> None:
    """Two tasks on one atom, one on all, two on the other atom: neither path (30) nor load (30 on each) shows 50."""
    behind = a_task(30, 10, 10, before=(2,))
    behind = replace(behind, modes=(behind.modes[0], behind.modes[2]))
    problem = on_halves([*2 * [a_task(30, 10)], a_task(10, before=(0, 1)), *2 * [behind]])
    assert lower_bound(problem) == find_optimum(problem) == 50


@pytest.mark.parametrize("scale", [1, 10**12], ids=["few", "bytes"])
@pytest.mark.parametrize("is_held", [False, True])
def test_the_bound_counts_energy_of_renewable_resources(is_held: bool, scale: int) -> None:
    """Five tasks of 4000 x 3, demanded or held, in a capacity of 5: in turn would be 20000, the energy is 60000 / 5.

    Weights of bytes are tiny, and must not be rounded away.
    """
    holds = tuple(ResourceHold(resource=0, amount=3 * scale, task=task, readers=()) for task in range(5) if is_held)
    tasks = 5 * (a_task(4000, demands=(0 if is_held else 3 * scale,)),)
    assert lower_bound(Problem(tasks=tasks, capacities=(5 * scale,), holds=holds)) == 12_000


def test_a_mode_that_never_fits_does_not_weaken_the_bound() -> None:
    """It asks for more than there is."""
    modes = (ExecutionMode(duration=10), ExecutionMode(duration=1, demands=(9,)))
    assert lower_bound(Problem(tasks=(Task(modes=modes, predecessors=()),), capacities=(5,))) == 10


@pytest.mark.parametrize(("name", "gap"), [("clip 18 split", 0.004), ("microbatches 8 x 3+4 split", 0.006)])
def test_the_bound_of_real_models_is_near_a_known_schedule(name: str, gap: float) -> None:
    """Annealing found schedules of these makespans, so no bound is above them; a good one is just below."""
    known = {"clip 18 split": 17_453_880, "microbatches 8 x 3+4 split": 216_810_000}[name]
    assert (1 - gap) * known <= lower_bound(realistic_problems()[name]) <= known
