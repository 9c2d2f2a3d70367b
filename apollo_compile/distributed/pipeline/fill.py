"""Fill the bubbles of a pipeline with the work of encoders.

    (Schedule, StageTimes, encoders) -> FilledPlan

Every micro-batch of every encoder is given to a replica, and its segments to free time of that replica's devices:

(1) features    the forward of micro-batch i ends before stage `feeds` starts its forward of i     EF_i <= F_i
(2) gradients   the backward of i starts after stage `feeds` has ended its backward of i           EB_i >= B_i
(3) order       stages of an encoder in turn, segments in turn, backward after forward, on one replica
(4) devices     one thing at a time; segments are not interrupted
(5) memory      at most `max_live` micro-batches per replica are between begin of forward and end of backward

FINE takes micro-batches in order. Each goes to the replica that would have its features first, in bubbles and, if that
is later than (1) allows, in a pause of the pipeline just before F_i, of the least length. For equal encoder work this
gives the earliest possible ends, sorted, on every replica; a pause as late as possible comes after all bubbles before
it are used. A replica at its limit (5) first runs its oldest backward. All other backwards follow in the order of B_i,
in free time, if necessary after the pipeline's end. Then single micro-batches move from the replica that ends last to
another one, as long as the step gets shorter. If COARSE is shorter, it is the plan.

COARSE places colocated encoders without bubbles: forwards before a rank's first operation, backwards after its last
one, one pause at the start.

Method: Optimus (arXiv 2408.03505), with earliest-end assignment and pauses in place of its enumeration of splits.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from apollo_compile.distributed.pipeline.bubbles import PipelineTimeline
from apollo_compile.distributed.pipeline.simulate import simulate, stages_of
from apollo_compile.distributed.pipeline.values import (
    Bar,
    Encoder,
    FilledPlan,
    Filling,
    Kind,
    Op,
    PipelineSchedule,
    StageTimes,
    count_devices,
)
from apollo_compile.errors import PipelinePlanError

MAX_MOVES = 48
"""Number of moves of a micro-batch to another replica that are tried."""

ReplicaOf = tuple[tuple[int, ...], ...]
"""Replica by encoder and micro-batch."""


def fill(
    schedule: PipelineSchedule, times: StageTimes, encoders: Sequence[Encoder], *, filling: Filling = Filling.FINE
) -> FilledPlan:
    """Return the plan of a step.

    Raises:
        PipelinePlanError: an encoder does not fit the pipeline, or no order meets its limit of live micro-batches.
    """
    for encoder in encoders:
        _require_fitting(encoder, schedule)
    line = _timeline(schedule, times)
    found: list[_Filler] = []
    failure: PipelinePlanError | None = None
    for way in dict.fromkeys((filling, Filling.COARSE)):
        problem = _Problem(schedule=schedule, times=times, encoders=tuple(encoders), filling=way, line=line)
        try:
            found.append(_improve(problem, _Filler(problem, None)))
        except PipelinePlanError as error:
            failure = failure or error
    if failure is not None and not found:
        raise failure
    return min(found, key=lambda filler: filler.step_ns).plan()


@functools.lru_cache(maxsize=1)
def _timeline(schedule: PipelineSchedule, times: StageTimes) -> PipelineTimeline:
    """Return the pipeline without encoders, cached for repeated fills of one pipeline."""
    return PipelineTimeline(simulate(schedule, times), schedule, times)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    schedule: PipelineSchedule
    times: StageTimes
    encoders: tuple[Encoder, ...]
    filling: Filling
    line: PipelineTimeline
    """The pipeline without encoders."""


def _improve(problem: _Problem, best: _Filler) -> _Filler:
    """Return the filler after the moves that make its step shorter; at most `MAX_MOVES` are tried."""
    others = _moved(problem, best)
    for _ in range(MAX_MOVES):
        other = next(others, None)
        if other is None:
            break
        if other.step_ns < best.step_ns:
            best, others = other, _moved(problem, other)
    return best


def _moved(problem: _Problem, filler: _Filler) -> Iterator[_Filler]:
    """Yield fillers with the last micro-batch of the replica that ends the step on another one."""
    last = filler.last_bar()
    if last is None or last.end_ns < filler.step_ns:
        return
    index, microbatch = last.op.encoder, last.op.microbatch
    places = filler.replica_of[index]
    for other in range(len(problem.encoders[index].replicas)):
        if other != places[microbatch]:
            moved = (*places[:microbatch], other, *places[microbatch + 1 :])
            assignment = (*filler.replica_of[:index], moved, *filler.replica_of[index + 1 :])
            with contextlib.suppress(PipelinePlanError):  # the limit of live micro-batches
                yield _Filler(problem, assignment)


def _require_fitting(encoder: Encoder, schedule: PipelineSchedule) -> None:
    """Raise if an encoder does not fit this pipeline."""
    for stages in (encoder.forward_ns, encoder.backward_ns):
        if stages and any(len(replica) != len(stages) for replica in encoder.replicas):
            raise PipelinePlanError(
                f"encoder {encoder.name} has {len(stages)} stages, so each of its replicas needs as many devices; "
                f"got {encoder.replicas}"
            )
        if any(not segments or min(segments) < 1 for segments in stages):
            raise PipelinePlanError(
                f"encoder {encoder.name} needs at least one segment per stage, each of at least 1 ns; got {stages}"
            )
    if wrong := [device for replica in encoder.replicas for device in replica if device < 0]:
        raise PipelinePlanError(f"encoder {encoder.name} has a replica on device {wrong[0]}; device indices start at 0")
    if not encoder.forward_ns or not encoder.replicas:
        raise PipelinePlanError(f"encoder {encoder.name} needs at least one stage and one replica")
    if not 0 <= encoder.feeds < schedule.num_stages:
        raise PipelinePlanError(
            f"encoder {encoder.name} feeds stage {encoder.feeds}; "
            f"the pipeline has stages 0 to {schedule.num_stages - 1}"
        )
    if encoder.max_live is not None and encoder.max_live < 1:
        raise PipelinePlanError(f"encoder {encoder.name} needs max_live of at least 1, got {encoder.max_live}")


@dataclass(slots=True)
class _Cursor:
    """End of the used free time of a device."""

    index: int = 0
    """Operation of the pipeline before or during which it is."""
    at_ns: int = 0


class _Piece(NamedTuple):
    """Consecutive segments of a stage without gaps."""

    segment: int
    start_ns: int
    end_ns: int
    num_segments: int


@dataclass(slots=True)
class _Work:
    """Placement of a forward or backward of a micro-batch, perhaps after a backward that frees memory for it."""

    parts: list[tuple[Op, int, list[_Piece]]] = field(default_factory=list)
    """By stage: its first operation, its device, and its pieces."""
    cursors: dict[int, _Cursor] = field(default_factory=dict)
    """Cursors of the devices that it uses."""
    end_ns: int = 0


class _Filler:
    """Places the work of one step, with a given assignment or on the replica that has features first.

    Raises:
        PipelinePlanError: no order meets a limit of live micro-batches.
    """

    def __init__(self, problem: _Problem, assignment: ReplicaOf | None) -> None:
        self._problem = problem
        self._line = problem.line.without_pauses()
        self._is_coarse = problem.filling is Filling.COARSE
        num_devices = count_devices(problem.schedule, problem.encoders)
        self._cursors = [_Cursor() for _ in range(num_devices)]
        self._bars: list[list[Bar]] = [[] for _ in range(num_devices)]
        self._live: list[list[list[int]]] = [[[] for _ in encoder.replicas] for encoder in problem.encoders]
        """By encoder and replica, the micro-batches whose forward is placed and whose backward is not."""
        self._none_used: list[list[Bar]] = [[] for _ in range(num_devices)]
        self.replica_of = self._place_forwards(assignment)
        self._place_backwards()
        last = self.last_bar()
        end_ns = self._line.pipeline_end_ns + problem.times.trail_ns
        self.step_ns = end_ns if last is None else max(end_ns, last.end_ns)

    def last_bar(self) -> Bar | None:
        """Return the encoder's bar that ends last."""
        return max((bars[-1] for bars in self._bars if bars), key=lambda bar: bar.end_ns, default=None)

    def plan(self) -> FilledPlan:
        """Return the step as a plan."""
        problem = self._problem
        bars = (*self._line.bars(), *itertools.chain.from_iterable(self._bars))
        return FilledPlan(
            filling=problem.filling,
            schedule=problem.schedule,
            times=problem.times,
            encoders=problem.encoders,
            replica_of=self.replica_of,
            pauses=self._line.pauses,
            bars=tuple(sorted(bars, key=lambda bar: (bar.device, bar.start_ns, bar.end_ns))),
            plain_ns=self._line.plain_ns,
            step_ns=self.step_ns,
        )

    def _place_forwards(self, assignment: ReplicaOf | None) -> ReplicaOf:
        places: list[list[int]] = [[] for _ in self._problem.encoders]
        longest_ns = 0
        for at_ns, microbatch, index in self._reads():
            encoder = self._problem.encoders[index]
            allowed = range(len(encoder.replicas)) if assignment is None else (assignment[index][microbatch],)
            found = [
                (self._lateness_ns(work, microbatch, encoder), replica, work)
                for replica in allowed
                if (work := self._forward(microbatch, index, replica)) is not None
            ]
            if not found:
                raise self._too_many_live(microbatch, encoder)
            late_ns, replica, work = min(found, key=lambda item: item[:2])
            longest_ns = max(longest_ns, late_ns)
            if late_ns > 0 and not self._is_coarse:
                self._line.pause(at_ns, late_ns)
            self._commit(work)
            live = self._live[index][replica]
            if self._is_full(index, replica):
                del live[0]
            live.append(microbatch)
            places[index].append(replica)
        if longest_ns > 0 and self._is_coarse:
            self._line.pause(self._problem.times.lead_ns, longest_ns)
        return tuple(map(tuple, places))

    def _reads(self) -> list[tuple[int, int, int]]:
        """Return (time without pauses, micro-batch, encoder) of all reads of features, in order."""
        return sorted(
            (self._line.plain_start(Kind.FORWARD, microbatch, encoder.feeds), microbatch, index)
            for index, encoder in enumerate(self._problem.encoders)
            for microbatch in range(self._problem.schedule.num_microbatches)
        )

    def _is_full(self, index: int, replica: int) -> bool:
        limit = self._problem.encoders[index].max_live
        return limit is not None and len(self._live[index][replica]) >= limit

    def _forward(self, microbatch: int, index: int, replica: int) -> _Work | None:
        """Return the placement of a forward if the pipeline paused before it reads the features; None if impossible."""
        encoder, line, work, ready_ns = self._problem.encoders[index], self._line, _Work(), 0
        limit_ns = line.plain_start(Kind.FORWARD, microbatch, encoder.feeds)
        stops = [0 if self._is_coarse else line.num_before(rank, limit_ns) for rank in range(line.num_ranks)]
        if self._is_full(index, replica):
            oldest = self._live[index][replica][0]
            if self._is_coarse:
                return None
            if encoder.is_frozen:
                ready_ns = line.start_of(Kind.FORWARD, oldest, encoder.feeds)
            elif line.plain_start(Kind.BACKWARD, oldest, encoder.feeds) >= limit_ns:
                return None
            else:
                op = Op(Kind.ENCODER_BACKWARD, oldest, encoder=index)
                self._extend(work, op, replica, self._gradients_ns(oldest, index, replica), stops, self._none_used)
                ready_ns = work.end_ns
        op = Op(Kind.ENCODER_FORWARD, microbatch, encoder=index)
        self._extend(work, op, replica, ready_ns, stops, self._none_used)
        return work

    def _extend(
        self, work: _Work, op: Op, replica: int, ready_ns: int, stops: Sequence[int], used: Sequence[Sequence[Bar]]
    ) -> None:
        """Add the forward or backward that begins with `op` to `work`, as early as its devices are free."""
        encoder, transfer_ns = self._problem.encoders[op.encoder], self._problem.times.transfer_ns
        devices = encoder.replicas[replica]
        if op.kind is Kind.ENCODER_BACKWARD:
            devices = devices[::-1]
        previous = devices[0]
        for stage, (device, segments) in enumerate(zip(devices, stages_of(op.kind, encoder), strict=True)):
            cursor = work.cursors.get(device, self._cursors[device])
            arrival_ns = ready_ns + (transfer_ns if device != previous else 0)
            stop = stops[device % self._line.num_ranks]
            free = self._free(device, cursor, arrival_ns, stop, used[device], min(segments))
            pieces, work.cursors[device] = _put(segments, free)
            work.parts.append((op._replace(stage=stage), device, pieces))
            ready_ns, previous = pieces[-1].end_ns, device
        work.end_ns = ready_ns

    def _free(
        self, device: int, cursor: _Cursor, ready_ns: int, stop: int, used: Sequence[Bar], least_ns: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield index, begin and end of the free time of a device, without the placed bars."""
        next_used = 0
        from_ns = max(cursor.at_ns, ready_ns)
        rank = device % self._line.num_ranks
        for index, begin, end in self._line.walk(rank, cursor.index, from_ns, stop, least_ns):
            while next_used < len(used) and used[next_used].end_ns <= begin:
                next_used += 1
            while next_used < len(used) and used[next_used].start_ns < end:
                if used[next_used].start_ns > begin:
                    yield index, begin, used[next_used].start_ns
                begin = max(begin, used[next_used].end_ns)
                next_used += 1
            if end > begin:
                yield index, begin, end

    def _lateness_ns(self, work: _Work, microbatch: int, encoder: Encoder) -> int:
        """Return the pause of the pipeline that a forward needs, in nanoseconds."""
        line = self._line
        arrival_ns = work.end_ns + self._transfer_ns(work.parts[-1][1], encoder)
        late_ns = arrival_ns - line.start_of(Kind.FORWARD, microbatch, encoder.feeds)
        if self._is_coarse:
            ends = ((pieces[-1].end_ns, device % line.num_ranks) for _, device, pieces in work.parts)
            late_ns = max(late_ns, *(end_ns - line.first_start(rank) for end_ns, rank in ends))
        return late_ns

    def _gradients_ns(self, microbatch: int, index: int, replica: int) -> int:
        """Return the time at which a replica has the gradients of a micro-batch's features."""
        encoder = self._problem.encoders[index]
        arrival_ns = self._transfer_ns(encoder.replicas[replica][-1], encoder)
        return self._line.end_of(Kind.BACKWARD, microbatch, encoder.feeds) + arrival_ns

    def _transfer_ns(self, device: int, encoder: Encoder) -> int:
        """Return the transfer time between a device and the stage that reads the features."""
        is_there = device == encoder.feeds % self._line.num_ranks
        return 0 if is_there else self._problem.times.transfer_ns

    def _commit(self, work: _Work) -> None:
        for op, device, pieces in work.parts:
            self._bars[device] += [
                Bar(op._replace(segment=piece.segment), device, piece.start_ns, piece.end_ns, piece.num_segments)
                for piece in pieces
            ]
        for device, cursor in work.cursors.items():
            self._cursors[device] = cursor

    def _too_many_live(self, microbatch: int, encoder: Encoder) -> PipelinePlanError:
        line, num_microbatches = self._line, self._problem.schedule.num_microbatches
        most = num_microbatches
        if not self._is_coarse:
            starts = [line.plain_start(Kind.FORWARD, index, encoder.feeds) for index in range(num_microbatches)]
            backwards = [line.plain_start(Kind.BACKWARD, index, encoder.feeds) for index in range(num_microbatches)]
            most = max(
                sum(backward >= start for backward in backwards[: index + 1]) for index, start in enumerate(starts)
            )
        replicas = len(encoder.replicas)
        return PipelinePlanError(
            f"micro-batch {microbatch} of encoder {encoder.name} cannot start: each of {replicas} replicas holds "
            f"max_live = {encoder.max_live} others whose backwards come after it; "
            f"the pipeline has {most} at a time, so set max_live to at least {-(-most // replicas)}"
        )

    # ------------------------------------------------------------------------------------------------------ backwards

    def _place_backwards(self) -> None:
        line = self._line
        used = [list(bars) for bars in self._bars]
        stops = [line.num_operations(rank) for rank in range(line.num_ranks)]
        for device in range(len(self._cursors)):
            self._cursors[device] = _Cursor(stops[device % line.num_ranks] if self._is_coarse else 0)
        waiting = sorted(
            (self._gradients_ns(microbatch, index, replica), microbatch, index, replica)
            for index, replicas in enumerate(self._live)
            for replica, live in enumerate(replicas)
            for microbatch in live
            if not self._problem.encoders[index].is_frozen
        )
        for ready_ns, microbatch, index, replica in waiting:
            work = _Work()
            self._extend(work, Op(Kind.ENCODER_BACKWARD, microbatch, encoder=index), replica, ready_ns, stops, used)
            self._commit(work)


def _put(segments: Sequence[int], free: Iterator[tuple[int, int, int]]) -> tuple[list[_Piece], _Cursor]:
    """Place segments in order into unlimited free time; return their pieces and the new cursor."""
    pieces: list[_Piece] = []
    index, begin, end = next(free)
    segment = 0
    for duration_ns, equal in itertools.groupby(segments):
        count = len(list(equal))
        while count:
            fitting = min(count, (end - begin) // duration_ns)
            if fitting > 0:
                after = begin + fitting * duration_ns
                pieces.append(_Piece(segment, begin, after, fitting))
                segment, count, begin = segment + fitting, count - fitting, after
            if count:
                index, begin, end = next(free)
    return pieces, _Cursor(index, begin)
