"""A training step as one program: the compiled forward and backward of a micro-batch, called once for each of them.

    find_micro_batch_graphs(model, ...) -> MicroBatchGraphs;    link_step(graphs, num_micro_batches) -> StepProgram

Nothing is traced or compiled again: segments and bodies are those of the graphs that `torch.compile` made for one
micro-batch. New are the gradient sums after the segments of a backward, and one plan for the whole step, in which the
forward of one micro-batch may run beside the backward of another.

AOTAutograd uses the same names in a forward and its backward: an output of the forward is the input of the backward
that has its name. Inputs of the forward are those of the Dynamo graph, in order; outputs of the backward are their
gradients, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from apollo_compile.device.target import Code, CompiledBody, Contract
from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import (
    Body,
    BodyId,
    Buffer,
    BufferId,
    Capture,
    Kernel,
    Observations,
    Partition,
    Role,
    Segment,
    SegmentGraph,
    SegmentId,
    Work,
)
from apollo_compile.observe import StageRunner
from apollo_compile.passes.compose import Call, compose_step
from apollo_compile.pipeline import Compilation, plan_partition
from apollo_compile.session.graph import CompiledGraph
from apollo_compile.session.model import CompiledModel
from apollo_compile.session.variants import Variants

_TANGENT = "tangents_"
"""Prefix of AOTAutograd's names for the gradients that a backward takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchGraphs:
    """The compiled graphs of one micro-batch, and where the inputs of its forward come from."""

    forward: CompiledGraph
    backward: CompiledGraph
    sources: tuple[torch.Tensor | int, ...]
    """Per input of the forward: a tensor of the model, or the index of a leaf of the micro-batch."""
    loss: int
    """Place of the loss among the outputs of the forward."""

    @property
    def parameters(self) -> Mapping[int, torch.Tensor]:
        """Parameters that get gradients, by their index among the inputs of the forward."""
        outputs = self.backward.compilation.partition.graph.outputs
        return {
            place: source
            for place, (source, gradient) in enumerate(zip(self.sources, outputs, strict=True))
            if isinstance(source, torch.Tensor) and source.requires_grad and gradient is not None
        }


@dataclass(eq=False, kw_only=True, slots=True)
class StepProgram:
    """A runnable step: micro-batches in, losses and gradients out."""

    variants: Variants
    """Its variants: the plan and the serial plan."""
    state: tuple[torch.Tensor, ...]
    """Tensors of the model, which come first among the inputs."""
    parameters: tuple[torch.Tensor, ...]
    """Parameters that get gradients, in the order of the outputs."""
    num_losses: int

    def run(
        self, leaves: Iterable[Sequence[torch.Tensor]], weights: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return the losses of the micro-batches, and the gradients of their weighted sum by parameter.

        Arguments:
            leaves: tensors of every micro-batch, with the shapes that the step was linked for.
            weights: weights of the losses, tensors without dimensions.
        """
        inputs = [*self.state, *(leaf for part in leaves for leaf in part), *weights]
        taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        with torch.no_grad():
            outputs = self.variants.run(inputs)
            gradients = []
            for parameter, gradient in zip(self.parameters, outputs[self.num_losses :], strict=True):
                assert gradient is not None
                memory = gradient.untyped_storage().data_ptr()
                is_own = memory not in taken and gradient.stride() == parameter.stride()
                gradients.append(gradient if is_own else torch.empty_like(parameter).copy_(gradient))
                taken.add(memory)  # autograd gives no two parameters one gradient either
        return outputs[: self.num_losses], gradients


def find_micro_batch_graphs(
    model: CompiledModel, dynamo_inputs: Sequence[object], leaves: Sequence[torch.Tensor]
) -> MicroBatchGraphs:
    """Return the graphs of a micro-batch after its first training step, with the sources of their inputs.

    Arguments:
        model: the compiled model of the loss of a micro-batch.
        dynamo_inputs: the inputs that it was compiled with.
        leaves: tensors of that micro-batch.

    Raises:
        UnsupportedGraphError: the graphs cannot be linked; the message says why.
    """
    if model.fallbacks:
        name, reason = model.fallbacks[0]
        raise UnsupportedGraphError(f"{name} falls back: {reason}")
    by_role = {graph.compilation.capture.role: graph for graph in model.graphs}
    if by_role.keys() != {Role.FORWARD, Role.BACKWARD} or len(model.graphs) != 2:
        raise UnsupportedGraphError(f"{model.name} has {len(model.graphs)} graphs; expected a forward and a backward")
    forward, backward = by_role[Role.FORWARD], by_role[Role.BACKWARD]
    if not forward.target.is_synchronous or not forward.agreement.ranks.is_alone:
        raise UnsupportedGraphError("steps are linked for a CPU and a single process only")
    if forward.boundary is not None or backward.boundary is not None:
        raise UnsupportedGraphError(f"{model.name} takes sizes or objects besides tensors")
    sources = tuple(_source_of(value, leaves, model.name) for value in dynamo_inputs)
    graph, other = forward.compilation.partition.graph, backward.compilation.partition.graph
    if len(graph.inputs) != len(sources) or len(other.outputs) != len(sources):
        raise UnsupportedGraphError(
            f"the forward takes {len(graph.inputs)} tensors and the backward makes {len(other.outputs)} gradients for "
            f"{len(sources)} inputs of {model.name}: some of them share memory, or are no plain tensors"
        )
    tangents = [name for name in _names(other, other.inputs) if name.startswith(_TANGENT)]
    if len(tangents) != 1:
        raise UnsupportedGraphError(f"{len(tangents)} outputs of the loss function need gradients; expected the loss")
    if len(forward.code.contract.user_outputs) != 1:
        raise UnsupportedGraphError("the loss function returns other tensors besides the loss")
    known = {*_names(graph, graph.inputs), *_names(graph, graph.outputs), *tangents}
    if unknown := set(_names(other, other.inputs)) - known:
        raise UnsupportedGraphError(f"the backward reads {sorted(unknown)[0]}, which the forward does not return")
    if None in (forward.code.contract.written_inputs, backward.code.contract.written_inputs):
        raise UnsupportedGraphError(f"{model.name} writes to other tensors than its inputs")
    (loss,) = forward.code.contract.user_outputs
    return MicroBatchGraphs(forward=forward, backward=backward, sources=sources, loss=loss)


def link_step(micro: MicroBatchGraphs, num_micro_batches: int, *, name: str) -> StepProgram:
    """Return the program of a step.

    Arguments:
        micro: the graphs of one micro-batch.
        num_micro_batches: micro-batches in a step.
        name: name of the step.
    """
    forward, backward = micro.forward, micro.backward
    sums = _sums_of(micro) if num_micro_batches > 1 else ()
    wired = _wire(micro, num_micro_batches, sums)
    graphs = [forward.compilation.partition.graph, backward.compilation.partition.graph]
    graph = compose_step(
        name,
        [*graphs, *(each.graph for each in sums)],
        wired.calls,
        inputs=wired.inputs,
        outputs=[*wired.losses, *wired.gradients],
        ordered={0: _ordered(forward.compilation), 1: _ordered(backward.compilation)},
    )
    bodies = (*forward.bodies, *backward.bodies, *(CompiledBody(function=_add_pairs) for _ in sums))
    places = {value: place for place, value in enumerate(wired.inputs)}
    written = frozenset(places[value] for call in wired.calls for value in call.writes)
    compilation = plan_partition(
        Capture(name=name, role=Role.INFERENCE, nodes=(), outputs=()),
        Partition(graph=graph, bodies=_name_bodies(graph, len(bodies)), nodes_by_segment=()),
        _join_observations(forward, backward),
        profile=forward.target.profile,
        config=forward.config,
        runner=StageRunner(),
    )
    code = Code(bodies=bodies, contract=Contract(written_inputs=written))
    return StepProgram(
        variants=Variants(compilation, code, forward.target, may_be_listed=False),
        state=wired.state,
        parameters=tuple(micro.parameters.values()),
        num_losses=num_micro_batches,
    )


# ------------------------------------------------------------------------------------------------------------ calls


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wired:
    """The calls of a step, with names for all values passed between them."""

    calls: list[Call]
    state: tuple[torch.Tensor, ...]
    inputs: list[str]
    losses: list[str]
    gradients: list[str]
    """By parameter."""


def _wire(micro: MicroBatchGraphs, count: int, sums: Sequence[_Sum]) -> _Wired:
    forward = micro.forward.compilation.partition.graph
    backward = micro.backward.compilation.partition.graph
    state = {id(source): source for source in micro.sources if isinstance(source, torch.Tensor)}
    state_name = {key: f"state {place}" for place, key in enumerate(state)}
    num_leaves = 1 + max((source for source in micro.sources if isinstance(source, int)), default=-1)
    calls: list[Call] = []
    losses: list[str] = []
    totals: dict[int, str] = {}
    for part in range(count):
        label = f"@{part}" if count > 1 else ""
        takes = [state_name[id(s)] if isinstance(s, torch.Tensor) else f"leaf {s}@{part}" for s in micro.sources]
        values = dict(zip(_names(forward, forward.inputs), takes, strict=True))
        calls.append(_call(0, micro.forward, label, takes, values))
        losses.append(values[_name(forward, forward.outputs[micro.loss])])
        reads = [
            f"weight@{part}" if name.startswith(_TANGENT) else values[name]
            for name in _names(backward, backward.inputs)
        ]
        values = dict(zip(_names(backward, backward.inputs), reads, strict=True))
        calls.append(_call(1, micro.backward, f" backward{label}", reads, values))
        own = {place: values[_name(backward, backward.outputs[place])] for place in micro.parameters}
        if part == 0:
            totals = own
            continue
        for number, each in enumerate(sums):
            after = {place: f"sum {place}@{part}" for place in each.places}
            calls.append(
                Call(
                    graph=2 + number,
                    label=label,
                    takes=(*(totals[place] for place in each.places), *(own[place] for place in each.places)),
                    makes=tuple(after.values()),
                )
            )
            totals = {**totals, **after}
    leaves = [f"leaf {leaf}@{part}" for part in range(count) for leaf in range(num_leaves)]
    return _Wired(
        calls=calls,
        state=tuple(state.values()),
        inputs=[*state_name.values(), *leaves, *(f"weight@{part}" for part in range(count))],
        losses=losses,
        gradients=[totals[place] for place in micro.parameters],
    )


def _call(number: int, compiled: CompiledGraph, label: str, takes: Sequence[str], values: dict[str, str]) -> Call:
    """Return a call of a compiled graph; `values` maps names in the graph to names in the step, outputs are added."""
    graph = compiled.compilation.partition.graph
    makes: list[str | None] = []
    for buffer in graph.outputs:
        name = None if buffer is None else graph.buffers[buffer].name
        if name is None or name in values:  # nothing, an input passed through, or a duplicate output
            makes.append(None)
        else:
            values[name] = f"{name}{label}"
            makes.append(values[name])
    written = compiled.code.contract.written_inputs or frozenset()
    return Call(
        graph=number,
        label=label.strip(),
        takes=tuple(takes),
        makes=tuple(makes),
        writes=frozenset(takes[place] for place in written),
    )


def _name(graph: SegmentGraph, buffer: BufferId | None) -> str:
    if buffer is None:
        raise UnsupportedGraphError(f"{graph.name} returns nothing where a value is needed")
    return graph.buffers[buffer].name


def _names(graph: SegmentGraph, buffers: Sequence[BufferId | None]) -> list[str]:
    return [graph.buffers[buffer].name for buffer in buffers if buffer is not None]


def _source_of(value: object, leaves: Sequence[torch.Tensor], name: str) -> torch.Tensor | int:
    for place, leaf in enumerate(leaves):
        if value is leaf:
            return place
    if not isinstance(value, torch.Tensor):
        raise UnsupportedGraphError(f"{name} takes a {type(value).__name__} besides tensors")
    return value


def _ordered(compilation: Compilation) -> list[SegmentId]:
    """Return the segments that draw random numbers or have effects."""
    nodes = compilation.capture.nodes
    contents = compilation.partition.nodes_by_segment
    return [SegmentId(s) for s, content in enumerate(contents) if any(nodes[node].keeps_order for node in content)]


# ------------------------------------------------------------------------------------------------------------- sums


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sum:
    """Adds the gradients that one segment of the backward makes to those of earlier micro-batches."""

    places: tuple[int, ...]
    """Indices of the parameters."""
    graph: SegmentGraph


def _sums_of(micro: MicroBatchGraphs) -> tuple[_Sum, ...]:
    backward = micro.backward.compilation.partition.graph
    groups: dict[SegmentId | None, list[int]] = {}
    for place in micro.parameters:
        buffer = backward.outputs[place]
        assert buffer is not None
        groups.setdefault(backward.buffers[buffer].producer, []).append(place)
    found = []
    for producer, places in groups.items():
        made = [backward.buffers[buffer] for place in places if (buffer := backward.outputs[place]) is not None]
        module = "" if producer is None else backward.segments[producer].module
        name = "~sum" if producer is None else f"{backward.segments[producer].name}:sum"
        found.append(_Sum(places=tuple(places), graph=_sum_graph(name, module, [each.num_bytes for each in made])))
    return tuple(found)


def _sum_graph(name: str, module: str, sizes: Sequence[int]) -> SegmentGraph:
    """Return a graph of one segment that adds one pair of tensors for each size in bytes."""
    count = len(sizes)
    segment = SegmentId(0)
    buffers = [
        Buffer(
            id=BufferId(number),
            name=f"term{number}",
            producer=None if number < 2 * count else segment,
            readers=(segment,) if number < 2 * count else (),
            num_bytes=sizes[number % count],
            is_output=number >= 2 * count,
        )
        for number in range(3 * count)
    ]
    inputs, outputs = tuple(b.id for b in buffers[: 2 * count]), tuple(b.id for b in buffers[2 * count :])
    total = sum(sizes)
    parts = tuple(Kernel(flops=size // 4, bytes_moved=3 * size, bytes_from_outside=2 * size) for size in sizes)
    work = Work(flops=total // 4, bytes_read=2 * total, bytes_written=total, kernels=count, parts=parts)
    return SegmentGraph(
        name=name,
        role=Role.INFERENCE,
        segments=(
            Segment(
                id=segment,
                name=name,
                module=module,
                body=BodyId(0),
                inputs=inputs,
                outputs=outputs,
                after=(),
                work=work,
            ),
        ),
        buffers=tuple(buffers),
        inputs=inputs,
        outputs=outputs,
    )


def _add_pairs(terms: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Add the two halves of the tensors pairwise, as autograd accumulates the gradients of two backwards."""
    half = len(terms) // 2
    sums: Sequence[torch.Tensor] = torch._foreach_add(terms[:half], terms[half:])
    return sums


# ----------------------------------------------------------------------------------------------------------- bodies


def _name_bodies(graph: SegmentGraph, count: int) -> tuple[Body, ...]:
    first = {segment.body: segment.name for segment in reversed(graph.segments)}
    return tuple(
        Body(id=BodyId(number), name=first.get(BodyId(number), ""), nodes=(), inputs=(), outputs=())
        for number in range(count)
    )


def _join_observations(forward: CompiledGraph, backward: CompiledGraph) -> Observations:
    """Return the observations of both graphs, with the body ids of the step."""
    offset = len(forward.bodies)
    moved = [replace(entry, body=BodyId(entry.body + offset)) for entry in backward.compilation.observations.entries]
    return Observations(entries=(*forward.compilation.observations.entries, *moved))
