"""What a CPU tells the session about itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from apollo_compile.config import load_config
from apollo_compile.device.cpu.machine import machine_fingerprint
from apollo_compile.device.cpu.target import CpuTarget
from apollo_compile.json_form import from_json
from apollo_compile.store.profiles import cached_profile_path, default_profile, save_profile
from apollo_compile.target.fingerprint import Fingerprint
from tests.torch_settings import threads


def test_findings_depend_on_the_machine_and_on_the_number_of_threads() -> None:
    """Torch's version is in the fingerprint."""
    target = CpuTarget(default_profile(1), load_config())
    before = target.circumstances()
    assert from_json(Fingerprint, before[0]) == machine_fingerprint(1)
    with threads(torch.get_num_threads() + 1):
        assert target.circumstances() != before
    assert target.circumstances() == before


def test_a_profile_is_kept_if_the_next_process_finds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was named by the user, or is in the cache."""
    profile = default_profile(1)
    assert CpuTarget(profile, load_config({"device.cache": tmp_path, "device.profile": "cpu"})).keeps_profile
    monkeypatch.delenv("APOLLO_PROFILE")
    config = load_config({"device.cache": tmp_path})
    assert not CpuTarget(profile, config).keeps_profile
    save_profile(profile, cached_profile_path(tmp_path, 1), fingerprint=machine_fingerprint(1))
    assert CpuTarget(profile, config).keeps_profile and not CpuTarget(default_profile(2), config).keeps_profile
