"""Whether this torch has the methods that this package overrides: all tables of signatures, checked at once."""

from __future__ import annotations

from apollo_compile.torch_bridge.aot_cache import OUTPUT_CODE
from apollo_compile.torch_bridge.cpp_wrapper import KNOWN_SIGNATURES
from apollo_compile.torch_bridge.signatures import check_signatures
from apollo_compile.torch_bridge.upstream_bugs.scatter_addresses import STORE


def check_overrides() -> None:
    """See whether all methods of torch that we override are those that the overrides were written for.

    Raises:
        UnsupportedGraphError: this torch has others.
    """
    check_signatures({**KNOWN_SIGNATURES, **OUTPUT_CODE, **STORE})
