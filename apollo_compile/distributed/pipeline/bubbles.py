"""Free time of the devices of a pipeline: before, between and after its operations.

    PipelineTimeline(simulate(...), ...).walk(rank, ...) -> free intervals

Only pauses move the pipeline's operations: a pause delays all operations that start at its time or later by its
duration. It breaks no dependency, since operations keep their order, and opens a bubble of that length on every rank.
"""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Iterator, Sequence

from apollo_compile.distributed.pipeline.simulate import end_of
from apollo_compile.distributed.pipeline.values import Bar, Kind, Op, Pause, PipelineSchedule, StageTimes

FOREVER = 2**62
"""End of unlimited free time."""


class PipelineTimeline:
    """Times of the operations of a pipeline, with the pauses so far.

    Arguments:
        plain: operations without pauses, by rank and start.
        schedule: the pipeline.
        times: durations of its stages.
    """

    def __init__(self, plain: Sequence[Bar], schedule: PipelineSchedule, times: StageTimes) -> None:
        self.num_ranks = schedule.num_ranks
        self.times = times
        self._plain = plain
        self.plain_ns = end_of(self._plain, times)
        """Duration of a step without pauses."""
        self._starts: list[list[int]] = [[] for _ in range(schedule.num_ranks)]
        self._durations: list[list[int]] = [[] for _ in range(schedule.num_ranks)]
        self._start_of: dict[Op, int] = {}
        for bar in self._plain:
            self._starts[bar.device].append(bar.start_ns)
            self._durations[bar.device].append(bar.end_ns - bar.start_ns)
            self._start_of[bar.op] = bar.start_ns
        self._times: list[int] = []
        self._delays = [0]

    def without_pauses(self) -> PipelineTimeline:
        """Return a timeline of the same operations without pauses; it shares the unchanged data."""
        other = copy.copy(self)
        other._times, other._delays = [], [0]
        return other

    @property
    def pauses(self) -> tuple[Pause, ...]:
        """The pauses so far, by time."""
        lengths = (later - now for now, later in itertools.pairwise(self._delays))
        return tuple(map(Pause, self._times, lengths))

    def pause(self, at_ns: int, duration_ns: int) -> None:
        """Add a pause; `at_ns` is a time on the timeline without pauses, not before earlier pauses."""
        assert not self._times or at_ns >= self._times[-1]
        self._times.append(at_ns)
        self._delays.append(self._delays[-1] + duration_ns)

    def shifted(self, plain_ns: int) -> int:
        """Return the start of an operation that starts at `plain_ns` without pauses."""
        return plain_ns + self._delays[bisect.bisect_right(self._times, plain_ns)]

    def plain_start(self, kind: Kind, microbatch: int, stage: int) -> int:
        """Return the start of an operation without pauses."""
        return self._start_of[Op(kind, microbatch, stage)]

    def start_of(self, kind: Kind, microbatch: int, stage: int) -> int:
        """Return the start of an operation."""
        return self.shifted(self.plain_start(kind, microbatch, stage))

    def end_of(self, kind: Kind, microbatch: int, stage: int) -> int:
        """Return the end of an operation."""
        op = Op(kind, microbatch, stage)
        return self.shifted(self._start_of[op]) + self.times.duration_ns(op)

    @property
    def pipeline_end_ns(self) -> int:
        """End of the last operation."""
        return self.plain_ns - self.times.trail_ns + self._delays[-1]

    def bars(self) -> tuple[Bar, ...]:
        """Return the operations by rank and start."""
        return tuple(
            bar._replace(start_ns=(start := self.shifted(bar.start_ns)), end_ns=start + bar.end_ns - bar.start_ns)
            for bar in self._plain
        )

    def first_start(self, rank: int) -> int:
        """Return the start of the first operation of a rank."""
        return self.shifted(self._starts[rank][0])

    def num_before(self, rank: int, plain_ns: int) -> int:
        """Return the number of operations of a rank that start before `plain_ns` without pauses."""
        return bisect.bisect_left(self._starts[rank], plain_ns)

    def num_operations(self, rank: int) -> int:
        """Return the number of operations of a rank."""
        return len(self._starts[rank])

    def walk(self, rank: int, index: int, from_ns: int, stop: int, least_ns: int) -> Iterator[tuple[int, int, int]]:
        """Yield (index, begin, end) of the free time of a rank, from a time on.

        Arguments:
            rank: the rank.
            index: index of the operation before or during which `from_ns` is.
            from_ns: start of the walk.
            stop: index of the operation before which free time is unlimited: operations from it on may pause.
            least_ns: least length of free time to yield.
        """
        starts, durations = self._starts[rank], self._durations[rank]
        begin = self.shifted(starts[index - 1]) + durations[index - 1] if index else 0
        begin = max(begin, from_ns)
        while index < stop:
            start = self.shifted(starts[index])
            if start - begin >= least_ns:
                yield index, begin, start
            begin = max(begin, start + durations[index])
            index += 1
        yield index, begin, FOREVER


def bubbles_of(bars: Sequence[Bar], num_devices: int, num_ranks: int, end_ns: int) -> list[list[tuple[int, int]]]:
    """Return, by device, the idle intervals of a step."""
    found = []
    for device in range(num_devices):
        own = [b for b in bars if (b.device == device if b.op.is_encoder else b.device == device % num_ranks)]
        free, begin = [], 0
        for bar in sorted(own, key=lambda bar: bar.start_ns):
            if bar.start_ns > begin:
                free.append((begin, bar.start_ns))
            begin = max(begin, bar.end_ns)
        if end_ns > begin:
            free.append((begin, end_ns))
        found.append(free)
    return found
