"""Functions that fail on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises this error, whatever it is called with."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail
