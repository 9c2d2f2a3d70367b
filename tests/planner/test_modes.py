from __future__ import annotations

from apollo_compile.planner.cp_sat import solve_with_cp_sat
from apollo_compile.planner.problem import Mode, Problem, Schedule, Task


def test_a_hint_in_a_mode_that_goes_is_still_a_start() -> None:
    """The slow mode is dominated; the result is the best of the fast ones."""
    modes = (Mode(duration=9, demands=(2,)), Mode(duration=4, demands=(1,)))
    problem = Problem(tasks=(Task(modes=modes, predecessors=()), Task(modes=modes, predecessors=(0,))), capacities=(2,))
    hint = Schedule(modes=(0, 0), starts=(0, 9), makespan=18)
    outcome = solve_with_cp_sat(problem, hint=hint, lower_bound=0, seed=0, deterministic_time=1.0, time_limit_s=60.0)
    assert outcome.schedule == Schedule(modes=(1, 1), starts=(0, 4), makespan=8)
