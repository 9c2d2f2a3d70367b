"""Run a program on native lanes.

    (Program, bodies) -> Executable;  Executable.run(inputs) -> outputs;  Executable.trace() -> Trace

The lanes of a catalogue are threads of the process, made on first use and shared by all executables. Lane 0 has every
unit and therefore is the thread that calls: it has the OpenMP team that the rest of the user's program uses too, and
a second team would only slow both down. The other lanes are pinned threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from apollo_compile import _native
from apollo_compile.inductor import (
    CompiledBody,
    error_text_address,
    from_handles,
    prepare_lane_thread,
    tensor_api,
    to_handles,
)
from apollo_compile.ir import (
    Instruction,
    Lane,
    LaneId,
    Launch,
    Program,
    Record,
    Release,
    SegmentGraph,
    SegmentId,
    Span,
    Trace,
    Wait,
)


class Executable:
    """A program with its bodies, ready to run; `run` may be called from any thread, one call runs at a time."""

    def __init__(
        self, program: Program, graph: SegmentGraph, bodies: Sequence[CompiledBody], *, park_team: bool = True
    ) -> None:
        self._program = program
        self._graph = graph
        self._bodies = tuple(bodies)
        self._park_team = park_team
        self._native: _native.Executor | None = None
        self._pid = -1

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run once; `inputs` is emptied, so that the lanes can let go of each tensor after its last reader.

        Raises:
            Exception: whatever a body raised, as itself, with the name of its segment added as a note.
            RuntimeClosedError: the process is shutting down.
        """
        native = self._native
        if native is None or self._pid != os.getpid():  # a forked child has no lanes of its own yet
            native = self._start()
        handles = to_handles(inputs)
        inputs.clear()
        try:
            outputs = native.run(handles)
        except BaseException as error:
            failed = native.last_failure
            if failed is not None:
                error.add_note(f"raised in segment {self._graph.segments[failed].name} of {self._graph.name}")
            raise
        if None not in outputs:
            return from_handles(outputs)  # type: ignore[return-value]
        made = iter(from_handles([handle for handle in outputs if handle is not None]))
        return [None if handle is None else next(made) for handle in outputs]

    def trace(self) -> Trace:
        """Return the spans of the last run; empty before the first."""
        if self._native is None:
            return Trace(spans=(), duration_ns=0)
        spans = sorted(self._native.spans(), key=lambda span: (span[2], span[0]))
        return Trace(
            spans=tuple(
                Span(segment=SegmentId(segment), lane=LaneId(lane), start_ns=start, end_ns=end, core=core)
                for segment, lane, start, end, core in spans
            ),
            duration_ns=self._native.duration_ns,
        )

    def _start(self) -> _native.Executor:
        clone, destroy = tensor_api()
        self._native = _native.Executor(
            _start_lanes(self._program.lanes, park_team=self._park_team),
            instructions=[encode(instructions) for instructions in self._program.instructions],
            num_buffers=self._program.num_buffers,
            num_events=self._program.num_events,
            inputs=list(self._program.inputs),
            outputs=[-1 if buffer is None else buffer for buffer in self._program.outputs],
            clone_address=clone,
            destroy_address=destroy,
            bodies=[_to_native(body) for body in self._bodies],
        )
        self._pid = os.getpid()
        return self._native


def encode(instructions: Sequence[Instruction]) -> list[int]:
    """Return the instructions of one lane as the runtime reads them."""
    code: list[int] = []
    for instruction in instructions:
        match instruction:
            case Launch(segment=segment, body=body, inputs=inputs, takes=takes, outputs=outputs):
                code += [_native.LAUNCH, segment, body, len(inputs)]
                for buffer, take in zip(inputs, takes, strict=True):
                    code += [buffer, int(take)]
                code += [len(outputs), *outputs]
            case Record(event=event):
                code += [_native.RECORD, event]
            case Wait(event=event):
                code += [_native.WAIT, event]
            case Release(buffer=buffer):
                code += [_native.RELEASE, buffer]
    return code


def _to_native(body: CompiledBody) -> _native.NativeBody | Callable[[list[Any]], list[Any]]:
    if body.entry_address is not None:
        clone, destroy = tensor_api()
        return _native.NativeBody(
            body.entry_address,
            to_handles(list(body.constants)),
            clone_address=clone,
            destroy_address=destroy,
            error_text_address=error_text_address(),
        )
    function = body.function

    def run(handles: list[Any]) -> list[Any]:
        return to_handles(list(function(from_handles(handles))))

    return run


_lanes_lock = threading.Lock()
_lanes_by_key: dict[tuple[int, tuple[Lane, ...], bool], _native.Lanes] = {}
"""By process, catalogue and parking; guarded by `_lanes_lock`. Kept until the process ends."""


def available_units() -> int:
    """Return the number of cores that this process may run on."""
    return len(_native.available_cores())


def keep_memory() -> bool:
    """Keep freed memory in the process; return whether the C library will."""
    return _native.keep_memory()


def _start_lanes(lanes: tuple[Lane, ...], *, park_team: bool) -> _native.Lanes:
    key = (os.getpid(), lanes, park_team)
    with _lanes_lock:
        if key not in _lanes_by_key:
            available = _native.available_cores()
            cores = [[] if lane.id == 0 else [available[unit] for unit in lane.units] for lane in lanes]
            num_threads = torch.get_num_threads()
            _lanes_by_key[key] = _native.Lanes(
                cores=cores, on_start=lambda lane: prepare_lane_thread(len(cores[lane])), park_team=park_team
            )
            torch.set_num_threads(num_threads)  # a lane's quota is not to be the default of new threads
        return _lanes_by_key[key]
