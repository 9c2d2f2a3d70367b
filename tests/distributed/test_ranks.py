"""What ranks settle in common, and that none of them waits for another."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from apollo_compile import __version__
from apollo_compile.distributed.ranks import MAX_BYTES, Ranks, find_ranks
from apollo_compile.errors import RankError
from apollo_compile.session import registry
from tests.builders import in_threads


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

    in_threads(decide, 8)
    assert len(results) == 8 and len(set(results)) == 1


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


def test_without_a_store_nothing_is_settled(
    group: Callable[[], dist.ProcessGroup], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a property of the group's kind, so that Inductor runs all graphs on all ranks; one line says why."""
    monkeypatch.setattr(dist.ProcessGroup, "get_group_store", lambda _: None)
    group()
    ranks = find_ranks()
    assert not ranks.is_alone and not ranks.can_agree
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("Inductor runs all graphs, since ranks cannot agree on plans: their process group has no")
    with pytest.raises(RankError, match="'plan' was not settled with them: ValueError: the process group has no store"):
        ranks.settle("plan", "mine")
    torch._dynamo.reset()
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(2, 8)
    with torch.no_grad():
        run = torch.compile(model, backend="apollo", options={"debug.strict": True})
        torch.testing.assert_close(run(x), model(x))
    ((_, reason),) = registry.find_models(model)[0].fallbacks
    assert reason == "several ranks cannot agree on its plan: their process group has no store"


def test_a_store_that_cannot_be_reached_stops_the_rank(
    group: Callable[[], dist.ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have reached it, and then they run lanes."""

    def refuse(_: dist.ProcessGroup) -> None:
        raise dist.DistNetworkError("Connection refused")

    monkeypatch.setattr(dist.ProcessGroup, "get_group_store", refuse)
    group()
    with pytest.raises(RankError, match="cannot reach the store of its process group: Connection refused"):
        find_ranks()


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


def test_a_store_that_fails_stops_the_rank() -> None:
    """It cannot know what the others decided; asked again, it says the same, and the store is left in peace."""
    store = BrokenStore()
    ranks = Ranks(store)
    for topic in ("round 3", "round 4"):
        with pytest.raises(RankError) as raised:
            ranks.settle(topic, "mine")
        assert str(raised.value) == (
            "this rank stops, since it cannot run the programs of the other ranks: "
            "'round 3' was not settled with them: DistNetworkError: Connection reset by peer; "
            "start the job again from its last checkpoint, or set APOLLO_DISABLE=1 on all ranks"
        )
    with pytest.raises(RankError):
        ranks.enroll("layers", "graph0")
    assert store.num_calls == 1
    assert not ranks.is_alone, "it would keep for a process of its own what it measured beside others"


def test_what_another_version_settled_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may mean something else by the same words; the error names both versions."""
    store = dist.HashStore()
    with monkeypatch.context() as patched:
        patched.setattr("apollo_compile.distributed.ranks.__version__", "0.0.9")
        assert Ranks(store).settle("plan", "mine") == "mine"
    with pytest.raises(RankError, match=f"'plan' was settled by apollo_compile '0.0.9', and this is '{__version__}'"):
        Ranks(store).settle("plan", "mine")


def test_a_proposal_too_large_for_a_store_is_not_sent() -> None:
    """It would cost the connection; who has such a one proposes something else."""
    store = dist.HashStore()
    with pytest.raises(RankError, match="too large"):
        Ranks(store).settle("plan", "x" * (MAX_BYTES + 1))
    assert Ranks(store).settle("plan", "small") == "small"
