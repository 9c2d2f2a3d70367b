"""The training step as the unit: forward, loss, backward and optimizer of all micro-batches as one program.

    step = compile_step(model, loss_fn, optimizer, microbatches=4);    loss = step(batch)

The first steps are the plain loop, over the loss function as `torch.compile(backend="apollo")` compiles it. When
nothing about that is being decided any more, what was compiled is linked into one program (`session/step/`),
and in the steps that follow the program, the loop and rivals (`session/step/rivals.py`) take turns until the fastest is
known (`session/step/tuning.py`). What cannot be linked stays the loop, and one line says why.

A program takes its inputs from Dynamo, whose guards hold: Note [guards] in `session/step/notes.py`.

Guarantees: losses and gradients are those of the loop, with sums in the same order; parameters are updated by the
user's own optimizer, module by module where it treats every parameter by itself (`torch_bridge/optimizers.py`), else at
the end.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from apollo_compile.autotune.tuner import CandidateError
from apollo_compile.backend import compile_dynamo_graph
from apollo_compile.config import load_config
from apollo_compile.errors import CaptureError, NotReplayedError, TargetError
from apollo_compile.ir import Variant
from apollo_compile.reports.values import Stage, State
from apollo_compile.session.step.arguments import check_arguments
from apollo_compile.session.step.linking import STAYS, Linker, owned_by
from apollo_compile.session.step.notes import LossGraph, Noted, Notes, NotLinkedError
from apollo_compile.session.step.program import StepProgram, leave_gradients
from apollo_compile.session.step.rivals import (
    RIVALS,
    EagerLoop,
    Rival,
    TracedStep,
    add_gradients,
    compile_ns,
    keeps_order,
    reason_against_traced,
    weighted_sum,
)
from apollo_compile.session.step.split import kind_of, split_evenly
from apollo_compile.session.step.tuning import StepTuner
from apollo_compile.torch_bridge.compile_context import compile_apart
from apollo_compile.torch_bridge.graph_breaks import is_limit_hit, problem_of
from apollo_compile.torch_bridge.settings import inductor_settings

_logger = logging.getLogger(__name__)

LossFunction = Callable[[nn.Module, Any], Any]
"""`loss_fn(model, micro_batch)` returns the loss, or a tuple that begins with it."""

Split = Callable[[Any, int], Sequence[Any]]
"""`split(batch, k)` returns k micro-batches."""

Weigh = Callable[[Any], float]
"""`weigh(micro_batch)` returns how much a micro-batch counts, such as its number of tokens."""

FREQUENT = 3
"""Steps of a kind of micro-batch after which it gets a graph of its own; others share one for all sizes."""

MAX_KINDS = 64
"""Kinds whose steps are counted: those that came last."""


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

    A step computes the loss of every micro-batch and the gradients of their weighted mean, clips them, steps the
    optimizer and leaves gradients in `.grad`, as this loop does:

        optimizer.zero_grad()
        for part, weight in zip(split(batch, microbatches), weights):
            (loss_fn(model, part) * weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        optimizer.step()

    Arguments:
        model: the module that is trained, not compiled.
        loss_fn: `loss_fn(model, micro_batch)` returns the loss, a tensor without dimensions, or a tuple that begins
            with it. One that returns other tensors too, or has graph breaks, runs as a loop.
        optimizer: steps inside the program, module by module, if it is one of torch that treats every parameter by
            itself, else at the end; None leaves gradients in `.grad`, added to what is there.
        microbatches: into how many parts of equal size a batch is split.
        clip_grad_norm: largest norm of all gradients together; None does not clip.
        split: `split(batch, microbatches)` returns the parts; None cuts all tensors along dimension 0.
        weigh: how much a micro-batch counts; None is equally. Weights are divided by their sum.
        options: as for `torch.compile(..., options=...)`.

    Raises:
        TargetError: `model` is no module, or is compiled; `loss_fn` cannot be called; `optimizer` is none, or its step
            needs an argument.
        ConfigError: `microbatches` is not above 0, or an option is unknown or has a wrong value.
    """
    check_arguments(model, loss_fn, optimizer, microbatches, clip_grad_norm)
    return Step(
        model,
        loss_fn,
        optimizer,
        microbatches=microbatches,
        clip_grad_norm=clip_grad_norm,
        split=split or split_evenly,
        weigh=weigh,
        options=dict(options or {}),
    )


class Step:
    """One training step per call; see `compile_step`.

    It is long, since what runs a step, and what holds each way back, is decided in one place.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer | None,
        *,
        microbatches: int,
        clip_grad_norm: float | None,
        split: Split,
        weigh: Weigh | None,
        options: Mapping[str, Any],
    ) -> None:
        self.config = load_config(options)
        self._model = model
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._clip_grad_norm = clip_grad_norm
        self._split = split
        self._weigh = weigh
        self._linker = Linker(model, optimizer, clip_grad_norm, self.config)
        self._why_not_one_graph = ""
        self._is_full = False
        """Whether Dynamo compiles no more graphs."""
        self._has_stepped = False
        """Whether a loop has stepped the optimizer."""
        self._graphs: weakref.WeakSet[LossGraph] = weakref.WeakSet()
        """Graphs of the loss function that ran."""
        self._graph_of: weakref.WeakValueDictionary[Hashable, LossGraph] = weakref.WeakValueDictionary()
        """The graph that ran last for a kind of micro-batch; Dynamo may call another one the next time."""
        self._num_seen: dict[Hashable, int] = {}
        """How many steps the latest kinds of micro-batches had."""
        self._first_kinds: dict[int, Hashable] = {}
        """The first kind of micro-batch of steps that have so many."""
        weakly = weakref.ref(model)  # Dynamo keeps graphs, and with them these notes
        self._notes = Notes(lambda: owned_by(weakly()))
        weakref.finalize(self, _unlink, self._graphs).atexit = False

        def loss_of(part: Any) -> Any:
            return loss_fn(model, part)

        def loss_of_any(part: Any) -> Any:  # a code object of its own, whose compiles count apart
            return loss_fn(model, part)

        # Dynamo keeps backends for good.
        backend = partial(_compile_and_note, weakref.ref(self._notes), options)
        self._settings: dict[str, Any] = {
            "microbatches": microbatches,
            "clip_grad_norm": clip_grad_norm,
            "split": split,
            "weigh": weigh,
            "options": options,
        }
        self._loss_of = compile_apart(loss_of, backend=backend, dynamic=False, fullgraph=True)
        self._loss_in_pieces = compile_apart(loss_of_any, backend="apollo", options=dict(options))
        self._num_steps = 0
        self._num_micro_batches = microbatches

    def __call__(self, batch: Any) -> torch.Tensor:
        """Take one step; return the weighted mean of the losses, without a graph.

        Raises:
            TargetError: the batch cannot be split, weights have no sum to divide by, or no loss is returned.
            Exception: whatever the model, the loss function or the optimizer raises.
        """
        return self._take(list(self._split(batch, self._num_micro_batches)))

    def __reduce__(self) -> tuple[Callable[..., Step], tuple[Any, ...]]:
        """Copy or pickle what it was made of: copies of model and optimizer get a step of their own."""
        return partial(Step, **self._settings), (self._model, self._loss_fn, self._optimizer)

    @property
    def verdicts(self) -> list[str]:
        """What runs steps of every kind that were linked or refused, and what it was compared with."""
        loops = [f"{Variant.LOOP}: {reason}" for reason in self.reasons_for_loops]
        return [*loops, *(str(tuner) for tuner in self.tuners)]

    @property
    def tuners(self) -> list[StepTuner]:
        """Programs, and what is known of how fast they are: for every kind of batch one."""
        return [each for graph in self._graphs for each in graph.outcomes.values() if isinstance(each, StepTuner)]

    @property
    def reasons_for_loops(self) -> list[str]:
        """Why steps of some kind can only run as a loop."""
        refused = (each for graph in self._graphs for each in graph.outcomes.values() if isinstance(each, str))
        return list(dict.fromkeys([*([self._why_not_one_graph] if self._why_not_one_graph else []), *refused]))

    @property
    def loops_first(self) -> list[State]:
        """How far the graphs of loops are, of which no program has been made yet."""
        waiting = [graph.model.state() for graph in self._graphs if not graph.outcomes]
        return [replace(state, stage=Stage.MEASURING, detail=f"the loop first: {state.detail}") for state in waiting]

    # -------------------------------------------------------------------------------------------- taking a step

    def _take(self, parts: Sequence[Any]) -> torch.Tensor:
        """Take a step of these micro-batches, and link what it ran if that is to be a program."""
        self._num_steps += 1
        weights = self._weights_of(parts)
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        key = self._key_of(parts)
        for kind in {key} if key is not None else {self._key_of([part]) for part in parts}:
            self._note_kind(kind, len(parts))
        expected = None if key is None else self._graph_of.get(key)
        tuner = None if expected is None else expected.outcomes.get(len(parts))
        if isinstance(tuner, StepTuner) and tuner.program.variants.target.is_capturing():
            tuner = None  # whatever the user captures now is the loop
        if expected is not None and isinstance(tuner, StepTuner):
            variant = tuner.begin_step(self._num_steps)
            begin = time.perf_counter_ns()
            loss = self._run(variant, tuner, expected, parts, weights)
            if loss is not None:
                tuner.record(time.perf_counter_ns() - begin)
                return loss
        begin = time.perf_counter_ns()
        self._notes.begin_loop(self._num_steps, len(parts))
        loss = self._run_loop(parts, weights)
        graph = self._notes.latest
        if graph is None or key is None:  # micro-batches that are not alike have no program
            return loss
        if graph is expected and isinstance(tuner, StepTuner) and variant is Variant.LOOP:
            tuner.record(time.perf_counter_ns() - begin)
        self._graph_of[key] = graph
        self._graphs.add(graph)
        if len(parts) not in graph.outcomes and graph.is_ready:
            graph.outcomes[len(parts)] = self._linker.link(graph, len(parts), self._make_rivals)
        return loss

    def _run(
        self, variant: Variant, tuner: StepTuner, graph: LossGraph, parts: Sequence[Any], weights: Sequence[float]
    ) -> torch.Tensor | None:
        """Take the step as this variant; None where that is a loop, or has to be one this time."""
        if variant is Variant.LOOP:
            return None
        program = tuner.program
        reason = program.reason_for_loop()
        if reason is not None:
            tuner.hold_back(reason)
            return None
        if variant is Variant.EAGER and _is_autocast_on(program.micro.device):
            return None  # autocast would keep copies of weights from step to step
        if variant is Variant.EAGER:  # which needs no guards
            return self._run_rival(variant, tuner, parts, weights)
        noted = self._note_inputs(parts, graph)
        if noted is None:
            return None
        if variant in RIVALS:  # guards of a traced step know nothing of parameters that get gradients only now
            return self._run_rival(variant, tuner, parts, weights)
        try:
            program.variants.use(variant)
            losses, gradients = program.run([each.inputs for each in noted], weights)
        except NotReplayedError as error:
            tuner.hold_back(str(error))
            return None
        except CaptureError as error:
            if self.config.debug.strict:
                raise
            tuner.drop(variant, error)
            return None
        for each, loss in zip(noted, losses, strict=True):  # the loss function may have kept it
            each.loss.copy_(loss)
        tuner.held_back = None
        leave_gradients(program.parameters, gradients)
        if program.optimizer is None and self._optimizer is not None:
            self._optimizer.step()
        return weighted_sum(losses, weights)

    def _note_inputs(self, parts: Sequence[Any], graph: LossGraph) -> Sequence[Noted] | None:
        """Return what Dynamo gives to the graph for every micro-batch; None where it calls another one."""
        with self._notes.noting() as noted:
            try:
                for part in parts:
                    self._call(part)
            except NotLinkedError:
                return None
            except Exception as error:
                if problem_of(error) is None:
                    raise
                return None  # the loop runs this one in pieces
        tuner = graph.outcomes[len(parts)]
        assert isinstance(tuner, StepTuner)
        if any(each.graph is not graph for each in noted):
            return None
        given = [each.inputs for each in noted]
        if not tuner.program.takes(given):
            graph.unlink()
            return None
        if differing := tuner.program.find_differing(given):
            graph.sightings.separate(differing)
            graph.drop_programs()
            return None
        if (reason := tuner.program.reason_against(given)) is not None:
            tuner.hold_back(reason)
            return None
        return noted

    def _run_rival(
        self, variant: Variant, tuner: StepTuner, parts: Sequence[Any], weights: Sequence[float]
    ) -> torch.Tensor | None:
        """Take the step as a rival of the program does; None where that cannot be compiled."""
        rival = tuner.get_rival(variant)
        try:
            loss = rival.take(parts, weights)
        except CandidateError as error:
            tuner.drop_rival(variant, error)
            return None
        tuner.held_back = None
        if loss is not None:
            self._finish()
        return loss

    def _make_rivals(self, program: StepProgram) -> Mapping[Variant, Callable[[], Rival]]:
        """Return what makes the rivals of a program; none of it refers to this step, which goes when users drop it."""
        loss_of, compiled = partial(_loss_of, self._loss_fn, self._model), partial(_compute_loss, self._loss_of)
        inductor = inductor_settings(self.config.mode, self.config.inductor)
        if self.config.runtime.bodies == "eager":  # which draw the random numbers of eager
            inductor["fallback_random"] = True
        rivals: dict[Variant, Callable[[], Rival]] = {}
        if not (keeps_order(program.micro) or _is_autocast_on(program.micro.device)):
            rivals[Variant.EAGER] = partial(EagerLoop, loss_of)
        reason = reason_against_traced(program)
        if reason is None:
            rivals[Variant.TRACED] = partial(TracedStep, program, loss_of, compiled, inductor, compile_ns(program))
        else:
            _logger.info("%s: no %s to compare with: %s", program.name, Variant.TRACED, reason)
        return rivals

    def _run_loop(self, parts: Sequence[Any], weights: Sequence[float]) -> torch.Tensor:
        try:
            losses = self._add_gradients(parts, weights)
        except torch.OutOfMemoryError:
            if self._optimizer is None or not self._give_way():  # gradients from before the step would be lost
                raise
            losses = None
        if losses is None:  # not in the handler, which holds what failed
            assert self._optimizer is not None
            self._optimizer.zero_grad()
            losses = self._add_gradients(parts, weights)
        self._finish()
        return weighted_sum(losses, weights)

    def _add_gradients(self, parts: Sequence[Any], weights: Sequence[float]) -> list[torch.Tensor]:
        """Add gradients of all micro-batches; return their losses."""
        return add_gradients(lambda part: _loss_in(self._compute(part)), parts, weights)

    def _give_way(self) -> bool:
        """Release the CUDA graphs of programs for a loop that finds no memory; return whether there are any."""
        targets = {id(graph.model.target): graph.model.target for graph in self._graphs if graph.outcomes}
        held = [target for target in targets.values() if target.captures]
        for target in held:
            target.keep_only(())
        if held:
            _logger.warning("a loop over micro-batches has no memory: CUDA graphs of whole steps are released for it")
        return bool(held)

    def _finish(self) -> None:
        """Clip gradients and step the optimizer."""
        if self._clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_grad_norm)
        if self._optimizer is not None:
            if not self._has_stepped:  # its state stays; in the place of activations it would keep the rest of theirs
                torch.cuda.empty_cache()
            self._has_stepped = True
            self._optimizer.step()

    def _compute(self, part: Any) -> Any:
        """Call the loss function, compiled for this kind of micro-batch, or for all sizes and in pieces."""
        if not self._has_own_graph(part):
            return self._loss_in_pieces(part)
        try:
            return self._call(part)
        except Exception as error:  # of a compile, before anything ran
            problem, is_hit = problem_of(error), is_limit_hit(error)
            if problem is None:
                raise
        loss = self._loss_in_pieces(part)  # an error of the loss function itself says nothing of the next batch
        self._graph_of.pop(self._key_of([part]), None)
        if is_hit:
            self._note_limit()
        elif not self._why_not_one_graph:
            self._why_not_one_graph = f"the loss function is not one graph: {problem}"
            _logger.info("%s: %s", STAYS, self._why_not_one_graph)
        return loss

    def _has_own_graph(self, part: Any) -> bool:
        """Whether a kind of micro-batch has a graph of its own or is to get one, as the first and frequent ones do."""
        key = self._key_of([part])
        if key in self._graph_of or self._is_full or self._why_not_one_graph:
            return key in self._graph_of
        return key in self._first_kinds.values() or self._num_seen.get(key, 0) >= FREQUENT

    def _note_kind(self, key: Hashable, count: int) -> None:
        """Note that a step of so many micro-batches has some of this kind."""
        self._first_kinds.setdefault(count, key)
        self._num_seen[key] = self._num_seen.pop(key, 0) + 1
        if len(self._num_seen) > MAX_KINDS:
            del self._num_seen[next(iter(self._num_seen))]

    def _call(self, part: Any) -> Any:
        """Call the loss function as it is compiled in one graph."""
        return self._loss_of(part)

    def _note_limit(self) -> None:
        """Note that Dynamo compiles no more: graphs that it has still run, and it is not asked for others again."""
        if not self._is_full:
            _logger.info(
                "%d graphs of the loss function are compiled, Dynamo's limit; other batches run in pieces",
                len(self._graphs),
            )
        self._is_full = True

    def _key_of(self, parts: Sequence[Any]) -> Hashable:
        """Return what micro-batches are called for; None is unlike anything."""
        kind = kind_of(parts)
        return None if kind is None else (kind, self._model.training)

    def _weights_of(self, parts: Sequence[Any]) -> Sequence[float]:
        counts = [1.0 if self._weigh is None else float(self._weigh(part)) for part in parts]
        if not sum(counts) or not math.isfinite(sum(counts)):
            raise TargetError(f"the {len(parts)} micro-batches weigh {counts}; expected a finite sum other than zero")
        return [count / sum(counts) for count in counts]


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
    compiled, model = compile_dynamo_graph(graph_module, example_inputs, options=options, is_for_step=True)
    if model is None or notes is None:
        return compiled
    return LossGraph(compiled=compiled, model=model, notes=reference)


def _is_autocast_on(device: torch.device) -> bool:
    return torch.is_autocast_enabled(device.type)


def _compute_loss(compiled: Callable[[Any], Any], part: Any) -> torch.Tensor:
    return _loss_in(compiled(part))


def _loss_of(loss_fn: LossFunction, model: nn.Module, part: Any) -> torch.Tensor:
    return _loss_in(loss_fn(model, part))


def _loss_in(returned: Any) -> torch.Tensor:
    loss = returned[0] if isinstance(returned, tuple | list) else returned
    if not isinstance(loss, torch.Tensor) or loss.dim():
        shape = f" of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise TargetError(
            f"the loss function returned a {type(loss).__name__}{shape} as the loss; expected a tensor without "
            "dimensions, or a tuple that begins with one"
        )
    return loss
