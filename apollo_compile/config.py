"""The configuration; no other file reads the environment.

Options of `torch.compile(m, backend="apollo", options={...})` override the environment, which overrides defaults.
Options are dotted names, `{"plan.planner": "serial"}`, or nested mappings, `{"plan": {"planner": "serial"}}`. The
prefix `inductor.` is for Inductor's own options, `{"inductor.max_autotune": True}`, with their names in
`torch.compile`.

| Variable         | Sets              | Meaning                                                    |
| ---------------- | ----------------- | ---------------------------------------------------------- |
| APOLLO_CUDA_LANES | `device.cuda_lanes` | 0: graphs on a GPU are those of torch.compile               |
| APOLLO_DISABLE   | `disable`         | 1: every graph falls back to Inductor, as if apollo were not there |
| APOLLO_DUMP      | `debug.dump`      | directory that gets one text file per stage and graph       |
| APOLLO_LOG       | `debug.log`       | level of the package's logger: DEBUG, INFO, WARNING         |
| APOLLO_PLAN      | `plan.file`       | plan file, or a directory that `debug.dump` wrote: run these plans |
| APOLLO_PROFILE   | `device.profile`  | device profile to use instead of this machine's: a path or a packaged name |

Flags are 1 or 0, true or false, yes or no, in any case. An empty variable counts as not set; an unknown variable that
begins with APOLLO_ gets a WARNING. The default of `device.cache` follows XDG_CACHE_HOME. CUDA's own variables are read
only to report them. LOCAL_RANK and LOCAL_WORLD_SIZE, which launchers set, give the ranks that share the machine.
"""

from __future__ import annotations

import difflib
import functools
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from apollo_compile.errors import ConfigError

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionConfig:
    """Options of the partition."""

    granularity: Literal["layer", "module"] = "layer"
    """Boundaries of segments: at every layer, or only where branches fork and join."""
    weight_gradients: Literal["auto", "together", "apart"] = "auto"
    """Whether the matmuls of a layer's weight gradients are a separate segment, which no other segment waits for;
    `auto` separates them if that shortens the predicted plan."""
    casts: Literal["together", "apart"] = "together"
    """Whether casts of a layer's weights and gradients, as autocast does them, are apart from the layer: a step of
    several micro-batches casts weights once, and gradients while it adds them; `compile_step` sets `apart` there."""
    min_segment_share: float = 0.005
    """Pieces with a smaller share of the graph's work are merged into a neighbour; between 0 and 1."""
    max_segment_share: float = 0.1
    """Without layer names, chains are cut into pieces of about this share; between 0 and 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Options of planning and autotuning."""

    planner: Literal["cp_sat", "greedy", "serial"] = "cp_sat"
    """`cp_sat` searches with heuristics, then with the solver; `greedy` uses heuristics only; `serial` runs all
    segments on one lane in graph order. The serial plan is always considered."""
    min_gain: float = 0.02
    """Least predicted gain over the serial plan; below it, the serial plan is used. 0.02 is 2%."""
    time_limit_s: float = 2.0
    """Seconds per graph after which the search ends with its best plan."""
    seed: int = 0
    """Seed of the random moves and of the solver."""
    memory_quota: int | None = None
    """Bytes that tensors made by a graph may take at any instant, including temporaries of segments as far as fusion
    can be predicted; None means no limit."""
    replan: bool = True
    """Plan again after the first steps, with measured durations instead of formulas."""
    autotune: bool = True
    """Measure the plan, the serial plan and Inductor's own code in the first steps, and keep the
    fastest. With False, a plan file, the planner `serial`, a memory quota or
    `torch.use_deterministic_algorithms(True)`, the plan always runs; deterministic algorithms also switch off
    `replan`."""
    compile_share: float = 0.05
    """Largest share of the training time for compiling further variants to compare: with 0.05, a compile begins once
    the loop has run for twenty times as long as the compile will take. A large number compares at once."""
    remember: bool = True
    """Keep plan and verdict of the first steps in `device.cache`, and compiled graphs in AOTAutograd's cache, and reuse
    them in later processes."""
    file: Path | None = None
    """Plan file, or directory written by `debug.dump`, with the lanes and order to use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """Options of compiling and running bodies."""

    bodies: Literal["native", "python", "eager"] = "native"
    """Code of bodies: compiled with Inductor's C++ wrapper, so that lanes run without the GIL; compiled with its Python
    wrapper; or interpreted, to distinguish compiler bugs from planner bugs."""
    recompute_masks: bool = True
    """Recompute boolean masks and other cheap values in the backward instead of saving them."""
    onednn: bool = True
    """On a CPU, use oneDNN for the float32 matmuls for which it was measured to be faster than BLAS."""
    keep_memory: bool = True
    """Keep freed memory in the process (glibc's mallopt), which saves thousands of page faults per step."""
    park_team: bool = True
    """Make the caller's OpenMP workers sleep instead of spin while lanes run."""
    isolation: bool = False
    """On a GPU, restrict lanes to their planned SMs by green contexts; with False, lanes are plain streams, which keep
    the order of the plan. On a CPU, lanes are always threads that are pinned to their cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceConfig:
    """Options of the device."""

    profile: Path | None = None
    """Device profile to use; None measures this machine once and keeps the result in `cache`."""
    cache: Path | None = None
    """Directory of measured profiles and of findings of earlier processes; None is the user's cache directory."""
    units: int | None = None
    """Cores to use; None is every core that torch uses, divided among local ranks, and limited by control groups."""
    cuda_lanes: bool = True
    """Whether a graph on a GPU may run on lanes of SMs, in CUDA graphs; if not, it is torch.compile's."""
    lane_memory_quota: int | None = None
    """Bytes of device memory that one lane may take in a CUDA graph; None means no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugConfig:
    """Dumps, logging and strictness."""

    dump: Path | None = None
    """Directory that gets one text file per stage and graph."""
    log: str | None = None
    """Level of the package's logger; None does not change it."""
    strict: bool = False
    """Raise errors that would otherwise be logged and cause a fallback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All options of a compile."""

    disable: bool = False
    """Make every graph fall back to Inductor."""
    mode: str | None = None
    """Mode of Inductor, such as `max-autotune-no-cudagraphs`, for use with other options: `torch.compile` takes either
    a mode or options."""
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Settings of Inductor by their names in `torch._inductor.config`, as `{"inductor.max_autotune": True}`, for bodies
    of segments and for fallbacks. They override the settings of the mode."""


_VARIABLES = {
    "APOLLO_CUDA_LANES": "device.cuda_lanes",
    "APOLLO_DISABLE": "disable",
    "APOLLO_DUMP": "debug.dump",
    "APOLLO_LOG": "debug.log",
    "APOLLO_PLAN": "plan.file",
    "APOLLO_PROFILE": "device.profile",
}

_PREFIX = "APOLLO_"

_RANGES: dict[str, tuple[float, float]] = {
    "partition.min_segment_share": (0, 1),
    "partition.max_segment_share": (0, 1),
    "plan.min_gain": (0, 1),
    "plan.time_limit_s": (0.01, math.inf),
    "plan.compile_share": (1e-6, math.inf),
    "plan.memory_quota": (1, math.inf),
    "plan.seed": (0, 2**31 - 1),
    "device.units": (1, math.inf),
    "device.lane_memory_quota": (1, math.inf),
}
"""Least and largest allowed values."""

_REMOVED = {
    "plan.fixed_effort": "the search is always limited by work; a larger 'plan.time_limit_s' allows more of it",
    "plan.late_share": "code is tuned from the start with mode='max-autotune', and not late in a run",
}
"""Removed options, with their replacements."""

_INDUCTOR = "inductor"
"""Group of Inductor's options, which Inductor checks."""

_FLAG_OPTIONS = ("disable", "device.cuda_lanes")
"""Options that a variable sets to yes or no."""
_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def load_config(options: Mapping[str, Any] | None = None) -> Config:
    """Merge options over environment over defaults.

    Raises:
        ConfigError: an option is unknown, a value has the wrong type or is not allowed, or there is no plan file.
    """
    for variable in os.environ.keys() - _VARIABLES.keys():
        if variable.startswith(_PREFIX):
            _warn_of_variable(variable)
    inductor, own = _take_inductor(options or {})
    config = Config(inductor=inductor)
    for name, value, origin in (*_set_in_environment(), *((n, v, f"option {n!r}") for n, v in _flatten(own))):
        config = _set(config, name.split("."), value, origin)
        _check(name, value, origin)
    return config if config.device.cache else _set(config, ["device", "cache"], _user_cache(), "cache directory")


def cuda_connections() -> str | None:
    """Return CUDA_DEVICE_MAX_CONNECTIONS, the number of hardware queues for streams; None if it is not set."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")


def environment_of_one_process() -> dict[str, str]:
    """Return the environment without the variables that launchers set for ranks, for a process outside the job."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_RANK_VARIABLES)}


_RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
    "OMPI_",
    "PMI",
    "SLURM_",
)
"""Prefixes of the variables of torchrun, MPI and Slurm."""


def local_rank() -> tuple[int, int]:
    """Return the local rank of this process and the number of local ranks; (0, 1) without a launcher."""
    try:
        rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, size) if 0 <= rank < size else (0, 1)


def known_options() -> tuple[str, ...]:
    """Return the dotted name of every option, in the order of the tree."""
    return tuple(_names(Config, ""))


def _user_cache() -> Path:
    import platformdirs  # imported only if a directory is needed

    try:
        path = platformdirs.user_cache_path("apollo_compile", appauthor=False)
    except RuntimeError:
        path = Path()
    # Users in containers may have no home directory; older releases of platformdirs return a folder called ~ then.
    return path if path.is_absolute() else Path(tempfile.gettempdir()) / f"apollo_compile-{os.getuid()}"


def _names(cls: type, prefix: str) -> Iterator[str]:
    hints = get_type_hints(cls)
    for item in fields(cls):
        if is_dataclass(hints[item.name]):
            yield from _names(hints[item.name], f"{prefix}{item.name}.")
        else:
            yield prefix + item.name


def _take_inductor(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of Inductor by their own names, and the other options."""
    inductor: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for name, value in options.items():
        if name.startswith(f"{_INDUCTOR}."):
            inductor[name.removeprefix(f"{_INDUCTOR}.")] = value
        elif name == _INDUCTOR and isinstance(value, Mapping):
            inductor.update(value)
        elif name == _INDUCTOR:
            raise ConfigError(
                f"option 'inductor' has value {value!r} of type {type(value).__name__}; expected settings of Inductor "
                "by name, as in {'inductor.max_autotune': True}"
            )
        else:
            own[name] = value
    return inductor, own


def _flatten(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _set(tree: Any, path: list[str], value: Any, origin: str, prefix: str = "") -> Any:
    hints = get_type_hints(type(tree))
    name, rest = path[0], path[1:]
    is_group = name in hints and is_dataclass(hints[name])
    if is_group and not rest:
        first = next(_names(hints[name], f"{prefix}{name}."))
        raise ConfigError(f"{origin} has value {value!r}; {prefix}{name} expects options such as {first}")
    if name in hints and rest and not is_group:
        raise ConfigError(f"unknown {origin}: {prefix}{name} expects a value, not a mapping of options")
    if name not in hints:
        full = ".".join([*filter(None, prefix.split(".")), *path])
        if full in _REMOVED:
            raise ConfigError(f"{origin} does not exist any more: {_REMOVED[full]}")
        guess = _guess(full, known_options())
        raise ConfigError(f"unknown {origin} for backend 'apollo'{guess}; known options: {', '.join(known_options())}")
    if rest:
        return replace(tree, **{name: _set(getattr(tree, name), rest, value, origin, f"{prefix}{name}.")})
    return replace(tree, **{name: _convert(value, hints[name], origin)})


def _guess(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a question with the known name that is most similar to an unknown one; empty if none is similar."""
    similar = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f", did you mean {similar[0]}?" if similar else ""


@functools.cache
def _warn_of_variable(variable: str) -> None:
    """Warn once per process of a variable that is not read."""
    _logger.warning(
        "environment variable %s is ignored%s; known variables: %s",
        variable,
        _guess(variable, _VARIABLES, cutoff=0.8),  # all of them have the same prefix
        ", ".join(_VARIABLES),
    )


def _set_in_environment() -> Iterator[tuple[str, Any, str]]:
    """Yield names and values of the options that variables set, and what set them."""
    for variable, name in _VARIABLES.items():
        text, origin = os.environ.get(variable), f"environment variable {variable}"
        if not text:
            continue
        if name in _FLAG_OPTIONS and text.lower() not in _FLAGS:
            raise ConfigError(f"{origin} has value {text!r}; expected 1 or 0, true or false, yes or no")
        yield name, _FLAGS[text.lower()] if name in _FLAG_OPTIONS else text, origin


def _check(name: str, value: Any, origin: str) -> None:
    """Check a value of the right type: its range, its level, or whether the file exists."""
    if value is None:
        return
    least, largest = _RANGES.get(name, (-math.inf, math.inf))
    if name in _RANGES and not least <= value <= largest:
        expected = f"at least {least}" if largest == math.inf else f"between {least} and {largest}"
        raise ConfigError(f"{origin} is {value!r}; expected {expected}")
    if name == "debug.log" and value.upper() not in (known := logging.getLevelNamesMapping()):
        raise ConfigError(f"{origin} has value {value!r}; choose one of {', '.join(known)}")
    if name == "plan.file" and not Path(value).exists():
        raise ConfigError(
            f"{origin} is {str(value)!r}, which does not exist; expected a plan.json, or a directory written by "
            "debug.dump"
        )


def _convert(value: Any, kind: Any, origin: str) -> Any:
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise ConfigError(f"{origin} has value {value!r}; choose one of {', '.join(map(repr, get_args(kind)))}")
    if get_origin(kind) in (UnionType, Union):
        if value is None:
            return None
        kind = next(choice for choice in get_args(kind) if choice is not type(None))
    if kind is Path and isinstance(value, str | os.PathLike):
        return Path(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{origin} has value {value!r} of type {type(value).__name__}; expected {kind.__name__}")
