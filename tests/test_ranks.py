"""What ranks settle in common, and that none of them waits for another."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from apollo_compile.ranks import MAX_BYTES, Ranks, find_ranks


class BrokenStore:
    """A store whose host is gone."""

    def __init__(self) -> None:
        self.num_calls = 0

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        self.num_calls += 1
        raise dist.DistNetworkError("Connection reset by peer\nat a long stack")


def test_the_first_rank_decides_and_nobody_waits() -> None:
    """Also a topic that no other rank ever asks for is settled at once."""
    store = dist.HashStore()
    first, second = Ranks(store), Ranks(store)
    assert first.settle("plan", "mine") == "mine"
    assert second.settle("plan", "other") == "mine"
    assert second.settle("its own", "other") == "other"
    assert not first.is_alone


def test_ranks_at_once_settle_on_one_proposal() -> None:
    """Whoever it is."""
    store = dist.HashStore()
    results: list[str] = []
    start = threading.Barrier(8)

    def decide(rank: int) -> None:
        start.wait(60)
        results.append(Ranks(store).settle("topic", f"rank {rank}"))

    threads = [threading.Thread(target=decide, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 8
    assert len(set(results)) == 1


def test_a_process_alone_decides_alone() -> None:
    """Without a process group there is nobody to ask."""
    ranks = find_ranks()
    assert ranks.is_alone
    assert ranks.settle("topic", "mine") == "mine"


@pytest.fixture
def group() -> Iterator[Callable[[], dist.ProcessGroup]]:
    """Return a function that makes the default process group anew, of two ranks that never talk to each other."""
    from torch.testing._internal.distributed.fake_pg import FakeProcessGroup  # noqa: F401  # registers the backend

    def make() -> dist.ProcessGroup:
        end()
        dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def end() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    yield make
    end()


def test_the_ranks_of_a_process_group_live_and_end_with_it(group: Callable[[], dist.ProcessGroup]) -> None:
    """Nothing of ours keeps the group; the next one has ranks of its own."""
    first = weakref.ref(group())
    ranks = find_ranks()
    assert find_ranks() is ranks and not ranks.is_alone
    group()
    assert find_ranks() is not ranks
    gc.collect()
    assert first() is None


def test_a_group_without_a_store_is_of_several_ranks_all_the_same(
    group: Callable[[], dist.ProcessGroup], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each decides alone, which one line says."""
    monkeypatch.setattr(dist.ProcessGroup, "get_group_store", lambda _: None)
    group()
    ranks = find_ranks()
    assert not ranks.is_alone
    assert ranks.settle("plan", "mine") == "mine" and ranks.settle("plan", "other") == "other"
    assert len(caplog.records) == 1


def test_graphs_have_the_same_topic_on_ranks_that_compile_them(caplog: pytest.LogCaptureFixture) -> None:
    """A rank that compiles one more in between finds the others; that is said once."""
    store = dist.HashStore()
    first, second = Ranks(store), Ranks(store)
    with caplog.at_level(logging.INFO, logger="apollo_compile"):
        usual = [first.enroll(graph, graph) for graph in ("forward", "backward", "forward")]
        assert len(set(usual)) == 3
        found = {graph: second.enroll(graph, graph) for graph in ("only here", "forward", "backward")}
    assert [found["forward"], found["backward"]] == usual[:2]
    assert found["only here"] not in usual
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("only here is not the graph that another rank compiled in its place")


def test_a_graph_that_ranks_planned_for_different_numbers_of_cores_is_counted_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They decide alone about it, which is said, and in common when the same segments come again."""
    store = dist.HashStore()
    first, second = Ranks(store), Ranks(store)
    with caplog.at_level(logging.INFO, logger="apollo_compile"):
        assert first.enroll("layers", "graph0", units=2) != second.enroll("layers", "graph0", units=1)
        assert first.enroll("layers", "graph1", units=2) == second.enroll("layers", "graph1", units=2)
        third = Ranks(store)  # one that could not make the first of them
        assert third.enroll("layers", "graph0", units=2) != first.enroll("layers", "graph2", units=2)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["graph0"]


def test_a_store_that_fails_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    """One line, and the rank decides alone."""
    store = BrokenStore()
    ranks = Ranks(store)
    assert ranks.settle("round 3", "mine") == "mine"
    assert not ranks.is_alone, "it would keep for a process of its own what it measured beside others"
    assert ranks.settle("round 4", "mine") == "mine"
    assert store.num_calls == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "this rank decides alone from now on: round 3 was not settled with the others: DistNetworkError: Connection "
        "reset by peer"
    )


def test_a_proposal_too_large_for_a_store_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    """It would cost the connection."""
    store = dist.HashStore()
    ranks = Ranks(store)
    large = "x" * (MAX_BYTES + 1)
    assert ranks.settle("plan", large) == large
    assert "too large" in caplog.text
    assert Ranks(store).settle("plan", "small") == "small"
