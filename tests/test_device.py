"""Device profiles are measured once, kept with a fingerprint, and distrusted when they do not fit."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from apollo_compile import device
from apollo_compile.device import DeviceProfile, default_profile, discover_profile, load_profile, save_profile
from apollo_compile.errors import ConfigError


@pytest.fixture(autouse=True)
def _fresh_process() -> None:
    """Forget what earlier tests measured."""
    device._discover.cache_clear()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count measurements, and make them instant."""
    calls: list[int] = []

    def rates(threads: int) -> device._Rates:
        calls.append(threads)
        return device._Rates(90e9 * threads, 12e9 + 3e9 * threads, is_disturbed=False)

    monkeypatch.setattr(device, "_measure_rates", rates)
    return calls


def test_default_profiles_are_the_same_everywhere() -> None:
    """More units never have lower rates, and two calls are equal."""
    for units in (1, 2, 8):
        profile = default_profile(units)
        assert profile == default_profile(units)
        assert profile.source == "default" and profile.units == units == len(profile.flops_per_s)
        assert list(profile.flops_per_s) == sorted(profile.flops_per_s)
        assert list(profile.bytes_per_s) == sorted(profile.bytes_per_s)


def test_a_real_measurement_is_quick_and_plausible() -> None:
    """Rates are positive, rise with units, and torch keeps its thread count."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    profile = discover_profile(2)
    assert profile.source == "measured" and torch.get_num_threads() == threads
    assert 1e9 < profile.flops_per_s[0] <= profile.flops_per_s[1]
    assert 1e8 < profile.bytes_per_s[0] <= profile.bytes_per_s[1]


def test_a_measurement_inside_a_compile_is_of_real_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends run under a mode that makes every tensor a fake, and fakes compute nothing."""
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    kinds: list[type] = []

    def best_of(call: Callable[[], object]) -> tuple[int, float]:
        kinds.append(type(call()))
        return 1_000_000, 1.0

    monkeypatch.setattr(device, "_best_of", best_of)
    with FakeTensorMode():
        discover_profile(2)
    assert set(kinds) == {torch.Tensor}


def test_counts_between_one_and_all_are_interpolated(measured: list[int]) -> None:
    """Flops rise evenly; bandwidth rises and saturates; only the ends are measured."""
    profile = discover_profile(4)
    assert measured == [1, 4]
    assert profile.flops_per_s == pytest.approx((90e9, 180e9, 270e9, 360e9))
    steps = [after - before for before, after in zip(profile.bytes_per_s, profile.bytes_per_s[1:], strict=False)]
    assert (profile.bytes_per_s[0], profile.bytes_per_s[-1]) == pytest.approx((15e9, 24e9))
    assert steps == sorted(steps, reverse=True) and min(steps) > 0


def test_a_disturbed_measurement_is_used_but_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process on a core must not make later compiles believe that the device does not scale."""
    monkeypatch.setattr(device, "_measure_rates", lambda threads: device._Rates(90e9, 10e9, is_disturbed=threads > 1))
    profile = discover_profile(2, cache_dir=tmp_path)
    assert profile.flops_per_s == pytest.approx((90e9, 90e9 * (1 + device.LEAST_SCALING)))
    assert list(tmp_path.iterdir()) == []


def test_a_process_measures_once_and_the_next_one_reads_the_file(tmp_path: Path, measured: list[int]) -> None:
    """The cache serves both."""
    first = discover_profile(2, cache_dir=tmp_path / "new" / "folder")
    assert discover_profile(2, cache_dir=tmp_path / "new" / "folder") is first
    device._discover.cache_clear()
    assert discover_profile(2, cache_dir=tmp_path / "new" / "folder") == first
    assert measured == [1, 2]


@pytest.mark.parametrize("content", ("", "{", "[]", '{"format": 0}', '{"format": 2, "profile": {"units": 2}}'))
def test_a_damaged_file_is_replaced_with_a_warning(
    tmp_path: Path, measured: list[int], caplog: pytest.LogCaptureFixture, content: str
) -> None:
    """Half-written, foreign and incomplete files are measured anew."""
    path = tmp_path / "profile-2.json"
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        profile = discover_profile(2, cache_dir=tmp_path)
    assert "damaged" in caplog.text and measured == [1, 2]
    assert load_profile(path) == profile


def test_a_profile_of_another_machine_is_replaced_with_a_warning(
    tmp_path: Path, measured: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """The warning says what changed."""
    discover_profile(2, cache_dir=tmp_path)
    device._discover.cache_clear()
    path = tmp_path / "profile-2.json"
    content = json.loads(path.read_text())
    content["fingerprint"]["torch"] = "1.0"
    path.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        discover_profile(2, cache_dir=tmp_path)
    assert "torch '1.0' is now" in caplog.text and measured == [1, 2, 1, 2]


def test_a_directory_that_cannot_be_written_still_gives_a_profile(tmp_path: Path, measured: list[int]) -> None:
    """The path of the cache is a file here, so that no directory can be made, whoever runs the test."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert discover_profile(2, cache_dir=blocked / "cache").units == 2


def test_profiles_survive_their_file(tmp_path: Path) -> None:
    """Writing and reading are inverse, and no temporary file stays."""
    save_profile(default_profile(3), tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == default_profile(3)
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_a_profile_that_was_asked_for_must_be_readable(tmp_path: Path) -> None:
    """Unlike the cache, a file named by the user is not replaced in silence."""
    with pytest.raises(ConfigError, match=r"missing\.json"):
        load_profile(tmp_path / "missing.json")


def test_rates_must_fit_the_units() -> None:
    """A profile for two units has two rates of each kind."""
    values = {"kernel_ns": 1, "parallel_ns": 1, "launch_ns": 1, "handover_ns": 1}
    with pytest.raises(ValueError, match="expected 2 positive rates"):
        DeviceProfile(name="x", source="datasheet", units=2, flops_per_s=(1.0,), bytes_per_s=(1.0, 2.0), **values)


def test_importing_the_file_does_not_import_torch() -> None:
    """Planning needs profiles on machines without torch."""
    code = "import sys, apollo_compile.device; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
