"""Run a program on lanes of a GPU, and then as one CUDA graph.

    (Program, bodies) -> CudaExecutable;  CudaExecutable.run(inputs) -> outputs

The first runs are launched on the lanes, which also loads code and warms caches. Then the same launches are captured,
forks and joins included, as one CUDA graph over all lanes, and later runs replay it. A replay uses fixed addresses:

in place    Parameters, inputs that the graph writes to, and, in a backward, tensors that its captured forward saved.
            They are not copied; a replay requires that their addresses are unchanged.
copied in   All other inputs.
copied out  Outputs that the user sees, who may still read them when the next step overwrites the graph's memory.
lent        Gradients stay in the graph's memory, and the caller gets views of it: training frees them before the next
            backward. If one is still referenced (gradients are accumulated over steps, or collected), that is detected
            before a replay overwrites it; then the graph is captured again, and its gradients are copied out.
saved       Tensors that a forward saves for its backward stay in the graph's memory, and the caller gets views of it.
            As long as such a view lives, a replay would overwrite it.

A run that cannot replay (inputs have moved, or saved tensors are still in use, by a second forward before the backward
or by `retain_graph`) is launched on the lanes, in fresh memory, which is always correct. If parameters have moved for
good, the graph is captured again, up to `MAX_CAPTURES` times. If a capture fails, there is one WARNING, and runs are
launched on the lanes. A backward is captured after its forward.

A backward that lends nothing shares the memory pool of its forward, where the forward's temporaries are free by then.
That requires that the forward is captured first, so a forward always gets a new pool. Reusing the forward's pool would
overwrite lent gradients, so a backward that lends gets a new pool, too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from apollo_compile.device.gpu.captured import Captured, find_copied, slot_for, storage_address
from apollo_compile.device.gpu.gpu import Gpu, Stream
from apollo_compile.device.gpu.launch import Launcher, order_after
from apollo_compile.device.gpu.measure import measure_bodies
from apollo_compile.device.gpu.quota import LaneMemory, account
from apollo_compile.device.target import CompiledBody, Contract
from apollo_compile.errors import MemoryQuotaError, UnsupportedGraphError
from apollo_compile.ir import BodyId, LaneId, Launch, Observations, Program, Role, SegmentGraph, SegmentId, Trace
from apollo_compile.torch_bridge.storages import count_uses, storage_handles

_logger = logging.getLogger(__name__)

WARMUP_RUNS = 2
"""Runs on lanes before a capture."""

MAX_CAPTURES = 3
"""Captures of one program; beyond that its inputs move too often."""


@dataclass(eq=False, slots=True)
class ModelMemory:
    """State that the graphs of one model share."""

    forward: Captured | None = None
    """The latest captured forward."""
    stream: Stream | None = None
    """The caller's stream at the last replay of any of them."""


@dataclass(eq=False)
class CudaExecutable:
    """A loaded program; one call runs at a time, of all programs on the device."""

    program: Program
    graph: SegmentGraph
    bodies: Sequence[CompiledBody]
    gpu: Gpu
    contract: Contract
    shared: ModelMemory
    urgency: Mapping[LaneId, int] = field(default_factory=dict)
    """Priorities of lanes that share units."""
    tuned: Mapping[tuple[BodyId, int], CompiledBody] = field(default_factory=dict)
    """Code tuned for lanes of one size, by id of the body and number of units."""
    lane_memory_quota: int | None = None
    strict: bool = False
    """Raise what would otherwise be logged."""
    num_captures: int = 0
    num_replays: int = 0
    num_launches: int = 0
    """Runs that were launched on the lanes."""
    _captured: Captured | None = None
    _addresses: dict[int, int] = field(default_factory=dict)
    """Addresses of inputs that can be in place, at the last run that could not replay."""
    _is_capturable: bool = True

    def __post_init__(self) -> None:
        """Create the launcher, and find outputs that are inputs."""
        functions = [body.function for body in self.bodies]
        self._tuned = {key: body.function for key, body in self.tuned.items()}
        self._launcher = Launcher(self.program, functions, self.gpu, self.urgency, self._tuned)
        position = {buffer: index for index, buffer in enumerate(self.program.inputs)}
        self._passthrough = {
            index: position[buffer]
            for index, buffer in enumerate(self.program.outputs)
            if buffer is not None and buffer in position
        }
        """Positions of outputs that are inputs, with the position of the input: the caller's own tensors."""
        if self.contract.written_inputs is None or self.contract.unsafe is not None:
            self._is_capturable = False
        # A quota holds for a forward and its backward together, so they must share memory.
        self._lends_gradients = self.graph.role is Role.BACKWARD and self.lane_memory_quota is None

    @property
    def lane_memory(self) -> tuple[LaneMemory, ...]:
        """Device memory of the CUDA graph by lane; empty if there is none."""
        return () if self._captured is None else self._captured.memory

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run once, in the order of the caller's stream; `inputs` is emptied.

        Raises:
            Exception: whatever a body raised.
            MemoryQuotaError: a lane takes more memory than it may.
        """
        with self.gpu.launch_lock:
            if self.gpu.is_capturing() or not self._is_capturable:
                return self._launch(inputs)
            if self._captured is not None and self._captured.can_replay(inputs):
                return self._replay(self._captured, inputs)
            if self._captured is not None and self._lends_gradients and self._captured.reads(inputs):
                self._lends_gradients = False  # somebody holds a gradient that a replay would overwrite
                self.release()
            in_place = self._find_in_place(inputs)
            if in_place is not None and self._should_capture(inputs, in_place):
                self._capture(inputs, in_place)
                if self._captured is not None and self._captured.can_replay(inputs):
                    return self._replay(self._captured, inputs)
            return self._launch(inputs)

    def release(self) -> None:
        """Release the CUDA graph and its memory; later runs capture it again."""
        with self.gpu.launch_lock:
            if self._captured is None:
                return
            if self.shared.forward is self._captured:
                self.shared.forward = None
            self._captured = None
            self.num_captures -= 1  # no input has moved

    def measure(self, inputs: Sequence[torch.Tensor]) -> Observations:
        """Time every body on every number of units that a lane has, for these inputs.

        Raises:
            UnsupportedGraphError: the graph may write to unknown tensors, so it cannot be run just to be timed.
            Exception: something cannot be captured.
        """
        written = self.contract.written_inputs
        if written is None:
            raise UnsupportedGraphError(f"{self.graph.name} writes to other tensors than its inputs; it is not timed")
        if self.contract.unsafe is not None:
            raise UnsupportedGraphError(f"{self.graph.name} has {self.contract.unsafe}, which no CUDA graph may hold")
        with self.gpu.launch_lock:
            functions = [body.function for body in self.bodies]
            self.gpu.synchronize()  # earlier outputs of lanes are no longer in use
            return measure_bodies(
                self.graph,
                functions,
                self.program.lanes,
                self.gpu,
                inputs,
                written=written,
                tuned=self._tuned,
            )

    @property
    def num_runs(self) -> int:
        """Number of runs, launched or replayed."""
        return self.num_launches + self.num_replays

    def lane_bytes(self) -> Mapping[LaneId, int]:
        """Return the bytes that every lane allocated in the capture."""
        return {each.lane: each.num_bytes for each in self.lane_memory}

    def trace(self) -> Trace:
        """Return no spans: a replay does not measure segments; `measure` times bodies."""
        return Trace(spans=(), duration_ns=0)

    def _launch(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        self.num_launches += 1
        stream = self.gpu.caller_stream()
        if not self.gpu.is_capturing():
            self._order_after_other_callers(stream)
        return self._launcher.launch(inputs, stream)

    def _order_after_other_callers(self, stream: Stream) -> None:
        """Make lanes wait for all streams that may still read earlier outputs of lanes, whose memory is free by now."""
        self.gpu.callers.add(stream)
        order_after(self.gpu, list(self.gpu.callers - {stream}), list(self._launcher.streams.values()))

    def _find_in_place(self, inputs: Sequence[torch.Tensor]) -> frozenset[int] | None:
        """Return the positions of inputs that a capture can use in place; None if this run must not be captured.

        A forward is captured when the addresses of its parameters did not change since the last run. A backward is
        captured after a replayed forward; inputs that the forward's CUDA graph did not save are copied.
        """
        static, written = self.contract.static_inputs, self.contract.written_inputs or frozenset()
        if self.graph.role is Role.BACKWARD:
            forward = self.shared.forward
            memory = [storage_address(tensor) for tensor in inputs]
            if forward is None or not forward.saved <= set(memory):
                return None
            stable = forward.saved | forward.in_place_storages
            return frozenset(index for index in static if memory[index] in stable) | written
        addresses = {index: inputs[index].data_ptr() for index in static | written}
        is_settled, self._addresses = addresses == self._addresses, addresses
        return static | written if is_settled else None

    def _should_capture(self, inputs: Sequence[torch.Tensor], in_place: frozenset[int]) -> bool:
        if self.num_launches < WARMUP_RUNS or self.num_captures == MAX_CAPTURES:
            return False
        if self._captured is None:
            return True
        return self._captured.addresses != {index: inputs[index].data_ptr() for index in in_place}

    def _capture(self, inputs: Sequence[torch.Tensor], in_place: frozenset[int]) -> None:
        self.num_captures += 1
        try:
            self._captured = self._make_captured(inputs, in_place)
        except MemoryQuotaError:
            self._is_capturable = False
            raise
        except Exception as error:  # runs are launched on the lanes instead
            self._is_capturable = False
            if self.strict:
                raise
            _logger.warning(
                "%s runs on lanes without a CUDA graph: %s: %s", self.graph.name, type(error).__name__, error
            )

    def _make_captured(self, inputs: Sequence[torch.Tensor], in_place: frozenset[int]) -> Captured:
        slots = {index: slot_for(tensor) for index, tensor in enumerate(inputs) if index not in in_place}
        outputs: list[torch.Tensor | None] = []

        def work(origin: Stream) -> None:
            arguments = [slots.get(index, tensor) for index, tensor in enumerate(inputs)]
            outputs.extend(self._launcher.launch(arguments, origin))

        # Collectives read gradients on streams of their own, which a replay would not wait for.
        self._lends_gradients = self._lends_gradients and not (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        )
        forward = self.shared.forward if self.graph.role is Role.BACKWARD and not self._lends_gradients else None
        shares = None if forward is None else forward.recording
        recording = self.gpu.capture(work, shares)
        memory = account(
            recording,
            self._launcher.streams,
            graph=self.graph,
            launched=self._segments_by_lane(),
            quota=self.lane_memory_quota,
        )
        in_place_storages = frozenset(storage_address(inputs[index]) for index in in_place)
        inputs_read = in_place_storages | {storage_address(slot) for slot in slots.values()}
        saved: dict[int, torch.Tensor] = {}
        lent: dict[int, torch.Tensor] = {}
        to_copy: dict[int, torch.Tensor] = {}
        for index, output in enumerate(outputs):
            if output is None or index in self._passthrough:
                continue
            place = storage_address(output)
            if index not in self.contract.user_outputs:
                saved[place] = output
            elif self._lends_gradients and place and place not in inputs_read:
                lent[place] = output
            else:
                to_copy[index] = output
        saved = {place: output for place, output in saved.items() if place not in in_place_storages}
        copied = find_copied(to_copy.values())
        handles = storage_handles([*saved.values(), *lent.values()])
        captured = Captured(
            recording=recording,
            addresses={index: inputs[index].data_ptr() for index in sorted(in_place)},
            slots=slots,
            outputs=[None if index in self._passthrough else output for index, output in enumerate(outputs)],
            saved=frozenset(saved),
            baseline_refcounts=dict(zip(handles, count_uses(handles), strict=True)),
            in_place_storages=in_place_storages,
            copied=copied,
            copied_outputs=frozenset(to_copy),
            memory=memory,
        )
        if self.graph.role is Role.FORWARD:
            self.shared.forward = captured
        return captured

    def _replay(self, captured: Captured, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        self.num_replays += 1
        self._order_after_last_replay()
        returned = captured.replay(self.gpu, inputs)
        for index, place in self._passthrough.items():
            returned[index] = inputs[place]
        inputs.clear()
        return returned

    def _order_after_last_replay(self) -> None:
        """Make the caller's stream wait for the stream of the last replay, which uses the same memory."""
        stream, last = self.gpu.caller_stream(), self.shared.stream
        if last is not None and last != stream:
            event = self.gpu.new_event()
            self.gpu.record(event, last)
            self.gpu.wait(event, stream)
        self.shared.stream = stream

    def _segments_by_lane(self) -> dict[LaneId, tuple[SegmentId, ...]]:
        return {
            lane.id: tuple(each.segment for each in instructions if isinstance(each, Launch))
            for lane, instructions in zip(self.program.lanes, self.program.instructions, strict=True)
        }
