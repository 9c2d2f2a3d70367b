"""Work of our own between the operations of a schedule of torch.distributed.pipelining.

    facts_of(schedule) -> Facts
    runtime = FilledRuntime(schedule, run);  runtime.follow(orders);  runtime.step(...)

torch has no public way to run anything between the operations of a schedule. Its runtime, though, looks up a function
by the type of an action before it knows the action, and its list of actions is plain data. So the schedule is lowered
by torch as ever, with its sends and receives, and actions of a type of our own are put in between; nothing is patched.
Operations are timed by such actions too. torch's forward and backward first wait for what they receive, which is not
computing; so the action in front waits, and leaves nothing to wait for.

Supported are schedules of full backwards with one or several stages per rank (`Schedule1F1B`, `ScheduleGPipe`,
`ScheduleInterleaved1F1B`) of the releases whose signatures are listed below; anything else is refused when this file is
imported, or by `facts_of`. Stages under FSDP2 are refused: they are unsharded by actions that know no encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, cast

from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineContext, _PipelineScheduleRuntime

from apollo_compile.errors import PipelinePlanError
from apollo_compile.torch_bridge.signatures import check_signatures
from apollo_compile.torch_bridge.stopwatch import Stopwatch

SCHEDULES: Mapping[type, Literal["1f1b", "gpipe", "interleaved 1f1b"]] = {
    Schedule1F1B: "1f1b",
    ScheduleGPipe: "gpipe",
    ScheduleInterleaved1F1B: "interleaved 1f1b",
}

check_signatures(
    {
        (_Action, "__new__"): ("_cls, stage_index, computation_type, microbatch_index, sub_actions",),
        (_PipelineContext, "__init__"): ("self, schedule_ref, arg_mbs, kwarg_mbs, target_mbs, losses",),
        (_PipelineScheduleRuntime, "_prepare_schedule_with_comms"): ("self, actions, format",),
        (_PipelineScheduleRuntime, "_step_microbatches"): (
            "self, arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs",
        ),
        (_PipelineScheduleRuntime, "step"): (
            "self, args, target, losses, return_outputs, loss_kwargs, kwargs",
            "self, args, target, losses, return_outputs, loss_kwargs, arg_mbs, kwarg_mbs, target_mbs, kwargs",
            "self, args, target, losses, return_outputs, loss_kwargs, arg_mbs, kwarg_mbs, target_mbs, "
            "finalize_gradients, kwargs",
        ),
    }
)


class _OwnAction(StrEnum):
    """The type of our actions; a string, since torch prints its value."""

    WORK = "WORK"
    BEGIN = "BEGIN"
    """In front of an operation that is timed, which is its only sub-action."""
    END = "END"


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """An operation of the schedule: forward or backward of a stage for a micro-batch."""

    is_forward: bool
    stage: int
    microbatch: int


Item = Operation | int
"""An operation, or the number of a piece of work of our own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a schedule says of itself."""

    name: Literal["1f1b", "gpipe", "interleaved 1f1b"]
    rank: int
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int
    group: Any
    device: Any
    scales_gradients: bool


def facts_of(schedule: Any) -> Facts:
    """Return what a schedule says of itself.

    Raises:
        PipelinePlanError: it, or a stage of it, is of a kind that is not supported.
    """
    name = next((name for kind, name in SCHEDULES.items() if isinstance(schedule, kind)), None)
    if name is None:
        known = ", ".join(kind.__name__ for kind in SCHEDULES)
        raise PipelinePlanError(f"bubbles of a {type(schedule).__name__} cannot be filled; use one of {known}")
    stages = _stages_of(schedule)
    for stage in stages:
        if isinstance(stage.submod, FSDPModule) or any(isinstance(m, FSDPModule) for m in stage.submod.modules()):
            raise PipelinePlanError(
                f"stage {stage.stage_index} is sharded by FSDP2, whose unsharding would not wait for encoders; "
                "shard the optimizer state instead (ZeRO-1), or use DDP around the stages"
            )
    if schedule._loss_fn is None:
        raise PipelinePlanError("the schedule has no loss_fn, so there are no backwards; give it one")
    return Facts(
        name=name,
        rank=stages[0].group_rank,
        num_ranks=stages[0].group_size,
        stages_per_rank=len(stages),
        num_microbatches=schedule._n_microbatches,
        group=stages[0].group,
        device=stages[0].device,
        scales_gradients=schedule.scale_grads,
    )


def _stages_of(schedule: Any) -> list[Any]:
    return schedule._stages if isinstance(schedule, ScheduleInterleaved1F1B) else [schedule._stage]


class FilledRuntime:
    """The runtime of a schedule, with work of our own between its operations.

    Arguments:
        schedule: a schedule that `facts_of` accepts, on this rank.
        run: is called with the number of each piece of this rank's work, and the keyword arguments of the stages by
            micro-batch, which it may change.
    """

    def __init__(self, schedule: Any, run: Callable[[int, list[dict[str, Any]]], None]) -> None:
        self._rank = facts_of(schedule).rank
        self._run = run
        self._watch: Stopwatch | None = None
        self._runtime = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
            _stages_of(schedule),
            schedule._n_microbatches,
            loss_fn=schedule._loss_fn,
            args_chunk_spec=schedule._args_chunk_spec,
            kwargs_chunk_spec=schedule._kwargs_chunk_spec,
            output_merge_spec=schedule._output_merge_spec,
            scale_grads=schedule.scale_grads,
        )
        own: Mapping[Any, Any] = {_OwnAction.WORK: self._work, _OwnAction.BEGIN: self._begin, _OwnAction.END: self._end}
        self._runtime._comp_type_to_function_map.update(own)
        self.step: Callable[..., Any] = self._runtime.step
        """In place of the schedule's."""

    def follow(self, orders: Sequence[Sequence[Item]], watch: Stopwatch | None = None) -> None:
        """Run in these orders from the next step on; all ranks have to change at the same step.

        Arguments:
            orders: by rank, operations of the schedule and numbers of work, in the order in which they run.
            watch: times the operations of this rank, which are the keys; None: nothing is timed.
        """
        actions: dict[int, list[_Action | None]] = {
            rank: [_action_of(item) for item in order if isinstance(item, Operation)]
            for rank, order in enumerate(orders)
        }
        self._watch = watch
        self._runtime.pipeline_order = actions
        self._runtime._prepare_schedule_with_comms(actions)
        lowered = self._runtime.pipeline_order_with_comms
        filled = _insert(lowered[self._rank], orders[self._rank])
        lowered[self._rank] = filled if watch is None else _enclose(filled)

    def _work(self, action: _Action, context: _PipelineContext) -> None:
        self._run(action.stage_index, cast(list[dict[str, Any]], context.kwarg_mbs))

    def _begin(self, action: _Action, context: _PipelineContext) -> None:
        operation = _operation_of(action)
        received = self._runtime.fwd_recv_ops if operation.is_forward else self._runtime.bwd_recv_ops
        place = operation.stage, operation.microbatch
        if place in received:
            for work in received[place]:
                work.wait()
            received[place] = []  # the operation waits for nothing: gloo cannot wait for a message twice
        assert self._watch is not None, "only timed operations are enclosed"
        self._watch.begin()

    def _end(self, action: _Action, context: _PipelineContext) -> None:
        assert self._watch is not None, "only timed operations are enclosed"
        self._watch.end(_operation_of(action))


def _action_of(operation: Operation) -> _Action:
    kind = _ComputationType.FORWARD if operation.is_forward else _ComputationType.FULL_BACKWARD
    return _Action(operation.stage, kind, operation.microbatch)


def _insert(lowered: Sequence[_Action], order: Sequence[Item]) -> list[_Action]:
    """Return lowered actions with our own: each just before the operation that it precedes, behind what it follows."""
    found: list[_Action] = []
    rest = list(lowered)
    for item in order:
        if isinstance(item, Operation):
            wanted = _action_of(item)
            while rest:
                found.append(rest.pop(0))
                if found[-1] == wanted:
                    break
            continue
        # Sends of the last operation, and receives for the next one, do not wait for our work.
        while rest and not rest[0].is_compute_op:
            found.append(rest.pop(0))
        found.append(_Action(item, cast(_ComputationType, _OwnAction.WORK), 0))
    return [*found, *rest]


def _enclose(actions: Sequence[_Action]) -> list[_Action]:
    """Return actions with our own directly before and behind every operation."""
    found: list[_Action] = []
    for action in actions:
        if action.is_compute_op:
            begin, end = (
                _Action(action.stage_index, cast(_ComputationType, kind), action.microbatch_index, (action,))
                for kind in (_OwnAction.BEGIN, _OwnAction.END)
            )
            found += [begin, action, end]
        else:
            found.append(action)
    return found


def _operation_of(enclosing: _Action) -> Operation:
    """Return the operation that an action encloses."""
    assert enclosing.sub_actions is not None
    (action,) = enclosing.sub_actions
    assert action.microbatch_index is not None
    return Operation(
        is_forward=action.computation_type is _ComputationType.FORWARD,
        stage=action.stage_index,
        microbatch=action.microbatch_index,
    )
