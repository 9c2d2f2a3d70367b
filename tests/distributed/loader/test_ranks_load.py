"""Two ranks over gloo: gradients of one process, the same costs, and streams that are shared out."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from apollo_compile import weigh_loss
from tests.distributed.conftest import Seen, needs_gloo
from tests.distributed.loader import rank

pytestmark = needs_gloo

WORK = rank


@pytest.fixture(scope="module")
def ranks(seen: Seen) -> list[dict[str, Any]]:
    """What each rank saw."""
    return seen("share")


@pytest.mark.parametrize("index", [0, 1], ids=["one micro-batch", "two micro-batches"])
def test_gradients_are_those_of_one_process(ranks: list[dict[str, Any]], index: int) -> None:
    """Whatever numbers of samples and tokens the ranks have, in the smaller last step too."""
    used: list[int] = []
    counts = set()
    for first, second in zip(*(found["gradients"][index] for found in ranks), strict=True):
        assert torch.equal(first[0], second[0])
        for shared, whole, _ in (first, second):
            torch.testing.assert_close(shared, whole, rtol=1e-5, atol=1e-7)
        used += first[2] + second[2]
        counts.add((len(first[2]), len(second[2])))
    assert sorted(used) == list(range(len(rank.LENGTHS)))
    assert any(a != b for a, b in counts), "all ranks had as many samples, so nothing was weighted"


def test_all_ranks_have_the_costs_of_the_first(ranks: list[dict[str, Any]]) -> None:
    """Though each predicted others, or none."""
    expected = [ranks[0]["own costs"]] * rank.SIZE
    assert ranks[0]["own costs"] != ranks[1]["own costs"]
    assert [found["costs"] for found in ranks] == [found["costs of one"] for found in ranks] == expected


def test_streams_are_shared_out_and_end_together(ranks: list[dict[str, Any]]) -> None:
    """Every step has what all ranks read for it, and both phases take about as long on each rank."""
    first, second = (found["stream"] for found in ranks)
    assert len(first["got"]) == len(second["got"]) == 5  # the shorter stream has 21 samples
    for step, (one, other) in enumerate(zip(first["got"], second["got"], strict=True)):
        expected = itertools.chain(*(found["read"][4 * step : 4 * step + 4] for found in (first, second)))
        assert sorted(one + other) == sorted(expected)
        loads = np.array([np.sum([rank.cost_of(key) for key in keys], axis=0) for keys in (one, other)])
        assert loads.max(axis=0).sum() < 1.3 * loads.mean(axis=0).sum()  # dealt in turn it is almost 2


def test_a_bad_sample_of_a_stream_stops_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """With its key, so that none waits for another."""
    (message,) = {found["bad stream"] for found in ranks}
    assert message.startswith("sample '1:2' costs nan seconds in phase 0")


def test_a_loss_is_weighted_by_its_share_of_the_tokens() -> None:
    """Without a process group too; a micro-batch without tokens adds nothing, though its mean is NaN."""
    loss = torch.tensor(2.0)
    assert weigh_loss(loss, 3, total=12).item() == 0.5
    logits = torch.randn(4, 10, requires_grad=True)
    mean_of_none = torch.nn.functional.cross_entropy(logits, torch.full((4,), -100))
    assert mean_of_none.isnan()
    weigh_loss(mean_of_none, 0, total=12).backward()
    assert logits.grad is not None and not logits.grad.any()
    for tokens, total in ((5, 4), (-1, 4), (0, 0), (3.5, 4)):
        with pytest.raises(ValueError, match=rf"a micro-batch has {tokens} of the step's {total} tokens"):
            weigh_loss(loss, tokens, total=total)  # type: ignore[arg-type]
