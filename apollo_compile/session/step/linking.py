"""Link the compiled graphs of a loss function into programs of training steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from apollo_compile.autotune.candidates import CandidateError, CompileBudget
from apollo_compile.config import Config
from apollo_compile.errors import RankError, UnsupportedGraphError
from apollo_compile.ir import Role, Variant
from apollo_compile.session.step.collectives import DataParallel, order_of_gradients
from apollo_compile.session.step.graph import StepGraph, compose_micro_batches, step_name
from apollo_compile.session.step.micro_batch import MicroBatchGraphs, find_micro
from apollo_compile.session.step.notes import LossGraph
from apollo_compile.session.step.program import SHARED_MEMORY, StepProgram, load_step
from apollo_compile.session.step.returned import KEEPS_TENSORS
from apollo_compile.session.step.traced import TracedStep, is_alike_in_eager
from apollo_compile.session.step.tuning import StepTuner, is_compared
from apollo_compile.target.target import Target
from apollo_compile.torch_bridge.optimizers import OptimizerInParts
from apollo_compile.torch_bridge.replayed_optimizer import ReplayedOptimizer, problem_of_replays
from apollo_compile.torch_bridge.storages import WrittenMemory

_logger = logging.getLogger(__name__)

STAYS = "the step stays a loop over micro-batches"

MakeTracedStep = Callable[[StepProgram], TracedStep | None]

Compose = Callable[..., StepGraph]
"""`compose_micro_batches` for the steps of a program; takes the graphs of a micro-batch."""

MAX_LINKS = 4
"""Limit of links of a graph: replacing parameters of its model, or losing some of its optimizer, needs another."""


class Linker:
    """Makes programs of the steps of one model; arguments are as for `compile_step`.

    `data_parallel` averages gradients over ranks; it is None for a model without a wrapper.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        clip_grad_norm: float | None,
        keep_gradients: bool,
        data_parallel: DataParallel | None,
        config: Config,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._why_not_in_parts = None if optimizer is None else OptimizerInParts.problem_of(optimizer)
        self._clip_grad_norm = clip_grad_norm
        self._keep_gradients = keep_gradients
        self._data_parallel = data_parallel
        self._config = config
        self._budget = CompileBudget(config.plan.compile_share)
        """Compile budget that all programs share."""
        self._target: Target | None = None
        """Target of the first program, whose memory all others use."""

    def link(self, graph: LossGraph, num_micro_batches: int, make_traced_step: MakeTracedStep) -> StepTuner | str:
        """Return the tuner of a program of these graphs; if they cannot be linked, log and return the reason."""
        try:
            return self._link_program(graph, self._micro_of(graph), num_micro_batches, make_traced_step)
        except UnsupportedGraphError as error:
            reason = str(error)
            _logger.info("%s: %s", STAYS, reason)
        except RankError:
            raise
        except Exception as error:  # training goes on as it did
            if self._config.debug.strict:
                raise
            reason = f"{type(error).__name__}: {error}"
            _logger.warning("%s: %s", STAYS, reason)
        graph.model.tuner.resume()  # its graphs are compared by themselves
        return reason

    def order_of_gradients(self, graph: LossGraph | None) -> list[torch.Tensor]:
        """Return the parameters of a graph that ran in the order in which their gradients are final.

        Raises:
            UnsupportedGraphError: it is in no program.
        """
        if graph is None:
            raise UnsupportedGraphError("the loss function ran in pieces")
        return order_of_gradients(self._micro_of(graph))

    def _micro_of(self, graph: LossGraph) -> MicroBatchGraphs:
        """Return forward and backward of one micro-batch, which programs for other numbers of them share."""
        if graph.micro is not None:
            return graph.micro
        if graph.refusal:
            raise UnsupportedGraphError(graph.refusal)
        assert graph.inputs is not None
        graph.num_links += 1
        try:
            if graph.num_links > MAX_LINKS:
                raise UnsupportedGraphError("parameters of the model or the optimizer are replaced again and again")
            if len(graph.dtypes) != graph.num_returned:
                raise UnsupportedGraphError(KEEPS_TENSORS)
            graph.micro = find_micro(
                graph.model,
                graph.inputs,
                owned_by(self._model),
                dtypes=graph.dtypes,
                loss=graph.loss,
                averages_gradients=self._data_parallel is not None,
            )
        except UnsupportedGraphError as error:
            graph.refusal = str(error)
            raise
        finally:
            graph.inputs = None
        return graph.micro

    def _link_program(
        self, graph: LossGraph, micro: MicroBatchGraphs, num_micro_batches: int, make_traced_step: MakeTracedStep
    ) -> StepTuner:
        name, target = step_name(graph.model.name, num_micro_batches), graph.model.target
        self._target = self._target or target
        target.share_memory(self._target)
        written = WrittenMemory([place for place, at in enumerate(micro.state) if at in micro.parameters])
        is_shared = graph.input_tracker.is_in(micro.parameters.values())
        is_shared = is_shared or written.is_shared(list(micro.state.values()))
        optimizer = self._optimizer_inside(name, micro, is_shared=is_shared, is_replayed=target.captures)
        parameters = dict(self._model.named_parameters())
        shared_inputs = graph.input_tracker.shared_inputs(besides=micro.state)
        compose = partial(
            compose_micro_batches,
            num_micro_batches=num_micro_batches,
            name=name,
            optimizer=optimizer,
            averages=None if self._data_parallel is None else self._data_parallel.averages,
            clip_grad_norm=self._clip_grad_norm,
            model_parameters=list(parameters.values()),
            shared_inputs=shared_inputs,
            is_kept=lambda each: self._keep_gradients or optimizer is None or not optimizer.has(each),
        )
        step = compose(micro)
        program = StepProgram(
            variants=load_step(micro, step, target=target, config=self._config, ranks=graph.model.ranks),
            micro=micro,
            step=step,
            optimizer=optimizer,
            clip_grad_norm=self._clip_grad_norm,
            named_parameters=parameters,
        )
        may_compare = is_compared(graph.model, self._config)
        may_compile_whole = all(each.compile_whole is not None for each in graph.model.graphs)
        return StepTuner(
            program,
            graph.model.warm_start,
            budget=self._budget,
            is_compared=may_compare,
            is_alike_in_eager=not target.captures and is_alike_in_eager(program),
            traced=make_traced_step(program) if may_compare and not target.captures else None,
            prepare_whole=partial(self._add_whole, program, graph, compose) if may_compile_whole else None,
            loop=graph.model.tuner,
        )

    def _add_whole(self, program: StepProgram, graph: LossGraph, compose: Compose) -> None:
        """Compile both graphs whole, and add the variant that runs them one after the other.

        Raises:
            CandidateError: Inductor cannot compile one of them.
        """
        try:
            by_role = {each.compilation.capture.role: each for each in graph.model.graphs}
            whole = replace(
                program.micro,
                forward=program.micro.forward.as_single_segment(by_role[Role.FORWARD].whole()),
                backward=program.micro.backward.as_single_segment(by_role[Role.BACKWARD].whole()),
            )
            in_turn = replace(self._config, plan=replace(self._config.plan, planner="serial"))
            loaded = load_step(whole, compose(whole), target=program.variants.target, config=in_turn)
        except CandidateError:
            raise
        except Exception as error:  # the other variants are still compared
            if self._config.debug.strict:
                raise
            raise CandidateError(f"{type(error).__name__}: {error}") from error
        program.variants.add(Variant.INDUCTOR, loaded.plan)

    def _optimizer_inside(
        self, name: str, micro: MicroBatchGraphs, *, is_shared: bool, is_replayed: bool
    ) -> OptimizerInParts | None:
        """Return the optimizer for steps inside of the program; None, with a log line, if it steps afterwards."""
        if self._optimizer is None:
            return None
        reason = self._why_not_in_parts or (SHARED_MEMORY if is_shared else None)
        reason = reason or OptimizerInParts.problem_of_state(self._optimizer)
        reason = reason or (problem_of_replays(self._optimizer) if is_replayed else None)
        if reason is not None:
            _logger.info("%s: the optimizer steps after the program: %s", name, reason)
            return None
        if self._data_parallel is not None:
            return self._data_parallel.optimizer_in_parts(self._optimizer)
        if not is_replayed:
            return OptimizerInParts(self._optimizer)
        return ReplayedOptimizer(self._optimizer, list(micro.parameters.values()), micro.device)


def owned_by(model: nn.Module | None) -> set[int]:
    """Return the ids of the parameters and buffers of a model; none of one that is gone."""
    return set() if model is None else {id(each) for each in (*model.parameters(), *model.buffers())}
