"""What libraries and Inductor are told of a lane's units, and what they keep."""

from __future__ import annotations

import threading

import pytest
import torch

from apollo_compile.torch_bridge import cuda_private
from apollo_compile.torch_bridge.cuda_private import clear_workspaces, units_left_out
from tests.builders import in_threads


def left_out() -> int | None:
    """Return what torch tells libraries."""
    return torch._C._get_sm_carveout_experimental()


def test_units_are_left_out_for_as_long_as_it_is_said() -> None:
    """Also where something fails, and one inside another; nothing changes for the whole device."""
    assert left_out() is None
    with units_left_out(68):
        assert left_out() == 68
        with units_left_out(36):
            assert left_out() == 36
        with units_left_out(0):
            assert left_out() == 68
        with pytest.raises(RuntimeError, match="on purpose"), units_left_out(100):
            raise RuntimeError("on purpose")
        assert left_out() == 68
    assert left_out() is None


def test_threads_with_different_quotas_do_not_mix_them() -> None:
    """Torch has one number for all of them."""
    wrong: list[tuple[int, int | None]] = []
    start = threading.Barrier(4)

    def work(count: int) -> None:
        start.wait()
        for _ in range(300):
            with units_left_out(count):
                if left_out() != count:
                    wrong.append((count, left_out()))

    in_threads(lambda number: work(8 * (number + 1)), 4)
    assert wrong == [] and left_out() is None


def test_workspaces_are_cleared_on_the_streams_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other CUDA graphs may use those of other streams; all are cleared only where torch offers nothing else."""
    cleared: list[int | None] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append(None), raising=False)
    monkeypatch.setattr(cuda_private, "_workspace_clearer", lambda: lambda stream: cleared.append(stream.value))
    clear_workspaces([16, 32])
    monkeypatch.setattr(cuda_private, "_workspace_clearer", lambda: None)
    clear_workspaces([16, 32])
    assert cleared == [16, 32, None]
