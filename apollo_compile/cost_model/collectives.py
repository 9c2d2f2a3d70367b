"""Predicted duration of collectives over several ranks: rings, by latency and bandwidth.

    Link(latency, bandwidth)                    one direction between two neighbours of a ring
    all_reduce_seconds(num_bytes, ranks, link)
    send_seconds(num_bytes, link)
    bucket_bytes(num_bytes)                     size at which a step sends gradients

A ring of n ranks moves its data in n pieces. In one round every rank sends one piece to its neighbour, which takes
latency + bytes / n / bandwidth. An all-gather and a reduce-scatter take n - 1 rounds each, and an all-reduce is one
after the other. The time of additions is ignored. A ring over several nodes is as slow as its slowest link.
Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005,
https://doi.org/10.1177/1094342005051521
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Link between two devices, in one direction."""

    latency: float
    """Seconds until the first byte arrives, including the call."""
    bandwidth: float
    """Bytes per second."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise ValueError(
                f"a link has latency {self.latency} s and bandwidth {self.bandwidth} bytes/s: expected a latency of at "
                "least 0 and a bandwidth above 0"
            )


GLOO = Link(latency=100e-6, bandwidth=2e9)
"""Assumed between processes of one machine over gloo, where nothing is measured."""


_LEAST_BUCKET_BYTES = 2**20
"""A smaller bucket takes almost as long."""

_MOST_BUCKETS = 16
"""Limit of the buckets of a step: they are segments to plan, and only the last ones cannot overlap the backward."""


def bucket_bytes(num_bytes: int) -> int:
    """Return the size at which a step of `compile_step` sends a bucket, if all its gradients have `num_bytes`."""
    return max(_LEAST_BUCKET_BYTES, num_bytes // _MOST_BUCKETS)


def send_seconds(num_bytes: float, link: Link) -> float:
    """Return the time to send `num_bytes` to one other rank."""
    return link.latency + num_bytes / link.bandwidth


def reduce_scatter_seconds(num_bytes: float, ranks: int, link: Link) -> float:
    """Return the time until each of `ranks` ranks has its share of the sum of `num_bytes` from each rank.

    An all-gather of `num_bytes` takes the same time, in the same rounds backwards.
    """
    return (ranks - 1) * send_seconds(num_bytes / ranks, link)


def all_reduce_seconds(num_bytes: float, ranks: int, link: Link) -> float:
    """Return the time until each of `ranks` ranks has the sum of `num_bytes` from each rank."""
    return 2 * reduce_scatter_seconds(num_bytes, ranks, link)
