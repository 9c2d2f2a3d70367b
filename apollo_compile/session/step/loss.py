"""The compiled loss function of a step: a graph of its own for frequent kinds of micro-batches, pieces for others.

CompiledLoss(model, loss_fn, options).compute(part) -> the result of the loss function
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx, nn

from apollo_compile.session.backend import compile_dynamo_graph
from apollo_compile.session.step.linking import STAYS, owned_by
from apollo_compile.session.step.notes import LossGraph, Noted, Notes, NotLinkedError
from apollo_compile.session.step.returned import detach_others
from apollo_compile.session.step.split import kind_of
from apollo_compile.torch_bridge.compile_context import compile_apart, swappable_tensors
from apollo_compile.torch_bridge.dynamo_graph import return_read_tensors
from apollo_compile.torch_bridge.graph_breaks import is_limit_hit, problem_of, way_out
from apollo_compile.torch_bridge.modes import is_each_operator_seen
from apollo_compile.torch_bridge.private_attributes import count_hooks

_logger = logging.getLogger(__name__)

LossFunction = Callable[[nn.Module, Any], Any]
"""`loss_fn(model, micro_batch)` returns the loss, a tuple that begins with it, or a mapping that has it as `loss`."""

FREQUENT = 3
"""Steps of a kind of micro-batch after which it gets a graph of its own; others share one for all sizes."""

MAX_KINDS = 64
"""Number of kinds whose steps are counted, the latest ones."""


class CompiledLoss:
    """The compiled loss function, and its graphs; `why_in_pieces` is why batches without a graph run in pieces."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, options: Mapping[str, Any], why_in_pieces: str = ""
    ) -> None:
        self.graphs: weakref.WeakSet[LossGraph] = weakref.WeakSet()
        """Graphs of the loss function that ran."""
        self.why_in_pieces = why_in_pieces
        """Why the loss function runs in pieces; empty if it does not."""
        if why_in_pieces:
            _logger.info("%s: %s", STAYS, why_in_pieces)
        self._model = model
        self._graph_of: weakref.WeakValueDictionary[Hashable, LossGraph] = weakref.WeakValueDictionary()
        """The graph that ran last for a kind of micro-batch; Dynamo may call another one the next time."""
        self._num_seen: dict[Hashable, int] = {}
        """Number of steps that the latest kinds of micro-batches had; steps of `_latest` are not counted any more."""
        self._latest: tuple[Hashable, weakref.ref[LossGraph] | None] = (None, None)
        """The key and the number of micro-batches of the latest step, if it is frequent, and its graph."""
        self._first_kinds: dict[int, Hashable] = {}
        """The first kind of micro-batch, by number of micro-batches in a step."""
        weakly = weakref.ref(model)  # Dynamo keeps graphs, and with them these notes
        self.notes = Notes(lambda: owned_by(weakly()))
        weakref.finalize(self, _unlink, self.graphs).atexit = False

        def loss_of(part: Any) -> Any:
            return detach_others(loss_fn(model, part))

        def loss_function(part: Any) -> Any:  # a code object of its own, whose compiles count apart
            return detach_others(loss_fn(model, part))

        self._uncompiled = loss_of
        # Dynamo keeps backends for good.
        backend = partial(_compile_and_note, weakref.ref(self.notes), options)
        self.call = swappable_tensors()(compile_apart(loss_of, backend=backend, dynamic=False, fullgraph=True))
        """Calls the loss function as it is compiled in one graph."""
        self._in_pieces = compile_apart(loss_function, backend="apollo", options=dict(options))

    def compute(self, part: Any) -> Any:
        """Call the loss function: as it is under a dispatch mode, else compiled for this kind or, in pieces, any."""
        if is_each_operator_seen():
            return self._uncompiled(part)
        if not self._has_own_graph(part):
            return self._in_pieces(part)
        try:
            return self.notes.call_and_note(self.call, part)
        except Exception as error:  # an error of the loss function itself is raised again below
            problem, is_hit = problem_of(error), is_limit_hit(error)
            if problem is None:
                raise
        num_hooks = count_hooks(self._model)  # some models install them in the first forward, which is no graph then
        loss = (self._in_pieces if self.why_in_pieces else self._uncompiled)(part)
        if count_hooks(self._model) > num_hooks:
            return loss
        self._graph_of.pop(self.key_of([part]), None)
        self._latest = (None, None)
        self.notes.latest = None  # the graph may have computed other micro-batches of the step
        if not self.why_in_pieces:
            self.why_in_pieces = f"the loss function is not one graph: {problem}{way_out(problem)}"
            if is_hit:  # graphs that it has still run, and it is not asked for others again
                count, again = len(self.graphs), max((graph.model.again for graph in self.graphs), default="")
                last = f", one{again}{'; pass a number that changes as a tensor' * ('==' in again)}" if again else ""
                self.why_in_pieces = f"{count} graphs of the loss function are compiled, Dynamo's limit{last}"
            _logger.info("%s: %s", "other batches run in pieces" if is_hit else STAYS, self.why_in_pieces)
        return loss

    def key_of(self, parts: Sequence[Any]) -> Hashable:
        """Return the key of the graph that these micro-batches share; None if they are not alike."""
        kind = kind_of(parts)
        return None if kind is None else (kind, self._model.training)

    def note_step(self, parts: Sequence[Any]) -> tuple[Hashable, LossGraph | None]:
        """Count the kinds of a step's micro-batches; return their key, and the graph that ran for it last."""
        key = self.key_of(parts)
        latest, graph = self._latest
        if graph is not None and (key, len(parts)) == latest and (known := graph()) is not None:
            return key, known
        for kind in {key} if key is not None else {self.key_of([part]) for part in parts}:
            self._first_kinds.setdefault(len(parts), kind)
            self._num_seen[kind] = self._num_seen.pop(kind, 0) + 1
            if len(self._num_seen) > MAX_KINDS:
                del self._num_seen[next(iter(self._num_seen))]
        found = None if key is None else self._graph_of.get(key)
        if found is not None and self._num_seen[key] >= FREQUENT:
            self._latest = (key, len(parts)), weakref.ref(found)
        return key, found

    def note_graph(self, key: Hashable, graph: LossGraph) -> None:
        """Note that this graph ran for these micro-batches."""
        self._graph_of[key], self._latest = graph, (None, None)
        self.graphs.add(graph)

    def note_inputs(self, parts: Sequence[Any], graph: LossGraph) -> tuple[Sequence[Noted], Sequence[Any]] | None:
        """Return the inputs that Dynamo gives to the graph, and the results of the loss function, by micro-batch.

        None where Dynamo calls another graph.
        """
        with self.notes.noting() as noted:
            try:
                returned = [self.call(part) for part in parts]
            except Exception as error:
                if not isinstance(error, NotLinkedError) and problem_of(error) is None:
                    raise
                return None  # the loop runs this one in pieces
        return (noted, returned) if [each.graph for each in noted] == [graph] * len(parts) else None

    def _has_own_graph(self, part: Any) -> bool:
        """Whether a kind of micro-batch has a graph of its own or is to get one, as the first and frequent ones do."""
        key = self.key_of([part])
        if key in self._graph_of or self.why_in_pieces:
            return key in self._graph_of
        return key in self._first_kinds.values() or self._num_seen.get(key, 0) >= FREQUENT


def _unlink(graphs: weakref.WeakSet[LossGraph]) -> None:
    """Drop the memory of a step that is gone; Dynamo keeps its graphs."""
    for graph in graphs:
        graph.unlink()
        graph.model.target.keep_only(())


def _compile_and_note(
    reference: weakref.ref[Notes],
    options: Mapping[str, Any],
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
) -> Callable[..., Any]:
    notes = reference()
    return_read_tensors(graph_module)
    compiled, model = compile_dynamo_graph(graph_module, example_inputs, options=options, is_for_step=True)
    if model is None or notes is None:
        return compiled
    return LossGraph(compiled=compiled, model=model, notes=reference)
