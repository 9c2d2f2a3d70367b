"""Guards of parameters, which Dynamo skips as long as the dictionaries of their modules are the same.

    check_parameters()     before Dynamo makes the guards of a graph

Freezing a layer, thawing it, or moving it with `Module.to` changes no dictionary, so such releases go on with the graph
from before: a thawed layer is not trained.
"""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion


def check_parameters() -> None:
    """Let guards that Dynamo makes from now on look at every parameter, in releases that skip them."""
    if TorchVersion(torch.__version__) < "2.12.1":
        torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags = False
