"""Ranks in processes of their own, and how long each of their scenarios took, at the end of what pytest prints."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.distributed import work

Seen = Callable[[str], list[dict[str, Any]]]
"""Returns what the ranks saw of a scenario, by rank."""

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)

DURATIONS: pytest.StashKey[list[tuple[str, float]]] = pytest.StashKey()
"""Name and seconds, on the slower rank."""


def pytest_configure(config: pytest.Config) -> None:
    """Begin with none."""
    config.stash.setdefault(DURATIONS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print them."""
    durations = config.stash.get(DURATIONS, [])
    if durations:
        terminalreporter.section("scenarios of several ranks")
    for name, seconds in durations:
        terminalreporter.write_line(f"{seconds:6.1f} s  {name}")


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What ranks saw of the scenarios of `WORK`, the module that a file of tests names.

    Ranks start once and run everything one after the other, since starting them takes longer than most of it.
    """
    module, folder = request.module.WORK, tmp_path_factory.mktemp("ranks")
    sizes = {name: size for size, scenarios in module.SCENARIOS.items() for name in scenarios}
    for size in module.SCENARIOS:
        start_ranks(work.run_rank, module.__name__, size, folder, module.__name__, size)

    def read(name: str) -> list[dict[str, Any]]:
        return read_ranks(folder, sizes[name], f"{name} ")

    durations = ((f"{size} ranks, {name}", max(each["seconds"] for each in read(name))) for name, size in sizes.items())
    request.config.stash[DURATIONS].extend(durations)
    return read


def read_ranks(folder: Path, size: int, name: str = "") -> list[Any]:
    """Return what every rank wrote under a name."""
    return [torch.load(folder / f"{name}{rank}.pt", weights_only=False) for rank in range(size)]


def start_ranks(function: Callable[..., None], module: str, size: int, folder: Path, *arguments: Any) -> None:
    """Run a function on `size` ranks, in processes that have imported a module, and wait for them.

    It is called with the rank, the arguments, the port of a store, and the folder that ranks write to.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on any free port
    arguments = (*arguments, store.port, folder)
    seconds = 2 * work.PATIENCE.total_seconds()
    preloaded = [work.__name__, module, "transformers.models.clip.modeling_clip"]
    mp.get_context("forkserver").set_forkserver_preload(preloaded)
    ranks = mp.start_processes(function, arguments, nprocs=size, join=False, start_method="forkserver")
    deadline = time.monotonic() + seconds
    try:
        while not ranks.join(timeout=5):
            if time.monotonic() > deadline:
                written = sorted(path.stem for path in folder.glob("*.pt"))
                pytest.fail(f"the ranks hang: after {seconds:.0f} s they have written {written} only")
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.kill()
