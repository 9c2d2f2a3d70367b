"""A training step as one program: micro-batches in; losses, gradients and updated parameters out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from apollo_compile.config import Config
from apollo_compile.distributed.ranks import Ranks
from apollo_compile.ir import Variant
from apollo_compile.session.step.collectives import settle_plan
from apollo_compile.session.step.graph import StepGraph, plan_step
from apollo_compile.session.step.micro_batch import MicroBatchGraphs
from apollo_compile.session.variants import Variants
from apollo_compile.target.target import Code, Contract, Target
from apollo_compile.torch_bridge.gradients import find_shared, leave_gradients, own_gradients
from apollo_compile.torch_bridge.modes import mode_against_programs
from apollo_compile.torch_bridge.optimizers import OptimizerInParts
from apollo_compile.torch_bridge.private_attributes import reason_against_gradients
from apollo_compile.torch_bridge.replayed_optimizer import ReplayedOptimizer
from apollo_compile.torch_bridge.storages import WrittenMemory

if TYPE_CHECKING:
    from apollo_compile.torch_bridge.sharded import ShardedModel

SHARED_MEMORY = "a parameter that the optimizer steps shares memory with another input of the loss function"


@dataclass(eq=False, kw_only=True, slots=True)
class StepProgram:
    """A step that can run: micro-batches in, losses and gradients out."""

    variants: Variants
    """Its plan, and its segments in turn."""
    micro: MicroBatchGraphs
    step: StepGraph
    """Graph of the step, composed of them."""
    optimizer: OptimizerInParts | None
    """Steps inside the program; None where it steps afterwards, or there is none."""
    clip_grad_norm: float | None
    """Norm to which gradients are clipped inside; None if they are not."""
    named_parameters: Mapping[str, torch.Tensor]
    """All parameters of the model, by name."""
    parameters: Sequence[torch.Tensor] = field(init=False)
    """Parameters that get gradients."""
    kept: Sequence[torch.Tensor] = field(init=False)
    """Parameters whose gradients it returns, in their order among the outputs."""
    _released: Set[int] = field(init=False)
    """Ids of the parameters whose gradients the optimizer releases."""
    _shared: Sequence[int] = field(init=False)
    """Inputs of the forward besides the state of the model that all micro-batches share, by place."""
    _own: Sequence[int] = field(init=False)
    """Inputs of the forward that each micro-batch has for itself, by place."""
    _others: Sequence[torch.Tensor] = field(init=False)
    """Where gradients are clipped, parameters without gradients from the program: others in `.grad` would count."""
    _written: WrittenMemory = field(init=False)
    """Memory of the parameters that the optimizer steps inside the program."""
    _weights: Sequence[float] = ()
    """Weights of the micro-batches in the latest run."""
    _tangents: Sequence[torch.Tensor] = ()
    """These weights as tensors on the device."""
    _copied: dict[Variant, Collection[int]] = field(default_factory=dict)
    """Places of gradients that every run copies, by variant that has run."""

    def __post_init__(self) -> None:
        """Prepare places and tensors that every step needs."""
        micro, kept, shared = self.micro, self.step.kept, self.step.shared_inputs.shared
        self.parameters = list(micro.parameters.values())
        self.kept = [micro.parameters[place] for place in kept]
        self._released = {id(parameter) for place, parameter in micro.parameters.items() if place not in kept}
        self._shared, self._own = sorted(shared), sorted({*range(micro.num_inputs)} - {*micro.state, *shared})
        trained = set(map(id, micro.parameters.values()))
        clipped = () if self.clip_grad_norm is None else self.named_parameters.values()
        self._others = [each for each in clipped if id(each) not in trained]
        stepped = [place for place, at in enumerate(micro.state) if at in micro.parameters]
        self._written = WrittenMemory(stepped if self.optimizer is not None else [])

    @property
    def name(self) -> str:
        """Return the name of the step."""
        return self.variants.compilation.capture.name

    @property
    def _sharded(self) -> ShardedModel | None:
        """Model whose parameters are sharded; None where every rank has them whole."""
        return None if self.step.averages is None else self.step.averages.sharded

    @property
    def has_lost_parameters(self) -> bool:
        """Whether some parameters left the optimizer, which would release their gradients."""
        return self.optimizer is not None and not self._released <= self.optimizer.members

    def reason_for_loop(self) -> str | None:
        """Return why a step has to be a loop now; None if the program can take it.

        A program adds to existing gradients, as `backward` does, except where clipping, other ranks or the optimizer
        inside would need them.
        """
        if (mode := mode_against_programs()) is not None:
            return mode
        if self.optimizer is not None:
            self.optimizer.refresh()
            if (reason := self.optimizer.reason_against()) is not None:
                return reason
        if any(other.grad is not None for other in self._others):
            return "gradients are clipped, and a parameter that gets none in this step has one"
        owners = () if self._sharded is None else map(self._sharded.owner_of, self.parameters)
        parameters = [*self.parameters, *owners]
        if (reason := reason_against_gradients(parameters)) is not None:
            return reason
        are_all_needed = self.clip_grad_norm is not None or self.step.averages is not None
        for place, parameter in enumerate(parameters):
            if parameter.grad is not None:
                if are_all_needed or (self.optimizer is not None and self.optimizer.has(parameter)):
                    whole = self.parameters[place % len(self.parameters)]
                    name = next((name for name, each in self.named_parameters.items() if each is whole), "one")
                    reason = "gradients are there already that clipping, other ranks or the optimizer have to know of"
                    return f"{reason}: {name} has one; set it to None before the step"
                if self.step.num_micro_batches > 1 and torch.are_deterministic_algorithms_enabled():
                    return "gradients are there already, and sums keep their order with deterministic algorithms"
        return None

    def takes(self, inputs: Sequence[Sequence[torch.Tensor]]) -> bool:
        """Whether all micro-batches share the tensors that they shared when it was linked, and gradients go to them."""
        first, *others = inputs
        is_shared = all(each[place] is first[place] for each in others for place in self.micro.state)
        return is_shared and self.micro.is_of_parameters_in(first)

    def reason_against(self, inputs: Sequence[Sequence[torch.Tensor]]) -> str | None:
        """Return why these micro-batches cannot be taken now; None if they can.

        A plan orders uses of a value, and knows values by their names, not by their memory.
        """
        return SHARED_MEMORY if self._written.is_shared(*self._sort(inputs)) else None

    def _sort(self, inputs: Sequence[Sequence[torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors that all micro-batches share, and those of each micro-batch."""
        shared = [inputs[0][place] for place in (*self.micro.state, *self._shared)]
        return self._stored(shared), [each[place] for each in inputs for place in self._own]

    def _stored(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors as this rank stores them: its parts of sharded parameters."""
        return list(tensors if self._sharded is None else map(self._sharded.local_of, tensors))

    def leave_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """Store the gradients of the parameters `kept` in `.grad`, added to existing ones."""
        if self._sharded is None:
            leave_gradients(self.kept, gradients)
        else:
            self._sharded.leave(self.kept, gradients)

    def find_differing(self, inputs: Sequence[Sequence[torch.Tensor]]) -> list[int]:
        """Return places of inputs that should be the same for all micro-batches, and are not."""
        first, *others = inputs
        return [
            place
            for place in self._shared
            if any(x[place] is not first[place] and x[place].data_ptr() != first[place].data_ptr() for x in others)
        ]

    def run(
        self, inputs: Sequence[Sequence[torch.Tensor]], weights: Sequence[float]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return the results of the loss function, by micro-batch, and gradients of the parameters `kept`.

        Gradients are those of the weighted sum of the losses.

        Arguments:
            inputs: of the forward of every micro-batch.
            weights: of the losses.

        Raises:
            NotReplayedError: it runs as a CUDA graph only, and cannot now; nothing has run.
        """
        if isinstance(self.optimizer, ReplayedOptimizer) and self.optimizer.take_outdated():
            self.release()
        shared, own = self._sort(inputs)
        given = [*shared, *own, *self.tangents_of(weights)]
        variant = self.variants.current
        taken = () if variant in self._copied else [tensor.untyped_storage().data_ptr() for tensor in given]
        num_returned = self.step.num_micro_batches * len(self.micro.returned)
        # Bodies were traced under autocast if there was any, and lanes know of none.
        with torch.no_grad(), torch.autocast(self.variants.target.device.type, enabled=False):
            with self._stepping([given[place] for place in self.step.written]):
                outputs = self.variants.run(given)
            stored = self._stored(self.kept)
            made = [gradient for gradient in outputs[num_returned:] if gradient is not None]
            if variant not in self._copied:
                self._copied[variant] = find_shared(made, stored, taken)
            return outputs[:num_returned], own_gradients(made, stored, self._copied[variant])

    def tangents_of(self, weights: Sequence[float]) -> Sequence[torch.Tensor]:
        """Return the weights of micro-batches as tensors on the device."""
        if not self._tangents or weights != self._weights:
            dtype, device = self.micro.loss_dtype, self.micro.device
            self._weights, self._tangents = weights, [torch.full((), w, dtype=dtype, device=device) for w in weights]
        return self._tangents

    def use_gradients(self, gradients: Sequence[torch.Tensor], shared: Collection[int]) -> bool:
        """Use gradients of all parameters as a run does; return whether the optimizer has stepped.

        Those at the places `shared` are copied first. If it steps after the program, they are left in `.grad`.
        """
        parameters, optimizer = self.parameters, self.optimizer
        gradients = own_gradients(gradients, parameters, shared)
        if optimizer is None or self.step.averages is not None:
            leave_gradients(parameters, gradients)
            return False
        if self.clip_grad_norm is not None:
            leave_gradients(parameters, gradients)
            torch.nn.utils.clip_grad_norm_(self.named_parameters.values(), self.clip_grad_norm)  # in place
            for parameter in parameters:
                parameter.grad = None
        with self._stepping(parameters):
            optimizer.step(parameters, gradients)
        if self.kept:
            pairs = zip(parameters, gradients, strict=True)
            leave_gradients(self.kept, [gradient for each, gradient in pairs if id(each) not in self._released])
        return True

    @contextmanager
    def _stepping(self, written: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the optimizer step in a `with`, which may write to these tensors and counts that as autograd does.

        An error says which parameters had been updated.
        """
        optimizer, updated = self.optimizer, [] if self.optimizer is None else self.optimizer.updated
        updated.clear()
        members = () if optimizer is None else optimizer.members
        stepped = [each for each in written if not each.requires_grad or id(each) in members]
        torch.autograd.graph.increment_version(stepped)  # lanes and fused kernels do not count their writes
        try:
            yield
        except Exception as error:
            if ids := set(map(id, updated)):
                names = ", ".join(name for name, each in self.named_parameters.items() if id(each) in ids)
                error.add_note(
                    f"{self.name}: failed after it had updated these parameters, some perhaps in part: {names}; all "
                    "others are as they were"
                )
            raise
        if optimizer is not None:
            optimizer.note_taken()

    def release(self) -> None:
        """Release CUDA graphs and memory for the next run, which makes them again."""
        for runnable in self.variants.loaded().values():
            runnable.release()


def load_step(
    micro: MicroBatchGraphs, step: StepGraph, *, target: Target, config: Config, ranks: Ranks | None = None
) -> Variants:
    """Return a step, planned and loaded; `ranks` agree on the plan of one with collectives.

    Raises:
        InfeasiblePlanError: no plan meets the memory quota.
        UnsupportedGraphError: the plan is too large to be agreed on.
        RankError: the agreed plan is unknown, or not legal here.
    """
    compilation = plan_step(micro, step, profile=target.profile, config=config)
    if ranks is not None and step.averages is not None:
        compilation = settle_plan(compilation, ranks)
    contract = Contract(
        static_inputs=frozenset(range(len(micro.state))),
        stable_inputs=step.stable,
        written_inputs=step.written,
        user_outputs=frozenset(range(step.num_micro_batches * len(micro.returned))),  # gradients end with the step
        unsafe=micro.forward.contract.unsafe or micro.backward.contract.unsafe,
    )
    code = Code(bodies=tuple(step.bodies), contract=contract, is_all_or_nothing=True)
    return Variants(compilation, code, target)
