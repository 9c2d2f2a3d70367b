"""The training step as the unit: forward, loss and backward of all micro-batches as one program.

    step = compile_step(model, loss_fn, optimizer, microbatches=4);    loss = step(batch)

The first steps are the plain loop, over the loss function as `torch.compile(backend="apollo")` compiles it. When
nothing about that is being decided any more, what was compiled is linked into one program (`session/step_program.py`),
and in the steps that follow programs and the loop take turns until the fastest is known (`session/comparison.py`). What
cannot be linked stays the loop, and one line says why.

Note [guards]: a program takes its inputs from Dynamo. For every micro-batch the compiled loss function is called, so
Dynamo checks its guards and looks up parameters, buffers and whatever else the code refers to; but the graph that it
calls only notes its inputs. Where Dynamo calls another graph than the one that was linked, or compiles one, the step is
a loop.

Guarantees: losses and gradients are those of the loop, with sums in the same order; the optimizer is the user's own and
steps as in the loop.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from apollo_compile.backend import compile_dynamo_graph
from apollo_compile.config import load_config
from apollo_compile.errors import ConfigError, TargetError, UnsupportedGraphError
from apollo_compile.ir import Variant
from apollo_compile.reports.values import Stage
from apollo_compile.session.comparison import Comparison
from apollo_compile.session.model import CompiledModel
from apollo_compile.session.step_program import StepProgram, find_micro, link_step
from apollo_compile.torch_bridge.graph_breaks import problem_of
from apollo_compile.torch_bridge.trees import flatten
from apollo_compile.units import format_ns

_logger = logging.getLogger(__name__)

LOOP = "loop over micro-batches"
IN_TURN = "one program, segments in turn"
PROGRAM = "one program"

STAYS = "the step stays a loop over micro-batches"

LossFunction = Callable[[nn.Module, Any], Any]
"""`loss_fn(model, micro_batch)` returns the loss, or a tuple that begins with it."""

Split = Callable[[Any, int], Sequence[Any]]
"""`split(batch, k)` returns k micro-batches."""

Weigh = Callable[[Any], float]
"""`weigh(micro_batch)` returns how much a micro-batch counts, such as its number of tokens."""


def compile_step(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    microbatches: int = 1,
    clip_grad_norm: float | None = None,
    split: Split | None = None,
    weigh: Weigh | None = None,
    options: Mapping[str, Any] | None = None,
) -> Step:
    """Return a function that takes one training step per call: `loss = step(batch)`.

    A step computes the loss of every micro-batch and the gradients of their weighted mean, and, with an optimizer,
    clips gradients, steps and leaves them in `.grad`, as this loop does:

        optimizer.zero_grad()
        for part, weight in zip(split(batch, microbatches), weights):
            (loss_fn(model, part) * weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        optimizer.step()

    Arguments:
        model: the module that is trained, not compiled.
        loss_fn: `loss_fn(model, micro_batch)` returns the loss, a tensor without dimensions, or a tuple that begins
            with it. One that returns other tensors too, or has graph breaks, runs as a loop.
        optimizer: steps at the end; None leaves gradients in `.grad`, added to what is there.
        microbatches: into how many parts of equal size a batch is split.
        clip_grad_norm: largest norm of all gradients together; None does not clip.
        split: `split(batch, microbatches)` returns the parts; None cuts all tensors along dimension 0.
        weigh: how much a micro-batch counts; None is equally. Weights are divided by their sum.
        options: as for `torch.compile(..., options=...)`.

    Raises:
        TargetError: `model` is no module, or is compiled.
        ConfigError: `microbatches` is less than 1, or an option is unknown or has a wrong value.
    """
    if not isinstance(model, nn.Module):
        raise TargetError(f"cannot compile steps of a {type(model).__name__}: expected a torch.nn.Module")
    if hasattr(model, "_orig_mod"):
        raise TargetError("the model is compiled already: pass the module that was given to torch.compile")
    if microbatches < 1:
        raise ConfigError(f"microbatches is {microbatches}; expected at least 1")
    return Step(
        model,
        loss_fn,
        optimizer,
        num_parts=microbatches,
        clip_grad_norm=clip_grad_norm,
        split=split or split_evenly,
        weigh=weigh,
        options=dict(options or {}),
    )


class Step:
    """One training step per call; see `compile_step`."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer | None,
        *,
        num_parts: int,
        clip_grad_norm: float | None,
        split: Split,
        weigh: Weigh | None,
        options: Mapping[str, Any],
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._num_parts = num_parts
        self._clip_grad_norm = clip_grad_norm
        self._split = split
        self._weigh = weigh
        self._config = load_config(options)
        self._notes = _Notes()
        self._linked: weakref.WeakKeyDictionary[_Graph, dict[int, _Tuned | None]] = weakref.WeakKeyDictionary()
        """By graph and number of micro-batches; None where only the loop can run."""

        def loss_of(part: Any) -> Any:
            return loss_fn(model, part)

        compile_function: Callable[..., Callable[[Any], Any]] = torch.compile
        backend = partial(_compile_and_note, weakref.ref(self._notes), options)  # Dynamo keeps backends for good
        self._loss_of = compile_function(loss_of, backend=backend, dynamic=False, fullgraph=True)
        self._loss_in_pieces = compile_function(loss_of, backend="apollo", dynamic=False, options=dict(options))
        self._problem = ""
        """Why the loss function is no single graph; empty where it is."""

    def __call__(self, batch: Any) -> torch.Tensor:
        """Take one step; return the weighted mean of the losses, without a graph.

        Raises:
            Exception: whatever the model, the loss function or the optimizer raises.
        """
        parts = self._split(batch, self._num_parts)
        weights = self._weights_of(parts)
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        noted = self._note_inputs(parts)
        loss = self._run_loop(parts, weights) if noted is None else self._run_tuned(noted, parts, weights)
        if noted is None:
            self._link_latest(len(parts))
        if self._clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_grad_norm)
        if self._optimizer is not None:
            self._optimizer.step()
        return loss

    @property
    def verdicts(self) -> list[str]:
        """What runs steps of every kind that were linked or refused, and what it was compared with."""
        if self._problem:
            return [f"{LOOP}: {self._problem}"]
        each = (tuned for linked in self._linked.values() for tuned in linked.values())
        return [LOOP if tuned is None else tuned.verdict for tuned in each]

    def _note_inputs(self, parts: Sequence[Any]) -> _Noted | None:
        """Return the program of a step and its inputs: Note [guards]; None where there is none, or the loop has won."""
        if not any(tuned is not None and tuned.may_win for each in self._linked.values() for tuned in each.values()):
            return None
        begin = time.perf_counter_ns()
        with self._notes.noting() as noted:
            try:
                for part in parts:
                    self._loss_of(part)
            except _NotLinkedError:
                return None
        graph = noted[0][0]
        tuned = self._linked.get(graph, {}).get(len(parts))
        inputs = [each for _, each in noted]
        if tuned is None or any(other is not graph for other, _ in noted):
            return None
        if not (tuned.may_win and tuned.program.may_run() and tuned.program.takes(inputs)):
            return None
        return _Noted(tuned, inputs, time.perf_counter_ns() - begin)

    def _run_tuned(self, noted: _Noted, parts: Sequence[Any], weights: Sequence[float]) -> torch.Tensor:
        """Run whatever is being measured, or has won."""
        tuned = noted.tuned
        is_loop = tuned.begin_step() == LOOP
        begin = time.perf_counter_ns()
        loss = self._run_loop(parts, weights) if is_loop else tuned.run(noted.inputs, weights)
        tuned.record(time.perf_counter_ns() - begin + (0 if is_loop else noted.took_ns))
        return loss

    def _run_loop(self, parts: Sequence[Any], weights: Sequence[float]) -> torch.Tensor:
        total: torch.Tensor | None = None
        for part, weight in zip(parts, weights, strict=True):
            weighted = _loss_in(self._compute(part)) * weight
            weighted.backward()  # type: ignore[no-untyped-call]
            total = weighted.detach() if total is None else total + weighted.detach()
        assert total is not None
        return total

    def _compute(self, part: Any) -> Any:
        """Call the compiled loss function; one that is no single graph is compiled in pieces."""
        if not self._problem:
            try:
                return self._loss_of(part)
            except Exception as error:
                problem = problem_of(error)
                if problem is None:
                    raise
                self._problem = problem
                _logger.info("%s: the loss function is not one graph: %s", STAYS, problem)
        return self._loss_in_pieces(part)

    def _weights_of(self, parts: Sequence[Any]) -> Sequence[float]:
        counts = [1.0 if self._weigh is None else float(self._weigh(part)) for part in parts]
        return [count / sum(counts) for count in counts]

    def _link_latest(self, num_parts: int) -> None:
        """Link the graph that ran last, when nothing about it is being decided any more."""
        graph = self._notes.latest
        if graph is None or self._problem or num_parts in self._linked.get(graph, {}):
            return
        if graph.model.state().stage is not Stage.MEASURING:
            self._linked.setdefault(graph, {})[num_parts] = self._link(graph, num_parts)

    def _link(self, graph: _Graph, num_parts: int) -> _Tuned | None:
        """Link what was compiled; say why where that is impossible."""
        programs = (tuned.program for tuned in self._linked.get(graph, {}).values() if tuned is not None)
        micro = next((program.micro for program in programs), None)
        if micro is None and graph.inputs is None:
            return None  # a line has said why
        try:
            if micro is None:
                owned = {id(each) for each in (*self._model.parameters(), *self._model.buffers())}
                micro = find_micro(graph.model, graph.inputs or (), owned, graph.loss_dtype)
            program = link_step(micro, num_parts, name=f"{graph.model.name} step")
        except UnsupportedGraphError as error:
            _logger.info("%s: %s", STAYS, error)
            return None
        except Exception as error:  # training goes on as it did
            if self._config.debug.strict:
                raise
            _logger.warning("%s: %s: %s", STAYS, type(error).__name__, error)
            return None
        finally:
            graph.inputs = None  # they hold a batch
        graph.is_linked = True
        return _Tuned(program, is_compared=self._config.plan.autotune)


class _NotLinkedError(Exception):
    """Dynamo calls a graph that is in no program."""


class _Noted(NamedTuple):
    """A program of a step with its inputs, and how long it took to note them."""

    tuned: _Tuned
    inputs: Sequence[Sequence[torch.Tensor]]
    took_ns: int


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Graph:
    """A Dynamo graph of the loss function: it runs, or, where a program is to take its inputs, only notes them."""

    compiled: Callable[..., Any]
    model: CompiledModel
    notes: _Notes
    inputs: tuple[object, ...] | None = ()
    """Of its latest run; None once it is known whether it can be linked."""
    loss_dtype: torch.dtype = torch.float32
    is_linked: bool = False

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph, unless a program does."""
        return self.notes.call(self, inputs)


class _Notes:
    """Which graph ran last, and what programs are to take."""

    def __init__(self) -> None:
        self.latest: _Graph | None = None
        self._noted: list[tuple[_Graph, tuple[Any, ...]]] | None = None

    @contextmanager
    def noting(self) -> Iterator[list[tuple[_Graph, tuple[Any, ...]]]]:
        """Let calls of linked graphs only note their inputs in a `with`, and calls of others raise."""
        noted: list[tuple[_Graph, tuple[Any, ...]]] = []
        self._noted = noted
        try:
            yield noted
        finally:
            self._noted = None

    def call(self, graph: _Graph, inputs: tuple[Any, ...]) -> Any:
        """Run the graph, or note its inputs and return a loss that nobody reads."""
        if self._noted is None:
            self.latest = graph
            outputs = graph.compiled(*inputs)
            if graph.inputs is not None:
                graph.inputs, graph.loss_dtype = inputs, outputs[0].dtype
            return outputs
        if not graph.is_linked:
            raise _NotLinkedError
        self._noted.append((graph, inputs))
        return (torch.zeros(()),)


def _compile_and_note(
    reference: weakref.ref[_Notes],
    options: Mapping[str, Any],
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
) -> Callable[..., Any]:
    compiled, model = compile_dynamo_graph(graph_module, example_inputs, options=options)
    notes = reference()
    return compiled if model is None or notes is None else _Graph(compiled=compiled, model=model, notes=notes)


class _Tuned:
    """A linked step, and what is known of how fast it is."""

    def __init__(self, program: StepProgram, *, is_compared: bool) -> None:
        """Begin with the program where nothing is to be compared, and with the loop elsewhere."""
        self.program = program
        selections: dict[str, tuple[Variant, ...]] = {LOOP: (Variant.INDUCTOR,), IN_TURN: (Variant.SERIAL,)}
        if program.variants.compilation.plan.uses_lanes:
            selections[PROGRAM] = (Variant.PLAN,)
        self._comparison = Comparison(selections) if is_compared else None
        self._current = LOOP if is_compared else PROGRAM
        self.verdict = "being measured" if is_compared else PROGRAM

    @property
    def may_win(self) -> bool:
        """Whether the loop has not won."""
        return self._comparison is not None or self._current != LOOP

    def begin_step(self) -> str:
        """Return what the step that begins now runs."""
        comparison = self._comparison
        if comparison is None:
            return self._current
        selection = comparison.begin_step()
        if selection is not None:
            self._current = next(name for name, each in comparison.selections.items() if each == selection)
            return self._current
        self._current = winner = comparison.winner()
        standings = [comparison.standing(name, winner) for name in comparison.selections]
        times = (f"{each.name} {format_ns(round(each.step_ns))} ({each.ratio:.2f}x)" for each in standings)
        self.verdict = ", ".join(times)
        name = self.program.variants.compilation.capture.name
        _logger.info("%s: chosen by measuring: %s; %s", name, winner, self.verdict)
        self._comparison = None
        return self._current

    def record(self, ns: int) -> None:
        """Note how long the step took, forward to gradients."""
        if self._comparison is not None:
            self._comparison.record(0, ns)

    def run(self, inputs: Sequence[Sequence[torch.Tensor]], weights: Sequence[float]) -> torch.Tensor:
        """Run the program, leave gradients, and return the loss."""
        self.program.variants.use(Variant.SERIAL if self._current == IN_TURN else Variant.PLAN)
        losses, gradients = self.program.run(inputs, weights)
        for parameter, gradient in zip(self.program.parameters, gradients, strict=True):
            parameter.grad = gradient
        total = losses[0] * weights[0]
        for loss, weight in zip(losses[1:], weights[1:], strict=True):
            total = total + loss * weight
        return total


def split_evenly(batch: Any, count: int) -> Sequence[Any]:
    """Return `count` parts of a batch, with all tensors cut along dimension 0.

    Raises:
        TargetError: a tensor has no dimension, or another size along it than the others, or one that is no multiple of
            `count`.
    """
    leaves, _, unflatten = flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if count == 1:
        return [batch]
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    if len(sizes) != 1 or min(sizes) == 0 or min(sizes) % count:
        raise TargetError(
            f"cannot split a batch into {count} micro-batches: its tensors have sizes {sorted(sizes)} along "
            f"dimension 0; expected one size, a multiple of {count}, or pass split="
        )
    pieces = [leaf.chunk(count) if isinstance(leaf, torch.Tensor) else count * (leaf,) for leaf in leaves]
    return [unflatten(part) for part in zip(*pieces, strict=True)]


def _loss_in(returned: Any) -> torch.Tensor:
    loss = returned[0] if isinstance(returned, tuple | list) else returned
    if not isinstance(loss, torch.Tensor) or loss.dim():
        raise TargetError(
            f"the loss function returned a {type(loss).__name__} as the loss; expected a tensor without dimensions"
        )
    return loss
