"""What can be known of the checks of a GPU without one; those of whole models: `tests/device/gpu/test_checks.py`."""

from __future__ import annotations

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


@pytest.mark.parametrize(("profiled_ns", "is_met"), [(1_000_000, True), (2_000_000, False)])
def test_clocks_have_to_agree(profiled_ns: int, is_met: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events, the profiler and the kernel itself, of the same replay."""

    def launch_census(out: torch.Tensor, spin_ns: int) -> None:
        out[:, 2] = out[:, 1] + spin_ns

    census = SimpleNamespace(COLUMNS=3, launch_census=launch_census)
    monkeypatch.setitem(sys.modules, "apollo_compile.device.gpu.check.census_kernel", census)
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
