"""The profile of a GPU counts on that GPU only; a GPU without one counts as an H200."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from apollo_compile.device.gpu import discover
from apollo_compile.device.gpu.discover import discover_gpu_profile, gpu_fingerprint
from apollo_compile.store.profiles import cached_gpu_profile_path, load_profile, save_profile


def test_a_measured_profile_is_found_again_on_the_same_gpu_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another driver makes it stale, which is said; another GPU has none."""
    discover._tell_of_substitute.cache_clear()
    profile = replace(load_profile(Path("h200")), source="measured", name="Fake GPU")
    release = tmp_path / "release"
    release.write_text("580.82.07\n", encoding="utf-8")
    mine = gpu_fingerprint("Fake GPU", cuda=13000, units=132, release_file=release)
    path = cached_gpu_profile_path(tmp_path, mine)
    assert discover_gpu_profile(mine, cache_dir=tmp_path) == load_profile(Path("h200"))
    assert "Fake GPU was not measured: plans count on an NVIDIA H200 SXM" in caplog.text
    caplog.clear()
    save_profile(profile, path, fingerprint=mine)
    assert discover_gpu_profile(mine, cache_dir=tmp_path) == profile
    assert discover_gpu_profile(mine) == load_profile(Path("h200"))
    assert not caplog.records
    release.write_text("590.48.01\n", encoding="utf-8")  # speaks the same CUDA
    newer = gpu_fingerprint("Fake GPU", cuda=13000, units=132, release_file=release)
    assert discover_gpu_profile(newer, cache_dir=tmp_path) == load_profile(Path("h200"))
    assert "driver '580.82.07 (CUDA 13000)' is now '590.48.01 (CUDA 13000)'" in caplog.text
    unknown = gpu_fingerprint("Fake GPU", cuda=13000, units=132, release_file=tmp_path / "none")
    assert unknown.driver == "CUDA 13000"
    other = gpu_fingerprint("Other GPU", cuda=13000, units=132)
    assert cached_gpu_profile_path(tmp_path, other) != path
