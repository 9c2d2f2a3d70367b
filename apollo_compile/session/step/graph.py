"""The graph of a training step: forward and backward of one micro-batch, called once for each of them.

Nothing is traced or compiled again: segments and bodies are those of the graphs that `torch.compile` made for one
micro-batch. New are sums of gradients, clipping and the optimizer (`segments.py`), and one plan for all, in
which the forward of one micro-batch may run beside the backward of another, and the optimizer of a module beside the
backward of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from apollo_compile.config import Config
from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import (
    Body,
    BodyId,
    BufferId,
    Capture,
    Observation,
    Observations,
    Partition,
    Phase,
    Role,
    SegmentGraph,
    SegmentId,
)
from apollo_compile.observe import StageRunner
from apollo_compile.passes.compose import Call, compose_step
from apollo_compile.pipeline import plan_partition
from apollo_compile.session.step import segments
from apollo_compile.session.step.collectives import Averages
from apollo_compile.session.step.input_tracker import SharedInputs
from apollo_compile.session.step.micro_batch import GraphCode, MicroBatchGraphs, names_of
from apollo_compile.session.step.segments import GradientGroup, OneSegment
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.lanes import with_network
from apollo_compile.target.profile import DeviceProfile
from apollo_compile.target.target import CompiledBody
from apollo_compile.torch_bridge.optimizers import OptimizerInParts
from apollo_compile.torch_bridge.private_attributes import TANGENT

if TYPE_CHECKING:
    from apollo_compile.torch_bridge.sharded import ShardedModel

_NOTHING_SHARED = SharedInputs()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepGraph:
    """The graph of a step, before it is planned."""

    graph: SegmentGraph
    num_micro_batches: int
    bodies: Sequence[CompiledBody]
    shared_inputs: SharedInputs
    """Inputs of the forward that are one input of the step for all micro-batches."""
    stable: frozenset[int]
    """Places of the inputs that stayed at their addresses in the last steps, although nothing guarantees it."""
    written: frozenset[int]
    """Places of the inputs that it writes to."""
    kept: Sequence[int]
    """Places of the parameters whose gradients it returns; those of others are released as the update has read them."""
    averages: Averages | None = None
    """How gradients are averaged over ranks; None where they are not."""


def compose_micro_batches(
    micro: MicroBatchGraphs,
    num_micro_batches: int,
    *,
    name: str,
    optimizer: OptimizerInParts | None = None,
    averages: Averages | None = None,
    clip_grad_norm: float | None = None,
    model_parameters: Sequence[torch.Tensor] = (),
    shared_inputs: SharedInputs = _NOTHING_SHARED,
    is_kept: Callable[[torch.Tensor], bool] = lambda parameter: True,
) -> StepGraph:
    """Return the graph of a step.

    Arguments:
        micro: the graphs of one micro-batch.
        num_micro_batches: how many of them a step has.
        name: of the step.
        optimizer: steps inside the program, module by module; None leaves gradients only.
        averages: averages gradients over ranks; None does not.
        clip_grad_norm: largest norm of all gradients together; None does not clip.
        model_parameters: all of the model, in the order in which the squares of their norms are added up.
        shared_inputs: which inputs besides the tensors of the model are the same for all micro-batches.
        is_kept: whether to return the gradient of a parameter; else it is released as the optimizer has used it.

    Raises:
        UnsupportedGraphError: ranks average gradients of other parameters than those that get some here.
    """
    wiring = _Wiring(micro, num_micro_batches, shared_inputs, None if averages is None else averages.sharded)
    if averages is not None:
        wiring.gather_parameters(averages)
    wiring.add_micro_batches()
    if averages is not None:
        wiring.average_gradients(averages)
    wiring.finish_gradients(optimizer, clip_grad_norm, model_parameters, averages)
    kept = [place for place, parameter in micro.parameters.items() if is_kept(parameter)]
    graph = compose_step(
        name,
        wiring.graphs,
        wiring.calls,
        inputs=wiring.inputs,
        outputs=[*wiring.returned, *(wiring.gradients[place] for place in kept)],
        ordered=wiring.ordered,
    )
    places = {value: place for place, value in enumerate(wiring.inputs)}
    return StepGraph(
        graph=graph,
        num_micro_batches=num_micro_batches,
        bodies=(*wiring.own_bodies, *wiring.bodies),
        shared_inputs=shared_inputs,
        stable=frozenset(places[f"input {place}"] for place in shared_inputs.stable),
        written=frozenset(places[value] for call in wiring.calls for value in call.writes if value in places),
        kept=kept,
        averages=averages,
    )


def plan_step(micro: MicroBatchGraphs, step: StepGraph, *, profile: DeviceProfile, config: Config) -> Compilation:
    """Return the plan of a step.

    Raises:
        InfeasiblePlanError: no plan meets the memory quota.
    """
    name, lanes = step.graph.name, profile.lanes
    nodes = (*micro.forward.compilation.capture.nodes, *micro.backward.compilation.capture.nodes)  # in keys of findings
    observed = _join_observations(micro.forward, micro.backward)
    if step.averages is not None:
        observed = _add_collectives(observed, step.graph, step.averages, profile.units)
        lanes = with_network(lanes)
    return plan_partition(
        Capture(name=name, role=Role.STEP, nodes=nodes, outputs=()),
        Partition(graph=step.graph, bodies=_name_bodies(step.graph), nodes_by_segment=()),
        observed,
        profile=profile,
        config=config,
        runner=StageRunner(),
        lanes=lanes,
    )


# ------------------------------------------------------------------------------------------------------------ calls


def step_name(name: str, num_micro_batches: int) -> str:
    """Return the name of a step; `name` is that of the Dynamo graph of the loss."""
    return f"{name} step" if num_micro_batches == 1 else f"{name} step of {num_micro_batches} micro-batches"


class _Wiring:
    """Builds the calls of a step, with names for all values that go from one to the other."""

    def __init__(
        self, micro: MicroBatchGraphs, num_micro_batches: int, shared_inputs: SharedInputs, sharded: ShardedModel | None
    ) -> None:
        self._micro = micro
        sizes = {} if sharded is None else {p: sharded.shard_bytes(tensor) for p, tensor in micro.state.items()}
        self._local_bytes = {place: size for place, size in sizes.items() if size}
        """Bytes of this rank's parts of parameters that the step gathers, by place."""
        self._count = num_micro_batches
        self._shared = shared_inputs.shared
        forward, backward = micro.forward.graph, micro.backward.graph
        self._groups = segments.group_gradients(backward, micro.parameters)
        ordered = [_ordered(code.compilation) for code in (micro.forward, micro.backward)]
        self.graphs = [forward, backward]
        self.own_bodies: Sequence[CompiledBody] = (*micro.forward.bodies, *micro.backward.bodies)
        """Bodies of the graphs of a micro-batch."""
        self.ordered = dict(enumerate(ordered))
        """Segments of these graphs that run in the order of the calls."""
        self.bodies: list[CompiledBody] = []
        """Bodies of all other graphs."""
        self.calls: list[Call] = []
        self.returned: list[str] = []
        """Names of the values that the loss function returns, micro-batch by micro-batch."""
        self.gradients: dict[int, str] = {}
        """Names of gradients by place of the parameter."""

    @property
    def _own_places(self) -> list[int]:
        """Places of the inputs of the forward that are those of one micro-batch."""
        micro = self._micro
        return [place for place in range(micro.num_inputs) if place not in micro.state and place not in self._shared]

    @property
    def inputs(self) -> list[str]:
        """Names of the step's inputs: state, inputs that all micro-batches share, those of each, and weights."""
        micro, parts, shared = self._micro, range(self._count), sorted(self._shared)
        return [
            *(self._name_of_stored(place) for place in micro.state),
            *(f"input {place}" for place in shared),
            *(f"input {place}@{part}" for part in parts for place in self._own_places),
            *(f"weight@{part}" for part in parts),
        ]

    def _name_of_stored(self, place: int) -> str:
        """Return the name of a tensor of the model as it is stored between steps."""
        return f"shard {place}" if place in self._local_bytes else f"state {place}"

    def add_micro_batches(self) -> None:
        """Add the forward and the backward of every micro-batch, and the sums of their gradients."""
        for part in range(self._count):
            made = self._add_micro_batch(part)
            if part == 0:
                self.gradients = made
                continue
            in_place = part > 1
            if part <= 2:
                adders = [
                    self._add_graph(segments.add_gradients(group, self._micro.parameters, in_place=in_place))
                    for group in self._groups
                ]
            for group, adder in zip(self._groups, adders, strict=True):
                earlier, later = ([each[place] for place in group.sizes] for each in (self.gradients, made))
                if in_place:
                    self._call(adder, [*earlier, *later], [], writes=earlier, label=f"@{part}")
                else:
                    self._replace_gradients(group, adder, [*earlier, *later], label=f"@{part}")
        for group in self._groups if self._count == 1 else ():
            if group.narrow:
                widen = self._add_graph(segments.widen_gradients(group, self._micro.parameters))
                own = replace(group, sizes=group.narrow)
                self._replace_gradients(own, widen, [self.gradients[place] for place in group.narrow])

    def gather_parameters(self, averages: Averages) -> None:
        """Add segments that make whole parameters of shards: Note [collectives of a step] in `collectives.py`."""
        place_of = {id(each): place for place, each in self._micro.state.items()}
        written = self._micro.forward.contract.written_inputs or frozenset()
        for name, bucket in averages.gathers.items():
            places = [place_of.get(id(whole), -1) for whole in bucket]
            if -1 in places:
                raise UnsupportedGraphError("the loss function does not use a parameter that the ranks gather")
            if not written.isdisjoint(places):
                raise UnsupportedGraphError("the loss function writes to a parameter that the ranks gather")
            assert averages.sharded is not None
            group = GradientGroup(name=name, module="", sizes={place: self._local_bytes[place] for place in places})
            gather = partial(averages.sharded.gather, bucket)
            added = self._add_graph(segments.communicate(group, "gather", [whole.nbytes for whole in bucket], gather))
            stored, made = ([f"{kind} {place}" for place in places] for kind in ("shard", "state"))
            self._call(added, stored, made, phase=Phase.FORWARD)

    def average_gradients(self, averages: Averages) -> None:
        """Add the means over all ranks, bucket by bucket: Note [collectives of a step] in `collectives.py`."""
        place_of = {id(parameter): place for place, parameter in self._micro.parameters.items()}
        if place_of.keys() != {id(parameter) for bucket in averages.buckets for parameter in bucket}:
            raise UnsupportedGraphError("the parameters that get gradients are not those that ranks average")
        sizes = {place: size for group in self._groups for place, size in group.sizes.items()}
        for number, bucket in enumerate(averages.buckets):
            places = [place_of[id(parameter)] for parameter in bucket]
            group = GradientGroup(name=f"bucket{number}", module="", sizes={place: sizes[place] for place in places})
            makes = [self._local_bytes.get(place, sizes[place]) for place in places]
            average = partial(averages.average, bucket)
            segment = self._add_graph(segments.communicate(group, "mean", makes, average))
            self._replace_gradients(group, segment, [self.gradients[place] for place in places])
        self._groups = [
            replace(group, sizes={place: self._local_bytes.get(place, size) for place, size in group.sizes.items()})
            for group in self._groups
        ]

    def finish_gradients(
        self,
        optimizer: OptimizerInParts | None,
        limit: float | None,
        parameter_order: Sequence[torch.Tensor],
        averages: Averages | None,
    ) -> None:
        """Add the use of final gradients: clipping and the optimizer."""
        parameters = self._micro.parameters
        factor = []
        if limit is not None:
            norms = [f"norms {number}" for number in range(len(self._groups))]
            for group, norm in zip(self._groups, norms, strict=True):
                measure = self._add_graph(segments.measure_gradients(group))
                self._call(measure, [self.gradients[place] for place in group.sizes], [norm])
            place_of = {id(parameter): place for place, parameter in parameters.items()}
            order = [place_of[id(each)] for each in parameter_order if id(each) in place_of]
            factor = ["factor"]
            of_shards = {} if not self._local_bytes or averages is None else {"total_norm": averages.total_norm}
            clip = segments.limit_gradients(
                self._groups, order, limit, self._micro.device, **of_shards, communicates=bool(of_shards)
            )
            self._call(self._add_graph(clip), norms, factor)
        if optimizer is None and limit is None:
            return
        for group in self._groups:
            apply = self._add_graph(
                segments.update_parameters(group, parameters, optimizer, is_clipped=limit is not None)
            )
            owners = [] if optimizer is None else [self._name_of_stored(place) for place in group.sizes]
            taken = [*owners, *(self.gradients[place] for place in group.sizes), *factor]
            if limit is None:
                self._call(apply, taken, [], writes=owners)
            else:
                self._replace_gradients(group, apply, taken, writes=owners)

    def _add_micro_batch(self, part: int) -> dict[int, str]:
        """Add one forward and backward; return the names of the gradients by place."""
        micro = self._micro
        label = f"@{part}" if self._count > 1 else ""
        forward, backward = self.graphs[:2]
        takes = [
            f"state {place}" if place in micro.state else f"input {place}{'' if place in self._shared else f'@{part}'}"
            for place in range(micro.num_inputs)
        ]
        values = dict(zip(names_of(forward, forward.inputs), takes, strict=True))
        self.calls.append(_call(0, micro.forward, Phase.FORWARD, label, takes, values))
        self.returned += [values[_name(forward, forward.outputs[place])] for place in micro.returned]
        reads = [
            f"weight@{part}" if name.startswith(TANGENT) else values[name]
            for name in names_of(backward, backward.inputs)
        ]
        values = dict(zip(names_of(backward, backward.inputs), reads, strict=True))
        self.calls.append(_call(1, micro.backward, Phase.BACKWARD, f":backward{label}", reads, values))
        return {place: values[_name(backward, backward.outputs[place])] for place in micro.parameters}

    def _add_graph(self, added: OneSegment) -> int:
        self.graphs.append(added.graph)
        self.bodies.append(added.body)
        return len(self.graphs) - 1

    def _replace_gradients(
        self, group: GradientGroup, graph: int, takes: Sequence[str], *, writes: Sequence[str] = (), label: str = ""
    ) -> None:
        after = {place: f"gradient {place} of call {len(self.calls)}" for place in group.sizes}
        self._call(graph, takes, list(after.values()), writes=writes, label=label)
        self.gradients.update(after)

    def _call(
        self,
        graph: int,
        takes: Sequence[str],
        makes: Sequence[str],
        *,
        writes: Sequence[str] = (),
        label: str = "",
        phase: Phase = Phase.UPDATE,
    ) -> None:
        self.calls.append(
            Call(
                graph=graph, phase=phase, label=label, takes=tuple(takes), makes=tuple(makes), writes=frozenset(writes)
            )
        )


def _call(number: int, code: GraphCode, phase: Phase, label: str, takes: Sequence[str], values: dict[str, str]) -> Call:
    """Return a call of a compiled graph; `values` are names in the step by names in the graph, and get its outputs."""
    graph = code.graph
    makes: list[str | None] = []
    for buffer in graph.outputs:
        name = None if buffer is None else graph.buffers[buffer].name
        if name is None or name in values:  # nothing, an input that is passed on, or a value that is returned twice
            makes.append(None)
        else:
            values[name] = f"{name}{label}"
            makes.append(values[name])
    written = code.contract.written_inputs or frozenset()
    return Call(
        graph=number,
        phase=phase,
        label=label,
        takes=tuple(takes),
        makes=tuple(makes),
        writes=frozenset(takes[place] for place in written),
    )


def _name(graph: SegmentGraph, buffer: BufferId | None) -> str:
    if buffer is None:
        raise UnsupportedGraphError(f"{graph.name} returns nothing where a value is needed")
    return graph.buffers[buffer].name


def _ordered(compilation: Compilation) -> list[SegmentId]:
    """Return the segments that draw random numbers or have effects."""
    nodes = compilation.capture.nodes
    contents = compilation.partition.nodes_by_segment
    return [SegmentId(s) for s, content in enumerate(contents) if any(nodes[node].keeps_order for node in content)]


# ----------------------------------------------------------------------------------------------------------- bodies


def _name_bodies(graph: SegmentGraph) -> tuple[Body, ...]:
    first = {segment.body: segment.name for segment in reversed(graph.segments)}
    return tuple(
        Body(id=BodyId(number), name=first.get(BodyId(number), ""), nodes=(), inputs=(), outputs=())
        for number in range(1 + max(first, default=-1))
    )


def _join_observations(forward: GraphCode, backward: GraphCode) -> Observations:
    """Return the measurements of both graphs, by the ids that bodies have in the step."""
    behind = 1 + max((segment.body for segment in forward.graph.segments), default=-1)
    moved = [replace(entry, body=BodyId(entry.body + behind)) for entry in backward.observations.entries]
    return Observations(entries=(*forward.observations.entries, *moved))


def _add_collectives(observed: Observations, graph: SegmentGraph, averages: Averages, units: int) -> Observations:
    """Add the durations of collectives: as long on all units as on none, where they leave units to others."""
    entries = list(observed.entries)
    for segment in graph.segments:
        if segment.has_collective:
            takes, makes = (
                sum(graph.buffers[buffer].num_bytes for buffer in each) for each in (segment.inputs, segment.outputs)
            )
            num_bytes = max(takes, makes)  # where one of them is of shards, it is the other that moves
            median_ns = averages.duration_ns(num_bytes)
            entries += [Observation(body=segment.body, units=each, count=1, median_ns=median_ns) for each in (0, units)]
    return Observations(entries=tuple(sorted(entries, key=lambda entry: (entry.body, entry.units))))
