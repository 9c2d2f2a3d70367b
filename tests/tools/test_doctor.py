"""Findings for machines of all kinds, most of which are not this one."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

from apollo_compile import progress
from apollo_compile.device.cpu import cgroup
from apollo_compile.device.cpu.cgroup import granted_cores
from apollo_compile.store.files import FileState
from apollo_compile.tools import doctor
from apollo_compile.tools.doctor import CheckResult, Level, MachineFacts, diagnose, is_fit, look

ROOT = Path(__file__).parents[2]

FINE = MachineFacts(
    python="3.11.7 on Linux x86_64",
    torch="2.13.0+cpu",
    compiler="g++",
    cores=8,
    allowed_cores=8,
    threads=8,
    has_openmp=True,
    profile=FileState.CURRENT,
    profile_path=Path("profile-8.json"),
    profile_detail="measured",
    cache=Path("cache"),
    ortools="9.15",
)


def test_every_finding_is_explained_in_the_docs() -> None:
    """By its subject, those of a GPU included."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    explained = set(re.findall(r"^\| `([\w\+\- ]+)[^`]*` \|", page, re.MULTILINE))
    gpu = ("examine.py", "experiments.py", "self_check.py")
    subjects = _subjects("tools/doctor.py").union(*(_subjects(f"device/gpu/check/{file}") for file in gpu))
    assert {name.strip() for name in explained} >= subjects
    assert len(_subjects("tools/doctor.py")) > 10
    assert {"driver", "split", "overlap"} <= _subjects("device/gpu/check/examine.py")


def _subjects(file: str) -> set[str]:
    """Return the subjects that are written in a file; of those with a name of lanes, the word before it."""
    code = (ROOT / "apollo_compile" / file).read_text()
    named = re.findall(r'(?:subject ?= ?|\b_(?:ok|note|warning|error)\(\s*)"([^"]+)"', code)
    return set(named) | set(re.findall(r'f"(lanes|nodes) \{name\}', code))


BAD_LANES = CheckResult(level=Level.ERROR, subject="lanes 64 + 64, eager", message="lanes 1 and 2 share SMs [15]")


def find(facts: MachineFacts, subject: str) -> CheckResult:
    """Return the result about a subject."""
    (found,) = [result for result in diagnose(facts) if result.subject == subject]
    return found


def test_a_machine_in_order_has_nothing_to_do() -> None:
    """Without a GPU, which is no fault."""
    results = diagnose(FINE)
    assert is_fit(results)
    assert {result.level for result in results} == {Level.OK}
    assert not any(result.advice for result in results)
    assert "torch was built without it" in find(FINE, "CUDA").message


@pytest.mark.parametrize(
    ("change", "subject", "level", "message", "advice"),
    [
        ({"torch": None, "torch_problem": "ModuleNotFoundError: torch"}, "torch", "error", "cannot be imp", "install"),
        ({"torch": "2.5.1"}, "torch", "error", "2.5.1 is too old", "torch 2.11 or later"),
        ({"torch": "nightly"}, "torch", "error", "too old", "torch 2.11 or later"),
        ({"torch_problem": "it has no torch.compile"}, "torch", "error", "no torch.compile", "again"),
        ({"native_problem": "ImportError: x"}, "native runtime", "error", "does not load", "make native"),
        ({"handles_problem": "no function"}, "native runtime", "error", "tensors of torch", "release of torch"),
        ({"config_problem": "APOLLO_LOG is 3"}, "settings", "error", "APOLLO_LOG", "environment variable"),
        ({"plan_problem": "cannot read a plan from x"}, "settings", "warning", "cannot read a plan", "APOLLO_PLAN"),
        ({"compiler": None}, "C++ compiler", "error", "none, so graphs run operator by operator", "install g++"),
        ({"compiler_problem": "omp.h: No such file"}, "C++ compiler", "error", "omp.h", "libgomp"),
        ({"body_problem": "TypeError: x"}, "native bodies", "warning", "under the GIL", "release of torch"),
        ({"is_body_tried": False}, "native bodies", "note", "torch sees a GPU", "apollo doctor --cpu"),
        ({"allowed_cores": 1, "threads": 1}, "cores", "warning", "one core of 8", "more cores"),
        ({"cores": 1, "allowed_cores": 1, "threads": 1}, "cores", "warning", "one core of 1", "more cores"),
        ({"allowed_cores": 4, "threads": 4}, "core mask", "note", "4 of 8", "taskset"),
        ({"threads": 2}, "threads", "note", "uses 2 of 8 cores", "set_num_threads"),
        ({"core_limit": 2.5}, "cores", "ok", "2 of 8 are used", ""),
        ({"core_limit": 1.5}, "container", "warning", "time for 1.5 of 8 visible cores", "--cpuset-cpus"),
        ({"core_limit": 1.5}, "cores", "warning", "one core of 8", "more cores"),
        ({"core_limit": 0.5}, "container", "warning", "apollo uses 1,", "--cpuset-cpus"),
        ({"has_openmp": False}, "OpenMP", "warning", "without it", "OpenMP"),
        ({"profile": FileState.MISSING}, "device profile", "note", "not measured yet", "apollo calibrate"),
        ({"profile_detail": "scaled"}, "device profile", "note", "scaled", "apollo calibrate"),
        ({"profile": FileState.STALE}, "device profile", "warning", "stale", "apollo calibrate"),
        ({"profile": FileState.DAMAGED}, "device profile", "warning", "damaged", "apollo calibrate"),
        ({"cache_problem": "PermissionError"}, "cache", "warning", "cannot be written", "XDG_CACHE_HOME"),
        ({"ortools": None, "ortools_problem": "E: x"}, "OR-Tools", "warning", "imported: E: x", "pip install ortools"),
        ({"cuda_devices": ("NVIDIA H200",)}, "CUDA", "note", "NVIDIA H200", "device.cuda_lanes"),
        ({"cuda_build": "12.8"}, "CUDA", "ok", "sees no device", ""),
        ({"cuda_devices": ("a GPU",), "cuda_results": (BAD_LANES,)}, BAD_LANES.subject, "error", "share SMs [15]", ""),
    ],
)
def test_every_fault_has_its_finding(
    change: dict[str, object], subject: str, level: str, message: str, advice: str
) -> None:
    """With what to do; only what keeps apollo from working is an error, and the rest of the results stay."""
    facts = replace(FINE, **change)  # type: ignore[arg-type]
    found = find(facts, subject)
    assert found.level == level
    assert message in found.message
    assert advice in found.advice and bool(found.advice) is bool(advice)
    assert is_fit(diagnose(facts)) is (level != "error")
    before, after = ({result.subject for result in diagnose(each)} for each in (FINE, facts))
    assert before - after <= {"CUDA", "device profile", "native bodies"}


def test_a_container_limit_is_read_from_either_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of control groups; no limit, nonsense and no files are no limit."""
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "membership")
    assert granted_cores() is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for text, limit in (("250000\n", 2.5), ("-1\n", None), ("?\n", None)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(text)
        assert granted_cores() == limit
    for text, limit in (("max 100000\n", None), ("150000 100000\n", 1.5)):
        (tmp_path / "cpu.max").write_text(text)
        assert granted_cores() == limit
    for group, text in (("a", "50000 100000"), ("a/b", "120000 100000")):
        (tmp_path / group).mkdir()
        (tmp_path / group / "cpu.max").write_text(text)
    for own, limit in (("/a/b", 0.5), ("/a", 0.5), ("/c", 1.5), ("/a/b/nothing", 0.5)):
        (tmp_path / "membership").write_text(f"1:memory:/x\n0::{own}\n")
        assert granted_cores() == limit


def run_doctor(folder: Path) -> tuple[int, dict[str, dict[str, str]], str]:
    """Run `apollo doctor --json` where a folder has modules of its own; return exit code, results, errors."""
    inherited = {name: value for name, value in os.environ.items() if name != "APOLLO_PROFILE"}
    command = [sys.executable, "-m", "apollo_compile.tools.cli", "doctor", "--json"]
    env = {**inherited, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    return done.returncode, {f["subject"]: f for f in json.loads(done.stdout)}, done.stderr


def test_this_machine_is_looked_at() -> None:
    """Whatever it is, all is found and nothing raises; no other compiler than Inductor's is looked for."""
    facts = look()
    assert facts.torch and facts.native_problem is None and facts.handles_problem is None
    assert 1 <= facts.allowed_cores <= facts.cores
    assert facts.profile is not None and facts.cache is not None
    assert find(facts, "native bodies").level is Level.OK
    with inductor_config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert look().compiler is None


def test_a_torch_that_makes_no_native_bodies_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body is compiled to find out; without a compiler there is none, and that is the result."""
    monkeypatch.setattr(CppWrapperCpu, "generate_end", lambda self, result, where: None)
    found = find(look(), "native bodies")
    assert found.level is Level.WARNING
    assert "generate_end(self, result, where)" in found.message and "docs/versions.md" in found.advice
    subjects = {result.subject for result in diagnose(replace(FINE, compiler=None))}
    assert "C++ compiler" in subjects and "native bodies" not in subjects


def test_with_a_gpu_no_body_is_compiled_for_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless that is asked for; and a look that takes long says what it is at."""
    every_reading_later = itertools.count(step=int(progress.PATIENCE_S))
    clocked = functools.partial(progress.Progress, clock=every_reading_later.__next__)
    monkeypatch.setattr(doctor, "Progress", clocked)
    caplog.set_level(logging.INFO, progress.__name__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    assert find(look(), "native bodies").level is Level.NOTE
    phases = [line.split(" after ")[0] for line in caplog.messages if line.startswith("doctor")]
    assert list(dict.fromkeys(phases)) == ["doctor: importing torch", "doctor: checking lanes on the GPU"]
    assert find(look(try_cpu=True), "native bodies").level is not Level.NOTE
    assert any(line.startswith("doctor: compiling a body for the CPU") for line in caplog.messages)


def test_a_damaged_profile_and_a_core_mask_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thread that may run on one core, and whose profile is no profile."""
    (tmp_path / "apollo_compile").mkdir()
    (tmp_path / "apollo_compile" / "profile-1.json").write_text("{")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("APOLLO_PROFILE")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        facts = look()
    finally:
        os.sched_setaffinity(0, cores)
    assert is_fit(diagnose(facts))
    profile = find(facts, "device profile")
    assert profile.level is Level.WARNING and "damaged" in profile.message
    assert "one core of" in find(facts, "cores").message
    assert (os.cpu_count() == 1) or "may run on 1 of" in find(facts, "core mask").message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("__version__ = '1.13.1'", "1.13.1 is too old"),
        ("raise OSError('libtorch.so: undefined symbol')", "cannot be imported: OSError: libtorch.so"),
        ("", "another module of that name shadows it"),
        ("__version__ = '2.99.0'", "has no torch.compile"),
    ],
)
def test_a_wrong_torch_is_a_finding_without_a_traceback(tmp_path: Path, content: str, message: str) -> None:
    """Too old, broken, or something else of that name."""
    (tmp_path / "torch.py").write_text(content)
    status, found, errors = run_doctor(tmp_path)
    assert status == 1
    assert all(line.startswith("doctor: ") for line in errors.splitlines())  # what takes long on a busy machine
    assert found["torch"]["level"] == "error" and message in found["torch"]["message"]
    assert found["C++ compiler"]["level"] == "ok"
    assert "CUDA" not in found and "device profile" not in found  # nobody could ask torch


@pytest.mark.slow
def test_a_solver_that_cannot_be_imported_is_a_finding_with_the_protobuf_it_asks_for(tmp_path: Path) -> None:
    """Its usual cause; apollo works without it, which is no error."""
    (tmp_path / "ortools").mkdir()
    (tmp_path / "ortools" / "__init__.py").write_text("raise TypeError('Descriptors cannot be created directly')")
    (tmp_path / "ortools-9.99.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: ortools\nVersion: 9.99\nRequires-Dist: protobuf<9.1,>=9.0\n"
    (tmp_path / "ortools-9.99.dist-info" / "METADATA").write_text(metadata)
    status, found, _ = run_doctor(tmp_path)
    assert status == 0 and found["OR-Tools"]["level"] == "warning"
    assert "TypeError: Descriptors" in found["OR-Tools"]["message"]
    assert "requires protobuf<9.1,>=9.0, and " in found["OR-Tools"]["message"]


def test_a_wrong_setting_and_a_blocked_cache_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compile would refuse or do without, and a directory below a file."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked / "below"))
    assert find(look(), "cache").level is Level.WARNING
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(doctor.tempfile, "TemporaryFile", lambda dir: open("/dev/full", "wb", 0))  # noqa: SIM115
        found = find(look(), "cache")
    assert found.level is Level.WARNING and "cannot be written: OSError: [Errno 28] No space left" in found.message
    absent = str(tmp_path / "absent")
    for variable, value, message in (
        ("APOLLO_DISABLE", "perhaps", "APOLLO_DISABLE"),
        ("APOLLO_LOG", "LOUD", "APOLLO_LOG has value 'LOUD'; choose one of"),
        ("APOLLO_PROFILE", absent, "cannot read device profile"),
        ("APOLLO_PLAN", absent, "which does not exist"),
        ("APOLLO_PROFILE", "h200", "is for a cuda device"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            facts = look()
        assert message in find(facts, "settings").message and not is_fit(diagnose(facts))
    monkeypatch.setenv("APOLLO_PLAN", str(blocked))
    monkeypatch.setenv("APOLLO_PROFILE", "cpu")
    facts = look()
    assert find(facts, "settings").level is Level.WARNING and str(blocked) in find(facts, "settings").message
    assert find(facts, "device profile").message == "cpu, named by APOLLO_PROFILE"
