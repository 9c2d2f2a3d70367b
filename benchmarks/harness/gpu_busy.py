"""How much of a GPU a training step keeps busy, read off a profile of its kernels.

    profile_step(step, mark) -> trace
    read_step(trace)         -> its kernels, and the SMs of every context that was marked
    busy_share(...), side_by_side_share(...)

A kernel is taken to hold as many SMs as it has blocks, but no more than its context has. That is an estimate from
above: blocks of a kernel may share an SM. Which context has how many SMs is told by a marker, a kernel of one block per
SM that is launched on every lane before the step.
"""

from __future__ import annotations

import json
import math
import re
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StepKernels:
    """What ran in a step."""

    kernels: tuple[KernelRecord, ...]
    """In order of time."""
    sms: Mapping[int, int]
    """By context: as many as the largest of its markers has blocks."""
    mixed_contexts: tuple[int, ...] = ()
    """Those with markers of several sizes: the profile does not tell their lanes apart, so that a lane may be taken to
    have more SMs than it has."""


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


def read_step(trace: Mapping[str, Any]) -> StepKernels:
    """Return the kernels that begin after the last marker ended; what fills the memory of markers is before that."""
    events = _kernel_events(trace)
    markers = [event for event in events if MARKER in event["name"]]
    sizes: dict[int, set[int]] = {}
    for event in markers:
        sizes.setdefault(event["args"]["context"], set()).add(_blocks(event))
    kernels = [_record(event) for event in _events_after_markers(trace)]
    return StepKernels(
        kernels=tuple(sorted(kernels, key=lambda kernel: kernel.begin_ns)),
        sms={context: max(found) for context, found in sizes.items()},
        mixed_contexts=tuple(sorted(context for context, found in sizes.items() if len(found) > 1)),
    )


def marker_records(trace: Mapping[str, Any]) -> list[KernelRecord]:
    """Return the markers of a trace, in order of time."""
    markers = [_record(event) for event in _kernel_events(trace) if MARKER in event["name"]]
    return sorted(markers, key=lambda kernel: kernel.begin_ns)


CLASSES: tuple[tuple[str, str], ...] = (
    ("attention", r"flash|fmha|attention|cudnn.*sdpa"),
    ("matmul", r"gemm|cutlass|cublas|nvjet|wgmma|xmma|splitk|triton_.*_mm"),
    ("optimizer", r"adam|multi_tensor_apply|fused_optimizer"),
    ("Inductor's loops", r"^triton_"),
    ("copies and fills", r"copy|memcpy|memset|fill|cat"),
)
"""Classes of kernels, by a pattern of their names; the first that matches counts."""


def kernel_classes(trace: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return the number of kernels and the sum of their times by class, after the last marker."""
    found: dict[str, dict[str, int]] = {}
    for event in _events_after_markers(trace):
        name = next((name for name, pattern in CLASSES if re.search(pattern, event["name"], re.IGNORECASE)), "others")
        entry = found.setdefault(name, {"kernels": 0, "ns": 0})
        entry["kernels"] += 1
        entry["ns"] += round(event["dur"] * 1000)
    return dict(sorted(found.items(), key=lambda item: -item[1]["ns"]))


def _events_after_markers(trace: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    events = _kernel_events(trace)
    begin = max((event["ts"] + event["dur"] for event in events if MARKER in event["name"]), default=float("-inf"))
    return [event for event in events if event["ts"] >= begin and MARKER not in event["name"]]


def _kernel_events(trace: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]


def _record(event: Mapping[str, Any]) -> KernelRecord:
    begin_ns = round(event["ts"] * 1000)
    return KernelRecord(
        begin_ns=begin_ns,
        end_ns=begin_ns + round(event["dur"] * 1000),
        blocks=_blocks(event),
        stream=event["args"]["stream"],
        context=event["args"]["context"],
    )


def _blocks(event: Mapping[str, Any]) -> int:
    return math.prod(event["args"]["grid"])


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
