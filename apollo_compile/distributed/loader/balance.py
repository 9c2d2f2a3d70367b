"""The loads of ranks over steps, before and after balancing.

    Balance(phases, before_ns, after_ns)
    print(balance);  balance.save_html(path);  balance.save_trace(path)

Torch-free.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from apollo_compile.distributed.loader.assign import Integers
from apollo_compile.distributed.loader.picture import render_html, render_trace
from apollo_compile.units import format_ns


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
        return render_html(self)

    def save_html(self, path: str | Path) -> None:
        """Write `to_html` to a file."""
        Path(path).write_text(self.to_html(), encoding="utf-8")

    def to_trace(self) -> str:
        """Return the rounds before and after in the trace-event format, which Perfetto and chrome://tracing open."""
        return json.dumps(render_trace(self))

    def save_trace(self, path: str | Path) -> None:
        """Write `to_trace` to a file."""
        Path(path).write_text(self.to_trace(), encoding="utf-8")


def step_ns(loads_ns: Integers) -> Integers:
    """Return the (rounds,) nanoseconds of rounds: the sum over phases of the slowest rank."""
    return np.asarray(loads_ns.max(axis=1).sum(axis=1))
