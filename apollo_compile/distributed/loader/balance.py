"""The loads of ranks over steps, before and after balancing, as text and as a page.

    Balance(phases, before_ns, after_ns)
    print(balance);  balance.save_html(path)

The page shows rounds one after the other: in a phase every rank computes, then waits for the slowest rank. Colours are
phases, and empty space is waiting; the scale is the same before and after. Torch-free.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np

from apollo_compile.distributed.loader.assign import Integers
from apollo_compile.reports.colors import COLORS
from apollo_compile.units import format_ns

SHOWN_ROUNDS, SHOWN_RANKS = 8, 16
"""Numbers of rounds and ranks with a timeline on the page."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Balance:
    """Predicted time of every rank in every phase, before and after balancing.

    A round is a micro-batch of a step; its phases are separated by collectives of all ranks.
    """

    phases: tuple[str, ...]
    before_ns: Integers
    """(rounds, ranks, phases) nanoseconds, with samples dealt in turn, as by `DistributedSampler`."""
    after_ns: Integers
    """(rounds, ranks, phases) nanoseconds, with balanced samples."""

    def __str__(self) -> str:
        before, after = self.ratio(self.before_ns), self.ratio(self.after_ns)
        num_rounds, num_ranks, _ = self.after_ns.shape
        faster = step_ns(self.before_ns).sum() / max(1, step_ns(self.after_ns).sum())
        return (
            f"{num_rounds} rounds on {num_ranks} ranks: slowest rank over mean {before:.2f} in turn, {after:.2f} "
            f"balanced; {format_ns(step_ns(self.before_ns).mean())} and {format_ns(step_ns(self.after_ns).mean())} a "
            f"round, {faster:.2f}x as fast"
        )

    @staticmethod
    def ratio(loads_ns: Integers) -> float:
        """Return the time of all rounds over the time if every phase took equally long on every rank."""
        mean = loads_ns.sum() / loads_ns.shape[1]
        return float(step_ns(loads_ns).sum() / mean) if mean else 1.0

    def to_html(self) -> str:
        """Return a self-contained HTML page: it needs no network and no other file."""
        kinds = {"in turn": self.before_ns, "balanced": self.after_ns}
        ends = {name: int(step_ns(loads[:SHOWN_ROUNDS]).sum()) for name, loads in kinds.items()}
        return _template().render(
            balance=self,
            css=resources.files("apollo_compile.reports").joinpath("page.css").read_text(encoding="utf-8"),
            colors=COLORS,
            kinds=list(kinds),
            ratios={name: [self.ratio(each[None]) for each in loads] for name, loads in kinds.items()},
            slices={name: list(_lay_out(loads[:SHOWN_ROUNDS, :SHOWN_RANKS])) for name, loads in kinds.items()},
            scale=max(1, *ends.values()),
            ends=ends,
            rounds=min(SHOWN_ROUNDS, len(self.after_ns)),
            ranks=min(SHOWN_RANKS, self.after_ns.shape[1]),
        )

    def save_html(self, path: str | Path) -> None:
        """Write `to_html` to a file."""
        Path(path).write_text(self.to_html(), encoding="utf-8")


def step_ns(loads_ns: Integers) -> Integers:
    """Return the (rounds,) nanoseconds of rounds: the sum over phases of the slowest rank."""
    return np.asarray(loads_ns.max(axis=1).sum(axis=1))


class _Slice(NamedTuple):
    """Interval in which a rank computes."""

    round: int
    rank: int
    phase: int
    start_ns: int
    end_ns: int


def _lay_out(loads_ns: Integers) -> Iterator[_Slice]:
    """Yield the slices of all ranks, from (rounds, ranks, phases) nanoseconds of work."""
    begin = 0
    for number, by_rank in enumerate(loads_ns):
        for phase, loads in enumerate(by_rank.T.tolist()):
            for rank, load in enumerate(loads):
                if load:
                    yield _Slice(number, rank, phase, begin, begin + load)
            begin += max(loads)


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(ns=format_ns)
    text = resources.files("apollo_compile.distributed.loader").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(text)
