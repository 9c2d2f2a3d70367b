"""Inductor as it competes in autotuning: with the settings under which the graphs of apollo are traced.

Views are recomputed in the backward, and no buffers are donated. Whether that slows Inductor down is asked by
`python -m benchmarks.run --variants inductor,inductor-as-rival`.
"""

from __future__ import annotations

from typing import Any

import torch._functorch.config as functorch_config

from apollo_compile.tools.bench.child import Stepper


class Rival(Stepper):
    """A stepper whose process compiles everything with these settings."""

    def prepare(self, backend: str | None, options: dict[str, Any]) -> None:
        """Compile the model."""
        functorch_config.recompute_views, functorch_config.donated_buffer = True, False
        super().prepare(backend, options)
