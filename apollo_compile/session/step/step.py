"""One training step per call: `Step`.

The first steps are the plain loop, over the loss function as `torch.compile(backend="apollo")` compiles it. When its
plans are final, its graphs are linked into one program (`linking.py`). In the steps that follow, the program, the
loop and the step that Inductor traces (`traced.py`) take turns until the fastest is known (`tuning.py`).
A step that cannot be linked stays the loop, and one line says why.

Under DistributedDataParallel, loops and programs average gradients alike: Note [collectives of a step] in
`collectives.py`.

A program takes its inputs from Dynamo, whose guards hold: Note [guards] in `notes.py`.

Guarantees: losses and gradients are those of the loop, with sums in the same order; parameters are updated by the
user's own optimizer, module by module where it treats every parameter by itself (`torch_bridge/optimizers.py`), else at
the end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from apollo_compile.autotune.candidates import CandidateError
from apollo_compile.config import Config, load_config
from apollo_compile.errors import CaptureError, NotReplayedError
from apollo_compile.ir import Variant
from apollo_compile.reports.values import Stage, State
from apollo_compile.reports.words import describe_state
from apollo_compile.session.step.arguments import StepSettings, with_casts_apart
from apollo_compile.session.step.collectives import DataParallel, called_alone, find_data_parallel
from apollo_compile.session.step.linking import Linker
from apollo_compile.session.step.loss import CompiledLoss, LossFunction
from apollo_compile.session.step.notes import LossGraph, Noted
from apollo_compile.session.step.returned import Outputs, detach_others, loss_in, weighted_sum, with_values
from apollo_compile.session.step.split import weigh_parts
from apollo_compile.session.step.traced import add_gradients, make_traced_step
from apollo_compile.session.step.tuning import StepTuner, steps_to_compare
from apollo_compile.torch_bridge.optimizers import zero_gradients

_logger = logging.getLogger(__name__)


class Step:
    """One training step per call; see `compile_step`."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, optimizer: torch.optim.Optimizer | None, settings: StepSettings
    ) -> None:
        self.config = load_config(settings.options)
        self._model = model
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._settings = settings
        found = find_data_parallel(model, settings.mesh)
        self._data_parallel = found if isinstance(found, DataParallel) else None
        called = called_alone(model) if self._data_parallel is None else self._data_parallel.model
        self._call = partial(_call_loss, loss_fn, called)  # without a compiler; it keeps no step alive
        self._linker = Linker(
            model,
            optimizer,
            clip_grad_norm=settings.clip_grad_norm,
            keep_gradients=settings.keep_gradients,
            data_parallel=self._data_parallel,
            config=self.config,
        )
        options = with_casts_apart(settings.options, settings.microbatches)
        self._loss = CompiledLoss(called, loss_fn, options, found if isinstance(found, str) else "")
        self._has_stepped = False
        """Whether a loop has stepped the optimizer."""
        self._num_steps = 0
        self._outputs = Outputs()

    def __call__(self, batch: Any) -> torch.Tensor:
        """Take one step; return the weighted mean of the losses, without a graph.

        Raises:
            TargetError: the batch cannot be split, weights have no sum to divide by, no loss is returned, or ranks
                average gradients and a parameter has none.
            RankError: ranks do not agree on buckets of gradients, or on the plan.
            Exception: whatever the model, the loss function or the optimizer raises.
        """
        settings = self._settings
        self._outputs = Outputs()  # the last ones may be large, and a step that fails has none
        parts = list(settings.split(batch, settings.microbatches))
        weights = weigh_parts(parts, settings.weigh)
        with nullcontext() if self._data_parallel is None else self._data_parallel.opened():
            self._outputs = Outputs(self._take(parts, weights), weights)
        if self._optimizer is not None and not settings.keep_gradients:
            zero_gradients(self._optimizer)
        loss: torch.Tensor = weighted_sum([loss_in(each) for each in self._outputs.returned], weights)
        return loss

    @property
    def outputs(self) -> Any:
        """The result of the loss function in the latest step, without graphs; None before it and where it failed.

        Of several micro-batches it has the same structure; see `Outputs.combined`.
        """
        return self._outputs.combined

    def __reduce__(self) -> tuple[Callable[..., Step], tuple[Any, ...]]:
        """Copy or pickle the arguments: copies of model and optimizer get a step of their own."""
        return Step, (self._model, self._loss_fn, self._optimizer, self._settings)

    # ------------------------------------------------------------------------------------------------ for reports

    @property
    def verdicts(self) -> list[str]:
        """The winners and their times, for every kind of step that was linked; for the others, why they are loops."""
        return [*(f"{Variant.LOOP}: {reason}" for reason in self.reasons_for_loops), *map(str, self.tuners)]

    @property
    def tuners(self) -> list[StepTuner]:
        """The tuners of all programs: one for every kind of batch."""
        outcomes = (each for graph in self._loss.graphs for each in graph.outcomes.values())
        return [each for each in outcomes if isinstance(each, StepTuner)]

    @property
    def reasons_for_loops(self) -> list[str]:
        """Why steps of some kind can only run as a loop."""
        refused = (why for graph in self._loss.graphs for why in graph.outcomes.values() if isinstance(why, str))
        disabled = "the option disable or APOLLO_DISABLE is set" if self.config.disable else ""
        return list(dict.fromkeys(filter(None, [disabled, self._loss.why_in_pieces, *refused])))

    @property
    def states_beside_programs(self) -> list[State]:
        """The states of kinds of steps that only run as a loop, and of those that do until their plans are final."""
        refused = (f"{Variant.LOOP}: {reason}" for reason in self.reasons_for_loops)
        states = [State(graph="step", stage=Stage.FALLS_BACK, detail=each) for each in refused]
        states += [_loop_first(graph, self.config) for graph in self._loss.graphs if not graph.outcomes]
        is_new = not states and not self.tuners
        return [State(graph="step", stage=Stage.MEASURING, detail="no step is compiled yet")] if is_new else states

    @property
    def states(self) -> list[State]:
        """The states of all kinds of steps."""
        return [*(each.state for each in self.tuners), *self.states_beside_programs]

    def __repr__(self) -> str:
        return f"<step of {type(self._model).__name__}, {describe_state(self.states)}>"

    # -------------------------------------------------------------------------------------------- taking a step

    def _take(self, parts: Sequence[Any], weights: Sequence[float]) -> Sequence[Any]:
        """Take a step of micro-batches, and link its graphs once they can be a program; return the results."""
        self._num_steps += 1
        if self._optimizer is not None:
            zero_gradients(self._optimizer)
        if self._data_parallel is not None:
            self._data_parallel.begin_step()
            if not self._data_parallel.is_syncing:  # the user adds up the gradients of several steps
                return self._run_loop(parts, weights)
        key, expected = self._loss.note_step(parts)
        tuner = None if expected is None else expected.outcomes.get(len(parts))
        if isinstance(tuner, StepTuner) and tuner.program.variants.target.is_capturing():
            tuner = None  # the user captures the loop
        if expected is not None and isinstance(tuner, StepTuner):
            variant = tuner.begin_step(self._num_steps)
            begin = time.perf_counter_ns()
            returned = self._run(variant, tuner, expected, parts, weights)
            if returned is not None:
                tuner.record(time.perf_counter_ns() - begin)
                return returned
            if variant is not Variant.LOOP:
                tuner.spoil()
        begin = time.perf_counter_ns()
        returned = self._run_loop(parts, weights)
        graph = self._loss.notes.latest
        if graph is None or key is None:  # micro-batches that are not alike have no program
            return returned
        if graph is expected and isinstance(tuner, StepTuner) and variant is Variant.LOOP:
            tuner.record(time.perf_counter_ns() - begin)
        self._loss.note_graph(key, graph)
        if len(parts) not in graph.outcomes and graph.is_ready:
            make_traced = partial(make_traced_step, call=self._call, compiled=self._loss.call, config=self.config)
            graph.outcomes[len(parts)] = self._linker.link(graph, len(parts), make_traced)
        return returned

    def _run(
        self, variant: Variant, tuner: StepTuner, graph: LossGraph, parts: Sequence[Any], weights: Sequence[float]
    ) -> Sequence[Any] | None:
        """Take the step as this variant; None where that is a loop, or has to be one this time."""
        if variant is Variant.LOOP:
            return None
        program = tuner.program
        if (reason := program.reason_for_loop()) is not None:
            tuner.hold_back(reason)
            return None
        if program.has_lost_parameters:
            graph.unlink()
            return None
        if variant is Variant.EAGER:  # which needs no guards; autocast would keep copies of weights between steps
            if torch.is_autocast_enabled(program.micro.device.type):
                return None
            returned = add_gradients(self._call, parts, weights)
            tuner.held_back = None
            self._finish()
            return returned
        is_guarded = variant is Variant.TRACED and tuner.traced is not None and tuner.traced.is_ready
        found = None if is_guarded else self._note_inputs(parts, tuner, graph)
        if variant is Variant.TRACED and (is_guarded or found is not None):  # at first for the parameters of this graph
            return self._run_traced(tuner, parts, weights)
        if found is None:
            return None
        noted, returned = found
        try:
            program.variants.use(variant)
            outputs, gradients = program.run([each.inputs for each in noted], weights)
        except NotReplayedError as error:
            tuner.hold_back(str(error))
            return None
        except CaptureError as error:
            if self.config.debug.strict:
                raise
            tuner.drop(variant, error)
            return None
        placeholders = [output for each in noted for output in each.outputs]
        for placeholder, output in zip(placeholders, outputs, strict=True):  # the loss function may have kept it, too
            placeholder.set_(output)  # type: ignore[call-overload]
        tuner.held_back = None
        program.leave_gradients(gradients)
        if program.optimizer is None:
            self._step_optimizer()
        return [with_values(each) for each in returned] if graph.numbers else returned

    def _note_inputs(
        self, parts: Sequence[Any], tuner: StepTuner, graph: LossGraph
    ) -> tuple[Sequence[Noted], Sequence[Any]] | None:
        """Return inputs and outputs without values; None where Dynamo calls another graph, or with other inputs."""
        found = self._loss.note_inputs(parts, graph)
        if found is None:
            return None
        given = [each.inputs for each in found[0]]
        if not tuner.program.takes(given):
            graph.unlink()
            return None
        if differing := tuner.program.find_differing(given):
            graph.input_tracker.separate(differing)
            graph.drop_programs()
            return None
        if (reason := tuner.program.reason_against(given)) is not None:
            tuner.hold_back(reason)
            return None
        return found

    def _run_traced(self, tuner: StepTuner, parts: Sequence[Any], weights: Sequence[float]) -> Sequence[Any] | None:
        """Take the step as Dynamo traces it; None where that cannot be compiled."""
        assert tuner.traced is not None, "only existing variants are compared"
        try:
            returned = tuner.traced.take(parts, weights, self._finish)
        except CandidateError as error:
            tuner.drop_traced(error)
            return None
        tuner.held_back = None
        return returned

    def _run_loop(self, parts: Sequence[Any], weights: Sequence[float]) -> Sequence[Any]:
        returned: Sequence[Any] | None
        self._loss.notes.begin_loop(self._num_steps, len(parts))
        if self._data_parallel is not None:
            self._data_parallel.begin_loop()
        try:
            returned = add_gradients(self._loss.compute, parts, weights)
        except torch.OutOfMemoryError:
            if self._optimizer is None or not _give_way(self._loss):  # gradients from before the step would be lost
                raise
            returned = None
        if returned is None:  # not in the handler, which holds tensors of the failed call
            assert self._optimizer is not None
            self._optimizer.zero_grad()
            returned = add_gradients(self._loss.compute, parts, weights)
        self._finish()
        return returned

    def _finish(self) -> None:
        """Average gradients over ranks, clip them and step the optimizer."""
        if self._data_parallel is not None:
            self._data_parallel.average(lambda: self._linker.order_of_gradients(self._loss.notes.latest))
        clip = torch.nn.utils.clip_grad_norm_ if self._data_parallel is None else self._data_parallel.clip
        if self._settings.clip_grad_norm is not None:
            clip(self._model.parameters(), self._settings.clip_grad_norm)
        if self._optimizer is not None and not self._has_stepped:  # its state would keep whole blocks of activations
            torch.cuda.empty_cache()
        self._has_stepped = True
        self._step_optimizer()

    def _step_optimizer(self) -> None:
        """Step the optimizer, if there is one, by gradients in `.grad`."""
        if self._optimizer is not None and self._data_parallel is not None:
            self._data_parallel.step(self._optimizer)
        elif self._optimizer is not None:
            self._optimizer.step()


def _loop_first(graph: LossGraph, config: Config) -> State:
    """Return the state of a graph that runs as a loop until its plans are final; then variants take turns."""
    until_final = max((each.runs_left for each in graph.model.graphs), default=0)
    num_steps = until_final + steps_to_compare(graph.model, config)
    return replace(graph.model.state(), stage=Stage.MEASURING, detail="the loop first", num_steps=num_steps, left_ns=0)


def _give_way(loss: CompiledLoss) -> bool:
    """Release the CUDA graphs of programs for a loop that finds no memory; return whether there are any."""
    targets = {id(graph.model.target): graph.model.target for graph in loss.graphs if graph.outcomes}
    held = [target for target in targets.values() if target.captures]
    for target in held:
        target.keep_only(())
    if held:
        _logger.warning(
            "the loop over micro-batches ran out of memory; CUDA graphs of whole steps are released, and it runs again"
        )
    return bool(held)


def _call_loss(loss_fn: LossFunction, model: nn.Module, part: Any) -> Any:
    return detach_others(loss_fn(model, part))
