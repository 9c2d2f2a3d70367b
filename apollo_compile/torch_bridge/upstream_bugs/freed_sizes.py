"""Sizes of views that AOTAutograd's cache reads after they were freed.

    forget_sizes()     while AOTAutograd traces a graph

An output that is a view is made again in every call, by the calls that made it. The cache saves their arguments, but
those of `_unsafe_view`, with which a product of more than two dimensions ends, are in freed memory by then. So a later
process views the result as something else, which raises, and saving them may end this one. Without the calls,
AOTAutograd makes the view by its strides.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import torch
from torch._C import _functionalization
from torch._functorch._aot_autograd import collect_metadata_analysis
from torch.torch_version import TorchVersion


def forget_sizes() -> contextlib.AbstractContextManager[Any]:
    """Let AOTAutograd remember the calls that make a view only if this release can save them."""
    if TorchVersion(torch.__version__) >= "2.14.1":
        return contextlib.nullcontext()
    own: Any = collect_metadata_analysis
    remember, freed = own.ViewMetaSequence, getattr(_functionalization, "_unsafe_view_ViewMeta", ())

    def remember_others(view: Any) -> Any:
        calls = remember(view)
        return None if any(isinstance(call, freed) for call in calls.sequence) else calls

    return patch.object(own, "ViewMetaSequence", remember_others)
