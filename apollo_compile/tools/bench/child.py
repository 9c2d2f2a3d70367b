"""The process of one variant: builds and compiles the task, and takes steps on request.

serve(order)    answers requests until the parent closes the socket

The stepper (`Variant.stepper`) defines a step, and the values to compare. `Stepper` takes forward, loss and backward,
or forward alone, and compares loss and gradients of its first step; benchmarks derive other steppers from it.
"""

from __future__ import annotations

import faulthandler
import importlib
import random
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from apollo_compile.tools.bench.numbers import Numbers, save_digest
from apollo_compile.units import NS_PER_S

MAX_WARMUP = 3000
"""Limit of warm-up steps; then a variant is measured even if autotuning has not ended."""


def serve(order: Mapping[str, Any]) -> None:
    """Run a child: answer requests until the parent closes the socket."""
    faulthandler.enable()
    pipe = Connection(order["fd"])
    stepper: Stepper | None = None
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            if request[0] == "start":
                module, _, name = order["variant"]["stepper"].partition(":")
                stepper = getattr(importlib.import_module(module), name)(order)
                answer: Any = stepper.start()
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


class Stepper:
    """The built and compiled task in a child; a step is forward, loss and backward, or forward alone."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        """Build the task of an order, which the parent sends (`spawn`)."""
        import torch

        from apollo_compile.device.cpu.execute import keep_memory

        task, variant = order["task"], order["variant"]
        module, _, function = task["builder"].partition(":")
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)  # so that all variants have the same weights and inputs
        self.built = getattr(importlib.import_module(module), function)(**task["arguments"])
        self._named = getattr(self.built.model, "named_parameters", tuple)  # a function has none
        self._device = next((parameter.device.type for _, parameter in self._named()), "cpu")
        self._is_training = task["mode"] == "train"
        self._is_reduced = task["dtype"] == "bfloat16"
        self._digest = Path(order["digest"])
        self._watches_peak = False
        self._keeps_memory = variant["keeps_memory"]
        if self._keeps_memory:
            keep_memory()
        self.prepare(variant["backend"], dict(variant["options"]))

    def prepare(self, backend: str | None, options: dict[str, Any]) -> None:
        """Compile the model, if there is a backend."""
        import torch

        self._call: Callable[..., Any] = self.built.model
        if backend is not None:
            self._call = torch.compile(self.built.model, backend=backend, options=options or None)

    def start(self) -> float:
        """Take the cold step; return its seconds."""
        from apollo_compile.device.cpu.execute import trim_memory

        begin = time.perf_counter_ns()
        loss = self.step()
        cold_ns = time.perf_counter_ns() - begin
        self.keep_first(loss)
        self.clear()
        if self._keeps_memory:
            trim_memory()  # free memory from compiling, as apollo does
        return cold_ns / NS_PER_S

    def keep_first(self, loss: Any) -> None:
        """Save loss and gradients of the first step."""
        gradients = {name: p.grad.float().numpy() for name, p in self._named() if p.grad is not None}
        self._numbers = self.save_numbers(loss, gradients)

    def save_numbers(self, loss: Any, values: Mapping[str, npt.NDArray[np.float32]]) -> Numbers:
        """Save the values to compare: the loss and an array per parameter."""
        save_digest(self._digest, values)
        return {"loss": float(loss.detach()), "digest": str(self._digest)}

    def numbers(self) -> Numbers:
        """Return the values to compare with the reference."""
        return self._numbers

    def warm_up(self, steps: int) -> int:
        """Take at least `steps` steps, and more until autotuning has ended; return the number of steps."""
        taken = 0
        while taken < steps or (taken < MAX_WARMUP and not self.is_settled()):
            self.step()
            self.clear()
            taken += 1
        self._watches_peak = _reset_peak()
        return taken

    def is_settled(self) -> bool:
        """Return whether autotuning has ended."""
        from apollo_compile.session.registry import is_settled

        return is_settled(self.built.model)

    def peak_bytes(self) -> int | None:
        """Return the largest resident memory in bytes since the warm-up; None if unknown."""
        return _peak_bytes() if self._watches_peak else None

    def ran(self) -> list[str]:
        """Return the variants that apollo runs, each once."""
        from apollo_compile.session.registry import variants_of

        return variants_of(self.built.model)

    def run(self, untimed: int, timed: int) -> list[int]:
        """Take steps; return the nanoseconds of the timed steps."""
        times: list[int] = []
        for _ in range(untimed + timed):
            begin = time.perf_counter_ns()
            self.step()
            times.append(time.perf_counter_ns() - begin)
            self.clear()
        return times[untimed:]

    def step(self) -> Any:
        """Take one step, the timed part; return the loss."""
        import torch

        with (
            torch.set_grad_enabled(self._is_training),
            torch.autocast(self._device, torch.bfloat16, enabled=self._is_reduced),
        ):
            loss = self.built.loss(self._call(**self.built.inputs))
        if self._is_training:
            loss.backward()
        return loss

    def clear(self) -> None:
        """Drop the gradients of a step, untimed."""
        for _, parameter in self._named():
            parameter.grad = None
