"""Deployment plans for users: print, draw, edit, save, compare, apply.

str(plan);  plan.to_svg();  plan.move("text", first=1, devices=1);  plan.save(path)
DeploymentPlan.load(path);  plan.diff(other);  plan.apply(model, mesh)
plan.full_state_dict(model);  plan.full_optimizer_state_dict(model, optimizer);  plan.clip_grad_norm_(model, max_norm)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from apollo_compile.distributed.deploy import state as states
from apollo_compile.distributed.deploy.apply import apply_deployment
from apollo_compile.distributed.deploy.divided import group_of
from apollo_compile.distributed.deploy.picture import render_svg
from apollo_compile.errors import DeploymentError, PlanFileError
from apollo_compile.ir.text import format_count
from apollo_compile.passes.deploy import REST, Deployment, DeviceGroup, deploy_on
from apollo_compile.store.files import FileFormat
from apollo_compile.units import format_bytes, format_ns

MUCH_REST = 0.3
"""Share of the step above which the text of a plan says that more modules should be placed."""


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """A plan of which devices compute which modules; prints as text."""

    deployment: Deployment

    def __str__(self) -> str:
        """Return the plan as a table, with its baselines."""
        found, cluster = self.deployment, self.deployment.cluster
        spent: Counter[tuple[str, str]] = Counter()
        for bar in found.bars:
            spent[bar.module, bar.kind] += bar.end_ns - bar.start_ns
        kinds = ("forward", "backward", "sum")
        rows = [
            (
                group.module,
                str(group),
                f"{group.units} of {cluster.units}",
                *(format_ns(spent[group.module, kind]) if spent[group.module, kind] else "" for kind in kinds),
                format_bytes(next(mode.state_bytes for mode in module.modes if mode.key == group.key)),
            )
            for group, module in zip(found.groups, found.work.modules, strict=True)
        ]
        headers = ("module", "runs on", "units", "forward", "backward", "sum, update", "state")
        limit = "" if cluster.memory_bytes is None else f" of {format_bytes(cluster.memory_bytes)}"
        step_ns = max(1, found.step_ns)
        lines = [
            f"deployment on {format_count(cluster.devices, 'device')} of {format_count(cluster.units, 'unit')}, "
            f"{'times measured' if cluster.is_measured else 'simulated'}: a step is predicted to take "
            f"{format_ns(found.step_ns)}, at most {found.gap:.1%} above the best possible",
            tabulate(rows, headers, colalign=("left", "left", *["right"] * 5), disable_numparse=True),
            f"most memory of a device: {format_bytes(max(found.memory_bytes))}{limit}",
        ]
        for each in found.baselines:
            memory = "" if each.keeps_memory else ", which exceeds the memory"
            lines.append(f"{each.name}: {format_ns(each.step_ns)}, {each.step_ns / step_ns:.2f} times as long{memory}")
        rest = sum(spent[REST, kind] for kind in kinds) / step_ns
        if rest > MUCH_REST:
            lines.append(
                f"{REST} takes {rest:.0%} of the step on every device: name modules that have this work, modules=[...]"
            )
        return "\n".join(lines)

    def move(
        self,
        module: str,
        *,
        first: int,
        devices: int,
        units: int | None = None,
        tensor: int = 1,
        is_sharded: bool = False,
    ) -> DeploymentPlan:
        """Return the plan with another group for a module, and the step that it predicts.

        Arguments:
            module: name of the module.
            first: first device, a multiple of `devices`.
            devices: number of devices.
            units: units of each device; None keeps them.
            tensor: devices of a replica, which divide its linear layers.
            is_sharded: let all devices share the parameters, by FSDP2.

        Raises:
            ConfigError: there is no such module, or it cannot have this group.
            InfeasiblePlanError: a device would hold more than its memory.
        """
        found = self.deployment
        groups = {group.module: group for group in found.groups}
        if module not in groups:
            raise DeploymentError(f"the plan has no module {module!r}; it has {', '.join(groups)}")
        own = groups[module].units if units is None else units
        groups[module] = DeviceGroup(
            module=module, first=first, devices=devices, units=own, tensor=tensor, is_sharded=is_sharded
        )
        return DeploymentPlan(deploy_on(found.work, found.cluster, tuple(groups.values()), known=found))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; equal plans give equal bytes. Raises `OSError` if that fails."""
        _FORMAT.write(Path(path), self)

    @classmethod
    def load(cls, path: str | Path) -> DeploymentPlan:
        """Return the plan in a file, whose groups may have been edited; what they predict is computed again.

        Raises:
            PlanFileError: the file cannot be read or is not a deployment plan.
            ConfigError: a module has no group, or one that it cannot have.
            InfeasiblePlanError: the groups exceed the memory of a device.
        """
        try:
            found = _FORMAT.read(Path(path)).deployment
        except (OSError, ValueError) as error:
            raise PlanFileError(
                f"cannot read a deployment plan from {path}: {error}; expected a file that save() wrote"
            ) from error
        return cls(deploy_on(found.work, found.cluster, found.groups, known=found))

    def diff(self, other: DeploymentPlan) -> str:
        """Return what differs in another plan: groups, step and memory."""
        plans = (self.deployment, other.deployment)
        old, new = (
            {group.module: f"{group} with {format_count(group.units, 'unit')}" for group in plan.groups}
            for plan in plans
        )
        lines = [
            f"{name}: {old.get(name, 'nowhere')} -> {new.get(name, 'nowhere')}"
            for name in {**old, **new}
            if old.get(name) != new.get(name)
        ] or ["the same groups"]
        lines.append("step: " + " -> ".join(format_ns(plan.step_ns) for plan in plans))
        lines.append("most memory of a device: " + " -> ".join(format_bytes(max(plan.memory_bytes)) for plan in plans))
        return "\n".join(lines)

    def to_svg(self) -> str:
        """Return a picture of the predicted step: devices as rows, time from left to right."""
        return render_svg(self.deployment)

    def apply(
        self, model: nn.Module, mesh: DeviceMesh | None = None, *, options: Mapping[str, Any] = MappingProxyType({})
    ) -> nn.Module:
        """Let the modules of a model run on their groups, and return the model; all ranks call it before training.

        Every rank then calls the model and its loss with the whole batch. On ranks that do not compute a module, its
        parameters are on the device "meta", so make the optimizer afterwards.

        Arguments:
            model: the model that the plan was made for, with the same parameters on all ranks.
            mesh: the devices: a mesh with one dimension; None for all ranks of the job.
            options: of the backend "apollo", which compiles the modules that share a device.

        Raises:
            DeploymentError: the plan is for another model or number of devices.
        """
        return apply_deployment(self.deployment, model, group_of(mesh), options)

    def full_state_dict(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the parameters and buffers of all modules of a model that runs as planned; all ranks call it."""
        return states.full_state_dict(model)

    def full_optimizer_state_dict(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state of all parameters, by name, on every rank; all ranks call it.

        Returns:
            `state`, with whole tensors by names of the parameter and of the value, and `param_groups` with names as
            their `params`, as `torch.distributed.checkpoint.state_dict` has them.

        Raises:
            DeploymentError: the optimizer has parameters that the model does not have.
        """
        return states.full_optimizer_state_dict(model, optimizer)

    def load_optimizer_state_dict(self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load what `full_optimizer_state_dict` returned, also with another plan or number of devices.

        Call it after `apply`, with an optimizer of that model's parameters in the same groups; a rank loads its parts.

        Raises:
            DeploymentError: the groups have other parameters.
        """
        states.load_optimizer_state_dict(model, optimizer, state)

    def clip_grad_norm_(self, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of the whole model, as `torch.nn.utils.clip_grad_norm_` does in one process.

        All ranks call it. torch's function on a rank would see the gradients of the rank's own modules only.

        Returns:
            The norm before, the same on all ranks.
        """
        return states.clip_grad_norm_(model, max_norm, norm_type)


_FORMAT = FileFormat(kind="deployment plan", number=2, content=DeploymentPlan, max_bytes=64 * 2**20)
