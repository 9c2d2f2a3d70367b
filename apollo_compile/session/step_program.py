"""A training step as one program: the compiled forward and backward of a micro-batch, called once for each of them.

    find_micro(model, ...) -> Micro;    link_step(micro, number of micro-batches) -> StepProgram

Nothing is traced or compiled again: segments and bodies are those of the graphs that `torch.compile` made for one
micro-batch. What is new is a sum of gradients behind every segment of a backward, and one plan for all of it, in which
the forward of one micro-batch may run beside the backward of another.

AOTAutograd names values alike in a forward and its backward: what a forward returns under the name that an input of the
backward has is that input. Inputs of the forward are those of the Dynamo graph, in order; outputs of the backward are
their gradients, in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
"""How AOTAutograd's names of gradients that a backward is given begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Micro:
    """The compiled graphs of one micro-batch, and where the inputs of its forward come from."""

    forward: CompiledGraph
    backward: CompiledGraph
    state: Mapping[int, torch.Tensor]
    """Inputs of the forward that all micro-batches share, by place: parameters and buffers."""
    num_inputs: int
    """Of the forward."""
    loss: int
    """Place of the loss among the outputs of the forward."""
    loss_dtype: torch.dtype

    @property
    def parameters(self) -> Mapping[int, torch.Tensor]:
        """What gets gradients, by its place among the inputs of the forward."""
        outputs = self.backward.compilation.partition.graph.outputs
        return {
            place: tensor for place, tensor in self.state.items() if tensor.requires_grad and outputs[place] is not None
        }


@dataclass(eq=False, kw_only=True, slots=True)
class StepProgram:
    """A step that can run: micro-batches in, losses and gradients out."""

    variants: Variants
    """What it can run: its plan, and its segments in turn."""
    micro: Micro
    num_parts: int

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """What gets gradients, in their order among the outputs."""
        return list(self.micro.parameters.values())

    def may_run(self) -> bool:
        """Whether gradients are the program's to make: none is there, and nobody hooks into the making of any."""
        return all(
            parameter.grad is None
            and not parameter._backward_hooks
            and not getattr(parameter, "_post_accumulate_grad_hooks", None)
            for parameter in self.parameters
        )

    def takes(self, inputs: Sequence[Sequence[torch.Tensor]]) -> bool:
        """Whether all micro-batches share the tensors that they shared when it was linked, and gradients go to them."""
        shared = [[each[place] for place in self.micro.state] for each in inputs]
        parameters = self.micro.parameters
        is_shared = all(a is b for others in shared[1:] for a, b in zip(shared[0], others, strict=True))
        return is_shared and all(inputs[0][place] is parameter for place, parameter in parameters.items())

    def run(
        self, inputs: Sequence[Sequence[torch.Tensor]], weights: Sequence[float]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return the losses of the micro-batches, and the gradients of their weighted sum by parameter.

        Arguments:
            inputs: of the forward of every micro-batch.
            weights: of the losses.
        """
        state = self.micro.state
        own = [tensor for each in inputs for place, tensor in enumerate(each) if place not in state]
        tangents = [torch.tensor(weight, dtype=self.micro.loss_dtype) for weight in weights]
        given = [*(inputs[0][place] for place in state), *own, *tangents]
        taken = {tensor.untyped_storage().data_ptr() for tensor in given}
        with torch.no_grad():
            outputs = self.variants.run(given)
            gradients = []
            for parameter, gradient in zip(self.parameters, outputs[self.num_parts :], strict=True):
                assert gradient is not None
                memory = gradient.untyped_storage().data_ptr()
                is_own = memory not in taken and gradient.stride() == parameter.stride()
                gradients.append(gradient if is_own else torch.empty_like(parameter).copy_(gradient))
                taken.add(memory)  # autograd gives no two parameters one gradient either
        return outputs[: self.num_parts], gradients


def find_micro(
    model: CompiledModel, inputs: Sequence[object], owned: Collection[int], loss_dtype: torch.dtype
) -> Micro:
    """Return the graphs of a micro-batch that was trained on.

    Arguments:
        model: what was compiled for the loss of a micro-batch.
        inputs: with which Dynamo called it last.
        owned: ids of the module's parameters and buffers.
        loss_dtype: of the loss.

    Raises:
        UnsupportedGraphError: they cannot be linked, with the reason.
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
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    graph, other = forward.compilation.partition.graph, backward.compilation.partition.graph
    if not len(graph.inputs) == len(other.outputs) == len(tensors) == len(inputs):
        raise UnsupportedGraphError(
            f"the forward takes {len(graph.inputs)} tensors and the backward makes {len(other.outputs)} gradients for "
            f"{len(inputs)} inputs of {model.name}: some of them share memory, or are no plain tensors"
        )
    state = {place: tensor for place, tensor in enumerate(tensors) if id(tensor) in owned}
    written = (forward.code.contract.written_inputs or frozenset()) - state.keys()
    if written:
        raise UnsupportedGraphError("the loss function writes to something else than the buffers of the model")
    if any(tensor.requires_grad for place, tensor in enumerate(tensors) if place not in state):
        raise UnsupportedGraphError("something else than parameters of the model requires gradients")
    if not all(tensor.is_leaf for tensor in state.values()):
        raise UnsupportedGraphError("a parameter is computed from others")
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
    return Micro(
        forward=forward, backward=backward, state=state, num_inputs=len(tensors), loss=loss, loss_dtype=loss_dtype
    )


def link_step(micro: Micro, num_micro_batches: int, *, name: str) -> StepProgram:
    """Return the program of a step.

    Arguments:
        micro: the graphs of one micro-batch.
        num_micro_batches: how many of them a step has.
        name: of the step.
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
        micro=micro,
        num_parts=num_micro_batches,
    )


# ------------------------------------------------------------------------------------------------------------ calls


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wired:
    """The calls of a step, with names for all values that go from one to the other."""

    calls: list[Call]
    inputs: list[str]
    losses: list[str]
    gradients: list[str]
    """By parameter."""


def _wire(micro: Micro, count: int, sums: Sequence[_Sum]) -> _Wired:
    forward = micro.forward.compilation.partition.graph
    backward = micro.backward.compilation.partition.graph
    calls: list[Call] = []
    losses: list[str] = []
    totals: dict[int, str] = {}
    for part in range(count):
        label = f"@{part}" if count > 1 else ""
        takes = [f"state {p}" if p in micro.state else f"input {p}@{part}" for p in range(micro.num_inputs)]
        values = dict(zip(_names(forward, forward.inputs), takes, strict=True))
        calls.append(_call(0, micro.forward, label, takes, values))
        losses.append(values[_name(forward, forward.outputs[micro.loss])])
        reads = [
            f"weight@{part}" if name.startswith(_TANGENT) else values[name]
            for name in _names(backward, backward.inputs)
        ]
        values = dict(zip(_names(backward, backward.inputs), reads, strict=True))
        calls.append(_call(1, micro.backward, f" backward{label}", reads, values))
        made = {place: values[_name(backward, backward.outputs[place])] for place in micro.parameters}
        if part == 0:
            totals = made
            continue
        for number, each in enumerate(sums):
            after = {place: f"sum {place}@{part}" for place in each.places}
            calls.append(
                Call(
                    graph=2 + number,
                    label=label,
                    takes=(*(totals[place] for place in each.places), *(made[place] for place in each.places)),
                    makes=tuple(after.values()),
                )
            )
            totals = {**totals, **after}
    own = [f"input {p}@{part}" for part in range(count) for p in range(micro.num_inputs) if p not in micro.state]
    return _Wired(
        calls=calls,
        inputs=[*(f"state {p}" for p in micro.state), *own, *(f"weight@{part}" for part in range(count))],
        losses=losses,
        gradients=[totals[place] for place in micro.parameters],
    )


def _call(number: int, compiled: CompiledGraph, label: str, takes: Sequence[str], values: dict[str, str]) -> Call:
    """Return a call of a compiled graph; `values` are names in the step by names in the graph, and get its outputs."""
    graph = compiled.compilation.partition.graph
    makes: list[str | None] = []
    for buffer in graph.outputs:
        name = None if buffer is None else graph.buffers[buffer].name
        if name is None or name in values:  # nothing, an input that is passed on, or what is returned twice
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
    """Of the parameters."""
    graph: SegmentGraph


def _sums_of(micro: Micro) -> tuple[_Sum, ...]:
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
    """Return the graph of one segment that adds as many pairs of tensors as there are sizes in bytes."""
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
    """Add the first half of the tensors to the second half, as autograd adds gradients of one backward to another's."""
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
    """Return what was measured of both graphs, by the ids that bodies have in the step."""
    behind = len(forward.bodies)
    moved = [replace(entry, body=BodyId(entry.body + behind)) for entry in backward.learner.observations.entries]
    return Observations(entries=(*forward.learner.observations.entries, *moved))
