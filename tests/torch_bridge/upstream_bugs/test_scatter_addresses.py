"""Transposed values that are added at an index; where they are with lanes is in `end_to_end/`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor.codegen import cpp
from torch._inductor.cpu_vec_isa import pick_vec_isa

from apollo_compile.torch_bridge.upstream_bugs.scatter_addresses import fixed_scatters
from tests.torch_bridge.upstream_bugs.defects import assert_as_listed
from tests.torch_settings import threads


def test_torch_adds_transposed_values_elsewhere() -> None:
    """The first matrix of the table gets the transposed one, unless one thread adds without atomic operations."""
    if not pick_vec_isa():
        pytest.skip("Inductor makes no code with tiles for a CPU without vectors")

    def add(x: Tensor, where: Tensor) -> Tensor:
        return torch.zeros(4, 16, 16).index_put((where,), x.t().unsqueeze(0) * 2, accumulate=True)

    x, where = torch.arange(256.0).view(16, 16), torch.tensor([0])
    with threads(2):
        added = torch.compile(add, backend="inductor")(x, where)
    assert_as_listed("scatter_addresses.py", is_there=not torch.equal(added, add(x, where)))


def test_the_code_generator_is_torchs_own_again_afterwards() -> None:
    """Also where what was compiled failed."""
    own = cpp.CppTile2DKernel.store
    with pytest.raises(ValueError, match="failed"), fixed_scatters():
        raise ValueError("failed")
    assert cpp.CppTile2DKernel.store is own
