"""The training step as the unit: forward, loss and backward of all micro-batches as one program.

    step = compile_step(model, loss_fn, optimizer, microbatches=4);    loss = step(batch)

The first step with batches of a new shape is the plain loop over micro-batches, with the model compiled by
`torch.compile(backend="apollo")`. The compiled graphs are linked into one program (`session/step_program.py`), and in
the next steps programs and the loop take turns until the fastest is known (`session/comparison.py`). If the graphs
cannot be linked, the loop stays, and one log line says why.

Guarantees: losses and gradients equal those of the loop, with sums in the same order; the user's own optimizer steps as
in the loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from apollo_compile.backend import compile_dynamo_graph
from apollo_compile.config import load_config
from apollo_compile.errors import ConfigError, TargetError, UnsupportedGraphError
from apollo_compile.ir import Variant
from apollo_compile.session.comparison import Comparison
from apollo_compile.session.model import CompiledModel
from apollo_compile.session.step_program import StepProgram, find_micro_batch_graphs, link_step
from apollo_compile.torch_bridge.graph_breaks import problem_of
from apollo_compile.torch_bridge.trees import flatten, leaves_of

_logger = logging.getLogger(__name__)

LOOP = "loop over micro-batches"
SERIAL_PROGRAM = "one program, segments in turn"
PROGRAM = "one program"

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

    A step computes the loss of every micro-batch and the gradients of their weighted mean; with an optimizer, it clips
    gradients and steps. It does the same as this loop, and gradients stay in `.grad`:

        optimizer.zero_grad()
        for part, weight in zip(split(batch, microbatches), weights):
            (loss_fn(model, part) * weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        optimizer.step()

    Arguments:
        model: the module to train, not compiled.
        loss_fn: `loss_fn(model, micro_batch)` returns the loss, a tensor without dimensions, or a tuple that begins
            with it. If it returns other tensors too, or has graph breaks, the loop stays.
        optimizer: steps at the end; None adds gradients to `.grad` and takes no optimizer step.
        microbatches: number of micro-batches that a batch is split into.
        clip_grad_norm: largest norm of all gradients together; None does not clip.
        split: `split(batch, microbatches)` returns the micro-batches; None cuts all tensors along dimension 0.
        weigh: weight of a micro-batch; None weighs all equally. Weights are divided by their sum.
        options: as for `torch.compile(..., options=...)`.

    Raises:
        TargetError: `model` is not a module, or is already compiled.
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
        self._options = options
        self._compiled: list[_Compiled] = []
        """What Dynamo compiled for the loss function in the step that goes on."""
        self._programs: dict[Hashable, _AutotunedStep | None] = {}
        """Steps by the key of `_key_of`; None if only the loop can run."""

        def loss_of(part: Any) -> Any:
            return loss_fn(model, part)

        backend = partial(_compile_and_keep, self._compiled, options)
        compile_function: Callable[..., Callable[[Any], Any]] = torch.compile
        self._loss_of = compile_function(loss_of, backend=backend, dynamic=False, fullgraph=True)
        self._loss_in_pieces = compile_function(loss_of, backend="apollo", dynamic=False, options=dict(options))
        self._break = ""
        """Why the loss function is not a single graph; empty if it is."""

    def __call__(self, batch: Any) -> torch.Tensor:
        """Take one step; return the weighted mean of the losses, detached.

        Raises:
            Exception: whatever the model, the loss function or the optimizer raises.
        """
        parts = self._split(batch, self._num_parts)
        weights = self._weights_of(parts)
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        leaves = [leaves_of(part) for part in parts]
        key = self._key_of(parts)
        is_new = key not in self._programs
        tuned = None if is_new or self._has_gradients() else self._programs[key]
        loss = self._run_loop(parts, weights) if tuned is None else tuned.run(leaves, weights, self._run_loop, parts)
        if is_new:
            self._programs[key] = self._link(leaves, self._compiled)
            self._compiled.clear()  # it holds the batch
        if self._clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_grad_norm)
        if self._optimizer is not None:
            self._optimizer.step()
        return loss

    @property
    def verdicts(self) -> list[str]:
        """The verdict for every shape of batches that was seen: what runs, and what it was compared with."""
        return ["the loop: it cannot be linked" if each is None else each.verdict for each in self._programs.values()]

    def _run_loop(self, parts: Sequence[Any], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        total: torch.Tensor | None = None
        for part, weight in zip(parts, weights, strict=True):
            weighted = _loss_in(self._compute(part)) * weight
            weighted.backward()  # type: ignore[no-untyped-call]
            total = weighted.detach() if total is None else total + weighted.detach()
        assert total is not None
        return total

    def _compute(self, part: Any) -> Any:
        """Call the compiled loss function; with graph breaks, it is compiled as several graphs."""
        if not self._break:
            try:
                return self._loss_of(part)
            except Exception as error:
                problem = problem_of(error)
                if problem is None:
                    raise
                self._break = problem
        return self._loss_in_pieces(part)

    def _weights_of(self, parts: Sequence[Any]) -> Sequence[torch.Tensor]:
        counts = [1.0 if self._weigh is None else float(self._weigh(part)) for part in parts]
        return [torch.tensor(count / sum(counts)) for count in counts]

    def _has_gradients(self) -> bool:
        """Whether gradients of this step are added to existing ones, which a program does not do."""
        return any(parameter.grad is not None for parameter in self._model.parameters())

    def _key_of(self, parts: Sequence[Any]) -> Hashable:
        """Return what a program depends on: the layout of the batch, and the state that its code assumes."""
        leaves, structure, _ = flatten(list(parts))
        layout = tuple(
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        )
        return (
            layout,
            structure,
            tuple(module.training for module in self._model.modules()),
            tuple((id(parameter), parameter.requires_grad) for parameter in self._model.parameters()),
            tuple(map(id, self._model.buffers())),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
        )

    def _link(self, leaves: Sequence[Sequence[Any]], compiled: Sequence[_Compiled]) -> _AutotunedStep | None:
        """Link the graphs that the loop compiled in this step; log why if that is impossible."""
        try:
            if self._break or not compiled:
                reason = self._break or "nothing was compiled for this batch alone"
                raise UnsupportedGraphError(f"the loss function is not one graph: {reason}")
            for parameter in self._model.parameters():
                if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                    raise UnsupportedGraphError("a parameter has gradient hooks")
            if not all(isinstance(leaf, torch.Tensor) and not leaf.requires_grad for leaf in leaves[0]):
                raise UnsupportedGraphError("the batch has leaves that are no tensors, or require gradients")
            micro = find_micro_batch_graphs(compiled[-1].model, compiled[-1].inputs, leaves[0])
            program = link_step(micro, self._num_parts, name=f"{compiled[-1].model.name} step")
        except UnsupportedGraphError as error:
            _logger.info("the step stays a loop over micro-batches: %s", error)
            return None
        return _AutotunedStep(program, is_compared=load_config(self._options).plan.autotune)


@dataclass(eq=False, slots=True)
class _Compiled:
    """The compiled model of one Dynamo graph, with its inputs."""

    model: CompiledModel
    inputs: tuple[object, ...]


def _compile_and_keep(
    kept: list[_Compiled], options: Mapping[str, Any], graph_module: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    compiled, model = compile_dynamo_graph(graph_module, example_inputs, options=options)
    if model is not None:
        kept.append(_Compiled(model, tuple(example_inputs)))
    return compiled


class _AutotunedStep:
    """A linked step, and the comparison with the loop."""

    def __init__(self, program: StepProgram, *, is_compared: bool) -> None:
        """Begin with the loop if variants are compared, else with the program."""
        self._program = program
        selections: dict[str, tuple[Variant, ...]] = {LOOP: (Variant.INDUCTOR,), SERIAL_PROGRAM: (Variant.SERIAL,)}
        if program.variants.compilation.plan.uses_lanes:
            selections[PROGRAM] = (Variant.PLAN,)
        self._comparison = Comparison(selections) if is_compared else None
        self._current = LOOP if is_compared else PROGRAM
        self.verdict = "being measured" if is_compared else PROGRAM

    def run(
        self,
        leaves: Sequence[Sequence[torch.Tensor]],
        weights: Sequence[torch.Tensor],
        run_loop: Callable[[Sequence[Any], Sequence[torch.Tensor]], torch.Tensor],
        parts: Sequence[Any],
    ) -> torch.Tensor:
        """Take one step with the variant that is being measured, or has won."""
        self._choose()
        begin = time.perf_counter_ns()
        loss = run_loop(parts, weights) if self._current == LOOP else self._run_program(leaves, weights)
        if self._comparison is not None:
            self._comparison.record(0, time.perf_counter_ns() - begin)
        return loss

    def _choose(self) -> None:
        comparison = self._comparison
        if comparison is None:
            return
        selection = comparison.begin_step()
        if selection is not None:
            self._current = next(name for name, each in comparison.selections.items() if each == selection)
            return
        self._current = winner = comparison.winner()
        standings = [comparison.standing(name, winner) for name in comparison.selections]
        self.verdict = ", ".join(f"{each.name} {each.step_ns / 1e6:.2f} ms ({each.ratio:.2f}x)" for each in standings)
        _logger.info(
            "%s: chosen by measuring: %s; %s", self._program.variants.compilation.capture.name, winner, self.verdict
        )
        self._comparison = None

    def _run_program(self, leaves: Sequence[Sequence[torch.Tensor]], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        self._program.variants.use(Variant.PLAN if self._current == PROGRAM else Variant.SERIAL)
        losses, gradients = self._program.run(leaves, weights)
        for parameter, gradient in zip(self._program.parameters, gradients, strict=True):
            parameter.grad = gradient
        total = losses[0] * weights[0]
        for loss, weight in zip(losses[1:], weights[1:], strict=True):
            total = total + loss * weight
        return total


def split_evenly(batch: Any, count: int) -> Sequence[Any]:
    """Return `count` parts of a batch, with all tensors cut along dimension 0.

    Raises:
        TargetError: a tensor has no dimension, sizes along dimension 0 differ, or they are not multiples of `count`.
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
