from __future__ import annotations

import random

import pytest

from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.problem import ExecutionMode, Problem, ResourceHold, Task
from tests.builders import random_problem, realistic_problems
from tests.planner.oracle import SMALL, find_optimum


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", SMALL)
def test_the_bound_never_exceeds_the_optimum(kind: str, seed: int) -> None:
    """Exhaustive search knows the truth."""
    problem = SMALL[kind](random.Random(seed))
    optimum = find_optimum(problem)
    assert optimum is None or lower_bound(problem) <= optimum


def test_the_bound_is_tight_on_average() -> None:
    """Within 8 % of the optimum of small random problems, for which paths and loads are hardest to combine."""
    ratios = []
    for seed in range(25):
        problem = random_problem(random.Random(seed), 5, 2)
        ratios.append(lower_bound(problem) / (find_optimum(problem) or 0))
    print(f"bound / optimum: mean {sum(ratios) / len(ratios):.4f}, min {min(ratios):.4f}")
    assert sum(ratios) / len(ratios) >= 0.92


@pytest.mark.parametrize("speedup", [1.3, 1.5, 1.8])
def test_the_bound_of_two_unequal_chains_mixes_path_and_load(speedup: float) -> None:
    """61 % and 39 % of the work: side by side until the short one ends, then on all units, is optimal.

    Neither the critical path (610) nor the area (500 x speedup) shows it; only their combination does.
    """
    tasks = []
    for start, total in ((0, 610), (61, 390)):
        for index in range(total // 10):
            modes = tuple(
                ExecutionMode(lane=lane, duration=10 if lane == 0 else round(10 * speedup)) for lane in range(3)
            )
            tasks.append(Task(modes=modes, predecessors=(start + index - 1,) if index else ()))
    lanes = (frozenset({0, 1}), frozenset({0}), frozenset({1}))
    best = 390 * speedup + 220
    assert 0.999 * best <= lower_bound(Problem(tasks=tuple(tasks), lanes=lanes, atom_sizes=(1, 1))) <= best


def test_the_bound_adds_what_lies_before_and_behind_a_bottleneck() -> None:
    """Two tasks on one atom, one on all, two on the other atom: neither path (30) nor load (30 on each) shows 50."""
    wide, one, other = (
        ExecutionMode(lane=0, duration=30),
        ExecutionMode(lane=1, duration=10),
        ExecutionMode(lane=2, duration=10),
    )
    tasks = (
        *(Task(modes=(wide, one), predecessors=()) for _ in range(2)),
        Task(modes=(ExecutionMode(lane=0, duration=10),), predecessors=(0, 1)),
        *(Task(modes=(wide, other), predecessors=(2,)) for _ in range(2)),
    )
    lanes = (frozenset({0, 1}), frozenset({0}), frozenset({1}))
    problem = Problem(tasks=tasks, lanes=lanes, atom_sizes=(1, 1))
    assert lower_bound(problem) == find_optimum(problem) == 50


@pytest.mark.parametrize("is_held", [False, True])
def test_the_bound_counts_energy_of_renewable_resources(is_held: bool) -> None:
    """Five tasks of 4 x 3, demanded or held, in a capacity of 5: in turn would be 20, the energy is 60 / 5."""
    mode = ExecutionMode(duration=4, demands=(0 if is_held else 3,))
    holds = tuple(ResourceHold(resource=0, amount=3, task=task, readers=()) for task in range(5) if is_held)
    tasks = tuple(Task(modes=(mode,), predecessors=()) for _ in range(5))
    assert lower_bound(Problem(tasks=tasks, capacities=(5,), holds=holds)) == 12


def test_a_mode_that_never_fits_does_not_weaken_the_bound() -> None:
    """It asks for more than there is."""
    modes = (ExecutionMode(duration=10), ExecutionMode(duration=1, demands=(9,)))
    assert lower_bound(Problem(tasks=(Task(modes=modes, predecessors=()),), capacities=(5,))) == 10


def test_huge_amounts_do_not_weaken_the_bound() -> None:
    """Bytes: weights of such a resource are tiny, and must not be rounded away."""
    tasks = tuple(Task(modes=(ExecutionMode(duration=4000, demands=(3 * 10**12,)),), predecessors=()) for _ in range(5))
    assert lower_bound(Problem(tasks=tasks, capacities=(5 * 10**12,))) == 12_000


@pytest.mark.parametrize(("name", "gap"), [("clip 18 split", 0.004), ("microbatches 8 x 3+4 split", 0.006)])
def test_the_bound_of_real_models_is_near_a_known_schedule(name: str, gap: float) -> None:
    """Annealing found schedules of these makespans, so no bound is above them; a good one is just below."""
    known = {"clip 18 split": 17_453_880, "microbatches 8 x 3+4 split": 216_810_000}[name]
    assert (1 - gap) * known <= lower_bound(realistic_problems()[name]) <= known
