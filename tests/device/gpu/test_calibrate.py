"""Calibration of a GPU with a stand-in whose kernels take known times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from apollo_compile.cost_model.roofline import predict_kernel
from apollo_compile.device.gpu.calibrate import Probe, Sizes, calibrate_gpu
from apollo_compile.device.gpu.gpu import Body
from apollo_compile.device.profile import DeviceProfile
from apollo_compile.ir import Kernel, KernelKind, Lane
from apollo_compile.store.profiles import load_profile
from tests.device.gpu.fake_gpu import CALLER, ORIGIN, FakeEvent, FakeGpu

SIZES = Sizes(sides=(320, 1280), tokens=64, cached_bytes=1200, streamed_bytes=12000)
"""Products of 9 and 100 tiles: most numbers of SMs are not full in the last wave."""
KERNEL_NS = 2_000
HANDOVER_NS = 3_000
SATURATING_SMS = 64
CACHE_FACTOR = 3
BYTES_PER_S_AND_SM = 1e6
FLOPS_PER_S_AND_SM = 1e11
SHARE_OF_SMALL = 0.25
"""Of that, what products of few tiles reach."""


class ClockedGpu(FakeGpu):
    """Streams have clocks of their own; kernels take what their SMs, and who is at work beside them, make of them."""

    def __init__(self) -> None:
        super().__init__(units=132)
        self._clocks_ns: dict[str, int] = defaultdict(int)
        self._sms: dict[str, int] = {CALLER: 132, ORIGIN: 132}
        self._busy: dict[str, str] = {}
        self._last = ""
        """The kernel whose data the cache has, if it has room for them."""

    def lane_stream(self, lane: Lane, urgency: int = 0) -> str | None:
        """Note how many SMs it has."""
        stream = super().lane_stream(lane, urgency)
        self._sms[stream or CALLER] = len(lane.units)
        return stream

    def call(self, body: Body, inputs: list[torch.Tensor], stream: str) -> Sequence[torch.Tensor]:
        """Let time pass on the stream."""
        assert isinstance(body, Probe)
        made = super().call(replace(body, run=lambda: None), inputs, stream)
        beside = [its for other, its in self._busy.items() if other != stream and self._is_at_work(other, stream)]
        self._clocks_ns[stream] += self._ns(body, self._sms[stream], beside)
        self._busy[stream] = self._last = body.name
        return made

    def record(self, event: FakeEvent, stream: str) -> None:
        """Record the stream's own time."""
        super().record(event, stream)
        event.at_ns = self._clocks_ns[stream]

    def wait(self, event: FakeEvent, stream: str) -> None:
        """Wait for what is on another stream; that takes a while."""
        super().wait(event, stream)
        self._clocks_ns[stream] = max(self._clocks_ns[stream], event.at_ns + HANDOVER_NS)

    def synchronize(self) -> None:
        """Nobody is at work any more."""
        latest = max(self._clocks_ns.values(), default=0)
        self._clocks_ns = defaultdict(lambda: latest)
        self._busy.clear()

    def _is_at_work(self, other: str, stream: str) -> bool:
        return self._clocks_ns[other] > self._clocks_ns[stream] + HANDOVER_NS

    def _ns(self, body: Probe, sms: int, beside: list[str]) -> int:
        if body.kind is not None:
            waves = -(-body.tiles // sms)
            rate = FLOPS_PER_S_AND_SM * (SHARE_OF_SMALL if body.kind is KernelKind.MATMUL and body.tiles < 100 else 1)
            work_ns = waves * body.amount / body.tiles / rate * 1e9
            factor = 1.25 if "streamed bytes" in beside else 1.0
        else:
            work_ns = body.amount / (min(sms, SATURATING_SMS) * BYTES_PER_S_AND_SM) * 1e9
            if self._last == body.name == "cached bytes":
                work_ns /= CACHE_FACTOR
            factor = 2.0 if "streamed bytes" in beside else 1.0
        return round((KERNEL_NS + work_ns) * factor)


def sheet() -> DeviceProfile:
    """Return the data sheet's profile, for atoms of 8."""
    return replace(load_profile(Path("h200")), atoms=(*15 * (8,), 12))


@pytest.fixture(scope="module")
def profile() -> DeviceProfile:
    """Measure the stand-in."""
    return calibrate_gpu(ClockedGpu(), sheet(), name="Fake", device=torch.device("cpu"), sizes=SIZES)


def test_rates_are_those_of_every_quota(profile: DeviceProfile) -> None:
    """One atom to all, and the whole device; arithmetic grows with SMs, and bytes until the memory is saturated."""
    assert profile.unit_counts == (1, *range(8, 121, 8), 132)
    for units in (8, 64, 96, 132):
        for kind in (KernelKind.MATMUL, KernelKind.ATTENTION, KernelKind.BATCHED_MATMUL):
            rate = profile.flops_per_s(kind, "bfloat16", 2 * SIZES.sides[-1] ** 3, units)
            assert rate == pytest.approx(units * FLOPS_PER_S_AND_SM, rel=0.01)
        rate = profile.far_rate(1, units)
        assert rate == pytest.approx(min(units, SATURATING_SMS) * BYTES_PER_S_AND_SM, rel=0.01)
        assert profile.near_rate(1200, units) == pytest.approx(CACHE_FACTOR * rate, rel=0.01)


def test_what_was_measured_is_predicted(profile: DeviceProfile) -> None:
    """Waves count once, though the last one of most quotas is short."""
    for side, tiles in zip(SIZES.sides, (9, 100), strict=True):
        kernel = Kernel(kind=KernelKind.MATMUL, dtype="bfloat16", flops=2 * side**3, bytes_moved=0, tiles=tiles)
        for units in (8, 64, 72, 112, 132):
            rate = FLOPS_PER_S_AND_SM * SHARE_OF_SMALL if tiles < 100 else FLOPS_PER_S_AND_SM
            measured_ns = KERNEL_NS + -(-tiles // units) * kernel.flops / tiles / rate * 1e9
            assert predict_kernel(kernel, profile, units).total_ns == pytest.approx(measured_ns, rel=0.01)


def test_fixed_times_are_those_of_chains(profile: DeviceProfile) -> None:
    """A kernel's own, and what a hand-over adds; a segment adds nothing."""
    assert (profile.kernel_ns, profile.handover_ns, profile.launch_ns) == (KERNEL_NS, HANDOVER_NS, 0)


def test_neighbours_are_measured_in_pairs(profile: DeviceProfile) -> None:
    """Each on its half of the device, arithmetic and memory beside arithmetic and memory."""
    assert profile.slowdown == ((1.0, 1.25), (1.0, 2.0))


def test_what_is_not_measured_is_the_sheets(profile: DeviceProfile) -> None:
    """At the new numbers of units; the notes say which is which."""
    for units in (8, 72, 132):
        for kind, dtype in ((KernelKind.SCATTER, "float32"), (KernelKind.MATMUL, "float64")):
            expected = sheet().flops_per_s(kind, dtype, 1, units)
            assert profile.flops_per_s(kind, dtype, 1, units) == pytest.approx(expected, rel=0.01)
    assert (profile.name, profile.source, profile.units, profile.atoms) == (
        "Fake",
        "measured",
        132,
        (*15 * (8,), 12),
    )
    assert "as in the profile of NVIDIA H200 SXM" in profile.notes[1]
    assert profile.notes[2] == "products of float32 at torch's float32_matmul_precision 'highest'"


def test_every_step_is_told() -> None:
    """In order, up to the last; a device with one atom has no neighbours."""
    seen: list[tuple[str, int, int]] = []
    profile = calibrate_gpu(
        ClockedGpu(),
        replace(sheet(), units=132, atoms=(132,)),
        name="Fake",
        device=torch.device("cpu"),
        sizes=SIZES,
        progress=lambda *step: seen.append(step),
    )
    assert seen == [
        ("kernels and hand-overs", 0, 3),
        ("kernels on lanes", 1, 3),
        ("neighbours", 2, 3),
        ("done", 3, 3),
    ]
    assert profile.slowdown == ((1.0, 1.0), (1.0, 1.0)) and profile.handover_ns == sheet().handover_ns
