"""What a user hears of a compile that takes long, on a clock that the test moves."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from apollo_compile.progress import PATIENCE_S, Progress
from apollo_compile.session import registry
from tests.builders import Clock


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What is said, in a process that set logging up, and whose tests are otherwise not told."""
    logger = logging.getLogger("apollo_compile.progress")
    logger.setLevel(logging.NOTSET)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def test_a_compile_that_takes_long_says_once_per_phase_what_it_is_at(told: list[str]) -> None:
    """And nothing before; a step in which it becomes long is told while it goes on."""
    clock = Clock()
    with Progress("compiling 0/0 forward", clock=clock) as progress:
        progress.look()
        for number in range(1, 15):
            progress.at("body", number, 14)
            if number == 5:
                clock.now_s += PATIENCE_S - 0.1
                progress.look()
                clock.now_s += 0.1
                assert told == []
                progress.look()  # as the thread does that looks
        clock.now_s += 5
        progress.at("C++ code of body", 1, 14)
        progress.at("C++ code of body", 2, 14)
        progress.at("Inductor")
    assert told == [
        "INFO compiling 0/0 forward: body 5 of 14 after 10 s",
        "INFO compiling 0/0 forward: C++ code of body 1 of 14 after 15 s",
        "INFO compiling 0/0 forward: Inductor after 15 s",
    ]


def test_a_line_comes_every_ten_seconds_and_tells_how_long_it_will_take(told: list[str]) -> None:
    """Until that time is over."""
    clock = Clock()
    with Progress("compiling", expected_ns=30_000_000_000, clock=clock) as progress:
        progress.at("Inductor")
        for _ in range(8):
            clock.now_s += PATIENCE_S / 2
            progress.look()
    assert told == [
        "INFO compiling: Inductor after 10 s of about 30 s",
        "INFO compiling: Inductor after 20 s of about 30 s",
        "INFO compiling: Inductor after 30 s",
        "INFO compiling: Inductor after 40 s",
    ]


@pytest.mark.parametrize("quiet", ["package", "file", "rank"])
def test_it_can_be_switched_off(told: list[str], monkeypatch: pytest.MonkeyPatch, quiet: str) -> None:
    """By a level, and of several ranks on a machine one speaks."""
    if quiet == "rank":
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    else:
        name = {"package": "apollo_compile", "file": "apollo_compile.progress"}[quiet]
        monkeypatch.setattr(logging.getLogger(name), "level", logging.WARNING)
    clock = Clock()
    progress = Progress("compiling", clock=clock)
    clock.now_s += PATIENCE_S
    progress.at("body", 1, 2)
    assert told == []


def test_who_set_no_logging_up_reads_it_on_standard_error() -> None:
    """An INFO of any other logger nobody would see."""
    code = (
        "import itertools, logging\n"
        "from apollo_compile.progress import Progress\n"
        "Progress('compiling 0/0 forward', clock=itertools.count(0, 11).__next__).at('body', 5, 14)\n"
        "logging.getLogger('apollo_compile.backend').info('not seen')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "compiling 0/0 forward: body 5 of 14 after 11 s\n")


def test_a_compile_tells_which_body_it_is_at(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the backend: Inductor lowers it, then the C++ compiler is waited for."""
    torch = pytest.importorskip("torch")
    from apollo_compile.session import compile as session_compile

    times = itertools.chain([0.0], itertools.repeat(12.0))
    monkeypatch.setattr(session_compile, "Progress", partial(Progress, clock=times.__next__))
    torch._dynamo.reset()
    options = {"plan.planner": "serial", "plan.autotune": False}
    with torch.no_grad():
        torch.compile(torch.nn.Linear(8, 8), backend="apollo", options=options)(torch.ones(2, 8))
    name = f"{registry.compiled_models()[-1].name} inference"
    assert told[-2:] == [
        f"INFO compiling {name}: body 1 of 1 after 12 s",
        f"INFO compiling {name}: C++ code of body 1 of 1 after 12 s",
    ]


def test_a_compile_again_says_why() -> None:
    """With the size that changed, or the guard of Dynamo's that failed."""
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    factor = [1]

    def run(x: Any) -> Any:
        return x * factor[0]

    compiled = torch.compile(run, backend="apollo", options={"runtime.bodies": "eager"}, dynamic=False)
    compiled(torch.ones(4, 8))
    first = registry.compiled_models()[-1].again
    compiled(torch.ones(3, 8))
    second = registry.compiled_models()[-1].again
    factor[0] = 2
    compiled(torch.ones(3, 8))
    assert (first, second) == ("", " again, since size 0 of x changed from 4 to 3")
    assert registry.compiled_models()[-1].again.startswith(" again, since factor[0] == 1")
