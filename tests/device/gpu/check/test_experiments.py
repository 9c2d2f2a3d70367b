"""Each experiment passes on a device that keeps its rules, and finds the defect of one that does not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apollo_compile.device.gpu.check.experiments import TRIALS, try_dropout, try_hand_overs, try_training_step
from apollo_compile.device.gpu.check.self_check import run_checks
from apollo_compile.device.gpu.run.gpu import BodyFunction, Stream
from apollo_compile.ir import Lane
from apollo_compile.target.check_result import CheckResult, Level
from tests.device.gpu.fake_gpu import FakeGpu, FakeRecording
from tests.failures import raising

SIZES = [*15 * [8], 12]
CPU = torch.device("cpu")
WIDTHS = {"hand-overs": 8, "training step": 8, "dropout": 64}
SMALL = {name: partial(trial, width=WIDTHS[name]) for name, trial in TRIALS.items()}  # type: ignore[call-arg]


class Spoiled(FakeGpu):
    """Does something to every captured graph, as a broken driver would."""

    def __init__(self, spoil: Callable[[FakeRecording], None]) -> None:
        super().__init__()
        self._spoil = spoil

    def capture(self, *arguments: Any, **options: Any) -> FakeRecording:
        recording = super().capture(*arguments, **options)
        self._spoil(recording)
        return recording


def by_lane(recording: FakeRecording) -> None:
    """Run one lane after the other, as if nothing waited."""
    recording.operations.sort(key=lambda operation: operation.stream)


def one_is_lost(recording: FakeRecording) -> None:
    """Leave out the second operation, so that what it writes stays poison."""
    del recording.operations[1]


@pytest.mark.parametrize("spoil", (by_lane, one_is_lost))
@pytest.mark.parametrize("trial", (try_hand_overs, try_training_step))
def test_what_is_read_too_early_is_found(trial: Any, spoil: Callable[[FakeRecording], None]) -> None:
    """It is poison, which spreads to the result; memory of what is lost may have been used for something else."""
    result = trial(Spoiled(spoil), SIZES, CPU, width=8)
    assert result.level is Level.ERROR and result.message.endswith(" was read")
    assert spoil is one_is_lost or "are NaN: memory that was not written yet was read" in result.message


def test_a_launch_that_reads_what_is_not_written_is_found() -> None:
    """Before anything is captured: one body of many got zeros."""

    class Early(FakeGpu):
        def call(self, body: BodyFunction, inputs: list[torch.Tensor], stream: Stream) -> Sequence[torch.Tensor]:
            """Take an input away from the fifth body of lane 2."""
            if stream == "lane 2" and self.log.count(("launch", stream)) == 4:
                inputs[0] = torch.zeros_like(inputs[0])
            return super().call(body, inputs, stream)

    result = try_hand_overs(Early(), SIZES, CPU, width=8)
    assert result.level is Level.ERROR
    assert result.message.startswith("launch 0: ") and "the result of an earlier run was read" in result.message


def before_each_replay(
    act: Callable[[FakeRecording], object], after: Callable[[FakeRecording], object] = lambda recording: None
) -> Callable[[FakeRecording], None]:
    """Return what spoils a recording by doing something before each of its replays, and after it."""

    def spoil(recording: FakeRecording) -> None:
        own = recording.replay

        def replay() -> None:
            act(recording)
            own()
            after(recording)

        recording.replay = replay  # type: ignore[method-assign]

    return spoil


def test_a_replay_that_leaves_old_results_is_found() -> None:
    """Its inputs are new, and its outputs are those of the run before."""
    kept: list[torch.Tensor] = []

    def keep_first(recording: FakeRecording) -> None:
        outputs = [tensor for operation in recording.operations for tensor in operation.outputs]
        kept.extend(tensor.clone() for tensor in outputs if len(kept) < len(outputs))
        for tensor, value in zip(outputs, kept, strict=True):
            tensor.copy_(value)

    result = try_hand_overs(Spoiled(before_each_replay(lambda _: None, keep_first)), SIZES, CPU, width=8)
    assert result.message.startswith("replay 1: ") and "0 are NaN: the result of an earlier run" in result.message


def flip_masks(recording: FakeRecording) -> None:
    """Overwrite the masks that a backward reads."""
    for operation in recording.operations:
        for tensor in operation.inputs:
            if tensor.dtype == torch.bool:
                tensor.logical_not_()


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda recording: torch.manual_seed(3), "equal masks: lane 1 in replay 0 and lane 1 in replay 1"),
        (lambda recording: torch.seed(), "other masks from the same seed"),
        (flip_masks, "replay 0: a backward has another mask than its forward"),
    ],
)
def test_wrong_masks_are_found(act: Callable[[FakeRecording], object], text: str) -> None:
    """Equal ones, other ones from the same seed, and other ones in a backward."""
    result = try_dropout(Spoiled(before_each_replay(act)), SIZES, CPU, width=64)
    assert (result.level, result.message) == (Level.ERROR, text)


def test_lanes_that_draw_the_same_numbers_are_found() -> None:
    """Each lane by itself would be right."""

    class Same(FakeGpu):
        def call(self, body: BodyFunction, inputs: list[torch.Tensor], stream: Stream) -> Sequence[torch.Tensor]:
            """Begin where the other lane began."""

            def run(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
                if len(arguments) == 1:  # a forward's
                    torch.manual_seed(int(torch.initial_seed()) + (stream == "lane 1"))
                return body(arguments)

            return super().call(run, inputs, stream)

    result = try_dropout(Same(), SIZES, CPU, width=64)
    assert result.level is Level.ERROR and result.message.startswith("equal masks: lane 1 in replay 0 and lane 2 in")


class SmGpu(FakeGpu):
    """Gives a lane every SM of its units; the stand-in of the census kernel notes them."""

    def __init__(self) -> None:
        super().__init__()
        self.native = self
        self.units = self.num_sms = 132
        self.atom_sizes = SIZES
        self.device = CPU
        self.compute_capability = (9, 0)
        self.sms_at: dict[int, tuple[int, ...]] = {}
        """By the address that a census is written to."""
        self._sms: dict[str, tuple[int, ...]] = {}

    def lane(self, atoms: list[int]) -> SimpleNamespace:
        """Return what the driver says of a lane."""
        return SimpleNamespace(num_sms=sum(self.atom_sizes[atom] for atom in atoms))

    def lane_stream(self, lane: Lane) -> str | None:
        """Return the lane's stream, and note its SMs."""
        stream = super().lane_stream(lane)
        if stream is not None:
            self._sms[stream] = lane.units
        return stream

    def call(self, body: BodyFunction, inputs: list[torch.Tensor], stream: Stream) -> Sequence[torch.Tensor]:
        """Note where it runs."""
        self.sms_at[inputs[0].data_ptr()] = self._sms.get(stream, tuple(range(132)))
        return super().call(body, inputs, stream)


def with_kernel(monkeypatch: pytest.MonkeyPatch, *, shift: int = 0) -> SmGpu:
    """Return a device, and put a stand-in in the place of its census kernel; `shift` moves one lane's SMs."""
    gpu = SmGpu()

    def launch_census(out: torch.Tensor, spin_ns: int) -> None:
        sms = torch.tensor(gpu.sms_at[out.data_ptr()])
        sms = sms + shift * (sms[0] > 0)
        place = sms[torch.arange(len(out)) % len(sms)]
        out.copy_(torch.stack([place, torch.ones_like(place), torch.full_like(place, spin_ns)], dim=1))

    kernel = SimpleNamespace(BLOCKS_PER_SM=16, COLUMNS=3, launch_census=launch_census)
    monkeypatch.setitem(sys.modules, "apollo_compile.device.gpu.check.census_kernel", kernel)
    return gpu


def levels(results: Sequence[CheckResult]) -> Mapping[str, Level]:
    """Return levels by subject."""
    return {result.subject: result.level for result in results}


def test_all_checks_pass_on_a_device_that_keeps_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Censuses of three splits, launched and replayed, and the experiments."""
    gpu = with_kernel(monkeypatch)
    results = run_checks(gpu, SMALL)  # type: ignore[arg-type]
    assert set(levels(results).values()) == {Level.OK} and not gpu.races, results
    assert len(results) == 3 * 2 + 1 + len(TRIALS) and set(TRIALS) <= set(levels(results))
    thirds = [found.message for found in results if found.subject.startswith("lanes 24 + 40 + 68, ")]
    assert len(thirds) == 2 and all(message.startswith("24 + 40 + 68 SMs, disjoint") for message in thirds)


def test_kernels_on_other_sms_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the second lane reach into the first; experiments say nothing of that."""
    gpu = with_kernel(monkeypatch, shift=-4)
    found = levels(run_checks(gpu, SMALL))  # type: ignore[arg-type]
    assert found["lanes 64 + 68, replayed"] is Level.ERROR
    assert all(found[name] is Level.OK for name in TRIALS)


def test_an_experiment_that_raises_is_an_error_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that is refused, for one."""
    gpu = with_kernel(monkeypatch)
    refuse = raising(RuntimeError("operation not permitted when stream is capturing"))
    results = run_checks(gpu, {**SMALL, "dropout": refuse})  # type: ignore[arg-type]
    (bad,) = (result for result in results if result.level is Level.ERROR)
    assert (bad.subject, bad.message) == ("dropout", "RuntimeError: operation not permitted when stream is capturing")


def test_a_device_of_two_atoms_has_fewer_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is no error."""
    gpu = with_kernel(monkeypatch)
    gpu.units = gpu.num_sms = 16
    gpu.atom_sizes = [8, 8]
    results = run_checks(gpu, {})  # type: ignore[arg-type]
    assert not any(subject.count("+") == 2 for subject in levels(results))
    assert "lanes 8 + 8, eager" in levels(results)
