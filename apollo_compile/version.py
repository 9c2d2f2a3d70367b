"""The version of this package, which files and ranks compare: pyproject.toml has the same."""

from __future__ import annotations

__version__ = "0.1.0"
