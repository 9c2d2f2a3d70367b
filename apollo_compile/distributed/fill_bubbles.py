"""Run encoders in the bubbles of a pipeline of torch.distributed.pipelining.

    step = fill_bubbles(schedule, encoders);  step(*args, target=..., encoder_inputs=...)

Every rank of the pipeline holds a replica of each encoder. All ranks follow the plan that the first rank made
(`pipeline/fill.py`): it assigns micro-batches to replicas, and places their work between operations of the pipeline.
Durations that are not given are measured in the first steps, which use guesses (`measured_plan.py`). Features and their
gradients are sent by isend and irecv on a separate process group, so that they do not wait behind the pipeline's
activations. After the step, gradients are summed over the replicas in this group.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from apollo_compile.distributed.link import sum_gradients, tell
from apollo_compile.distributed.measured_plan import MeasuredPlan
from apollo_compile.distributed.pipeline.durations import (
    GUESS_NS,
    Durations,
    Orders,
    Piece,
    StepPlan,
    StepPrediction,
    plan_step,
)
from apollo_compile.distributed.pipeline.schedules import make_schedule
from apollo_compile.distributed.pipeline.values import Encoder, Kind, Op, StageTimes, one_replica_per_rank
from apollo_compile.errors import PipelinePlanError
from apollo_compile.torch_bridge.pipelining import Facts, FilledRuntime, Item, Operation, facts_of


@dataclass(frozen=True, kw_only=True, eq=False)
class BubbleEncoder:
    """An encoder that runs in bubbles: this rank's replica, with the properties that the plan needs."""

    segments: Sequence[nn.Module]
    """Modules that are called one after the other, each with the output of the previous one (one tensor). The plan
    places each separately, so more segments fill smaller bubbles. Each may be compiled with `backend="apollo"`."""
    feeds: str
    """Keyword argument by which a stage reads the features; it is None for a micro-batch without input."""
    features: torch.Tensor
    """Example of the features of one micro-batch; all micro-batches have its shape and type."""
    forward_ns: Sequence[int] = ()
    """Nanoseconds of every segment's forward for one micro-batch; empty: they are measured."""
    backward_ns: Sequence[int] = ()
    """Nanoseconds of every segment's backward, in the order of `segments`; empty: they are measured, if needed."""
    stage: int = 0
    """Stage that reads the features."""
    max_live: int | None = None
    """Limit of micro-batches that a rank holds between the start of forward and the end of backward."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Distinct parameters that are trained."""
        found = dict.fromkeys(p for segment in self.segments for p in segment.parameters() if p.requires_grad)
        return list(found)


class FilledPipeline:
    """Training step of a pipeline with encoders in its bubbles; `fill_bubbles` makes it."""

    def __init__(
        self,
        schedule: Any,
        encoders: Sequence[BubbleEncoder],
        group: dist.ProcessGroup | None,
        plan: StepPlan,
        measured: MeasuredPlan | None,
    ) -> None:
        self._facts = facts_of(schedule)
        self._encoders = encoders
        self._group = group
        self._measured = measured
        self._work: list[_Task] = []
        self._runtime = FilledRuntime(schedule, self._run)
        self._state = _State()
        self._follow(plan)

    @property
    def orders(self) -> Orders:
        """Operations of every rank, in order."""
        return self._plan.orders

    @property
    def replica_of(self) -> tuple[tuple[int, ...], ...]:
        """By encoder and micro-batch, the rank that computes it in the next step."""
        return self._plan.replica_of

    @property
    def prediction(self) -> StepPrediction | None:
        """Durations that the plan was made from, given or measured, and the predicted step, in nanoseconds.

        None while durations are measured.
        """
        return self._plan.prediction

    def __call__(self, *args: Any, encoder_inputs: Mapping[str, Sequence[Any] | torch.Tensor], **kwargs: Any) -> Any:
        """Run one step; gradients accumulate as with `schedule.step`.

        Arguments:
            args: positional arguments of `schedule.step`.
            encoder_inputs: by the name that an encoder feeds, its input for every micro-batch: a tensor that is split
                along its first dimension, or a list, in which None is a micro-batch without input. It must be equal on
                all ranks, except for values of micro-batches that other ranks compute (`replica_of`).
            kwargs: keyword arguments of `schedule.step`.
        """
        inputs = [_split(encoder, encoder_inputs, self._facts.num_microbatches) for encoder in self._encoders]
        if self._measured is not None:
            self._measured.begin_step()
        self._state = _State(inputs=inputs)
        before = [[(p, p.grad) for p in encoder.parameters] for encoder in self._encoders]
        for pairs in before:
            for parameter, _ in pairs:
                parameter.grad = None
        for index, encoder in enumerate(self._encoders):
            if self._reader_of(encoder) == self._facts.rank:
                given = any(value is not None for value in inputs[index])
                kwargs[encoder.feeds] = self._placeholder(encoder) if given else None
        result = self._runtime.step(*args, **kwargs)
        for request in self._state.sent:
            request.wait()
        self._state = _State()
        for pairs, parts in zip(before, inputs, strict=True):
            if any(part is not None for part in parts):
                _reduce(pairs, self._group)
            else:
                _restore(pairs)
        if self._measured is not None and (plan := self._measured.end_step()) is not None:
            self._measured = None
            self._follow(plan)
        return result

    # ------------------------------------------------------------------------------------------------------ the order

    def _follow(self, plan: StepPlan) -> None:
        """Follow a plan from the next step on."""
        self._plan = plan
        self._work.clear()
        items = [self._items_of(rank, row) for rank, row in enumerate(plan.orders)]
        self._runtime.follow(items, None if self._measured is None else self._measured.watch)

    def _items_of(self, rank: int, row: Sequence[Op]) -> list[Item]:
        """Return the pipeline's operations of a rank, with the numbers of this rank's tasks between them."""
        found: list[Item] = []

        def add(task: _Task) -> None:
            if rank == self._facts.rank:
                self._work.append(task)
                found.append(len(self._work) - 1)

        for op in row:
            if op.is_encoder:
                add(_Task(_Job.FORWARD if op.kind is Kind.ENCODER_FORWARD else _Job.BACKWARD, op))
                continue
            readers = [index for index, encoder in enumerate(self._encoders) if encoder.stage == op.stage]
            if op.kind is Kind.FORWARD:
                for index in readers:
                    add(_Task(_Job.RECEIVE, op._replace(encoder=index)))
            found.append(Operation(is_forward=op.kind is Kind.FORWARD, stage=op.stage, microbatch=op.microbatch))
            if op.kind is Kind.BACKWARD:
                for index in readers:
                    if self._encoders[index].parameters:
                        add(_Task(_Job.RETURN, op._replace(encoder=index)))
        return found

    def _run(self, number: int, kwargs: list[dict[str, Any]]) -> None:
        """Run a task."""
        job, op = self._work[number]
        value = self._state.inputs[op.encoder][op.microbatch]
        if value is None:
            if job is _Job.RECEIVE:
                kwargs[op.microbatch] = {**kwargs[op.microbatch], self._encoders[op.encoder].feeds: None}
            return
        match job:
            case _Job.FORWARD:
                self._forward(op, value)
            case _Job.RECEIVE:
                name = self._encoders[op.encoder].feeds
                kwargs[op.microbatch] = {**kwargs[op.microbatch], name: self._receive(op)}
            case _Job.RETURN:
                self._return(op)
            case _Job.BACKWARD:
                self._backward(op)

    # ------------------------------------------------------------------------------------------------------- the tasks

    def _forward(self, op: Op, value: Any) -> None:
        encoder, key = self._encoders[op.encoder], (op.encoder, op.microbatch)
        tape = self._state.tapes.setdefault(key, [])
        if op.segment:
            value = tape[-1].output.detach().requires_grad_(tape[-1].output.requires_grad)
        with self._timed(op), torch.set_grad_enabled(bool(encoder.parameters)):
            output = encoder.segments[op.segment](value)
        if not isinstance(output, torch.Tensor):
            raise PipelinePlanError(
                f"segment {op.segment} of the encoder of {encoder.feeds} returned a {type(output).__name__}; expected "
                "one tensor: wrap the segment so that it returns one"
            )
        tape.append(_Taped(value, output))
        if op.segment < len(encoder.segments) - 1:
            return
        wanted = encoder.features
        if output.shape != wanted.shape or output.dtype != wanted.dtype:
            raise PipelinePlanError(
                f"features of {encoder.feeds} for micro-batch {op.microbatch} are {tuple(output.shape)} of "
                f"{output.dtype}, the example is {tuple(wanted.shape)} of {wanted.dtype}; give an example of that shape"
            )
        reader = self._reader_of(encoder)
        if reader == self._facts.rank:
            self._state.features[key] = output.detach()
        else:
            self._send(output.detach().contiguous(), reader, op)
        if not encoder.parameters:
            del self._state.tapes[key]

    def _receive(self, op: Op) -> torch.Tensor:
        """Return the features of a micro-batch for the stage that reads them, and keep their gradient later."""
        encoder, key = self._encoders[op.encoder], (op.encoder, op.microbatch)
        source = self.replica_of[op.encoder][op.microbatch]
        is_here = source == self._facts.rank
        features = self._state.features.pop(key) if is_here else self._wait_for(encoder, source, op)
        if encoder.parameters:
            features.requires_grad_()
            gradients = self._state.gradients
            keep = functools.partial(gradients.__setitem__, key)
            features.register_hook(keep)  # type: ignore[no-untyped-call]
        return features

    def _return(self, op: Op) -> None:
        """Send the gradient of the features to the replica that made them."""
        encoder, key = self._encoders[op.encoder], (op.encoder, op.microbatch)
        source = self.replica_of[op.encoder][op.microbatch]
        gradient = self._state.gradients.pop(key, None)
        if gradient is None:  # the stage did not use the features of this micro-batch
            gradient = torch.zeros_like(encoder.features, device=self._facts.device)
        if self._facts.scales_gradients:
            gradient = gradient / self._facts.num_microbatches
        if source == self._facts.rank:
            self._state.gradients[key] = gradient
        else:
            self._send(gradient.contiguous(), source, op)

    def _backward(self, op: Op) -> None:
        encoder, key = self._encoders[op.encoder], (op.encoder, op.microbatch)
        reader = self._reader_of(encoder)
        tape = self._state.tapes[key]
        if op.segment or reader == self._facts.rank:
            gradient = self._state.gradients.pop(key)
        else:
            gradient = self._wait_for(encoder, reader, op)
        taped = tape.pop()
        with self._timed(op):
            if taped.output.requires_grad:
                torch.autograd.backward(taped.output, gradient)
        if tape:
            before = taped.value.grad
            self._state.gradients[key] = torch.zeros_like(taped.value) if before is None else before
        else:
            del self._state.tapes[key]

    @contextlib.contextmanager
    def _timed(self, op: Op) -> Iterator[None]:
        """Time the computation of a segment, if durations are measured."""
        if self._measured is None:
            yield
            return
        self._measured.watch.begin()
        yield
        is_forward = op.kind is Kind.ENCODER_FORWARD
        last = len(self._encoders[op.encoder].segments) - 1
        self._measured.watch.end(Piece(op.kind, op.segment if is_forward else last - op.segment, op.encoder))

    # --------------------------------------------------------------------------------------------- between the ranks

    def _reader_of(self, encoder: BubbleEncoder) -> int:
        return encoder.stage % self._facts.num_ranks

    def _tag(self, op: Op) -> int:
        """Return the tag of a message between two ranks, distinct for features and gradients of every micro-batch."""
        is_gradient = op.kind in (Kind.BACKWARD, Kind.ENCODER_BACKWARD)
        return 2 * (op.encoder * self._facts.num_microbatches + op.microbatch) + is_gradient

    def _send(self, tensor: torch.Tensor, to: int, op: Op) -> None:
        request = dist.isend(tensor, group=self._group, group_dst=to, tag=self._tag(op))
        assert request is not None, "this rank is part of the group"
        self._state.sent.append(request)
        self._state.buffers.append(tensor)

    def _wait_for(self, encoder: BubbleEncoder, source: int, op: Op) -> torch.Tensor:
        buffer = torch.empty_like(encoder.features, device=self._facts.device, requires_grad=False)
        request = dist.irecv(buffer, group=self._group, group_src=source, tag=self._tag(op))
        assert request is not None, "this rank is part of the group"
        request.wait()
        return buffer

    def _placeholder(self, encoder: BubbleEncoder) -> torch.Tensor:
        """Return a tensor without memory that torch splits into micro-batches and infers shapes from."""
        features = encoder.features
        shape = (features.shape[0] * self._facts.num_microbatches, *features.shape[1:])
        return torch.zeros((), dtype=features.dtype, device=self._facts.device).expand(shape)


def _split(
    encoder: BubbleEncoder, given: Mapping[str, Sequence[Any] | torch.Tensor], num_microbatches: int
) -> list[Any]:
    """Return the input of every micro-batch."""
    if encoder.feeds not in given:
        raise PipelinePlanError(
            f"encoder_inputs has no {encoder.feeds!r}, it has {sorted(given)}; give a tensor, or a list with one input "
            "or None per micro-batch"
        )
    value = given[encoder.feeds]
    parts = list(value.chunk(num_microbatches) if isinstance(value, torch.Tensor) else value)
    if len(parts) != num_microbatches:
        raise PipelinePlanError(
            f"encoder_inputs[{encoder.feeds!r}] has {len(parts)} parts; expected one for each of "
            f"{num_microbatches} micro-batches"
        )
    return parts


def _reduce(pairs: Sequence[tuple[nn.Parameter, torch.Tensor | None]], group: dist.ProcessGroup | None) -> None:
    """Sum this step's gradients over the replicas, and add the earlier gradients."""
    by_type: dict[torch.dtype, list[tuple[nn.Parameter, torch.Tensor | None]]] = {}
    for parameter, before in pairs:
        by_type.setdefault(parameter.dtype, []).append((parameter, before))
    for same in by_type.values():
        sums = sum_gradients([parameter.grad for parameter, _ in same], [parameter for parameter, _ in same], group)
        for (parameter, before), own in zip(same, sums, strict=True):
            parameter.grad = own if before is None else before if own is None else before + own


def _restore(pairs: Sequence[tuple[nn.Parameter, torch.Tensor | None]]) -> None:
    for parameter, before in pairs:
        parameter.grad = before


class _Job(Enum):
    FORWARD = "forward"
    """Run a segment."""
    RECEIVE = "receive"
    """Receive features before the forward that reads them."""
    RETURN = "return"
    """Send gradients of features after the backward that computed them."""
    BACKWARD = "backward"
    """Run a segment's backward."""


class _Task(NamedTuple):
    job: _Job
    op: Op


class _Taped(NamedTuple):
    """Input and output of a segment, until its backward."""

    value: Any
    output: torch.Tensor


@dataclass(slots=True)
class _State:
    """State of one step; keys are (encoder, micro-batch)."""

    inputs: list[list[Any]] = field(default_factory=list)
    tapes: dict[tuple[int, int], list[_Taped]] = field(default_factory=dict)
    features: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    gradients: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    sent: list[dist.Work] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    """Tensors that are being sent."""


def fill_bubbles(
    schedule: Any,
    encoders: BubbleEncoder | Sequence[BubbleEncoder],
    *,
    times: StageTimes | None = None,
    group: dist.ProcessGroup | None = None,
) -> FilledPipeline:
    """Return a step of a pipeline with encoders in its bubbles; every rank of the pipeline calls it.

    Arguments:
        schedule: a `Schedule1F1B`, `ScheduleGPipe` or `ScheduleInterleaved1F1B` with a loss function. It is not
            changed; call the result in place of `schedule.step`.
        encoders: the encoders, each with this rank's replica, whose parameters are equal on all ranks.
        times: durations of the stages; None: they are measured. If all durations are given, only their ratios matter;
            if some are given, they are nanoseconds.
        group: process group of the pipeline's ranks, in their order, for features and gradients only; None makes one,
            which requires that the pipeline has all ranks of the job.

    Raises:
        PipelinePlanError: the pipeline cannot be filled; the message has the reason.
    """
    facts = facts_of(schedule)
    all_encoders = [encoders] if isinstance(encoders, BubbleEncoder) else list(encoders)
    for encoder in all_encoders:
        _require_runnable(encoder)
    durations, wanted = _guess_missing(times, all_encoders, facts.num_ranks * facts.stages_per_rank)
    plain = make_schedule(facts.name, facts.num_ranks, facts.stages_per_rank, facts.num_microbatches, durations.times)
    planned = tuple(
        _as_planned(encoder, forward_ns, backward_ns, facts.num_ranks)
        for encoder, forward_ns, backward_ns in zip(
            all_encoders, durations.forward_ns, durations.backward_ns, strict=True
        )
    )
    plan = plan_step(plain, planned, durations)
    if wanted:
        plan = replace(plan, prediction=None)
    own_group = _make_group(facts) if group is None else group
    plan, wanted = tell(lambda: (plan, wanted), own_group)
    measured = None
    if wanted:
        measured = MeasuredPlan(
            plain, planned, durations, wanted=wanted, first=plan, group=own_group, device=facts.device
        )
    return FilledPipeline(schedule, all_encoders, own_group, plan, measured)


def _guess_missing(
    times: StageTimes | None, encoders: Sequence[BubbleEncoder], num_stages: int
) -> tuple[Durations, frozenset[Piece]]:
    """Return durations, with guesses for those that are not given, and the pieces that were guessed."""
    missing: set[Piece] = set()

    def guess(kind: Kind, count: int, encoder: int = 0) -> tuple[int, ...]:
        missing.update(Piece(kind, index, encoder) for index in range(count))
        return (GUESS_NS[kind],) * count

    if times is None:
        times = StageTimes(forward_ns=guess(Kind.FORWARD, num_stages), backward_ns=guess(Kind.BACKWARD, num_stages))
    forward_ns, backward_ns = [], []
    for index, encoder in enumerate(encoders):
        count = len(encoder.segments)
        forward_ns.append(tuple(encoder.forward_ns) or guess(Kind.ENCODER_FORWARD, count, index))
        is_trained = bool(encoder.parameters)
        given = tuple(encoder.backward_ns) if is_trained else ()
        backward_ns.append(given or guess(Kind.ENCODER_BACKWARD, count if is_trained else 0, index))
    durations = Durations(times=times, forward_ns=tuple(forward_ns), backward_ns=tuple(backward_ns))
    return durations, frozenset(missing)


def _require_runnable(encoder: BubbleEncoder) -> None:
    """Raise if an encoder cannot run in bubbles."""
    if any(isinstance(m, FSDPModule) for segment in encoder.segments for m in segment.modules()):
        raise PipelinePlanError(
            f"the encoder of {encoder.feeds} is sharded by FSDP2, which needs all ranks at the same time, but replicas "
            "run at different times; give every rank a whole replica"
        )
    is_trained = bool(encoder.parameters)
    for name, durations, is_used in (
        ("forward_ns", encoder.forward_ns, True),
        ("backward_ns", encoder.backward_ns, is_trained),
    ):
        if is_used and len(durations) not in (0, len(encoder.segments)):
            raise PipelinePlanError(
                f"the encoder of {encoder.feeds} has {len(encoder.segments)} segments and {len(durations)} durations "
                f"in {name}; give one per segment, or none to measure them"
            )


def _as_planned(
    encoder: BubbleEncoder, forward_ns: tuple[int, ...], backward_ns: tuple[int, ...], num_ranks: int
) -> Encoder:
    """Return an encoder in the form of the planner."""
    return Encoder(
        name=encoder.feeds,
        forward_ns=(forward_ns,),
        backward_ns=(backward_ns[::-1],) if backward_ns else (),
        replicas=one_replica_per_rank(num_ranks),
        feeds=encoder.stage,
        max_live=encoder.max_live,
    )


def _make_group(facts: Facts) -> dist.ProcessGroup | None:
    """Return a group of the pipeline's ranks."""
    ranks = dist.get_process_group_ranks(facts.group)
    if len(ranks) != dist.get_world_size():
        raise PipelinePlanError(
            f"the pipeline has {len(ranks)} of {dist.get_world_size()} ranks, but all ranks must take part in making a "
            "group: make one per pipeline with torch.distributed.new_group on every rank, and pass it as group"
        )
    group: dist.ProcessGroup | None = dist.new_group(ranks)
    return group
