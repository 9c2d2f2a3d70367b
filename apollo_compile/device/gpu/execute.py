"""Run a program on lanes of a GPU, and then as one CUDA graph.

    (Program, bodies) -> CudaExecutable;  CudaExecutable.run(inputs) -> outputs

The first runs are launched on the lanes, which also loads code and fills caches. Then the same launches are captured,
forks and joins included, as one CUDA graph over all lanes, and later runs replay it. A replay works on fixed addresses:

in place    Parameters, inputs that the graph writes to, and in a backward what its captured forward keeps. They are not
            copied; a replay requires that they are where they were.
copied in   All other inputs.
copied out  Outputs that the user can see, and may still look at when the next step overwrites them.
lent        Gradients stay in the graph's memory, and the caller gets views of it: training lets them go before the next
            backward. One that is not let go (they are added up over steps, or somebody collects them) is found out
            before a replay overwrites it; then the graph is captured again, and its gradients are copied out.
kept        What a forward saves for its backward stays in the graph's memory, and the caller gets a view of it. As long
            as such a view lives, a replay would overwrite it.

A run that cannot replay (inputs elsewhere, something kept is still in use: a second forward before the backward, a
graph kept by `retain_graph`) is launched on the lanes, in fresh memory, and is right in any case. If parameters have
moved for good, the graph is captured again, up to `MAX_CAPTURES` times. A capture that fails is one WARNING; lanes
stay. A backward is captured once its forward was.

A backward that lends nothing shares the memory of its forward: what the forward only needed while it ran is free by
then. That is so only if the forward was captured first, so a forward always begins with memory of its own; and it would
write over what is lent, so a backward that lends has memory of its own too.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from apollo_compile.device.gpu.gpu import Gpu, Recording, Stream
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
    """What the graphs of one model share."""

    forward: Captured | None = None
    """The latest captured forward."""
    stream: Stream | None = None
    """The caller's, at the last replay of any of them."""


@dataclass(eq=False, slots=True)
class Captured:
    """A CUDA graph with the addresses that it works on."""

    recording: Recording
    addresses: dict[int, int]
    """Of the inputs that are in place, by position."""
    slots: dict[int, torch.Tensor]
    """Where the other inputs are copied to."""
    outputs: list[torch.Tensor | None]
    kept: frozenset[int]
    """Where the memory of what is kept begins."""
    unused: dict[int, int]
    """By handle of its memory, how often what is kept or lent is referred to while nobody has use for it."""
    in_place: frozenset[int]
    """Where the memory of inputs in place begins."""
    copied: tuple[_Copied, ...]
    """What is copied out."""
    copied_outputs: frozenset[int]
    """The outputs that are copies, by position; what is copied may also be kept, as another output."""
    memory: tuple[LaneMemory, ...]

    def reads(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether a replay would read these inputs: those in place are where they were."""
        return [inputs[index].data_ptr() for index in self.addresses] == list(self.addresses.values())

    def can_replay(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether a replay would read these inputs, and nobody has use for what the last one made."""
        return self.reads(inputs) and count_uses(self.unused) == list(self.unused.values())


@dataclass(eq=False)
class CudaExecutable:
    """A program with its bodies, ready to run; one call runs at a time, of all on the device."""

    program: Program
    graph: SegmentGraph
    bodies: Sequence[CompiledBody]
    gpu: Gpu
    contract: Contract
    shared: ModelMemory
    urgency: Mapping[LaneId, int] = field(default_factory=dict)
    """Which lanes go first where they share units."""
    tuned: Mapping[tuple[BodyId, int], CompiledBody] = field(default_factory=dict)
    """What lanes run instead of a body, by its id and their number of units."""
    lane_memory_quota: int | None = None
    strict: bool = False
    """Raise what would otherwise be logged."""
    num_captures: int = 0
    num_replays: int = 0
    num_launches: int = 0
    """Runs on lanes."""
    _captured: Captured | None = None
    _addresses: dict[int, int] = field(default_factory=dict)
    """Of the parameters, when a run last could not replay."""
    _is_capturable: bool = True

    def __post_init__(self) -> None:
        """Find the streams, and what is in place."""
        functions = [body.function for body in self.bodies]
        self._tuned = {key: body.function for key, body in self.tuned.items()}
        self._launcher = Launcher(self.program, functions, self.gpu, self.urgency, self._tuned)
        position = {buffer: index for index, buffer in enumerate(self.program.inputs)}
        self._passed_on = {
            index: position[buffer]
            for index, buffer in enumerate(self.program.outputs)
            if buffer is not None and buffer in position
        }
        """Outputs that are inputs: the caller's own tensors, whatever runs."""
        if self.contract.written_inputs is None or self.contract.unsafe is not None:
            self._is_capturable = False
        # A quota is of a forward and its backward together, which share memory then.
        self._lends = self.graph.role is Role.BACKWARD and self.lane_memory_quota is None

    @property
    def lane_memory(self) -> tuple[LaneMemory, ...]:
        """Device memory by lane of the CUDA graph; empty where there is none."""
        return () if self._captured is None else self._captured.memory

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run once, in the order of the caller's stream; `inputs` is emptied.

        Raises:
            Exception: whatever a body raised.
            MemoryQuotaError: a lane takes more memory than it may.
        """
        with self.gpu.turn:
            if self.gpu.is_capturing() or not self._is_capturable:
                return self._launch(inputs)
            if self._captured is not None and self._captured.can_replay(inputs):
                return self._replay(self._captured, inputs)
            if self._captured is not None and self._lends and self._captured.reads(inputs):
                self._lends = False  # somebody holds a gradient that a replay would overwrite
                self.release()
            in_place = self._find_in_place(inputs)
            if in_place is not None and self._should_capture(inputs, in_place):
                self._capture(inputs, in_place)
                if self._captured is not None and self._captured.can_replay(inputs):
                    return self._replay(self._captured, inputs)
            return self._launch(inputs)

    def release(self) -> None:
        """Let the CUDA graph and its memory go; later runs capture it again."""
        with self.gpu.turn:
            if self._captured is None:
                return
            if self.shared.forward is self._captured:
                self.shared.forward = None
            self._captured = None
            self.num_captures -= 1  # no input has moved

    def measure(self, inputs: Sequence[torch.Tensor]) -> Observations:
        """Return how long every body takes on every number of units that a lane has, for these inputs.

        Raises:
            UnsupportedGraphError: it is not known what the graph writes to, so that it cannot be run for this alone.
            Exception: something cannot be captured.
        """
        written = self.contract.written_inputs
        if written is None:
            raise UnsupportedGraphError(f"{self.graph.name} writes to other tensors than its inputs; it is not timed")
        if self.contract.unsafe is not None:
            raise UnsupportedGraphError(f"{self.graph.name} has {self.contract.unsafe}, which no CUDA graph may hold")
        with self.gpu.turn:
            functions = [body.function for body in self.bodies]
            self.gpu.synchronize()  # nobody uses what lanes made before
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
        """Runs on lanes, launched or replayed."""
        return self.num_launches + self.num_replays

    def lane_bytes(self) -> Mapping[LaneId, int]:
        """Return what every lane took when the program was captured."""
        return {each.lane: each.num_bytes for each in self.lane_memory}

    def trace(self) -> Trace:
        """Return no spans: a replay does not tell when its segments ran; `measure` says how long bodies take."""
        return Trace(spans=(), duration_ns=0)

    def _launch(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        self.num_launches += 1
        stream = self.gpu.caller_stream()
        if not self.gpu.is_capturing():
            self._order_after_other_callers(stream)
        return self._launcher.launch(inputs, stream)

    def _order_after_other_callers(self, stream: Stream) -> None:
        """Let the lanes wait for all streams that may use what lanes made before, and that is free by now."""
        self.gpu.callers.add(stream)
        order_after(self.gpu, list(self.gpu.callers - {stream}), list(self._launcher.streams.values()))

    def _find_in_place(self, inputs: Sequence[torch.Tensor]) -> frozenset[int] | None:
        """Return the inputs that a capture can leave where they are; None if this is not the run for it.

        A forward waits until its parameters are where they were. What a backward reads may come from a forward that ran
        on lanes; it waits for a replayed one, and copies whatever that did not keep.
        """
        static, written = self.contract.static_inputs, self.contract.written_inputs or frozenset()
        if self.graph.role is Role.BACKWARD:
            forward = self.shared.forward
            memory = [_memory_of(tensor) for tensor in inputs]
            if forward is None or not forward.kept <= set(memory):
                return None
            stable = forward.kept | forward.in_place
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
        except Exception as error:  # lanes run what cannot be captured
            self._is_capturable = False
            if self.strict:
                raise
            _logger.warning(
                "%s runs on lanes without a CUDA graph: %s: %s", self.graph.name, type(error).__name__, error
            )

    def _make_captured(self, inputs: Sequence[torch.Tensor], in_place: frozenset[int]) -> Captured:
        slots = {index: _slot_for(tensor) for index, tensor in enumerate(inputs) if index not in in_place}
        outputs: list[torch.Tensor | None] = []

        def work(origin: Stream) -> None:
            arguments = [slots.get(index, tensor) for index, tensor in enumerate(inputs)]
            outputs.extend(self._launcher.launch(arguments, origin))

        # Communication reads gradients on streams of its own, which a replay would not wait for.
        self._lends = self._lends and not (torch.distributed.is_available() and torch.distributed.is_initialized())
        forward = self.shared.forward if self.graph.role is Role.BACKWARD and not self._lends else None
        shares = None if forward is None else forward.recording
        recording = self.gpu.capture(work, shares)
        memory = account(
            recording,
            self._launcher.streams,
            graph=self.graph,
            launched=self._segments_by_lane(),
            quota=self.lane_memory_quota,
        )
        not_ours = frozenset(_memory_of(inputs[index]) for index in in_place)
        inputs_read = not_ours | {_memory_of(slot) for slot in slots.values()}
        kept: dict[int, torch.Tensor] = {}
        lent: dict[int, torch.Tensor] = {}
        to_copy: dict[int, torch.Tensor] = {}
        for index, output in enumerate(outputs):
            if output is None or index in self._passed_on:
                continue
            place = _memory_of(output)
            if index not in self.contract.user_outputs:
                kept[place] = output
            elif self._lends and place and place not in inputs_read:
                lent[place] = output
            else:
                to_copy[index] = output
        kept = {place: output for place, output in kept.items() if place not in not_ours}
        copied = _find_copied(to_copy.values())
        handles = storage_handles([*kept.values(), *lent.values()])
        captured = Captured(
            recording=recording,
            addresses={index: inputs[index].data_ptr() for index in sorted(in_place)},
            slots=slots,
            outputs=[None if index in self._passed_on else output for index, output in enumerate(outputs)],
            kept=frozenset(kept),
            unused=dict(zip(handles, count_uses(handles), strict=True)),
            in_place=not_ours,
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
        self.gpu.copy(list(captured.slots.values()), [inputs[index] for index in captured.slots])
        captured.recording.replay()
        copies = [_slot_for(each.source) for each in captured.copied]
        self.gpu.copy(copies, [each.source for each in captured.copied])
        # One tensor that is returned twice is one again: autograd would else let two parameters have one gradient.
        views = {id(out): out.detach() for out in captured.outputs if out is not None}  # which can be counted
        copied = {
            id(output): _in_copy(output, each, copy)
            for each, copy in zip(captured.copied, copies, strict=True)
            for output in each.outputs
        }
        returned = [
            None if out is None else copied[id(out)] if index in captured.copied_outputs else views[id(out)]
            for index, out in enumerate(captured.outputs)
        ]
        for index, place in self._passed_on.items():
            returned[index] = inputs[place]
        inputs.clear()
        return returned

    def _order_after_last_replay(self) -> None:
        """Let the caller's stream wait for the one of the last replay, which worked in the same memory."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copied:
    """Outputs that share memory, and the part of it that is copied for them."""

    source: torch.Tensor
    """The output itself if it is the only one; else bytes, from the first to the last that any of them has."""
    outputs: tuple[torch.Tensor, ...]


def _find_copied(outputs: Iterable[torch.Tensor]) -> tuple[_Copied, ...]:
    by_memory: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
    for output in outputs:
        by_memory[_memory_of(output) or -id(output)][id(output)] = output  # an empty one has no memory
    found = []
    for together in by_memory.values():
        first, *others = together.values()
        source = _bytes_of(together.values()) if others or _overlaps_itself(first) else first
        found.append(_Copied(source=source, outputs=tuple(together.values())))
    return tuple(found)


def _bytes_of(tensors: Collection[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of one memory that hold all the tensors, from where every type of element may begin."""
    storage = next(iter(tensors)).untyped_storage()
    begin = min(_first_byte(tensor) for tensor in tensors) // _ALIGNMENT * _ALIGNMENT
    end = max(_first_byte(tensor) + _num_bytes(tensor) for tensor in tensors)
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, begin, (end - begin,), (1,))


_ALIGNMENT = 16
"""Bytes of the largest element."""


def _in_copy(output: torch.Tensor, copied: _Copied, copy: torch.Tensor) -> torch.Tensor:
    """Return the tensor that lies in the copy as `output` does in what was copied."""
    if copied.source is output:
        return copy
    offset = (_first_byte(output) - copied.source.storage_offset()) // output.element_size()
    empty = torch.empty(0, dtype=output.dtype, device=output.device)
    return empty.set_(copy.untyped_storage(), offset, output.shape, output.stride())


def _first_byte(tensor: torch.Tensor) -> int:
    """Return where a tensor begins in its memory."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _memory_of(tensor: torch.Tensor) -> int:
    """Return where the memory begins that a tensor is a part of."""
    return tensor.untyped_storage().data_ptr()


def _slot_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return new memory laid out as `tensor`.

    Raises:
        UnsupportedGraphError: elements of the tensor share memory, so that it cannot be copied into.
    """
    if _overlaps_itself(tensor):
        raise UnsupportedGraphError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} cannot be copied for a CUDA "
            "graph: its elements share memory; make it contiguous"
        )
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
