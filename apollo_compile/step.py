"""The training step as the unit: forward, loss, backward and optimizer of all micro-batches as one program.

    step = compile_step(model, loss_fn, optimizer, microbatches=4);    loss = step(batch)

The first steps are the plain loop, over the loss function as `torch.compile(backend="apollo")` compiles it. When
nothing about that is being decided any more, what was compiled is linked into one program (`session/step/`),
and in the steps that follow the program, the loop and Inductor's code of the whole traced step take turns until the
fastest is known (`session/step/tuning.py`). What cannot be linked stays the loop, and one line says why.

Note [guards]: a program takes its inputs from Dynamo. For every micro-batch the compiled loss function is called, so
Dynamo checks its guards and looks up parameters, buffers and whatever else the code refers to; but the graph that it
calls only notes its inputs. Where Dynamo calls another graph than the one that was linked, or compiles one, the step is
a loop.

Guarantees: losses and gradients are those of the loop, with sums in the same order; parameters are updated by the
user's own optimizer, module by module where it treats every parameter by itself (`torch_bridge/optimizers.py`), else at
the end.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import fx, nn

from apollo_compile.backend import compile_dynamo_graph
from apollo_compile.config import load_config
from apollo_compile.device.open import select_profile
from apollo_compile.errors import ApolloError, ConfigError, TargetError, UnsupportedGraphError
from apollo_compile.ir import Variant
from apollo_compile.progress import Progress
from apollo_compile.reports.values import Stage
from apollo_compile.session.model import CompiledModel
from apollo_compile.session.step.graph import compose_micro_batches, step_name
from apollo_compile.session.step.micro_batch import Micro, find_micro
from apollo_compile.session.step.parts import PartsChooser
from apollo_compile.session.step.prediction import predict_step
from apollo_compile.session.step.program import link_step, own_gradients
from apollo_compile.session.step.tuning import StepTuner
from apollo_compile.session.warm_start import may_be_compared
from apollo_compile.torch_bridge.graph_breaks import is_limit_hit, problem_of
from apollo_compile.torch_bridge.optimizers import StepInParts
from apollo_compile.torch_bridge.settings import inductor_settings
from apollo_compile.torch_bridge.traced_step import compile_traced_step
from apollo_compile.torch_bridge.trees import flatten

_logger = logging.getLogger(__name__)

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
    microbatches: int | Literal["auto"] = 1,
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
        microbatches: into how many parts of equal size a batch is split. "auto" tries 1, 2 and 4, by prediction and
            by measuring; the loss has to be a mean over samples, so that gradients do not depend on the split.
        clip_grad_norm: largest norm of all gradients together; None does not clip.
        split: `split(batch, microbatches)` returns the parts; None cuts all tensors along dimension 0.
        weigh: how much a micro-batch counts; None is equally. Weights are divided by their sum.
        options: as for `torch.compile(..., options=...)`.

    Raises:
        TargetError: `model` is no module, or is compiled.
        ConfigError: `microbatches` is neither "auto" nor above 0, or an option is unknown or has a wrong value.
    """
    check_arguments(model, microbatches)
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


def check_arguments(model: object, microbatches: int | str) -> None:
    """Check what a step is compiled for.

    Raises:
        TargetError: `model` is no module, or is compiled.
        ConfigError: `microbatches` is neither "auto" nor a number above 0.
    """
    if not isinstance(model, nn.Module):
        raise TargetError(f"cannot compile steps of a {type(model).__name__}: expected a torch.nn.Module")
    if hasattr(model, "_orig_mod"):
        raise TargetError("the model is compiled already: pass the module that was given to torch.compile")
    if microbatches != "auto" and (isinstance(microbatches, str) or microbatches < 1):
        raise ConfigError(f"microbatches is {microbatches!r}; expected at least 1, or 'auto'")


class Step:
    """One training step per call; see `compile_step`."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer | None,
        *,
        num_parts: int | Literal["auto"],
        clip_grad_norm: float | None,
        split: Split,
        weigh: Weigh | None,
        options: Mapping[str, Any],
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._clip_grad_norm = clip_grad_norm
        self._split = split
        self._weigh = weigh
        self.config = load_config(options)
        self._notes = _Notes()
        self._linked: weakref.WeakKeyDictionary[_Graph, dict[int, StepTuner | str]] = weakref.WeakKeyDictionary()
        """By graph and number of micro-batches; the reason where only the loop can run."""

        self._loss_fn = loss_fn
        self._parts_problem = None if optimizer is None else StepInParts.problem_of(optimizer)

        def loss_of(part: Any) -> Any:
            return loss_fn(model, part)

        def loss_of_any(part: Any) -> Any:  # a code object of its own, whose compiles count apart
            return loss_fn(model, part)

        compile_function: Callable[..., Callable[[Any], Any]] = torch.compile
        backend = partial(_compile_and_note, weakref.ref(self._notes), options)  # Dynamo keeps backends for good
        self._loss_of = compile_function(loss_of, backend=backend, dynamic=False, fullgraph=True)
        self._loss_in_pieces = compile_function(loss_of_any, backend="apollo", options=dict(options))
        self._problem = ""
        """Why the loss function is no single graph; empty where it is."""
        self._num_parts = 1 if num_parts == "auto" else num_parts
        self._latest_batch: Any = None
        """The batch of a step that runs, for predictions about it."""
        self._chooser: PartsChooser | None = None
        if num_parts == "auto":
            self._chooser = PartsChooser(self._is_settled, self._predict, is_compared=may_be_compared(self.config))

    def __call__(self, batch: Any) -> torch.Tensor:
        """Take one step; return the weighted mean of the losses, without a graph.

        Raises:
            Exception: whatever the model, the loss function or the optimizer raises.
        """
        if self._chooser is None:
            return self._take(self._split(batch, self._num_parts))
        parts = self._try_split(batch, self._chooser.count)
        if parts is None:  # such as a smaller last batch
            return self._take(self._split(batch, 1))
        self._latest_batch = batch
        begin = time.perf_counter_ns()
        loss = self._take(parts)
        self._chooser.step_ended(time.perf_counter_ns() - begin)
        self._latest_batch = None
        return loss

    def _take(self, parts: Sequence[Any]) -> torch.Tensor:
        """Take a step of these micro-batches."""
        weights = self._weights_of(parts)
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        noted = self._note_inputs(parts)
        if noted is None:
            loss = self._run_loop(parts, weights)
            self._link_latest(len(parts))
            return loss
        tuner = noted.tuner
        variant = tuner.begin_step()
        begin = time.perf_counter_ns()
        loss = self._run(variant, noted, parts, weights)
        took = time.perf_counter_ns() - begin
        tuner.record(took + (noted.took_ns if variant in _PROGRAMS else 0))
        return loss

    @property
    def verdicts(self) -> list[str]:
        """What runs steps of every kind that were linked or refused, and what it was compared with."""
        loops = [f"{Variant.LOOP}: {reason}" for reason in self.reasons_for_loops]
        return [*loops, *(str(tuner) for tuner in self.tuners)]

    @property
    def num_micro_batches(self) -> str:
        """How many micro-batches a step has, and why."""
        return str(self._num_parts) if self._chooser is None else self._chooser.verdict

    @property
    def tuners(self) -> list[StepTuner]:
        """Programs, and what is known of how fast they are: one for every kind of batch."""
        return [each for linked in self._linked.values() for each in linked.values() if isinstance(each, StepTuner)]

    @property
    def reasons_for_loops(self) -> list[str]:
        """Why steps of some kind can only run as a loop."""
        refused = (each for linked in self._linked.values() for each in linked.values() if isinstance(each, str))
        return list(dict.fromkeys([*([self._problem] if self._problem else []), *refused]))

    def _try_split(self, batch: Any, count: int) -> Sequence[Any] | None:
        try:
            return self._split(batch, count)
        except TargetError:
            return None

    def _is_settled(self, num_parts: int) -> bool:
        """Whether it is known what runs steps of so many micro-batches."""
        known = (linked[num_parts] for linked in self._linked.values() if num_parts in linked)
        return bool(self._problem) or any(isinstance(each, str) or each.is_settled for each in known)

    def _predict(self, num_parts: int) -> int | None:
        """Return the predicted time of the program of the latest batch in so many micro-batches."""
        parts = self._try_split(self._latest_batch, num_parts)
        if parts is None or self._problem:
            return None
        try:
            found = predict_step(
                self._model,
                self._loss_fn,
                parts,
                optimizer=self._optimizer,
                clip_grad_norm=self._clip_grad_norm,
                config=self.config,
                profile=select_profile(self.config),
            )
        except ApolloError as error:
            _logger.info("a step of %d micro-batches cannot be predicted: %s", num_parts, error)
            return None
        return None if found.compilation is None else found.compilation.plan.makespan_ns

    def _note_inputs(self, parts: Sequence[Any]) -> _Noted | None:
        """Return the program of a step and its inputs: Note [guards]; None where there is none, or the loop has won."""
        if not any(tuner.may_leave_loop for tuner in self.tuners):
            return None
        begin = time.perf_counter_ns()
        with self._notes.noting() as noted:
            try:
                for part in parts:
                    self._loss_of(part)
            except _NotLinkedError:
                return None
            except Exception as error:
                if problem_of(error) is None:
                    raise
                return None  # too many kinds of batches: the loop runs this one in pieces
        graph = noted[0][0]
        tuner = self._linked.get(graph, {}).get(len(parts))
        inputs = [each for _, each in noted]
        if not isinstance(tuner, StepTuner) or any(other is not graph for other, _ in noted):
            return None
        if not (tuner.may_leave_loop and tuner.program.may_run() and tuner.program.takes(inputs)):
            return None
        return _Noted(tuner, inputs, time.perf_counter_ns() - begin)

    def _run(self, variant: Variant, noted: _Noted, parts: Sequence[Any], weights: Sequence[float]) -> torch.Tensor:
        """Take the step as this variant."""
        program = noted.tuner.program
        if variant is Variant.TRACED:
            return self._run_traced(noted.tuner, parts, weights)
        if variant is Variant.LOOP:
            return self._run_loop(parts, weights)
        program.variants.use(variant)
        losses, gradients = program.run(noted.inputs, weights)
        for parameter, gradient in zip(program.parameters, gradients, strict=True):
            parameter.grad = gradient
        if program.optimizer is None and self._optimizer is not None:
            self._optimizer.step()
        total = losses[0] * weights[0]
        for loss, weight in zip(losses[1:], weights[1:], strict=True):
            total = total + loss * weight
        return total

    def _run_traced(self, tuner: StepTuner, parts: Sequence[Any], weights: Sequence[float]) -> torch.Tensor:
        """Take the step as Inductor compiled it whole, or as the loop where Inductor cannot."""
        dtype = tuner.program.micro.loss_dtype
        factors = [torch.tensor(weight, dtype=dtype) for weight in weights]
        try:
            if tuner.is_tried:
                loss, gradients = tuner.traced(parts, factors)
            else:
                with Progress(f"compiling {tuner.program.name} as one graph") as progress:
                    progress.at("Inductor, to be compared with the program,")
                    loss, gradients = tuner.traced(parts, factors)
        except Exception as error:  # a defect of the model shows in the loop, too
            tuner.drop_traced(error)
            return self._run_loop(parts, weights)
        parameters = tuner.program.parameters
        for parameter, gradient in zip(parameters, own_gradients(gradients, parameters, ()), strict=True):
            parameter.grad = gradient
        self._finish()
        return loss

    def _run_loop(self, parts: Sequence[Any], weights: Sequence[float]) -> torch.Tensor:
        total: torch.Tensor | None = None
        for part, weight in zip(parts, weights, strict=True):
            weighted = _loss_in(self._compute(part)) * weight
            weighted.backward()  # type: ignore[no-untyped-call]
            total = weighted.detach() if total is None else total + weighted.detach()
        assert total is not None
        self._finish()
        return total

    def _finish(self) -> None:
        """Clip gradients and step the optimizer."""
        if self._clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_grad_norm)
        if self._optimizer is not None:
            self._optimizer.step()

    def _compute(self, part: Any) -> Any:
        """Call the compiled loss function; one that is no single graph is compiled in pieces."""
        if not self._problem:
            try:
                return self._loss_of(part)
            except Exception as error:
                problem = problem_of(error)
                if problem is None:
                    raise
                if is_limit_hit(error):  # what was compiled for other batches still runs
                    return self._loss_in_pieces(part)
                self._problem = f"the loss function is not one graph: {problem}"
                _logger.info("%s: %s", STAYS, self._problem)
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

    def _link(self, graph: _Graph, num_parts: int) -> StepTuner | str:
        """Link what was compiled; where that is impossible, log why and return the reason."""
        try:
            return self._link_program(graph, self._micro_of(graph), num_parts)
        except UnsupportedGraphError as error:
            reason = str(error)
            _logger.info("%s: %s", STAYS, reason)
        except Exception as error:  # training goes on as it did
            if self.config.debug.strict:
                raise
            reason = f"{type(error).__name__}: {error}"
            _logger.warning("%s: %s", STAYS, reason)
        finally:
            graph.inputs = None  # they hold a batch
        return reason

    def _micro_of(self, graph: _Graph) -> Micro:
        """Return the graphs of one micro-batch, which programs for other numbers of micro-batches may have."""
        for linked in self._linked.get(graph, {}).values():
            if isinstance(linked, str):
                raise UnsupportedGraphError(linked)
            return linked.program.micro
        assert graph.inputs is not None
        owned = {id(each) for each in (*self._model.parameters(), *self._model.buffers())}
        return find_micro(graph.model, graph.inputs, owned, graph.loss_dtype)

    def _link_program(self, graph: _Graph, micro: Micro, num_parts: int) -> StepTuner:
        name = step_name(graph.model.name, num_parts)
        if self._parts_problem is not None:
            _logger.info("%s: the optimizer steps after the program: %s", name, self._parts_problem)
        optimizer = None if self._optimizer is None or self._parts_problem else StepInParts(self._optimizer)
        parameters = list(self._model.parameters())
        trained = {id(parameter) for parameter in micro.parameters.values()}
        step = compose_micro_batches(
            micro,
            num_parts,
            name=name,
            optimizer=optimizer,
            clip_grad_norm=self._clip_grad_norm,
            model_parameters=parameters,
        )
        program = link_step(
            micro,
            step,
            optimizer=optimizer,
            others=[] if self._clip_grad_norm is None else [each for each in parameters if id(each) not in trained],
            target=graph.model.target,
            config=self.config,
        )
        graph.is_linked = True
        loss_fn, model = self._loss_fn, self._model
        return StepTuner(
            program,
            graph.model.warm_start,
            is_compared=may_be_compared(self.config),
            make_traced=lambda: compile_traced_step(
                lambda part: _loss_in(loss_fn(model, part)),
                program.parameters,
                inductor_settings(self.config.mode, self.config.inductor),
            ),
        )


_PROGRAMS = (Variant.PLAN, Variant.SERIAL)


class _NotLinkedError(Exception):
    """Dynamo calls a graph that is in no program."""


class _Noted(NamedTuple):
    """A program of a step with its inputs, and how long it took to note them."""

    tuner: StepTuner
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
    compiled, model = compile_dynamo_graph(graph_module, example_inputs, options=options, is_for_step=True)
    notes = reference()
    return compiled if model is None or notes is None else _Graph(compiled=compiled, model=model, notes=notes)


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
