"""Faults of whole processes, each in one of its own: no permission, no compiler, forks, ends in the midst of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PATIENCE_S = 900
"""After which a process hangs; on a busy machine it compiles for minutes."""

SETUP = """
import logging, os, sys, threading
logging.basicConfig(level=logging.WARNING)
import torch
from tests.end_to_end.models import STRICT, TwoTowers, two_tower_inputs
torch.manual_seed(0)
model, x = TwoTowers(depth=1), two_tower_inputs()
options = {"plan.autotune": False, "runtime.bodies": "BODIES"}
run = torch.compile(model, backend="apollo", options=options)
def check(run=run):
    with torch.no_grad():
        torch.testing.assert_close(run(*x), model(*x), rtol=1e-4, atol=1e-4)
"""


def run_python(
    code: str, before: str = "", bodies: str = "native", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `before`, the setup and `code` in a fresh interpreter, which must end."""
    return subprocess.run(
        [sys.executable, "-c", before + SETUP.replace("BODIES", bodies) + textwrap.dedent(code)],
        env={**os.environ, "APOLLO_LOG": "WARNING", **environment},  # however long a compile takes
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def check_end(done: subprocess.CompletedProcess[str], output: str = "done\n", code: int = 0) -> None:
    """Expect the output and the exit code; show the errors otherwise."""
    assert (done.stdout, done.returncode) == (output, code), done.stderr


def test_sys_exit_with_lanes_and_planner_alive_ends_at_once_with_its_code() -> None:
    """Nothing waits for anything, and nothing complains. What drives a GPU has not even been imported."""
    of_a_gpu = "[name for name in sys.modules if name.startswith('apollo_compile.device.gpu')]"
    done = run_python(f"check()\nprint('done', {of_a_gpu}, flush=True)\nsys.exit(7)", bodies="eager")
    check_end(done, "done []\n", code=7)
    assert done.stderr == ""


def test_an_interpreter_that_ends_in_the_midst_of_a_run_ends() -> None:
    """A daemon thread runs the graph for as long as there is a process.

    Not through Dynamo: what its guards look at is freed beneath them at the end, with any backend.
    """
    done = run_python(
        """
        from apollo_compile.session.graph import CompiledGraph
        run_graph, calls = CompiledGraph.__call__, []
        def note(graph, inputs):
            calls.append((graph, tuple(inputs)))
            return run_graph(graph, inputs)
        CompiledGraph.__call__ = note
        check()
        ((graph, inputs),) = calls
        has_begun = threading.Event()
        def loop():
            while True:
                run_graph(graph, list(inputs))
                has_begun.set()
        threading.Thread(target=loop, daemon=True).start()
        has_begun.wait()
        print("done", flush=True)
        """
    )
    assert done.stdout == "done\n", done.stderr
    if done.returncode == 0:
        assert done.stderr == ""
    else:
        assert done.returncode == -signal.SIGABRT, done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("first", ["all", "one"])
def test_core_masks_that_grow_and_shrink_change_no_result(first: str) -> None:
    """Where a graph was compiled for other cores than the process may use now, and where it is compiled now."""
    before = """
import os
allowed = os.sched_getaffinity(0)
masks = {"all": allowed, "one": {max(allowed)}}
os.sched_setaffinity(0, masks["FIRST"])
"""
    done = run_python(
        """
        from apollo_compile.session import registry
        check()
        assert registry.find_models(model)[0].graphs
        for mask in (masks["one"], allowed):
            os.sched_setaffinity(0, mask)
            check()
            torch._dynamo.reset()
            check(torch.compile(model, backend="apollo", options=options))
            check()
        print("done")
        """,
        before.replace("FIRST", first),
    )
    check_end(done)


FORBID_AFFINITY = """
import ctypes, os, platform, struct, sys
number = {"x86_64": 203, "aarch64": 122}.get(platform.machine())  # of sched_setaffinity
filters = ((0x20, 0, 0, 0), (0x15, 0, 1, number or 0), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000))
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in filters))
program = struct.pack("HxxxxxxP", len(filters), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
if number is None or libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    print("no seccomp")
    sys.exit(0)
try:
    os.sched_setaffinity(0, os.sched_getaffinity(0))
except PermissionError:
    pass
else:
    sys.exit("the system call is still allowed")
"""


def test_without_permission_to_pin_threads_inductor_runs_the_graph_and_a_line_says_why() -> None:
    """As in a sandbox that forbids sched_setaffinity."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core has no lanes that need pinning")
    nothing_compiles = "from apollo_compile.session import bodies\nbodies._compile_bodies = None\n"
    done = run_python(f"{nothing_compiles}torch.set_num_threads(2)\ncheck()\nprint('done')", FORBID_AFFINITY)
    if done.stdout == "no seccomp\n":
        pytest.skip("this kernel installs no filters of system calls")
    check_end(done)
    assert "falls back to torch.compile: RuntimeError: cannot pin lane" in done.stderr
    assert "Operation not permitted" in done.stderr


BROKEN_COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo 'c++ 12' && exit 0
echo 'fatal error: Python.h: No such file or directory' >&2
exit 1
"""


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (None, "No working C++ compiler"),
        pytest.param(BROKEN_COMPILER, "failed: fatal error: Python.h", marks=pytest.mark.soak),
    ],
    ids=["none", "broken"],
)
def test_without_a_compiler_graphs_run_operator_by_operator(tmp_path: Path, script: str | None, complaint: str) -> None:
    """Forward and backward with one mask of dropout, and graphs that would be Inductor's; one line says so."""
    compiler = tmp_path / "c++"
    if script is not None:
        compiler.write_text(script)
        compiler.chmod(0o755)
    done = run_python(
        """
        from torch import nn
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        run = torch.compile(model, backend="apollo")
        x = torch.randn(64, 8, requires_grad=True)
        torch.manual_seed(1)
        first = run(x)
        (gradient,) = torch.autograd.grad(first.sum(), x)
        torch.manual_seed(1)
        torch.testing.assert_close((run(x + 1) - first).sum(), gradient.sum(), rtol=1e-3, atol=1e-3)
        assert not torch.equal(run(x), first), "dropout dropped the same twice"
        run = torch.compile(lambda x: x.sin().sum(), backend="apollo", dynamic=True)
        torch.testing.assert_close(run(x), x.sin().sum())
        def detach(x):
            out = x * 3
            return out.view(-1), out, out[0].detach()
        for options in ({}, {"plan.memory_quota": 2**40}):  # plans for dynamic sizes keep no quota
            torch._dynamo.reset()
            run = torch.compile(detach, backend="apollo", dynamic=True, options=options)
            assert [value.requires_grad for value in run(x)] == [True, True, False]
        from apollo_compile.session import registry
        reasons = [reason for _, reason in registry.compiled_models()[-1].fallbacks]
        assert reasons and all("operator by operator" in reason for reason in reasons)
        print("done")
        """,
        CXX=str(compiler),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path),
    )
    check_end(done)
    assert done.stderr.count("graphs run operator by operator") == 1
    assert complaint in done.stderr


TRAIN = """
from apollo_compile.session import registry
from tests.end_to_end.models import assert_same_training, train
loss = lambda run: run(*x).square().mean()
expected = train(model, loss, steps=3)
assert_same_training(expected, train(model, loss, steps=3, backend="apollo", options={"debug.dump": "FOLDER/dump"}))
(compiled,) = registry.compiled_models()
assert [graph.has_run for graph in compiled.graphs] == [True, True], compiled.fallbacks
print("done")
"""


def check_training_without_files(folder: Path, error: str, before: str = "") -> None:
    """Run `before` and train, with all files in `folder`; expect a line about code, one about dumps of each graph."""
    done = run_python(
        before + TRAIN.replace("FOLDER", str(folder)), XDG_CACHE_HOME=str(folder), TORCHINDUCTOR_CACHE_DIR=str(folder)
    )
    check_end(done)
    for line, count in (
        ("graphs run operator by operator, since no", 1),
        ("nothing more is dumped, capture failed", 2),
    ):
        assert done.stderr.count(line) == count, done.stderr
    assert error in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("most_bytes", [0, 400])
def test_a_disk_that_is_full_for_inductor_too_means_operator_by_operator(most_bytes: int, tmp_path: Path) -> None:
    """No file takes a byte, or each a few: neither ours nor those of Inductor and of the C++ compiler."""
    limit = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({most_bytes}, {most_bytes}))\n"
    check_training_without_files(tmp_path, "File too large", before=limit)


@pytest.mark.soak
def test_a_disk_that_is_read_only_for_inductor_too_means_operator_by_operator() -> None:
    """All files are to be in a folder that is there, and in which not even root can make anything."""
    check_training_without_files(Path("/proc"), "No such file or directory: '/proc/")


@pytest.mark.soak
@pytest.mark.parametrize("files", ["*.so", "aotautograd/*/*"])
def test_damaged_compiled_code_is_compiled_anew(files: str, tmp_path: Path) -> None:
    """Libraries that were cut off, or whole graphs."""
    code = """
        layer = torch.nn.Linear(8, 8)
        with torch.no_grad():
            run = torch.compile(layer, backend="apollo", options=options)
            torch.testing.assert_close(run(torch.ones(2, 8)), layer(torch.ones(2, 8)))
        print("done")
    """
    check_end(run_python(code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)))
    found = list(tmp_path.rglob(files))
    assert found
    for file in found:
        os.truncate(file, 100)
    check_end(run_python(code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)))


def test_a_forked_child_runs_what_has_no_threads() -> None:
    """With one thread there is only the lane that is the caller; servers that preload a model fork so."""
    done = run_python(
        """
        from apollo_compile.session import registry
        check()
        assert registry.find_models(model)[0].graphs
        child = os.fork()
        if child == 0:
            check()
            os._exit(17)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
        check()
        print("done")
        """,
        "import torch\ntorch.set_num_threads(1)\n",
        bodies="eager",
    )
    check_end(done)


@pytest.mark.soak
def test_workers_of_a_data_loader_fork_and_spawn_after_the_model_ran() -> None:
    """Forked ones use torch and the model, a spawned one trains its own; neither they nor the parent are disturbed."""
    done = run_python(
        """
        from torch.utils.data import DataLoader, Dataset

        class Numbers(Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                check()
                return torch.full((64, 64), float(index)) @ torch.eye(64)

        check()
        for index, batch in enumerate(DataLoader(Numbers(), num_workers=2)):
            check()
            assert (batch == index).all()
        check()
        import torch.multiprocessing as processes
        from tests.faults import spawned
        worker = processes.get_context("spawn").Process(target=spawned.train)
        worker.start()
        worker.join()
        assert worker.exitcode == 0
        check()
        print("done")
        """
    )
    check_end(done)
