"""Plan a training step without training: the program that `compile_step` would link, from graphs without code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apollo_compile.config import Config
from apollo_compile.errors import TargetError, UnsupportedGraphError
from apollo_compile.ir import Role
from apollo_compile.session.dry_run import trace
from apollo_compile.session.step.collectives import find_data_parallel, order_of_gradients
from apollo_compile.session.step.graph import compose_micro_batches, plan_step, step_name
from apollo_compile.session.step.micro_batch import GraphCode, join_graphs
from apollo_compile.session.step.returned import KEEPS_TENSORS, detach_others, loss_in
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.profile import DeviceProfile
from apollo_compile.torch_bridge.data_parallel import is_sharded, without_reducer
from apollo_compile.torch_bridge.graph_breaks import is_of_user, problem_of
from apollo_compile.torch_bridge.optimizers import OptimizerInParts


def predict_step(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Any],
    parts: Sequence[Any],
    *,
    optimizer: torch.optim.Optimizer | None,
    clip_grad_norm: float | None,
    keep_gradients: bool,
    config: Config,
    profile: DeviceProfile,
) -> Compilation:
    """Return the plan of a step; the model is traced on a copy, with the first micro-batch, and not changed.

    Raises:
        UnsupportedGraphError: it can only run as a loop, with the reason.
        TargetError: the model or its inputs cannot be copied, its parameters are in shards, Dynamo finds nothing to
            compile, or there is no loss with a gradient.
        InfeasiblePlanError: no plan meets the memory quota.
    """
    if is_sharded(model):
        raise TargetError(
            "cannot plan steps of a model under FSDP2 before they run, since its parameters are in shards; expected "
            "the module as it is before fully_shard"
        )
    data_parallel = find_data_parallel(model)
    if isinstance(data_parallel, str):
        raise UnsupportedGraphError(data_parallel)
    wrapper = model if isinstance(model, DistributedDataParallel) else None

    def uses(copied: nn.Module) -> Callable[[Any], Any]:
        called = copied if wrapper is None else without_reducer(wrapper, copied)
        return lambda part: detach_others(loss_fn(called, part))

    try:
        module = model if wrapper is None else wrapper.module
        dry_run = trace(module, ((parts[0],), {}), config, profile, uses=uses, fullgraph=True)
    except Exception as error:
        problem = problem_of(error)
        if problem is None or is_of_user(error):
            raise
        raise UnsupportedGraphError(f"the loss function is not one graph: {problem}") from error
    if not loss_in(dry_run.returned).requires_grad:
        raise TargetError("the loss needs no gradient: expected one that depends on a parameter with requires_grad")
    ((name, planned),) = dry_run.graphs.items()
    by_role = {compilation.capture.role: compilation for compilation, _ in planned}
    if by_role.keys() != {Role.FORWARD, Role.BACKWARD}:
        raise UnsupportedGraphError(f"{name} has no plan: {'; '.join(reason for _, reason in dry_run.fallbacks)}")
    forward, backward = (
        GraphCode(compilation=by_role[role], contract=dry_run.contracts[by_role[role].capture.name])
        for role in (Role.FORWARD, Role.BACKWARD)
    )
    if len(forward.contract.user_outputs) != dry_run.num_returned:
        raise UnsupportedGraphError(KEEPS_TENSORS)
    inputs = dry_run.inputs[name]
    owned = set(map(id, dry_run.state))
    dtypes = [torch.float32] * len(forward.contract.user_outputs)  # which no plan depends on
    micro = join_graphs(name, forward, backward, inputs, owned, dtypes=dtypes)
    steps_inside = optimizer is not None and OptimizerInParts.problem_of(optimizer) is None
    step = compose_micro_batches(
        micro,
        len(parts),
        name=step_name(name, len(parts)),
        optimizer=OptimizerInParts(optimizer) if optimizer is not None and steps_inside else None,
        averages=None if data_parallel is None else data_parallel.predict(order_of_gradients(micro)),
        clip_grad_norm=clip_grad_norm,
        model_parameters=list(micro.parameters.values()),
        is_kept=lambda parameter: keep_gradients or not steps_inside,
    )
    return plan_step(micro, step, profile=profile, config=config)
