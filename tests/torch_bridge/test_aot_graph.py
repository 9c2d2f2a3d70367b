"""What a graph after AOTAutograd writes to."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.inductor_prims
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile.torch_bridge.aot_graph import written_inputs
from apollo_compile.torch_bridge.cuda_private import find_uncapturable


def test_a_graph_that_resizes_an_input_writes_to_it_and_is_not_for_a_cuda_graph() -> None:
    """A replay would read where the memory was."""

    def free(x: Any, y: Any) -> Any:
        result = x + y
        torch.ops.inductor.resize_storage_bytes_(y, 0)
        return result

    freeing, adding = (make_fx(function)(torch.ones(4), torch.ones(4)) for function in (free, torch.add))
    assert written_inputs(freeing) == {1}
    assert find_uncapturable(freeing) == "inductor.resize_storage_bytes_.default"
    assert written_inputs(adding) == frozenset()
    assert find_uncapturable(adding) is None
