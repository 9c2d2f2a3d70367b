"""Let a program take its inputs from Dynamo: graphs of the loss function that run, or only note their inputs.

Note [guards]: for every micro-batch the compiled loss function is called, so Dynamo checks its guards and looks up
parameters, buffers and other objects of the code; but the graph that it calls only notes its inputs, and returns
outputs that get their values when the program has run. Where Dynamo calls another graph than the one that was linked,
or compiles one, the step is a loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from apollo_compile.reports.values import Stage
from apollo_compile.session.model import CompiledModel
from apollo_compile.session.step.input_tracker import FEWEST_STEPS, InputTracker
from apollo_compile.session.step.micro_batch import MicroBatchGraphs
from apollo_compile.session.step.returned import READS_WHOLE_NUMBERS, Number, watch_reads, with_values
from apollo_compile.session.step.tuning import StepTuner
from apollo_compile.torch_bridge.trees import count_tensors


class NotLinkedError(Exception):
    """Dynamo calls a graph that is in no program."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class LossGraph:
    """A Dynamo graph of the loss function: it runs, or, where a program is to take its inputs, only notes them.

    Dynamo keeps it for good, so it must hold neither objects of a step nor the loss function, which may refer to one.
    """

    compiled: Callable[..., Any]
    model: CompiledModel
    notes: weakref.ref[Notes]
    inputs: tuple[Any, ...] | None = None
    """Inputs of its latest run, until it is known whether it can be linked; only tensors of the model have data."""
    dtypes: Sequence[torch.dtype] = ()
    """Dtypes of its outputs."""
    loss: int = 0
    """Place of the loss among its outputs: the output that has a graph."""
    num_returned: int = 0
    """Number of outputs that the loss function returned, as tensors or numbers, or that are inputs; it keeps others."""
    numbers: frozenset[int] = frozenset()
    """Places of outputs that it returns as numbers."""
    passed: Mapping[int, int] = field(default_factory=dict)
    """Outputs that are inputs, which the model assigns to where they have been: their places, and those of inputs."""
    input_tracker: InputTracker = field(default_factory=InputTracker)
    """Tracks its inputs in steps that were loops, until programs were linked."""
    micro: MicroBatchGraphs | None = None
    """Forward and backward, if they can be linked."""
    refusal: str = ""
    """Why they cannot be linked."""
    num_links: int = 0
    """How often its forward and backward were found."""

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph, unless a program does."""
        notes = self.notes()
        return self.compiled(*inputs) if notes is None else notes.call(self, inputs)

    @property
    def outcomes(self) -> dict[int, StepTuner | str]:
        """The tuner of the step, or why the step can only run as a loop, by number of micro-batches."""
        notes = self.notes()
        return {} if notes is None else notes.outcomes.setdefault(self, {})

    @property
    def is_ready(self) -> bool:
        """Whether it can be linked: its plans are final, and it is known which inputs stay where they are."""
        is_known = not self.model.target.captures or self.input_tracker.num_steps >= FEWEST_STEPS
        return is_known and self.model.state().stage is not Stage.MEASURING

    @property
    def is_decided(self) -> bool:
        """Whether it is linked, or refused for good."""
        return self.micro is not None or bool(self.refusal)

    def unlink(self) -> None:
        """Forget its programs, whose parameters are not those of the model any more."""
        self.drop_programs()
        self.micro = None

    def drop_programs(self) -> None:
        """Forget its programs; those that follow are linked of the same forward and backward."""
        for outcome in self.outcomes.values():
            if isinstance(outcome, StepTuner):
                outcome.program.release()
        self.outcomes.clear()


@dataclass(frozen=True, slots=True)
class Noted:
    """Inputs of one call of a graph, and the outputs that it returned, which have no values yet."""

    graph: LossGraph
    inputs: Sequence[Any]
    outputs: Sequence[torch.Tensor]


class Notes:
    """Records the inputs of a graph instead of running it."""

    def __init__(self, owned: Callable[[], Collection[int]]) -> None:
        """Take the ids of the model's parameters and buffers from `owned`."""
        self.latest: LossGraph | None = None
        self.outcomes: weakref.WeakKeyDictionary[LossGraph, dict[int, StepTuner | str]] = weakref.WeakKeyDictionary()
        """Programs of graphs, or why they have none."""
        self._owned = owned
        self._noted: list[Noted] | None = None
        self._step = self._num_parts = 0
        self._watched: list[torch.Tensor] = []
        self._read: list[tuple[int, weakref.ref[Number]]] = []
        """Numbers that were read of outputs of the latest call, and the places of those."""

    def begin_loop(self, step: int, num_parts: int) -> None:
        """Note that a step begins as a loop, which has this number among all steps, and so many micro-batches."""
        self.latest, self._step, self._num_parts = None, step, num_parts

    @contextmanager
    def noting(self) -> Iterator[list[Noted]]:
        """Let calls of linked graphs only note their inputs in a `with`, and calls of others raise."""
        noted: list[Noted] = []
        self._noted = noted
        try:
            yield noted
        finally:
            self._noted = None

    def call_and_note(self, call: Callable[[Any], Any], part: Any) -> Any:
        """Call the compiled loss function; until its graph is linked, note which of the outputs it returns."""
        self._read.clear()
        returned = call(part)
        if self._read:
            returned = with_values(returned)  # numbers that the loss function keeps still live then
        while self._watched:
            del self._watched.pop().item
        graph = self.latest
        if graph is not None and not graph.is_decided:
            kept = {place for place, number in self._read if number() is not None}
            graph.numbers = frozenset(place for place, _ in self._read if place not in kept)
            graph.num_returned = count_tensors(returned) + len(graph.numbers) + len(graph.passed)
        return returned

    def call(self, graph: LossGraph, inputs: tuple[Any, ...]) -> Any:
        """Run the graph, or note its inputs."""
        if self._noted is None:
            outputs = graph.compiled(*inputs)
            self.latest = graph
            if graph.micro is not None and not graph.micro.is_of_parameters_in(inputs):
                graph.unlink()
            if self._num_parts not in graph.outcomes:
                owned, tensors = self._owned(), {p: x for p, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
                others = {place: tensor for place, tensor in tensors.items() if id(tensor) not in owned}
                graph.input_tracker.note(self._step, others)
                if not graph.is_decided:  # tensors of the batch would be kept alive
                    empty = {p: torch.empty(0, dtype=x.dtype, requires_grad=x.requires_grad) for p, x in others.items()}
                    graph.inputs = tuple(empty.get(place, value) for place, value in enumerate(inputs))
                    self._note_outputs(graph, inputs, outputs)
            return outputs
        if graph.micro is None:
            raise NotLinkedError
        device = graph.micro.device
        outputs = [torch.empty(0, dtype=dtype, device=device) for dtype in graph.dtypes]
        self._noted.append(Noted(graph, inputs, outputs))
        for place in graph.numbers:
            watch_reads(outputs[place], lambda number: None)
        taken = graph.passed
        return tuple(inputs[taken[place]] if place in taken else output for place, output in enumerate(outputs))

    def _note_outputs(self, graph: LossGraph, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Note dtypes and places of the outputs of a graph that ran; numbers are noted when they are read."""
        tensors = [each for each in outputs if isinstance(each, torch.Tensor)]
        if len(tensors) < len(outputs):
            graph.refusal, graph.inputs = READS_WHOLE_NUMBERS, None
            return
        graph.dtypes = [each.dtype for each in tensors]
        graph.loss = next((place for place, each in enumerate(tensors) if each.requires_grad), 0)
        places = {id(each): place for place, each in enumerate(inputs)}
        graph.passed = {place: places[id(each)] for place, each in enumerate(tensors) if id(each) in places}
        for place, each in enumerate(tensors):
            if each.dtype is torch.float64 and not each.dim() and not each.requires_grad and place not in graph.passed:
                self._watched.append(each)
                watch_reads(each, lambda number, place=place: self._read.append((place, weakref.ref(number))))  # type: ignore[misc]
