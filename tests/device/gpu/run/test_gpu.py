"""`TorchGpu` with the stub of libcuda: streams of lanes, and numbers of SMs that libraries see.

Recorders replace streams and pools of torch, which need a device; the driver is the stub.
"""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import pytest
import torch

from apollo_compile import _native
from apollo_compile.config import load_config
from apollo_compile.device import open as device_open
from apollo_compile.device.gpu.run.gpu import Sharing, TorchGpu
from apollo_compile.errors import CudaError
from apollo_compile.ir import Lane, LaneId
from tests.device.gpu.run.test_device import sms_of

WHOLE = Lane(id=LaneId(0), units=tuple(range(132)))
LEFT = Lane(id=LaneId(1), units=tuple(range(96)))
RIGHT = Lane(id=LaneId(2), units=tuple(range(96, 132)))


@pytest.fixture
def gpu(stub: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> TorchGpu:
    """Return the stub's device."""
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: SimpleNamespace(cuda_stream=handle))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(
        "apollo_compile.device.gpu.run.gpu.open_device", lambda ordinal: _native.cuda_device(0, stub._name)
    )
    return TorchGpu(0)


def test_a_lane_has_the_sms_of_its_units(gpu: TorchGpu, stub: ctypes.CDLL) -> None:
    """The same stream every time; with every unit it is the caller's own."""
    left, right = gpu.lane_stream(LEFT), gpu.lane_stream(RIGHT)
    assert (len(sms_of(stub, left.cuda_stream)), len(sms_of(stub, right.cuda_stream))) == (96, 36)
    assert not sms_of(stub, left.cuda_stream) & sms_of(stub, right.cuda_stream)
    assert gpu.lane_stream(RIGHT) is right
    assert gpu.lane_stream(WHOLE) is None


def test_plain_streams_are_of_the_runtime_and_may_use_every_sm(gpu: TorchGpu, stub: ctypes.CDLL) -> None:
    """None is one of torch's, which it gives to others as well; a lane keeps its own."""
    free = gpu.sharing(Sharing.FREE)
    left, right = free.lane_stream(LEFT), free.lane_stream(RIGHT)
    assert len(sms_of(stub, left.cuda_stream)) == len(sms_of(stub, right.cuda_stream)) == 132
    assert left.cuda_stream != right.cuda_stream and free.lane_stream(LEFT) is left
    assert stub.stub_log().decode().split().count("cuStreamCreate") == 2


def test_a_lane_that_gets_fewer_sms_is_refused(gpu: TorchGpu, stub: ctypes.CDLL) -> None:
    """Its plan would rest on more."""
    stub.stub_set_grants(2, 0)
    with pytest.raises(CudaError, match=r"lane 1 was granted 94 SMs instead of 96 on Stub GPU; turn 'device\.cuda"):
        gpu.lane_stream(LEFT)


@pytest.mark.parametrize(("sharing", "left_out"), [(Sharing.APART, 36), (Sharing.FREE, None)])
def test_libraries_are_told_of_the_sms_that_are_not_the_lanes(
    gpu: TorchGpu, sharing: Sharing, left_out: int | None
) -> None:
    """While a body is launched on it, and not afterwards."""
    device, seen = gpu.sharing(sharing), []
    stream = device.lane_stream(LEFT)
    device.call(lambda inputs: seen.append(torch._C._get_sm_carveout_experimental()) or [], [], stream)  # type: ignore[func-returns-value]
    assert seen == [left_out] and torch._C._get_sm_carveout_experimental() is None


def test_captures_begin_on_a_stream_of_their_own(gpu: TorchGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever way lanes share the device; cuBLAS has workspaces on it and on all lanes, and on no other stream."""
    seen = []
    monkeypatch.setattr(
        "apollo_compile.device.gpu.run.gpu.capture_with_torch",
        lambda work, rehearsal, **options: seen.append((options["origin"].cuda_stream, set(options["streams"]))),
    )
    free = gpu.sharing(Sharing.FREE)
    lanes = {gpu.lane_stream(LEFT).cuda_stream, free.lane_stream(LEFT).cuda_stream}
    for each in (gpu, free):
        each.capture(lambda origin: None, None)
    origin = gpu.native.stream(0)
    assert seen == 2 * [(origin, {origin, *lanes})] and origin not in lanes
    assert free.captures is gpu.captures


def test_free_memory_is_the_drivers_and_what_torch_does_not_use(gpu: TorchGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert gpu.free_bytes() == gpu.native.memory()[0] + 300


def test_a_device_whose_captures_broke_torch_is_not_opened_again(
    gpu: TorchGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs that are compiled later fall back, for that reason."""
    config = load_config({"device.profile": "h200"})
    assert not isinstance(device_open._open_gpu(gpu.device, config), str)
    monkeypatch.setattr(gpu.captures, "why_off", "a capture failed")
    assert device_open._open_gpu(gpu.device, config) == "no lanes on cuda:0: a capture failed"
