"""Event simulation of a step: each device runs its operations in order and waits for inputs.

    (orders by device, StageTimes, encoders) -> bars

An operation starts as soon as its device is free and its inputs have arrived. The simulation does not use plans and
bubbles; plans are compared by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from apollo_compile.distributed.pipeline.values import Bar, Encoder, FilledPlan, Kind, Op, PipelineSchedule, StageTimes
from apollo_compile.errors import PipelinePlanError


def simulate(
    schedule: PipelineSchedule,
    times: StageTimes,
    *,
    orders: Sequence[Sequence[Op]] | None = None,
    encoders: Sequence[Encoder] = (),
    replica_of: Sequence[Sequence[int]] = (),
) -> tuple[Bar, ...]:
    """Return the bars of a step by device and start; the first operation starts at `times.lead_ns`, encoders at 0.

    Arguments:
        schedule: the pipeline.
        times: durations of its stages.
        orders: operations by device, including those of encoders; default: the schedule's.
        encoders: encoders whose operations are in `orders`.
        replica_of: by encoder and micro-batch, the replica that computes it.

    Raises:
        PipelinePlanError: an operation waits for a later one, or for one that no device runs.
    """
    rows = schedule.orders if orders is None else orders
    last = schedule.num_stages - 1
    ends: dict[Op, tuple[int, int]] = {}
    free = [0] * len(rows)
    position = [0] * len(rows)
    bars: list[list[Bar]] = [[] for _ in rows]
    has_moved = True
    while has_moved:
        has_moved = False
        for device, row in enumerate(rows):
            while position[device] < len(row):
                op = row[position[device]]
                start_ns = free[device] if op.is_encoder else max(free[device], times.lead_ns)
                for other in inputs_of(op, last, encoders):
                    if other not in ends:
                        break
                    source, end_ns = ends[other]
                    start_ns = max(start_ns, end_ns + (times.transfer_ns if source != device else 0))
                else:
                    end_ns = start_ns + duration_of(op, times, encoders)
                    ends[op] = device, end_ns
                    bars[device].append(Bar(op, device, start_ns, end_ns))
                    free[device] = end_ns
                    position[device] += 1
                    has_moved = True
                    continue
                break
    for device, row in enumerate(rows):
        if position[device] < len(row):
            op = row[position[device]]
            missing = next(other for other in inputs_of(op, last, encoders) if other not in ends)
            raise PipelinePlanError(
                f"the order of device {device} cannot run: it stops at {op}, which needs {missing}, which has not run "
                f"by then; run {missing} before it"
            )
    return tuple(bar for row in bars for bar in row)


def inputs_of(op: Op, last_stage: int, encoders: Sequence[Encoder]) -> Iterator[Op]:
    """Yield the operations whose results an operation reads."""
    kind, microbatch, stage = op.kind, op.microbatch, op.stage
    match kind:
        case Kind.FORWARD:
            if stage > 0:
                yield Op(Kind.FORWARD, microbatch, stage - 1)
            for index, encoder in enumerate(encoders):
                if encoder.feeds == stage:
                    yield last_of(Kind.ENCODER_FORWARD, microbatch, index, encoder)
        case Kind.BACKWARD:
            yield Op(Kind.FORWARD, microbatch, stage)
            if stage < last_stage:
                yield Op(Kind.BACKWARD, microbatch, stage + 1)
        case Kind.ENCODER_FORWARD | Kind.ENCODER_BACKWARD:
            stages = stages_of(kind, encoders[op.encoder])
            if op.segment > 0:
                yield op._replace(segment=op.segment - 1)
            elif stage > 0:
                yield op._replace(stage=stage - 1, segment=len(stages[stage - 1]) - 1)
            elif kind is Kind.ENCODER_BACKWARD:
                yield Op(Kind.BACKWARD, microbatch, encoders[op.encoder].feeds)
                yield last_of(Kind.ENCODER_FORWARD, microbatch, op.encoder, encoders[op.encoder])


def stages_of(kind: Kind, encoder: Encoder) -> tuple[tuple[int, ...], ...]:
    """Return the durations of the segments of an encoder's forward or backward, in the order in which stages run."""
    return encoder.forward_ns if kind is Kind.ENCODER_FORWARD else encoder.backward_ns


def last_of(kind: Kind, microbatch: int, index: int, encoder: Encoder) -> Op:
    """Return the last operation of an encoder's forward or backward of a micro-batch."""
    stages = stages_of(kind, encoder)
    return Op(kind, microbatch, len(stages) - 1, index, len(stages[-1]) - 1)


def duration_of(op: Op, times: StageTimes, encoders: Sequence[Encoder]) -> int:
    """Return the duration of any operation."""
    if op.is_encoder:
        return stages_of(op.kind, encoders[op.encoder])[op.stage][op.segment]
    return times.duration_ns(op)


def end_of(bars: Sequence[Bar], times: StageTimes) -> int:
    """Return the end of a step: the end of the pipeline with its reduction of gradients, and of all encoder work."""
    pipeline = max((bar.end_ns for bar in bars if not bar.op.is_encoder), default=times.lead_ns)
    return max(pipeline + times.trail_ns, max((bar.end_ns for bar in bars), default=0))


def orders_of(plan: FilledPlan) -> tuple[tuple[Op, ...], ...]:
    """Return the operations of every device of a plan in the order in which they start."""
    rows: list[list[Op]] = [[] for _ in range(plan.num_devices)]
    for bar in sorted(plan.bars, key=lambda bar: (bar.start_ns, bar.end_ns)):
        columns = [bar.device] if bar.op.is_encoder else range(bar.device, plan.num_devices, plan.schedule.num_ranks)
        for device in columns:
            rows[device] += [bar.op._replace(segment=bar.op.segment + number) for number in range(bar.num_segments)]
    return tuple(map(tuple, rows))
