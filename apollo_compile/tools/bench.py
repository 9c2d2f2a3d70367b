"""Measure variants of one model against each other.

    (Task, variants) -> Measurement

Every variant has its own process: allocator settings, OpenMP teams and pinned threads are per process, and one
variant's would affect another's. The parent lets them take turns, one at a time, in alternating order (ABCD, DCBA,
...), so that drift of the machine affects all of them alike. See Note [idle children] for the others.

    turn     one untimed step, which brings code and weights back into the caches, then `steps_per_turn` timed steps
    round    one turn of every variant; the bootstrap resamples rounds, because steps of one turn are correlated
    step     forward, loss and backward (train), or forward without gradients (inference), timed inside the child from
             the call to its return; gradients are set to None between steps, outside the timing

Before its first turn a child builds the task, takes one cold step (compile included), and saves loss and gradients of
that step. The parent compares them with those of the reference, which is eager if it is among the variants.

Note [idle children]: a child waits in a read on its socket. The OpenMP workers of its last step spin for some more
milliseconds, so the parent pauses for PAUSE_S between turns.

The harness returns data and prints nothing; the command line and `benchmarks/` print. It is one file of some 650 lines,
since parent and children are two ends of one protocol.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from apollo_compile.device.cpu.machine import cpu_description, cpu_model
from apollo_compile.errors import ApolloError
from apollo_compile.units import NS_PER_S

PAUSE_S = 0.01
"""Pause between turns, longer than OpenMP workers spin after a child's last step."""

DType = Literal["float32", "bfloat16"]

TOLERANCES: Mapping[DType, float] = {"float32": 1e-3, "bfloat16": 5e-2}
"""Accepted relative difference of loss and gradients from the reference. float32 sums in another order differ by about
1e-5 over a whole model. bfloat16 has 8 bits of precision, and compilers keep intermediate results in float32 that eager
rounds: gradients of single elements differ by some percent."""

MAX_WARMUP = 3000
"""Most warm-up steps; then a variant is measured even if autotuning is not over. A comparison of short steps has
fewer."""

_START_TIMEOUT_S = 1800.0
_TURN_TIMEOUT_S = 600.0
_NUM_RESAMPLES = 2000
_TINY = 1.2e-38  # the smallest normal float32

Mode = Literal["train", "inference"]
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A measured variant of a model: a backend of `torch.compile` with options, or eager."""

    name: str
    backend: str | None
    """None is eager."""
    options: Mapping[str, Any] = field(default_factory=dict)
    cores: int | None = None
    """Cores that its process may use; None means the cores of this process."""
    keeps_memory: bool = False
    """Whether its process gets apollo's allocator settings, which otherwise only `backend="apollo"` has."""


INDUCTOR_MODES: tuple[Variant, ...] = (
    Variant(name="inductor", backend="inductor"),
    Variant(
        name="inductor-max-autotune",
        backend="inductor",
        options={
            "max_autotune": True,
            "coordinate_descent_tuning": True,
            "max_autotune_gemm_backends": "CPP,ATEN",
        },
    ),
)
"""Inductor's default, and `mode="max-autotune-no-cudagraphs"` with the backends that multiply matrices on a CPU:
`torch.compile` takes a mode or options, so these are the options that the mode stands for."""

VARIANTS: tuple[Variant, ...] = (
    Variant(name="eager", backend=None),
    *INDUCTOR_MODES,
    Variant(name="apollo-serial", backend="apollo", options={"plan.planner": "serial"}),
    Variant(name="apollo", backend="apollo"),
)
"""Eager, the modes of Inductor, the bodies of apollo on one lane in graph order, and apollo."""

KEPT_MEMORY: tuple[Variant, ...] = (
    Variant(name="inductor-kept-memory", backend="inductor", keeps_memory=True),
    Variant(name="eager-kept-memory", backend=None, keeps_memory=True),
)
"""The same code with apollo's allocator settings, to see how much of a gain is due to kept memory."""

ONE_CORE: tuple[Variant, ...] = (
    Variant(name="eager-one-core", backend=None, cores=1),
    Variant(name="inductor-one-core", backend="inductor", cores=1),
    Variant(name="apollo-one-core", backend="apollo", cores=1),
)
"""The same on one core, for `Measurement.efficiencies`."""

AGAIN: tuple[Variant, ...] = (Variant(name="inductor-again", backend="inductor"),)
"""Inductor's default again, to see how much two processes with the same code differ."""

LIBRARIES: tuple[Variant, ...] = (Variant(name="apollo-blas", backend="apollo", options={"runtime.onednn": False}),)
"""apollo with all matmuls in BLAS, as in eager and Inductor."""

PLANS: tuple[Variant, ...] = tuple(
    Variant(
        name=f"plan-{variant}",
        backend="apollo",
        options={"plan.autotune": False, "partition.weight_gradients": variant},
    )
    for variant in ("together", "apart")
)
"""The plan without autotuning; weight gradients are in their layers' segments, or in separate ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The measured task: how a child builds it, and what a step is."""

    builder: str
    """`module:function`; it returns an object with `model`, `inputs` (keyword arguments) and `loss` (of the output)."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the builder, representable in JSON."""
    mode: Mode = "train"
    dtype: DType = "float32"
    """With `bfloat16`, forward and loss are under `torch.autocast`; parameters and gradients stay float32."""

    @property
    def tolerance(self) -> float:
        """Accepted relative difference of loss and gradients from the reference."""
        return TOLERANCES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Step times of one variant, and how it compares with the baseline."""

    median_ns: float
    min_ns: float
    p10_ns: float
    p90_ns: float
    speedup: float
    """Median of the baseline over this median: above 1 is faster than the baseline."""
    speedup_low: float
    """Ends of the 95 % bootstrap interval of the speed-up, over rounds."""
    speedup_high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Differences of the first step's numbers from the reference."""

    loss_abs: float
    loss_rel: float
    gradient_abs: float
    """Largest difference of any element."""
    gradient_rel: float
    """Largest over parameters of: largest difference over the largest element (see `compare_digests`)."""
    worst: str
    """The parameter with that difference."""
    gradient_scale: float
    """Largest element of the reference's gradients; if it is zero, the comparison is meaningless."""
    unmatched: tuple[str, ...]
    """Parameters with a nonzero gradient in only one of the two; AOTAutograd makes zero gradients where eager has
    none."""

    def is_within(self, tolerance: float) -> bool:
        """Return whether the numbers match the reference up to a relative `tolerance`; NaN never does."""
        return not self.unmatched and self.loss_rel <= tolerance and self.gradient_rel <= tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantResult:
    """All measurements of one variant."""

    variant: str
    cold_s: float
    """First step: compiling, and running once."""
    rounds_ns: tuple[tuple[int, ...], ...]
    """Timed steps by round."""
    peak_bytes: int | None
    """Largest resident memory of the process in its timed steps; None if the system does not tell."""
    loss: float
    summary: Summary
    difference: Difference
    ran: tuple[str, ...] = ()
    """Variants that apollo ran in the end (`apollo_compile.ir.Variant`), each once; empty for other backends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One task, measured with several variants."""

    task: Task
    baseline: str
    reference: str
    cpu: str
    """Vendor, model and features of the CPU that it was taken on."""
    results: tuple[VariantResult, ...]
    efficiencies: Mapping[str, float] = field(default_factory=dict)
    """Parallel efficiency of variants: the fastest step on one core, divided by the number of cores and by the
    variant's step; 1 is perfect scaling. Empty if nothing was measured on one core."""

    def by_variant(self) -> dict[str, VariantResult]:
        """Return the results by the name of their variant."""
        return {result.variant: result for result in self.results}


class Child(Protocol):
    """A process that runs one variant of a task."""

    def start(self) -> Mapping[str, Any]:
        """Build, take the cold step and save its numbers; return `cold_s`, `loss` and `digest` (a path)."""

    def warm_up(self, steps: int) -> int:
        """Take at least `steps` steps, and more until autotuning is over; return the number of steps."""

    def run(self, untimed: int, timed: int) -> Sequence[int]:
        """Take steps; return the nanoseconds of the timed ones."""

    def peak_bytes(self) -> int | None:
        """Return the largest resident memory since the warm-up."""

    def ran(self) -> Sequence[str]:
        """Return the variants that apollo runs, each once; empty for other backends."""


# ------------------------------------------------------------------------------------------------------ interface


def measure(
    task: Task,
    variants: Sequence[Variant] = VARIANTS,
    *,
    rounds: int = 10,
    steps_per_turn: int = 3,
    warmup: int = 5,
    cold: bool = True,
    progress: Progress | None = None,
) -> Measurement:
    """Measure `variants` of `task` interleaved, each in its own process.

    Arguments:
        task: what a step is.
        variants: speed-ups are over Inductor, differences against eager, or the first variant if they are absent.
        rounds: turns of every variant.
        steps_per_turn: timed steps of a turn.
        warmup: least number of untimed steps of every variant before the first round; apollo takes more until
            autotuning is over.
        cold: give every child an empty Inductor cache, and let apollo ignore earlier runs, so that `cold_s` is a cold
            compile.
        progress: called with lines of text that describe the progress.

    Raises:
        ApolloError: a child failed; the message ends with its output.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="apollo-bench-")))
        chosen = [_forgetful(variant) if cold and variant.backend == "apollo" else variant for variant in variants]
        children = {variant.name: stack.enter_context(_spawn(task, variant, folder, cold=cold)) for variant in chosen}
        return measure_children(
            task, children, rounds=rounds, steps_per_turn=steps_per_turn, warmup=warmup, progress=progress
        )


def _forgetful(variant: Variant) -> Variant:
    return replace(variant, options={"plan.remember": False, **variant.options})


def measure_children(
    task: Task,
    children: Mapping[str, Child],
    *,
    rounds: int,
    steps_per_turn: int,
    warmup: int,
    progress: Progress | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> Measurement:
    """Start the children one after the other, let them take turns, and summarize the times."""
    tell = progress or (lambda line: None)
    started: dict[str, Mapping[str, Any]] = {}
    for number, (name, child) in enumerate(children.items(), 1):
        tell(f"[{number}/{len(children)}] {name}: building and taking the first step")
        started[name] = child.start()
        tell(f"[{number}/{len(children)}] {name}: first step took {started[name]['cold_s']:.1f} s")
    for name, child in children.items():
        tell(f"{name}: warmed up in {child.warm_up(warmup)} steps")
        pause(PAUSE_S)
    times: dict[str, list[tuple[int, ...]]] = {name: [] for name in children}
    for number, order in enumerate(turn_orders(tuple(children), rounds), 1):
        tell(f"round {number}/{rounds}")
        for name in order:
            times[name].append(tuple(children[name].run(1, steps_per_turn)))
            pause(PAUSE_S)
    peaks = {name: child.peak_bytes() for name, child in children.items()}
    ran = {name: tuple(child.ran()) for name, child in children.items()}
    return _collect(task, started, times, peaks, ran)


def turn_orders(names: Sequence[str], rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield the order of turns per round: forwards, backwards, forwards, ..."""
    for number in range(rounds):
        yield tuple(names) if number % 2 == 0 else tuple(reversed(names))


def summarize(rounds_ns: Sequence[Sequence[int]], baseline_ns: Sequence[Sequence[int]], *, seed: int = 0) -> Summary:
    """Return statistics of step times by round, compared with those of the baseline in the same rounds."""
    own, base = np.asarray(rounds_ns, dtype=np.float64), np.asarray(baseline_ns, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(len(own), size=(_NUM_RESAMPLES, len(own)))
    ratios = _medians(base, picks) / _medians(own, picks)  # the same rounds of both, since a disturbance affects both
    low, high = np.percentile(ratios, (2.5, 97.5))
    p10, median, p90 = np.percentile(own, (10, 50, 90))
    return Summary(
        median_ns=float(median),
        min_ns=float(own.min()),
        p10_ns=float(p10),
        p90_ns=float(p90),
        speedup=float(np.median(base) / median),
        speedup_low=float(low),
        speedup_high=float(high),
    )


def compare_digests(digest: Mapping[str, Any], reference: Mapping[str, Any]) -> Difference:
    """Compare loss and gradients of one step with those of the reference.

    A gradient that is zero in exact arithmetic, such as that of a key's bias, is noise in both. So the scale of a
    parameter is its largest element, but at least a thousandth of the model's largest gradient.
    """
    names = sorted((set(digest) & set(reference)) - {_LOSS})
    scale = max((_largest(reference[name]) for name in names), default=0.0)
    floor = 1e-3 * scale
    gradient_abs, gradient_rel, worst = 0.0, 0.0, ""
    for name in names:
        difference = _largest(digest[name] - reference[name])
        relative = difference / max(_largest(reference[name]), floor, _TINY)
        gradient_abs = max(gradient_abs, difference) if difference == difference else difference
        if not relative <= gradient_rel:  # NaN counts as the worst difference
            gradient_rel, worst = (relative, name) if gradient_rel == gradient_rel else (gradient_rel, worst)
    loss, expected = float(digest[_LOSS]), float(reference[_LOSS])
    return Difference(
        loss_abs=abs(loss - expected),
        loss_rel=abs(loss - expected) / max(abs(expected), _TINY),
        gradient_abs=gradient_abs,
        gradient_rel=gradient_rel,
        worst=worst,
        gradient_scale=scale,
        unmatched=tuple(
            sorted(name for name in set(digest) ^ set(reference) if _largest({**digest, **reference}[name]))
        ),
    )


def machine_facts() -> dict[str, Any]:
    """Return the facts needed to reproduce a measurement: versions, commit, CPU, cores."""
    import torch

    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "commit": _commit(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }


def to_json(measurement: Measurement) -> dict[str, Any]:
    """Return a measurement as plain data."""
    return asdict(measurement)


# ------------------------------------------------------------------------------------------------------ statistics

_LOSS = "\0loss"
"""Name of the loss in a digest, which no parameter can have."""


def _collect(
    task: Task,
    started: Mapping[str, Mapping[str, Any]],
    times: Mapping[str, Sequence[tuple[int, ...]]],
    peaks: Mapping[str, int | None],
    ran: Mapping[str, tuple[str, ...]],
) -> Measurement:
    names = tuple(started)
    baseline = "inductor" if "inductor" in names else names[0]
    reference = "eager" if "eager" in names else names[0]
    expected = _load_digest(started[reference])
    results = tuple(
        VariantResult(
            variant=name,
            cold_s=float(started[name]["cold_s"]),
            rounds_ns=tuple(times[name]),
            peak_bytes=peaks[name],
            loss=float(started[name]["loss"]),
            summary=summarize(times[name], times[baseline]),
            difference=compare_digests(_load_digest(started[name]), expected),
            ran=ran[name],
        )
        for name in names
    )
    medians = {result.variant: result.summary.median_ns for result in results}
    alone = [medians.pop(variant.name) for variant in ONE_CORE if variant.name in medians]
    cores = len(os.sched_getaffinity(0))
    return Measurement(
        task=task,
        baseline=baseline,
        reference=reference,
        cpu=cpu_description(),
        results=results,
        efficiencies={name: min(alone) / cores / median for name, median in medians.items()} if alone else {},
    )


def _load_digest(started: Mapping[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    with np.load(started["digest"]) as arrays:
        names = json.loads(str(arrays["names"]))
        return {name: arrays[f"a{number}"] for number, name in enumerate(names)} | {_LOSS: np.asarray(started["loss"])}


def _save_digest(path: Path, gradients: Mapping[str, npt.NDArray[np.float32]]) -> None:
    # A parameter may be named `file`, which is an argument of savez, so arrays are numbered.
    arrays: dict[str, Any] = {f"a{number}": array for number, array in enumerate(gradients.values())}
    np.savez(path, names=np.asarray(json.dumps(list(gradients))), **arrays)


def _medians(rounds_ns: npt.NDArray[np.float64], picks: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    medians: npt.NDArray[np.float64] = np.median(rounds_ns[picks].reshape(len(picks), -1), axis=1)
    return medians


def _largest(array: npt.NDArray[np.float32]) -> float:
    return float(np.abs(array).max()) if array.size else 0.0


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


# ---------------------------------------------------------------------------------------------------- the processes


class _Process:
    """The parent's handle of a child: sends one request, waits for one answer."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], pipe: Connection, log: Path) -> None:
        self._name, self._process, self._pipe, self._log = name, process, pipe, log

    def start(self) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self._ask(("start",), _START_TIMEOUT_S)
        return answer

    def warm_up(self, steps: int) -> int:
        return int(self._ask(("warm_up", steps), _START_TIMEOUT_S))

    def run(self, untimed: int, timed: int) -> Sequence[int]:
        answer: Sequence[int] = self._ask(("run", untimed, timed), _TURN_TIMEOUT_S)
        return answer

    def peak_bytes(self) -> int | None:
        answer: int | None = self._ask(("peak_bytes",), _TURN_TIMEOUT_S)
        return answer

    def ran(self) -> Sequence[str]:
        answer: Sequence[str] = self._ask(("ran",), _TURN_TIMEOUT_S)
        return answer

    def _ask(self, request: tuple[Any, ...], timeout_s: float) -> Any:
        try:
            self._pipe.send(request)
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

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-20:]
        return "; it wrote:\n" + "\n".join(lines) if lines else ""


@contextmanager
def _spawn(task: Task, variant: Variant, folder: Path, *, cold: bool) -> Iterator[_Process]:
    ours, theirs = socket.socketpair()
    log = folder / f"{variant.name}.log"
    order = {
        "path": sys.path,
        "task": asdict(task),
        "variant": asdict(variant),
        "digest": str(folder / f"{variant.name}.npz"),
        "fd": theirs.fileno(),
    }
    code = (
        "import json, sys; order = json.loads(sys.argv[1]); sys.path[:] = order['path']; "
        "from apollo_compile.tools.bench import serve; serve(order)"
    )
    command = [sys.executable, "-c", code, json.dumps(order)]
    if cold:
        command = ["env", f"TORCHINDUCTOR_CACHE_DIR={folder / variant.name}", *command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    theirs.close()
    pipe = Connection(ours.detach())
    try:
        yield _Process(variant.name, process, pipe, log)
    finally:
        pipe.close()  # the child sees the end of its socket and exits
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def serve(order: Mapping[str, Any]) -> None:
    """Run a child: answer requests until the parent closes the socket."""
    if order["variant"]["cores"] is not None:  # before torch counts them
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: order["variant"]["cores"]])
    pipe = Connection(order["fd"])
    stepper: _Stepper | None = None
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            if request[0] == "start":
                stepper = _Stepper(order)
                answer: Any = stepper.start(Path(order["digest"]))
            elif stepper is not None:
                answer = getattr(stepper, request[0])(*request[1:])
            pipe.send((False, answer))
        except Exception:
            pipe.send((True, traceback.format_exc()))


def _reset_peak() -> bool:
    """Reset the kernel's peak of this process's resident memory; return whether that worked."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_bytes() -> int:
    """Return the peak resident memory of this process; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


class _Stepper:
    """The built and compiled task in a child."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        import torch

        from apollo_compile.device.cpu.execute import keep_memory

        task, variant = order["task"], order["variant"]
        module, _, function = task["builder"].partition(":")
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)  # random weights and inputs are equal in all variants
        self._built = getattr(importlib.import_module(module), function)(**task["arguments"])
        self._device = next((parameter.device.type for parameter in self._built.model.parameters()), "cpu")
        self._is_training = task["mode"] == "train"
        self._is_reduced = task["dtype"] == "bfloat16"
        self._watches_peak = False
        self._keeps_memory = variant["keeps_memory"]
        if self._keeps_memory:
            keep_memory()
        self._call: Callable[..., Any] = self._built.model
        if variant["backend"] is not None:
            options = dict(variant["options"]) or None
            self._call = torch.compile(self._built.model, backend=variant["backend"], options=options)

    def start(self, digest: Path) -> dict[str, Any]:
        from apollo_compile.device.cpu.execute import trim_memory

        begin = time.perf_counter_ns()
        loss = self._step()
        cold_ns = time.perf_counter_ns() - begin
        parameters = self._built.model.named_parameters()
        gradients = {name: p.grad.float().numpy() for name, p in parameters if p.grad is not None}
        _save_digest(digest, gradients)
        self._clear()
        if self._keeps_memory:
            trim_memory()  # free memory from compiling; apollo does the same
        return {"cold_s": cold_ns / NS_PER_S, "loss": float(loss.detach()), "digest": str(digest)}

    def warm_up(self, steps: int) -> int:
        from apollo_compile.session.registry import is_settled

        taken = 0
        while taken < steps or (taken < MAX_WARMUP and not is_settled(self._built.model)):
            self._step()
            self._clear()
            taken += 1
        self._watches_peak = _reset_peak()
        return taken

    def peak_bytes(self) -> int | None:
        return _peak_bytes() if self._watches_peak else None

    def ran(self) -> list[str]:
        from apollo_compile.session.registry import variants_of

        return variants_of(self._built.model)

    def run(self, untimed: int, timed: int) -> list[int]:
        times: list[int] = []
        for _ in range(untimed + timed):
            begin = time.perf_counter_ns()
            self._step()
            times.append(time.perf_counter_ns() - begin)
            self._clear()
        return times[untimed:]

    def _step(self) -> Any:
        import torch

        with (
            torch.set_grad_enabled(self._is_training),
            torch.autocast(self._device, torch.bfloat16, enabled=self._is_reduced),
        ):
            loss = self._built.loss(self._call(**self._built.inputs))
        if self._is_training:
            loss.backward()
        return loss

    def _clear(self) -> None:
        for parameter in self._built.model.parameters():
            parameter.grad = None
