"""Checks of plans of pipelines, bar by bar, by another algorithm than the filler's.

check_plan(plan) raises InvariantError; check_orders(orders, ...) raises PipelinePlanError
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence

from apollo_compile.distributed.pipeline.memory import peak_live
from apollo_compile.distributed.pipeline.simulate import duration_of, inputs_of, simulate, stages_of
from apollo_compile.distributed.pipeline.values import Bar, Encoder, FilledPlan, Filling, Kind, Op, Schedule, StageTimes
from apollo_compile.errors import InvariantError, PipelinePlanError


def check_plan(plan: FilledPlan) -> None:
    """Check every rule of `fill.py` on the bars of a plan.

    Raises:
        InvariantError: a rule is broken; the message names operation and device.
    """
    expected = Counter(_operations(plan.schedule, plan.encoders))
    segments = [bar for whole in plan.bars for bar in _split(whole, plan)]
    if missing := expected - Counter(bar.op for bar in segments):
        raise InvariantError(f"{next(iter(missing))} does not run")
    if surplus := Counter(bar.op for bar in segments) - expected:
        raise InvariantError(f"{next(iter(surplus))} runs twice, or is not part of the step")
    _check_devices(plan)
    _check_inputs(plan, {bar.op: bar for bar in segments})
    _check_sorted(plan, segments)
    for encoder, live in zip(plan.encoders, peak_live(plan), strict=True):
        if encoder.max_live is not None and max(live) > encoder.max_live:
            raise InvariantError(
                f"a replica of {encoder.name} holds {max(live)} micro-batches; limit {encoder.max_live}"
            )
    end_ns = max(bar.end_ns + (0 if bar.op.is_encoder else plan.times.trail_ns) for bar in plan.bars)
    if plan.step_ns != end_ns:
        raise InvariantError(f"the step takes {end_ns} ns, the plan says {plan.step_ns}")


def check_orders(
    orders: Sequence[Sequence[Op]],
    schedule: Schedule,
    encoders: Sequence[Encoder],
    replica_of: Sequence[Sequence[int]],
) -> None:
    """Check that devices can run operations in the given orders, each once and on its device.

    Raises:
        PipelinePlanError: they cannot; the message names the micro-batch.
    """
    places = {op: _device_of(op, schedule, encoders, replica_of) for op in _operations(schedule, encoders)}
    seen: set[Op] = set()
    for device, row in enumerate(orders):
        for op in row:
            if op in seen or places.get(op) != device:
                where = f"it belongs to device {places[op]}, once" if op in places else "it is not part of the step"
                raise PipelinePlanError(f"micro-batch {op.microbatch}: device {device} runs {op}; {where}")
            seen.add(op)
    if missing := [op for op in places if op not in seen]:
        raise PipelinePlanError(f"micro-batch {missing[0].microbatch}: no device runs {missing[0]}")
    num_stages = schedule.num_stages
    units = StageTimes(forward_ns=(1,) * num_stages, backward_ns=(1,) * num_stages)
    simulate(schedule, units, orders=orders, encoders=encoders, replica_of=replica_of)


def _operations(schedule: Schedule, encoders: Sequence[Encoder]) -> list[Op]:
    """Return every operation of a step."""
    found = []
    for microbatch in range(schedule.num_microbatches):
        for index, encoder in enumerate(encoders):
            for kind in (Kind.ENCODER_FORWARD, Kind.ENCODER_BACKWARD):
                for stage, segments in enumerate(stages_of(kind, encoder)):
                    found += [Op(kind, microbatch, stage, index, segment) for segment in range(len(segments))]
        for stage in range(schedule.num_stages):
            found += [Op(kind, microbatch, stage) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    return found


def _device_of(op: Op, schedule: Schedule, encoders: Sequence[Encoder], replica_of: Sequence[Sequence[int]]) -> int:
    """Return the device that an operation belongs to."""
    if not op.is_encoder:
        return op.stage % schedule.num_ranks
    devices = encoders[op.encoder].replicas[replica_of[op.encoder][op.microbatch]]
    return devices[op.stage] if op.kind is Kind.ENCODER_FORWARD else devices[-1 - op.stage]


def _split(whole: Bar, plan: FilledPlan) -> list[Bar]:
    """Return a bar per segment; together they must be as long as the bar."""
    found, start_ns = [], whole.start_ns
    for segment in range(whole.op.segment, whole.op.segment + whole.num_segments):
        op = whole.op._replace(segment=segment)
        end_ns = start_ns + duration_of(op, plan.times, plan.encoders)
        if whole.device != _device_of(op, plan.schedule, plan.encoders, plan.replica_of):
            raise InvariantError(f"{op} runs on device {whole.device}, which is not its own")
        found.append(Bar(op, whole.device, start_ns, end_ns))
        start_ns = end_ns
    if start_ns != whole.end_ns:
        raise InvariantError(
            f"{whole.op} takes {start_ns - whole.start_ns} ns, its bar {whole.end_ns - whole.start_ns}"
        )
    return found


def _check_devices(plan: FilledPlan) -> None:
    """Check that a device runs one operation at a time; an encoder may run inside gaps of an operation."""
    ranks = plan.schedule.num_ranks
    by_device: dict[int, list[Bar]] = defaultdict(list)
    for bar in plan.bars:
        by_device[bar.device].append(bar)
    for rank in range(ranks):
        pipeline = [bar for bar in by_device[rank] if not bar.op.is_encoder]
        if [bar.op for bar in pipeline] != list(plan.schedule.orders[rank]):
            raise InvariantError(f"rank {rank} does not keep the order of its schedule")
        for device in range(rank, plan.num_devices, ranks):
            own = [bar for bar in by_device[device] if bar.op.is_encoder]
            busy = [(b.start_ns, b.end_ns, b.op) for b in own]
            for bar in pipeline:
                busy += [(start_ns, end_ns, bar.op) for start_ns, end_ns in _parts(bar, plan)]
            busy.sort(key=lambda item: item[:2])
            for (_, end_ns, first), (start_ns, _, second) in itertools.pairwise(busy):
                if start_ns < end_ns:
                    raise InvariantError(f"device {device} begins {second} before it has ended {first}")
        if pipeline and pipeline[0].start_ns < plan.times.lead_ns:
            raise InvariantError(f"rank {rank} begins {pipeline[0].op} while parameters are gathered")
        if plan.filling is Filling.COARSE and pipeline:
            for device in range(rank, plan.num_devices, ranks):
                for bar in by_device[device]:
                    if bar.op.is_encoder and bar.end_ns > pipeline[0].start_ns and bar.start_ns < pipeline[-1].end_ns:
                        raise InvariantError(f"{bar.op} runs between operations of rank {rank} in a coarse plan")


def _parts(bar: Bar, plan: FilledPlan) -> list[tuple[int, int]]:
    """Return the intervals in which an operation computes, between its gaps."""
    gaps = plan.times.gaps(bar.op)
    if not gaps.count:
        return [(bar.start_ns, bar.end_ns)]
    compute_ns = bar.end_ns - bar.start_ns - gaps.count * gaps.duration_ns
    ends = [bar.start_ns + (k + 1) * compute_ns // gaps.count + k * gaps.duration_ns for k in range(gaps.count)]
    begins = [bar.start_ns, *(end + gaps.duration_ns for end in ends[:-1])]
    return list(zip(begins, ends, strict=True))


def _check_inputs(plan: FilledPlan, bars: dict[Op, Bar]) -> None:
    """Check that operations start after their inputs have arrived."""
    last = plan.schedule.num_stages - 1
    for op, bar in bars.items():
        for other in inputs_of(op, last, plan.encoders):
            source = bars[other]
            arrival_ns = source.end_ns + (0 if source.device == bar.device else plan.times.transfer_ns)
            if bar.start_ns < arrival_ns:
                raise InvariantError(
                    f"micro-batch {op.microbatch}: {op} starts at {bar.start_ns} ns, {other} arrives at {arrival_ns}"
                )


def _check_sorted(plan: FilledPlan, bars: Sequence[Bar]) -> None:
    """Check EF_i <= F_i and EB_i >= B_i for sorted times: the i-th features exist when the i-th forward starts."""
    for index, encoder in enumerate(plan.encoders):
        reads = sorted(b.start_ns for b in bars if b.op.kind is Kind.FORWARD and b.op.stage == encoder.feeds)
        gives = sorted(b.end_ns for b in bars if b.op.kind is Kind.BACKWARD and b.op.stage == encoder.feeds)
        first, last = defaultdict(list), defaultdict(list)
        for bar in bars:
            if bar.op.is_encoder and bar.op.encoder == index:
                first[bar.op.kind, bar.op.microbatch].append(bar.start_ns)
                last[bar.op.kind, bar.op.microbatch].append(bar.end_ns)
        made = sorted(max(times) for (kind, _), times in last.items() if kind is Kind.ENCODER_FORWARD)
        taken = sorted(min(times) for (kind, _), times in first.items() if kind is Kind.ENCODER_BACKWARD)
        for number, (made_ns, read_ns) in enumerate(zip(made, reads, strict=True)):
            if made_ns > read_ns:
                raise InvariantError(
                    f"features {number} of encoder {index} are made at {made_ns} ns, read at {read_ns}"
                )
        for number, (given_ns, taken_ns) in enumerate(zip(gives, taken, strict=not encoder.is_frozen)):
            if taken_ns < given_ns:
                raise InvariantError(
                    f"gradients {number} of encoder {index} exist at {given_ns} ns, used at {taken_ns}"
                )
