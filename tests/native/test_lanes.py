"""Threads of lanes: where they run, how they start, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from apollo_compile import _native
from tests.native.runner import JOIN, Runner, Tensors


def run_python(code: str, *preload: Path) -> str:
    """Run code in a fresh interpreter that first loads these libraries, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"LD_PRELOAD": " ".join([os.environ.get("LD_PRELOAD", ""), *map(str, preload)])},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_bodies_run_on_the_cores_and_with_the_settings_of_their_lane() -> None:
    """Affinity is set before `on_start`, and what `on_start` sets stays on the thread."""
    cores = _native.available_cores()
    seen: dict[str, object] = {}

    def start(lane: int) -> None:
        seen[f"start {lane}"] = sorted(os.sched_getaffinity(0))
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread adopts the number that was set last anywhere, but only when it first asks
        torch.set_grad_enabled(False)

    def look(tensors: Tensors) -> Tensors:
        seen["body"] = (sorted(os.sched_getaffinity(0)), torch.get_num_threads(), torch.is_grad_enabled())
        return tensors

    num_threads = torch.get_num_threads()
    lanes = _native.Lanes([[], [cores[-1]]], start)
    torch.set_num_threads(num_threads)
    Runner(lanes, ["", "0: 0 -> 1"], [look], outputs=[1])(torch.ones(3))
    lanes.close()
    assert seen == {"start 1": [cores[-1]], "body": ([cores[-1]], 1, False)}
    assert torch.get_num_threads() == num_threads
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("what", ("between steps", "while another lane works"))
def test_lanes_that_wait_use_no_cores(what: str, lanes: _native.Lanes) -> None:
    """They spin for moments, then sleep: the processor time of all threads together is next to none."""

    def sleep(tensors: Tensors) -> Tensors:
        if what == "while another lane works":
            time.sleep(0.5)
        return tensors

    run = Runner(lanes, JOIN, [lambda tensors: tensors, sleep, lambda tensors: tensors[:1]], outputs=[3])
    run(torch.ones(3))  # the first of all may set up more
    begin = time.process_time()
    run(torch.ones(3))
    if what == "between steps":
        time.sleep(0.5)
    assert time.process_time() - begin < 0.25


def test_torchs_openmp_team_is_found() -> None:
    """Parking needs the library that torch has loaded."""
    torch.ones(3)
    assert _native.Lanes([[]]).is_team_found and not _native.Lanes([[]], park_team=False).is_team_found


@pytest.mark.parametrize("park_team", [True, False])
def test_parallel_torch_code_around_and_inside_runs_is_unharmed(park_team: bool) -> None:
    """The caller's team is parked between its own parallel regions."""
    cores = _native.available_cores()
    lanes = _native.Lanes([[], [cores[0]], [cores[-1]]], park_team=park_team)

    bodies = [*2 * [lambda tensors: [tensors[0] * 2]], lambda tensors: [tensors[0] + tensors[1]]]
    run = Runner(lanes, JOIN, bodies, outputs=[3])
    for step in range(50):
        (result,) = run(torch.full((100_000,), float(step)) + 1)
        assert torch.equal(result, torch.full((100_000,), 4.0 * step + 4))
    lanes.close()


def test_the_runtime_loads_and_runs_without_torch() -> None:
    """The extension is not linked with torch and does not import it."""
    code = """
        import sys
        from apollo_compile import _native
        lanes = _native.Lanes([[], [_native.available_cores()[0]]])
        lanes.close()
        print(lanes.num_threads, lanes.is_team_found, "torch" in sys.modules)
    """
    assert run_python(code) == "1 False False\n"


def test_memory_can_be_kept_and_what_is_free_is_given_back() -> None:
    """With glibc's own allocator the setting is taken; it changes the process, so it is tried in a fresh one."""
    code = """
        from pathlib import Path
        from apollo_compile import _native
        def pages():
            return int(Path("/proc/self/statm").read_text().split()[1])
        is_kept = _native.keep_memory()
        block = bytearray(b"1") * 2**28
        full = pages()
        del block
        kept = pages()
        _native.trim_memory()
        print(is_kept, not is_kept or (kept > full / 2 > pages()))
    """
    has_other_allocator = bool(os.environ.get("LD_PRELOAD"))  # a sanitizer's
    is_glibc = os.confstr("CS_GNU_LIBC_VERSION") is not None
    assert run_python(code) == f"{is_glibc and not has_other_allocator} True\n"


def test_an_allocator_of_others_keeps_memory_its_own_way(tmp_path: Path) -> None:
    """One that was loaded before glibc, as people do with jemalloc: glibc's settings would be taken and do nothing."""
    source, library = tmp_path / "allocator.c", tmp_path / "liballocator.so"
    source.write_text("""
        extern void* __libc_malloc(unsigned long size);
        void* malloc(unsigned long size) { return __libc_malloc(size); }
    """)
    subprocess.run(["c++", "-x", "c", "-shared", "-fPIC", "-fno-builtin", source, "-o", library], check=True)
    code = """
        import os
        from apollo_compile import _native
        print(os.confstr("CS_GNU_LIBC_VERSION") is None or not _native.keep_memory())
    """
    assert run_python(code, library) == "True\n"


def test_what_a_lane_frees_serves_the_caller() -> None:
    """Also where a thread has a heap of its own, which the lane might have got."""
    code = """
        import threading
        from pathlib import Path
        from apollo_compile import _native
        def resident_mib():
            return int(Path("/proc/self/statm").read_text().split()[1]) / 256
        def use_memory(lane=None):
            blocks = [bytearray(b"1") * 2**24 for _ in range(16)]
            sizes.append(resident_mib())
        def have_a_heap():
            use_memory()
            begun.set()
            end.wait()
        sizes, begun, end = [], threading.Event(), threading.Event()
        other = threading.Thread(target=have_a_heap)
        other.start()
        begun.wait()
        is_kept = _native.keep_memory()
        _native.trim_memory()
        sizes.clear()
        core = _native.available_cores()[0]
        lanes = _native.Lanes([[], [core]], use_memory), _native.Lanes([[], [core]], use_memory)
        use_memory()
        end.set()
        print(not is_kept or max(sizes) - min(sizes) < 64)
    """
    assert run_python(code) == "True\n"
