"""Run a program on lanes of a GPU, and then as one CUDA graph.

    (Program, bodies) -> CudaExecutable;  CudaExecutable.run(inputs) -> outputs

The first runs are launched on the lanes, which also loads code and warms caches. Then the same launches are captured,
forks and joins included, as one CUDA graph over all lanes, and later runs replay it. A replay uses fixed addresses:

in place    Parameters, inputs that the graph writes to, those that stayed where they are in the last steps, and, in a
            backward, tensors that its captured forward saved. They are not copied; a replay requires that their
            addresses are unchanged.
copied in   All other inputs.
copied out  Outputs that the user sees, who may still read them when the next step overwrites the graph's memory.
lent        Gradients stay in the graph's memory, and the caller gets views of it. If one is in use when a forward
            begins, that run is launched, and the gradients of the model are copied out from then on, by graphs that are
            captured again. Those of several ranks are always copied out.
saved       Tensors that a forward saves for its backward stay in the graph's memory, and the caller gets views of it.

The forwards and backwards of a model, of every variant, share one memory pool and overlay each other in it: on every
stream, together they take as much as the largest. Graphs without a backward share another pool. The outputs of a
capture do not own their memory: once a capture is over, only the saved outputs of a forward are owned, until its
backward is captured. So references are counted before a replay (`memory.py`). A forward requires that no output in the
pool is in use. A backward requires that the last replay was its own forward's; equal addresses alone prove nothing.

A run that cannot replay is launched on the lanes, in fresh memory, which is always correct: inputs have moved, saved
tensors are still in use by a second forward before the backward, or a backward may come again (`retain_graph`).
Parameters that move back and forth (averaged weights are swapped in for validation, FSDP2 gathers into memory that it
frees) get a CUDA graph for each of two sets of addresses. A third set replaces the one that was not used for longest.
If that one was not replayed often enough to pay for its capture, the next set has to come back twice as often as the
last (`captures.py`).

A backward releases the saved tensors of its forward as it goes: an input goes back to the stream that allocated it in
the forward, behind the first instruction there that is ordered after all its readers. So gradients are made where saved
tensors were.

Before a capture the launches are rehearsed: run once more, on the streams of the capture, with copies of the tensors
that they write to and with the state of random number generators restored. A forward is rehearsed in the memory of the
capture; a backward apart from it, since it still has the saved tensors of its forward. So a launch that finds no
memory, or waits for the device, fails there, where nothing is lost; see Note [captures that fail]. Then there is one
WARNING, and runs are launched on the lanes. A backward is captured after its forward.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from apollo_compile.device.gpu.run.captured import Captured
from apollo_compile.device.gpu.run.capturer import Capturer, segments_by_lane
from apollo_compile.device.gpu.run.captures import ProgramCaptures
from apollo_compile.device.gpu.run.gpu import Gpu, Sharing
from apollo_compile.device.gpu.run.in_place import InPlace
from apollo_compile.device.gpu.run.launch import Launcher, launch_with_room
from apollo_compile.device.gpu.run.measure import measure_bodies
from apollo_compile.device.gpu.run.memory import ModelMemory
from apollo_compile.errors import CaptureError, MemoryQuotaError, NotReplayedError, UnsupportedGraphError
from apollo_compile.ir import LaneId, Observations, Program, Role, SegmentGraph, Trace, Variant
from apollo_compile.target.target import CompiledBody, Contract
from apollo_compile.torch_bridge.private_attributes import has_saved_tensor_hooks, keeps_graph
from apollo_compile.torch_bridge.profiler import is_profiling, named

_logger = logging.getLogger(__name__)

WARMUP_RUNS = 2
"""Runs on lanes before a capture."""

_IN_USE = "outputs of an earlier run are in use, where a replay would write; zero_grad releases gradients"
_MOVED = "its parameters are at other addresses again and again; a replay needs them in place"


@dataclass(eq=False)
class CudaExecutable:
    """A loaded program; one call runs at a time, of all programs on the device."""

    program: Program
    graph: SegmentGraph
    bodies: Sequence[CompiledBody]
    gpu: Gpu
    contract: Contract
    shared: ModelMemory
    variant: Variant | None = None
    """Variant of the model that it belongs to; a backward reads tensors that the forward of the same variant saved."""
    lane_memory_quota: int | None = None
    strict: bool = False
    """Raise errors that would otherwise be logged."""
    only_replays: bool = False
    """Launch nothing but a CUDA graph, which is captured at the first run."""
    num_captures: int = 0
    num_replays: int = 0
    num_launches: int = 0
    """Runs that were launched on the lanes."""
    capture_error: str | None = None
    """Why the last capture failed; None if none did. Nothing is captured after a failure."""

    def __post_init__(self) -> None:
        """Create the launcher and the capturer."""
        self._captures = ProgramCaptures(self.shared)
        self._in_place = InPlace(self.contract, self.graph.role, self.variant, self.shared)
        functions = [body.function for body in self.bodies]
        by_lane = segments_by_lane(self.program)
        lanes = {segment: lane for lane, launched in by_lane.items() for segment in launched}
        names = [f"{each.name} ({self.graph.name}, lane {lanes[each.id]})" for each in self.graph.segments]
        self._launcher = Launcher(self.program, functions, self.gpu, names)
        self._is_capturable = self.contract.written_inputs is not None and self.contract.unsafe is None
        self._has_logged_hooks = False
        self._num_bytes = sum(buffer.num_bytes for buffer in self.graph.buffers if buffer.producer is not None)
        """Bytes of the buffers that the graph makes; at most so much is alive at once, besides memory of bodies."""
        self._capturer = Capturer(
            program=self.program,
            graph=self.graph,
            gpu=self.gpu,
            contract=self.contract,
            shared=self.shared,
            launcher=self._launcher,
            variant=self.variant,
            lane_memory_quota=self.lane_memory_quota,
            num_bytes=None if self.only_replays else self._num_bytes,
        )

    @property
    def captures(self) -> tuple[Captured, ...]:
        """The CUDA graphs that can be replayed, the one that was used last first."""
        return tuple(self._captures)

    @property
    def may_capture(self) -> bool:
        """Whether runs may still become a CUDA graph."""
        return self._is_capturable and self.shared.out_of_memory is None and self.gpu.captures.why_off is None

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run once, in the order of the caller's stream; `inputs` is emptied.

        Raises:
            Exception: whatever a body raised.
            MemoryQuotaError: a lane takes more memory than it may.
            NotReplayedError: it only replays, and cannot now.
        """
        with self.gpu.launch_lock:
            if self.graph.role is Role.FORWARD:
                self.shared.has_hooks = has_saved_tensor_hooks()
            reason = self._why_launched()
            if reason is None:
                captured = self._captures.find(inputs) or self._capture_if_settled(inputs)
                if captured is not None:
                    return self._replay(captured, inputs)
            if self.only_replays:
                raise NotReplayedError(reason or _MOVED)
            return self._launch(inputs)

    def release(self) -> None:
        """Release all CUDA graphs; later runs capture them again."""
        with self.gpu.launch_lock:
            self._captures.release()

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
        if self.gpu.captures.why_off is not None:
            raise UnsupportedGraphError(f"{self.graph.name} is not timed: {self.gpu.captures.why_off}")
        with self.gpu.launch_lock:
            functions = [body.function for body in self.bodies]
            self.gpu.synchronize()  # earlier outputs of lanes are no longer in use
            return measure_bodies(
                self.graph,
                functions,
                self.program.lanes,
                self.gpu.sharing(Sharing.APART),  # plain streams would all get the whole device
                inputs,
                written=written,
            )

    @property
    def num_runs(self) -> int:
        """Number of runs, launched or replayed."""
        return self.num_launches + self.num_replays

    def lane_bytes(self) -> Mapping[LaneId, int]:
        """Return the bytes that every lane allocated in the capture of the CUDA graph that was used last."""
        latest = self._captures.latest
        return {} if latest is None else latest.memory

    def trace(self) -> Trace:
        """Return no spans: a replay does not measure segments; `measure` times bodies."""
        return Trace(spans=(), duration_ns=0)

    def _why_launched(self) -> str | None:
        """Return why this run is launched on the lanes, whatever its inputs are; None if it may be a replay.

        A replay or a rehearsal must not overwrite anything that is in use. Lent gradients in use end the lending.
        """
        if self.gpu.is_capturing():
            return "a CUDA graph is being captured"
        if not self.may_capture:
            reasons = (self.gpu.captures.why_off, self.shared.out_of_memory, self.capture_error)
            return next((reason for reason in reasons if reason), "a CUDA graph cannot hold it")
        if self.graph.role is Role.BACKWARD:
            if keeps_graph():
                return "its graph is kept for another backward, whose inputs a replay would overwrite"
            self._log_hooks()
            return None if self.shared.contents is not None else _IN_USE  # its forward replayed when nothing was
        # Collectives may read gradients on streams of their own.
        has_others = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.graph.role is Role.FORWARD and has_others:
            self.shared.copy_gradients("torch.distributed is initialized, and a replay does not wait for collectives")
        if self.shared.is_free():
            return None
        if self.graph.role is Role.FORWARD and self.shared.lends_gradients():
            self.shared.copy_gradients(
                "a gradient is in use when a forward begins, which would overwrite it; call zero_grad before the "
                "forward to save the copies"
            )
        return _IN_USE

    def _launch(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Launch on the lanes, in fresh memory."""
        self.num_launches += 1
        if self.gpu.is_capturing():
            return self._launcher.launch(inputs, self.gpu.caller_stream())
        return launch_with_room(self._launcher, inputs, num_bytes=self._num_bytes, may_repeat=not self.contract.writes)

    def _log_hooks(self) -> None:
        """Log once why a backward is launched at every step, although its forward is replayed."""
        if self.shared.has_hooks and self.shared.forwards and not self._has_logged_hooks:
            self._has_logged_hooks = True
            _logger.info(
                "%s is launched on lanes at every step, since saved_tensors_hooks may replace or keep tensors that a "
                "CUDA graph would overwrite; remove the hooks for replays",
                self.graph.name,
            )

    def _capture_if_settled(self, inputs: Sequence[torch.Tensor]) -> Captured | None:
        """Return a new CUDA graph if the addresses of the inputs in place are settled; None if none is made."""
        latest = self._captures.latest
        if self._in_place.drop_moved(inputs, {} if latest is None else latest.addresses):
            self._captures.release()
        in_place = self._in_place.find(inputs)
        if in_place is None:
            return None
        addresses = tuple(inputs[index].data_ptr() for index in sorted(in_place))
        is_known = self.graph.role is Role.BACKWARD or self.only_replays  # to captured forwards, or from other runs
        is_settled = self._captures.note(addresses, head_start=is_known)
        if is_settled and (self.only_replays or self.num_launches >= WARMUP_RUNS):
            return self._capture(inputs, in_place)
        return None

    def _capture(self, inputs: Sequence[torch.Tensor], in_place: frozenset[int]) -> Captured | None:
        """Return a new CUDA graph; None if that failed."""
        self.num_captures += 1
        self._captures.make_place()
        try:
            captured = self._capturer.capture(inputs, in_place, self._in_place.forward_of(inputs))
        except MemoryQuotaError:
            self._is_capturable = False
            raise
        except Exception as error:  # runs are launched on the lanes instead
            self._give_up(error)
            if self.only_replays:
                raise CaptureError(self.capture_error) from error
            if self.strict:
                raise
            return None
        self._captures.add(captured)
        self.gpu.captures.add(captured)
        return captured

    def _give_up(self, error: Exception) -> None:
        """Capture this program no more; without memory, no graph of the model. The WARNING is the fallback's."""
        self._is_capturable = False
        self.capture_error = f"{type(error).__name__}: {error}"
        if not self.only_replays:
            self.shared.failure = f"{self.graph.name}: {self.capture_error}"
        if isinstance(error, torch.OutOfMemoryError):
            traceback.clear_frames(error.__traceback__)  # which hold allocated tensors
            if not self.only_replays:  # another step may be smaller, and finds the memory of this one
                self.shared.out_of_memory = self.capture_error
            self.shared.release()
            self.gpu.give_back_memory()
        if self.gpu.captures.why_off is None and not self.strict:
            _logger.info("%s runs on lanes without a CUDA graph: %s", self.graph.name, self.capture_error)

    def _replay(self, captured: Captured, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        self.num_replays += 1
        self.shared.follow(self.gpu)
        self.shared.note_replay(captured)
        with named(self.graph.name if is_profiling() else None):
            returned = captured.replay(self.gpu, inputs)
        inputs.clear()
        return returned
