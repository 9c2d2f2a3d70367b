"""Times of the layers of a model on a device, for every size of a micro-batch.

    TracedModel(target, batch, ...).times(profile, is_crowded, samples) -> ModelTimes

A layer is the segments of one module, in the order of the forward. Segments of the backward, and parameters, belong to
the layer of their module, or to the one whose name has the longest common beginning.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from apollo_compile.config import Config
from apollo_compile.cost_model.cells import Layer, ModelTimes
from apollo_compile.cost_model.roofline import predict_kernel
from apollo_compile.device.open import select_profile
from apollo_compile.errors import TargetError
from apollo_compile.ir import KernelKind, Mode, Observations, Role, Segment, SegmentGraph
from apollo_compile.passes.cost import estimate_costs
from apollo_compile.passes.plan import make_plan
from apollo_compile.session.dry_run import trace
from apollo_compile.session.private_copy import with_batch
from apollo_compile.target.profile import DeviceProfile
from apollo_compile.tools.targets import ModelCall, errors_of_the_model
from apollo_compile.torch_bridge.compile_context import original_callable
from apollo_compile.units import NS_PER_S

PLANNING_S = 0.2
"""Time to plan the lanes of one graph."""

_DIVISIBLE = {KernelKind.MATMUL, KernelKind.BATCHED_MATMUL, KernelKind.ATTENTION, KernelKind.ATTENTION_BACKWARD}
"""Kernels that tensor parallelism divides."""


class TracedModel:
    """The graphs of a model with its loss, by size of the batch.

    Arguments:
        target: the model.
        batch: samples of its inputs.
        config: its options apply.
        progress: called with lines of text.
    """

    def __init__(self, target: ModelCall, batch: int, config: Config, progress: Callable[[str], None]) -> None:
        self._target = target
        self._batch = batch
        self._config = config
        self._progress = progress
        self._graphs: dict[int, list[SegmentGraph]] = {}
        self.error: TargetError | None = None  # of a part of the batch

    def times(self, profile: DeviceProfile, is_crowded: bool, samples: int) -> ModelTimes | None:
        """Return the times of a micro-batch, None if it cannot run; equal ranks share memory if `is_crowded`.

        Raises:
            TargetError: the whole batch cannot run, or none of its graphs can be planned.
        """
        if samples not in self._graphs:
            try:
                self._graphs[samples] = self._trace(samples)
            except TargetError as error:
                if samples == self._batch:
                    raise
                self._graphs[samples], self.error = [], error.with_traceback(None)  # which holds tensors
                self._progress(f"no device gets {samples} of {self._batch} samples: {error}")
        if not (graphs := self._graphs[samples]):
            return None
        pieces = [piece for graph in graphs for piece in _pieces(graph, profile, is_crowded)]
        total_s = sum(piece.seconds for piece in pieces)
        return ModelTimes(
            layers=_layers(pieces, graphs, _parameters(self._target.model)),
            memory_share=sum(piece.seconds * piece.mode.memory_share for piece in pieces) / total_s,
            launch_share=sum(piece.seconds * piece.mode.launch_share for piece in pieces) / total_s,
            workspace_bytes=max(piece.mode.memory_bytes for piece in pieces),
            lanes_gain=self._lanes_gain(graphs, profile),
        )

    def _lanes_gain(self, graphs: Sequence[SegmentGraph], profile: DeviceProfile) -> float:
        """Return how many times faster lanes make forward and backward."""
        options = self._config.plan
        serial_ns = planned_ns = 0
        for graph in graphs:
            plan = make_plan(
                graph,
                estimate_costs(graph, profile, Observations()),
                lanes=profile.lanes,
                planner="serial" if options.planner == "serial" else "greedy",
                min_gain=options.min_gain,
                seed=options.seed,
                time_limit_s=options.time_limit_s,
                work_s=PLANNING_S,
                memory_quota=options.memory_quota,
            )
            serial_ns += plan.serial_ns
            planned_ns += plan.makespan_ns
        return serial_ns / planned_ns

    def _trace(self, samples: int) -> list[SegmentGraph]:
        self._progress(f"tracing with {samples} of {self._batch} samples")
        target = self._target
        call = with_batch((target.args, dict(target.kwargs)), samples)
        with errors_of_the_model(target, lambda: target.loss(target.model(*call[0], **call[1]))):
            dry_run = trace(
                target.model,
                call,
                self._config,
                select_profile(self._config),
                uses=lambda copied: lambda *args, **kwargs: target.loss(copied(*args, **kwargs)),
            )
        graphs = [compilation.partition.graph for compilation, _ in dry_run.planned]
        if not graphs:
            reasons = "; ".join(dict.fromkeys(reason for _, reason in dry_run.fallbacks))
            raise TargetError(f"cannot estimate {target.name}, because none of its graphs can be planned: {reasons}")
        return graphs


@dataclass(frozen=True, slots=True)
class _Piece:
    """A segment on a device."""

    graph: SegmentGraph
    segment: Segment
    mode: Mode
    seconds: float
    divisible_s: float
    """Part of the seconds in products and attention."""


def _pieces(graph: SegmentGraph, profile: DeviceProfile, is_crowded: bool) -> Iterator[_Piece]:
    footprint = sum(buffer.num_bytes for buffer in graph.buffers)
    modes = [each[-1] for each in estimate_costs(graph, profile, Observations()).modes]
    total_ns = sum(mode.duration_ns for mode in modes)
    memory = sum(mode.duration_ns * mode.memory_share for mode in modes) / total_ns
    for segment, mode in zip(graph.segments, modes, strict=True):
        kernels = [
            (kernel.count * predict_kernel(kernel, profile, profile.units, footprint=footprint).total_ns, kernel)
            for kernel in segment.work.parts
        ]
        divided = sum(ns for ns, kernel in kernels if kernel.kind in _DIVISIBLE)
        share = divided / all_ns if (all_ns := sum(ns for ns, _ in kernels)) else 0.0
        slowdown = slowdown_beside(profile, mode.memory_share, memory) if is_crowded else 1.0
        seconds = slowdown * mode.duration_ns / NS_PER_S
        yield _Piece(graph, segment, mode, seconds, share * seconds)


def slowdown_beside(profile: DeviceProfile, own: float, other: float) -> float:
    """Return how many times longer work takes beside a rank; numbers are shares of their time that wait for memory."""
    arithmetic, memory = (row[0] * (1 - other) + row[1] * other for row in profile.slowdown)
    return arithmetic * (1 - own) + memory * own


def _parameters(model: Callable[..., Any]) -> list[tuple[str, int, bool]]:
    """Return name, bytes and whether it is trained, for every parameter."""
    original = original_callable(model)
    owner = getattr(original, "__self__", original)
    if not isinstance(owner, nn.Module):
        return []
    return [(name, each.nbytes, each.requires_grad) for name, each in owner.named_parameters()]


def _layers(
    pieces: Sequence[_Piece], graphs: Sequence[SegmentGraph], parameters: Sequence[tuple[str, int, bool]]
) -> tuple[Layer, ...]:
    forwards = [piece for piece in pieces if piece.graph.role is not Role.BACKWARD]
    names = list(dict.fromkeys(piece.segment.module for piece in forwards))
    own: dict[str, list[_Piece]] = {name: [] for name in names}
    for piece in pieces:
        own[_nearest(piece.segment.module, names)].append(piece)
    weights = {(name, trained): 0 for name in names for trained in (True, False)}
    for name, num_bytes, is_trained in parameters:
        weights[_nearest(name, names), is_trained] += num_bytes
    crossing = _crossing_bytes([graph for graph in graphs if graph.role is not Role.BACKWARD], names)
    return tuple(
        _layer(name, own[name], weights[name, True], weights[name, False], crossing[place])
        for place, name in enumerate(names)
    )


def _layer(name: str, pieces: Sequence[_Piece], weight_bytes: int, frozen_bytes: int, cut_bytes: int) -> Layer:
    forward = [piece for piece in pieces if piece.graph.role is not Role.BACKWARD]
    made = [piece.graph.buffers[buffer] for piece in forward for buffer in piece.segment.outputs]
    seconds = sum(piece.seconds for piece in pieces)
    forward_s = sum(piece.seconds for piece in forward)
    return Layer(
        name=name,
        forward_s=forward_s,
        backward_s=seconds - forward_s,
        divisible=sum(piece.divisible_s for piece in pieces) / seconds,
        products=sum(
            kernel.count for piece in forward for kernel in piece.segment.work.parts if kernel.kind is KernelKind.MATMUL
        ),
        weight_bytes=weight_bytes,
        frozen_bytes=frozen_bytes,
        activation_bytes=max((buffer.num_bytes for buffer in made if buffer.readers), default=0),
        saved_bytes=sum(buffer.num_bytes for buffer in made if buffer.is_output),
        cut_bytes=cut_bytes,
    )


def _crossing_bytes(graphs: Sequence[SegmentGraph], names: Sequence[str]) -> list[int]:
    """Return, by layer, the bytes that this layer or an earlier one makes and a later one reads."""
    place = {name: index for index, name in enumerate(names)}
    crossing = [0] * len(names)
    for graph in graphs:
        for buffer in graph.buffers:
            if buffer.producer is not None and buffer.readers:
                first = place[graph.segments[buffer.producer].module]
                last = max(place[graph.segments[reader].module] for reader in buffer.readers)
                for index in range(first, last):
                    crossing[index] += buffer.num_bytes
    return crossing


def _nearest(name: str, names: Sequence[str]) -> str:
    """Return the name with the longest common beginning, the first of several."""
    if name in names:
        return name

    def common(other: str) -> int:
        pairs = zip(name.split("."), other.split("."), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    return max(names, key=common)
