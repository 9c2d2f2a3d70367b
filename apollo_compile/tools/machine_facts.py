"""Facts about a machine and its software, which the doctor diagnoses: `MachineFacts`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from apollo_compile.store.files import FileState
from apollo_compile.target.findings import Finding


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
    """Source of the profile, or why it cannot be used."""
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
    cuda_findings: tuple[Finding, ...] = ()
    """Findings about the first CUDA device, including its self-check."""
