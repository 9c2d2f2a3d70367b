"""Passes over the joint graph of forward and backward, before those of Inductor.

Backwards that Dynamo traced get their names before anything else, while their nodes are as AOTAutograd made them. The
user's own passes come then. Ours avoid wrong results of torch: each is a file of `upstream_bugs/`.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from apollo_compile.torch_bridge.compile_scope import CACHE_KEY_TAG
from apollo_compile.torch_bridge.traced_backward import name_backward
from apollo_compile.torch_bridge.upstream_bugs.expanded_writes import write_to_copies
from apollo_compile.torch_bridge.upstream_bugs.late_reads import keep_reads
from apollo_compile.torch_bridge.upstream_bugs.lost_copies import keep_copies, lower_clones
from apollo_compile.torch_bridge.upstream_bugs.misplaced_resizes import settle_resizes
from apollo_compile.torch_bridge.upstream_bugs.pooling_divisor import divide_by_clipped_windows


class JointPasses(CustomGraphPass):
    """Passes over the graph of forward and backward, before those of Inductor."""

    def __init__(self, users: Any) -> None:
        self.users = users
        passes = users if isinstance(users, list | tuple) else [users] if users is not None else []
        self._users = tuple(passes)

    def __call__(self, graph: fx.Graph) -> None:
        """Run the user's own passes, and then the workarounds for defects of torch."""
        name_backward(graph)
        for custom in self._users:
            custom(graph)
        lower_clones()
        settle_resizes(graph)
        keep_reads(graph)
        keep_copies(graph)
        divide_by_clipped_windows(graph)
        write_to_copies(graph)

    def uuid(self) -> Any:
        """Return the names of the passes for cache keys; None, which disables caching, if one of them has no name."""
        names = [custom.uuid() if isinstance(custom, CustomGraphPass) else None for custom in self._users]
        return None if None in names else (CACHE_KEY_TAG, *names)
