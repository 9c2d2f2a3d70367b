"""What can be known of the checks of a GPU without one; those of whole models: `tests/device/gpu/test_checks.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from apollo_compile.device.gpu.run.gpu import Sharing
from benchmarks import gpu_checks
from tests.device.gpu.fake_gpu import FakeGpu


class CheckedGpu(FakeGpu):
    """The stand-in, as checks see a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.native = SimpleNamespace(
            num_sms=132, num_atoms=16, atom_sizes=[*15 * [8], 12], name="Fake", compute_capability=(9, 0)
        )

    def sharing(self, sharing: Sharing) -> CheckedGpu:
        """Return another one."""
        return self.others.setdefault(sharing, CheckedGpu())  # type: ignore[return-value, arg-type]


def test_a_check_that_only_launches_can_do_so() -> None:
    """On the stand-in, whose times mean nothing, but which refuses what a GPU would."""
    gpu = CheckedGpu()
    outcome = gpu_checks.many_small_kernels_keep_their_pace(gpu)  # type: ignore[arg-type]
    assert outcome.text and all(ns > 0 for ns in outcome.numbers.values())
    assert not gpu.races and not any(other.races for other in gpu.others.values())


@pytest.mark.parametrize(
    ("late_ns", "is_met", "text"),
    [
        (0, True, "with queues 1: 1 lane 2.0 us, 2 lanes 4.0 us; by default: 1 lane 2.0 us, 2 lanes 2.0 us; 32: "),
        (2_000, False, "by default: 1 lane 2.0 us, 2 lanes 4.0 us; 32: 1 lane 2.0 us, 2 lanes 2.0 us"),
    ],
)
def test_queues_are_tried_in_processes_of_their_own(
    late_ns: int, is_met: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this one's environment says."""
    monkeypatch.setenv(gpu_checks.CONNECTIONS, "4")
    seen = []

    def run(command: list[str], *, env: dict[str, str], **options: object) -> SimpleNamespace:
        connections = env.get(gpu_checks.CONNECTIONS)
        seen.append((connections, command[1:]))
        late = {"1": 2_000, None: late_ns, "32": 0}[connections]
        times = {"1 lane": 600_000, "2 lanes": 600_000 + 300 * late, "2 streams": 1}
        return SimpleNamespace(returncode=0, stdout=f"a warning\n{json.dumps(times)}\n")

    monkeypatch.setattr(subprocess, "run", run)
    outcome = gpu_checks.queues_of_the_device_are_enough(CheckedGpu())  # type: ignore[arg-type]
    assert seen == [(each, ["-m", "benchmarks.harness.gpu_lanes", "2", "4", "8"]) for each in ("1", None, "32")]
    assert outcome.is_met is is_met and text in outcome.text


def fake_kernels(monkeypatch: pytest.MonkeyPatch, num_sms: int, *, is_refused: bool = True) -> None:
    """Put stand-ins in the place of kernels, which note `num_sms` different SMs or spin as long as they were told."""

    def launch_clusters(out: torch.Tensor, size: int) -> None:
        out.copy_(torch.arange(len(out)) % num_sms)

    launched: list[bool] = []

    def launch_census(out: torch.Tensor, spin_ns: int, *, is_cooperative: bool = False) -> None:
        launched.append(is_cooperative)
        if launched.count(True) == 2 and is_refused:
            raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")
        out[:, 2] = out[:, 1] + spin_ns

    kernels = SimpleNamespace(CLUSTERS=(1, 2), launch_clusters=launch_clusters)
    monkeypatch.setitem(sys.modules, "benchmarks.harness.gpu_kernels", kernels)
    census = SimpleNamespace(COLUMNS=3, launch_census=launch_census)
    monkeypatch.setitem(sys.modules, "apollo_compile.device.gpu.check.census_kernel", census)


@pytest.mark.parametrize(
    ("num_sms", "is_refused", "is_met", "text"),
    [
        (8, True, True, "clusters of 8 SMs of atoms 0: 1 5.0 us, 2 5.0 us; 24 SMs of atoms 0, 1, 2: 1 5.0 us"),
        (8, True, True, "a cooperative grid of 2112 blocks is refused on one atom: Triton Error [CUDA]: too many"),
        (8, False, True, "is not refused on one atom: a barrier in it would hang"),
        (26, True, False, "clusters of 2 ran on 26 SMs of a lane of 8 SMs of atoms 0; clusters of 1 ran on 26 SMs"),
    ],
)
def test_clusters_have_to_stay_on_their_lane(
    num_sms: int, is_refused: bool, is_met: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the SMs that the driver may add."""
    fake_kernels(monkeypatch, num_sms, is_refused=is_refused)

    def time_on(gpu: object, lane: object, call: Callable[[], None], repeats: int) -> int:
        call()
        return 5_000

    monkeypatch.setattr(gpu_checks, "time_on", time_on)
    outcome = gpu_checks.clusters_fit_into_lanes(CheckedGpu())  # type: ignore[arg-type]
    assert outcome.is_met is is_met and text in outcome.text
    old = CheckedGpu()
    old.native.compute_capability = (8, 0)
    assert gpu_checks.clusters_fit_into_lanes(old).text == "this GPU has no clusters"  # type: ignore[arg-type]


@pytest.mark.parametrize(("profiled_ns", "is_met"), [(1_000_000, True), (2_000_000, False)])
def test_clocks_have_to_agree(profiled_ns: int, is_met: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events, the profiler and the kernel itself, of the same replay."""
    fake_kernels(monkeypatch, 8)
    gpu = CheckedGpu()
    gpu.ns_by_stream = {"lane 1": 1_000_000, "lane 2": 1_000_000}

    def profile_step(step: Callable[[], object], mark: Callable[[], None]) -> dict[str, object]:
        step()
        args = [{"grid": [64, 1, 1], "stream": 7, "context": context} for context in (1, 2)]
        event = {"cat": "kernel", "name": "_note_and_spin", "ts": 3.0, "dur": profiled_ns / 1000}
        return {"traceEvents": [{**event, "args": each} for each in args]}

    monkeypatch.setattr(gpu_checks, "profile_step", profile_step)
    outcome = gpu_checks.markers_agree(gpu)  # type: ignore[arg-type]
    assert outcome.is_met is is_met
    assert outcome.text.endswith("the profiler tells lanes apart by context") and not gpu.races
