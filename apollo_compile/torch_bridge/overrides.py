"""Check of all methods of torch that this package overrides, from the tables of their signatures."""

from __future__ import annotations

from apollo_compile.torch_bridge.aot_cache import OUTPUT_CODE
from apollo_compile.torch_bridge.cpp_wrapper import KNOWN_SIGNATURES
from apollo_compile.torch_bridge.signatures import check_signatures
from apollo_compile.torch_bridge.upstream_bugs.scatter_addresses import STORE
from apollo_compile.torch_bridge.vector_code import VECTORS


def check_overrides() -> None:
    """Check that all overridden methods of torch have the signatures that the overrides were written for.

    Raises:
        UnsupportedGraphError: a method is missing, or has another signature.
    """
    check_signatures({**KNOWN_SIGNATURES, **OUTPUT_CODE, **STORE, **VECTORS})
