"""How much of a GPU a training step keeps busy, read off a profile of its kernels.

    profile_step(step, mark) -> trace
    read_kernels(trace)      -> kernels, and the SMs of every context that was marked
    busy_share(...), side_by_side_share(...)

A kernel is taken to hold as many SMs as it has blocks, but no more than its context has. That is an estimate from
above: blocks of a kernel may share an SM. Which context has how many SMs is told by a marker, a kernel of one block per
SM that is launched on every lane before the step.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MARKER = "_note_and_spin"
"""Name of the marker's kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRecord:
    """One kernel of a profile."""

    begin_ns: int
    end_ns: int
    blocks: int
    stream: int
    context: int


def profile_step(step: Callable[[], object], mark: Callable[[], None]) -> dict[str, Any]:
    """Return a trace, as torch's profiler writes it, of the markers and of one step after them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        mark()
        torch.cuda.synchronize()
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profile.export_chrome_trace(str(path))
        content: dict[str, Any] = json.loads(path.read_text())
        return content


def read_kernels(trace: Mapping[str, Any]) -> tuple[list[KernelRecord], dict[int, int]]:
    """Return the kernels of the step in order of time, and SMs by context."""
    kernels, sms = [], {}
    for event in trace["traceEvents"]:
        if event.get("cat") != "kernel":
            continue
        args = event["args"]
        blocks = args["grid"][0] * args["grid"][1] * args["grid"][2]
        if MARKER in event["name"]:
            sms[args["context"]] = blocks
            continue
        begin_ns = round(event["ts"] * 1000)
        kernels.append(
            KernelRecord(
                begin_ns=begin_ns,
                end_ns=begin_ns + round(event["dur"] * 1000),
                blocks=blocks,
                stream=args["stream"],
                context=args["context"],
            )
        )
    return sorted(kernels, key=lambda kernel: kernel.begin_ns), sms


def busy_share(kernels: Sequence[KernelRecord], *, num_sms: int, sms: Mapping[int, int]) -> float:
    """Return the share of SMs and time in which kernels hold SMs, from the first kernel to the end of the last.

    Arguments:
        kernels: of one step.
        num_sms: of the device.
        sms: by context; one that is not there may use all.
    """
    held_ns = 0.0
    for length_ns, running in _moments(kernels):
        by_context: Counter[int] = Counter()
        for kernel in running:
            by_context[kernel.context] += kernel.blocks
        held = sum(min(blocks, sms.get(context, num_sms)) for context, blocks in by_context.items())
        held_ns += length_ns * min(held, num_sms)
    return held_ns / (num_sms * _span_ns(kernels)) if kernels else 0.0


def side_by_side_share(kernels: Sequence[KernelRecord]) -> float:
    """Return the share of time, from the first kernel to the end of the last, in which several streams have kernels."""
    together_ns = sum(ns for ns, running in _moments(kernels) if len({kernel.stream for kernel in running}) > 1)
    return together_ns / _span_ns(kernels) if kernels else 0.0


def _span_ns(kernels: Sequence[KernelRecord]) -> int:
    return max(1, max(kernel.end_ns for kernel in kernels) - min(kernel.begin_ns for kernel in kernels))


def _moments(kernels: Sequence[KernelRecord]) -> list[tuple[int, list[KernelRecord]]]:
    """Return stretches of time between two events, with the kernels that run in them."""
    events = sorted(
        [(kernel.begin_ns, 1, index) for index, kernel in enumerate(kernels)]
        + [(kernel.end_ns, 0, index) for index, kernel in enumerate(kernels)]
    )
    moments, running, since = [], set[int](), 0
    for at_ns, is_begin, index in events:
        if running and at_ns > since:
            moments.append((at_ns - since, [kernels[each] for each in sorted(running)]))
        since = at_ns
        if is_begin:
            running.add(index)
        else:
            running.discard(index)
    return moments
