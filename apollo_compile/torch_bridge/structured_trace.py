"""Artifacts in torch's structured trace, which `tlparse` shows."""

from __future__ import annotations

from collections.abc import Callable

from torch._logging._internal import trace_structured


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to torch's structured trace; `text` is called only if tracing is on."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)
