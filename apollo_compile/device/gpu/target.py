"""A GPU as a target: lanes are streams, and programs are replayed as CUDA graphs.

GpuTarget(gpu, profile, config, device=...) -> Target
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from apollo_compile.config import Config
from apollo_compile.device.gpu.run.execute import CudaExecutable
from apollo_compile.device.gpu.run.gpu import Gpu, Sharing
from apollo_compile.device.gpu.run.memory import ModelMemory
from apollo_compile.ir import Lane, LaneId, Program, Role, SegmentGraph, Variant
from apollo_compile.json_form import to_json
from apollo_compile.passes.join import join_segments
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.fingerprint import Fingerprint
from apollo_compile.target.matmul import Matmul
from apollo_compile.target.profile import DeviceProfile
from apollo_compile.target.target import Code, CompiledBody, Run, Target
from apollo_compile.trials import program_in_order


class GpuTarget:
    """One GPU, with the memory that the graphs of one model share there."""

    has_spans = False
    calls_wait = False
    captures = True
    has_native_bodies = False
    keeps_profile = True

    def __init__(
        self,
        gpu: Gpu,
        profile: DeviceProfile,
        config: Config,
        *,
        device: torch.device,
        fingerprint: Fingerprint | None = None,
        find_unavailable_reason: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Make the target of one model.

        Arguments:
            gpu: the device.
            profile: what plans are made for.
            config: its options hold.
            device: where the tensors are.
            fingerprint: GPU, driver and torch, for what later processes take over.
            find_unavailable_reason: returns why lanes must stay off; see `self_check.py`.
        """
        self.gpu = gpu
        self.profile = profile
        self.device = device
        self.lane_memory_quota = config.device.lane_memory_quota
        self._memory = ModelMemory()
        """The pool that all variants of forward and backward share."""
        self._other_memory = ModelMemory()
        """That of graphs without a backward, which run while saved tensors or gradients are in use, and of steps."""
        self._config = config
        self._find_unavailable_reason = find_unavailable_reason
        self._fingerprint = fingerprint

    def unavailable_reason(self) -> str | None:
        """Return what a failed capture left behind, or what the self-check of this GPU found wrong; None if nothing."""
        return self.gpu.captures.why_off or self._find_unavailable_reason()

    def failure(self) -> str | None:
        """Return why a program of a graph cannot be a CUDA graph; None if none was refused.

        Programs of steps do not count: where one fails, the loop takes its steps.
        """
        return self.gpu.captures.why_off or self._memory.failure or self._other_memory.failure

    def start(self, lanes: tuple[Lane, ...]) -> None:
        """Do nothing: streams are created at the first launch."""

    def saved_by_onednn(self, cases: Iterable[tuple[Matmul, int]]) -> Mapping[tuple[Matmul, int], float]:
        """Return nothing: oneDNN computes on CPUs."""
        return {}

    def load(self, compilation: Compilation, code: Code, variant: Variant) -> CudaExecutable:
        """Load the program onto lanes."""
        return CudaExecutable(
            program=compilation.program,
            graph=compilation.partition.graph,
            bodies=code.bodies,
            gpu=self.gpu.sharing(Sharing.APART if self._config.runtime.isolation else Sharing.FREE),
            contract=code.contract,
            shared=self._memory_of(compilation.partition.graph),
            variant=variant,
            lane_memory_quota=self.lane_memory_quota,
            strict=self._config.debug.strict or code.is_all_or_nothing,
            only_replays=code.is_all_or_nothing,
        )

    def load_whole(self, compilation: Compilation, code: Code, run: Run) -> CudaExecutable:
        """Load the compiled graph as a program of one segment, which becomes a CUDA graph like a plan."""
        graph, program, body = as_one_segment(compilation.partition.graph, compilation.plan.lanes[0], run)
        return CudaExecutable(
            program=program,
            graph=graph,
            bodies=[body],
            gpu=self.gpu,
            contract=code.contract,
            shared=self._memory_of(graph),
            variant=Variant.INDUCTOR,
            strict=self._config.debug.strict,
        )

    def share_memory(self, other: Target) -> None:
        """Use the pool of another target of this GPU for what is no forward or backward."""
        if isinstance(other, GpuTarget) and other.gpu is self.gpu:
            self._other_memory = other._other_memory

    def keep_only(self, variants: Collection[Variant]) -> None:
        """Begin a new pool: in the old one, memory of streams that only other variants use is lost."""
        with self.gpu.launch_lock:
            for memory in (self._memory, self._other_memory):
                memory.release()

    def _memory_of(self, graph: SegmentGraph) -> ModelMemory:
        return self._memory if graph.role in (Role.FORWARD, Role.BACKWARD) else self._other_memory

    def trim_memory(self) -> None:
        """Do nothing: torch's allocator owns the memory of released CUDA graphs."""

    def is_capturing(self) -> bool:
        """Whether the caller's stream is being captured."""
        return self.gpu.is_capturing()

    def now_ns(self) -> int:
        """Synchronize with the device, and return the host's time."""
        self.gpu.synchronize()
        return time.perf_counter_ns()

    def circumstances(self) -> Sequence[object]:
        """Return the GPU, its driver and torch, which decide what is faster."""
        return [to_json(self._fingerprint)]


def as_one_segment(graph: SegmentGraph, lane: Lane, run: Run) -> tuple[SegmentGraph, Program, CompiledBody]:
    """Return the whole graph as one segment, its program on `lane`, which has every unit, and its body.

    So Inductor's code of the whole graph runs in the same form as plans: on the caller's stream at first, then as one
    CUDA graph. Without a CUDA graph for it, plans would win by the launch overhead that theirs saves. `run` may return
    None and inputs.
    """
    joined, places = join_segments(graph)
    # On the caller's stream alone, inputs may be released as well.
    program = program_in_order(joined, (replace(lane, id=LaneId(0)),), [LaneId(0)], owners_release=False)

    def body(arguments: list[Any]) -> Sequence[Any]:
        made = run(arguments)
        return [made[place] for place in places]

    return joined, program, CompiledBody(function=body)
