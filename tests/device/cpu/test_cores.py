"""Who gets which cores, where several processes share a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from apollo_compile.device.cpu.cores import core_topology, divide_cores, share_cores


@pytest.mark.parametrize("num_cores", [1, 2, 3, 8, 12, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_with_one_mask_divide_its_cores(num_cores: int, size: int) -> None:
    """Every core is somebody's, nobody has none, and no core is two ranks' as long as there are enough."""
    allowed = [3 * core + 1 for core in range(num_cores)]  # a mask need not begin at 0 or be contiguous
    shares = [divide_cores(allowed, allowed, rank, size) for rank in range(size)]
    owned = [core for share in shares for core in share.own]
    assert set(owned) == set(allowed)
    assert all(len(share.own) >= 1 for share in shares)
    assert max(len(share.own) for share in shares) - min(len(share.own) for share in shares) <= 1
    if size <= num_cores:
        assert sorted(owned) == allowed
    for share in shares:
        assert sorted(share.order) == allowed


def test_a_mask_that_the_launcher_set_is_the_ranks_own() -> None:
    """Bound by numactl or the job's step, the cores are divided already."""
    assert divide_cores([4, 5, 6, 7], range(8), rank=1, size=2).own == (4, 5, 6, 7)
    assert divide_cores([4, 5, 6, 7], None, rank=1, size=2).own == (6, 7)


def test_a_process_without_a_launcher_has_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """As has one whose launcher says something that cannot be."""
    for rank, size in ((None, None), ("0", "1"), ("2", "2"), ("first", "2")):
        for name, value in (("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", size)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        assert share_cores([0, 1]).own == (0, 1)


def test_a_launchers_variables_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is the parent's here, as it is under torchrun."""
    monkeypatch.setattr("apollo_compile.device.cpu.cores._launchers_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    share = share_cores([0, 1, 2, 3])
    assert (share.own, share.order, share.rank, share.size) == ((2, 3), (2, 3, 0, 1), 1, 2)


def test_cores_that_lie_alike_are_the_same_and_threads_of_one_core_are_not(tmp_path: Path) -> None:
    """Eight threads of four cores, in two sockets with a cache each; thread n shares its core with thread n + 4."""
    for core in range(8):
        socket = core % 4 // 2
        for name, text in (
            ("topology/core_cpus_list", f"{core % 4},{core % 4 + 4}"),
            ("topology/physical_package_id", f"{socket}"),
            ("cache/index3/shared_cpu_list", f"{2 * socket}-{2 * socket + 1}"),
        ):
            file = tmp_path / f"cpu{core}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
    neighbours, siblings, strangers = (core_topology(cores, tmp_path) for cores in ((0, 1), (0, 4), (0, 2)))
    assert len({neighbours, siblings, strangers}) == 3
    assert core_topology((2, 3), tmp_path) == core_topology((7, 6), tmp_path) == neighbours
    assert core_topology((0, 1), tmp_path / "hidden") == ((0, 0, 0), (0, 0, 0))
