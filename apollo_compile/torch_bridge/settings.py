"""Settings of Inductor and torch, and what follows from them.

Settings that we add for bodies are in `compile_scope.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._inductor.config as inductor_config

from apollo_compile.errors import ConfigError
from apollo_compile.torch_bridge.joint_passes import JointPasses


def inductor_settings(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of Inductor that `torch.compile(mode=mode, options=options)` applies.

    Raises:
        ConfigError: there is no such mode or setting, or a value has the wrong type.
    """
    try:
        settings: dict[str, Any] = torch._TorchCompileInductorWrapper(mode, dict(options), None).config  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigError(f"Inductor does not take the mode or an option 'inductor.<setting>': {error}") from error
    return settings


def current_settings() -> Mapping[str, Any]:
    """Return Inductor's current settings, without the passes that `compile_with_inductor` adds to the user's."""
    entries: Mapping[str, Any] = inductor_config._config  # type: ignore[attr-defined]
    # Reading a deprecated setting is a warning; a deprecated one is an alias of another, or has no effect any more.
    names = (n for n, e in entries.items() if e.alias is None and not getattr(e, "deprecated", False))
    settings = {name: getattr(inductor_config, name) for name in names}
    passes = settings["joint_custom_pre_pass"]
    return {**settings, "joint_custom_pre_pass": passes.users if isinstance(passes, JointPasses) else passes}


def with_settings(settings: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Apply these settings of Inductor inside a `with`."""
    return inductor_config.patch(dict(settings))  # type: ignore[no-any-return]


def compiler_settings() -> str:
    """Return Inductor's settings, and torch's settings that select kernels, as one deterministic text."""
    settings = sorted(inductor_config.save_config_portable().items())
    cuda, mkldnn = torch.backends.cuda, torch.backends.mkldnn
    kernels = (
        # One by one: `get_float32_matmul_precision` raises if one has a value that the old setting cannot express.
        *(place.fp32_precision for place in (cuda.matmul, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)),  # type: ignore[attr-defined]
        cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
        cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
        mkldnn.enabled,
        mkldnn.deterministic,
    )
    return f"{kernels!r} {settings!r}"


def has_onednn() -> bool:
    """Whether torch was built with oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def may_choose_library() -> bool:
    """Whether we may choose the library that computes a matmul on a CPU.

    That is so if there is oneDNN, and the user asks neither for the same numbers every time nor for less precision. It
    does not matter whether Inductor tunes matmuls (`max_autotune`): its C++ template is for constants, and weights are
    inputs.
    """
    mkldnn = torch.backends.mkldnn
    if not (has_onednn() and mkldnn.enabled):
        return False
    is_fixed = (
        torch.are_deterministic_algorithms_enabled()
        or mkldnn.deterministic
        or getattr(inductor_config, "deterministic", False)
    )
    is_full = mkldnn.matmul.fp32_precision in ("none", "ieee")  # type: ignore[attr-defined]
    return is_full and not is_fixed
