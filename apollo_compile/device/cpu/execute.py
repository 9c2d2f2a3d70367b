"""Run a program on native lanes.

    (Program, bodies) -> Executable;  Executable.run(inputs) -> outputs;  Executable.trace() -> Trace

The lanes of a catalogue are threads of the process, started on first use and shared by all executables. Lane 0 has
every unit and is the calling thread, because it owns the OpenMP team of the user's program, and a second team would
slow both down. The other lanes are pinned threads.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from apollo_compile import _native
from apollo_compile.device.cpu.cgroup import granted_cores
from apollo_compile.device.cpu.cores import CoreShare, share_cores
from apollo_compile.errors import RuntimeClosedError
from apollo_compile.ir import (
    Instruction,
    Lane,
    LaneId,
    Launch,
    Observations,
    Program,
    Record,
    Release,
    SegmentGraph,
    SegmentId,
    Span,
    Trace,
    Wait,
)
from apollo_compile.target.target import CompiledBody
from apollo_compile.torch_bridge.handles import (
    error_text_address,
    from_handles,
    prepare_lane_thread,
    tensor_api,
    to_handles,
)
from apollo_compile.torch_bridge.profiler import is_profiling, profiler_functions
from apollo_compile.torch_bridge.upstream_bugs.vector_functions import choose_vector_kernels

_logger = logging.getLogger(__name__)


class Executable:
    """A loaded program; `run` may be called from any thread, one call runs at a time."""

    def __init__(
        self, program: Program, graph: SegmentGraph, bodies: Sequence[CompiledBody], *, mutates: bool, park_team: bool
    ) -> None:
        """Start the lanes if they are not running; `mutates`: whether the program writes to inputs."""
        self._graph = graph
        self._lane_by_segment = {
            instruction.segment: lane.id
            for lane, instructions in zip(program.lanes, program.instructions, strict=True)
            for instruction in instructions
            if isinstance(instruction, Launch)
        }
        self._bodies = tuple(bodies)
        self._mutates = mutates
        self.num_runs = 0
        """Number of runs on lanes."""
        clone, destroy = tensor_api()
        self._native = _native.Executor(
            start_lanes(program.lanes, park_team=park_team),
            instructions=[encode(instructions) for instructions in program.instructions],
            num_buffers=program.num_buffers,
            num_events=program.num_events,
            inputs=list(program.inputs),
            outputs=[-1 if buffer is None else buffer for buffer in program.outputs],
            clone_address=clone,
            destroy_address=destroy,
            bodies=[_to_native(body) for body in bodies],
        )

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run once; `inputs` is emptied, so that lanes can free each tensor after its last reader.

        Raises:
            Exception: an error of a body, with the name of its segment added as a note.
            RuntimeClosedError: the process was forked from the one that owns the lanes.
        """
        if getattr(_thread_state, "is_in_body", False) or (self._mutates and torch.is_inference_mode_enabled()):
            return self._run_serially(inputs)
        handles = to_handles(inputs)
        inputs.clear()
        self.num_runs += 1
        try:
            outputs = self._native.run(handles, self._ranges if is_profiling() else None)
        except RuntimeClosedError:
            raise
        except Exception as error:
            failed = self._native.last_failure
            if failed is not None:
                error.add_note(f"raised in segment {self._graph.segments[failed].name} of {self._graph.name}")
            raise
        made = iter(_as_made_here(from_handles([handle for handle in outputs if handle is not None])))
        return [None if handle is None else next(made) for handle in outputs]

    @functools.cached_property
    def _ranges(self) -> _native.Ranges | None:
        """Names of segments in a profile; None if this release of torch has no functions for it.

        The lane is part of a name because Kineto may give one of the threads a second name, that of the process.
        """
        functions = profiler_functions()
        lanes = self._lane_by_segment
        names = [f"{each.name} ({self._graph.name}, lane {lanes[each.id]})" for each in self._graph.segments]
        return None if functions is None else _native.Ranges(names, functions)

    def trace(self) -> Trace:
        """Return the spans of the last run; empty before the first."""
        spans = sorted(self._native.spans(), key=lambda span: (span[2], span[0]))
        return Trace(
            spans=tuple(
                Span(segment=SegmentId(segment), lane=LaneId(lane), start_ns=start, end_ns=end, core=core)
                for segment, lane, start, end, core in spans
            ),
            duration_ns=self._native.duration_ns,
        )

    def measure(self, inputs: Sequence[torch.Tensor]) -> Observations | None:
        """Return None: runs have spans."""
        return None

    def lane_bytes(self) -> Mapping[LaneId, int]:
        """Return an empty mapping: lanes hold no memory."""
        return {}

    def release(self) -> None:
        """Do nothing: no memory is held between runs."""

    def _run_serially(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run on the calling thread, in graph order.

        Lanes cannot serve two cases: a body that itself calls a compiled function, as the lanes are busy; and writes to
        inference tensors, since inference mode belongs to the thread that entered it.
        """
        values = dict(zip(self._graph.inputs, inputs, strict=True))
        inputs.clear()
        for segment in self._graph.segments:
            made = self._bodies[segment.body].function([values[buffer] for buffer in segment.inputs])
            values.update(zip(segment.outputs, made, strict=True))
        return [None if buffer is None else values[buffer] for buffer in self._graph.outputs]


def _as_made_here(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of other threads as inference tensors under inference mode; else Dynamo compiles readers again."""
    if not torch.is_inference_mode_enabled():
        return tensors
    others = (each for each in tensors if not (each.is_inference() or each.is_conj() or each.is_neg()))
    own = {each: each.new_empty(0).set_(each) for each in others}  # type: ignore[call-overload]
    return [own.get(each, each) for each in tensors]


def encode(instructions: Sequence[Instruction]) -> list[int]:
    """Return the instructions of one lane in the runtime's encoding."""
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
        tensors = from_handles(handles)
        _thread_state.is_in_body = True
        try:
            return to_handles(list(function(tensors)))
        finally:
            _thread_state.is_in_body = False

    return run


_thread_state = threading.local()
"""`is_in_body` is true on a thread while it runs the body of a segment under the GIL."""


_lanes_lock = threading.Lock()
_lanes_by_key: dict[tuple[tuple[Lane, ...], bool], _native.Lanes] = {}
"""Lanes by catalogue and `park_team`; guarded by `_lanes_lock`, kept until the process ends."""

_is_forked = False
"""Whether this process was forked: its first thread may have lost its OpenMP team, so it cannot be a lane of several
units."""


def _forget_lanes() -> None:
    """Drop the lanes and the lock in a forked child: the threads stay with the parent, and the lock may be held."""
    global _lanes_lock, _is_forked
    _lanes_lock, _is_forked = threading.Lock(), True
    _lanes_by_key.clear()


os.register_at_fork(after_in_child=_forget_lanes)


def available_units() -> int:
    """Return the number of cores for lanes: this rank's cores, limited by torch's threads and by control groups."""
    share, granted = core_share(), granted_cores()
    units = min(len(share.own), torch.get_num_threads())
    if granted is None or granted / share.size >= units:
        return units
    _warn_of_quota(units, granted / share.size)
    return max(1, int(granted / share.size))


def most_units() -> int:
    """Return the number of cores that torch uses, regardless of other local ranks and control groups."""
    return min(len(_native.available_cores()), torch.get_num_threads())


def core_share() -> CoreShare:
    """Return the cores that this process may run on, the cores of this rank first."""
    return share_cores(_native.available_cores())


@functools.cache
def _warn_of_quota(units: int, granted: float) -> None:
    _logger.warning(
        "the process may run on %d cores, but its control group grants %.3g cores' worth of time: lanes use %d; "
        "call torch.set_num_threads to limit the rest of the program too",
        units,
        granted,
        max(1, int(granted)),
    )


def keep_memory() -> bool:
    """Keep freed memory in the process (glibc's mallopt); return whether the C library supports it."""
    return _native.keep_memory()


def trim_memory() -> None:
    """Return free memory to the system, such as memory used by compiling or by other lanes."""
    _native.trim_memory()


def start_lanes(lanes: tuple[Lane, ...], *, park_team: bool) -> _native.Lanes:
    """Return the lanes of a catalogue, after starting them if they are not running.

    Raises:
        RuntimeError: threads cannot be pinned.
    """
    key = (lanes, park_team)
    with _lanes_lock:
        if key not in _lanes_by_key:
            order = core_share().order
            own = sorted(order[unit] for unit in lanes[0].units)  # for a lane without units, which computes little
            cores = [sorted(order[unit] for unit in lane.units) or own for lane in lanes]
            has_lost_team = _is_forked and len(lanes[0].units) > 1
            if len(lanes[0].units) == most_units() and not has_lost_team:
                cores[0] = []  # the calling thread; with fewer units than torch uses, it must be pinned, too
            choose_vector_kernels()
            num_threads = torch.get_num_threads()
            try:
                _lanes_by_key[key] = _native.Lanes(
                    cores=cores,
                    on_start=lambda lane: prepare_lane_thread(max(1, len(lanes[lane].units))),
                    park_team=park_team and not _is_forked,
                )
            finally:
                torch.set_num_threads(num_threads)  # else a lane's quota would be the default of new threads
        return _lanes_by_key[key]
