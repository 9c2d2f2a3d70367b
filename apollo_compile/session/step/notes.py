"""Let a program take its inputs from Dynamo: graphs of the loss function that run, or only note what they are given.

Note [guards]: for every micro-batch the compiled loss function is called, so Dynamo checks its guards and looks up
parameters, buffers and whatever else the code refers to; but the graph that it calls only notes its inputs, and returns
outputs that get their values when the program has run. Where Dynamo calls another graph than the one that was linked,
or compiles one, the step is a loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from apollo_compile.reports.values import Stage
from apollo_compile.session.model import CompiledModel
from apollo_compile.session.step.input_tracker import FEWEST_STEPS, InputTracker
from apollo_compile.session.step.micro_batch import MicroBatchGraphs
from apollo_compile.session.step.tuning import StepTuner


class NotLinkedError(Exception):
    """Dynamo calls a graph that is in no program."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class LossGraph:
    """A Dynamo graph of the loss function: it runs, or, where a program is to take its inputs, only notes them.

    Dynamo keeps it for good, so it must not hold what a step holds, nor the loss function, which may know the step.
    """

    compiled: Callable[..., Any]
    model: CompiledModel
    notes: weakref.ref[Notes]
    inputs: tuple[Any, ...] | None = None
    """Of its latest run, until it is known whether it can be linked; only tensors of the model have data."""
    dtypes: Sequence[torch.dtype] = ()
    """Dtypes of its outputs."""
    loss: int = 0
    """Place of the loss among them, the one that has a graph."""
    num_returned: int = 0
    """Tensors that the loss function returned; outputs besides them are kept by it, or assigned by the model."""
    input_tracker: InputTracker = field(default_factory=InputTracker)
    """What it was given in steps that were loops until programs were linked."""
    is_decided: bool = False
    """Whether it is known whether it can be linked."""
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
        """By number of micro-batches: what is known of the step, or why it can only run as a loop."""
        notes = self.notes()
        return {} if notes is None else notes.outcomes.setdefault(self, {})

    @property
    def is_ready(self) -> bool:
        """Whether it can be linked: its plans are final, and it is known which inputs stay where they are."""
        is_known = not self.model.target.captures or self.input_tracker.num_steps >= FEWEST_STEPS
        return is_known and self.model.state().stage is not Stage.MEASURING

    def unlink(self) -> None:
        """Forget its programs, whose parameters are not those of the model any more."""
        self.drop_programs()
        self.micro, self.is_decided = None, False

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

    def call(self, graph: LossGraph, inputs: tuple[Any, ...]) -> Any:
        """Run the graph, or note its inputs."""
        if self._noted is None:
            self.latest = graph
            outputs = graph.compiled(*inputs)
            if self._num_parts not in graph.outcomes:
                owned, tensors = self._owned(), {p: x for p, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
                besides = {place: tensor for place, tensor in tensors.items() if id(tensor) not in owned}
                graph.input_tracker.note(self._step, besides)
                if not graph.is_decided:  # tensors of the batch would be kept alive
                    empty = {
                        p: torch.empty(0, dtype=x.dtype, requires_grad=x.requires_grad) for p, x in besides.items()
                    }
                    graph.inputs = tuple(empty.get(place, value) for place, value in enumerate(inputs))
                    graph.dtypes = [output.dtype for output in outputs]
                    graph.loss = next((place for place, each in enumerate(outputs) if each.requires_grad), 0)
            return outputs
        if graph.micro is None:
            raise NotLinkedError
        device = graph.micro.device
        outputs = tuple(torch.empty(0, dtype=dtype, device=device) for dtype in graph.dtypes)
        self._noted.append(Noted(graph, inputs, outputs))
        return outputs
