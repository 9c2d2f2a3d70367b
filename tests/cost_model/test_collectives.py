"""The durations of collectives against a ring that is played round by round."""

from __future__ import annotations

import pytest

from apollo_compile.cost_model.collectives import Link, all_reduce_seconds, reduce_scatter_seconds, send_seconds

LINK = Link(latency=2e-6, bandwidth=1e9)


def play(ranks: int, *, reduces: bool) -> int:
    """Return the rounds of a ring until every rank has every piece, or one piece summed over all ranks.

    A rank holds, by piece, the ranks whose contribution is in it.
    """
    have = [
        {piece: {rank} if reduces else ({rank} if piece == rank else set()) for piece in range(ranks)}
        for rank in range(ranks)
    ]
    rounds = 0
    while True:
        full = [sum(len(parts) == (ranks if reduces else 1) for parts in pieces.values()) for pieces in have]
        if min(full) >= (1 if reduces else ranks):
            return rounds
        sent = [(rank, (rank - rounds) % ranks) for rank in range(ranks)]
        parts = [set(have[rank][piece]) for rank, piece in sent]
        for (rank, piece), part in zip(sent, parts, strict=True):
            have[(rank + 1) % ranks][piece] |= part
        rounds += 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_an_all_reduce_takes_the_rounds_of_a_ring(ranks: int) -> None:
    """One piece per round, of the size of a rank's share: every piece is summed, then every rank gets it."""
    round_s = LINK.latency + 8e6 / ranks / LINK.bandwidth
    gathered, reduced = play(ranks, reduces=False), play(ranks, reduces=True)
    assert reduce_scatter_seconds(8e6, ranks, LINK) == pytest.approx(reduced * round_s)
    assert all_reduce_seconds(8e6, ranks, LINK) == pytest.approx((gathered + reduced) * round_s)


def test_a_send_is_a_latency_and_its_bytes() -> None:
    """Also of nothing."""
    assert send_seconds(1e6, LINK) == pytest.approx(2e-6 + 1e-3)
    assert send_seconds(0, LINK) == LINK.latency


@pytest.mark.parametrize(("latency", "bandwidth"), [(-1.0, 1.0), (0.0, 0.0), (float("nan"), 1.0)])
def test_a_link_without_bandwidth_is_an_error(latency: float, bandwidth: float) -> None:
    """With the numbers."""
    with pytest.raises(ValueError, match="expected a latency of at least 0 and a bandwidth above 0"):
        Link(latency, bandwidth)
