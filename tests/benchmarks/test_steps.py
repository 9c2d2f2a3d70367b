"""The benchmark of whole steps: every variant trains as the loop does, and ratios are told with their rivals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from apollo_compile.ir import Variant  # noqa: E402
from apollo_compile.tools.bench.numbers import LOSS, compare_digests  # noqa: E402
from apollo_compile.tools.bench.task import MeasuredTask  # noqa: E402
from benchmarks.harness import whole_steps  # noqa: E402
from benchmarks.steps import KNOWN, VARIANTS, format_overview, is_judged, make_task  # noqa: E402
from tests.tools.test_bench import FakeChild, measured  # noqa: E402

EAGER = {"runtime.bodies": "eager", "plan.autotune": False, "plan.replan": False, "plan.min_gain": 0.0}

KINDS: Mapping[type[whole_steps.Loop], tuple[str | None, Mapping[str, Any]]] = {
    whole_steps.Loop: ("apollo", EAGER),
    whole_steps.FullBatch: (None, {}),
    whole_steps.TracedStep: ("aot_eager", {}),
    whole_steps.TracedWholeStep: ("aot_eager", {}),
    whole_steps.CompiledStep: ("apollo", EAGER),
}
ALWAYS = {(whole_steps.FullBatch, "sgd"), (whole_steps.TracedWholeStep, "sgd"), (whole_steps.CompiledStep, "adamw")}
"""In every run; the others are traced as well, which takes a while."""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Steppers set up Dynamo for good, because their process does nothing else."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=False, trace_autograd_ops=False):
        yield


def _numbers(
    kind: type[whole_steps.Loop], backend: str | None, options: Mapping[str, Any], task: MeasuredTask, folder: Path
) -> tuple[float, dict[str, Any]]:
    """Return the loss and the digest of a stepper that is asked in this process."""
    order = {
        "task": asdict(task),
        "variant": {"backend": backend, "options": options, "keeps_memory": False},
        "digest": str(folder / f"{kind.__name__}.npz"),
    }
    stepper = kind(order)
    assert stepper.start() > 0
    stepper.warm_up(3)
    assert len(stepper.run(1, 2)) == 2
    if kind in (whole_steps.CompiledStep, whole_steps.CompiledUpdates):
        assert stepper.is_settled() and set(stepper.ran()) == {Variant.PLAN}
    numbers = stepper.numbers()
    with np.load(numbers["digest"]) as arrays:
        return numbers["loss"], {name: arrays[name] for name in arrays.files if name != "names"}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this torch traces no backward()")
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        pytest.param(kind, optimizer, marks=() if (kind, optimizer) in ALWAYS else pytest.mark.soak)
        for kind in KINDS
        for optimizer in ("sgd", "adamw")
    ],
)
def test_all_kinds_of_steps_train_alike(kind: type[whole_steps.Loop], optimizer: str, tmp_path: Path) -> None:
    """After whatever was timed, the first weights are there again, and change as those of the loop did in eager."""
    task = make_task("chain", "tiny", 4, optimizer, 2)
    _assert_alike(_numbers(whole_steps.Loop, None, {}, task, tmp_path), _numbers(kind, *KINDS[kind], task, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend", "options"),
    [
        (whole_steps.Updates, "apollo", EAGER),
        (whole_steps.TracedUpdates, "aot_eager", {}),
        (whole_steps.CompiledUpdates, "apollo", EAGER),
    ],
)
def test_updates_of_a_learner_train_alike(
    kind: type[whole_steps.Loop], backend: str, options: Mapping[str, Any], tmp_path: Path
) -> None:
    """With losses compiled by themselves, with traced steps, and with compiled ones."""
    task = make_task("sac", "tiny", 8, "its own", 1, fused=None if kind is whole_steps.CompiledUpdates else True)
    _assert_alike(
        _numbers(whole_steps.Updates, None, {}, task, tmp_path), _numbers(kind, backend, options, task, tmp_path)
    )


def _assert_alike(expected: tuple[float, dict[str, Any]], actual: tuple[float, dict[str, Any]]) -> None:
    (loss, changes), (other, others) = expected, actual
    largest = max(np.abs(change).max() for change in changes.values())
    assert largest > 1e-4 and other == pytest.approx(loss, rel=1e-5)
    for name, change in changes.items():
        np.testing.assert_allclose(others[name], change, rtol=0, atol=1e-3 * largest, err_msg=name)


def test_every_variant_has_a_stepper_and_the_reference_comes_first() -> None:
    """Names of classes are data for other processes."""
    for stepper in (*(variant.stepper for variant in KNOWN.values()), *whole_steps.OF_LEARNERS.values()):
        module, _, name = stepper.partition(":")
        assert module == whole_steps.__name__ and issubclass(getattr(whole_steps, name), whole_steps.Loop)
    assert VARIANTS[0].name == "eager"


class Child(FakeChild):
    """A variant that runs one program."""

    def ran(self) -> list[str]:
        return ["one program"]


def test_the_overview_has_a_ratio_over_every_rival_with_its_interval(tmp_path: Path) -> None:
    """Rivals that were not measured are left out, in the mean, too; a full batch may be another training."""
    times = {"eager": 500, "inductor": 400, "inductor-traced": 200, "inductor-full-batch": 100, "apollo-step": 200}
    rows = []
    for name, batch in (("clip", 8), ("llava", 4)):
        task = make_task(name, "tiny", batch, "adamw", 4)
        made = measured(task, times, tmp_path, rounds=5, kind=Child)
        rows.append(made)
        judged = {result.variant for result in made.results if is_judged(task, result)}
        assert ("inductor-full-batch" in judged) == (name == "llava")
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in format_overview(rows).splitlines()]
    ratios = ["2.00x (2.00 .. 2.00)", "1.00x (1.00 .. 1.00)", "-", "0.50x (0.50 .. 0.50)", "-"]
    assert lines[2] == ["clip, adamw, batch 8 in 4", *ratios, "one program"]
    assert lines[-1] == ["geometric mean of 2", "2.00x", "1.00x", "-", "0.50x", "-"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rounding_of_a_weight_is_no_difference_of_its_change(dtype: torch.dtype) -> None:
    """Though a target that follows slowly changes by little more; a change that is missing is one."""
    first = torch.tensor([0.2, -0.01], dtype=dtype)
    now = first + 100 * torch.finfo(dtype).eps * first
    rounded = torch.nextafter(now, torch.ones_like(now))
    expected, other, still = (
        {"w": whole_steps._change_of(first, each), LOSS: np.float32(1.0)} for each in (now, rounded, first)
    )
    assert 0.0 < compare_digests(other, expected).gradient_rel < 1e-3
    assert compare_digests(still, expected).gradient_rel > 1e-2
