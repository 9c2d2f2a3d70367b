from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch

from apollo_compile.device.gpu.check.examine import (
    CapturedKernel,
    Census,
    CensusProbe,
    examine_cuda,
    judge_censuses,
    judge_connections,
    judge_nodes,
    judge_overlap,
    split_lanes,
    walk_capture,
)
from apollo_compile.device.gpu.run.launch import Launcher
from apollo_compile.ir import LaneId, SegmentId
from apollo_compile.target.findings import Level
from tests.builders import graph, plan
from tests.device.gpu.fake_gpu import FakeGpu
from tests.device.gpu.run.test_launch import bodies_of, program_of

A, B = LaneId(1), LaneId(2)
GRANTED = {A: 16, B: 8}
SMS = {A: frozenset(range(16)), B: frozenset(range(100, 108))}


def census(sms: Mapping[LaneId, frozenset[int]] = SMS, *, begin_b: int = 3_000) -> Census:
    """Return where two lanes ran, from 0 and `begin_b` on, for 200 us each."""
    return Census(sms=sms, begin_ns={A: 0, B: begin_b}, end_ns={A: 200_000, B: begin_b + 200_000})


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what is found without a GPU")
def test_without_a_gpu_there_is_one_finding_that_says_so() -> None:
    """Nothing is failed."""
    (finding,) = examine_cuda()
    assert finding.level == Level.NOTE
    assert finding.message.startswith("torch sees no CUDA device; lanes on a GPU need an NVIDIA GPU")


def test_lanes_on_the_sms_that_they_were_granted_are_ok() -> None:
    """In every launch."""
    finding = judge_censuses("lanes", GRANTED, [census()] * 20)
    assert (finding.level, finding.message) == (
        Level.OK,
        "16 + 8 SMs, disjoint and the same in 20 launches; the last lane started at most 3.0 us late",
    )


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({**SMS, B: frozenset(range(100, 107))}, "launch 1: lane 2 ran on 7 SMs, granted were 8"),
        ({**SMS, A: frozenset(range(17))}, "launch 1: lane 1 ran on 17 SMs, granted were 16"),
        ({**SMS, B: frozenset(range(101, 109))}, "launch 1: lane 2 ran on other SMs than before"),
    ],
)
def test_other_sms_are_a_failure(second: Mapping[LaneId, frozenset[int]], text: str) -> None:
    """In any launch: fewer, more, or others."""
    finding = judge_censuses("lanes", GRANTED, [census(), census(second)])
    assert finding.level == Level.ERROR and finding.message.startswith(text)


def test_lanes_that_share_sms_are_a_failure() -> None:
    """Which are named."""
    finding = judge_censuses("lanes", GRANTED, [census({**SMS, B: frozenset(range(15, 23))})])
    assert (finding.level, finding.message) == (
        Level.ERROR,
        "launch 0: lanes 1 and 2 share SMs [15]; they should share none",
    )


def test_two_more_sms_on_every_lane_are_a_warning_where_the_driver_may_add_them() -> None:
    """And a failure elsewhere."""
    more = {A: SMS[A] | {130, 131}, B: SMS[B] | {130, 131}}
    assert judge_censuses("lanes", GRANTED, [census(more)]).level == Level.ERROR
    finding = judge_censuses("lanes", GRANTED, [census(more)], extra=2)
    assert finding.level == Level.WARNING and "ran on 18 + 10 SMs, granted were 16 + 8" in finding.message


def test_lanes_one_after_the_other_are_a_warning() -> None:
    """Quotas hold, but nothing is gained."""
    finding = judge_censuses("lanes", GRANTED, [census(begin_b=200_000)] * 3)
    assert finding.level == Level.WARNING and "ran one after the other in 3 of them" in finding.message


def kernel(context: int, name: str, lane: LaneId) -> CapturedKernel:
    """Return a kernel of segment 7."""
    return CapturedKernel(name=name, context=context, lane=lane, segment=SegmentId(7))


@pytest.mark.parametrize(
    ("kernels", "level", "text"),
    [
        (
            [(10, "a", A), (20, "b", B), (10, "c", A)],
            Level.OK,
            "kernels in the captured graph: 2 of lane 1, 1 of lane 2; each in its lane",
        ),
        (
            [(10, "a", A), (20, "b", B), (99, "gemm", B)],
            Level.ERROR,
            "1 of 3 kernels are not in their lane: gemm of lane 2, segment 7, runs outside every lane; their operator",
        ),
        (
            [(10, "a", A), (20, "b", B), (20, "norm", A)],
            Level.ERROR,
            "1 of 3 kernels are not in their lane: norm of lane 1, segment 7, runs in lane 2; their operator",
        ),
        ([(10, "a", A)], Level.ERROR, "lanes without any kernel: 2"),
        ([(0, "a", A), (0, "b", B)], Level.NOTE, "the driver does not say to which context the 2 kernels belong"),
        ([], Level.ERROR, "lanes without any kernel: 1 + 2"),
    ],
)
def test_kernels_of_a_captured_graph_are_in_the_lane_that_launched_them(
    kernels: list[tuple[int, str, LaneId]], level: Level, text: str
) -> None:
    """All of them, and every lane has some."""
    finding = judge_nodes("nodes", [kernel(*each) for each in kernels], {10: A, 20: B})
    assert finding.level == level and finding.message.startswith(text)


def test_a_finding_names_the_first_kernels_outside_their_lanes_only() -> None:
    """Each once."""
    strays = [kernel(99, f"k{number % 7}", A) for number in range(20)]
    text = judge_nodes("nodes", strays, {10: A}).message
    assert (
        text.startswith("20 of 20 kernels")
        and text.count("outside every lane") == 5
        and "; ...; their operator" in text
    )


class WalkedFake(FakeGpu):
    """Has a kernel per launch, in the context of its stream, but for bodies that change to another one."""

    def __init__(self, strays: Mapping[int, str]) -> None:
        """`strays` says which launch, by number, runs its kernel on which stream."""
        super().__init__(units=2)
        self._strays = strays
        self._contexts = {"lane 1": 10, "lane 2": 20}
        self._num_told = 0

    def walk_capture(self) -> WalkedFake:
        """Return itself."""
        self._num_told = 0
        return self

    def handle_of(self, stream: str) -> int:
        """Return any number."""
        return 1

    def new_kernels(self, stream: int) -> list[tuple[int, str]]:
        """Return those of the launches since this was last called."""
        captured = self.log[self.log.index(("capture",)) :]
        launches = [entry[1] for entry in captured if entry[0] == "launch"]
        new = list(enumerate(launches))[self._num_told :]
        self._num_told = len(launches)
        return [(self._contexts[self._strays.get(number, on)], f"kernel{number}") for number, on in new]


@pytest.mark.parametrize("strays", ({}, {2: "lane 2"}))
def test_a_walk_tells_of_every_kernel_which_lane_launched_it(strays: Mapping[int, str]) -> None:
    """Wherever it went."""
    made = graph((), (), (0, 1))
    program = program_of(made, plan(made, "ABA"))
    gpu = WalkedFake(strays)
    _, kernels = walk_capture(gpu, Launcher(program, bodies_of(made), gpu), [torch.ones(2)])
    assert [(each.lane, each.segment, each.name) for each in kernels] == [
        (1, 0, "kernel0"),
        (2, 1, "kernel1"),
        (1, 2, "kernel2"),
    ]
    finding = judge_nodes("nodes", kernels, {10: A, 20: B})
    assert finding.level == (Level.ERROR if strays else Level.OK)


class CensusGpu(WalkedFake):
    """Gives a lane every SM of its units, in a context of its own."""

    def __init__(self) -> None:
        super().__init__({})
        self.native = self
        self.units = self.num_sms = 132
        self.atom_sizes = [*15 * [8], 12]
        self.primary_context = 1
        self.device = torch.device("cpu")
        self._contexts = {"lane 1": 10, "lane 2": 13, "lane 3": 18}

    def lane(self, atoms: list[int]) -> SimpleNamespace:
        """Return what the driver says of a lane; its context is told by its first atom."""
        return SimpleNamespace(num_sms=sum(self.atom_sizes[atom] for atom in atoms), context=10 + atoms[0])


def test_censuses_are_taken_of_lanes_of_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched and replayed; lanes of a split are numbered from 1, since lane 0 has every SM."""

    def note(out: torch.Tensor, spin_ns: int) -> None:
        place = torch.arange(len(out)) // 16
        out.copy_(torch.stack([1000 * len(out) + place, place + 1, place + spin_ns], dim=1))

    kernel = SimpleNamespace(BLOCKS_PER_SM=16, COLUMNS=3, launch_census=note)
    monkeypatch.setitem(sys.modules, "apollo_compile.device.gpu.check.census_kernel", kernel)  # Triton's
    gpu = CensusGpu()
    lanes = split_lanes([*15 * [8], 12], (3, 5, 8))
    probe = CensusProbe(gpu, lanes)  # type: ignore[arg-type]
    censuses, kernels = probe.take_replayed(2)
    assert probe.granted == {1: 24, 2: 40, 3: 68}
    for taken in (*probe.take(2), *censuses):
        assert {lane: len(sms) for lane, sms in taken.sms.items()} == probe.granted
    assert judge_censuses("lanes", probe.granted, censuses).level is Level.OK
    assert judge_nodes("nodes", kernels, probe.contexts).level is Level.OK and not gpu.races
    (alone,) = CensusProbe(gpu, lanes[2:]).take(1)  # type: ignore[arg-type]
    assert len(alone.sms[LaneId(3)]) == 68


def test_overlapping_lanes_share_what_was_planned() -> None:
    """Not more, not less; the driver may add its own."""
    assert judge_overlap(range(12), range(4, 16), planned=8).level == Level.OK
    assert judge_overlap(range(12), range(5, 16), planned=8).level == Level.ERROR
    assert judge_overlap(range(12), range(3, 16), planned=8).level == Level.ERROR
    assert judge_overlap(range(12), range(3, 16), planned=8, extra=2).level == Level.OK


def test_one_hardware_queue_is_a_warning() -> None:
    """It comes with recipes for other software."""
    assert judge_connections("1").level == Level.WARNING
    assert judge_connections("32").level == judge_connections(None).level == Level.OK


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
    lanes = split_lanes(atoms, shares)
    assert [len(lane.units) for lane in lanes] == sizes
    assert sorted(unit for lane in lanes for unit in lane.units) == list(range(sum(atoms)))


def test_more_lanes_than_atoms_are_refused() -> None:
    """The message says what to do."""
    with pytest.raises(ValueError, match="2 atoms are too few for 3 lanes; use fewer lanes"):
        split_lanes([8, 8], (1, 1, 1))
