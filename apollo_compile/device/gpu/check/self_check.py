"""Check whether lanes work on this machine: once per GPU, driver and torch, in a process of its own; keep the verdict.

    unavailable_reason(gpu, cache) -> str | None   why lanes must stay off
    check_gpu(gpu, cache, again=...) -> SelfCheck  the verdict, kept or new
    run_checks(gpu) -> results                    the work of the process

Experiments may fail in ways that a process does not survive: a capture that is refused leaves torch's generator and
allocator in it, and an illegal access ends the context. So they run in a process that has this one's Python path and
environment but nothing of a launcher's: it is no rank. A process that crashes, hangs or answers nothing is an error
like any other. A step waits for `MAX_WAIT_S` at most; graphs that are compiled before it has ended have no lanes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path

import torch

from apollo_compile.config import environment_of_one_process
from apollo_compile.device.gpu.check.examine import attempt, examine_lanes
from apollo_compile.device.gpu.check.experiments import TRIALS, Trial
from apollo_compile.device.gpu.fingerprint import gpu_fingerprint
from apollo_compile.device.gpu.run.gpu import TorchGpu, require_cuda
from apollo_compile.store.self_checks import FORMAT, SelfCheck, SelfChecks
from apollo_compile.target.check_result import CheckResult, Level
from apollo_compile.target.fingerprint import Fingerprint

_logger = logging.getLogger(__name__)

LIMIT_S = 180.0
"""Seconds after which the process hangs. It takes about ten: most of it imports torch and starts CUDA."""

MAX_WAIT_S = 20.0
"""Seconds for which a step waits for the check."""

AGAIN = "'apollo doctor --self-check' tries again"

_CODE = (
    "import json, sys; answer, ordinal, sys.path[:] = json.loads(sys.argv[1]); "
    "from apollo_compile.device.gpu.check.self_check import answer_into; answer_into(answer, ordinal)"
)
COMMAND = (sys.executable, "-c", _CODE)
"""Command of the process; the file for its answer, the number of the GPU and the module path follow as JSON."""


def unavailable_reason(
    gpu: TorchGpu, cache: Path, *, max_wait_s: float = MAX_WAIT_S, command: Sequence[str] = COMMAND
) -> str | None:
    """Return why lanes must stay off on this GPU; None if they may be used.

    The verdict is read from `cache`, or made and kept there, which takes seconds. It is made on a thread, which goes on
    if that takes too long.

    Arguments:
        gpu: the GPU.
        cache: folder of verdicts.
        max_wait_s: seconds since the first call after which no call waits.
        command: command of the process.
    """
    fingerprint, ordinal = _fingerprint_of(gpu), gpu.device.index
    begin, verdict = _begin_check(fingerprint, ordinal, cache, tuple(command))
    name = f"the self-check of cuda:{ordinal} ({fingerprint.device})"
    wait([verdict], max(0.0, begin + max_wait_s - time.monotonic()))
    if not verdict.done():
        return f"{name} has not ended after {max_wait_s:.0f} s; graphs that are compiled later use its result"
    reason = verdict.result().complaint
    return None if reason is None else f"{name} failed: {reason}"


@functools.cache
def _begin_check(
    fingerprint: Fingerprint, ordinal: int, cache: Path, command: Sequence[str]
) -> tuple[float, Future[SelfCheck]]:
    """Begin the check of a GPU on a thread, once per process; return when it began, and its verdict to be."""
    verdict: Future[SelfCheck] = Future()

    def make() -> None:
        try:
            verdict.set_result(_check(fingerprint, ordinal, cache, again=False, command=command))
        except BaseException as error:
            verdict.set_exception(error)

    threading.Thread(target=make, daemon=True).start()
    return time.monotonic(), verdict


def check_gpu(gpu: TorchGpu, cache: Path, *, again: bool = False) -> SelfCheck:
    """Return the verdict about this GPU; `again` makes a new one whatever is kept."""
    return _check(_fingerprint_of(gpu), gpu.device.index, cache, again=again)


def _fingerprint_of(gpu: TorchGpu) -> Fingerprint:
    native = gpu.native
    return gpu_fingerprint(native.name, cuda=native.driver_version, units=native.num_sms)


def _check(
    fingerprint: Fingerprint, ordinal: int, cache: Path, *, again: bool, command: Sequence[str] = COMMAND
) -> SelfCheck:
    def make() -> SelfCheck:
        begin = time.monotonic()
        made = check_apart(fingerprint, ordinal, command=command)
        _logger.info("the self-check of %s took %.1f s", fingerprint.device, time.monotonic() - begin)
        return made

    return SelfChecks(cache).find(fingerprint, make, again=again)


# ---------------------------------------------------------------------------------------------------------- the parent


def check_apart(
    fingerprint: Fingerprint, ordinal: int, *, limit_s: float = LIMIT_S, command: Sequence[str] = COMMAND
) -> SelfCheck:
    """Return the verdict of a process of its own about the GPU of that number, which has this fingerprint."""
    try:
        found = _run_apart(ordinal, limit_s, command)
        if found.fingerprint != fingerprint:
            seen = f"it saw {found.fingerprint.device}, {found.fingerprint.driver}, torch {found.fingerprint.torch}"
            raise _ProcessError(f"{seen}; this process has {fingerprint.device}: CUDA_VISIBLE_DEVICES changed since")
        return found
    except _ProcessError as error:
        problem = CheckResult(subject="self-check", level=Level.ERROR, message=str(error))
        return SelfCheck(made_at=time.time(), fingerprint=fingerprint, results=(problem,))


class _ProcessError(Exception):
    """The process gave no verdict about this GPU; the message says why."""


def _run_apart(ordinal: int, limit_s: float, command: Sequence[str]) -> SelfCheck:
    with tempfile.TemporaryDirectory(prefix="apollo-self-check-") as folder:
        answer = Path(folder) / "answer.json"
        order = json.dumps([str(answer), ordinal, [str(place) for place in sys.path]])
        try:
            with _started([*command, order]) as process:
                _, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise _ProcessError(f"its process did not end in {limit_s:.0f} s and was killed") from None
        except OSError as error:
            raise _ProcessError(f"its process cannot be started: {error}") from error
        if process.returncode != 0:
            raise _ProcessError(f"its process {_ending(process.returncode)}{_last_line(errors)}")
        found = FORMAT.inspect(answer)
        if found.content is None:
            raise _ProcessError(f"its process left no answer: {found.detail}")
        return found.content


_processes: set[subprocess.Popen[str]] = set()
"""Processes that have not ended."""


@contextlib.contextmanager
def _started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process, and kill it at the end of the `with`, or of this process, unless it has ended.

    Raises:
        OSError: it cannot be started.
        SystemExit: this process ends, so that there is no verdict.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment_of_one_process(),
        process_group=0,  # Ctrl-C on a terminal is for this process, which then kills that one
    )
    _processes.add(process)
    try:
        with process:
            try:
                yield process
            finally:
                process.kill()
        if process not in _processes:
            raise SystemExit
    finally:
        _processes.discard(process)


@atexit.register
def _kill_processes() -> None:
    """Kill the processes that have not ended: nobody waits for their verdicts."""
    while _processes:
        _processes.pop().kill()


os.register_at_fork(after_in_child=_processes.clear)  # they are the parent's


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return f": {lines[-1].strip()[:200]}" if lines else ""


# --------------------------------------------------------------------------------------------------------- the process


def answer_into(path: str, ordinal: int) -> None:
    """Check the GPU of that number, and write the verdict into a file."""
    require_cuda()
    torch.cuda.set_device(ordinal)
    gpu = TorchGpu(ordinal)
    verdict = SelfCheck(made_at=time.time(), fingerprint=_fingerprint_of(gpu), results=run_checks(gpu))
    FORMAT.write(Path(path), verdict)


def run_checks(gpu: TorchGpu, trials: Mapping[str, Trial] = TRIALS) -> tuple[CheckResult, ...]:
    """Return the results of the censuses and of the experiments; one that raises is an error, and others still run."""
    results = list(examine_lanes(gpu))
    for subject, trial in trials.items():
        results += attempt(subject, lambda trial=trial: [trial(gpu, gpu.native.atom_sizes, gpu.device)])  # type: ignore[misc]
    return tuple(results)


def describe(verdict: SelfCheck, *, is_new: bool) -> tuple[CheckResult, ...]:
    """Return the results of a verdict; the first has its age, and advice."""
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(verdict.made_at))
    when = "just now" if is_new else f"on {made}, with the same GPU, driver and torch"
    if verdict.complaint is None:
        head = CheckResult(subject="self-check", level=Level.OK, message=f"lanes work: tried {when}", advice="")
        return (head, *verdict.results)
    text = f"lanes stay off: tried {when}, and failed"
    head = CheckResult(subject="self-check", level=Level.ERROR, message=text, advice=AGAIN)
    return (head, *(replace(each, advice="") for each in verdict.results))
