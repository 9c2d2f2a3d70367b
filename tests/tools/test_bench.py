"""The harness takes turns fairly, reckons rightly, and keeps variants in processes of their own."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from apollo_compile.device.cpu.machine import cpu_description
from apollo_compile.errors import ApolloError
from apollo_compile.tools.bench import numbers
from apollo_compile.tools.bench.facts import machine_facts
from apollo_compile.tools.bench.numbers import LOSS, Measurement, Numbers, compare_digests, summarize, to_json
from apollo_compile.tools.bench.render import format_measurement
from apollo_compile.tools.bench.task import (
    INDUCTOR_MODES,
    KEPT_MEMORY,
    TOLERANCES,
    VARIANTS,
    MeasuredTask,
    MeasuredVariant,
)
from apollo_compile.tools.bench.turns import measure, measure_children
from benchmarks.run import format_overview

EAGER = MeasuredVariant(name="eager", backend=None)


def build_linear(width: int, *, scale: float = 1.0, fail: str = "") -> Any:
    """A task for the children of these tests."""
    import torch

    if fail == "exit":
        raise SystemExit(3)
    if fail:
        raise RuntimeError(fail)
    model = torch.nn.Linear(width, 1)
    return SimpleNamespace(model=model, inputs={"input": torch.rand(2, width)}, loss=lambda out: out.sum() * scale)


@dataclass
class FakeChild:
    """Writes what it was asked for into a log that all children share."""

    name: str
    step_ns: int
    log: list[str]
    folder: Path
    loss: float = 1.0

    def ask(self, request: tuple[Any, ...], timeout_s: float) -> Any:
        return getattr(self, request[0])(*request[1:])

    def start(self) -> float:
        self.log.append(f"start {self.name}")
        return 1.0

    def warm_up(self, steps: int) -> int:
        self.log.append(f"{self.name} warms up {steps}")
        return steps

    def run(self, untimed: int, timed: int) -> Sequence[int]:
        self.log.append(f"{self.name} {untimed}+{timed}")
        return [self.step_ns] * timed

    def peak_bytes(self) -> int | None:
        return 2**20

    def ran(self) -> Sequence[str]:
        return ["segments in turn", "Inductor"] if self.name == "apollo" else []

    def numbers(self) -> Numbers:
        numbers.save_digest(self.folder / f"{self.name}.npz", {"file": np.full(3, self.loss, dtype=np.float32)})
        return {"loss": self.loss, "digest": str(self.folder / f"{self.name}.npz")}


def measured(
    task: MeasuredTask,
    times: dict[str, int],
    folder: Path,
    *,
    rounds: int = 1,
    losses: Mapping[str, float] | None = None,
    kind: type[FakeChild] = FakeChild,
) -> Measurement:
    """Measure children whose steps take so long, without a pause; their losses are 1 if not given."""
    losses = losses or {}
    children = {name: kind(name, step_ns, [], folder, losses.get(name, 1.0)) for name, step_ns in times.items()}
    return measure_children(task, children, rounds=rounds, steps_per_turn=1, warmup=0, pause=lambda seconds: None)


def test_children_run_one_at_a_time_with_pauses(tmp_path: Path) -> None:
    """First every child starts, then all warm up, then rounds begin; a pause follows every turn."""
    log: list[str] = []
    children = {name: FakeChild(name, step_ns, log, tmp_path) for name, step_ns in (("eager", 300), ("inductor", 200))}
    pause = lambda seconds: log.append("pause")  # noqa: E731
    measurement = measure_children(
        MeasuredTask(builder="x:y"), children, rounds=2, steps_per_turn=3, warmup=5, pause=pause
    )
    begins = ["start eager", "start inductor", "eager warms up 5", "inductor warms up 5"]
    turns = ["eager 1+3", "inductor 1+3", "inductor 1+3", "eager 1+3"]
    assert [line for line in log if line != "pause"] == begins + turns
    assert log.count("pause") == 6
    results = measurement.by_variant()
    assert (measurement.baseline, measurement.reference) == ("inductor", "eager")
    assert results["eager"].summary.speedup == pytest.approx(200 / 300)
    assert results["inductor"].summary.speedup == 1.0
    assert results["eager"].peak_bytes == 2**20
    assert results["eager"].rounds_ns == ((300, 300, 300), (300, 300, 300))
    assert to_json(measurement)["results"][0]["variant"] == "eager"


def test_a_measurement_says_what_ran_on_which_cpu_in_which_type(tmp_path: Path) -> None:
    """A speed-up says little where nobody knows of what; which libraries are fast depends on the vendor."""
    measurement = measured(MeasuredTask(builder="x:y", dtype="bfloat16"), {"inductor": 100, "apollo": 100}, tmp_path)
    lines, facts = format_measurement(measurement).splitlines(), to_json(measurement)
    (line,) = [line for line in lines if line.startswith("selected variants")]
    assert line.endswith(": apollo: segments in turn, Inductor")
    assert [result["ran"] for result in facts["results"]] == [(), ("segments in turn", "Inductor")]
    assert facts["cpu"] == cpu_description() and f"measured in bfloat16 on {cpu_description()}" in lines


def test_the_overview_compares_with_the_best_and_means_the_branched_ones(tmp_path: Path) -> None:
    """Chains and large batches are rows without being part of the mean; what was not measured is a dash."""
    times = {"eager": 300, "inductor": 400, "apollo-serial": 250, "apollo": 200}

    def told(name: str, batch: int, **others: int) -> Measurement:
        task = MeasuredTask(builder="x:y", arguments={"name": name, "batch": batch}, dtype="bfloat16")
        return measured(task, {**times, **others}, tmp_path, rounds=2)

    best = {"inductor-max-autotune": 240, "inductor-kept-memory": 360}
    faster = [told(name, 1, apollo=50) for name in ("two_tower", "whisper")]
    text = format_overview([told("clip", 4), told("clip", 8, **best), *faster])
    rows = [[cell.strip() for cell in line.split("  ") if cell] for line in text.splitlines()[2:]]
    ratios = ["2.00x", "2.00x", "1.50x", "-", "1.25x", "1.00x"]
    assert rows[0] == ["clip, batch 4, train, bfloat16", *ratios, cpu_description()]
    ratios = ["2.00x", "1.20x", "1.20x", "1.80x", "1.25x", "1.00x"]
    assert rows[1] == ["clip, batch 8, train, bfloat16", *ratios, cpu_description()]
    assert rows[-1] == ["geometric mean of 2 with branches", "4.00x", "4.00x", "3.00x", "2.50x"]
    assert len(rows) == 5


def test_the_best_mode_of_inductor_is_that_of_torch() -> None:
    """`torch.compile` takes a mode or options: those here are the mode's, and no more than the backends beside them."""
    inductor = pytest.importorskip("torch._inductor")
    default, tuned = INDUCTOR_MODES
    assert not default.options
    mode = inductor.list_mode_options("max-autotune-no-cudagraphs")
    assert tuned.options == {**mode, "max_autotune_gemm_backends": "CPP,ATEN"}
    assert all(variant in VARIANTS for variant in INDUCTOR_MODES)


def test_a_summary_has_the_statistics_of_all_steps() -> None:
    """Median, minimum and the spread between the tenth and the ninetieth percentile."""
    summary = summarize([[10, 20, 30], [40, 50, 60]], [[70, 70, 70], [70, 70, 70]])
    assert (summary.median_ns, summary.min_ns, summary.p10_ns, summary.p90_ns) == (35, 10, 15, 55)
    assert summary.speedup == 2.0


@pytest.mark.parametrize("seed", range(5))
def test_the_interval_of_a_speedup_holds_the_true_value(seed: int) -> None:
    """Thirty noisy rounds of a variant that is a quarter faster; slow rounds hit both."""
    rng = np.random.default_rng(seed)
    disturbed = 1 + (rng.random((30, 1)) < 0.2) * 3
    base = np.rint(1_250_000 * disturbed * rng.normal(1, 0.03, (30, 3))).astype(int).tolist()
    own = np.rint(1_000_000 * disturbed * rng.normal(1, 0.03, (30, 3))).astype(int).tolist()
    summary = summarize(own, base)
    assert 1.2 < summary.speedup_low <= summary.speedup <= summary.speedup_high < 1.3


def _digest(loss: float, **gradients: list[float]) -> dict[str, Any]:
    return {LOSS: np.asarray(loss), **{name: np.asarray(values, np.float32) for name, values in gradients.items()}}


def test_differences_name_the_worst_parameter() -> None:
    """Relative to the largest element of each parameter; of gradients that are only noise, to the model's scale."""
    difference = compare_digests(_digest(2.0, a=[1, 2], b=[0.5]), _digest(2.5, a=[1, 2], b=[0.4]))
    assert difference.loss_abs == pytest.approx(0.5) and difference.loss_rel == pytest.approx(0.2)
    assert difference.worst == "b" and difference.gradient_rel == pytest.approx(0.25, rel=1e-4)
    assert difference.gradient_scale == 2.0
    assert difference.is_within(0.3) and not difference.is_within(0.1)
    noise = compare_digests(_digest(1.0, a=[1.0], key_bias=[1e-9]), _digest(1.0, a=[1.0], key_bias=[-1e-9]))
    assert noise.is_within(1e-5)


def test_a_missing_gradient_and_a_nan_are_never_right() -> None:
    """A gradient of one side only is an error unless it is zero, and NaN equals nothing."""
    missing = compare_digests(_digest(1.0, a=[1.0]), _digest(1.0, a=[1.0], b=[0.5]))
    assert missing.unmatched == ("b",) and not missing.is_within(1.0)
    assert compare_digests(_digest(1.0, a=[1.0], b=[0.0]), _digest(1.0, a=[1.0])).is_within(1e-6)
    wrong = compare_digests(_digest(1.0, a=[math.nan], b=[2.0]), _digest(1.0, a=[1.0], b=[1.0]))
    assert wrong.worst == "a" and not wrong.is_within(10.0)
    assert not compare_digests(_digest(math.nan), _digest(1.0)).is_within(1.0)


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name by which children import this file."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    return "tests.tools.test_bench:build_linear"


def test_real_processes_are_measured_and_agree(builder: str) -> None:
    """Two eager children of a task that draws its weights: equal numbers, positive times, lines of progress."""
    lines: list[str] = []
    measurement = measure(
        MeasuredTask(builder=builder, arguments={"width": 8}),
        (EAGER, MeasuredVariant(name="again", backend=None)),
        rounds=2,
        steps_per_turn=2,
        progress=lines.append,
    )
    results = measurement.by_variant()
    assert all(len(result.rounds_ns) == 2 and min(map(min, result.rounds_ns)) > 0 for result in measurement.results)
    assert results["again"].difference.gradient_abs == 0.0 and results["again"].loss == results["eager"].loss
    assert any("first step" in line for line in lines)
    if sys.platform == "linux":
        assert all(result.peak_bytes and result.peak_bytes > 2**24 for result in measurement.results)


def build_allocations() -> Any:
    """A task whose loss is how many pages the kernel has to map for a large tensor that comes again."""
    import resource

    import torch

    def count(size: torch.Tensor) -> torch.Tensor:
        for number in range(TIMES + 3):
            if number == 3:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ones(int(size))
        return torch.tensor(float(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before))

    model = torch.nn.Module()
    model.forward = count
    return SimpleNamespace(model=model, inputs={"size": torch.tensor(PAGES * 1024)}, loss=lambda out: out)


PAGES = 9_216
"""Of 4 KiB; so many are more than the C library ever keeps by itself."""
TIMES = 6


@pytest.mark.soak
def test_a_variant_may_keep_memory_as_apollo_does(builder: str) -> None:
    """Then a large tensor that comes again takes no page faults, unless small ones split the memory that it left."""
    task = MeasuredTask(builder=builder.replace("linear", "allocations"), mode="inference")
    (_, kept) = KEPT_MEMORY
    results = measure(task, (EAGER, kept), rounds=1, steps_per_turn=1).by_variant()
    assert results["eager"].loss >= TIMES * PAGES and results[kept.name].loss < TIMES * PAGES / 2


def build_precision() -> Any:
    """A task whose loss is how many bits of its number a product keeps."""
    import torch

    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 1 + 2**-12)
    torch.nn.init.zeros_(model.bias)
    return SimpleNamespace(model=model, inputs={"input": torch.ones(2, 1)}, loss=lambda out: out.float().sum())


@pytest.mark.soak
def test_a_task_may_be_under_autocast(builder: str) -> None:
    """Products are in bfloat16, parameters and gradients are not; differences may be as large as it rounds."""
    losses = {}
    for dtype in TOLERANCES:
        task = MeasuredTask(builder=builder.replace("linear", "precision"), dtype=dtype)
        losses[dtype] = measure(task, (EAGER,), rounds=1, steps_per_turn=1).by_variant()["eager"].loss
    assert losses == {"float32": 2 + 2**-11, "bfloat16": 2.0}
    assert MeasuredTask(builder="x:y").tolerance < MeasuredTask(builder="x:y", dtype="bfloat16").tolerance < 0.1


@pytest.mark.parametrize(("fail", "message"), (("no such model", "no such model"), ("exit", "exit code 3")))
def test_a_failing_child_is_named_with_its_reason(builder: str, fail: str, message: str) -> None:
    """Whether it raises or dies."""
    with pytest.raises(ApolloError, match=f"(?s)'eager'.*{message}"):
        measure(MeasuredTask(builder=builder, arguments={"width": 8, "fail": fail}), (EAGER,))


def test_machine_facts_say_what_is_needed_to_repeat() -> None:
    """Versions and the machine."""
    pytest.importorskip("torch")
    facts = machine_facts()
    assert {"torch", "python", "commit", "cpu", "cores", "threads"} <= set(facts) and facts["cores"] >= 1
