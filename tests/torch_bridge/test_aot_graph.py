"""What a graph after AOTAutograd writes to, and which casts of gradients it leaves to their readers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.inductor_prims
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile.torch_bridge import aot_graph
from apollo_compile.torch_bridge.aot_graph import return_uncast_gradients, written_inputs
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


def test_gradients_are_returned_before_a_last_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that nobody else reads, that lie in one piece, that are large, and that get wider."""
    monkeypatch.setattr(aot_graph, "FEWEST_UNCAST", 16)

    def backward(x: torch.Tensor, small: torch.Tensor) -> list[torch.Tensor | None]:
        twice = x.double()
        return [x.float(), None, twice, x.t().float(), small.float(), x.half(), twice + 1, (x + 1).int()]

    given = torch.ones(4, 6, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16)
    graph = make_fx(backward, decomposition_table=select_decomp_table())(*given)
    return_uncast_gradients(graph)
    (one, _, *others), expected = graph(*given), backward(*given)
    assert one.dtype == torch.bfloat16
    assert [each.dtype for each in others] == [each.dtype for each in expected[2:] if each is not None]
