"""The batch sampler of data sets with known sizes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from apollo_compile import BalancedBatchSampler
from apollo_compile.errors import SampleError

PATCHES = (256, 576, 1024, 2304)
"""Patches of images."""


def invent_costs(number: int, share: float) -> NDArray[np.float64]:
    """Return seconds in encoder and language model of samples of which a `share` has an image."""
    random = np.random.default_rng(0)
    text = np.minimum(random.lognormal(6.0, 0.8, number), 8192).astype(np.int64) + 1
    patches = np.where(random.random(number) < share, random.choice(PATCHES, number), 0)
    tokens = text + patches // 4
    return np.stack([patches * 3e-6 + patches**2 * 1e-9, tokens * 8e-6 + tokens**2 * 6e-10], axis=1)


COSTS = invent_costs(250, 0.5)


def samplers(ranks: int, costs: Any = COSTS, **options: Any) -> list[BalancedBatchSampler]:
    """Return the samplers of all ranks, with four samples a micro-batch."""
    options = {"batch_size": 4, **options}
    return [BalancedBatchSampler(costs, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_samples_of_a_step_are_those_of_distributed_sampler(epoch: int, drop_last: bool) -> None:
    """Of all ranks together, each once; a last step that is not full has what is left."""
    ranks, whole = 2, TensorDataset(torch.empty(len(COSTS)))
    expected = []
    for rank in range(ranks):
        other = DistributedSampler(whole, ranks, rank, seed=5, drop_last=drop_last)
        other.set_epoch(epoch)
        expected.append(list(BatchSampler(other, 4, drop_last)))
    own = samplers(ranks, seed=5, drop_last=drop_last)
    for sampler in own:
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler) == len(expected[0])
    for step, others in zip(zip(*own, strict=True), zip(*expected, strict=True), strict=True):
        assert sorted(itertools.chain(*step)) == sorted(itertools.chain(*others))
        assert min(map(len, step)) >= 1


def test_every_epoch_has_another_order_unless_shuffle_is_off() -> None:
    """The seed matters too; equal arguments give equal batches."""
    (first,) = samplers(1)
    batches = list(first)
    assert batches == list(first) == list(samplers(1)[0])
    first.set_epoch(1)
    assert batches != list(first)
    assert batches != list(samplers(1, seed=1)[0])
    fixed = samplers(1, shuffle=False)[0]
    before = list(fixed)
    fixed.set_epoch(1)
    assert before == list(fixed) and sorted(before[0]) == [0, 1, 2, 3]


@pytest.mark.parametrize(("ranks", "most"), [(2, 1.05), (4, 1.12)])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_ranks_take_about_the_same(ranks: int, most: float, share: float) -> None:
    """By predicted costs, whatever the share of images; samples dealt in turn are far above."""
    sampler = BalancedBatchSampler(invent_costs(8_000, share), batch_size=8, num_replicas=ranks, rank=0, drop_last=True)
    balance = sampler.balance(steps=sampler.num_steps, phases=("encoders", "language model"))
    assert balance.ratio(balance.after_ns) <= most < 1.15 < balance.ratio(balance.before_ns)


def test_the_balance_is_that_of_the_batches() -> None:
    """Added up one by one, over all ranks and micro-batches, with groups."""
    own = samplers(4, micro_batches=2, group_size=2)
    balance = own[0].balance(steps=3)
    batches = [list(sampler)[:6] for sampler in own]
    costs = np.rint(COSTS * 1e9)
    for number, rank in np.ndindex(6, 4):
        np.testing.assert_array_equal(balance.after_ns[number, rank], costs[batches[rank][number]].sum(axis=0))
    assert balance.phases == ("phase 0", "phase 1")
    np.testing.assert_array_equal(balance.before_ns.sum(axis=(0, 1)), balance.after_ns.sum(axis=(0, 1)))


def test_samples_stay_in_their_group() -> None:
    """A group has, in every step, the samples that its ranks have in turn."""
    whole = TensorDataset(torch.empty(len(COSTS)))
    own = samplers(4, group_size=2, drop_last=True)
    dealt = [list(BatchSampler(DistributedSampler(whole, 4, rank, seed=0), 4, True)) for rank in range(4)]
    for step, first in enumerate(zip(own[0], own[1], strict=True)):
        assert sorted(itertools.chain(*first)) == sorted(dealt[0][step] + dealt[1][step])


def test_counts_are_even_if_asked_for() -> None:
    """Then the mean of the ranks' means is the mean, as far as samples count."""
    assert {len(batch) for sampler in samplers(2, even_counts=True, drop_last=True) for batch in sampler} == {4}
    assert len({len(batch) for sampler in samplers(2, drop_last=True) for batch in sampler}) > 1


@pytest.mark.parametrize("given", [0, 1, 7, 30, 62])
def test_a_resumed_epoch_goes_on_with_the_same_batches(given: int) -> None:
    """In the middle of a step too, and the epoch after it begins at its beginning."""
    before = BalancedBatchSampler(COSTS, batch_size=4, micro_batches=2, num_replicas=2, rank=1)
    before.set_epoch(2)
    every = list(before)
    iterator = iter(before)
    assert list(itertools.islice(iterator, given)) == every[:given]
    state = before.state_dict() if given else {**before.state_dict(), "position": 0}
    after = BalancedBatchSampler(COSTS, batch_size=4, micro_batches=2, num_replicas=2, rank=1)
    after.load_state_dict(state)
    assert list(after) == every[given:]
    assert list(after) == every


def test_a_state_of_the_end_of_an_epoch_leaves_out_nothing_of_the_next_one() -> None:
    """A checkpoint after each epoch is one case, before or after `set_epoch` of the next."""
    before, after, later = (samplers(1)[0] for _ in range(3))
    assert list(before)
    after.load_state_dict(before.state_dict())
    for sampler in (before, after):
        sampler.set_epoch(1)
    later.load_state_dict(before.state_dict())
    assert list(later) == list(after) == list(before) != []


def test_a_state_of_other_costs_or_settings_is_refused() -> None:
    """Other batches would follow; the digest is the same on all ranks."""
    first, second = samplers(2)
    assert first.digest == second.digest
    for other in (*samplers(2, COSTS * 2), *samplers(2, seed=1), *samplers(2, micro_batches=2)):
        with pytest.raises(
            ValueError, match=r"the state is of a sampler \w+, and this is \w+: expected the same costs"
        ):
            other.load_state_dict(first.state_dict())


def test_fewer_samples_than_micro_batches_are_used_again() -> None:
    """So that every rank takes the same number of steps."""
    own = samplers(4, COSTS[:2])
    batches = [list(sampler) for sampler in own]
    assert [len(each) for each in batches] == [1, 1, 1, 1]
    assert sorted(itertools.chain(*(each[0] for each in batches))) == [0, 0, 1, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_takes_the_batches(workers: int) -> None:
    """In order."""
    sampler = samplers(2, COSTS[:40])[1]
    loader = DataLoader(TensorDataset(torch.arange(40)), batch_sampler=sampler, num_workers=workers)
    assert [batch.tolist() for (batch,) in loader] == list(sampler)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
def test_a_stateful_data_loader_resumes(workers: int) -> None:
    """Where training was, though its workers are ahead."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        sampler = samplers(2)[0]
        return stateful.StatefulDataLoader(TensorDataset(torch.arange(250)), batch_sampler=sampler, num_workers=workers)

    every = [batch.tolist() for (batch,) in loader()]
    first = loader()
    iterator = iter(first)
    begun = [next(iterator)[0].tolist() for _ in range(5)]
    second = loader()
    second.load_state_dict(first.state_dict())
    assert begun + [batch.tolist() for (batch,) in second] == every
    assert [batch.tolist() for (batch,) in second] == every


def test_what_cannot_be_shared_out_is_refused() -> None:
    """Each with the number that is wrong."""
    with pytest.raises(SampleError, match="sample 1 costs nan seconds in phase 0"):
        BalancedBatchSampler([1.0, float("nan")], batch_size=1, num_replicas=1, rank=0)
    with pytest.raises(ValueError, match="rank is 2 of 2"):
        BalancedBatchSampler(COSTS, batch_size=1, num_replicas=2, rank=2)
    with pytest.raises(ValueError, match="num_replicas and rank are unknown"):
        BalancedBatchSampler(COSTS, batch_size=1)
    with pytest.raises(ValueError, match="there are 250 samples, but a step needs 1024"):
        BalancedBatchSampler(COSTS, batch_size=512, num_replicas=2, rank=0, drop_last=True)
