"""Fingerprints of GPUs."""

from __future__ import annotations

from pathlib import Path

from apollo_compile.device.gpu.fingerprint import gpu_fingerprint


def test_a_fingerprint_has_the_release_of_the_driver(tmp_path: Path) -> None:
    """Many releases speak the same CUDA; without the file, that is all that is known."""
    release = tmp_path / "release"
    release.write_text("580.82.07\n", encoding="utf-8")
    mine = gpu_fingerprint("Fake GPU", cuda=13000, units=132, release_file=release)
    assert (mine.device, mine.driver, mine.units) == ("Fake GPU", "580.82.07 (CUDA 13000)", 132)
    release.write_text("590.48.01\n", encoding="utf-8")
    assert gpu_fingerprint("Fake GPU", cuda=13000, units=132, release_file=release).driver == "590.48.01 (CUDA 13000)"
    assert gpu_fingerprint("Fake GPU", cuda=13000, units=132, release_file=tmp_path / "none").driver == "CUDA 13000"
