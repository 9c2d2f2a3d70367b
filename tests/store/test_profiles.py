"""Files of profiles: some come with the package, some are named by a user, and writing and reading are inverse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apollo_compile.device.cpu.machine import machine_fingerprint
from apollo_compile.errors import ConfigError
from apollo_compile.ir import KernelKind
from apollo_compile.store.profiles import default_profile, load_profile, packaged_profiles, save_profile
from apollo_compile.target.lanes import lane_catalogue
from tests.profiles import CPU


@pytest.mark.parametrize("name", packaged_profiles())
def test_packaged_rates_rise_with_units(name: str) -> None:
    """More units never make a whole device slower, and no device scales better than evenly."""
    profile = load_profile(Path(name))
    tables = [*(table.rates for table in profile.arithmetic), profile.near_bytes_per_s, profile.far_bytes_per_s]
    for rate in (rate for rates in tables for rate in rates):
        assert list(rate.per_s) == sorted(rate.per_s)
        per_unit = [value / count for value, count in zip(rate.per_s, profile.unit_counts, strict=True)]
        assert per_unit[0] == pytest.approx(max(per_unit), rel=0.01)


@pytest.mark.parametrize(("name", "bandwidth"), [("h100", 3.35e12), ("h200", 4.8e12)])
def test_a_large_device_saturates_its_memory_with_half_of_its_units(name: str, bandwidth: float) -> None:
    """65 GB/s per SM, 92 % of the data sheet's at most; a neighbour that uses the memory too halves it nearly."""
    profile = load_profile(Path(name))
    assert profile.far_rate(10**9, 8) == pytest.approx(8 * 65e9)
    assert profile.far_rate(10**9, 132) == pytest.approx(0.92 * bandwidth, rel=0.01)
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
    """Perhaps one of them was meant: there is one per kind of device, readable by name."""
    assert packaged_profiles() == ("cpu", "h100", "h200")
    large = load_profile(Path("h200"))
    assert load_profile(Path("cpu")).kind == "cpu" and large.notes
    assert (large.kind, large.units, large.source) == ("cuda", 132, "datasheet")
    with pytest.raises(ConfigError, match=r"missing\.json.*cpu, h100, h200"):
        load_profile(tmp_path / "missing.json")
