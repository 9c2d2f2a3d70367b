"""The GPU itself, and the process that is asked about it and for checks, started anew where one of them ends it.

DeviceProcess(device, folder)             a context manager
look_at_device(process, report, until)    copies, matmuls, versions
Looker                                    what the process answers; see `checks.py`
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from apollo_compile.json_form import to_json
from apollo_compile.tools.bench.facts import machine_facts
from apollo_compile.tools.bench.task import MeasuredTask, MeasuredVariant
from apollo_compile.tools.bench.turns import ChildProcess, spawn
from benchmarks.gpu_suite.checks import DOCTOR, CheckResult
from benchmarks.gpu_suite.stages import Clock, Report

MATMUL_WIDTH = 8192
COPY_BYTES = 2**30
REPEATS = 10


# ---------------------------------------------------------------------------------------------------------- the parent


class DeviceProcess:
    """A process that looks at the device, started when it is first asked."""

    def __init__(self, device: str, folder: Path, stepper: str = f"{__name__}:Looker") -> None:
        self._task = MeasuredTask(builder="", arguments={"device": device})
        self._variant = MeasuredVariant(name="device", backend=None, stepper=stepper)
        self._folder = folder
        self._stack = ExitStack()
        self._child: ChildProcess | None = None

    def __enter__(self) -> DeviceProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process; the next request starts another."""
        if self._child is not None:
            self._child.kill()
        self._child = None
        self._stack.close()

    def ask(self, request: tuple[Any, ...], limit_s: float, *, start_limit_s: float) -> Any:
        """Return its answer.

        Arguments:
            request: the name of a method of `Looker`, and its arguments.
            limit_s: seconds that the answer may take.
            start_limit_s: seconds that the start may take, where it does not run.

        Raises:
            ApolloError: the process failed, died or hung; it is stopped.
        """
        try:
            if self._child is None:
                started = spawn(self._task, self._variant, self._folder, cold=True, patience_s=0.0)
                self._child = self._stack.enter_context(started)
                facts = self._child.ask(("start",), start_limit_s)
                if request == ("start",):
                    return facts
            return self._child.ask(request, limit_s)
        except Exception:
            self.stop()
            raise


def look_at_device(process: DeviceProcess, clock: Clock, report: Report, until: float) -> None:
    """Add facts to the report."""
    for request in (("start",), ("rates",)):
        limit_s = max(1.0, until - clock())
        report.facts.update(process.ask(request, limit_s, start_limit_s=limit_s))


# --------------------------------------------------------------------------------------------------------- the process


class Looker:
    """Looks at a device, and checks it; answers are plain data."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._device = order["task"]["arguments"]["device"]
        self._gpu: Any = None
        self._checks: Mapping[str, Any] = {}

    def start(self) -> dict[str, Any]:
        """Open the device; return what it is."""
        facts = machine_facts()
        if self._device != "cuda":
            return facts
        from apollo_compile.device.gpu.run.gpu import TorchGpu
        from benchmarks.gpu_checks import THOROUGH_CHECKS

        torch.set_float32_matmul_precision("high")
        self._gpu = TorchGpu(0)
        native = self._gpu.native
        self._checks = THOROUGH_CHECKS
        gpu = {"gpu": native.name, "driver": native.driver_version, "cuda": torch.version.cuda, "sms": native.num_sms}
        return {**facts, **gpu, "memory_bytes": torch.cuda.get_device_properties(0).total_memory}

    def rates(self) -> dict[str, float]:
        """Return bytes per second of a copy, read and written, and flops per second of a matmul in bfloat16."""
        scale = 1 if self._device == "cuda" else 64
        source = torch.empty(COPY_BYTES // scale, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        width = MATMUL_WIDTH // scale
        left, right = (torch.randn(width, width, device=self._device, dtype=torch.bfloat16) for _ in range(2))
        copy_s, matmul_s = self._seconds(partial(target.copy_, source)), self._seconds(partial(torch.mm, left, right))
        return {"copy_bytes_per_s": 2 * source.numel() / copy_s, "matmul_flops_per_s": 2 * width**3 / matmul_s}

    def _seconds(self, work: Any) -> float:
        work()
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(REPEATS):
            work()
        self._synchronize()
        return (time.perf_counter() - begin) / REPEATS

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def doctor(self) -> dict[str, Any]:
        """Return whether doctor finds an error, and all that it finds."""
        from apollo_compile.tools.doctor import diagnose, is_fit, look

        results = diagnose(look())
        bad = [f"{each.subject}: {each.message}" for each in results if each.level in ("error", "warning")]
        numbers = {each.subject: to_json(each) for each in results}
        state = "ok" if is_fit(results) else "failed"
        result = CheckResult(name=DOCTOR, state=state, text="; ".join(bad) or "nothing to do", numbers=numbers)
        return asdict(result)

    def check(self, name: str) -> dict[str, Any]:
        """Run one check; one that raises has failed."""
        if name == DOCTOR:
            return self.doctor()
        if self._gpu is None:
            return asdict(CheckResult(name=name, state="skipped", text="needs a GPU"))
        try:
            outcome = self._checks[name](self._gpu)
            state, text, numbers = "ok" if outcome.is_met else "failed", outcome.text, outcome.numbers
        except Exception as error:
            lines = str(error).splitlines()[:2] or [""]  # torch puts the name of the backend into the first
            state, text, numbers = "failed", f"{type(error).__name__}: {' '.join(lines)}", {"error": str(error)}
        return asdict(CheckResult(name=name, state=state, text=text, numbers=numbers))
