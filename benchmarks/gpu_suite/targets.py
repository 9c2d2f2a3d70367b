"""What is wanted of the figures, and whether it was met.

    judge(workloads, ...) -> one target after the other: met, missed or not measured

Speed-ups are over the best of Inductor's modes in the same run, by the medians of loops without waits; intervals are of
95 % by bootstrap over the rounds that both have. A target over several figures is judged by the worst of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apollo_compile.tools.bench.numbers import summarize
from benchmarks.gpu_suite.race import Result
from benchmarks.gpu_suite.variants import (
    APOLLO,
    APOLLO_STEP,
    BASELINES,
    BY_HAND,
    EAGER,
    INDUCTOR,
    REDUCE_OVERHEAD,
    TRACED,
    TRACED_GRAPHED,
)
from benchmarks.workloads import gpu

WHOLE_STEP_GAIN = 1.31
MEAN_GAIN = 1.15
LEAST_GAIN = 0.98
"""Of controls, and of whole steps over whole steps of others."""
MOST_MEMORY = 1.05
MOST_HOST_TIME = 1.5
CLOSE = 1.05
"""Of a step beside one captured by hand, from where on nothing is waited for."""
MOST_WAIT_S, MOST_WAIT_STEPS = 20.0, 10
"""Until a step is close to one captured by hand, from the end of the first step on."""
TOLERANCES = {"bf16": 3e-2, "fp32": 1e-3}
"""Largest difference of a loss from the reference's in the first steps, over the largest loss there."""

WHOLE_STEP_WORKLOADS: Mapping[str, int] = {"clip_b32": 32, "imagebind": 8}
"""Batch size by workload."""

Workloads = Mapping[str, Mapping[str, Result]]
"""Results by variant, by the title of the workload, which begins with its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """One figure over another, with its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}x ({self.low:.2f} .. {self.high:.2f})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What is wanted, and what was found."""

    name: str
    wanted: str
    found: str
    """Empty if it was not measured."""
    state: str
    """`met`, `missed` or `not measured`; `dry run` where no figure is a GPU's."""


def title_of(name: str, batch: int, dtype: str) -> str:
    """Return the title of a workload."""
    return f"{name}, batch {batch}, {dtype}"


def is_branchy(title: str) -> bool:
    """Return whether a workload has modules that can run side by side; else it is a control."""
    return gpu.is_branchy(title.split(",")[0])


def step_ns(result: Result | None) -> float | None:
    """Return the median step in loops; None if it was not measured."""
    return statistics.median(result.loops_ns) if result is not None and result.loops_ns else None


def best_of(results: Mapping[str, Result], names: Sequence[str]) -> str | None:
    """Return the fastest of these variants; None if none was measured."""
    measured = {name: ns for name in names if (ns := step_ns(results.get(name))) is not None}
    return min(measured, key=lambda name: measured[name]) if measured else None


def speed_up(results: Mapping[str, Result], name: str, over: Sequence[str]) -> Ratio | None:
    """Return how many times as fast a variant is as the best of others; None if either was not measured."""
    rival = best_of(results, over)
    if rival is None or step_ns(results.get(name)) is None:
        return None
    pairs = list(zip(results[name].loops_ns, results[rival].loops_ns, strict=False))
    own, theirs = ([[pair[side]] for pair in pairs] for side in (0, 1))
    found = summarize(own, theirs)
    return Ratio(value=found.speedup, low=found.speedup_low, high=found.speedup_high)


def wait_of(results: Mapping[str, Result], name: str) -> tuple[int, float] | None:
    """Return the steps and seconds after the first step until one was close to the step captured by hand.

    None if either was not measured; infinite if none was close.
    """
    by_hand = step_ns(results.get(BY_HAND))
    trace = results[name].warm_up.get("trace") if name in results else None
    if by_hand is None or not trace:
        return None
    limit_ns = CLOSE * by_hand
    close = ((number, end_ns / 1e9) for number, (end_ns, ns) in enumerate(trace, 1) if ns <= limit_ns)
    return next(close, (len(trace), float("inf")))


def memory_ratio(results: Mapping[str, Result], name: str) -> float | None:
    """Return the memory of a warm step over that of reduce-overhead; None if either was not measured."""
    own, theirs = (
        results[each].memory.get("warm_bytes") if each in results else None for each in (name, REDUCE_OVERHEAD)
    )
    return own / theirs if own and theirs else None


def loss_difference(results: Mapping[str, Result], name: str) -> float | None:
    """Return the largest difference from the losses of eager, or of Inductor where eager has none, over the largest."""
    reference = next(
        (results[each].losses for each in (EAGER, INDUCTOR) if each in results and results[each].losses), []
    )
    own = results[name].losses if name in results else []
    if not reference or not own:
        return None
    differences = [abs(one - other) for one, other in zip(own, reference, strict=True)]
    worst = max(difference if difference == difference else float("inf") for difference in differences)
    return worst / max(*map(abs, reference), 1e-6)


def judge(workloads: Workloads, *, dtype: str, is_dry: bool) -> list[Target]:
    """Return the targets, in their order."""
    found = [
        *_gains(workloads, dtype),
        *_rivals(workloads),
        *_waits(workloads),
        *_costs(workloads),
        _losses(workloads, dtype),
    ]
    if not is_dry:
        return found
    return [Target(name=each.name, wanted=each.wanted, found=each.found, state="dry run") for each in found]


def _gains(workloads: Workloads, dtype: str) -> list[Target]:
    targets = []
    for name, batch in WHOLE_STEP_WORKLOADS.items():
        title = title_of(name, batch, dtype)
        gain = speed_up(workloads.get(title, {}), APOLLO_STEP, BASELINES)
        targets.append(_least(f"whole step, {title}", WHOLE_STEP_GAIN, {} if gain is None else {title: gain}))
    plain = {title: speed_up(results, APOLLO, BASELINES) for title, results in workloads.items()}
    branchy = [gain.value for title, gain in plain.items() if gain is not None and is_branchy(title)]
    mean = statistics.geometric_mean(branchy) if branchy else None
    targets.append(
        Target(
            name="plain backend, geometric mean over branchy models",
            wanted=f">= {MEAN_GAIN:.2f}x",
            found="" if mean is None else f"{mean:.2f}x over {len(branchy)}",
            state=_state(None if mean is None else mean >= MEAN_GAIN),
        )
    )
    controls = {
        f"{title}, {name}": gain
        for title, results in workloads.items()
        if not is_branchy(title)
        for name in (APOLLO, APOLLO_STEP)
        if (gain := speed_up(results, name, BASELINES)) is not None
    }
    targets.append(_least("controls", LEAST_GAIN, controls))
    return targets


def _rivals(workloads: Workloads) -> list[Target]:
    """Return the targets of whole steps over whole steps of others."""
    targets = []
    for name, rivals in (("captured by hand", (BY_HAND,)), ("Inductor's traced whole step", (TRACED, TRACED_GRAPHED))):
        gains = {title: speed_up(results, APOLLO_STEP, rivals) for title, results in workloads.items()}
        targets.append(_least(f"whole step over {name}", LEAST_GAIN, {t: g for t, g in gains.items() if g is not None}))
    return targets


def _waits(workloads: Workloads) -> list[Target]:
    """Return the target of the time until a user has the gain."""
    found = {
        f"{title}, {name}": wait
        for title, results in workloads.items()
        for name in (APOLLO, APOLLO_STEP)
        if (wait := wait_of(results, name)) is not None
    }
    worst = max(found, key=lambda each: found[each][1]) if found else None
    steps, seconds = found[worst] if worst is not None else (0, 0.0)
    return [
        Target(
            name=f"time until a step is within {CLOSE - 1:.0%} of one captured by hand",
            wanted=f"<= {MOST_WAIT_S:.0f} s and {MOST_WAIT_STEPS} steps",
            found="" if worst is None else _shown(f"{seconds:.1f} s, {steps} steps", worst, len(found)),
            state=_state(None if worst is None else seconds <= MOST_WAIT_S and steps <= MOST_WAIT_STEPS),
        )
    ]


def _costs(workloads: Workloads) -> list[Target]:
    """Return the targets of memory and of the host's time."""
    memory: dict[str, float] = {}
    host: dict[str, float] = {}
    for title, results in workloads.items():
        for name in (APOLLO, APOLLO_STEP):
            if (ratio := memory_ratio(results, name)) is not None:
                memory[f"{title}, {name}"] = ratio
        own, theirs = (results[e].launch.get("host_ns") if e in results else None for e in (APOLLO, REDUCE_OVERHEAD))
        if own and theirs:
            host[title] = own / theirs
    return [
        _most("memory over reduce-overhead", MOST_MEMORY, memory),
        _most("host time of a step over reduce-overhead", MOST_HOST_TIME, host),
    ]


def _losses(workloads: Workloads, dtype: str) -> Target:
    differences = {
        f"{title}, {name}": difference
        for title, results in workloads.items()
        for name in (APOLLO, APOLLO_STEP)
        if (difference := loss_difference(results, name)) is not None
    }
    worst = max(differences, key=lambda each: differences[each]) if differences else None
    return Target(
        name="losses of the first 50 steps",
        wanted=f"within {TOLERANCES[dtype]:g}",
        found="" if worst is None else f"{differences[worst]:.1e} ({worst})",
        state=_state(None if worst is None else differences[worst] <= TOLERANCES[dtype]),
    )


def _least(name: str, wanted: float, found: Mapping[str, Ratio]) -> Target:
    worst = min(found, key=lambda each: found[each].value) if found else None
    return Target(
        name=name,
        wanted=f">= {wanted:.2f}x",
        found="" if worst is None else _shown(str(found[worst]), worst, len(found)),
        state=_state(None if worst is None else found[worst].value >= wanted),
    )


def _most(name: str, wanted: float, found: Mapping[str, float]) -> Target:
    worst = max(found, key=lambda each: found[each]) if found else None
    return Target(
        name=name,
        wanted=f"<= {wanted:.2f}x",
        found="" if worst is None else _shown(f"{found[worst]:.2f}x", worst, len(found)),
        state=_state(None if worst is None else found[worst] <= wanted),
    )


def _shown(figure: str, where: str, count: int) -> str:
    return figure if count == 1 else f"{figure}: {where}, the worst of {count}"


def _state(is_met: bool | None) -> str:
    return "not measured" if is_met is None else "met" if is_met else "missed"
