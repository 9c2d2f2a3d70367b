"""Check that overridden methods of torch have the signatures that the overrides were written for."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping

import torch

from apollo_compile.errors import UnsupportedGraphError

Signatures = Mapping[tuple[type, str], tuple[str, ...]]
"""By class and method, its parameters in each of the tested releases of torch."""

_logger = logging.getLogger(__name__)

ADVICE = "install a release of torch that apollo_compile was tested with (docs/versions.md lists them)"


def check_signatures(known: Signatures) -> None:
    """Compare signatures with those of the installed torch: overriding a changed method could generate wrong code.

    Raises:
        UnsupportedGraphError: a method is missing, or has other parameters than in all tested releases.
    """
    for (owner, name), parameters in known.items():
        method = getattr(owner, name, None)
        found = None if method is None else ", ".join(inspect.signature(method).parameters)
        if found not in parameters:
            has = "has no such method" if found is None else f"has {name}({found})"
            expected = " or ".join(f"{name}({each})" for each in parameters)
            raise UnsupportedGraphError(
                f"torch's {owner.__name__} changed: expected {expected}; torch {torch.__version__} {has}; {ADVICE}"
            )


def once_known(known: Signatures, otherwise: str, level: int) -> Callable[[], bool]:
    """Return a function that says whether signatures are as known; at its first call it logs what happens otherwise."""

    @functools.cache
    def is_known() -> bool:
        try:
            check_signatures(known)
        except UnsupportedGraphError as error:
            _logger.log(level, "%s: %s", otherwise, error)
            return False
        return True

    return is_known
