"""What the ranks of one job decide in common, and how.

    find_ranks() -> Ranks;  Ranks.settle(topic, proposal) -> what the first rank proposed

Note [What ranks agree on]
    Whatever the plans are, ranks cannot wait for each other's collectives for ever: every segment with a collective
    comes after the one before it in graph order (`passes/capture.py`), every plan and program is checked for that, and
    Inductor keeps the same order. So agreement is not needed for progress, but for two other reasons. Two ways of
    running a graph differ in the last bits, and parameters that tensor parallelism keeps equal on all ranks would drift
    apart. And a step that one rank runs by its plan and another by Inductor's code measures neither.

    Therefore these things are settled in common: the costs and plan of every graph, which library computes its matrix
    products, every later plan, and the times of every round of a contest. All that follows from them (which entrant
    leaves, who wins, what the next step runs) is a function of what was settled and of the number of steps, so all
    ranks switch at the same step.

    The first rank to arrive decides, by one compare-and-set in the store of the default process group; the others take
    what they find there. Nobody ever waits for another rank, so a graph that one rank compiles and another never sees
    (a modality absent from its batch) blocks nobody. A vote or an average would need all ranks to be there. Ranks that
    a collective holds in step measure about the same, so it hardly matters which one is first.

    A topic names the segments of the graph, its number of units, and how often the rank has compiled these segments,
    for whatever units; not its place in the program. A rank with other segments (another stage of a pipeline) settles
    other topics, and decides alone where nobody else has them. After the verdict nothing is settled any more, and so no
    step talks to the store: with several ranks there is no contest after a drift.

If the store fails, that is one WARNING, and the rank decides alone from then on. It is still one of several: what it
measures is measured beside the others, and so is no finding for a process of its own.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from typing import Any, Protocol

_logger = logging.getLogger(__name__)

MAX_BYTES = 4 * 2**20
"""Of a proposal. A TCPStore closes the connection that sends more than 8 MiB."""


class Store(Protocol):
    """What is needed of a store of torch.distributed."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key to `desired` if its value is `expected`, which is empty for none, and return what it has then."""


class Ranks:
    """The ranks of a job, as one of them sees them.

    Arguments:
        store: where they meet; None if they cannot.
        is_alone: whether there is one only; by default so without a store.
    """

    def __init__(self, store: Store | None, *, is_alone: bool | None = None) -> None:
        self.is_alone = store is None if is_alone is None else is_alone
        """Not so after the store failed: the others are there still."""
        self._store = store
        self._lock = threading.Lock()
        self._num_graphs = 0
        self._times_seen: Counter[str] = Counter()
        self._has_told = False

    def enroll(self, graph: str, name: str, *, units: int = 1) -> str:
        """Return the topic of one more compiled graph; ranks that compile the same graphs get the same topics.

        Arguments:
            graph: fingerprint of its segments.
            name: what to call it in the log.
            units: for how many it is planned; who has another number cannot run the same plans.
        """
        with self._lock:
            number, self._num_graphs = self._num_graphs, self._num_graphs + 1
            self._times_seen[graph] += 1
            topic = f"{graph} on {units}/{self._times_seen[graph]}"
        if self.settle(f"graph {number}", topic) != topic and not self._has_told:
            self._has_told = True
            _logger.info(
                "%s is not the graph that another rank compiled in its place: ranks decide in common for graphs with "
                "the same segments on as many cores only, and each for itself about the others",
                name,
            )
        return topic

    def settle(self, topic: str, proposal: str) -> str:
        """Return what the first rank proposed under this topic: `proposal`, if it is this one. Waits for no rank."""
        if self._store is None:
            return proposal
        try:
            if len(proposal) > MAX_BYTES:
                raise ValueError(f"a proposal of {len(proposal)} bytes is too large for the store")
            return self._store.compare_set(topic, "", proposal).decode()
        except Exception as error:  # whatever the store's kind raises; training goes on
            self._store = None
            _logger.warning(
                "this rank decides alone from now on: %s was not settled with the others: %s: %s",
                topic,
                type(error).__name__,
                str(error).partition("\n")[0],
            )
            return proposal


_ranks_lock = threading.Lock()
_ranks: weakref.WeakKeyDictionary[object, Ranks] = weakref.WeakKeyDictionary()
"""By default process group, of which there is one at a time; guarded by `_ranks_lock`."""


def find_ranks() -> Ranks:
    """Return the ranks of the default process group; the same object as long as that group lives."""
    import torch.distributed as dist  # reports know the contest, which knows this file, and are read without torch

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return Ranks(None)
    with _ranks_lock:
        group = dist.group.WORLD
        if group not in _ranks:
            _ranks[group] = Ranks(_open_store(group), is_alone=False)
        return _ranks[group]


def _open_store(group: Any) -> Store | None:
    import torch.distributed as dist

    try:  # a connection of its own: what goes wrong with it is not the process group's trouble
        store: Store = dist.PrefixStore("apollo_compile", group.get_group_store().clone())  # type: ignore[attr-defined]
        return store
    except Exception as error:  # a group without a store, or one of a kind that cannot be shared
        _logger.warning("this rank decides alone: its process group has no store: %s: %s", type(error).__name__, error)
        return None
