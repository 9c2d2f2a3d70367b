"""Agreement of the ranks of one job.

    find_ranks() -> Ranks;  Ranks.settle(topic, proposal) -> the proposal of the first rank to arrive

Note [What ranks agree on]
    Plans cannot make ranks deadlock in each other's collectives: every segment with a collective comes after the
    previous one in graph order (`passes/capture.py`), every plan and program is checked for that, and Inductor keeps
    the same order. Agreement is needed since two variants of a graph differ in the last bits, so parameters that tensor
    parallelism keeps equal on all ranks would drift apart.

    Therefore the ranks settle, once, when a graph is compiled: the costs and plan of the graph, and which library
    computes its matmuls. They neither compare variants nor plan again: a step in which one rank runs another variant
    than the others measures neither.

    The first rank to arrive decides, by one compare-and-set in the store of the default process group; the others take
    the value that they find there. No rank ever waits for another, so a graph that one rank compiles and another never
    sees (a modality absent from its batch) blocks nobody. A vote or an average would need all ranks.

    A topic identifies the segments of the graph, the number of units, and how often the rank has compiled these
    segments (for any number of units); not the graph's position in the program. A rank with other segments (another
    pipeline stage) settles other topics, and decides alone if no other rank has them. No step talks to the store.

    If a plan is too large for the store, the proposal is that the graph falls back. A rank stops with a `RankError`,
    now and at every later decision, when the store does not answer, since the decision of the others is unknown, and
    when the settled value is of another version, damaged, not legal for its segments, or cannot be run here. The other
    ranks notice at the next collective, as with any error on one rank.

    If the process group has no store (a property of its kind, so equal on all ranks), nothing can be settled, and every
    graph falls back on every rank. If a graph cannot be captured, or its segments cannot be compiled, before it has a
    topic, it falls back on that rank alone, with a WARNING; its collectives keep their order.

A process is one of several ranks as long as its group lives: its measurements are disturbed by other ranks, so they are
not findings for a single process.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from typing import Any, Protocol

from apollo_compile.errors import RankError
from apollo_compile.version import __version__

_logger = logging.getLogger(__name__)

MAX_BYTES = 4 * 2**20
"""Largest proposal. A TCPStore closes a connection that sends more than 8 MiB."""

SAME_EVERYWHERE = "give every rank the same versions of apollo_compile and torch, the same options, and as many cores"


class RankStore(Protocol):
    """The used interface of a store of torch.distributed."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key to `desired` if its value is `expected` (empty: no value); return its value afterwards."""


class Ranks:
    """The ranks of a job, from the view of one rank.

    Arguments:
        store: the store that the ranks share; None if there is none.
        is_alone: whether there is only one rank; None means that there is if there is no store.
    """

    def __init__(self, store: RankStore | None, *, is_alone: bool | None = None) -> None:
        self.is_alone = store is None if is_alone is None else is_alone
        self.can_agree = self.is_alone or store is not None
        """Whether values can be settled; several ranks need a store for it."""
        self._store = store
        self._lock = threading.Lock()
        self._num_graphs = 0
        self._times_seen: Counter[str] = Counter()
        self._has_logged_difference = False
        self._failure: str | None = None

    def fail(self, why: str, remedy: str = SAME_EVERYWHERE) -> RankError:
        """Return the error with which this rank stops; every later `settle` and `check` raises it again."""
        if self._failure is None:
            self._failure = (
                f"this rank stops, since it cannot run the programs of the other ranks: {why}; {remedy}, or set "
                "APOLLO_DISABLE=1 on all ranks"
            )
        return RankError(self._failure)

    def check(self) -> None:
        """Raise the error of `fail` again, if there was one.

        Raises:
            RankError: this rank has failed.
        """
        if self._failure is not None:
            raise RankError(self._failure)

    def enroll(self, graph: str, name: str, *, units: int = 1) -> str:
        """Return the topic of one more compiled graph; ranks that compile the same graphs get the same topics.

        Arguments:
            graph: fingerprint of its segments.
            name: name of the graph in log lines.
            units: number of units that it is planned for; ranks with another number cannot run the same plans.
        """
        with self._lock:
            number, self._num_graphs = self._num_graphs, self._num_graphs + 1
            self._times_seen[graph] += 1
            topic = f"{graph} on {units}/{self._times_seen[graph]}"
        if self.settle(f"graph {number}", topic) != topic and not self._has_logged_difference:
            self._has_logged_difference = True
            _logger.info(
                "%s is not the graph that another rank compiled in its place: ranks agree only on graphs with the same "
                "segments and number of cores, and decide alone about other graphs",
                name,
            )
        return topic

    def settle(self, topic: str, proposal: str) -> str:
        """Return the first proposal under this topic, which is `proposal` on the first rank. Waits for no other rank.

        Raises:
            RankError: the settled value is unknown: the store failed, now or earlier, or another version of this
                package has written to it.
        """
        self.check()
        if self.is_alone:
            return proposal
        try:
            if self._store is None:
                raise ValueError("the process group has no store")
            if len(proposal) > MAX_BYTES:
                raise ValueError(f"a proposal of {len(proposal)} bytes is too large for the store")
            settled = self._store.compare_set(topic, "", f"{__version__}\n{proposal}").decode()
        except Exception as error:  # errors depend on the kind of store
            reason = str(error).partition("\n")[0]
            why = f"{topic!r} was not settled with them: {type(error).__name__}: {reason}"
            raise self.fail(why, "start the job again from its last checkpoint") from error
        version, _, text = settled.partition("\n")
        if version != __version__:
            raise self.fail(f"{topic!r} was settled by apollo_compile {version[:20]!r}, and this is {__version__!r}")
        return text


_ranks_lock = threading.Lock()
_ranks: weakref.WeakKeyDictionary[object, Ranks] = weakref.WeakKeyDictionary()
"""Ranks by default process group; guarded by `_ranks_lock`."""


def find_ranks() -> Ranks:
    """Return the ranks of the default process group, the same object as long as that group lives."""
    import torch.distributed as dist  # reports import this file indirectly, and must work without torch

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return Ranks(None)
    with _ranks_lock:
        group = dist.group.WORLD
        if group not in _ranks:
            _ranks[group] = Ranks(_open_store(group), is_alone=False)
        return _ranks[group]


def _open_store(group: Any) -> RankStore | None:
    import torch.distributed as dist

    try:  # a separate connection, so that its errors do not affect the process group
        store: RankStore = dist.PrefixStore("apollo_compile", group.get_group_store().clone())  # type: ignore[attr-defined]
        return store
    except dist.DistError as error:  # other ranks may have reached the store
        raise RankError(f"this rank stops, since it cannot reach the store of its process group: {error}") from error
    except Exception as error:  # a group without a store, or a store that cannot be cloned
        _logger.warning(
            "Inductor runs all graphs, since ranks cannot agree on plans: their process group has no store: %s: %s",
            type(error).__name__,
            str(error).partition("\n")[0],
        )
        return None
