"""Check this machine, and advise how to fix problems.

    look() -> MachineFacts -> diagnose(facts) -> [Finding]

`look` inspects the machine and never raises: problems are facts too. `diagnose` is a pure function of the facts, so
every case can be tested on any machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from pathlib import Path

from apollo_compile.config import Config, load_config
from apollo_compile.device.cpu.cgroup import granted_cores
from apollo_compile.device.cpu.machine import machine_fingerprint
from apollo_compile.errors import ApolloError, ConfigError
from apollo_compile.progress import Progress
from apollo_compile.store.files import FileState
from apollo_compile.store.plan_file import read_plans
from apollo_compile.store.profiles import cached_profile_path, inspect_profile
from apollo_compile.target.check_result import CheckResult, Level

LEAST_TORCH = (2, 11)

_COMPILERS = ("g++", "clang++", "c++")
_PROGRAM = "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"
_COMPILE_TIMEOUT_S = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    """Facts about a machine and its software."""

    python: str
    torch: str | None
    """Version of torch; None if it cannot be imported."""
    torch_problem: str | None = None
    native_problem: str | None = None
    """Why the native runtime does not load; None if it does."""
    handles_problem: str | None = None
    """Why torch's tensor handles cannot be used; None if they can."""
    config_problem: str | None = None
    """Why settings in the environment are invalid; None if they are valid."""
    plan_problem: str | None = None
    """Why the plans in APOLLO_PLAN cannot be read; None if they can."""
    compiler: str | None = None
    compiler_problem: str | None = None
    """Why a program with OpenMP cannot be compiled; None if it can."""
    is_body_tried: bool = True
    """Whether a test body is compiled, if possible."""
    body_problem: str | None = None
    """Why a compiled test body runs under the GIL; None if it does not, or if no body was compiled."""
    cores: int
    """Cores of the machine."""
    allowed_cores: int
    """Cores that this process may run on."""
    core_limit: float | None = None
    """CPU time in cores that the container grants; None if there is no limit."""
    threads: int | None = None
    """Threads that torch uses."""
    has_openmp: bool | None = None
    """Whether torch was built with OpenMP."""
    profile: FileState | None = None
    profile_path: Path | None = None
    profile_detail: str = ""
    cache: Path | None = None
    cache_problem: str | None = None
    """Why the cache directory cannot be written; None if it can."""
    ortools: str | None = None
    """Version of OR-Tools; None if it cannot be imported."""
    ortools_problem: str | None = None
    """Why OR-Tools cannot be imported, with its required and the installed protobuf; None if it can."""
    cuda_devices: tuple[str, ...] = ()
    cuda_build: str | None = None
    """CUDA version that torch was built with; None if it was built without CUDA."""
    cuda_results: tuple[CheckResult, ...] = ()
    """Findings about the first CUDA device, including its self-check."""


def diagnose(facts: MachineFacts) -> tuple[CheckResult, ...]:
    """Return the results, in the order in which problems should be fixed."""
    return (
        _ok("python", facts.python),
        _torch(facts),
        _native(facts),
        _config(facts),
        _compiler(facts),
        *_bodies(facts),
        *_cores(facts),
        *_profile(facts),
        _cache(facts),
        _ortools(facts),
        *_cuda(facts),
    )


def is_fit(results: Iterable[CheckResult]) -> bool:
    """Return whether apollo works on this machine: no result is an error."""
    return all(result.level is not Level.ERROR for result in results)


# ------------------------------------------------------------------------------------------------------- judgements


def _result(level: Level, subject: str, message: str, advice: str = "") -> CheckResult:
    return CheckResult(level=level, subject=subject, message=message, advice=advice)


_ok, _note, _warning, _error = (functools.partial(_result, level) for level in Level)


def _torch(facts: MachineFacts) -> CheckResult:
    least = ".".join(map(str, LEAST_TORCH))
    advice = f"install torch {least} or later"
    if facts.torch is None:
        return _error("torch", f"cannot be imported: {facts.torch_problem}", advice)
    version = _version(facts.torch)
    if version is None or version < LEAST_TORCH:
        return _error("torch", f"{facts.torch} is too old", advice)
    if facts.torch_problem is not None:
        return _error("torch", f"{facts.torch} does not work: {facts.torch_problem}", "install torch again")
    return _ok("torch", facts.torch)


def _version(text: str) -> tuple[int, int] | None:
    parts = text.split("+")[0].split(".")
    with contextlib.suppress(ValueError, IndexError):
        return int(parts[0]), int(parts[1])
    return None


def _native(facts: MachineFacts) -> CheckResult:
    subject = "native runtime"
    if facts.native_problem is not None:
        advice = "install apollo_compile for this Python: 'pip install .', or 'make native' in a checkout"
        return _error(subject, f"does not load: {facts.native_problem}", advice)
    if facts.handles_problem is not None:
        message = f"loads, but cannot use the tensors of torch: {facts.handles_problem}"
        return _error(subject, message, "install a release of torch that this package was tested with")
    return _ok(subject, "loads")


def _config(facts: MachineFacts) -> CheckResult:
    if facts.config_problem is not None:
        return _error("settings", facts.config_problem, "correct the environment variable, or unset it")
    if facts.plan_problem is not None:
        advice = "correct APOLLO_PLAN, or unset it; until then the planner is used"
        return _warning("settings", facts.plan_problem, advice)
    return _ok("settings", "the environment's are valid")


def _compiler(facts: MachineFacts) -> CheckResult:
    if facts.compiler is None:
        return _error(
            "C++ compiler",
            f"none, so graphs run operator by operator: searched for {', '.join(_COMPILERS)}",
            "install g++ and Python's headers (g++ and python3-dev on Debian): apollo_compile itself needs no "
            "compiler, but Inductor compiles every body with it",
        )
    if facts.compiler_problem is not None:
        return _error(
            "C++ compiler",
            f"{facts.compiler} cannot compile a program with OpenMP: {facts.compiler_problem}",
            "install the compiler's OpenMP library and headers (libgomp, or libomp for clang)",
        )
    return _ok("C++ compiler", f"{facts.compiler} compiles programs with OpenMP")


def _can_compile(facts: MachineFacts) -> bool:
    """Whether bodies can be compiled, as far as the results tell."""
    return is_fit((_torch(facts), _native(facts), _compiler(facts)))


def _bodies(facts: MachineFacts) -> Iterator[CheckResult]:
    if not _can_compile(facts):
        return  # other results must be fixed first
    if not facts.is_body_tried:
        message = "not tested: only models on the CPU use them, and torch sees a GPU"
        yield _note("native bodies", message, "run 'apollo doctor --cpu' to test one, which can take a minute")
    elif facts.body_problem is not None:
        yield _warning(
            "native bodies",
            f"none, so lanes take turns under the GIL and gain little or nothing: {facts.body_problem}",
            "install a release of torch that this package was tested with (docs/versions.md lists them)",
        )
    else:
        yield _ok("native bodies", "a test body compiles, and runs without the GIL")


def _cores(facts: MachineFacts) -> Iterator[CheckResult]:
    cores, allowed, limit = facts.cores, facts.allowed_cores, facts.core_limit
    seen = min(allowed, facts.threads or allowed)
    usable = seen if limit is None else min(seen, max(1, int(limit)))
    if usable == 1:
        advice = "allow the process more cores (taskset, the container's limits, OMP_NUM_THREADS)"
        yield _warning("cores", f"one core of {cores}: modules cannot run concurrently", advice)
    else:
        yield _ok("cores", f"{usable} of {cores} are used")
    if allowed < cores:
        advice = "if this is not intended, check taskset, cpuset or the job's allocation"
        yield _note("core mask", f"the process may run on {allowed} of {cores} cores", advice)
    if facts.threads is not None and facts.threads < allowed:
        advice = "change it with torch.set_num_threads or OMP_NUM_THREADS"
        yield _note("threads", f"torch uses {facts.threads} of {allowed} cores, and so does apollo", advice)
    if limit is not None and limit < seen:
        yield _warning(
            "container",
            f"the container grants time for {limit:g} of {seen} visible cores: apollo uses {usable}, and torch's "
            "threads may be throttled during a step",
            "pin the container to whole cores (--cpuset-cpus) instead of limiting its time (--cpus)",
        )
    if facts.has_openmp is False:
        message = "torch was built without it: every kernel uses one core only"
        yield _warning("OpenMP", message, "install a build of torch with OpenMP")


def _profile(facts: MachineFacts) -> Iterator[CheckResult]:
    advice = "run 'apollo calibrate': it takes about a minute"
    where = str(facts.profile_path)
    match facts.profile:
        case FileState.CURRENT if facts.profile_detail == "scaled":
            yield _note("device profile", f"{where} is the packaged profile, scaled by a quick measurement", advice)
        case FileState.CURRENT:
            yield _ok("device profile", f"{where}, {facts.profile_detail}")
        case FileState.MISSING:
            message = "this machine is not measured yet: the packaged profile will be scaled"
            yield _note("device profile", message, advice)
        case FileState.STALE | FileState.DAMAGED:
            yield _warning("device profile", f"{where} is {facts.profile.value} ({facts.profile_detail})", advice)


def _cache(facts: MachineFacts) -> CheckResult:
    if facts.cache_problem is None:
        return _ok("cache", f"{facts.cache} can be written")
    advice = "set XDG_CACHE_HOME or 'device.cache'; until then every process measures the machine again"
    return _warning("cache", f"{facts.cache} cannot be written: {facts.cache_problem}", advice)


def _ortools(facts: MachineFacts) -> CheckResult:
    if facts.ortools is not None:
        return _ok("OR-Tools", facts.ortools)
    message = f"plans come from heuristics, and bounds are weaker: cannot be imported: {facts.ortools_problem}"
    return _warning(
        "OR-Tools", message, "pip install ortools; if that conflicts with another package, apollo works without it"
    )


def _cuda(facts: MachineFacts) -> list[CheckResult]:
    if _torch(facts).level is Level.ERROR:
        return []  # torch cannot be asked for devices
    if facts.cuda_devices:
        names = ", ".join(facts.cuda_devices)
        return [
            _note(
                "CUDA",
                f"torch sees {names}; graphs on it run with torch.compile, unless another variant is faster",
                "if an error follows, set 'device.cuda_lanes' to False (APOLLO_CUDA_LANES=0)",
            ),
            *facts.cuda_results,
        ]
    why = "torch was built without it" if facts.cuda_build is None else "torch sees no device"
    return [_ok("CUDA", f"not used: {why}")]


# ------------------------------------------------------------------------------------------------------------ looking


def look(*, check_gpu_again: bool = False, try_cpu: bool = False) -> MachineFacts:
    """Return the facts about this machine.

    Arguments:
        check_gpu_again: repeat the self-check of a GPU even if a result is stored.
        try_cpu: also compile a body for the CPU if there is a GPU. This may take a minute, since with empty caches
            Inductor first compiles a program for each vector extension.
    """
    with Progress("doctor") as progress:
        return _look(progress, check_gpu_again=check_gpu_again, try_cpu=try_cpu)


def _look(progress: Progress, *, check_gpu_again: bool, try_cpu: bool) -> MachineFacts:
    progress.at("importing torch")
    version, torch_problem = _import_torch()
    parsed = _version(version) if version else None
    is_usable = parsed is not None and parsed >= LEAST_TORCH and torch_problem is None
    torch = import_module("torch") if is_usable else None
    native_problem = _problem_of(lambda: import_module("apollo_compile._native"))
    is_complete = torch is not None and native_problem is None
    ortools_problem = _problem_of(lambda: import_module("ortools.sat.python.cp_model"))
    config, config_problem = _look_at_config()
    cache, plan = (None, None) if config is None else (config.device.cache, config.plan.file)
    names = _COMPILERS if torch is None else import_module("apollo_compile.torch_bridge.cxx_compiler").compilers()
    compiler = next((found for name in names if (found := shutil.which(name))), None)
    threads = None if torch is None else torch.get_num_threads()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    state: FileState | None = None
    path, detail = None, ""
    if config is not None and torch is not None:
        if is_complete and config.device.profile is not None:
            config_problem = _problem_of(lambda: import_module("apollo_compile.device.open").select_profile(config))
        if config_problem is None:
            state, path, detail = _look_at_profile(config, _units(allowed, threads))
    has_gpu = torch is not None and torch.cuda.is_available()
    gpus = () if torch is None or not has_gpu else map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    progress.at("checking lanes on the GPU" if has_gpu else "looking at the machine")
    facts = MachineFacts(
        python=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        torch=version,
        torch_problem=torch_problem,
        native_problem=native_problem,
        handles_problem=_problem_of(lambda: import_module("apollo_compile.torch_bridge.handles").tensor_api())
        if is_complete
        else None,
        config_problem=config_problem,
        plan_problem=None if plan is None else _problem_of(lambda: read_plans(plan)),
        compiler=compiler,
        compiler_problem=None if compiler is None else _try_compiler(compiler),
        cores=os.cpu_count() or 1,
        allowed_cores=allowed,
        core_limit=granted_cores(),
        threads=threads,
        has_openmp=None if torch is None else bool(torch.backends.openmp.is_available()),
        profile=state,
        profile_path=path,
        profile_detail=detail,
        cache=cache,
        cache_problem=None if cache is None else _problem_of(lambda: _write_into(cache)),
        ortools=metadata.version("ortools") if ortools_problem is None else None,
        ortools_problem=ortools_problem and ortools_problem + _protobufs(),
        cuda_devices=tuple(gpus),
        cuda_build=None if torch is None else torch.version.cuda,
        cuda_results=_examine_cuda(cache, check_gpu_again) if is_complete and has_gpu else (),
        is_body_tried=try_cpu or not has_gpu,
    )
    if not facts.is_body_tried or not _can_compile(facts):
        return facts
    progress.at("compiling a body for the CPU")
    return replace(facts, body_problem=_body_problem())


def _problem_of(attempt: Callable[[], object]) -> str | None:
    """Return why an attempt fails; None if it does not. A broken installation may raise anything."""
    try:
        attempt()
    except ApolloError as error:
        return str(error)
    except Exception as error:
        return _format(error)
    return None


def _import_torch() -> tuple[str | None, str | None]:
    """Return the version of torch, and the problem with it, if any."""
    try:
        import torch
    except Exception as error:  # a broken installation may raise anything
        return None, _format(error)
    version = getattr(torch, "__version__", None)
    if version is None:
        return None, "it has no version: another module of that name shadows it"
    return str(version), None if hasattr(torch, "compile") else "it has no torch.compile"


def _body_problem() -> str | None:
    """Compile a small body; return why it runs under the GIL, or None if it does not."""
    try:
        import torch
        from torch.fx.experimental.proxy_tensor import make_fx

        from apollo_compile.torch_bridge.bodies import compile_bodies
        from apollo_compile.torch_bridge.overrides import check_overrides

        check_overrides()
        graph = make_fx(lambda x: (x.sin() + 1,), tracing_mode="fake")(torch.ones(64))
        fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        with torch.no_grad():
            (body,) = compile_bodies(
                [("doctor", graph, fakes)], native=True, is_inference=True, is_backward=False, graph_id=0
            )
    except Exception as error:  # any error of the compiler or of torch's private parts is a result
        return _format(error)
    return None if body.keeps_python is None else body.keeps_python.reason


def _look_at_config() -> tuple[Config | None, str | None]:
    try:
        return load_config(), None
    except ConfigError as error:
        return None, str(error)


def _examine_cuda(cache: Path | None, check_again: bool) -> tuple[CheckResult, ...]:
    """Return the results about the first GPU, from an examination and from the stored or a new self-check."""
    try:
        from apollo_compile.device.gpu.check.examine import examine_cuda

        found = examine_cuda()
        if cache is None or any(result.level is Level.ERROR for result in found):
            return found  # there are no lanes to check
        from apollo_compile.device.gpu.check.self_check import check_gpu, describe
        from apollo_compile.device.gpu.run.gpu import TorchGpu

        begin = time.time()
        verdict = check_gpu(TorchGpu(0), cache, again=check_again)
        return (*found, *describe(verdict, is_new=verdict.made_at >= begin))
    except Exception as error:  # a broken driver may raise anything
        return (_error("GPU", f"cannot be examined: {_format(error)}"),)


def _units(allowed: int, threads: int | None) -> int:
    """Return the number of cores that graphs are planned for, even if the native runtime does not load."""
    try:
        from apollo_compile.device.cpu.execute import available_units

        return available_units()
    except ImportError:
        return min(allowed, threads or allowed)


def _look_at_profile(config: Config, units: int) -> tuple[FileState, Path, str]:
    if config.device.profile is not None:
        return FileState.CURRENT, config.device.profile, "named by APOLLO_PROFILE"
    assert config.device.cache is not None, "load_config fills it in"
    path = cached_profile_path(config.device.cache, units)
    found = inspect_profile(path, machine_fingerprint(units))
    return found.state, path, found.detail if found.content is None else found.content.source


def _try_compiler(compiler: str) -> str | None:
    """Return why a program with OpenMP cannot be compiled and run; None if it can."""
    with tempfile.TemporaryDirectory(prefix="apollo-doctor-") as folder:
        source, program = Path(folder) / "program.cpp", Path(folder) / "program"
        source.write_text(_PROGRAM)
        try:
            for command in ([compiler, "-fopenmp", str(source), "-o", str(program)], [str(program)]):
                done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
                if done.returncode != 0:
                    lines = [line for line in done.stderr.splitlines() if line.strip()]
                    return lines[0] if lines else f"exit code {done.returncode}"
        except (OSError, subprocess.TimeoutExpired) as error:
            return _format(error)
    return None


_ENOUGH = 1 << 20
"""Bytes that the files of one model's findings take at most."""


def _write_into(folder: Path) -> None:
    """Write a temporary file into `folder`, which need not exist yet."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    with tempfile.TemporaryFile(dir=existing) as file:
        file.write(bytes(_ENOUGH))  # an empty file can be made on a full disk
        file.flush()


def _protobufs() -> str:
    """Return the protobuf that OR-Tools requires and the installed one, for a message: the two often differ."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        required = [text for text in metadata.requires("ortools") or () if text.startswith("protobuf")]
        if required:
            return f" (it requires {required[0]}, and {metadata.version('protobuf')} is installed)"
    return ""


def _format(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
