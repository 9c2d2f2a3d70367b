"""The passes that run before those of Inductor, over forward and backward together.

The user's own come first. Ours keep the numbers right where torch would not: each is a file of `upstream_bugs/`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.post_grad import noop_registry, same_meta
from torch._inductor.fx_utils import get_fake_args_kwargs
from torch._inductor.lowering import clone, register_lowering

from apollo_compile.torch_bridge.compile_scope import CACHE_KEY_TAG
from apollo_compile.torch_bridge.upstream_bugs.miscompiled import write_otherwise
from apollo_compile.torch_bridge.upstream_bugs.overwrites import keep_copies, keep_reads
from apollo_compile.torch_bridge.upstream_bugs.resizes import settle_resizes


class JointPasses(CustomGraphPass):
    """Passes over the graph of forward and backward, before those of Inductor."""

    def __init__(self, users: Any) -> None:
        self.users = users
        passes = users if isinstance(users, list | tuple) else [users] if users is not None else []
        self._users = tuple(passes)

    def __call__(self, graph: fx.Graph) -> None:
        """Run the user's own passes, and ours: keep apart what Inductor's would make one, and keep numbers right."""
        for custom in self._users:
            custom(graph)
        _lower_clones()
        settle_resizes(graph)
        keep_reads(graph, _copied_by)
        keep_copies(graph, _copied_by)
        write_otherwise(graph)

    def uuid(self) -> Any:
        """Name the passes for the keys of caches; None is that some of them have no name, so that nothing is cached."""
        names = [custom.uuid() if isinstance(custom, CustomGraphPass) else None for custom in self._users]
        return None if None in names else (CACHE_KEY_TAG, *names)


def _copied_by(node: fx.Node) -> fx.Node | None:
    """Return what Inductor takes for the same as `node`."""
    is_noop, source = noop_registry.get(node.target, (None, None))
    if callable(source):
        (takes,) = inspect.signature(source).parameters  # the node from torch 2.15 on, before that its arguments
        found = source(node if takes == "node" else node.args)
    else:
        found = None if source is None else node.args[source]
    if not (isinstance(found, fx.Node) and same_meta(node, found)):
        return None
    is_known, args, kwargs = get_fake_args_kwargs(node)
    return found if is_known and is_noop(*args, **kwargs) else None


@functools.cache
def _lower_clones() -> None:
    """Let Inductor compile `prims.clone`, which it does not know, as it does `aten.clone`."""
    register_lowering(torch.ops.prims.clone, type_promotion_kind=None)(clone)
