"""Check this machine, and advise how to fix problems.

    look() -> MachineFacts -> diagnose(facts) -> [Finding]

`look` inspects the machine and never raises: problems are facts too. `diagnose` is a pure function of the facts, so
every case can be tested on any machine.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from dataclasses import replace
from importlib import import_module, metadata
from pathlib import Path

from apollo_compile.config import Config, load_config
from apollo_compile.device.cpu.cgroup import granted_cores
from apollo_compile.device.cpu.machine import machine_fingerprint
from apollo_compile.errors import ConfigError, PlanFileError
from apollo_compile.progress import Progress
from apollo_compile.store.files import FileState
from apollo_compile.store.plan_file import read_plans
from apollo_compile.store.profiles import cached_profile_path, inspect_profile
from apollo_compile.target.findings import Finding, Level
from apollo_compile.tools.machine_facts import MachineFacts

LEAST_TORCH = (2, 11)

_COMPILERS = ("g++", "clang++", "c++")
_PROGRAM = "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"
_COMPILE_TIMEOUT_S = 60


def diagnose(facts: MachineFacts) -> tuple[Finding, ...]:
    """Return the findings, in the order in which problems should be fixed."""
    return (
        Finding(level=Level.OK, subject="python", message=facts.python),
        _torch(facts),
        *_native(facts),
        _config(facts),
        _compiler(facts),
        *_bodies(facts),
        *_cores(facts),
        *_openmp(facts),
        *_profile(facts),
        _cache(facts),
        _ortools(facts),
        *_cuda(facts),
    )


def is_fit(findings: tuple[Finding, ...]) -> bool:
    """Return whether apollo works on this machine: no finding is an error."""
    return all(finding.level is not Level.ERROR for finding in findings)


# ------------------------------------------------------------------------------------------------------- judgements


def _torch(facts: MachineFacts) -> Finding:
    least = ".".join(map(str, LEAST_TORCH))
    advice = f"install torch {least} or later"
    if facts.torch is None:
        return Finding(
            level=Level.ERROR, subject="torch", message=f"cannot be imported: {facts.torch_problem}", advice=advice
        )
    version = _version(facts.torch)
    if version is None or version < LEAST_TORCH:
        return Finding(level=Level.ERROR, subject="torch", message=f"{facts.torch} is too old", advice=advice)
    if facts.torch_problem is not None:
        return Finding(
            level=Level.ERROR,
            subject="torch",
            message=f"{facts.torch} does not work: {facts.torch_problem}",
            advice="install torch again",
        )
    return Finding(level=Level.OK, subject="torch", message=facts.torch)


def _version(text: str) -> tuple[int, int] | None:
    parts = text.split("+")[0].split(".")
    with contextlib.suppress(ValueError, IndexError):
        return int(parts[0]), int(parts[1])
    return None


def _native(facts: MachineFacts) -> list[Finding]:
    if facts.native_problem is not None:
        return [
            Finding(
                level=Level.ERROR,
                subject="native runtime",
                message=f"does not load: {facts.native_problem}",
                advice="install apollo_compile for this Python: 'pip install .', or 'make native' in a checkout",
            )
        ]
    if facts.handles_problem is not None:
        return [
            Finding(
                level=Level.ERROR,
                subject="native runtime",
                message=f"loads, but cannot use the tensors of torch: {facts.handles_problem}",
                advice="install a release of torch that this package was tested with",
            )
        ]
    return [Finding(level=Level.OK, subject="native runtime", message="loads")]


def _config(facts: MachineFacts) -> Finding:
    if facts.config_problem is not None:
        return Finding(
            level=Level.ERROR,
            subject="settings",
            message=facts.config_problem,
            advice="correct the environment variable, or unset it",
        )
    if facts.plan_problem is not None:
        return Finding(
            level=Level.WARNING,
            subject="settings",
            message=facts.plan_problem,
            advice="correct APOLLO_PLAN, or unset it; until then the planner is used",
        )
    return Finding(level=Level.OK, subject="settings", message="the environment's are valid")


def _compiler(facts: MachineFacts) -> Finding:
    if facts.compiler is None:
        return Finding(
            level=Level.ERROR,
            subject="C++ compiler",
            message=f"none, so graphs run operator by operator: searched for {', '.join(_COMPILERS)}",
            advice="install g++ and Python's headers (g++ and python3-dev on Debian): apollo_compile itself needs no "
            "compiler, but Inductor compiles every body with it",
        )
    if facts.compiler_problem is not None:
        return Finding(
            level=Level.ERROR,
            subject="C++ compiler",
            message=f"{facts.compiler} cannot compile a program with OpenMP: {facts.compiler_problem}",
            advice="install the compiler's OpenMP library and headers (libgomp, or libomp for clang)",
        )
    return Finding(level=Level.OK, subject="C++ compiler", message=f"{facts.compiler} compiles programs with OpenMP")


def _can_compile(facts: MachineFacts) -> bool:
    """Whether bodies can be compiled, as far as the findings tell."""
    return all(finding.level is not Level.ERROR for finding in (_torch(facts), *_native(facts), _compiler(facts)))


def _bodies(facts: MachineFacts) -> list[Finding]:
    if not _can_compile(facts):
        return []  # other findings must be fixed first
    if not facts.is_body_tried:
        return [
            Finding(
                level=Level.NOTE,
                subject="native bodies",
                message="not tested: only models on the CPU use them, and torch sees a GPU",
                advice="run 'apollo doctor --cpu' to test one, which can take a minute",
            )
        ]
    if facts.body_problem is not None:
        return [
            Finding(
                level=Level.WARNING,
                subject="native bodies",
                message=f"none, so lanes take turns under the GIL and gain little or nothing: {facts.body_problem}",
                advice="install a release of torch that this package was tested with (docs/versions.md lists them)",
            )
        ]
    return [Finding(level=Level.OK, subject="native bodies", message="a test body compiles, and runs without the GIL")]


def _cores(facts: MachineFacts) -> list[Finding]:
    found = []
    seen = min(facts.allowed_cores, facts.threads or facts.allowed_cores)
    usable = seen if facts.core_limit is None else min(seen, max(1, int(facts.core_limit)))
    if usable == 1:
        found.append(
            Finding(
                level=Level.WARNING,
                subject="cores",
                message=f"one core of {facts.cores}: modules cannot run concurrently",
                advice="allow the process more cores (taskset, the container's limits, OMP_NUM_THREADS)",
            )
        )
    else:
        found.append(Finding(level=Level.OK, subject="cores", message=f"{usable} of {facts.cores} are used"))
    if facts.allowed_cores < facts.cores:
        found.append(
            Finding(
                level=Level.NOTE,
                subject="core mask",
                message=f"the process may run on {facts.allowed_cores} of {facts.cores} cores",
                advice="if this is not intended, check taskset, cpuset or the job's allocation",
            )
        )
    if facts.threads is not None and facts.threads < facts.allowed_cores:
        found.append(
            Finding(
                level=Level.NOTE,
                subject="threads",
                message=f"torch uses {facts.threads} of {facts.allowed_cores} cores, and so does apollo",
                advice="change it with torch.set_num_threads or OMP_NUM_THREADS",
            )
        )
    if facts.core_limit is not None and facts.core_limit < seen:
        found.append(
            Finding(
                level=Level.WARNING,
                subject="container",
                message=f"the container grants time for {facts.core_limit:g} of {seen} visible cores: apollo uses "
                f"{usable}, and torch's threads may be throttled during a step",
                advice="pin the container to whole cores (--cpuset-cpus) instead of limiting its time (--cpus)",
            )
        )
    return found


def _openmp(facts: MachineFacts) -> list[Finding]:
    if facts.has_openmp is False:
        return [
            Finding(
                level=Level.WARNING,
                subject="OpenMP",
                message="torch was built without it: every kernel uses one core only",
                advice="install a build of torch with OpenMP",
            )
        ]
    return []


def _profile(facts: MachineFacts) -> list[Finding]:
    advice = "run 'apollo calibrate': it takes about a minute"
    where = str(facts.profile_path)
    match facts.profile:
        case None:
            return []
        case FileState.CURRENT if facts.profile_detail == "scaled":
            message = f"{where} is the packaged profile, scaled by a quick measurement"
            return [Finding(level=Level.NOTE, subject="device profile", message=message, advice=advice)]
        case FileState.CURRENT:
            return [Finding(level=Level.OK, subject="device profile", message=f"{where}, {facts.profile_detail}")]
        case FileState.MISSING:
            message = "this machine is not measured yet: the packaged profile will be scaled"
            return [Finding(level=Level.NOTE, subject="device profile", message=message, advice=advice)]
        case FileState.STALE | FileState.DAMAGED:
            message = f"{where} is {facts.profile.value} ({facts.profile_detail})"
            return [Finding(level=Level.WARNING, subject="device profile", message=message, advice=advice)]


def _cache(facts: MachineFacts) -> Finding:
    if facts.cache_problem is not None:
        return Finding(
            level=Level.WARNING,
            subject="cache",
            message=f"{facts.cache} cannot be written: {facts.cache_problem}",
            advice="set XDG_CACHE_HOME or 'device.cache'; until then every process measures the machine again",
        )
    return Finding(level=Level.OK, subject="cache", message=f"{facts.cache} can be written")


def _ortools(facts: MachineFacts) -> Finding:
    if facts.ortools is None:
        return Finding(
            level=Level.WARNING,
            subject="OR-Tools",
            message=f"plans come from heuristics, and bounds are weaker: cannot be imported: {facts.ortools_problem}",
            advice="pip install ortools; if that conflicts with another package, apollo works without it",
        )
    return Finding(level=Level.OK, subject="OR-Tools", message=facts.ortools)


def _cuda(facts: MachineFacts) -> list[Finding]:
    if _torch(facts).level is Level.ERROR:
        return []  # torch cannot be asked for devices
    if facts.cuda_devices:
        names = ", ".join(facts.cuda_devices)
        return [
            Finding(
                level=Level.NOTE,
                subject="CUDA",
                message=f"torch sees {names}; graphs on it run with torch.compile, unless another variant is faster",
                advice="if an error follows, set 'device.cuda_lanes' to False (APOLLO_CUDA_LANES=0)",
            ),
            *facts.cuda_findings,
        ]
    why = "torch was built without it" if facts.cuda_build is None else "torch sees no device"
    return [Finding(level=Level.OK, subject="CUDA", message=f"not used: {why}")]


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
    native_problem = _problem_of("apollo_compile._native")
    ortools, ortools_problem = _import_ortools()
    config, config_problem = _look_at_config()
    cache = None if config is None else config.device.cache
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    threads = _threads() if is_usable else None
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    state: FileState | None = None
    path, detail = None, ""
    if config is not None and is_usable:
        config_problem = _profile_problem(config) if native_problem is None else None
        if config_problem is None:
            state, path, detail = _look_at_profile(config, _units(allowed, threads))
    cuda_devices = _cuda_devices() if is_usable else ()
    progress.at("checking lanes on the GPU" if cuda_devices else "looking at the machine")
    facts = MachineFacts(
        python=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        torch=version,
        torch_problem=torch_problem,
        native_problem=native_problem,
        handles_problem=_handles_problem() if is_usable and native_problem is None else None,
        config_problem=config_problem,
        plan_problem=None if config is None else _plan_problem(config),
        compiler=compiler,
        compiler_problem=None if compiler is None else _try_compiler(compiler),
        cores=os.cpu_count() or 1,
        allowed_cores=allowed,
        core_limit=granted_cores(),
        threads=threads,
        has_openmp=_has_openmp() if is_usable else None,
        profile=state,
        profile_path=path,
        profile_detail=detail,
        cache=cache,
        cache_problem=None if cache is None else _try_to_write(cache),
        ortools=ortools,
        ortools_problem=ortools_problem,
        cuda_devices=cuda_devices,
        cuda_build=_cuda_build() if is_usable else None,
        cuda_findings=_examine_cuda(config, check_gpu_again) if is_usable and native_problem is None else (),
        is_body_tried=try_cpu or not cuda_devices,
    )
    if not facts.is_body_tried or not _can_compile(facts):
        return facts
    progress.at("compiling a body for the CPU")
    return replace(facts, body_problem=_body_problem())


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


def _problem_of(module: str) -> str | None:
    try:
        import_module(module)
    except Exception as error:  # an extension for another Python or another machine may raise anything
        return _format(error)
    return None


def _handles_problem() -> str | None:
    try:
        from apollo_compile.torch_bridge.handles import tensor_api

        tensor_api()
    except Exception as error:  # any error of torch's private parts is a finding
        return _format(error)
    return None


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
    except Exception as error:  # any error of the compiler or of torch's private parts is a finding
        return _format(error)
    return None if body.keeps_python is None else body.keeps_python.reason


def _look_at_config() -> tuple[Config | None, str | None]:
    try:
        return load_config(), None
    except ConfigError as error:
        return None, str(error)


def _profile_problem(config: Config) -> str | None:
    """Return why the configured profile cannot be used; None if it can, or if none is configured."""
    if config.device.profile is None:
        return None
    try:
        from apollo_compile.device.open import select_profile

        select_profile(config)
    except ConfigError as error:
        return str(error)
    return None


def _plan_problem(config: Config) -> str | None:
    """Return why the configured plans cannot be read; None if they can, or if none are configured."""
    if config.plan.file is None:
        return None
    try:
        read_plans(config.plan.file)
    except PlanFileError as error:
        return str(error)
    return None


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _has_openmp() -> bool:
    import torch

    return bool(torch.backends.openmp.is_available())  # type: ignore[no-untyped-call]


def _cuda_devices() -> tuple[str, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _cuda_build() -> str | None:
    import torch

    return torch.version.cuda


def _examine_cuda(config: Config | None, check_again: bool) -> tuple[Finding, ...]:
    """Return the findings about the first GPU, from an examination and from the stored or a new self-check."""
    import torch

    if not torch.cuda.is_available():
        return ()
    try:
        from apollo_compile.device.gpu.check.examine import examine_cuda

        found = examine_cuda()
        cache = None if config is None else config.device.cache
        if cache is None or any(finding.level is Level.ERROR for finding in found):
            return found  # there are no lanes to check
        from apollo_compile.device.gpu.check.self_check import check_gpu, describe
        from apollo_compile.device.gpu.run.gpu import TorchGpu

        begin = time.time()
        verdict = check_gpu(TorchGpu(0), cache, again=check_again)
        return (*found, *describe(verdict, is_new=verdict.made_at >= begin))
    except Exception as error:  # a broken driver may raise anything
        return (Finding(level=Level.ERROR, subject="GPU", message=f"cannot be examined: {_format(error)}"),)


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


def _try_to_write(folder: Path) -> str | None:
    """Return why nothing can be written into `folder`, which need not exist yet; None if it can."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(_ENOUGH))  # an empty file can be made on a full disk
            file.flush()
            return None
    except OSError as error:
        return _format(error)


def _import_ortools() -> tuple[str | None, str | None]:
    """Return the version of OR-Tools, or why it cannot be imported."""
    try:
        import_module("ortools.sat.python.cp_model")
        return metadata.version("ortools"), None
    except Exception as error:  # a broken installation may raise anything
        return None, _format(error) + _protobufs()


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
