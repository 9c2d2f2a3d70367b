"""A training step as one program: the compiled forward and backward of a micro-batch, called once for each of them.

    find_micro(model, ...) -> Micro;    link_step(micro, number of micro-batches) -> StepProgram

Nothing is traced or compiled again: segments and bodies are those of the graphs that `torch.compile` made for one
micro-batch. What is new are sums of gradients, clipping and the optimizer (`step_segments.py`), and one plan for all,
in which the forward of one micro-batch may run beside the backward of another, and the optimizer of a module beside the
backward of others.

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
    BufferId,
    Capture,
    Observations,
    Partition,
    Phase,
    Role,
    SegmentGraph,
    SegmentId,
)
from apollo_compile.observe import StageRunner
from apollo_compile.passes.compose import Call, compose_step
from apollo_compile.pipeline import Compilation, plan_partition
from apollo_compile.session.graph import CompiledGraph
from apollo_compile.session.model import CompiledModel
from apollo_compile.session.step_segments import (
    Group,
    OneSegment,
    add_gradients,
    group_gradients,
    limit_gradients,
    measure_gradients,
    update_parameters,
)
from apollo_compile.session.variants import Variants
from apollo_compile.torch_bridge.optimizers import StepInParts

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
    optimizer: StepInParts | None
    """Steps inside the program; None where it steps afterwards, or there is none."""
    others: Sequence[torch.Tensor]
    """Where gradients are clipped, parameters that the program makes no gradients for: any of theirs would count."""

    @property
    def name(self) -> str:
        """Return the name of the step."""
        return self.variants.compilation.capture.name

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """What gets gradients, in their order among the outputs."""
        return list(self.micro.parameters.values())

    def may_run(self) -> bool:
        """Whether gradients are the program's to make: none is there, and nobody hooks into the making of any.

        If the optimizer steps inside, its step has to be as it was when the program was linked.
        """
        if self.optimizer is not None and not self.optimizer.can_step(self.parameters):
            return False
        if any(other.grad is not None for other in self.others):
            return False
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
            made = [gradient for gradient in outputs[self.num_parts :] if gradient is not None]
            return outputs[: self.num_parts], own_gradients(made, self.parameters, taken)


def own_gradients(
    gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], taken: Collection[int]
) -> Sequence[torch.Tensor]:
    """Return gradients as autograd leaves them in `.grad`: laid out like their parameters, each in memory of its own.

    Arguments:
        gradients: by parameter.
        parameters: what they are for.
        taken: addresses of memory that is in use.
    """
    used = set(taken)
    owned = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        memory = gradient.untyped_storage().data_ptr()
        is_own = memory not in used and gradient.stride() == parameter.stride()
        owned.append(gradient if is_own else torch.empty_like(parameter).copy_(gradient))
        used.add(memory)
    return owned


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


def link_step(
    micro: Micro,
    num_micro_batches: int,
    *,
    name: str,
    optimizer: StepInParts | None = None,
    clip_grad_norm: float | None = None,
    model_parameters: Sequence[torch.Tensor] = (),
) -> StepProgram:
    """Return the program of a step.

    Arguments:
        micro: the graphs of one micro-batch.
        num_micro_batches: how many of them a step has.
        name: of the step.
        optimizer: steps inside the program, module by module; None leaves gradients only.
        clip_grad_norm: largest norm of all gradients together; None does not clip.
        model_parameters: all of the model, in the order in which the squares of their norms are added up.
    """
    forward, backward = micro.forward, micro.backward
    wiring = _Wiring(micro, num_micro_batches)
    wiring.add_micro_batches()
    wiring.finish_gradients(optimizer, clip_grad_norm, model_parameters)
    graph = compose_step(
        name,
        wiring.graphs,
        wiring.calls,
        inputs=wiring.inputs,
        outputs=[*wiring.losses, *wiring.gradients.values()],
        ordered={0: _ordered(forward.compilation), 1: _ordered(backward.compilation)},
    )
    bodies = (*forward.bodies, *backward.bodies, *wiring.bodies)
    places = {value: place for place, value in enumerate(wiring.inputs)}
    written = frozenset(places[value] for call in wiring.calls for value in call.writes)
    compilation = plan_partition(
        Capture(name=name, role=Role.STEP, nodes=(), outputs=()),
        Partition(graph=graph, bodies=_name_bodies(graph, len(bodies)), nodes_by_segment=()),
        _join_observations(forward, backward),
        profile=forward.target.profile,
        config=forward.config,
        runner=StageRunner(),
    )
    code = Code(bodies=bodies, contract=Contract(written_inputs=written))
    own = {id(parameter) for parameter in micro.parameters.values()}
    return StepProgram(
        variants=Variants(compilation, code, forward.target, may_be_listed=False),
        micro=micro,
        num_parts=num_micro_batches,
        optimizer=optimizer,
        others=[] if clip_grad_norm is None else [each for each in model_parameters if id(each) not in own],
    )


# ------------------------------------------------------------------------------------------------------------ calls


class _Wiring:
    """Builds the calls of a step, with names for all values that go from one to the other."""

    def __init__(self, micro: Micro, num_micro_batches: int) -> None:
        self._micro = micro
        self._count = num_micro_batches
        forward, backward = micro.forward.compilation.partition.graph, micro.backward.compilation.partition.graph
        self._groups = group_gradients(backward, list(micro.parameters))
        self.graphs = [forward, backward]
        self.bodies: list[CompiledBody] = []
        """Of the graphs besides the first two."""
        self.calls: list[Call] = []
        self.losses: list[str] = []
        self.gradients: dict[int, str] = {}
        """By place of the parameter."""

    @property
    def inputs(self) -> list[str]:
        """Names of what the step takes: state, then inputs and weights of the micro-batches."""
        micro, parts = self._micro, range(self._count)
        own = [
            f"input {place}@{part}" for part in parts for place in range(micro.num_inputs) if place not in micro.state
        ]
        return [*(f"state {place}" for place in micro.state), *own, *(f"weight@{part}" for part in parts)]

    def add_micro_batches(self) -> None:
        """Add the forward and the backward of every micro-batch, and the sums of their gradients."""
        adders = [self._add_graph(add_gradients(group)) for group in self._groups] if self._count > 1 else []
        for part in range(self._count):
            made = self._add_micro_batch(part)
            if part == 0:
                self.gradients = made
                continue
            for group, adder in zip(self._groups, adders, strict=True):
                earlier, later = ([each[place] for place in group.sizes] for each in (self.gradients, made))
                self._replace_gradients(group, adder, [*earlier, *later], label=f"@{part}")

    def finish_gradients(
        self, optimizer: StepInParts | None, limit: float | None, parameter_order: Sequence[torch.Tensor]
    ) -> None:
        """Add what happens to gradients when they are final: clipping and the optimizer."""
        parameters = self._micro.parameters
        factor = []
        if limit is not None:
            norms = [f"norms {number}" for number in range(len(self._groups))]
            for group, norm in zip(self._groups, norms, strict=True):
                measure = self._add_graph(measure_gradients(group))
                self._call(measure, [self.gradients[place] for place in group.sizes], [norm])
            place_of = {id(parameter): place for place, parameter in parameters.items()}
            order = [place_of[id(each)] for each in parameter_order if id(each) in place_of]
            factor = ["factor"]
            self._call(self._add_graph(limit_gradients(self._groups, order, limit)), norms, factor)
        if optimizer is None and limit is None:
            return
        for group in self._groups:
            update = self._add_graph(update_parameters(group, parameters, optimizer, is_clipped=limit is not None))
            owners = [] if optimizer is None else [f"state {place}" for place in group.sizes]
            taken = [*owners, *(self.gradients[place] for place in group.sizes), *factor]
            if limit is None:
                self._call(update, taken, [], writes=owners)
            else:
                self._replace_gradients(group, update, taken, writes=owners)

    def _add_micro_batch(self, part: int) -> dict[int, str]:
        """Add one forward and backward; return the names of the gradients by place."""
        micro = self._micro
        forward, backward = self.graphs[:2]
        label = f"@{part}" if self._count > 1 else ""
        takes = [f"state {p}" if p in micro.state else f"input {p}@{part}" for p in range(micro.num_inputs)]
        values = dict(zip(_names(forward, forward.inputs), takes, strict=True))
        self.calls.append(_call(0, micro.forward, Phase.FORWARD, label, takes, values))
        self.losses.append(values[_name(forward, forward.outputs[micro.loss])])
        reads = [
            f"weight@{part}" if name.startswith(_TANGENT) else values[name]
            for name in _names(backward, backward.inputs)
        ]
        values = dict(zip(_names(backward, backward.inputs), reads, strict=True))
        self.calls.append(_call(1, micro.backward, Phase.BACKWARD, f":backward{label}", reads, values))
        return {place: values[_name(backward, backward.outputs[place])] for place in micro.parameters}

    def _add_graph(self, added: OneSegment) -> int:
        self.graphs.append(added.graph)
        self.bodies.append(added.body)
        return len(self.graphs) - 1

    def _replace_gradients(
        self, group: Group, graph: int, takes: Sequence[str], *, writes: Sequence[str] = (), label: str = ""
    ) -> None:
        after = {place: f"gradient {place} of call {len(self.calls)}" for place in group.sizes}
        self._call(graph, takes, list(after.values()), writes=writes, label=label)
        self.gradients.update(after)

    def _call(
        self, graph: int, takes: Sequence[str], makes: Sequence[str], *, writes: Sequence[str] = (), label: str = ""
    ) -> None:
        self.calls.append(
            Call(
                graph=graph,
                phase=Phase.UPDATE,
                label=label,
                takes=tuple(takes),
                makes=tuple(makes),
                writes=frozenset(writes),
            )
        )


def _call(
    number: int, compiled: CompiledGraph, phase: Phase, label: str, takes: Sequence[str], values: dict[str, str]
) -> Call:
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


def _names(graph: SegmentGraph, buffers: Sequence[BufferId | None]) -> list[str]:
    return [graph.buffers[buffer].name for buffer in buffers if buffer is not None]


def _ordered(compilation: Compilation) -> list[SegmentId]:
    """Return the segments that draw random numbers or have effects."""
    nodes = compilation.capture.nodes
    contents = compilation.partition.nodes_by_segment
    return [SegmentId(s) for s, content in enumerate(contents) if any(nodes[node].keeps_order for node in content)]


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
