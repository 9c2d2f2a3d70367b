"""What a check of a GPU returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from apollo_compile.device.gpu.run.gpu import TorchGpu


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a check saw."""

    is_met: bool
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)


Check = Callable[[TorchGpu], Outcome]
"""Raises what it cannot do."""
