"""The planner in a process of its own: a native library that crashes or hangs there costs a plan, not a training run.

    solve_apart(problem, effort) -> Solution    what `solve.solve` returns
    bound_apart(problem) -> int                 what `bounds.lower_bound` returns

The process starts with the first question, serves all that come after it, and ends with its parent, or after `IDLE_S`
without a question. OR-Tools is imported there only, and its work does not hold the parent's GIL. Requests are pickled,
answers come back as JSON: the parent reads data only, and believes none of it. A schedule is checked against every
constraint, its execution and its bound are computed or compared here.

If the process cannot be started, dies, answers nonsense, or not within the time limit and `GRACE_S`, it is killed, one
WARNING says why, and the list schedules of this process stand in for it, with a weaker bound. After `MAX_FAILURES` in a
row no further one is started.

Processes and threads: one question at a time; Ctrl-C reaches the parent only, which kills the process if it was
waiting; a forked child starts a process of its own. The parent's main module is not imported, as `spawn` would do. A
program that ends waits for no answer: the process is killed, and threads that still plan do so without it.
"""

from __future__ import annotations

import atexit
import contextlib
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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from apollo_compile.errors import InfeasiblePlanError
from apollo_compile.json_form import from_json, to_json
from apollo_compile.planner.bounds import lower_bound
from apollo_compile.planner.problem import Problem
from apollo_compile.planner.simulate import execute
from apollo_compile.planner.solve import Effort, Solution, solve

_logger = logging.getLogger(__name__)

START_LIMIT_S = 60.0
"""For the process to start and import OR-Tools: half a second where nothing else runs."""
GRACE_S = 30.0
"""Beyond the time limit of a search, which the check of its candidates does not count against."""
IDLE_S = 300.0
"""Without a question for so long, the process ends; the next question starts another. Plans are asked for while a model
compiles and in its first steps, so that one start serves them all."""
MAX_FAILURES = 2
MAX_ANSWER_BYTES = 64 * 2**20
_LENGTH_BYTES = 8

_CODE = (
    "import json, sys; fd, sys.path[:] = json.loads(sys.argv[1]); "
    "from apollo_compile.planner.apart import serve; serve(fd)"
)
COMMAND = (sys.executable, "-c", _CODE)
"""Followed by the number of the socket and the parent's module path, as JSON."""


class _ApartError(Exception):
    """The process gave no answer that can be used; the message says why."""


def solve_apart(problem: Problem, effort: Effort) -> Solution:
    """Return the best schedule found within the effort.

    Raises:
        InfeasiblePlanError: no schedule that keeps all limits exists, or none was found.
    """
    try:
        answer = _ask({"problem": problem, "effort": effort}, effort.time_limit_s + GRACE_S)
        if "infeasible" in answer:
            raise InfeasiblePlanError(str(answer["infeasible"]))
        return _believe(problem, answer)
    except _ApartError as error:
        _warn(error, "list schedules stand in for it")
        return solve(problem, replace(effort, use_solver=False, use_ortools=False))


def bound_apart(problem: Problem) -> int:
    """Return a time that no schedule of the problem can beat."""
    try:
        bound = _ask({"problem": problem, "effort": None}, GRACE_S).get("bound")
        if not isinstance(bound, int) or bound < 0:
            raise _ApartError(f"it gave {bound!r} as a bound")
        return bound
    except _ApartError as error:
        _warn(error, "the bound is a weaker one")
        return lower_bound(problem, use_program=False)


def _warn(error: _ApartError, instead: str) -> None:
    if not _is_ending:  # then it was killed, and no plan matters
        _logger.warning("the planner's process failed: %s; %s", error, instead)


def _believe(problem: Problem, answer: Mapping[str, Any]) -> Solution:
    """Return the solution of an answer, after a check of all that follows from the problem."""
    try:
        solution = from_json(Solution, answer.get("solution"))
        violations = problem.violations(solution.schedule)
        if violations:
            raise ValueError(f"its schedule breaks a constraint: {violations[0]}")
        if solution.execution != execute(problem, solution.schedule):
            raise ValueError("its schedule does not take as long as it says")
        if not 0 <= solution.bound <= solution.schedule.makespan:
            raise ValueError(f"its bound {solution.bound} is above its makespan {solution.schedule.makespan}")
        if not 0 <= solution.chosen < len(solution.candidates):
            raise ValueError(f"it chose candidate {solution.chosen} of {len(solution.candidates)}")
    except ValueError as error:
        raise _ApartError(str(error)) from error
    return solution


# ---------------------------------------------------------------------------------------------------------- the parent


@dataclass(eq=False, slots=True)
class _Process:
    """A running process and our end of the socket to it."""

    process: subprocess.Popen[bytes]
    channel: socket.socket

    def stop(self, patience_s: float) -> int:
        """Kill it if it still runs after so long; return its exit code."""
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(patience_s)
        self.process.kill()
        return self.process.wait()


_lock = threading.Lock()
"""Guards what follows."""
_process: _Process | None = None
_num_failures = 0
_is_ending = False


def _ask(request: object, time_limit_s: float) -> Mapping[str, Any]:
    """Return the answer to a request; after a failure nobody waits for the process any more.

    Raises:
        _ApartError: there is none.
    """
    global _num_failures
    with _lock:
        if _is_ending:
            raise _ApartError("the program ends")
        if _num_failures >= MAX_FAILURES:
            raise _ApartError(f"it did so {_num_failures} times in a row and is not started again")
        try:
            process = _running()
            process.channel.settimeout(time_limit_s)
            _send(process.channel, pickle.dumps(request))
            answer = _receive(process.channel, time.monotonic() + time_limit_s)
        except Exception as error:  # whatever it is: list schedules need no process
            _num_failures += 1
            is_dying = isinstance(error, ConnectionError)
            raise _ApartError(_say(error, stop_planner(patience_s=1.0 if is_dying else 0.0))) from error
        except BaseException:  # an interrupt: the answer would be taken for that to the next question
            stop_planner()
            raise
        _num_failures = 0
    for line in answer.get("warnings") or ():
        _logger.warning("%s", line)
    if "error" in answer:
        raise _ApartError(str(answer["error"]))
    return answer


def _running() -> _Process:
    """Return a process that waits for a question."""
    global _process
    if _process is not None and _process.process.poll() is not None:
        stop_planner()  # it was idle for long
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
        if _is_ending:  # since it was last asked; whoever ends the program may not have seen this process
            raise ConnectionAbortedError("the program ends")
        _receive(ours, time.monotonic() + START_LIMIT_S)
    return _process


def stop_planner(*, patience_s: float = 0.0) -> int | None:
    """End the process, if there is one; return its exit code. The next question starts another."""
    global _process
    process, _process = _process, None
    return None if process is None else process.stop(patience_s)


def end_planning() -> None:
    """At the end of the program: kill the process, so that nobody waits for its answer, and start no other."""
    global _is_ending
    _is_ending = True
    process = _process  # the channel may be another thread's, which closes it
    if process is not None:
        process.process.kill()


def _forget() -> None:
    """In a forked child: the process is the parent's, and so may be the lock, held by a thread that is not here."""
    global _process, _lock, _num_failures
    if _process is not None:
        _process.channel.close()
        _process.process.returncode = 0  # not ours to wait for
    _process, _lock, _num_failures = None, threading.Lock(), 0


atexit.register(stop_planner)
atexit.register(end_planning)  # this one is called first
os.register_at_fork(after_in_child=_forget)


def _say(error: Exception, code: int | None) -> str:
    if isinstance(error, TimeoutError):
        return "it did not answer in time and was killed"
    if isinstance(error, ConnectionError) and code is not None:
        return f"it ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    return f"{type(error).__name__}: {error}"


# --------------------------------------------------------------------------------------------------------- the channel


def _send(channel: socket.socket, content: bytes) -> None:
    channel.sendall(len(content).to_bytes(_LENGTH_BYTES, "little") + content)


def _receive(channel: socket.socket, deadline: float) -> dict[str, Any]:
    """Return what the process says next, an object of JSON. Raises `OSError` or `ValueError`."""
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
    """Collects warnings for the parent, whose user set the loggers up."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.lines.append(record.getMessage())


def serve(fd: int) -> None:
    """Be the process: answer questions until the parent closes the socket, or is silent for `IDLE_S`."""
    warnings = _Warnings()
    logging.getLogger().addHandler(warnings)
    with socket.socket(fileno=fd) as channel, contextlib.suppress(TimeoutError, ConnectionError):
        _send(channel, json.dumps({"is_ready": True}).encode())
        while True:
            channel.settimeout(IDLE_S)
            length = int.from_bytes(_read(channel, _LENGTH_BYTES, None), "little")
            request = pickle.loads(_read(channel, length, None))
            answer = {**_answer(**request), "warnings": warnings.lines[:]}
            warnings.lines.clear()
            _send(channel, json.dumps(answer).encode())


def _answer(problem: Problem, effort: Effort | None) -> dict[str, Any]:
    try:
        if effort is None:
            return {"bound": lower_bound(problem)}
        return {"solution": to_json(solve(problem, effort))}
    except InfeasiblePlanError as error:
        return {"infeasible": str(error)}
    except Exception as error:  # the parent plans without us, and says why
        return {"error": f"{type(error).__name__}: {error}"}
