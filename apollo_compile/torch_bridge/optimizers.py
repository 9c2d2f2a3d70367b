"""Step an optimizer of torch for some of its parameters at a time.

The optimizers of torch treat every parameter by itself, so a step may be taken module by module, as soon as the
gradients of a module are final: `OptimizerInParts`.

Note [parts]: a part is the user's own optimizer seen through a view, with its state and settings, and fewer parameters.
Its class, or the kernel that its class would call, does the work, so numbers, schedulers and checkpoints are torch's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from apollo_compile.torch_bridge.profiler import is_profiling
from apollo_compile.torch_bridge.storages import WrittenMemory
from apollo_compile.torch_bridge.upstream_bugs.fused_updates import differs_from_plain

_logger = logging.getLogger(__name__)

_EACH_PARAMETER_ALONE = {
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")
}
"""Classes that use one parameter and its gradient at a time."""

_TENSORS_READ_AND_WRITTEN = {torch.optim.SGD: 3, torch.optim.Adam: 7, torch.optim.AdamW: 7}
"""Times the size of a parameter, without momentum for SGD."""

_FEWEST_BITS = 32
"""Smallest width of a dtype for a fused kernel that the user did not ask for; below it, rounding is visible."""


class OptimizerInParts:
    """Steps an optimizer, some of its parameters at a time; see Note [parts]."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the groups of parameters; `refresh` looks again."""
        self._optimizer = optimizer
        self._group_of: dict[int, int] = {}
        self.updated: list[torch.Tensor] = []
        """Parameters that `step` was called for, until the caller clears it; the latest perhaps in part."""
        self.refresh()

    @property
    def name(self) -> str:
        """Its class."""
        return type(self._optimizer).__name__

    @staticmethod
    def problem_of(optimizer: torch.optim.Optimizer) -> str | None:
        """Return why an optimizer can only step for all parameters together; None if it can in parts."""
        if type(optimizer) not in _EACH_PARAMETER_ALONE:
            return f"{type(optimizer).__name__} may use several parameters together"
        is_differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
        return "the optimizer is differentiable" if is_differentiable else None

    @staticmethod
    def problem_of_state(optimizer: torch.optim.Optimizer) -> str | None:
        """Return why the order of updates matters: state of two parameters is in the same memory; None if it does not.

        State exists from the optimizer's first step on.
        """
        states = optimizer.state.values()
        tensors = [each for state in states for each in state.values() if isinstance(each, torch.Tensor)]
        is_shared = WrittenMemory(range(len(tensors))).is_shared(tensors)
        return "state of the optimizer shares memory" if is_shared else None

    def refresh(self) -> None:
        """Look at the groups of parameters before a step, since groups and checkpoints change them."""
        groups = enumerate(self._optimizer.param_groups)
        self._group_of = {id(parameter): number for number, group in groups for parameter in group["params"]}

    @property
    def members(self) -> Set[int]:
        """Ids of the parameters that the optimizer steps."""
        return self._group_of.keys()

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether the optimizer steps a parameter."""
        return id(parameter) in self._group_of

    def is_at(self, parameter: torch.Tensor, taken: torch.Tensor) -> bool:
        """Return whether a tensor is where a step would write to for a parameter."""
        return parameter.data_ptr() == taken.data_ptr()

    def reason_against(self) -> str | None:
        """Return why a step in parts would not be the optimizer's own now: somebody hooks into it, or replaced it."""
        optimizer = self._optimizer
        hooks = (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
        if any(hooks):
            return "the optimizer's step has hooks"
        own = optimizer.__dict__.get("step")
        is_of_scheduler = getattr(own, "_wrapped_by_lr_sched", False)  # counts calls, which we do as well
        is_usual = own is None or (is_of_scheduler and getattr(own, "__wrapped__", None) is type(optimizer).step)
        return None if is_usual and _is_of_torch(type(optimizer).step) else "the optimizer's step was replaced"

    def step(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Update the parameters that the optimizer has by these gradients; their `.grad` stays."""
        optimizer, sets = self._optimizer, dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]]()
        self.updated += parameters
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if (number := self._group_of.get(id(parameter))) is not None:
                own, given = sets.setdefault((number, parameter.dtype), ([], []))
                own.append(parameter)
                is_alike = gradient.stride() == parameter.stride()  # as a fused kernel expects
                given.append(gradient if is_alike else torch.empty_like(parameter).copy_(gradient))
        chosen = ((self._choose_kernel(optimizer.param_groups[n], own), given) for (n, _), (own, given) in sets.items())
        left = [(group, given) for group, given in chosen if not _call_kernel(optimizer, group, given)]
        pairs = [(*pair, pair[0].grad) for group, given in left for pair in zip(group["params"], given, strict=True)]
        view = object.__new__(type(optimizer))
        view.__dict__.update({**optimizer.__dict__, "param_groups": [group for group, _ in left]})
        try:
            for parameter, gradient, _ in pairs:
                parameter.grad = gradient
            if pairs:
                type(optimizer).step(view)
        finally:
            for parameter, _, before in pairs:
                parameter.grad = before

    def note_taken(self) -> None:
        """Note that a step was taken, for schedulers, which warn of steps that were not."""
        self._optimizer.__dict__["_opt_called"] = True

    def bytes_moved(self, num_bytes: int) -> int:
        """Return about how many bytes a step reads and writes for parameters of so many bytes."""
        has_momentum = any(group.get("momentum") for group in self._optimizer.param_groups)
        return num_bytes * (_TENSORS_READ_AND_WRITTEN.get(type(self._optimizer), 7) + 2 * has_momentum)

    def _choose_kernel(self, group: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return a group with other parameters; with the fused kernel, where the user has left the choice to torch.

        Its numbers differ by rounding from those of the loop over operators that torch takes on a CPU, so with
        deterministic algorithms that loop stays.
        """
        own = {**group, "params": parameters}
        is_free = "fused" in group and group["fused"] is None and group.get("foreach") is None
        if is_free and not torch.are_deterministic_algorithms_enabled() and not self._only_adds(group, parameters):
            own["fused"] = True if self._reason_against_fused(group, parameters) is None else None
        return own

    def _only_adds(self, group: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether an update is one addition per parameter on a CPU, which is faster there than a fused kernel.

        12 matrices of 512 x 512 take one core 0.80 ms added, 1.06 ms fused, and 0.91 ms compiled by Inductor.
        """
        does_more = any(group.get(name) for name in ("momentum", "weight_decay", "maximize"))
        return type(self._optimizer) is torch.optim.SGD and not does_more and all(each.is_cpu for each in parameters)

    def _reason_against_fused(self, group: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> str | None:
        """Return why the fused kernel must not be chosen for parameters of a group; None if it may.

        The kernel goes through the memory of a parameter and of its state side by side, without their strides.
        """
        for dtype, device in {(parameter.dtype, parameter.device) for parameter in parameters}:
            if not dtype.is_floating_point or device.type not in ("cpu", "cuda"):
                return f"there is none for {dtype} on {device.type}"
            if torch.finfo(dtype).bits < _FEWEST_BITS:
                return f"its rounding is another one in {dtype}"
            if differs_from_plain(type(self._optimizer), group, dtype, device):
                _warn_of_kernel(self.name, dtype, device.type)
                return f"it computes something else in {dtype}"
        have_state = set()
        for parameter in parameters:
            if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
                return "a parameter has gaps in its memory, or elements that share it"
            kind, state = (parameter.stride(), parameter.dtype), self._optimizer.state.get(parameter, {})
            tensors = [each for name, each in state.items() if isinstance(each, torch.Tensor) and name != "step"]
            if any((each.stride(), each.dtype) != kind and each.shape == parameter.shape for each in tensors):
                return "a parameter and its state differ in layout or dtype"
            have_state.add(bool(tensors))
        return "some parameters have no state yet" if len(have_state) > 1 else None


@functools.cache
def _is_of_torch(step: Any) -> bool:
    """Return whether the step of a class is torch's: in a wrapper for the grad mode, and mostly in one for hooks."""
    inner = step.__wrapped__ if getattr(step, "hooked", False) else step  # another wrapper copies the attribute
    codes: list[Any] = [getattr(each, "__code__", None) for each in (inner, getattr(inner, "__wrapped__", None))]
    own = torch.optim.Optimizer.profile_hook_step.__code__
    return None not in codes and (codes[0].co_filename, codes[1].co_name) == (own.co_filename, "step")


def _call_kernel(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], gradients: Sequence[torch.Tensor]) -> bool:
    """Update the parameters of a group by the kernel that the optimizer's class calls; return whether that is possible.

    On a CPU, what the class does besides takes 50 us, as long as the kernel takes for a small network.
    """
    parameters, (beta1, beta2) = group["params"], group.get("betas", (0, 0))
    is_of_kernel = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and group["fused"]
    are_alike = {(each.is_cpu, each.dtype) for each in parameters} == {(True, parameters[0].dtype)}
    if not (is_of_kernel and are_alike) or group["differentiable"]:
        return False
    states = [optimizer.state.get(each) or {} for each in parameters]
    given = (group["lr"], beta1, beta2, getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None))
    if any(isinstance(each, torch.Tensor) for each in given) or not all(states) or is_profiling():  # which names a step
        return False
    means, squares, counts = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
    largest = [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else []
    settings = {name: group[name] for name in ("amsgrad", "lr", "weight_decay", "eps", "maximize")}
    call: Any = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    with torch.no_grad():
        torch._foreach_add_(counts, 1)
        call(parameters, gradients, means, squares, largest, counts, beta1=beta1, beta2=beta2, **settings)
    return True


def zero_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Call `zero_grad`, unless it is torch's own and there are no gradients: the call takes ten times the look."""
    is_own = getattr(optimizer.zero_grad, "__func__", None) is torch.optim.Optimizer.zero_grad
    if not is_own or any(each.grad is not None for group in optimizer.param_groups for each in group["params"]):
        optimizer.zero_grad()


@functools.cache
def _warn_of_kernel(name: str, dtype: torch.dtype, device: str) -> None:
    """Warn once per process of a fused kernel that is wrong."""
    text = "the fused kernel of %s for %s on %s differs from the plain update, which is used instead"
    _logger.warning(text, name, dtype, device)
