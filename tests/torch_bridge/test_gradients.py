"""Memory of gradients."""

from __future__ import annotations

import torch

from apollo_compile.torch_bridge.gradients import find_shared, own_gradients


def test_gradients_get_memory_of_their_own_laid_out_like_their_parameters() -> None:
    """Copy a gradient that shares memory with another one or with an input, or that has other strides."""
    given, other = torch.ones(2, 3), torch.ones(2, 3)
    parameters = [torch.zeros(2, 3)] * 4
    gradients = [other, other, given, torch.ones(3, 2).T]
    shared = find_shared(gradients, parameters, [given.untyped_storage().data_ptr()])
    assert set(shared) == {1, 2, 3}
    owned = own_gradients(gradients, parameters, shared)
    assert owned[0] is other and all(each.stride() == (3, 1) for each in owned)
    assert len({each.data_ptr() for each in (*owned, given)}) == 5
