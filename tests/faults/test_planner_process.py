"""The planner's process: it crashes, hangs, talks rubbish, cannot start; planning goes on without it."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apollo_compile.errors import InfeasiblePlanError
from apollo_compile.planner import apart
from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.problem import ExecutionMode, Problem, ResourceHold, Task
from apollo_compile.planner.simulate import execute, serial_schedule
from apollo_compile.planner.solve import Effort, Solution, solve
from tests.builders import in_threads, interfering, limited, random_problem
from tests.faults.mutations import damaged_json

QUICK = Effort(work_s=0.2, time_limit_s=60.0)
PROBLEM = interfering(random_problem(random.Random(3), 9, 4))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start and end without a process."""
    apart.stop_planner()
    monkeypatch.setattr(apart, "_num_failures", 0)
    monkeypatch.setattr(apart, "_has_warned_of_missing_solver", False)
    yield
    apart.stop_planner()


def pretend(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run `code` in the place of the planner; `say(content)` sends, `channel` is the socket."""
    start = (
        "import json, os, signal, socket, sys, time\n"
        "channel = socket.socket(fileno=json.loads(sys.argv[1])[0])\n"
        "def send(raw): channel.sendall(len(raw).to_bytes(8, 'little') + raw)\n"
        "def say(content): send(json.dumps(content).encode())\n"
    )
    monkeypatch.setattr(apart, "COMMAND", (sys.executable, "-c", start + code))


def check_stand_in(solution: Solution, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """Expect a valid plan of list schedules, and one line that says why."""
    assert PROBLEM.is_valid(solution.schedule)
    assert solution.solver is None
    assert solution.bound <= lower_bound(PROBLEM)
    assert solution.execution.makespan <= serial_schedule(PROBLEM).makespan
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert record.getMessage().startswith("the planner's process failed: ")
    assert reason in record.getMessage()


def test_the_process_finds_what_this_process_would() -> None:
    """Schedules, bounds, candidates and proofs are equal; one process serves all questions."""
    rng = random.Random(7)
    problems = [PROBLEM, limited(rng, random_problem(rng, 8, 2)), random_problem(rng, 1, 4), Problem(tasks=())]
    processes = set()
    for problem in problems:
        assert apart.solve_apart(problem, QUICK) == solve(problem, QUICK)
        assert apart.bound_apart(problem) == lower_bound(problem)
        processes.add(apart._process.process.pid)
    assert len(processes) == 1


def test_an_infeasible_problem_is_the_same_error() -> None:
    """It is an answer, not a failure."""
    tasks = tuple(Task(modes=(ExecutionMode(duration=3, demands=(task,)),), predecessors=()) for task in (1, 4, 2))
    problem = Problem(tasks=tasks, capacities=(5,), holds=(ResourceHold(resource=0, amount=3, task=1, readers=()),))
    with pytest.raises(InfeasiblePlanError, match=r"keeps the capacities \(5,\)"):
        apart.solve_apart(problem, QUICK)
    assert apart._num_failures == 0


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("say({}); channel.recv(8); os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("say({}); channel.recv(8); send(b'no JSON')", "Expecting value"),
        ("say({}); channel.recv(8); send(b'[' * 10**5); time.sleep(600)", "RecursionError"),
        ("say({}); channel.recv(8); say([1]); time.sleep(600)", "a list"),
        ("say({}); channel.recv(8); channel.sendall(b'x' * 10**6); time.sleep(600)", "an answer of"),
        ("say({}); channel.recv(8); say({'solution': {'schedule': 1}}); time.sleep(600)", "has no field"),
        ("say({}); channel.recv(8); say({'error': 'MemoryError: no'}); time.sleep(600)", "MemoryError: no"),
        ("say({}); channel.recv(8); send(bytes(100)[:50]); sys.exit(0)", "Expecting value"),
    ],
)
def test_a_process_that_crashes_or_talks_rubbish_costs_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: str, reason: str
) -> None:
    """List schedules stand in for it."""
    pretend(monkeypatch, code)
    check_stand_in(apart.solve_apart(PROBLEM, QUICK), caplog, reason)


@pytest.mark.parametrize("code", ["time.sleep(600)", "say({}); time.sleep(600)"])
def test_a_process_that_hangs_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    """At its deadline, whether it hangs before or after it is ready."""
    pretend(monkeypatch, code)
    monkeypatch.setattr(apart, "START_LIMIT_S", 1.0)
    monkeypatch.setattr(apart, "GRACE_S", 0.5)
    check_stand_in(apart.solve_apart(PROBLEM, replace(QUICK, time_limit_s=0.5)), caplog, "was killed")
    assert apart._process is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schedule": {"modes": [0] * 9, "starts": [0] * 9, "makespan": 1}}, "breaks a constraint"),
        ({"schedule": {"modes": [7] * 9, "starts": [0] * 9, "makespan": 1}}, "has no mode 7"),
        ({"schedule": {"modes": [], "starts": [], "makespan": 1}}, "schedule has 0 modes"),
        ({"bound": 10**15}, "above its makespan"),
        ({"execution": {"starts": [], "ends": [], "makespan": 0}}, "differs from the one computed here"),
        ({"chosen": 99}, "it chose candidate 99"),
        ({"bound": "short"}, "a value of type int"),
    ],
)
def test_a_wrong_solution_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: dict[str, object], reason: str
) -> None:
    """Everything that follows from the problem is checked here."""
    answer = json.dumps({"solution": {**apart.to_json(solve(PROBLEM, QUICK)), **change}})
    pretend(monkeypatch, f"say({{}}); channel.recv(8); send({answer!r}.encode()); time.sleep(600)")
    check_stand_in(apart.solve_apart(PROBLEM, QUICK), caplog, reason)


@functools.cache
def _answer_content() -> dict[str, object]:
    right = solve(PROBLEM, replace(QUICK, use_solver=False, use_ortools=False))  # which belongs in no test process
    return {"solution": apart.to_json(right), "warnings": []}


@settings(deadline=None)
@given(st.deferred(lambda: damaged_json(_answer_content())))
def test_a_damaged_answer_is_a_valid_solution_or_not_believed(text: str) -> None:
    """Whatever was changed in it; without the process, which would take most of the time."""
    answer = json.loads(text)
    if not isinstance(answer, dict):
        return  # refused where it is received
    try:
        solution = apart._check_answer(PROBLEM, answer)
    except apart._ProcessError:
        return
    assert not PROBLEM.violations(solution.schedule)
    assert solution.execution == execute(PROBLEM, solution.schedule)
    assert 0 <= solution.bound <= solution.schedule.makespan


def test_a_process_that_cannot_start_is_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """After two failures in a row nobody starts it; plans are made all the same."""
    monkeypatch.setattr(apart, "COMMAND", (str(tmp_path / "nothing"),))
    for reason in ("FileNotFoundError", "FileNotFoundError", "not started again"):
        caplog.clear()
        check_stand_in(apart.solve_apart(PROBLEM, QUICK), caplog, reason)
    caplog.clear()
    assert 0 < apart.bound_apart(PROBLEM) <= lower_bound(PROBLEM)
    assert "using a weaker bound" in caplog.text


@pytest.mark.parametrize("code", ["raise ImportError('no solver')", "raise TypeError('another protobuf')"])
def test_without_or_tools_plans_are_list_schedules_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, code: str
) -> None:
    """Not installed, or with a protobuf that it does not work with; the process goes on, and so does the next one."""
    (tmp_path / "ortools.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)  # the process gets the path of this one
    without = solve(PROBLEM, replace(QUICK, use_solver=False, use_ortools=False))
    for _ in range(2):
        assert apart.solve_apart(PROBLEM, QUICK) == without
        assert apart.bound_apart(PROBLEM) == lower_bound(PROBLEM, use_program=False)
        apart.stop_planner()
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    reason = code.removeprefix("raise ").replace("('", ": ").removesuffix("')")
    assert record.getMessage().startswith(f"OR-Tools cannot be imported: {reason}; plans are list schedules")


def test_a_process_that_died_between_two_questions_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """As one that was idle for long: nobody notices."""
    first = apart.bound_apart(PROBLEM)
    apart._process.process.kill()
    apart._process.process.wait()
    assert apart.bound_apart(PROBLEM) == first
    assert not caplog.records


def test_an_interrupt_while_it_works_ends_it_and_the_next_question_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer must not be taken for that to another question."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    with monkeypatch.context() as patch:
        pretend(patch, "say({}); channel.recv(8); os.kill(os.getppid(), signal.SIGINT); time.sleep(600)")
        try:
            with pytest.raises(KeyboardInterrupt):
                apart.solve_apart(PROBLEM, QUICK)
        finally:
            signal.signal(signal.SIGINT, previous)
        assert apart._process is None
    assert apart.bound_apart(PROBLEM) == lower_bound(PROBLEM)


def test_threads_ask_in_turn() -> None:
    """Each gets the answer to its own question."""
    problems = [random_problem(random.Random(seed), 6, 4) for seed in range(6)]
    found: dict[int, int] = {}
    in_threads(lambda number: found.update({number: apart.bound_apart(problems[number])}), len(problems))
    assert [found[number] for number in range(6)] == [lower_bound(problem) for problem in problems]


LEAVE = """
import os, sys, time
from apollo_compile.planner import apart
from apollo_compile.planner.problem import ExecutionMode, Problem, Task
problem = Problem(tasks=(Task(modes=(ExecutionMode(duration=3),), predecessors=()),) * 2)
assert apart.bound_apart(problem) == 3
print(apart._process.process.pid, *{"ortools", "pandas"} & set(sys.modules), flush=True)
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(0)",
        "os._exit(0)",
        "os.kill(os.getpid(), 9)",
        "child = os.fork()\nif child == 0:\n    assert apart.bound_apart(problem) == 3\n    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\nassert apart.bound_apart(problem) == 3",
    ],
    ids=["ends", "sys.exit", "os._exit", "killed", "forked"],
)
def test_no_process_is_left_behind(end: str) -> None:
    """However the parent ends; a forked child starts its own, and leaves the parent's alone. No parent has OR-Tools."""
    done = subprocess.run([sys.executable, "-c", LEAVE + end], capture_output=True, text=True, timeout=900)
    assert done.returncode == (-signal.SIGKILL if "kill" in end else 0), done.stderr
    status, deadline = Path(f"/proc/{int(done.stdout)}/stat"), time.monotonic() + 300
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        while status.read_text().rpartition(")")[2].split()[0] != "Z":  # an orphan that nobody waits for
            assert time.monotonic() < deadline
            time.sleep(0.01)
