"""Device profiles are kept with a fingerprint, distrusted when they do not fit, and never missing."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from apollo_compile.device import profile as device_profile
from apollo_compile.device.lanes import lane_catalogue
from apollo_compile.device.profile import (
    Rate,
    cached_profile_path,
    default_profile,
    discover_profile,
    inspect_profile,
    limit_units,
    load_profile,
    machine_fingerprint,
    packaged_profiles,
    save_profile,
)
from apollo_compile.errors import ConfigError
from apollo_compile.ir import KernelKind
from tests.profiles import CPU


@pytest.fixture(autouse=True)
def _fresh_process() -> None:
    """Forget what earlier tests measured."""
    device_profile._discover.cache_clear()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count quick measurements, and make them instant."""
    calls: list[str] = []

    def measure() -> tuple[int, int, bool]:
        calls.append("measured")
        return 100_000, 200_000, False

    monkeypatch.setattr(device_profile, "_measure_quickly", measure)
    return calls


# -------------------------------------------------------------------------------------------------------- packaged


def test_profiles_come_with_the_package() -> None:
    """One per kind of device, readable by name."""
    assert packaged_profiles() == ("cpu", "h200")
    assert load_profile(Path("cpu")).kind == "cpu"
    large = load_profile(Path("h200"))
    assert (large.kind, large.units, large.source) == ("cuda", 132, "datasheet")
    assert large.notes


@pytest.mark.parametrize("name", packaged_profiles())
def test_packaged_rates_rise_with_units(name: str) -> None:
    """More units never make a whole device slower, and no device scales better than evenly."""
    profile = load_profile(Path(name))
    tables = [*(table.rates for table in profile.arithmetic), profile.near_bytes_per_s, profile.far_bytes_per_s]
    for rate in (rate for rates in tables for rate in rates):
        assert list(rate.per_s) == sorted(rate.per_s)
        per_unit = [value / count for value, count in zip(rate.per_s, profile.unit_counts, strict=True)]
        assert per_unit[0] == pytest.approx(max(per_unit), rel=0.01)


def test_the_large_device_saturates_its_memory_with_half_of_its_units() -> None:
    """65 GB/s per SM, 92 % of 4.8 TB/s at most; a neighbour that uses the memory too halves it nearly."""
    profile = load_profile(Path("h200"))
    assert profile.far_rate(10**9, 8) == pytest.approx(8 * 65e9)
    assert profile.far_rate(10**9, 132) == pytest.approx(0.92 * 4.8e12, rel=0.01)
    assert profile.slowdown[1][1] == pytest.approx(2 * profile.far_rate(1, 66) / profile.far_rate(1, 132), rel=0.05)
    assert profile.flops_per_s(KernelKind.MATMUL, "bfloat16", 10**10, 132) < 989e12


@pytest.mark.parametrize("units", (1, 2, 8, 64, 100))
def test_the_default_fits_any_number_of_units(units: int) -> None:
    """It is the same on every machine, and has a rate for every lane of the catalogue."""
    profile = default_profile(units)
    assert profile == default_profile(units)
    assert (profile.units, profile.source) == (units, "default")
    for lane in lane_catalogue(units):
        assert profile.flops_per_s(KernelKind.MATMUL, "float32", 10**8, len(lane.units)) > 1e9


def test_fewer_units_are_the_same_device() -> None:
    """Only the number that may be used changes."""
    assert limit_units(CPU, 2) == replace(CPU, name="test x2", units=2)


# ------------------------------------------------------------------------------------------------------- discovery


def test_a_quick_measurement_scales_the_default() -> None:
    """A real one: all arithmetic by one factor, all bytes by another; torch keeps its thread count."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    profile, default = discover_profile(2), default_profile(2)
    assert (profile.source, profile.units, torch.get_num_threads()) == ("scaled", 2, threads)

    def ratios(tables: list[tuple[Rate, ...]], others: list[tuple[Rate, ...]]) -> list[float]:
        pairs = [pair for rates in zip(tables, others, strict=True) for pair in zip(*rates, strict=True)]
        return [a / b for one, other in pairs for a, b in zip(one.per_s, other.per_s, strict=True)]

    faster = ratios([t.rates for t in profile.arithmetic], [t.rates for t in default.arithmetic])
    wider = ratios(
        [profile.near_bytes_per_s, profile.far_bytes_per_s], [default.near_bytes_per_s, default.far_bytes_per_s]
    )
    assert faster == pytest.approx([faster[0]] * len(faster))
    assert wider == pytest.approx([wider[0]] * len(wider))
    assert min(faster[0], wider[0]) > 0


def test_a_measurement_inside_a_compile_is_of_real_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends run under a mode that makes every tensor a fake, and fakes compute nothing."""
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    kinds: list[type] = []

    def best_of(call: Callable[[], object]) -> tuple[int, float]:
        kinds.append(type(call()))
        return 1_000_000, 1.0

    monkeypatch.setattr(device_profile, "_best_of", best_of)
    with FakeTensorMode():
        discover_profile(2)
    assert set(kinds) == {torch.Tensor}


def test_a_disturbed_measurement_is_used_but_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process on the core must not make later compiles believe that the device is slow."""
    monkeypatch.setattr(device_profile, "_measure_quickly", lambda: (100_000, 200_000, True))
    assert discover_profile(2, cache_dir=tmp_path).source == "scaled"
    assert list(tmp_path.iterdir()) == []


def test_a_process_measures_once_and_the_next_one_reads_the_file(tmp_path: Path, measured: list[str]) -> None:
    """The cache serves both."""
    folder = tmp_path / "new" / "folder"
    first = discover_profile(2, cache_dir=folder)
    assert discover_profile(2, cache_dir=folder) is first
    device_profile._discover.cache_clear()
    assert discover_profile(2, cache_dir=folder) == first
    assert len(measured) == 1


def test_a_calibrated_profile_is_used_as_it_is(tmp_path: Path, measured: list[str]) -> None:
    """Nothing is measured then."""
    calibrated = replace(CPU, units=2, source="measured")
    save_profile(calibrated, cached_profile_path(tmp_path, 2), fingerprint=machine_fingerprint(2))
    assert discover_profile(2, cache_dir=tmp_path) == calibrated
    assert not measured


@pytest.mark.parametrize("atoms", ((), (8, 0), (8,) * 17))
def test_atoms_that_the_units_cannot_have_are_refused(atoms: tuple[int, ...]) -> None:
    """They may be fewer together."""
    with pytest.raises(ValueError, match="expected atoms of 132 units together at most"):
        replace(load_profile(Path("h200")), atoms=atoms)


@pytest.mark.parametrize(("units", "atoms"), ((66, (*7 * (8,), 10)), (264, 33 * (8,)), (12, (12,)), (4, (4,))))
def test_other_numbers_of_units_come_in_atoms_of_the_same_size(units: int, atoms: tuple[int, ...]) -> None:
    """The last has what is left over."""
    limited = limit_units(replace(load_profile(Path("h200")), atoms=(*14 * (8,), 20)), units)
    assert (limited.units, limited.atoms) == (units, atoms)


@pytest.mark.parametrize(
    "content", ("", "{", "[]", '{"format": 0}', '{"format": 5, "fingerprint": null, "profile": {"units": 2}}')
)
def test_a_damaged_file_is_one_warning(
    tmp_path: Path, measured: list[str], caplog: pytest.LogCaptureFixture, content: str
) -> None:
    """Half-written, foreign and incomplete files are named, and the scaled default is used."""
    path = cached_profile_path(tmp_path, 2)
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        profile = discover_profile(2, cache_dir=tmp_path)
    (record,) = caplog.records
    assert str(path) in record.getMessage() and "damaged" in record.getMessage()
    assert "apollo calibrate" in record.getMessage()
    assert profile.source == "scaled" and measured


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("torch", "1.0", "torch '1.0' is now"),
        ("device", "another", "device 'another' is now"),
        ("cores", 10_000, "cores 10000 is now"),
        ("driver", "570.1", "driver '570.1' is now None"),
    ],
)
def test_a_stale_profile_is_one_warning_that_says_what_changed(
    tmp_path: Path, measured: list[str], caplog: pytest.LogCaptureFixture, field: str, value: object, says: str
) -> None:
    """It stays on disk until the user calibrates again: it took minutes to make."""
    path = cached_profile_path(tmp_path, 2)
    old = replace(machine_fingerprint(2), **{field: value})
    save_profile(replace(CPU, units=2), path, fingerprint=old)
    before = path.read_text()
    with caplog.at_level(logging.WARNING):
        profile = discover_profile(2, cache_dir=tmp_path)
    (record,) = caplog.records
    assert says in record.getMessage() and "apollo calibrate" in record.getMessage()
    assert (profile.source, path.read_text()) == ("scaled", before)


@pytest.mark.parametrize("field", ["torch", "device", "cores"])
def test_a_stale_quick_measurement_is_taken_anew_without_a_word(
    tmp_path: Path, measured: list[str], caplog: pytest.LogCaptureFixture, field: str
) -> None:
    """The user has not made it, and what is known by it would be lost in every process."""
    path = cached_profile_path(tmp_path, 2)
    old = replace(machine_fingerprint(2), **{field: 7 if field == "cores" else "another"})
    save_profile(replace(CPU, units=2, source="scaled"), path, fingerprint=old)
    with caplog.at_level(logging.WARNING):
        profile = discover_profile(2, cache_dir=tmp_path)
    assert not caplog.records and measured
    assert inspect_profile(path, machine_fingerprint(2)).profile == profile


def test_a_directory_that_cannot_even_be_asked_about_still_gives_a_profile(
    tmp_path: Path, measured: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """As where a directory above it may not be entered; here its name is too long for the system."""
    with caplog.at_level(logging.WARNING):
        profile = discover_profile(2, cache_dir=tmp_path / ("long" * 100))
    (record,) = caplog.records
    assert "too long" in record.getMessage()
    assert profile.source == "scaled"


def test_a_directory_that_cannot_be_written_still_gives_a_profile(tmp_path: Path, measured: list[str]) -> None:
    """The path of the cache is a file here, so that no directory can be made, whoever runs the test."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert discover_profile(2, cache_dir=blocked / "cache").units == 2


# ----------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", packaged_profiles())
def test_profiles_survive_their_file(tmp_path: Path, name: str) -> None:
    """Writing and reading are inverse, and no temporary file stays."""
    profile = load_profile(Path(name))
    save_profile(profile, tmp_path / "p.json", fingerprint=machine_fingerprint(2))
    assert load_profile(tmp_path / "p.json") == profile
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


@pytest.mark.parametrize(("key", "value"), [("units", "two"), ("kind", "tpu"), ("surprise", 1), ("slowdown", [1.0])])
def test_a_profile_that_was_asked_for_must_be_readable(tmp_path: Path, key: str, value: object) -> None:
    """Unlike the cache, a file named by the user is not replaced in silence; the message names file and field."""
    path = tmp_path / "mine.json"
    save_profile(CPU, path)
    content = json.loads(path.read_text())
    content["profile"][key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"mine\.json.*{key}"):
        load_profile(path)


def test_a_missing_file_names_the_packaged_profiles(tmp_path: Path) -> None:
    """Perhaps one of them was meant."""
    with pytest.raises(ConfigError, match=r"missing\.json.*cpu, h200"):
        load_profile(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"near_bytes_per_s": (Rate(size=1, per_s=(1.0, 2.0)),)}, "expected 4 positive rates"),
        ({"far_bytes_per_s": ()}, "ascending sizes"),
        ({"far_bytes_per_s": (Rate(size=2, per_s=(1.0,) * 4), Rate(size=1, per_s=(1.0,) * 4))}, "ascending sizes"),
        ({"far_bytes_per_s": (Rate(size=1, per_s=(1.0, 2.0, 3.0, 0.0)),)}, "positive rates"),
        ({"unit_counts": (2, 3, 4, 5)}, "unit counts from 1"),
        ({"units": 0}, "at least 1 unit"),
        ({"arithmetic": ()}, "rates of loops and of matrix products"),
        ({"tensor_ns": -1}, "no negative time"),
        ({"slowdown": ((1.0, 0.5), (1.0, 1.0))}, "at least 1"),
    ],
)
def test_numbers_must_fit_each_other(changes: dict[str, object], says: str) -> None:
    """The message says what to do."""
    with pytest.raises(ValueError, match=f"{says}.*apollo calibrate"):
        replace(CPU, **changes)


def test_importing_the_file_does_not_import_torch() -> None:
    """Planning needs profiles on machines without torch."""
    code = "import sys, apollo_compile.device.profile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
