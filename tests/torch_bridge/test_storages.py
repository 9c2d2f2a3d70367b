"""Storages of tensors: their identities, and whether tensors share them."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch

from apollo_compile.torch_bridge.storages import WrittenMemory, storages_of


def test_an_identity_is_not_copied() -> None:
    """As where something that holds it is copied: a storage that is released twice ends the process."""
    tensors = [torch.zeros(2), torch.zeros(3)]
    found = storages_of(tensors)
    assert {id(each) for each in copy.deepcopy(found)} == {id(each) for each in found}
    assert all(copy.copy(each) is each for each in found)
    with pytest.raises(TypeError, match="cannot pickle the identity of a storage"):
        pickle.dumps(found)
    del tensors
    assert all(each.expired() for each in found)


def test_memory_that_is_written_to_is_looked_at_again_where_it_moves() -> None:
    """And other tensors in every call."""
    memory, left, right = WrittenMemory([0, 2]), torch.zeros(4), torch.zeros(4)
    between = torch.zeros(4)
    assert not memory.is_shared([left, between, right])
    assert not memory.is_shared([left, between, right], [between[2:], torch.zeros(3)])
    assert memory.is_shared([left, between, right], [torch.zeros(3), right[3:]])
    between.data = left.data
    assert memory.is_shared([left, between, right])
    between.data = torch.zeros(4)
    assert not memory.is_shared([left, between, right], [right[4:]])


@pytest.mark.parametrize("seed", range(30))
def test_shared_memory_is_that_of_the_bytes_of_dense_tensors(seed: int) -> None:
    """Against sets of bytes; a sparse tensor shares none."""
    rng = random.Random(seed)
    flat = torch.zeros(24)
    spans = [sorted(rng.choices(range(25), k=2)) for _ in range(4)]
    tensors = [flat[first:last] for first, last in spans]
    written = set(rng.sample(range(3), k=rng.randint(1, 3)))
    elements = [set(range(first, last)) for first, last in spans]
    own = [elements[i] & elements[j] for i in range(3) for j in range(3) if i != j and (i in written or j in written)]
    others = [elements[3] & elements[i] for i in written]
    others_too = [*tensors[3:], torch.zeros(2, 2).to_sparse()]
    assert WrittenMemory(written).is_shared(tensors[:3], others_too) == any([*own, *others])
