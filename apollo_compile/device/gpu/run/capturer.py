"""Make a CUDA graph of a program: copy inputs, rehearse, capture, and sort the outputs.

    Capturer(program, graph, gpu, ...).capture(inputs, in place, forward) -> Captured

`execute.py` defines the terms, and decides when to capture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from apollo_compile.device.gpu.run.captured import Captured, Owner, keep_outputs
from apollo_compile.device.gpu.run.copies import storage_address, target_for
from apollo_compile.device.gpu.run.gpu import Gpu, Recording, Stream
from apollo_compile.device.gpu.run.launch import Launcher, Releases, find_releases, order_after
from apollo_compile.device.gpu.run.memory import ModelMemory
from apollo_compile.errors import MemoryQuotaError
from apollo_compile.ir import BufferId, LaneId, Launch, Program, Role, SegmentGraph, SegmentId, Variant
from apollo_compile.target.target import Contract
from apollo_compile.torch_bridge.storages import storages_of
from apollo_compile.units import format_bytes


@dataclass(eq=False, kw_only=True)
class Capturer:
    """Captures one program."""

    program: Program
    graph: SegmentGraph
    gpu: Gpu
    contract: Contract
    shared: ModelMemory
    launcher: Launcher
    variant: Variant | None
    """Which variant of the model it is of."""
    lane_memory_quota: int | None
    num_bytes: int | None
    """Bytes that have to be free before a rehearsal; None leaves it to the rehearsal, as for whole steps, of which far
    from all buffers are alive at once."""
    _passthrough: Mapping[int, int] = field(init=False)
    """Positions of outputs that are inputs, with the position of the input: the caller's own tensors."""

    def __post_init__(self) -> None:
        """Find outputs that are inputs."""
        position = {buffer: index for index, buffer in enumerate(self.program.inputs)}
        self._passthrough = {
            index: position[buffer]
            for index, buffer in enumerate(self.program.outputs)
            if buffer is not None and buffer in position
        }

    def capture(self, inputs: Sequence[torch.Tensor], in_place: frozenset[int], forward: Captured | None) -> Captured:
        """Return a CUDA graph for inputs like these.

        Arguments:
            inputs: of a run.
            in_place: positions of those that are not copied.
            forward: for a backward, the CUDA graph that saved its inputs.

        Raises:
            torch.OutOfMemoryError: its buffers do not fit into free memory.
            MemoryQuotaError: a lane takes more memory than it may.
            Exception: something cannot be captured; nothing has run that anybody sees.
        """
        free = self.gpu.free_bytes()
        if self.num_bytes is not None and self.num_bytes > free:
            raise torch.OutOfMemoryError(
                f"a CUDA graph of {self.graph.name} needs {format_bytes(self.num_bytes)} for its buffers, and "
                f"{format_bytes(free)} are free; use a smaller batch, or turn 'device.cuda_lanes' off"
            )
        copied_in = {index: target_for(tensor) for index, tensor in enumerate(inputs) if index not in in_place}
        made: list[torch.Tensor | None] = []
        given: set[StorageWeakRef] = set()
        streams: dict[int, Stream] = {}

        def note(stream: Stream, outputs: Sequence[torch.Tensor]) -> None:
            for output in outputs:
                streams.setdefault(storage_address(output), stream)  # memory of a pool stays with its stream

        def work(origin: Stream) -> None:
            arguments = [copied_in.get(index, tensor) for index, tensor in enumerate(inputs)]
            releases = self._take_over(forward, arguments, origin)
            # By identity: outputs may be at the addresses of released inputs.
            given.update(storages_of(arguments))
            made.extend(self.launcher.launch(arguments, origin, made=note, releases=releases))

        self.shared.follow(self.gpu)
        recording = self.gpu.capture(
            work, self.shared.find_pool(), self._rehearsal(inputs, copied_in), is_apart=forward is not None
        )
        memory = self._lane_bytes(recording)
        in_place_storages = frozenset(storage_address(inputs[index]) for index in in_place)
        owned = {
            id(output): output
            for output in made
            if output is not None and storage_address(output) and not storages_of([output]) <= given
        }
        aliases = dict(zip(owned, self.gpu.alias(list(owned.values()), recording), strict=True))
        kept = keep_outputs(
            [self._passthrough.get(index, aliases.get(id(output), output)) for index, output in enumerate(made)],
            user_outputs=self.contract.user_outputs,
            in_place=in_place_storages,
            own=frozenset(map(id, aliases.values())),
            lends=self.graph.role is Role.BACKWARD and self.shared.why_copied is None,
        )
        captured = Captured(
            role=self.graph.role,
            recording=recording,
            addresses={index: inputs[index].data_ptr() for index in sorted(in_place)},
            copied_in=copied_in,
            in_place_storages=in_place_storages,
            kept=kept,
            memory=memory,
            variant=self.variant,
            forward=forward,
        )
        if self.graph.role is Role.FORWARD:
            captured.owners = {
                place: Owner(storage=output.untyped_storage(), stream=streams[place])
                for output in owned.values()
                if (place := storage_address(output)) in kept.saved
            }
        if forward is not None:
            forward.readers.append(captured)
        if forward is not None or self.graph.role is Role.STEP:
            self.gpu.give_back_memory()  # of launched runs
        return captured

    def _lane_bytes(self, recording: Recording) -> dict[LaneId, int]:
        """Return the device memory of every lane, in whole segments of the allocator, cuBLAS workspaces included.

        Each of these segments belongs to a stream, and a lane is a stream. A CUDA graph allocates only while it is
        captured, so one over its quota is dropped before it runs.

        Raises:
            MemoryQuotaError: a lane took more than it may.
        """
        streams, quota, graph = self.launcher.streams, self.lane_memory_quota, self.graph
        found = {lane: recording.bytes_of(streams[lane]) for lane in sorted(streams)}
        for lane, num_bytes in found.items():
            if quota is not None and num_bytes > quota:
                segments = segments_by_lane(self.program)[lane]
                chosen = max(segments, key=lambda s: sum(graph.buffers[b].num_bytes for b in graph.segments[s].outputs))
                raise MemoryQuotaError(
                    f"lane {lane} of {graph.name} took {format_bytes(num_bytes)} for {len(segments)} segments; it may "
                    f"take {format_bytes(quota)}; most of it is kept for {graph.segments[chosen].name}: raise "
                    "'device.lane_memory_quota', or cut the graph with 'partition.max_segment_share'"
                )
        return found

    def _take_over(self, forward: Captured | None, arguments: list[torch.Tensor], origin: Stream) -> Releases:
        """Let the launches own the saved outputs of the forward, and return where they release their memory."""
        if forward is None:
            return {}
        owners, forward.owners = forward.owners or {}, None
        lane_of = {self.launcher.streams.get(lane.id, origin): lane.id for lane in self.program.lanes}
        lanes: dict[BufferId, LaneId] = {}
        for index, tensor in enumerate(arguments):
            owner = owners.get(storage_address(tensor))
            if owner is not None:
                arguments[index] = owner.owning(tensor)
                if owner.stream in lane_of:
                    lanes[self.program.inputs[index]] = lane_of[owner.stream]
        return find_releases(self.program, lanes)

    def _rehearsal(
        self, inputs: Sequence[torch.Tensor], copied_in: Mapping[int, torch.Tensor]
    ) -> Callable[[Stream], None]:
        """Return a function that launches the program and writes to nothing that anybody sees."""
        written = {index: inputs[index].clone() for index in self.contract.written_inputs or ()}
        self.gpu.copy(list(copied_in.values()), [inputs[index] for index in copied_in])
        stand_ins = {**copied_in, **written}

        def rehearse(origin: Stream) -> None:
            order_after(self.gpu, list(self.gpu.callers), [origin])  # which may read the memory that lanes write to
            with self.gpu.random_numbers_kept():
                arguments = [stand_ins.get(index, tensor) for index, tensor in enumerate(inputs)]
                self.launcher.launch(arguments, origin)

        return rehearse


def segments_by_lane(program: Program) -> dict[LaneId, tuple[SegmentId, ...]]:
    """Return the segments that every lane launches, in order."""
    return {
        lane.id: tuple(each.segment for each in instructions if isinstance(each, Launch))
        for lane, instructions in zip(program.lanes, program.instructions, strict=True)
    }
