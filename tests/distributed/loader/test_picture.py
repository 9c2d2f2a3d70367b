"""The balance of ranks as text, page and trace."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from apollo_compile.distributed.loader.balance import Balance


@pytest.fixture
def balance() -> Balance:
    """Return two rounds of two ranks."""
    before = np.array([[[3_000, 10_000], [1_000, 2_000]], [[0, 4_000], [2_000, 4_000]]], dtype=np.int64)
    after = np.array([[[2_000, 6_000], [2_000, 6_000]], [[1_000, 4_000], [1_000, 4_000]]], dtype=np.int64)
    return Balance(phases=("encoders", "language <model>"), before_ns=before, after_ns=after)


def test_the_text_says_what_was_gained(balance: Balance) -> None:
    """19 us in turn where 13 would do."""
    assert str(balance) == (
        "2 rounds on 2 ranks: slowest rank over mean 1.46 in turn, 1.00 balanced; 9.5 us and 6.5 us a round, "
        "1.46x as fast"
    )


def test_the_page_has_every_round_and_rank(balance: Balance, tmp_path: Path) -> None:
    """A bar per round and kind, a row per rank, the names of phases escaped, and nothing from elsewhere."""
    balance.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "language &lt;model&gt;" in page and "<model>" not in page
    assert re.findall(r"round (\d), (in turn|balanced): ([\d.]+)", page) == [
        ("0", "in turn", "1.625"),
        ("0", "balanced", "1.000"),
        ("1", "in turn", "1.200"),
        ("1", "balanced", "1.000"),
    ]
    assert len(re.findall(r"round \d, rank \d, ", page)) == 7 + 8  # one rank has no work in a phase
    assert not re.search(r"(src|href)=\"http", page)


def test_in_the_trace_every_rank_works_and_waits_as_long_as_the_step_takes(balance: Balance) -> None:
    """No slice of a rank overlaps another, and their sum is the time of the slowest."""
    events = json.loads(balance.to_trace())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "in turn", 2: "balanced"}
    ranks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(ranks.values()) == ["rank 0", "rank 0", "rank 1", "rank 1"]
    by_thread = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_thread) == 4
    for (process, _), slices in by_thread.items():
        assert sum(end - start for start, end in slices) == pytest.approx(19.0 if process == 1 else 13.0)
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(sorted(slices), sorted(slices)[1:], strict=False))
    counters = [event["args"]["over mean"] for event in events if event["ph"] == "C" and event["pid"] == 1]
    assert counters == [1.625, 1.2]
