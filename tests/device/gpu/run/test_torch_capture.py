"""Captures with torch's class, of which the order of calls is seen here: it works on a GPU only."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apollo_compile.device.gpu.run import torch_capture
from apollo_compile.device.gpu.run.live_captures import LiveCaptures
from apollo_compile.torch_bridge import cuda_private
from tests.failures import raising

DEVICE = torch.device("cuda", 0)


class Torch:
    """Records what is asked of torch, and fails where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, recovers: bool) -> None:
        self.log: list[str] = []
        self.fails: dict[str, int] = {}
        """How often a call fails yet, by name."""
        self.stream = "caller"
        self.mode = 1
        self.generator = SimpleNamespace(
            clone_state=lambda: "clone", graphsafe_set_state=lambda state: self.note(f"generator becomes a {state}")
        )
        torch_ = self

        class Graph:
            def capture_begin(self, pool: Any = None, *, capture_error_mode: str) -> None:
                torch_.note(f"begin in pool {pool} on {torch_.stream}")

            def capture_end(self) -> None:
                torch_.note("end")

            def reset(self) -> None:
                torch_.note("reset")

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 7)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.note("empty the cache"))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.new_stream("caller"))
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(self, "mode", mode))
        monkeypatch.setattr(torch.cuda, "default_generators", [self.generator])
        monkeypatch.setattr(torch, "zeros", lambda size, device: torch.ones(size))
        for name, text in (
            ("_cuda_beginAllocateCurrentThreadToPool", "allocate from {}"),
            ("_cuda_endAllocateToPool", "allocate no more from {}"),
            ("_cuda_releasePool", "release {}"),
        ):
            note = lambda device, pool, text=text: self.note(text.format(pool))  # noqa: E731
            monkeypatch.setattr(torch._C, name, note, raising=False)
        monkeypatch.setattr(torch_capture, "clear_workspaces", lambda streams: self.note(f"clear {sorted(streams)}"))
        for module in (torch_capture, cuda_private):
            monkeypatch.setattr(module, "RECOVERS_FROM_CAPTURES", recovers)

    def note(self, what: str) -> None:
        self.log.append(what)
        for name in self.fails:
            if what.startswith(name) and self.fails[name] > 0:
                self.fails[name] -= 1
                raise RuntimeError(f"no {name}")

    def new_stream(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.note(f"{name} waits for {other.name}"))

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream.name
        try:
            yield
        finally:
            self.stream = before

    def capture(
        self,
        captures: LiveCaptures,
        work: Callable[[Any], None] = lambda origin: None,
        rehearsal: Callable[[Any], None] | None = None,
    ) -> torch_capture.TorchRecording:
        """Capture."""
        return torch_capture.capture_with_torch(
            work,
            rehearsal,
            device=DEVICE,
            pool=None,
            origin=self.new_stream("origin"),
            streams=[2, 1],
            captures=captures,
        )


@pytest.fixture(params=[True, False], ids=["2.13", "2.11"])
def recovers(request: pytest.FixtureRequest) -> bool:
    """Whether this torch recovers from a failed capture."""
    return bool(request.param)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, recovers: bool) -> Torch:
    """Replace what needs a GPU."""
    return Torch(monkeypatch, recovers=recovers)


def test_a_rehearsal_is_on_the_stream_and_in_the_memory_of_the_capture(fake: Torch, recovers: bool) -> None:
    """Workspaces of the lanes come from there too; up to 2.12, nothing may wait for the device in it."""
    modes = []

    def rehearse(origin: Any) -> None:
        fake.note(f"rehearse on {fake.stream}")
        modes.append(fake.mode)

    recording = fake.capture(LiveCaptures(), lambda origin: fake.note("launch"), rehearse)
    assert fake.log == [
        "clear [1, 2]",
        "allocate from 7",
        "origin waits for caller",
        "rehearse on origin",
        "caller waits for origin",
        "allocate no more from 7",
        "begin in pool 7 on origin",
        "launch",
        "end",
        "release 7",
        "clear [1, 2]",
    ]
    assert (modes, fake.mode, fake.stream, recording.pool) == ([1 if recovers else "error"], 1, "caller", 7)


def test_no_garbage_is_collected_during_a_capture(fake: Torch) -> None:
    """It is afterwards, if it was before."""
    seen = []
    for before in (True, False):
        (gc.enable if before else gc.disable)()
        try:
            fake.capture(LiveCaptures(), lambda origin: seen.append(gc.isenabled()))
            seen.append(gc.isenabled())
        finally:
            gc.enable()
    assert seen == [False, True, False, False]


@pytest.mark.parametrize("times", [1, 2])
def test_a_rehearsal_without_memory_is_repeated_once_with_an_empty_cache(fake: Torch, times: int) -> None:
    """Then it is told, before any capture: the pool is given back, and nothing is wrong with torch."""
    left = [times]

    def rehearse(origin: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory")

    captures = LiveCaptures()
    with contextlib.nullcontext() if times == 1 else pytest.raises(torch.OutOfMemoryError):
        fake.capture(captures, rehearsal=rehearse)
    ways = ["allocate from 7", "origin waits for caller", "caller waits for origin", "allocate no more from 7"]
    captured = ["begin in pool 7 on origin", "end"] if times == 1 else []
    assert fake.log[1:-1] == [*ways, "empty the cache", *ways, *captured, "release 7", "release 7"]
    assert captures.why_off is None and fake.mode == 1


def test_what_work_raises_in_a_capture_that_ends_well_comes_out(fake: Torch) -> None:
    """Its memory is released, and other captures are not affected."""
    captures = LiveCaptures()
    with pytest.raises(ZeroDivisionError, match="a body's own"):
        fake.capture(captures, raising(ZeroDivisionError("a body's own")))
    assert fake.log == ["clear [1, 2]", "begin in pool 7 on origin", "end", "reset", "clear [1, 2]"]
    assert captures.why_off is None and fake.stream == "caller"


@pytest.mark.parametrize("where", ["begin", "end"])
def test_a_capture_that_fails_is_forgotten_by_torch(
    fake: Torch, recovers: bool, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to 2.12 by hand, with one more capture, and then there are no lanes."""
    fake.fails[where] = 1
    captures = LiveCaptures()
    with pytest.raises(RuntimeError, match=f"^no {where}$"):
        fake.capture(captures)
    ours = fake.log[fake.log.index("begin in pool 7 on origin") + 1 :]
    ours = ours[ours.index("end") + 1 :] if where == "end" else ours
    if recovers:
        assert ours == ["clear [1, 2]"] and captures.why_off is None and not caplog.records
        return
    assert ours == ["allocate no more from 7", "release 7", "begin in pool None on origin", "end", "clear [1, 2]"]
    assert captures.why_off is not None
    assert f"a capture of a CUDA graph failed (RuntimeError: no {where}), from which torch" in captures.why_off
    assert len(caplog.records) == 1 and "lanes are off for the rest of this process" in caplog.text


@pytest.mark.parametrize("recovers", [False], indirect=True, ids=["2.11"])
def test_a_generator_that_no_capture_mends_is_replaced(fake: Torch) -> None:
    """By one in the same state that is in no capture; and memory that torch does not know is no error."""
    fake.fails = {"end": 2, "allocate no more": 1}
    with pytest.raises(RuntimeError, match=r"^no end$"):
        fake.capture(LiveCaptures())
    assert "generator becomes a clone" in fake.log and "release 7" not in fake.log


@pytest.mark.parametrize("recovers", [False], indirect=True, ids=["2.11"])
def test_what_broke_a_capture_is_told_rather_than_that_it_did(fake: Torch) -> None:
    """Torch's message at the end says only that something came before."""
    fake.fails["end"] = 1
    captures = LiveCaptures()
    with pytest.raises(ValueError, match="not permitted"):
        fake.capture(captures, raising(ValueError("operation not permitted when stream is capturing")))
    assert captures.why_off is not None and "(ValueError: operation not permitted" in captures.why_off
