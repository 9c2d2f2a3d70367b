"""A `Balance` as a page and as a trace for Perfetto.

    render_html(balance) -> str
    render_trace(balance) -> {"traceEvents": [...], ...}

Both show rounds one after the other: in a phase every rank computes, then waits for the slowest rank. On the page,
colours are phases and empty space is waiting; the scale is the same before and after. In the trace, "in turn" and
"balanced" are processes, ranks are threads, phases and waits are complete events; see Note [traces for Perfetto] in
`reports/render_trace.py`. Torch-free.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from apollo_compile.reports.colors import COLORS
from apollo_compile.units import NS_PER_US, format_ns

if TYPE_CHECKING:
    from apollo_compile.distributed.loader.assign import Integers
    from apollo_compile.distributed.loader.balance import Balance

SHOWN_ROUNDS = 8
"""Number of rounds with a timeline on the page; the trace has all rounds."""

SHOWN_RANKS = 16

_THREADS = 1_000_000
"""Thread ids per process; more than there are ranks."""


class Slice(NamedTuple):
    """Interval in which a rank computes or waits."""

    round: int
    rank: int
    phase: int
    start_ns: int
    end_ns: int
    is_wait: bool


def lay_out(loads_ns: Integers) -> Iterator[Slice]:
    """Yield the slices of all ranks, from (rounds, ranks, phases) nanoseconds of work."""
    begin = 0
    num_rounds, num_ranks, num_phases = loads_ns.shape
    for number in range(num_rounds):
        for phase in range(num_phases):
            loads = [int(load) for load in loads_ns[number, :, phase]]
            end = begin + max(loads)
            for rank in range(num_ranks):
                ready = begin + loads[rank]
                if ready > begin:
                    yield Slice(number, rank, phase, begin, ready, False)
                if end > ready:
                    yield Slice(number, rank, phase, ready, end, True)
            begin = end


# ------------------------------------------------------------------------------------------------------------ page


def render_html(balance: Balance) -> str:
    """Return the page."""
    kinds = (("in turn", balance.before_ns), ("balanced", balance.after_ns))
    shown = {name: loads[:SHOWN_ROUNDS, :SHOWN_RANKS] for name, loads in kinds}
    ends = {name: int(loads[:SHOWN_ROUNDS].max(axis=1).sum()) for name, loads in kinds}
    return _template().render(
        balance=balance,
        css=resources.files("apollo_compile.reports").joinpath("page.css").read_text(encoding="utf-8"),
        colors=COLORS,
        kinds=[name for name, _ in kinds],
        ratios={name: _ratios(loads) for name, loads in kinds},
        slices={name: [each for each in lay_out(loads) if not each.is_wait] for name, loads in shown.items()},
        scale=max(1, *ends.values()),
        ends=ends,
        rounds=min(SHOWN_ROUNDS, len(balance.after_ns)),
        ranks=min(SHOWN_RANKS, balance.after_ns.shape[1]),
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(ns=format_ns)
    text = resources.files("apollo_compile.distributed.loader").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(text)


def _ratios(loads_ns: Integers) -> list[float]:
    """Return, by round, the time of the slowest ranks over the mean."""
    slowest, total = loads_ns.max(axis=1).sum(axis=1), loads_ns.sum(axis=(1, 2))
    return [
        float(worst * loads_ns.shape[1] / every) if every else 1.0 for worst, every in zip(slowest, total, strict=True)
    ]


# ----------------------------------------------------------------------------------------------------------- trace


def render_trace(balance: Balance) -> dict[str, Any]:
    """Return the trace as plain data."""
    events: list[dict[str, Any]] = []
    for process, (name, loads) in enumerate((("in turn", balance.before_ns), ("balanced", balance.after_ns)), 1):
        events.append(_metadata("process_name", process, 0, {"name": name}))
        events.append(_metadata("process_sort_index", process, 0, {"sort_index": process}))
        for rank in range(loads.shape[1]):
            events.append(_metadata("thread_name", process, rank, {"name": f"rank {rank}"}))
            events.append(_metadata("thread_sort_index", process, rank, {"sort_index": rank}))
        starts: dict[int, int] = {}
        for each in lay_out(loads):
            starts.setdefault(each.round, each.start_ns)
            events.append(
                {
                    "name": "wait" if each.is_wait else balance.phases[each.phase],
                    "cat": "wait" if each.is_wait else "phase",
                    "ph": "X",
                    "pid": process,
                    "tid": _thread(process, each.rank),
                    "ts": each.start_ns / NS_PER_US,
                    "dur": (each.end_ns - each.start_ns) / NS_PER_US,
                    "args": {
                        "round": each.round,
                        "phase": balance.phases[each.phase],
                        "ns": each.end_ns - each.start_ns,
                    },
                }
            )
        events += [
            {
                "name": "slowest rank",
                "ph": "C",
                "pid": process,
                "tid": _thread(process, 0),
                "ts": starts[number] / NS_PER_US,
                "args": {"over mean": round(ratio, 4)},
            }
            for number, ratio in enumerate(_ratios(loads))
            if number in starts
        ]
    return {"traceEvents": events, "otherData": {"producer": "apollo_compile"}}


def _metadata(name: str, process: int, rank: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": _thread(process, rank), "args": args}


def _thread(process: int, rank: int) -> int:
    return process * _THREADS + rank
