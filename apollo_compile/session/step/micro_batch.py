"""Forward and backward of one micro-batch, and where their inputs come from.

AOTAutograd names values alike in a forward and its backward: an input of the backward is the output of the forward that
has the same name. Inputs of the forward are those of the Dynamo graph, in order; outputs of the backward are
their gradients, in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import BufferId, Observations, Role, SegmentGraph
from apollo_compile.ir.text import format_count
from apollo_compile.passes.join import join_segments
from apollo_compile.session.graph import CompiledGraph
from apollo_compile.session.model import CompiledModel
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.target import CompiledBody, Contract, Run
from apollo_compile.torch_bridge.private_attributes import TANGENT


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCode:
    """The forward or the backward of one micro-batch."""

    compilation: Compilation
    contract: Contract
    bodies: Sequence[CompiledBody] = ()
    """Compiled bodies by body id; empty if it is planned but not compiled."""
    observations: Observations = field(default_factory=Observations)

    @classmethod
    def of(cls, graph: CompiledGraph) -> GraphCode:
        """Return the code of a compiled graph with its measurements."""
        measured = graph.learner.observations
        return cls(
            compilation=graph.compilation,
            contract=graph.code.contract,
            bodies=graph.bodies,
            observations=measured if measured.entries else graph.compilation.observations,
        )

    @property
    def graph(self) -> SegmentGraph:
        """Return its segments."""
        return self.compilation.partition.graph

    def as_single_segment(self, whole: Run) -> GraphCode:
        """Return it as one segment, which Inductor's code of the whole graph runs."""
        graph, places = join_segments(self.graph)

        def body(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            made = whole(arguments)
            return [made[place] for place in places]

        nodes = tuple(node.id for node in self.compilation.capture.nodes)
        partition = replace(self.compilation.partition, graph=graph, nodes_by_segment=(nodes,))
        return replace(
            self,
            compilation=replace(self.compilation, partition=partition),
            bodies=(CompiledBody(function=body),),
            observations=Observations(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchGraphs:
    """Forward and backward of one micro-batch, and where the inputs of the forward come from."""

    forward: GraphCode
    backward: GraphCode
    state: Mapping[int, torch.Tensor]
    """Inputs of the forward that all micro-batches share, by place: parameters and buffers."""
    num_inputs: int
    """Number of inputs of the forward."""
    returned: Sequence[int]
    """Places of the results of the loss function among the outputs of the forward."""
    loss_dtype: torch.dtype
    parameters: Mapping[int, torch.Tensor] = field(init=False)
    """Parameters that get gradients, by place among the inputs of the forward."""

    def __post_init__(self) -> None:
        """Find the parameters, which every step asks for."""
        outputs = self.backward.graph.outputs
        trained = {p: tensor for p, tensor in self.state.items() if tensor.requires_grad and outputs[p] is not None}
        object.__setattr__(self, "parameters", trained)

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return next(tensor.device for tensor in self.state.values())

    def is_of_parameters_in(self, inputs: Sequence[object]) -> bool:
        """Return whether these inputs of the forward have the parameters that get gradients."""
        return all(inputs[place] is parameter for place, parameter in self.parameters.items())


def find_micro(
    model: CompiledModel,
    inputs: Sequence[object],
    owned: Collection[int],
    *,
    dtypes: Sequence[torch.dtype],
    loss: int,
    averages_gradients: bool = False,
) -> MicroBatchGraphs:
    """Return the graphs of a micro-batch that was trained on.

    Arguments:
        model: the compiled loss function of a micro-batch.
        inputs: of its latest call by Dynamo.
        owned: ids of the module's parameters and buffers.
        dtypes: of the outputs of the Dynamo graph.
        loss: place of the loss among them.
        averages_gradients: whether the step averages gradients over several ranks.

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
    if not forward.is_alone:
        _check_communication(model, averages_gradients)
    unsafe = forward.code.contract.unsafe or backward.code.contract.unsafe
    if unsafe is not None and forward.target.captures:
        raise UnsupportedGraphError(f"{model.name} has {unsafe}, which no CUDA graph may hold")
    if forward.boundary is not None or backward.boundary is not None:
        raise UnsupportedGraphError(f"{model.name} takes sizes or objects besides tensors")
    codes = GraphCode.of(forward), GraphCode.of(backward)
    return join_graphs(model.name, *codes, inputs, owned, dtypes=dtypes, loss=loss)


def _check_communication(model: CompiledModel, averages_gradients: bool) -> None:
    """Check that the only communication of a step is that of its gradients.

    Raises:
        UnsupportedGraphError: gradients are not averaged, or the loss function communicates too.
    """
    if not averages_gradients:
        raise UnsupportedGraphError(
            "there are several processes, and gradients are not averaged: expected a model in DistributedDataParallel, "
            "under FSDP2, or a mesh"
        )
    if any(each.has_collective for graph in model.graphs for each in graph.compilation.partition.graph.segments):
        raise UnsupportedGraphError(f"{model.name} communicates with other ranks")


def join_graphs(
    name: str,
    forward: GraphCode,
    backward: GraphCode,
    inputs: Sequence[object],
    owned: Collection[int],
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    loss: int = 0,
) -> MicroBatchGraphs:
    """Return forward and backward as the graphs of one micro-batch; arguments are as for `find_micro`.

    Raises:
        UnsupportedGraphError: they cannot be linked, with the reason.
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    graph, other = forward.graph, backward.graph
    if not len(graph.inputs) == len(other.outputs) == len(tensors) == len(inputs):
        raise UnsupportedGraphError(
            f"the forward takes {len(graph.inputs)} tensors and the backward makes {len(other.outputs)} gradients for "
            f"{len(inputs)} inputs of {name}: some of them share memory, or are no plain tensors"
        )
    state = {place: tensor for place, tensor in enumerate(tensors) if id(tensor) in owned}
    written = (forward.contract.written_inputs or frozenset()) - state.keys()
    if written:
        raise UnsupportedGraphError("the loss function writes to something else than the buffers of the model")
    for place, tensor in enumerate(tensors):
        if tensor.requires_grad and place not in state and other.outputs[place] is not None:
            num_elements = graph.buffers[graph.inputs[place]].num_bytes // tensor.element_size()  # it is empty here
            raise UnsupportedGraphError(
                "something else than parameters of the model requires gradients: a tensor with "
                f"{format_count(num_elements, 'element')} of {tensor.dtype}; detach it, "
                "or make it a parameter of the model"
            )
    if not all(tensor.is_leaf for tensor in state.values()):
        raise UnsupportedGraphError("a parameter is computed from others; update it under `torch.no_grad()`")
    tangents = [value for value in names_of(other, other.inputs) if value.startswith(TANGENT)]
    if len(tangents) != 1:
        raise UnsupportedGraphError(f"{len(tangents)} outputs of the loss function need gradients; expected the loss")
    returned = sorted(forward.contract.user_outputs)
    if len(returned) != len(dtypes):
        raise UnsupportedGraphError(
            f"the forward returns {len(returned)} tensors to the caller where Dynamo expects {len(dtypes)}: some of "
            "them share memory"
        )
    known = {*names_of(graph, graph.inputs), *names_of(graph, graph.outputs), *tangents}
    if unknown := set(names_of(other, other.inputs)) - known:
        raise UnsupportedGraphError(f"the backward reads {sorted(unknown)[0]}, which the forward does not return")
    if None in (forward.contract.written_inputs, backward.contract.written_inputs):
        raise UnsupportedGraphError(f"{name} writes to other tensors than its inputs")
    return MicroBatchGraphs(
        forward=forward,
        backward=backward,
        state=state,
        num_inputs=len(tensors),
        returned=returned,
        loss_dtype=dtypes[loss],
    )


def names_of(graph: SegmentGraph, buffers: Sequence[BufferId | None]) -> list[str]:
    """Return the names of buffers, those that are None left out."""
    return [graph.buffers[buffer].name for buffer in buffers if buffer is not None]
