"""The process of one variant: builds and compiles the task, and takes steps when it is asked to.

serve(order)    until the parent closes the socket
"""

from __future__ import annotations

import importlib
import os
import random
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from apollo_compile.tools.bench.numbers import save_digest
from apollo_compile.units import NS_PER_S

MAX_WARMUP = 3000
"""Most warm-up steps; then a variant is measured even if autotuning is not over. A comparison of short steps has
fewer."""


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
        save_digest(digest, gradients)
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
