"""Storages of tensors: whether tensors are where they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from apollo_compile.torch_bridge import storages
from apollo_compile.torch_bridge.storages import Places


def _as_torch_with_cuda(tensors: list[torch.Tensor], addresses: list[int | None], positions: list[int]) -> bool:
    """Compare as torch's own function does, which builds without CUDA lack: everything is found by position."""
    return all(tensors[position].data_ptr() == addresses[position] for position in positions)


@pytest.mark.parametrize("native", [None, _as_torch_with_cuda, storages._are_addresses_equal])
def test_tensors_are_compared_at_their_positions(
    native: Callable[..., bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some positions are left out, in the middle and at the end; the last is where another was before."""
    monkeypatch.setattr(storages, "_are_addresses_equal", native)
    tensors = [torch.ones(2) for _ in range(5)]
    places = Places({index: tensors[index].data_ptr() for index in (1, 3)})
    assert places.hold(tensors)
    assert places.hold([tensors[4], tensors[1], tensors[0], tensors[3], tensors[2]])
    assert not places.hold([tensors[0], tensors[3], tensors[2], tensors[1], tensors[4]])
    assert Places({}).hold(tensors)
