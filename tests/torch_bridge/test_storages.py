"""Storages of tensors: whether tensors are where they were."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from apollo_compile.torch_bridge import storages
from apollo_compile.torch_bridge.storages import Places, are_alive, are_gone, storages_of


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


def test_an_identity_is_not_copied() -> None:
    """As where something that holds it is copied: a storage that is released twice ends the process."""
    tensors = [torch.zeros(2), torch.zeros(3)]
    found = storages_of(tensors)
    assert {id(each) for each in copy.deepcopy(found)} == {id(each) for each in found}
    assert all(copy.copy(each) is each for each in found)
    with pytest.raises(TypeError, match="cannot pickle the identity of a storage"):
        pickle.dumps(found)
    del tensors
    assert are_gone(found)


def test_some_storages_may_live() -> None:
    """Then they are neither all alive nor all gone."""
    tensors = [torch.zeros(2), torch.zeros(3)]
    found = storages_of(tensors)
    assert are_alive(found) and not are_gone(found)
    del tensors[0]
    assert not are_alive(found) and not are_gone(found)
