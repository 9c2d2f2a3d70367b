"""Measure variants in turns, each in its own process.

    measure(task, variants) -> Measurement

Note [idle children]: an idle child blocks in a read on its socket. The OpenMP workers of its last step spin for some
milliseconds more, so the parent pauses for PAUSE_S between turns.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from apollo_compile.errors import ApolloError
from apollo_compile.tools.bench.numbers import Measurement, collect
from apollo_compile.tools.bench.task import VARIANTS, MeasuredTask, MeasuredVariant

PAUSE_S = 0.01
"""Pause between turns, longer than OpenMP workers spin after a child's last step."""

_WARMUP_STEPS = 5
"""Least untimed steps of every variant before the first round; apollo takes more until autotuning has ended."""

_START_TIMEOUT_S = 1800.0
_TURN_TIMEOUT_S = 600.0

Tell = Callable[[str], None]


class Child(Protocol):
    """A process that runs one variant of a task."""

    def ask(self, request: tuple[Any, ...], timeout_s: float) -> Any:
        """Return the answer to a request: the name of a method of the child's `Stepper`, and its arguments."""


def measure(
    task: MeasuredTask,
    variants: Sequence[MeasuredVariant] = VARIANTS,
    *,
    rounds: int = 10,
    steps_per_turn: int = 3,
    cold: bool = True,
    progress: Tell | None = None,
) -> Measurement:
    """Measure `variants` of `task` interleaved, each in its own process.

    Arguments:
        task: the task to measure.
        variants: variants to compare. Speed-ups are over Inductor, differences from eager; where one is not among them,
            the first variant replaces it.
        rounds: number of turns of every variant.
        steps_per_turn: number of timed steps of a turn.
        cold: give every child an empty Inductor cache, and make apollo ignore earlier processes, so that `cold_s`
            includes a cold compile.
        progress: called with lines of text that describe the progress.

    Raises:
        ApolloError: a child failed; the message ends with its output.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="apollo-bench-")))
        options = {"plan.remember": False} if cold else {}
        chosen = [replace(v, options={**options, **v.options}) if v.backend == "apollo" else v for v in variants]
        children = {variant.name: stack.enter_context(spawn(task, variant, folder, cold=cold)) for variant in chosen}
        return measure_children(task, children, rounds=rounds, steps_per_turn=steps_per_turn, progress=progress)


def measure_children(
    task: MeasuredTask,
    children: Mapping[str, Child],
    *,
    rounds: int,
    steps_per_turn: int,
    warmup: int = _WARMUP_STEPS,
    progress: Tell | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> Measurement:
    """Start the children one after the other, run all turns, and summarize the times."""
    tell = progress or (lambda line: None)
    cold_s: dict[str, float] = {}
    for number, (name, child) in enumerate(children.items(), 1):
        tell(f"[{number}/{len(children)}] {name}: building and taking the first step")
        cold_s[name] = child.ask(("start",), _START_TIMEOUT_S)
        tell(f"[{number}/{len(children)}] {name}: first step took {cold_s[name]:.1f} s")
    for name, child in children.items():
        tell(f"{name}: warmed up in {child.ask(('warm_up', warmup), _START_TIMEOUT_S)} steps")
        pause(PAUSE_S)
    times: dict[str, list[tuple[int, ...]]] = {name: [] for name in children}
    for number, order in enumerate(turn_orders(tuple(children), rounds), 1):
        tell(f"round {number}/{rounds}")
        for name in order:
            times[name].append(tuple(children[name].ask(("run", 1, steps_per_turn), _TURN_TIMEOUT_S)))
            pause(PAUSE_S)
    peaks, ran, numbers = (
        {name: child.ask((request,), _TURN_TIMEOUT_S) for name, child in children.items()}
        for request in ("peak_bytes", "ran", "numbers")
    )
    return collect(task, cold_s, numbers, times, peaks, {name: tuple(variants) for name, variants in ran.items()})


def turn_orders(names: Sequence[str], rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield the order of turns per round: forwards, backwards, forwards, ..."""
    for number in range(rounds):
        yield tuple(names) if number % 2 == 0 else tuple(reversed(names))


class ChildProcess:
    """The parent's handle of a child."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], pipe: Connection, log: Path) -> None:
        self._name, self._process, self._pipe, self._log = name, process, pipe, log
        self._request: tuple[Any, ...] = ()

    def ask(self, request: tuple[Any, ...], timeout_s: float) -> Any:
        """Return the answer to a request: the name of a method of the child's stepper, and its arguments.

        Raises:
            ApolloError: the child failed, died, or did not answer in time; the message ends with its output.
        """
        self.send(request)
        return self.receive(timeout_s)

    def send(self, request: tuple[Any, ...]) -> None:
        """Send a request without waiting, so that several children can work at once; `receive` returns the answer."""
        self._request = request
        with contextlib.suppress(OSError):  # `receive` reports a child that died
            self._pipe.send(request)

    def receive(self, timeout_s: float) -> Any:
        """Return the answer to the last request; see `ask`."""
        request = self._request
        try:
            if not self._pipe.poll(timeout_s):
                raise ApolloError(
                    f"variant {self._name!r} did not answer {request!r} within {timeout_s:.0f} s{self._tail()}"
                )
            is_error, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            code = self._process.wait(10)
            raise ApolloError(f"variant {self._name!r} died at {request!r}, exit code {code}{self._tail()}") from error
        if is_error:
            raise ApolloError(f"variant {self._name!r} failed at {request!r}:\n{answer}")
        return answer

    def has_answered(self) -> bool:
        """Return whether `receive` would return at once: there is an answer, or the child died."""
        return self._pipe.poll(0)

    def kill(self) -> None:
        """Kill the child."""
        self._process.kill()

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-20:]
        return "; it wrote:\n" + "\n".join(lines) if lines else ""


@contextmanager
def spawn(
    task: MeasuredTask,
    variant: MeasuredVariant,
    folder: Path,
    *,
    cold: bool,
    cache: Path | None = None,
    patience_s: float = 20.0,
) -> Iterator[ChildProcess]:
    """Start the process of a variant, and end it after the `with`; after `patience_s` it is killed.

    Its output and its digest go to files in `folder`, named by the variant. If `cold`, its Inductor cache is `cache`,
    which variants may share, or a new directory in `folder`. Paths have no spaces, since Inductor does not quote them
    in commands of the C++ compiler.
    """
    ours, theirs = socket.socketpair()
    name = variant.name.replace(" ", "-")
    log = folder / f"{name}.log"
    order = {
        "path": sys.path,
        "task": asdict(task),
        "variant": asdict(variant),
        "digest": str(folder / f"{name}.npz"),
        "fd": theirs.fileno(),
    }
    code = (
        "import json, sys; order = json.loads(sys.argv[1]); sys.path[:] = order['path']; "
        "from apollo_compile.tools.bench.child import serve; serve(order)"
    )
    command = [sys.executable, "-c", code, json.dumps(order)]
    if cold:
        command = ["env", f"TORCHINDUCTOR_CACHE_DIR={cache or folder / name}", *command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    theirs.close()
    pipe = Connection(ours.detach())
    try:
        yield ChildProcess(variant.name, process, pipe, log)
    finally:
        pipe.close()  # the child sees the end of its socket and exits
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
