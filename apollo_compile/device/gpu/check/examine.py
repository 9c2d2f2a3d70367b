"""Examine whether this GPU, driver and torch can run lanes.

    examine_cuda() -> results without an experiment; each relies on those before it

driver      libcuda opens and has the functions that lanes need
split       the device assigns its SMs in atoms of equal size
connections the environment does not put all streams through one hardware queue
profile     the profile that plans rest on was measured on this GPU

    examine_lanes(gpu) -> results of kernels that run on lanes, which `self_check.py` does in a process of its own

lanes ...   for three splits: kernels of a lane run on exactly the SMs that it was granted, lanes of one split share
            none, the sets stay the same over launches, eager and replayed, and lanes run side by side
overlap     lanes of different splits share exactly the SMs of their common atoms

Verdicts are pure functions of observations, tested without a GPU; observations come from `census_kernel.py`, launched
by the same code that launches segments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from apollo_compile.config import cuda_connections
from apollo_compile.device.gpu.run.gpu import Stream, TorchGpu, atoms_of
from apollo_compile.device.gpu.run.launch import Launcher
from apollo_compile.errors import CudaError
from apollo_compile.ir import Lane, LaneId
from apollo_compile.target.check_result import CheckResult, Level
from apollo_compile.target.lanes import atom_borders
from apollo_compile.trials import TrialStep, write_program
from apollo_compile.units import format_ns

NUM_LAUNCHES = 20
"""Launches over which the SMs of a lane must stay the same."""

SPIN_NS = 200_000

EXTRA_SMS = 2
"""On compute capability 9, the driver may add this many SMs to every green context once a module uses dynamic
parallelism."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Census:
    """SMs and times of the blocks of one launch, by lane."""

    sms: Mapping[LaneId, frozenset[int]]
    begin_ns: Mapping[LaneId, int]
    end_ns: Mapping[LaneId, int]


def examine_cuda() -> tuple[CheckResult, ...]:
    """Return results about the first GPU, without running anything; one note if there is no GPU."""
    if not torch.cuda.is_available():
        text = "torch sees no CUDA device; lanes on a GPU need an NVIDIA GPU, its driver, and torch built for CUDA"
        return (CheckResult(subject="GPU", level=Level.NOTE, message=text),)
    try:
        gpu = TorchGpu(0)
    except CudaError as error:
        return (CheckResult(subject="driver", level=Level.ERROR, message=str(error)),)
    native = gpu.native
    missing = [name for name, is_there in native.functions.items() if not is_there]
    text = f"{native.name}, CUDA {native.driver_version / 1000:.1f}, torch {torch.__version__}"
    if missing:
        text += f"; without {', '.join(missing)}, which lanes do not need"
    first, last = native.atom_sizes[0], native.atom_sizes[-1]
    split = f"{native.num_sms} SMs in {native.num_atoms} atoms of {first}"
    split += "" if last == first else f", the last with {last}: {last - first} fill none"
    left = native.num_sms - sum(native.atom_sizes)
    split += f"; {left} belong to no atom" if left else ""
    return (
        CheckResult(subject="driver", level=Level.OK, message=text),
        CheckResult(subject="split", level=Level.OK, message=split),
        judge_connections(cuda_connections()),
    )


def examine_lanes(gpu: TorchGpu) -> tuple[CheckResult, ...]:
    """Return the results from censuses of three splits and of overlapping lanes."""
    extra = EXTRA_SMS if gpu.native.compute_capability[0] == 9 else 0
    results: list[CheckResult] = []
    for shares in ((1, 1), (3, 1), (3, 5, 8)):
        if len(shares) > len(gpu.native.atom_sizes):
            continue  # a small device has no lanes for this split
        lanes = split_lanes(gpu.native.atom_sizes, shares)
        name = " + ".join(str(len(lane.units)) for lane in lanes)
        results += attempt(f"lanes {name}", lambda lanes=lanes, name=name: _examine_split(gpu, lanes, name, extra))  # type: ignore[misc]
    return (*results, *attempt("overlap", lambda: _examine_overlap(gpu, extra)))


def split_lanes(sizes: Sequence[int], shares: Sequence[int]) -> tuple[Lane, ...]:
    """Return disjoint lanes of whole atoms of these sizes, in proportion to `shares`; each has at least one atom.

    Raises:
        ValueError: there are more shares than atoms.
    """
    num_atoms = len(sizes)
    if num_atoms < len(shares):
        raise ValueError(f"{num_atoms} atoms are too few for {len(shares)} lanes; use fewer lanes")
    borders = [round(num_atoms * part / sum(shares)) for part in itertools.accumulate(shares, initial=0)]
    for index in range(1, len(borders)):  # every lane gets an atom: those before and those after
        borders[index] = max(borders[index], borders[index - 1] + 1)
        borders[index] = min(borders[index], num_atoms - (len(borders) - 1 - index))
    return tuple(
        lane_of_atoms(index + 1, sizes, first, last) for index, (first, last) in enumerate(itertools.pairwise(borders))
    )


def lane_of_atoms(number: int, sizes: Sequence[int], first: int, last: int) -> Lane:
    """Return the lane of the atoms from `first` up to, but without, `last`."""
    borders = atom_borders(sizes)
    return Lane(id=LaneId(number), units=tuple(range(borders[first], borders[last])))


def attempt(name: str, look: Callable[[], Sequence[CheckResult]]) -> Sequence[CheckResult]:
    """Return the results of `look`; an exception becomes a result, so that other checks still run."""
    try:
        return look()
    except Exception as error:
        return (CheckResult(subject=name, level=Level.ERROR, message=f"{type(error).__name__}: {error}"),)


def _examine_split(gpu: TorchGpu, lanes: Sequence[Lane], name: str, extra: int) -> list[CheckResult]:
    probe = CensusProbe(gpu, lanes)
    return [
        judge_censuses(f"lanes {name}, {how}", probe.granted, take(NUM_LAUNCHES), extra=extra)
        for how, take in (("eager", probe.take), ("replayed", probe.take_replayed))
    ]


def _examine_overlap(gpu: TorchGpu, extra: int) -> list[CheckResult]:
    """Take the censuses of two lanes that share the middle half of the device, one after the other."""
    sizes = gpu.native.atom_sizes
    quarter, end = len(sizes) // 4, len(sizes)
    lanes = [lane_of_atoms(1, sizes, 0, end - quarter), lane_of_atoms(1, sizes, quarter, end)]
    first, second = (CensusProbe(gpu, [lane]).take(1)[0].sms[lane.id] for lane in lanes)
    return [judge_overlap(first, second, planned=sum(sizes[quarter : end - quarter]), extra=extra)]


class CensusProbe:
    """Lanes, numbered from 1, with one census kernel on each, launched as a program is."""

    def __init__(self, gpu: TorchGpu, lanes: Sequence[Lane]) -> None:
        """Create the lanes."""
        from apollo_compile.device.gpu.check.census_kernel import BLOCKS_PER_SM, COLUMNS, launch_census

        self._gpu = gpu
        self._lanes = lanes
        natives = {lane.id: gpu.native.lane(atoms_of(lane, gpu.native.atom_sizes)) for lane in lanes}
        self.granted = {lane: native.num_sms for lane, native in natives.items()}
        self._outs = [
            torch.empty(len(lane.units) * BLOCKS_PER_SM, COLUMNS, dtype=torch.int64, device=gpu.device)
            for lane in lanes
        ]

        def body(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            launch_census(inputs[0], SPIN_NS)
            return [inputs.pop()]

        count = len(lanes)
        steps = [TrialStep(body=0, reads=(index,), lane=index + 1) for index in range(count)]
        whole = Lane(id=LaneId(0), units=tuple(range(gpu.native.num_sms)))
        _, program = write_program("census", steps, (whole, *lanes), num_inputs=count, outputs=range(count, 2 * count))
        self._launcher = Launcher(program, [body], gpu)

    def take(self, count: int) -> list[Census]:
        """Return the censuses of `count` launches."""
        self._launch(self._gpu.caller_stream())  # this one may wait for the kernel to be compiled
        return self._watch(lambda: self._launch(self._gpu.caller_stream()), count)

    def take_replayed(self, count: int) -> list[Census]:
        """Return the censuses of `count` replays."""
        self._launch(self._gpu.caller_stream())
        recording = self._gpu.capture(self._launch, None)
        return self._watch(recording.replay, count)

    def _launch(self, origin: Stream) -> None:
        self._launcher.launch(list(self._outs), origin)

    def _watch(self, run: Callable[[], None], count: int) -> list[Census]:
        found = []
        for _ in range(count):
            for out in self._outs:
                out.zero_()
            run()
            self._gpu.synchronize()
            rows = {lane.id: out.cpu() for lane, out in zip(self._lanes, self._outs, strict=True)}
            found.append(
                Census(
                    sms={lane: frozenset(table[:, 0].tolist()) for lane, table in rows.items()},
                    begin_ns={lane: int(table[:, 1].min()) for lane, table in rows.items()},
                    end_ns={lane: int(table[:, 2].max()) for lane, table in rows.items()},
                )
            )
        return found


# ------------------------------------------------------------------------------------------------------- judgements


def judge_connections(connections: str | None) -> CheckResult:
    """Judge CUDA_DEVICE_MAX_CONNECTIONS: the number of hardware queues that streams are spread over."""
    name = "connections"
    if connections == "1":
        text = "CUDA_DEVICE_MAX_CONNECTIONS is 1, so lanes wait for each other; unset it, or set it to 32"
        return CheckResult(subject=name, level=Level.WARNING, message=text)
    shown = "not set" if connections is None else connections
    return CheckResult(subject=name, level=Level.OK, message=f"CUDA_DEVICE_MAX_CONNECTIONS is {shown}")


def judge_censuses(
    name: str, granted: Mapping[LaneId, int], censuses: Sequence[Census], *, extra: int = 0
) -> CheckResult:
    """Judge where the kernels of disjoint lanes ran.

    Arguments:
        name: subject of the result.
        granted: number of SMs that the driver reports for each lane.
        censuses: one per launch.
        extra: SMs that the driver may add to every lane; lanes may then share that many.
    """
    for number, census in enumerate(censuses):
        for lane, count in granted.items():
            seen = len(census.sms[lane])
            if not count <= seen <= count + extra:
                text = f"launch {number}: lane {lane} ran on {seen} SMs, granted were {count}; lanes are not kept apart"
                return CheckResult(subject=name, level=Level.ERROR, message=text)
            if census.sms[lane] != censuses[0].sms[lane]:
                text = f"launch {number}: lane {lane} ran on other SMs than before; lanes are not kept apart"
                return CheckResult(subject=name, level=Level.ERROR, message=text)
        for one, other in itertools.combinations(granted, 2):
            shared = census.sms[one] & census.sms[other]
            if len(shared) > extra:
                text = f"launch {number}: lanes {one} and {other} share SMs {sorted(shared)}; they should share none"
                return CheckResult(subject=name, level=Level.ERROR, message=text)
    sizes = {lane: len(censuses[0].sms[lane]) for lane in granted}
    if sizes != dict(granted):
        text = f"lanes ran on {_list(sizes.values())} SMs, granted were {_list(granted.values())}: dynamic parallelism"
        return CheckResult(subject=name, level=Level.WARNING, message=f"{text} adds up to {extra} to every lane")
    apart = [census for census in censuses if max(census.begin_ns.values()) >= min(census.end_ns.values())]
    shown = f"{_list(sizes.values())} SMs, disjoint and the same in {len(censuses)} launches"
    if len(apart) > len(censuses) // 2:
        text = f"{shown}; but lanes ran one after the other in {len(apart)} of them: quotas hold, nothing overlaps"
        return CheckResult(subject=name, level=Level.WARNING, message=text)
    late = max(max(census.begin_ns.values()) - min(census.begin_ns.values()) for census in censuses)
    return CheckResult(
        subject=name, level=Level.OK, message=f"{shown}; the last lane started at most {format_ns(late)} late"
    )


def judge_overlap(one: Collection[int], other: Collection[int], *, planned: int, extra: int = 0) -> CheckResult:
    """Judge two lanes that were planned to share SMs."""
    shared = len(set(one) & set(other))
    if planned <= shared <= planned + 2 * extra:
        return CheckResult(
            subject="overlap", level=Level.OK, message=f"lanes of different splits share {shared} SMs, as planned"
        )
    text = f"lanes of different splits share {shared} SMs instead of {planned}; the driver does not use these atoms"
    return CheckResult(subject="overlap", level=Level.ERROR, message=text)


def _list(numbers: Collection[int]) -> str:
    return " + ".join(map(str, numbers))
