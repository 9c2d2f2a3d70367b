"""Run cases in a process of their own, one after the other, so that one that crashes or hangs costs itself alone."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from tqdm import tqdm

CaseT = TypeVar("CaseT")
ResultT = TypeVar("ResultT")

END_LIMIT_S = 120.0
"""For a process to end that has nothing more to do; on a busy machine an interpreter takes long for that."""


def run_apart(
    run: Callable[[CaseT], ResultT], cases: Sequence[CaseT], *, timeout_s: float, cases_per_process: int
) -> Iterator[tuple[CaseT, ResultT | str]]:
    """Yield the result of `run` for every case, or the end of the process that it took down: `hung`, `died with ...`.

    Arguments:
        run: a function of a module; a new process imports it by its name.
        cases: its arguments, which go to the process by pickle, as its results do.
        timeout_s: seconds after which a case hangs.
        cases_per_process: number of cases of one process, since compiled code stays in its memory.
    """
    process: _Worker[CaseT, ResultT] | None = None
    try:
        for case in tqdm(cases, desc="cases", file=sys.stderr):
            if process is not None and process.num_cases == cases_per_process:
                process.stop()
                process = None
            process = process or _Worker(run)
            try:
                result: ResultT | str = process.run(case, timeout_s)
            except TimeoutError:
                result, process = process.kill(), None
            except (EOFError, OSError):
                result, process = process.stop(), None
            yield case, result
    finally:
        if process is not None:
            process.stop()


class _Worker(Generic[CaseT, ResultT]):
    """A process that runs one case after the other."""

    def __init__(self, run: Callable[[CaseT], ResultT]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, run), daemon=False)
        self._process.start()
        theirs.close()
        self.num_cases = 0

    def run(self, case: CaseT, timeout_s: float) -> ResultT:
        """Return the result.

        Raises:
            TimeoutError: it takes longer.
            EOFError, OSError: the process died.
        """
        self.num_cases += 1
        self._connection.send(case)
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"{case} took more than {timeout_s:.0f} s")
        result: ResultT = self._connection.recv()
        return result

    def stop(self) -> str:
        """End the process; return how it ended."""
        self._connection.close()
        self._process.join(timeout=END_LIMIT_S)
        return self.kill() if self._process.exitcode is None else f"died with exit code {self._process.exitcode}"

    def kill(self) -> str:
        """End the process, which hangs."""
        self._connection.close()
        self._process.kill()
        self._process.join()
        return "hung"


def _work(connection: Connection, run: Callable[[CaseT], ResultT]) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("apollo_compile").setLevel(logging.ERROR)  # reasons are in the results
    while True:
        try:
            case: CaseT = connection.recv()
        except EOFError:
            return
        connection.send(run(case))
