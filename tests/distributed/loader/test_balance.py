"""The balance of ranks as text and page."""

from __future__ import annotations

import re
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
