"""Settings of Inductor and torch: what the user set, and what follows from it.

    inductor_settings(mode, options)    those of a mode and options, as torch.compile takes them
    current_settings()                  those in force now
    with_settings(settings)             let these be in force
    compiler_settings()                 all that shape what Inductor compiles, as a text
    depends_on_units()                  whether Inductor may make other code for another number of SMs
    may_choose_library()                whether it is left to us who computes matrix products

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
    """Return the settings of Inductor that `torch.compile(mode=mode, options=options)` stands for.

    Raises:
        ConfigError: there is no such mode or setting, or a value has the wrong type.
    """
    try:
        settings: dict[str, Any] = torch._TorchCompileInductorWrapper(mode, dict(options), None).config  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigError(f"Inductor does not take the mode or an option 'inductor.<setting>': {error}") from error
    return settings


def current_settings() -> Mapping[str, Any]:
    """Return Inductor's settings as they are now, or were before `compile_with_inductor` added to the user's passes."""
    entries: Mapping[str, Any] = inductor_config._config  # type: ignore[attr-defined]
    # To read one that is deprecated is a warning, and those that are no other name of one have no effect any more.
    names = (n for n, e in entries.items() if e.alias is None and not getattr(e, "deprecated", False))
    settings = {name: getattr(inductor_config, name) for name in names}
    passes = settings["joint_custom_pre_pass"]
    return {**settings, "joint_custom_pre_pass": passes.users if isinstance(passes, JointPasses) else passes}


def with_settings(settings: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Let these settings of Inductor be in force."""
    return inductor_config.patch(dict(settings))  # type: ignore[no-any-return]


def compiler_settings() -> str:
    """Return Inductor's settings and torch's that choose kernels, as one text that is the same for the same ones."""
    settings = sorted(inductor_config.save_config_portable().items())
    cuda, mkldnn = torch.backends.cuda, torch.backends.mkldnn
    kernels = (
        # Each by itself: `get_float32_matmul_precision` raises where one was set that the old setting has no word for.
        *(place.fp32_precision for place in (cuda.matmul, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)),  # type: ignore[attr-defined]
        cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
        cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
        mkldnn.enabled,
        mkldnn.deterministic,
    )
    return f"{kernels!r} {settings!r}"


def depends_on_units() -> bool:
    """Whether Inductor may make other code for another number of SMs, as the user set it up.

    With max-autotune it does: persistent grids are as large as the device, and the fastest of many kernels is another
    one on other SMs. Without it, no number of SMs is in its code but that of reductions, which are right on any.
    """
    return bool(inductor_config.max_autotune or inductor_config.max_autotune_gemm)


def may_choose_library() -> bool:
    """Whether it is left to us who computes a matrix product on a CPU.

    There is oneDNN, and nobody wants the same numbers every time, or numbers of less precision. That Inductor is told
    to tune matrix products (`max_autotune`) does not matter: its C++ template is for constants, and weights are inputs.
    """
    mkldnn = torch.backends.mkldnn
    if not (mkldnn.is_available() and mkldnn.enabled):  # type: ignore[no-untyped-call]
        return False
    is_fixed = (
        torch.are_deterministic_algorithms_enabled()
        or mkldnn.deterministic
        or getattr(inductor_config, "deterministic", False)
    )
    is_full = mkldnn.matmul.fp32_precision in ("none", "ieee")  # type: ignore[attr-defined]
    return is_full and not is_fixed
