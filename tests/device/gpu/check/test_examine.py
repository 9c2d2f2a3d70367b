from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from apollo_compile.device.gpu.check import examine
from apollo_compile.ir import LaneId
from apollo_compile.target.check_result import Level

A, B = LaneId(1), LaneId(2)
GRANTED = {A: 16, B: 8}
SMS = {A: frozenset(range(16)), B: frozenset(range(100, 108))}


def census(sms: Mapping[LaneId, frozenset[int]] = SMS, *, begin_b: int = 3_000) -> examine.Census:
    """Return where two lanes ran, from 0 and `begin_b` on, for 200 us each."""
    return examine.Census(sms=sms, begin_ns={A: 0, B: begin_b}, end_ns={A: 200_000, B: begin_b + 200_000})


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what is found without a GPU")
def test_without_a_gpu_there_is_one_finding_that_says_so() -> None:
    """Nothing is failed."""
    (result,) = examine.examine_cuda()
    assert result.level == Level.NOTE
    assert result.message.startswith("torch sees no CUDA device; lanes on a GPU need an NVIDIA GPU")


MORE = {A: SMS[A] | {130, 131}, B: SMS[B] | {130, 131}}
MOVED, SHARED = ({**SMS, B: frozenset(range(first, first + 8))} for first in (101, 15))
SPLIT = "16 + 8 SMs, disjoint"


@pytest.mark.parametrize(
    ("censuses", "extra", "level", "text"),
    [
        (20 * [census()], 0, Level.OK, f"{SPLIT} and the same in 20 launches; the last lane started at most 3"),
        ([census({**SMS, B: SMS[B] - {107}})], 0, Level.ERROR, "launch 0: lane 2 ran on 7 SMs, granted were 8"),
        ([census({**SMS, A: frozenset(range(17))})], 0, Level.ERROR, "launch 0: lane 1 ran on 17 SMs, granted were 16"),
        ([census(), census(MOVED)], 0, Level.ERROR, "launch 1: lane 2 ran on other SMs than before"),
        ([census(SHARED)], 0, Level.ERROR, "launch 0: lanes 1 and 2 share SMs [15]; they should share none"),
        ([census(MORE)], 0, Level.ERROR, "launch 0: "),
        ([census(MORE)], 2, Level.WARNING, "ran on 18 + 10 SMs, granted were 16 + 8"),  # the driver may add them
        (3 * [census(begin_b=200_000)], 0, Level.WARNING, "ran one after the other in 3 of them"),  # nothing is gained
    ],
)
def test_censuses_of_two_lanes_are_judged(censuses: list[examine.Census], extra: int, level: Level, text: str) -> None:
    """Fewer SMs than granted, more, other or shared ones are a failure, in any launch."""
    result = examine.judge_censuses("lanes", GRANTED, censuses, extra=extra)
    assert result.level == level and text in result.message


def test_overlapping_lanes_share_what_was_planned() -> None:
    """Not more, not less; the driver may add its own."""
    assert examine.judge_overlap(range(12), range(4, 16), planned=8).level == Level.OK
    assert examine.judge_overlap(range(12), range(5, 16), planned=8).level == Level.ERROR
    assert examine.judge_overlap(range(12), range(3, 16), planned=8).level == Level.ERROR
    assert examine.judge_overlap(range(12), range(3, 16), planned=8, extra=2).level == Level.OK


def test_one_hardware_queue_is_a_warning() -> None:
    """It comes with recipes for other software."""
    assert examine.judge_connections("1").level == Level.WARNING
    assert examine.judge_connections("32").level == examine.judge_connections(None).level == Level.OK


@pytest.mark.parametrize(
    ("atoms", "shares", "sizes"),
    [
        (16 * [8], (1, 1), [64, 64]),
        ([*14 * [8], 20], (1, 1), [64, 68]),
        (16 * [8], (3, 1), [96, 32]),
        ([*15 * [8], 12], (3, 5, 8), [24, 40, 68]),
        (3 * [8], (9, 1, 1), [8, 8, 8]),
        (2 * [8], (1, 9), [8, 8]),
    ],
)
def test_shares_are_rounded_to_atoms_and_nobody_goes_away_empty(
    atoms: list[int], shares: tuple[int, ...], sizes: list[int]
) -> None:
    """Lanes are disjoint and use the whole device."""
    lanes = examine.split_lanes(atoms, shares)
    assert [len(lane.units) for lane in lanes] == sizes
    assert sorted(unit for lane in lanes for unit in lane.units) == list(range(sum(atoms)))


def test_more_lanes_than_atoms_are_refused() -> None:
    """The message says what to do."""
    with pytest.raises(ValueError, match="2 atoms are too few for 3 lanes; use fewer lanes"):
        examine.split_lanes([8, 8], (1, 1, 1))
