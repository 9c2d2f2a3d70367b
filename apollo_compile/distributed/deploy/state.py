"""State and gradients of a model whose modules are on groups of devices: checkpoints, and clipping by a norm.

    full_state_dict(model) -> state;  full_optimizer_state_dict(model, optimizer) -> state     on every rank, whole
    load_optimizer_state_dict(model, optimizer, state);  clip_grad_norm_(model, max_norm) -> norm

All ranks call them. A rank has the parts of its own modules; what is in no module with a group, every rank has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from apollo_compile.distributed.deploy.divided import DividedModule, placed_modules
from apollo_compile.errors import DeploymentError


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of all modules of a model with a plan, on every rank; all ranks call it."""
    state = {name: value.detach() for name, value in model.state_dict().items()}
    for placed in placed_modules.get(model, ()):
        paths = [path for path, module in model.named_modules(remove_duplicate=False) if module is placed.module]
        own = [f"{path}.{name}" for path in paths for name in placed.module.state_dict()]
        found = _gather(placed, {name: state[name] for name in own})
        state.update({name: value.to(placed.device) for name, value in found.items()})
    return state


def full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what `DeploymentPlan.full_optimizer_state_dict` says."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    state = {names[parameter]: dict(values) for parameter, values in optimizer.state.items() if parameter in names}
    for placed in placed_modules.get(model, ()):
        own = [names[each] for each in placed.module.parameters()]
        flat = {(name, key): value for name in own for key, value in state.pop(name, {}).items()}
        for (name, key), value in _gather(placed, flat).items():
            state.setdefault(name, {})[key] = value
    groups = [{**group, "params": _names_of(group, names)} for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def load_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Do what `DeploymentPlan.load_optimizer_state_dict` says."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    current = [{**group, "params": _names_of(group, names)} for group in optimizer.param_groups]
    for expected, got in itertools.zip_longest(_places(state["param_groups"]), _places(current), fillvalue="no more"):
        if expected != got:
            raise DeploymentError(
                f"the state's optimizer has {expected} where this one has {got}: make the optimizer in the same way"
            )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {
        index: {key: _part(value, parameter) for key, value in state["state"][names[parameter]].items()}
        for index, parameter in enumerate(parameters)
        if names[parameter] in state["state"] and not parameter.is_meta
    }
    numbers = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    groups = [{**group, "params": each} for group, each in zip(state["param_groups"], numbers, strict=True)]
    optimizer.load_state_dict({"state": own, "param_groups": groups})


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Do what `DeploymentPlan.clip_grad_norm_` says."""
    placed = placed_modules.get(model, [])
    inside = {each for own in placed for each in own.module.parameters()}
    outside = (each for each in model.parameters() if each not in inside)
    norms = [_norm([each.grad for each in outside if each.grad is not None], norm_type)]
    for own in placed:
        grads = [each.grad for each in own.module.parameters() if each.grad is not None and not each.is_meta]
        norms.append(_norm(grads, norm_type).to(own.device))
        dist.broadcast(norms[-1], group=own.subgroups.everyone, group_src=own.group.first)
    norms = [each.to(norms[-1].device) for each in norms]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    trained = [each for each in model.parameters() if each.grad is not None and not each.is_meta]
    torch.nn.utils.clip_grads_with_norm_(trained, max_norm, total, foreach=False)
    return total


def _norm(grads: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of gradients, of which some may be divided among the ranks of a group, all of which call it."""
    kinds = [[each for each in grads if isinstance(each, DTensor) == is_divided] for is_divided in (True, False)]
    norms = [torch.nn.utils.get_total_norm(each, norm_type, foreach=False) for each in kinds if each]
    whole = [(each.full_tensor() if isinstance(each, DTensor) else each).float() for each in norms]
    return torch.linalg.vector_norm(torch.stack(whole), norm_type) if whole else torch.zeros(())


def _gather(placed: DividedModule, own: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return values on every rank that the ranks of a module have; tensors with one number are on the CPU."""
    everyone, first = placed.subgroups.everyone, placed.group.first
    here = own.items() if placed.is_member else ()
    whole = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in here}
    tensors = {key: value for key, value in whole.items() if isinstance(value, torch.Tensor)}
    kinds = [{**whole, **{key: value.to("meta" if value.dim() else "cpu") for key, value in tensors.items()}}]
    dist.broadcast_object_list(kinds, group=everyone, group_src=first)
    for key, kind in kinds[0].items():
        if isinstance(kind, torch.Tensor) and kind.is_meta:
            value = whole[key].contiguous() if placed.is_member else torch.empty_like(kind, device=placed.device)
            dist.broadcast(value, group=everyone, group_src=first)
            kinds[0][key] = value
    return kinds[0]


def _part(value: Any, parameter: torch.Tensor) -> Any:
    """Return this rank's part of a value that has one element for each of a parameter's."""
    if not (isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.shape == parameter.shape):
        return value
    mesh = parameter.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)


def _places(groups: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the names and groups of parameters, in the order that an optimizer has."""
    return (f"{name!r} in group {number}" for number, group in enumerate(groups) for name in group["params"])


def _names_of(group: Mapping[str, Any], names: Mapping[torch.Tensor, str]) -> list[str]:
    """Return the names of the parameters of a group of an optimizer."""
    if unknown := [tuple(each.shape) for each in group["params"] if each not in names]:
        raise DeploymentError(
            f"the optimizer has a parameter of shape {unknown[0]} that the model does not have: make it after apply, "
            "of model.parameters()"
        )
    return [names[each] for each in group["params"]]
