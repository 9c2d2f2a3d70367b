"""Graphs with dynamic shapes: one set of bodies, and a plan for every bucket of sizes.

    sizes of a call -> bucket -> the graph that is planned for it

Segments, their order and their code are the same for every size, so any plan is correct for all sizes; durations change
with the sizes, and with them the best plan. So each bucket has its own plan, which learns from its own runs and has its
own comparison, like a graph with static shapes.

Bucket      A size up to 8 is its own bucket; above, there are four buckets per doubling. Sizes in one bucket differ by
            less than a quarter.
            Symbols on which neither bytes nor work depend (a number that is only added) do not count.
New bucket  Its first calls run on the plan of the nearest bucket, by the logarithms of the sizes. When it is called
            again, its own plan is made in the background, on one thread per process, which mostly waits for the
            planner's process (`planner/apart.py`): neither a step nor the end of the program waits for a plan. A graph
            plans one new bucket at a time; other new buckets wait for their next call.
Bounds      At most `MAX_BUCKETS` plans are kept per graph; the least recently used one is evicted. The number of calls
            before a bucket is planned doubles with every `MAX_BUCKETS` plans made, so that widely varying sizes do not
            keep the planner busy for ever.

Guarantees: no plan is made twice for a bucket that is kept; if planning fails, there is one WARNING, and the bucket
runs on the plan of its neighbour from then on.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import math
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from apollo_compile.planner.apart import end_planning
from apollo_compile.torch_bridge.boundary import Boundary

_logger = logging.getLogger(__name__)

MAX_BUCKETS = 16

FIRST_PATIENCE = 2
"""Calls of a new bucket before it is planned, for the first `MAX_BUCKETS` plans."""

_MOST_COUNTED = 1024
"""New buckets whose calls are counted; beyond that, counts are reset."""

Bucket = tuple[int, ...]
"""Per symbol, the largest size in its bucket."""

_Result = TypeVar("_Result")


class Planned(Protocol):
    """A graph that is planned for the sizes of one bucket."""

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Run it, and learn from that."""

    def run_once(self, inputs: list[Any]) -> Sequence[Any]:
        """Run it for sizes of another bucket, without learning from their durations."""


_Graph = TypeVar("_Graph", bound=Planned)


def bucket_of(size: int) -> int:
    """Return the largest size of the bucket that `size` is in.

    A negative number is in the bucket of its absolute value.

    >>> [bucket_of(size) for size in (1, 8, 9, 10, 11, 64, 65, 80, 81)]
    [1, 8, 10, 10, 12, 64, 80, 80, 96]
    """
    size = abs(size)
    if size <= 8:
        return size
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


class GraphFamily(Generic[_Graph]):
    """The plans of one graph, by bucket: callable as AOTAutograd calls the graph.

    Arguments:
        name: name of the graph, for messages.
        boundary: has the positions of the sizes among the inputs.
        symbols: the symbols of the boundary on which plans depend.
        sizes: the values of all symbols when `first` was planned.
        first: the graph as planned for `sizes`.
        make: plans the graph for other sizes; called in the background.
        drop: called with a graph that was evicted.
        is_strict: re-raise an error of `make` in the next call.
    """

    def __init__(
        self,
        *,
        name: str,
        boundary: Boundary,
        symbols: Collection[str],
        sizes: Mapping[str, int],
        first: _Graph,
        make: Callable[[Mapping[str, int]], _Graph],
        drop: Callable[[_Graph], None],
        is_strict: bool,
    ) -> None:
        self._boxed_call = True
        self._name = name
        self._boundary = boundary
        self._symbols = tuple(name for name, _ in boundary.symbols if name in symbols)
        self._make = make
        self._drop = drop
        self._is_strict = is_strict
        self._graphs: dict[Bucket, _Graph] = {self._bucket(sizes): first}
        """One graph may serve several buckets."""
        self._used: dict[Bucket, int] = dict.fromkeys(self._graphs, 0)
        self._clock = itertools.count(1)
        self._num_planned = 0
        self._missed: Counter[Bucket] = Counter()
        """Calls of buckets without a plan."""
        self.latest = first
        """The graph that ran last on a plan for its sizes."""
        self._planning: Future[None] | None = None
        self._lock = threading.Lock()
        """Guards all of these while they change."""

    @property
    def buckets(self) -> Mapping[Bucket, _Graph]:
        """The graphs with a plan, by bucket."""
        return dict(self._graphs)

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the graph on the plan of its bucket, or on that of the nearest bucket while it is being made."""
        sizes = {name: inputs[position] for name, position in self._boundary.symbols}
        bucket = self._bucket(sizes)
        taken = self._boundary.take(inputs)
        graph = self._graphs.get(bucket)
        if graph is None:
            outputs = self._nearest_graph(bucket, sizes).run_once(inputs)
        else:
            self._used[bucket] = next(self._clock)
            self.latest = graph
            outputs = graph(inputs)
        return self._boundary.give(outputs, taken)

    def _bucket(self, sizes: Mapping[str, int]) -> Bucket:
        return tuple(bucket_of(sizes[name]) for name in self._symbols)

    def _nearest_graph(self, bucket: Bucket, sizes: Mapping[str, int]) -> _Graph:
        """Return the graph of the nearest bucket; request a plan for this bucket if it was called often enough."""
        with self._lock:
            nearest = min(self._graphs, key=lambda other: _distance(bucket, other))
            if bucket in self._graphs:  # it was planned in the meantime
                return self._graphs[bucket]
            if len(self._missed) >= _MOST_COUNTED:
                self._missed.clear()
            self._missed[bucket] += 1
            if self._missed[bucket] < FIRST_PATIENCE * 2 ** (self._num_planned // MAX_BUCKETS):
                return self._graphs[nearest]
            if self._planning is None or self._planning.done():
                failed = None if self._planning is None else self._planning.exception()
                self._planning = None
                if failed is not None and self._is_strict:
                    raise failed
                self._planning = in_background(functools.partial(self._plan, bucket, dict(sizes), nearest))
            return self._graphs[nearest]

    def _plan(self, bucket: Bucket, sizes: Mapping[str, int], nearest: Bucket) -> None:
        try:
            graph = self._make(sizes)
        except Exception as error:
            if self._is_strict:
                raise
            shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
            _logger.warning("%s has no plan of its own for %s: %s: %s", self._name, shown, type(error).__name__, error)
            graph = self._graphs[nearest]
        with self._lock:
            self._num_planned += 1
            del self._missed[bucket]
            kept = {**self._graphs, bucket: graph}
            self._used = {other: self._used.get(other, 0) for other in self._graphs} | {bucket: next(self._clock)}
            if len(kept) > MAX_BUCKETS:
                oldest = min(kept, key=lambda other: self._used[other])
                dropped = kept.pop(oldest)
                del self._used[oldest]
                if dropped not in kept.values():
                    self._drop(dropped)
            self._graphs = kept


def _distance(first: Bucket, second: Bucket) -> float:
    return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in zip(first, second, strict=True))


def in_background(work: Callable[[], _Result]) -> Future[_Result]:
    """Queue `work` on the planning thread.

    At the end of the program nothing is started any more, and the future never completes.
    """
    try:
        planner = _planner()
    except RuntimeError:  # the interpreter is shutting down: no new threads
        return Future()
    return planner.submit(work)


def at_once(work: Callable[[], _Result]) -> Future[_Result]:
    """Do `work` now and return a completed future."""
    future: Future[_Result] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # raised again by `result()`
        future.set_exception(error)
    return future


_END_LIMIT_S = 10.0
"""How long the end of the program waits for a plan in progress; list schedules, which take over then, take less."""


class _Planner:
    """A thread that runs tasks in order, and that the end of the program does not wait for.

    A `ThreadPoolExecutor` would not do: Python joins its threads before exit handlers run, and the task may be waiting
    for a process that only an exit handler ends.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_ending = False
        self._thread = threading.Thread(target=self._work, name="apollo-plan", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Queue `work` behind all earlier tasks."""
        future: Future[_Result] = Future()

        def do() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._tasks.put(do)
        return future

    def end(self) -> None:
        """Start no more tasks; wait for the running one, since a thread in native code must not outlive Python."""
        self._is_ending = True
        self._tasks.put(lambda: None)
        self._thread.join(_END_LIMIT_S)

    def _work(self) -> None:
        while not self._is_ending:
            self._tasks.get()()  # no variable: it would keep the task alive until the next one


@functools.cache
def _planner() -> _Planner:
    return _Planner()


@atexit.register
def _end() -> None:
    end_planning()
    if _planner.cache_info().currsize:
        _planner().end()


os.register_at_fork(after_in_child=_planner.cache_clear)  # a forked process has no threads but its own
