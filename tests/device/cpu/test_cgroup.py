"""Memory that a container leaves: its limit, what is used, and cached files that make room."""

from __future__ import annotations

from pathlib import Path

import pytest

from apollo_compile.device.cpu import cgroup
from apollo_compile.device.cpu.cgroup import free_bytes


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where groups are, of a system that has 8 MiB left."""
    for name, file in (("ROOT", "groups"), ("MEMBERSHIP", "membership"), ("MEMORY", "meminfo")):
        monkeypatch.setattr(cgroup, name, tmp_path / file)
    (tmp_path / "meminfo").write_text("MemTotal:  9999 kB\nMemFree:  1 kB\nMemAvailable:  8192 kB\n")
    (tmp_path / "groups").mkdir()
    return tmp_path / "groups"


def test_the_system_and_every_group_have_to_have_it(root: Path) -> None:
    """The least counts; no limit and nonsense leave what the system has."""
    assert free_bytes() == 8192 * 1024
    for limit, free in (("max", 8192 * 1024), ("?", 8192 * 1024), ("5000", 4100), ("800", 0)):
        (root / "memory.max").write_text(limit)
        (root / "memory.current").write_text("1000\n")
        (root / "memory.stat").write_text("anon 7\ninactive_file 100\nactive_file 50\n")
        assert free_bytes() == free


def test_groups_of_the_first_version_are_read_likewise(root: Path) -> None:
    """Where the process is in a group below, its parents count too."""
    for group, limit in (("memory", 10_000), ("memory/job", 3000)):
        (root / group).mkdir()
        for file, text in (("limit_in_bytes", limit), ("usage_in_bytes", 500), ("stat", "total_inactive_file 20")):
            (root / group / f"memory.{file}").write_text(str(text))
    assert free_bytes() == 9520
    cgroup.MEMBERSHIP.write_text("5:cpu,memory:/job\n")
    assert free_bytes() == 2520


def test_it_is_not_known_without_linux(root: Path) -> None:
    """Then nothing is refused for it."""
    cgroup.MEMORY.unlink()
    assert free_bytes() is None
