"""Step an optimizer inside of a CUDA graph, which repeats what it was captured with.

Learning rates are in tensors on the device, which are written before a replay if a scheduler has changed them. All else
that a kernel is given by value or by address is looked at before every step: settings, groups, and the tensors of the
state, which `load_state_dict` replaces. What has changed is captured again.

Only optimizers whose kernels read a learning rate on the device, and count steps there, can be replayed: Adam and AdamW
that are fused or capturable, and SGD where it takes the fused kernel.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from apollo_compile.torch_bridge.optimizers import OptimizerInParts
from apollo_compile.torch_bridge.storages import addresses_of

MOST_QUICK_CHANGES = 4
"""Changes in a row, each within `FEWEST_STEPS` of the last, after which steps are not replayed until they rest."""

FEWEST_STEPS = 8


def problem_of_replays(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why a step cannot be part of a CUDA graph, by class and settings; None if it can."""
    name, groups = type(optimizer).__name__, optimizer.param_groups
    if any(isinstance(value, torch.Tensor) for group in groups for key, value in group.items() if "lr" not in key):
        return f"{name} has settings besides the learning rate that are tensors"
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        if all(group["fused"] or group["capturable"] for group in groups):
            return None
        return f"{name} counts steps on the host; make it with fused=True or capturable=True"
    if type(optimizer) is torch.optim.SGD:
        may_fuse = not torch.are_deterministic_algorithms_enabled()
        if all(group["fused"] or (group["fused"] is group["foreach"] is None and may_fuse) for group in groups):
            return None
        return f"{name} multiplies by a learning rate of the host; make it with fused=True"
    return f"{name} steps with numbers of the host"


class ReplayedOptimizer(OptimizerInParts):
    """Steps an optimizer, some of its parameters at a time, in a CUDA graph.

    Arguments:
        optimizer: the user's.
        parameters: what is stepped.
        device: where they are.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        self._stepped = tuple(parameters)
        self._device = device
        self._rates: dict[int, torch.Tensor] = {}
        """Learning rates on the device, by group."""
        self._rate_values: dict[int, float] = {}
        """What they hold."""
        self._look: _Look | None = None
        self._problem: str | None = None
        self._is_outdated = False
        self._num_quick_changes = 0
        self._num_steps_unchanged = 0
        super().__init__(optimizer)

    def refresh(self) -> None:
        """Look at the optimizer before a step, and bring learning rates on the device up to date."""
        self._write_rates()
        self._num_steps_unchanged += 1
        if self._num_steps_unchanged >= FEWEST_STEPS:
            self._num_quick_changes = 0
        if self._look is not None and self._look.is_up_to_date(self._optimizer):
            return
        super().refresh()
        if self._look is not None:
            self._is_outdated = True
            self._num_quick_changes += self._num_steps_unchanged < FEWEST_STEPS
        self._num_steps_unchanged = 0
        self._look = _Look(self._optimizer)
        self._problem = problem_of_replays(self._optimizer) or self._problem_of_state()

    def reason_against(self) -> str | None:
        """Return why a step in parts would not be the optimizer's own now, or cannot be replayed."""
        if self._num_quick_changes >= MOST_QUICK_CHANGES:
            return "settings of the optimizer change again and again, such as a momentum by a scheduler"
        return super().reason_against() or self._problem

    def take_outdated(self) -> bool:
        """Return whether what was captured is outdated, and forget it."""
        is_outdated, self._is_outdated = self._is_outdated, False
        return is_outdated

    def _write_rates(self) -> None:
        for number, group in enumerate(self._optimizer.param_groups):
            rate = group["lr"]
            if isinstance(rate, torch.Tensor) and rate.device == self._device:
                self._rates.pop(number, None)  # the kernel reads the user's own
            elif number not in self._rates:
                self._rate_values[number] = float(rate)
                self._rates[number] = torch.full((), float(rate), dtype=torch.float32, device=self._device)
            elif self._rate_values[number] != float(rate):
                self._rate_values[number] = float(rate)
                self._rates[number].fill_(float(rate))

    def _problem_of_state(self) -> str | None:
        """Return why a capture would make or move state, which nobody would do again in a replay."""
        optimizer = self._optimizer
        for parameter in self._stepped:
            group = self._group_of.get(id(parameter))
            state = {} if group is None else optimizer.state.get(parameter, {})
            settings = {} if group is None else optimizer.param_groups[group]
            needs_state = type(optimizer) is not torch.optim.SGD or settings.get("momentum")
            if group is not None and needs_state and not any(each is not None for each in state.values()):
                return "the optimizer has no state for some parameters yet"
            tensors = [each for each in state.values() if isinstance(each, torch.Tensor)]
            if any(each.device != self._device for each in tensors):
                return "state of the optimizer is on another device"
            is_host_bound = type(optimizer) is torch.optim.SGD and settings.get("fused") is None
            if is_host_bound and (reason := self._reason_against_fused(settings, [parameter])) is not None:
                return f"SGD needs its fused kernel, and {reason}"
        return None

    def _choose_kernel(self, group: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return a group with other parameters that says that it may be captured, with its rate on the device."""
        number = next(n for n, known in enumerate(self._optimizer.param_groups) if known is group)
        rate = {"lr": self._rates[number]} if number in self._rates else {}
        capturable = {"capturable": True} if "capturable" in group else {}
        return super()._choose_kernel({**group, **rate, **capturable}, parameters)


class _Look:
    """What a CUDA graph of an optimizer's steps depends on; compared before every step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._settings = _settings_of(optimizer)
        self._parameters = _parameters_of(optimizer)
        self._held = list(_state_of(optimizer))
        """Held, so that nothing else is at the same addresses."""
        self._addresses = _addresses_in(optimizer)

    def is_up_to_date(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer is as it was."""
        parameters = _parameters_of(optimizer)
        return (
            len(parameters) == len(self._parameters)
            and all(map(operator.is_, parameters, self._parameters))
            and _addresses_in(optimizer) == self._addresses
            and _settings_of(optimizer) == self._settings
        )


def _settings_of(optimizer: torch.optim.Optimizer) -> list[object]:
    return [
        (name, len(value) if name == "params" else (id(value), value.data_ptr()) if is_tensor else value)
        for group in optimizer.param_groups
        for name, value in group.items()
        for is_tensor in (isinstance(value, torch.Tensor),)
        if name != "initial_lr" and (name != "lr" or (is_tensor and value.device.type != "cpu"))  # rates on the host
    ]


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(dict.values, optimizer.state.values()))


def _addresses_in(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the addresses of state, without a loop in Python where all of it is in tensors."""
    try:
        return addresses_of(_state_of(optimizer))
    except TypeError:
        return [each.data_ptr() if isinstance(each, torch.Tensor) else id(each) for each in _state_of(optimizer)]
