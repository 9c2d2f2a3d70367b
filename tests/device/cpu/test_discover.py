"""The profile of this machine is measured once, distrusted where it does not fit, and never missing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from apollo_compile.device.cpu import discover
from apollo_compile.device.cpu.discover import discover_profile
from apollo_compile.device.cpu.machine import machine_fingerprint
from apollo_compile.ir import KernelKind
from apollo_compile.store import profiles
from apollo_compile.target.profile import Rate, limit_units
from tests.profiles import CPU


@pytest.fixture(autouse=True)
def _fresh_process() -> None:
    """Forget what earlier tests measured."""
    discover_profile.cache_clear()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count quick measurements, and make them instant."""
    calls: list[str] = []

    def measure() -> tuple[int, int, int, bool]:
        calls.append("measured")
        return 100_000, 50_000, 200_000, False

    monkeypatch.setattr(discover, "_measure_quickly", measure)
    return calls


def test_a_quick_measurement_scales_the_default() -> None:
    """A real one: other arithmetic than matmuls by one factor, bytes by another; torch keeps its thread count."""
    threads = torch.get_num_threads()
    profile, default = discover_profile(2), profiles.default_profile(2)
    assert (profile.source, profile.units, torch.get_num_threads()) == ("scaled", 2, threads)

    def ratios(tables: list[tuple[Rate, ...]], others: list[tuple[Rate, ...]]) -> list[float]:
        pairs = [pair for rates in zip(tables, others, strict=True) for pair in zip(*rates, strict=True)]
        return [a / b for one, other in pairs for a, b in zip(one.per_s, other.per_s, strict=True)]

    assert profile.arithmetic[0].kind is KernelKind.MATMUL and profile.arithmetic[0].dtype == "float32"
    matmuls = ratios([profile.arithmetic[0].rates], [default.arithmetic[0].rates])
    faster = ratios([t.rates for t in profile.arithmetic[1:]], [t.rates for t in default.arithmetic[1:]])
    wider = ratios(
        [profile.near_bytes_per_s, profile.far_bytes_per_s], [default.near_bytes_per_s, default.far_bytes_per_s]
    )
    for found in (matmuls, faster, wider):
        assert found == pytest.approx([found[0]] * len(found)) and found[0] > 0


def test_matmuls_of_float32_are_scaled_by_the_library_of_bodies(measured: list[str]) -> None:
    """It takes half of the time of BLAS here, which other arithmetic and other types are scaled by."""
    default = profiles.default_profile(2)
    for table, before in zip(discover_profile(2).arithmetic, default.arithmetic, strict=True):
        by_body = (table.kind, table.dtype) == (KernelKind.MATMUL, "float32")
        own_ns = 1e9 * 2 * 256**3 / default.flops_per_s(KernelKind.MATMUL, "float32", 2 * 256**3, 1)
        factor = own_ns / (50_000 if by_body else 100_000)
        for rate, rate_before in zip(table.rates, before.rates, strict=True):
            assert rate.per_s == pytest.approx([value * factor for value in rate_before.per_s])


def test_a_measurement_inside_a_compile_is_of_real_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends run under a mode that makes every tensor a fake, and fakes compute nothing."""
    kinds: list[type] = []

    def best_of(call: Callable[[], object]) -> tuple[int, float]:
        made = call()
        kinds.extend(map(type, made if isinstance(made, list) else [made]))  # a list of several matmuls
        return 1_000_000, 1.0

    monkeypatch.setattr(discover, "_best_of", best_of)
    with FakeTensorMode():
        discover_profile(2)
    assert set(kinds) == {torch.Tensor}


def test_a_disturbed_measurement_is_used_but_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process on the core must not make later compiles believe that the device is slow."""
    monkeypatch.setattr(discover, "_measure_quickly", lambda: (100_000, 50_000, 200_000, True))
    assert discover_profile(2, cache_dir=tmp_path).source == "scaled" and list(tmp_path.iterdir()) == []


def test_a_process_measures_once_and_the_next_one_reads_the_file(tmp_path: Path, measured: list[str]) -> None:
    """The cache serves both."""
    folder = tmp_path / "new" / "folder"
    first = discover_profile(2, cache_dir=folder)
    assert discover_profile(2, cache_dir=folder) is first
    discover_profile.cache_clear()
    assert discover_profile(2, cache_dir=folder) == first and len(measured) == 1


def test_fewer_cores_use_the_calibrated_profile_of_more(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks have a share of the cores each; what was only scaled gives way to it, and serves no other number."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert discover_profile(1, cache_dir=tmp_path).source == "scaled"
    discover_profile.cache_clear()
    assert discover_profile(2, cache_dir=tmp_path).source == "scaled"
    profile = replace(CPU, units=4, source="measured")
    profiles.save_profile(profile, profiles.cached_profile_path(tmp_path, 4), fingerprint=machine_fingerprint(4))
    discover_profile.cache_clear()
    assert discover_profile(1, cache_dir=tmp_path) == limit_units(profile, 1) and len(measured) == 2


@pytest.mark.parametrize(
    "content", ("", "{", "[]", '{"format": 0}', '{"format": 5, "fingerprint": null, "profile": {"units": 2}}')
)
def test_a_damaged_file_is_one_warning(
    tmp_path: Path, measured: list[str], caplog: pytest.LogCaptureFixture, content: str
) -> None:
    """Half-written, foreign and incomplete files are named, and the scaled default is used."""
    path = profiles.cached_profile_path(tmp_path, 2)
    path.write_text(content)
    profile = discover_profile(2, cache_dir=tmp_path)
    (record,) = caplog.records
    assert str(path) in record.getMessage() and "damaged" in record.getMessage()
    assert "apollo calibrate" in record.getMessage()
    assert profile.source == "scaled" and measured


@pytest.mark.parametrize("source", ["measured", "scaled"])
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("torch", "1.0", "torch '1.0' is now"),
        ("device", "another", "device 'another' is now"),
        ("cores", 10_000, "cores 10000 is now"),
        ("driver", "570.1", "driver '570.1' is now None"),
        ("method", None, "libraries that bodies use"),
    ],
)
def test_a_stale_profile_is_one_warning_if_the_user_made_it_else_taken_anew(
    *,
    tmp_path: Path,
    measured: list[str],
    caplog: pytest.LogCaptureFixture,
    field: str,
    value: object,
    says: str,
    source: Literal["measured", "scaled"],
) -> None:
    """A calibration took minutes and stays on disk; files of earlier versions do not say how they were measured."""
    path, fingerprint = profiles.cached_profile_path(tmp_path, 2), machine_fingerprint(2)
    old = replace(CPU, units=2, source=source)
    profiles.save_profile(
        old, path, fingerprint=fingerprint if value is None else replace(fingerprint, **{field: value})
    )
    if value is None:
        content = json.loads(path.read_text())
        assert content.pop(field) > 1
        path.write_text(json.dumps(content))
    profile = discover_profile(2, cache_dir=tmp_path)
    told = [record.getMessage() for record in caplog.records]
    assert profile.source == "scaled" and profile != old and measured
    if source == "scaled":
        assert not told and profiles.inspect_profile(path, fingerprint).content == profile
    else:
        assert len(told) == 1 and all(each in told[0] for each in ("stale", says, "apollo calibrate"))
        assert profiles.load_profile(path) == old, "a user may still name it"


@pytest.mark.parametrize(("folder", "says"), [("long" * 100, "too long"), ("file/cache", "")])
def test_a_directory_that_is_none_still_gives_a_profile(
    tmp_path: Path, measured: list[str], caplog: pytest.LogCaptureFixture, folder: str, says: str
) -> None:
    """As where a directory above may not be entered: here a name is too long, or a file is in the way."""
    (tmp_path / "file").write_text("")
    profile = discover_profile(2, cache_dir=tmp_path / folder)
    assert (profile.source, profile.units) == ("scaled", 2)
    assert all(says in record.getMessage() for record in caplog.records) and len(caplog.records) >= bool(says)
