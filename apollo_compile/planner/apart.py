"""The planner in a subprocess, so that a crash or hang of a native library costs a plan, not a training run.

    solve_apart(problem, effort) -> Solution                  `solve.solve` in the subprocess
    bound_apart(problem) -> int                               `bounds.lower_bound` in the subprocess
    place_apart(fleet, starts, ...) -> PlacementSolution      `placement.place` in the subprocess

The process starts with the first request, serves all later ones, and ends with its parent, or after `IDLE_S` without a
request. OR-Tools is imported there only, and its work does not hold the parent's GIL. Requests are pickled, answers are
JSON, so the parent loads data only. It checks the schedule against every constraint, and the execution and the bound
against values that it computes itself.

If the process cannot be started, dies, gives an invalid answer, or none within the time limit plus `GRACE_S`, it is
killed, one WARNING gives the reason, and the parent uses the best list schedule instead, with a weaker bound. After
`MAX_FAILURES` failures in a row no further process is started.

Without OR-Tools, the process uses list schedules, annealing and weaker bounds; the parent logs one WARNING.

There is one request at a time. Ctrl-C reaches the parent only, which kills the process if it was waiting for an answer.
A forked child starts a process of its own. The parent's main module is not imported, unlike with `spawn`. At
interpreter exit the process is killed, and threads that still plan continue without it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from apollo_compile.errors import InfeasiblePlanError
from apollo_compile.json_form import from_json, to_json
from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.fleet import Choice, Fleet, violations
from apollo_compile.planner.placement import PlacementSolution, place
from apollo_compile.planner.problem import Problem
from apollo_compile.planner.simulate import execute
from apollo_compile.planner.solve import Effort, Solution, solve

_logger = logging.getLogger(__name__)

START_LIMIT_S = 60.0
"""Limit for the process to start and import OR-Tools, which takes half a second on an idle machine."""
GRACE_S = 30.0
"""Added to the time limit of a search, which does not include the check of its candidates."""
IDLE_S = 300.0
"""The process ends after this time without a request; the next request starts another. A model is planned while it
compiles and in its first steps, so one process mostly serves them all."""
MAX_FAILURES = 2
MAX_ANSWER_BYTES = 64 * 2**20
_LENGTH_BYTES = 8

_CODE = (
    "import json, sys; fd, sys.path[:] = json.loads(sys.argv[1]); "
    "from apollo_compile.planner.apart import serve; serve(fd)"
)
COMMAND = (sys.executable, "-c", _CODE)
"""Command of the process; the number of the socket and the parent's module path follow as JSON."""


class _ProcessError(Exception):
    """The process gave no usable answer; the message says why."""


def solve_apart(problem: Problem, effort: Effort) -> Solution:
    """Return the best schedule found within the effort.

    Raises:
        InfeasiblePlanError: no schedule that keeps all limits exists, or none was found.
    """
    try:
        answer = _ask({"problem": problem, "effort": effort}, effort.time_limit_s + GRACE_S)
        if "infeasible" in answer:
            raise InfeasiblePlanError(str(answer["infeasible"]))
        return _check_answer(problem, answer)
    except _ProcessError as error:
        _warn(error, "using list schedules instead")
        return solve(problem, replace(effort, use_solver=False, use_ortools=False))


def bound_apart(problem: Problem) -> int:
    """Return a lower bound of the makespan of every schedule of the problem."""
    try:
        bound = _ask({"problem": problem, "effort": None}, GRACE_S).get("bound")
        if not isinstance(bound, int) or bound < 0:
            raise _ProcessError(f"it gave {bound!r} as a bound")
        return bound
    except _ProcessError as error:
        _warn(error, "using a weaker bound")
        return lower_bound(problem, use_program=False)


def place_apart(fleet: Fleet, starts: Sequence[Sequence[Choice]], *, seconds: float) -> PlacementSolution:
    """Return the best placement found within a time; `placement.place` has the arguments.

    Raises:
        InfeasiblePlanError: no placement keeps the memory.
    """
    try:
        answer = _ask({"fleet": fleet, "starts": starts, "seconds": seconds}, seconds + GRACE_S)
        if "infeasible" in answer:
            raise InfeasiblePlanError(str(answer["infeasible"]))
        try:
            placed = from_json(PlacementSolution, answer.get("placed"))
        except ValueError as error:
            raise _ProcessError(str(error)) from error
        if broken := violations(fleet, placed.placement):
            raise _ProcessError(f"its placement breaks a rule: {broken[0]}")
        if not 0 <= placed.bound <= placed.placement.makespan:
            raise _ProcessError(f"its bound {placed.bound} is above its makespan {placed.placement.makespan}")
        return placed
    except _ProcessError as error:
        _warn(error, "searching without it")
        return place(fleet, starts, seconds=seconds, use_solver=False)


def _warn(error: _ProcessError, instead: str) -> None:
    if not _is_ending:  # at exit the process is killed on purpose
        _logger.warning("the planner's process failed: %s; %s", error, instead)


def _check_answer(problem: Problem, answer: Mapping[str, Any]) -> Solution:
    """Return the solution of an answer, after checking everything that can be computed from the problem."""
    try:
        solution = from_json(Solution, answer.get("solution"))
        violations = problem.violations(solution.schedule)
        if violations:
            raise ValueError(f"its schedule breaks a constraint: {violations[0]}")
        if solution.execution != execute(problem, solution.schedule):
            raise ValueError("its predicted execution differs from the one computed here")
        if not 0 <= solution.bound <= solution.schedule.makespan:
            raise ValueError(f"its bound {solution.bound} is above its makespan {solution.schedule.makespan}")
        if not 0 <= solution.chosen < len(solution.candidates):
            raise ValueError(f"it chose candidate {solution.chosen} of {len(solution.candidates)}")
    except ValueError as error:
        raise _ProcessError(str(error)) from error
    return solution


# ---------------------------------------------------------------------------------------------------------- the parent


@dataclass(eq=False, slots=True)
class _Process:
    """A running process and our end of the socket to it."""

    process: subprocess.Popen[bytes]
    channel: socket.socket

    def stop(self, patience_s: float) -> int:
        """Kill it if it still runs after `patience_s`; return its exit code."""
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(patience_s)
        self.process.kill()
        return self.process.wait()


_lock = threading.Lock()
"""Guards the following globals."""
_process: _Process | None = None
_num_failures = 0
_is_ending = False
_has_warned_of_missing_solver = False


def _ask(request: object, time_limit_s: float) -> Mapping[str, Any]:
    """Return the answer to a request; after a failure the process is stopped.

    Raises:
        _ProcessError: there is no answer.
    """
    global _num_failures, _has_warned_of_missing_solver
    with _lock:
        if _is_ending:
            raise _ProcessError("the program ends")
        if _num_failures >= MAX_FAILURES:
            raise _ProcessError(f"it failed {_num_failures} times in a row and is not started again")
        try:
            process = _running()
            process.channel.settimeout(time_limit_s)
            _send(process.channel, pickle.dumps(request))
            answer = _receive(process.channel, time.monotonic() + time_limit_s)
        except Exception as error:  # any failure: list schedules need no process
            _num_failures += 1
            is_dying = isinstance(error, ConnectionError)
            raise _ProcessError(_describe_failure(error, stop_planner(patience_s=1.0 if is_dying else 0.0))) from error
        except BaseException:  # an interrupt: a late answer would be mistaken for the answer to the next request
            stop_planner()
            raise
        _num_failures = 0
        missing = answer.get("without_solver")
        if missing and not _has_warned_of_missing_solver:
            _has_warned_of_missing_solver = True
            _logger.warning(
                "OR-Tools cannot be imported: %s; plans are list schedules, improved by local search, and bounds are "
                "weaker; run 'apollo doctor' for a diagnosis",
                missing,
            )
    for line in answer.get("warnings") or ():
        _logger.warning("%s", line)
    if "error" in answer:
        raise _ProcessError(str(answer["error"]))
    return answer


def _running() -> _Process:
    """Return the running process; start one if there is none."""
    global _process
    if _process is not None and _process.process.poll() is not None:
        stop_planner()  # it ended after IDLE_S
    if _process is None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [*COMMAND, json.dumps([theirs.fileno(), [str(place) for place in sys.path]])],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C on a terminal is for the parent
                )
            except BaseException:
                ours.close()
                raise
        _process = _Process(process, ours)
        if _is_ending:  # set since the last check: `end_planning` may not have seen this process
            raise ConnectionAbortedError("the program ends")
        _receive(ours, time.monotonic() + START_LIMIT_S)
    return _process


def stop_planner(*, patience_s: float = 0.0) -> int | None:
    """End the process, if there is one; return its exit code. The next request starts another."""
    global _process
    process, _process = _process, None
    return None if process is None else process.stop(patience_s)


def end_planning() -> None:
    """Kill the process at interpreter exit, so that no thread waits for its answer, and start no other."""
    global _is_ending
    _is_ending = True
    process = _process  # another thread may be using the channel, and closes it then
    if process is not None:
        process.process.kill()


def _forget() -> None:
    """Drop the parent's process and lock in a forked child; a thread of the parent may have held the lock."""
    global _process, _lock, _num_failures
    if _process is not None:
        _process.channel.close()
        _process.process.returncode = 0  # not ours to wait for
    _process, _lock, _num_failures = None, threading.Lock(), 0


atexit.register(stop_planner)
atexit.register(end_planning)  # this one is called first
os.register_at_fork(after_in_child=_forget)


def _describe_failure(error: Exception, code: int | None) -> str:
    if isinstance(error, TimeoutError):
        return "it did not answer in time and was killed"
    if isinstance(error, ConnectionError) and code is not None:
        return f"it ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    return f"{type(error).__name__}: {error}"


# --------------------------------------------------------------------------------------------------------- the channel


def _send(channel: socket.socket, content: bytes) -> None:
    channel.sendall(len(content).to_bytes(_LENGTH_BYTES, "little") + content)


def _receive(channel: socket.socket, deadline: float) -> dict[str, Any]:
    """Return the next message of the process, a JSON object. Raises `OSError` or `ValueError`."""
    length = int.from_bytes(_read(channel, _LENGTH_BYTES, deadline), "little")
    if length > MAX_ANSWER_BYTES:
        raise ValueError(f"it announced an answer of {length} bytes")
    content = json.loads(_read(channel, length, deadline).decode())
    if not isinstance(content, dict):
        raise ValueError(f"it answered with a {type(content).__name__}")
    return content


def _read(channel: socket.socket, length: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        if deadline is not None:
            channel.settimeout(max(1e-3, deadline - time.monotonic()))
        part = channel.recv(min(length - len(parts), 2**20))
        if not part:
            raise ConnectionResetError("it closed the connection")
        parts += part
    return bytes(parts)


# ------------------------------------------------------------------------------------------------------- in the process


class _Warnings(logging.Handler):
    """Collects warnings for the parent, whose loggers the user has configured."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message of a record."""
        self.lines.append(record.getMessage())


def serve(fd: int) -> None:
    """Answer requests in the subprocess until the parent closes the socket, or sends none for `IDLE_S`."""
    warnings = _Warnings()
    logging.getLogger().addHandler(warnings)
    with socket.socket(fileno=fd) as channel, contextlib.suppress(TimeoutError, ConnectionError):
        _send(channel, json.dumps({"is_ready": True}).encode())
        while True:
            channel.settimeout(IDLE_S)
            length = int.from_bytes(_read(channel, _LENGTH_BYTES, None), "little")
            request = pickle.loads(_read(channel, length, None))
            answer = {**_answer(request), "warnings": warnings.lines[:]}
            warnings.lines.clear()
            _send(channel, json.dumps(answer).encode())


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request of `solve_apart`, `bound_apart` or `place_apart`."""
    missing = _import_error_of_solver()
    note = {"without_solver": missing} if missing else {}
    try:
        if "fleet" in request:
            return {"placed": to_json(place(**request, use_solver=not missing)), **note}
        problem, effort = request["problem"], request["effort"]
        if effort is None:
            return {"bound": lower_bound(problem, use_program=not missing), **note}
        if missing:
            effort = replace(effort, use_solver=False, use_ortools=False)
        return {"solution": to_json(solve(problem, effort)), **note}
    except InfeasiblePlanError as error:
        return {"infeasible": str(error), **note}
    except Exception as error:  # the parent logs it and plans without this process
        return {"error": f"{type(error).__name__}: {error}"}


@functools.cache
def _import_error_of_solver() -> str | None:
    """Return why OR-Tools cannot be imported; None if it can."""
    try:
        import_module("apollo_compile.planner.cp_sat")
    except Exception as error:  # an installation with a library of another version may raise anything
        return f"{type(error).__name__}: {error}"
    return None
