"""A training step as one program: micro-batches in; losses, gradients and updated parameters out.

link_step(micro, step graph, ...) -> StepProgram;    StepProgram.run(inputs, weights) -> losses, gradients
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from apollo_compile.config import Config
from apollo_compile.device.target import Code, Contract, Target
from apollo_compile.session.step.graph import StepGraph, plan_step
from apollo_compile.session.step.micro_batch import Micro
from apollo_compile.session.variants import Variants
from apollo_compile.torch_bridge.optimizers import StepInParts


@dataclass(eq=False, kw_only=True, slots=True)
class StepProgram:
    """A step that can run: micro-batches in, losses and gradients out."""

    variants: Variants
    """What it can run: its plan, and its segments in turn."""
    micro: Micro
    num_parts: int
    optimizer: StepInParts | None
    """Steps inside the program; None where it steps afterwards, or there is none."""
    others: Sequence[torch.Tensor]
    """Where gradients are clipped, parameters that the program makes no gradients for: any of theirs would count."""

    @property
    def name(self) -> str:
        """Return the name of the step."""
        return self.variants.compilation.capture.name

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """What gets gradients, in their order among the outputs."""
        return list(self.micro.parameters.values())

    def may_run(self) -> bool:
        """Whether gradients are the program's to make: none is there, and nobody hooks into the making of any.

        If the optimizer steps inside, its step has to be as it was when the program was linked.
        """
        if self.optimizer is not None and not self.optimizer.can_step(self.parameters):
            return False
        if any(other.grad is not None for other in self.others):
            return False
        return all(
            parameter.grad is None
            and not parameter._backward_hooks
            and not getattr(parameter, "_post_accumulate_grad_hooks", None)
            for parameter in self.parameters
        )

    def takes(self, inputs: Sequence[Sequence[torch.Tensor]]) -> bool:
        """Whether all micro-batches share the tensors that they shared when it was linked, and gradients go to them."""
        shared = [[each[place] for place in self.micro.state] for each in inputs]
        parameters = self.micro.parameters
        is_shared = all(a is b for others in shared[1:] for a, b in zip(shared[0], others, strict=True))
        return is_shared and all(inputs[0][place] is parameter for place, parameter in parameters.items())

    def run(
        self, inputs: Sequence[Sequence[torch.Tensor]], weights: Sequence[float]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return the losses of the micro-batches, and the gradients of their weighted sum by parameter.

        Arguments:
            inputs: of the forward of every micro-batch.
            weights: of the losses.
        """
        state = self.micro.state
        own = [tensor for each in inputs for place, tensor in enumerate(each) if place not in state]
        tangents = [torch.tensor(weight, dtype=self.micro.loss_dtype) for weight in weights]
        given = [*(inputs[0][place] for place in state), *own, *tangents]
        taken = {tensor.untyped_storage().data_ptr() for tensor in given}
        with torch.no_grad():
            outputs = self.variants.run(given)
            made = [gradient for gradient in outputs[self.num_parts :] if gradient is not None]
            return outputs[: self.num_parts], own_gradients(made, self.parameters, taken)


def own_gradients(
    gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], taken: Collection[int]
) -> Sequence[torch.Tensor]:
    """Return gradients as autograd leaves them in `.grad`: laid out like their parameters, each in memory of its own.

    Arguments:
        gradients: by parameter.
        parameters: what they are for.
        taken: addresses of memory that is in use.
    """
    used = set(taken)
    owned = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        memory = gradient.untyped_storage().data_ptr()
        is_own = memory not in used and gradient.stride() == parameter.stride()
        owned.append(gradient if is_own else torch.empty_like(parameter).copy_(gradient))
        used.add(memory)
    return owned


def link_step(
    micro: Micro,
    step: StepGraph,
    *,
    optimizer: StepInParts | None,
    others: Sequence[torch.Tensor],
    target: Target,
    config: Config,
) -> StepProgram:
    """Return the program of a step.

    Arguments:
        micro: the graphs of one micro-batch.
        step: what was composed of them.
        optimizer: steps inside.
        others: parameters that must not have gradients, since they would count where gradients are clipped.
        target: the device that it runs on.
        config: its `plan` options apply.

    Raises:
        InfeasiblePlanError: no plan meets the memory quota.
    """
    compilation = plan_step(micro, step, profile=target.profile, config=config)
    code = Code(bodies=tuple(step.bodies), contract=Contract(written_inputs=step.written))
    return StepProgram(
        variants=Variants(compilation, code, target, may_be_listed=False),
        micro=micro,
        num_parts=step.num_micro_batches,
        optimizer=optimizer,
        others=others,
    )
