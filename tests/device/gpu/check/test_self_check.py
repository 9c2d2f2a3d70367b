"""The process of a self-check: whatever becomes of it is a verdict, which is kept and said once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from apollo_compile.config import load_config
from apollo_compile.device.cpu.target import CpuTarget
from apollo_compile.device.gpu.check.self_check import check_apart, check_gpu, describe, unavailable_reason
from apollo_compile.device.gpu.fingerprint import gpu_fingerprint
from apollo_compile.device.gpu.target import GpuTarget
from apollo_compile.store.profiles import default_profile, load_profile
from apollo_compile.store.self_checks import FORMAT, SelfCheck, SelfChecks
from apollo_compile.target.check_result import CheckResult, Level
from apollo_compile.target.fingerprint import Fingerprint
from tests.device.gpu.fake_gpu import FakeGpu

GPU = SimpleNamespace(
    device=torch.device("cuda", 1), native=SimpleNamespace(name="Fake GPU", driver_version=13000, num_sms=132)
)
MINE: Fingerprint = gpu_fingerprint("Fake GPU", cuda=13000, units=132)
FINE = CheckResult(level=Level.OK, subject="hand-overs", message="are in order")
WARNED = CheckResult(level=Level.WARNING, subject="lanes 64 + 68, eager", message="one after the other")
BAD = CheckResult(level=Level.ERROR, subject="dropout", message="equal masks", advice="x")


def verdict(*results: CheckResult) -> SelfCheck:
    """Return what was found just now."""
    return SelfCheck(made_at=time.time(), fingerprint=MINE, results=results)


def running(code: str) -> tuple[str, ...]:
    """Return a command that runs this code."""
    return (sys.executable, "-S", "-c", code)


def answering(text: str, before: str = "") -> tuple[str, ...]:
    """Return a command that leaves this answer, once it has run what comes before."""
    return running(f"import json, sys; text = {text!r}\n{before}\nopen(json.loads(sys.argv[1])[0], 'w').write(text)")


@pytest.mark.parametrize("results", [(FINE,), (FINE, BAD)])
def test_the_answer_of_the_process_is_the_verdict(results: tuple[CheckResult, ...]) -> None:
    """Well or not."""
    made = verdict(*results)
    assert check_apart(MINE, 0, command=answering(FORMAT.format(made))) == made


HANGS = running("import threading; threading.Event().wait()")
OTHER = FORMAT.format(replace(verdict(FINE), fingerprint=replace(MINE, device="Other GPU")))


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (running("import os; os.abort()"), "its process was killed by SIGABRT"),
        (
            running("import sys; sys.exit('Traceback\\nRuntimeError: an illegal access\\n')"),
            "its process ended with exit code 1: RuntimeError: an illegal access",
        ),
        (running(""), "its process left no answer: there is no such file"),
        (("/no/such/program",), "its process cannot be started: "),
        (answering("nonsense"), "its process left no answer: "),
        (answering(OTHER), "it saw Other GPU, "),
        (HANGS, "its process did not end in 0 s and was killed"),
    ],
    ids=["crashes", "raises", "says nothing", "is not there", "talks nonsense", "has another GPU", "hangs"],
)
def test_a_process_that_gives_no_verdict_is_an_error(command: tuple[str, ...], text: str) -> None:
    """Its complaint begins with the reason."""
    made = check_apart(MINE, 0, command=command, limit_s=0.3 if command == HANGS else 900)
    assert (made.complaint or "").startswith(f"self-check: {text}") and made.fingerprint == MINE


def test_the_process_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has what else is in the environment."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    text = FORMAT.format(verdict(replace(FINE, message="NAMES")))
    made = check_apart(
        MINE, 0, command=answering(text, "import os; text = text.replace('NAMES', ' '.join(os.environ))")
    )
    names = made.results[0].message.split()
    assert "CUDA_VISIBLE_DEVICES" in names and "PATH" in names
    assert not [name for name in names if "RANK" in name or name.startswith(("WORLD", "MASTER", "TORCHELASTIC"))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what is found without a GPU")
def test_the_process_says_why_it_cannot_begin() -> None:
    """Here, since there is no GPU."""
    made = check_apart(MINE, 0, limit_s=900)
    assert (made.complaint or "").startswith("self-check: its process ended with exit code 1: ")
    assert "CUDA" in (made.complaint or "")


FAILED = "the self-check of cuda:1 (Fake GPU) failed: dropout: equal masks"


@pytest.mark.parametrize(("result", "reason"), [(BAD, FAILED), (WARNED, None)], ids=["an error", "a warning"])
def test_a_reason_names_the_gpu_and_the_check_that_failed(
    result: CheckResult, reason: str | None, tmp_path: Path
) -> None:
    """It is read from what an earlier process kept."""
    kept = verdict(FINE, result)
    SelfChecks(tmp_path).find(MINE, lambda: kept)
    assert unavailable_reason(GPU, tmp_path) == reason
    assert check_gpu(GPU, tmp_path) == kept


def test_a_step_does_not_wait_until_a_slow_check_has_ended(tmp_path: Path) -> None:
    """Its result is for later calls, of this process and of others."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    slow = answering(FORMAT.format(verdict(FINE, BAD)), f"open({str(gate)!r}).read()")
    for _ in range(2):
        assert unavailable_reason(GPU, tmp_path, max_wait_s=0, command=slow) == (
            "the self-check of cuda:1 (Fake GPU) has not ended after 0 s; graphs that are compiled later use its result"
        )
        assert SelfChecks(tmp_path).read(MINE).content is None
    gate.write_text("")
    assert unavailable_reason(GPU, tmp_path, max_wait_s=900, command=slow) == FAILED
    assert unavailable_reason(GPU, tmp_path, max_wait_s=0, command=slow) == FAILED
    assert SelfChecks(tmp_path).read(MINE).content is not None


def is_running(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # empty once it has, until its parent asks for it
    except OSError:
        return False


def test_a_check_that_the_end_of_the_process_breaks_off_leaves_no_verdict(tmp_path: Path) -> None:
    """Its own process ends, too."""
    code = (
        "import torch\n"
        "from pathlib import Path\n"
        "from types import SimpleNamespace\n"
        "from apollo_compile.device.gpu.check import self_check\n"
        "native = SimpleNamespace(name='Fake GPU', driver_version=13000, num_sms=132)\n"
        "gpu = SimpleNamespace(device=torch.device('cuda', 1), native=native)\n"
        f"assert self_check.unavailable_reason(gpu, Path({str(tmp_path)!r}), max_wait_s=0, command={HANGS!r})\n"
        "while not self_check._processes: pass\n"
        "print(next(iter(self_check._processes)).pid)\n"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    while is_running(int(done.stdout)):
        time.sleep(0.01)
    assert not list(tmp_path.glob("*.json"))


def test_targets_hand_on_the_reason() -> None:
    """A CPU has none."""
    config = load_config()
    assert CpuTarget(default_profile(2), config).unavailable_reason() is None
    sheet, device = load_profile(Path("h200")), torch.device("cpu")
    assert GpuTarget(FakeGpu(), sheet, config, device=device).unavailable_reason() is None
    asked = GpuTarget(FakeGpu(), sheet, config, device=device, find_unavailable_reason=lambda: "hand-overs: late")
    assert asked.unavailable_reason() == "hand-overs: late"


TRY_AGAIN = "'apollo doctor --self-check' tries again"


@pytest.mark.parametrize(
    ("results", "is_new", "level", "text", "advice"),
    [
        ((FINE,), True, Level.OK, "lanes work: tried just now", ""),
        ((FINE, WARNED), False, Level.OK, "lanes work: tried on 2001-09-0", ""),
        ((FINE, BAD), False, Level.ERROR, "lanes stay off: tried on 2001-09-0", TRY_AGAIN),
    ],
)
def test_doctor_shows_the_verdict_and_its_age(
    results: tuple[CheckResult, ...], is_new: bool, level: Level, text: str, advice: str
) -> None:
    """In front of what was found."""
    head, *rest = describe(replace(verdict(*results), made_at=1e9), is_new=is_new)
    assert (head.subject, head.level, head.advice) == ("self-check", level, advice)
    assert head.message.startswith(text)
    assert [(each.subject, each.level) for each in rest] == [(each.subject, each.level) for each in results]
