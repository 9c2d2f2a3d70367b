"""The native device through the bindings, with the stub of libcuda."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from apollo_compile import _native
from apollo_compile.config import load_config
from apollo_compile.device import open as device_open
from apollo_compile.device.gpu.run.gpu import atoms_of
from apollo_compile.errors import CudaError
from apollo_compile.target.lanes import lane_catalogue, lanes_for_two


def open_stub(stub: ctypes.CDLL, ordinal: int = 0) -> _native.CudaDevice:
    """Return the stub's device."""
    return _native.cuda_device(ordinal, stub._name)


def sms_of(stub: ctypes.CDLL, stream: int) -> set[int]:
    """Return the SMs that a stream uses."""
    sms = (ctypes.c_int * 256)()
    count = stub.stub_sms_of_stream(stream, sms)
    assert count >= 0
    return set(sms[:count])


def test_a_device_says_what_it_is(stub: ctypes.CDLL) -> None:
    """As the driver tells."""
    device = open_stub(stub)
    assert (device.name, device.driver_version, device.compute_capability) == ("Stub GPU", 13000, (9, 0))
    assert (device.num_sms, device.num_atoms) == (132, 16)
    assert device.atom_sizes == [*15 * [8], 12]
    assert device.functions["cuGreenCtxStreamCreate"] and not device.functions["cuDevSmResourceSplit"]
    free, total = device.memory()
    assert 0 < free < total and open_stub(stub) is device


def test_the_lanes_of_the_catalogue_have_the_sms_of_their_units(stub: ctypes.CDLL) -> None:
    """Lanes of a split share none; lanes of different splits share as many as units."""
    device = open_stub(stub)
    lanes = lane_catalogue(device.num_sms, device.atom_sizes)[1:]
    natives = [device.lane(atoms_of(lane, device.atom_sizes)) for lane in lanes]
    for one, its in zip(lanes, natives, strict=True):
        assert its.num_sms == len(one.units)
        for other, others in zip(lanes, natives, strict=True):
            assert len(sms_of(stub, its.stream) & sms_of(stub, others.stream)) == len(set(one.units) & set(other.units))
    assert stub.stub_log().decode().split().count("cuDevSmResourceSplitByCount") == 1


@pytest.mark.parametrize("stays_alone", (False, True), ids=("joined", "left over"))
@pytest.mark.parametrize("num_atoms", (16, 15, 3, 1))
def test_lanes_are_made_of_the_atoms_that_the_driver_grants(
    stub: ctypes.CDLL, num_atoms: int, stays_alone: bool
) -> None:
    """Fewer than its SMs would fill, as where some lie in no whole group: those belong to the last, or to none."""
    stub.stub_set_leftover(num_atoms, stays_alone)
    device = open_stub(stub)
    assert device.atom_sizes == [*(num_atoms - 1) * [8], 8 if stays_alone else 132 - (num_atoms - 1) * 8]
    gpu = SimpleNamespace(native=device, device=torch.device("cuda", 0))
    profile = device_open._gpu_profile(gpu, load_config({"device.profile": "h200"}))  # type: ignore[arg-type]
    first, *others = profile.lanes
    assert len(first.units) == 132
    halves = lanes_for_two(profile.lanes)[1:]
    for left, right in zip(halves[::2], halves[1::2], strict=True):
        assert left.units + right.units == first.units[: sum(device.atom_sizes)]
    for lane in others:
        made = device.lane(atoms_of(lane, device.atom_sizes))
        assert made.num_sms == len(sms_of(stub, made.stream)) == len(lane.units)


def test_what_the_driver_refuses_is_a_cuda_error_that_says_what_to_do(stub: ctypes.CDLL) -> None:
    """What failed, what was expected and found, where, and what to do."""
    device = open_stub(stub)
    stub.stub_fail(b"cuGreenCtxCreate", 915, 0)
    with pytest.raises(CudaError) as caught:
        device.lane([4, 5, 6])
    assert str(caught.value) == (
        "cuGreenCtxCreate failed for a lane of 24 SMs (atoms 4, 5, 6) on device 0: "
        "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION (915, text of the stub), expected success; the driver refuses this "
        "set of SMs; 'apollo doctor' shows the groups that it gives"
    )
    with pytest.raises(ValueError, match=r"cannot make a lane of atoms \[99\]: expected some of 0 to 15"):
        device.lane([99])


def test_an_old_driver_is_refused(stub: ctypes.CDLL) -> None:
    """With the version that it takes."""
    stub.stub_reset(12040)
    with pytest.raises(CudaError, match=r"CUDA 12\.4: it has no cuGreenCtxStreamCreate; lanes need .* CUDA 12\.5 on"):
        open_stub(stub)


def test_a_process_that_ends_with_lanes_ends_well(stub: ctypes.CDLL) -> None:
    """Nothing is destroyed while torch may still use it."""
    code = (
        "from apollo_compile import _native\n"
        f"device = _native.cuda_device(0, {stub._name!r})\n"
        "lanes = [device.lane([atom]) for atom in range(device.num_atoms)]\n"
        "print(len(lanes))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=900)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "16", "")


def test_a_machine_without_a_driver_gets_told() -> None:
    """The extension was imported there all the same."""
    with pytest.raises(CudaError, match=r"cannot open the CUDA driver libcuda-nowhere\.so: .* need an NVIDIA driver"):
        _native.cuda_device(0, "libcuda-nowhere.so")
