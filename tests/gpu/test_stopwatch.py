"""Pieces of work on a real GPU, timed."""

from __future__ import annotations

import torch

from apollo_compile.torch_bridge.stopwatch import Stopwatch


def test_the_work_is_timed_and_not_its_launch() -> None:
    """Ten times the kernels take longer, though the host waits for none of them in between."""
    device = torch.device("cuda")
    watch, x = Stopwatch(device), torch.ones(2048, 2048, device=device)
    for count in (1, 4, 40):
        watch.begin()
        for _ in range(count):
            x = x @ x
        watch.end(count)
    found = dict(watch.read())
    assert found[40] > found[4] > 0
