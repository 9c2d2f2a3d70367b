"""Assign the samples of a step to bins (a rank's micro-batches) so that every phase takes equally long in every bin.

    assign_samples(costs_ns, num_bins) -> the bin of every sample

A step has phases that each end in a collective: encoders, then the language model. So its time is the sum over phases
of the slowest bin, and balancing the sum of a sample's costs is not enough. With `load[b, p]` the time of bin `b` in
phase `p` and `mean[p]` its mean over the bins, we minimise

    sum_p mean[p] * sum_b (load[b, p] / mean[p]) ** 8

which approximates the slowest bin of each phase, weighs phases by their time, and changes in only two bins when a
sample moves.

1. Greedy: by descending cost, each sample goes where the same sum with exponent 2 grows least. This pairs samples that
   are heavy in different phases, and is longest-first if there is one phase.
2. Refine: take the bin with the largest part of the sum, and make the best of all moves of one of its samples to
   another bin and of all swaps with a sample of another bin; repeat while that helps. On 2 to 8 ranks with 8 samples
   each, refining the other bins gained less than 1 % more, and took several times as long.

This is vector scheduling, which is NP-hard; Chekuri and Khanna, "On multidimensional packing problems", SIAM J. Comput.
33(4), 2004, https://doi.org/10.1137/S0097539799356265. All steps are independent, so many are computed at once.

Guarantees: every bin has a sample. The result does not depend on the machine: costs are integers, and floating-point
numbers only go through additions, multiplications and divisions of single elements, whose rounding IEEE 754 defines.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Integers: TypeAlias = NDArray[np.int64]
Numbers: TypeAlias = NDArray[np.float64]

CHUNK = 2**19
"""Swaps that are computed at once: more need more memory, fewer take longer."""

_NEXT_BY_SIZE = 2**20
"""Larger than any number of samples in a bin; its inverse breaks ties."""

_LEAST_GAIN = 1e-4
"""Least gain of a change, as a share of the worst bin's part of the sum. Smaller changes take most of the time and gain
next to nothing."""


def assign_samples(costs_ns: Integers, num_bins: int, *, is_even: bool = False) -> Integers:
    """Return the bin of every sample of every step.

    Arguments:
        costs_ns: (steps, samples, phases) nanoseconds, not negative.
        num_bins: number of bins of a step, at most the number of samples.
        is_even: give every bin the same number of samples, or one more.

    Returns:
        (steps, samples) numbers from 0 to `num_bins` - 1.
    """
    num_steps, num_samples = costs_ns.shape[:2]
    assert 1 <= num_bins <= num_samples
    most = -(-num_samples // num_bins)
    size = max(1, CHUNK // (min(num_samples, 2 * most) * (num_samples + num_bins)))
    found = np.empty((num_steps, num_samples), dtype=np.int64)
    for begin in range(0, num_steps, size):
        chunk = costs_ns[begin : begin + size]
        means = chunk.sum(axis=1).astype(np.float64) / num_bins
        scaled = chunk / np.where(means > 0, means, 1.0)[:, None, :]
        bins = _place(scaled, means, num_bins, is_even=is_even)
        _refine(scaled, means, bins, num_bins, is_even=is_even)
        found[begin : begin + size] = bins
    return found


def _place(costs: Numbers, weights: Numbers, num_bins: int, *, is_even: bool) -> Integers:
    """Return the greedy assignment; `costs` are divided by the mean of their phase, `weights` are (steps, phases)."""
    num_steps, num_samples, num_phases = costs.shape
    every = np.arange(num_steps)
    total = _sum_phases(costs * weights[:, None, :])
    order = np.argsort(-total, axis=1, kind="stable")
    loads = np.zeros((num_steps, num_bins, num_phases))
    counts = np.zeros((num_steps, num_bins), dtype=np.int64)
    bins = np.empty((num_steps, num_samples), dtype=np.int64)
    share = weights / np.maximum(_sum_phases(weights), 1e-300)[:, None]
    fewest, num_larger = divmod(num_samples, num_bins)
    for place in range(num_samples):
        sample = order[:, place]
        cost = costs[every, sample]
        growth = _sum_phases(share[:, None, :] * cost[:, None, :] * (2 * loads + cost[:, None, :]))
        growth = growth + counts / _NEXT_BY_SIZE
        is_closed = np.zeros(counts.shape, dtype=bool)
        if is_even:
            is_last_larger = (counts > fewest).sum(axis=1) == num_larger
            is_closed = (counts > fewest) | (is_last_larger[:, None] & (counts == fewest))
        must_open = (counts == 0).sum(axis=1) >= num_samples - place
        is_closed |= must_open[:, None] & (counts > 0)
        chosen = np.argmin(np.where(is_closed, np.inf, growth), axis=1)
        loads[every, chosen] += cost
        counts[every, chosen] += 1
        bins[every, sample] = chosen
    return bins


def _refine(costs: Numbers, weights: Numbers, bins: Integers, num_bins: int, *, is_even: bool) -> None:
    """Improve `bins` in place until no change of the worst bin helps, or the limit of rounds is reached."""
    active = np.arange(len(costs))
    for _ in range(8 + 4 * num_bins):
        loads, counts = _loads_of(costs[active], bins[active], num_bins)
        worth = _sum_phases(weights[active][:, None, :] * _eighth(loads))
        worst = np.argmax(worth, axis=1)
        change = _best_changes(costs[active], weights[active], bins[active], loads, counts, worst, is_even=is_even)
        helps = change.gain > _LEAST_GAIN * worth.max(axis=1)
        bins[active[helps], change.sample[helps]] = change.other[helps]
        swaps = helps & (change.partner >= 0)
        bins[active[swaps], change.partner[swaps]] = worst[swaps]
        active = active[helps]
        if not active.size:
            return


class _Changes(NamedTuple):
    """Best change of one bin, by step: `sample` moves to bin `other`, and `partner`, if not -1, moves back."""

    gain: Numbers
    sample: Integers
    partner: Integers
    other: Integers


def _best_changes(
    costs: Numbers,
    weights: Numbers,
    bins: Integers,
    loads: Numbers,
    counts: Integers,
    worst: Integers,
    *,
    is_even: bool,
) -> _Changes:
    num_steps, num_samples, num_phases = costs.shape
    num_bins = counts.shape[1]
    every = np.arange(num_steps)
    is_own = bins == worst[:, None]
    num_own = is_own.sum(axis=1)
    own = np.argsort(~is_own, axis=1, kind="stable")[:, : num_own.max()]
    may_give = np.arange(own.shape[1]) < num_own[:, None]
    # Partners: every sample, and per bin "no sample", which makes a swap a move.
    partner_bin = np.concatenate([bins, np.broadcast_to(np.arange(num_bins), (num_steps, num_bins))], axis=1)
    may_take = partner_bin != worst[:, None]
    may_take[:, num_samples:] &= (num_own > 1)[:, None]
    if is_even:  # a bin that has one more than another may give it one
        may_take[:, num_samples:] &= counts < num_own[:, None]
    after = np.zeros((num_steps, own.shape[1], num_samples + num_bins))
    before = np.zeros((num_steps, num_samples + num_bins))
    for phase in range(num_phases):
        weight = weights[:, phase]
        given = costs[every[:, None], own, phase][:, :, None]
        taken = np.concatenate([costs[:, :, phase], np.zeros((num_steps, num_bins))], axis=1)
        here = loads[every, worst, phase]
        there = loads[every[:, None], partner_bin, phase]
        difference = taken[:, None, :] - given
        after += weight[:, None, None] * (
            _eighth(here[:, None, None] + difference) + _eighth(there[:, None, :] - difference)
        )
        before += weight[:, None] * (_eighth(here)[:, None] + _eighth(there))
    gain = before[:, None, :] - after
    gain[~(may_give[:, :, None] & may_take[:, None, :])] = -np.inf
    flat = gain.reshape(num_steps, -1)
    best = np.argmax(flat, axis=1)
    row, column = np.divmod(best, num_samples + num_bins)
    return _Changes(
        flat[every, best], own[every, row], np.where(column < num_samples, column, -1), partner_bin[every, column]
    )


def _loads_of(costs: Numbers, bins: Integers, num_bins: int) -> tuple[Numbers, Integers]:
    """Return the (steps, bins, phases) loads, added up in the order of the samples, and the (steps, bins) counts."""
    loads = np.zeros((len(costs), num_bins, costs.shape[2]))
    counts = np.zeros((len(costs), num_bins), dtype=np.int64)
    every = np.arange(len(costs))
    for sample in range(costs.shape[1]):
        loads[every, bins[:, sample]] += costs[:, sample]
        counts[every, bins[:, sample]] += 1
    return loads, counts


def add_up(costs_ns: Integers, bins: Integers, num_bins: int) -> Integers:
    """Return the (steps, bins, phases) nanoseconds of bins.

    Arguments:
        costs_ns: (steps, samples, phases) nanoseconds.
        bins: (steps, samples) bins, from `assign_samples`.
        num_bins: number of bins of a step.
    """
    loads = np.zeros((len(costs_ns), num_bins, costs_ns.shape[2]), dtype=np.int64)
    np.add.at(loads, (np.arange(len(costs_ns))[:, None], bins), costs_ns)
    return loads


def _eighth(value: Any) -> Any:
    """Return the eighth power by multiplications only, since the rounding of `power` depends on the machine."""
    value = value * value
    value = value * value
    return value * value


def _sum_phases(values: Numbers) -> Numbers:
    """Return the sum over the last axis in a fixed order."""
    total = values[..., 0]
    for phase in range(1, values.shape[-1]):
        total = total + values[..., phase]
    return total
