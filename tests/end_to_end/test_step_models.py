"""Steps of real models as one program: the numbers of the plain loop, and no program with a race."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.session.step.split import split_evenly
from apollo_compile.step import Step, compile_step
from benchmarks.harness.growth import find_growth, watch
from benchmarks.harness.whole_steps import draw_class_tokens
from benchmarks.workloads import build
from tests.end_to_end.twins import EAGER, Batch, ran_as_program, run_loop, state_of
from tests.races import find_races, without_each_wait

pytestmark = pytest.mark.slow

OPTIONS = {**EAGER, "debug.strict": True}

NAMES = ("clip", "flava", "llava", "whisper", "vit_control", "two_tower")
COUNTS = (1, 2, 4)
SAMPLES = 2
"""Of a micro-batch: a contrastive loss of one is constant."""

MAKERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.05),
    # With the default epsilon, gradients that are zero but for rounding become full steps in a random direction.
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-4, eps=1e-3),
}
ALWAYS = {("clip", "AdamW"), ("whisper", "SGD")}
"""Two towers, and an encoder with a decoder: in every run."""

CASES = [
    pytest.param(name, kind, marks=() if (name, kind) in ALWAYS else pytest.mark.soak)
    for name in NAMES
    for kind in MAKERS
]

LossFunction = Callable[[nn.Module, Batch], torch.Tensor]


@pytest.fixture(autouse=True)
def _one_graph() -> Iterator[None]:
    """LLaVA checks a number that it reads from a tensor, which breaks the graph otherwise."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model with batches of any number of micro-batches."""

    model: nn.Module
    loss_fn: LossFunction
    rows: Batch

    def batch(self, count: int, seed: int) -> Batch:
        """Return other samples for every seed."""
        chosen = torch.randperm(max(COUNTS) * SAMPLES, generator=torch.Generator().manual_seed(seed))[: count * SAMPLES]
        return {name: value[chosen] for name, value in self.rows.items()}

    def compile(self, optimizer: torch.optim.Optimizer, **options: Any) -> Step:
        """Return a step that splits into as many micro-batches as there are samples for: one graph for all."""
        return compile_step(self.model, self.loss_fn, optimizer, split=split, options={**OPTIONS, **options})


def split(batch: Batch, _: int) -> list[Batch]:
    """Return micro-batches of `SAMPLES` samples."""
    return list(split_evenly(batch, len(next(iter(batch.values()))) // SAMPLES))


def workload(name: str, dropout: float = 0.0) -> Subject:
    """Return a public workload, tiny."""
    built = build(name, "tiny", batch=max(COUNTS) * SAMPLES, dropout=dropout)
    draw_class_tokens(built.model)
    constants = {key: value for key, value in built.inputs.items() if not isinstance(value, torch.Tensor)}
    return Subject(
        model=built.model,
        loss_fn=lambda model, part: built.loss(model(**part, **constants)),
        rows={key: value for key, value in built.inputs.items() if isinstance(value, torch.Tensor)},
    )


def take_loop(model: nn.Module, loss_fn: LossFunction, batch: Batch, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Take one step as users write it."""
    return run_loop(model, loss_fn, split(batch, 0), optimizer)


def assert_as_accurate(
    first: Mapping[str, torch.Tensor],
    exact: Mapping[str, torch.Tensor],
    eager: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
) -> None:
    """Compare how much everything changed with the loop in float64.

    It may be off by a thousandth of the largest change of each tensor, or of a hundredth of the largest of all, or by
    five times as much as eager in float32: after a few steps, that is more for single weights.
    """
    largest = {name: float((exact[name] - first[name]).abs().max()) for name in first}
    for name, wanted in exact.items():
        error, allowed = (float((each[name].double() - wanted).abs().max()) for each in (found, eager))
        allowed = max(5 * allowed, 1e-3 * largest[name], 1e-5 * max(largest.values()))
        assert error <= allowed, f"{name} is off by {error:.1e}; allowed are {allowed:.1e}"


def ran_as_programs(step: Step, count: int) -> bool:
    """Whether so many programs were linked, and nothing else than they runs."""
    return len(step.verdicts) == count and ran_as_program(step)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_steps_of_real_models_are_those_of_the_loop(name: str, kind: str) -> None:
    """Losses and weights, for 1, 2 and 4 micro-batches, one after the other; and no program has a race."""
    subject = workload(name)
    models = (subject.model, copy.deepcopy(subject.model), copy.deepcopy(subject.model).double())
    own, others, exact = optimizers = [MAKERS[kind](model.parameters()) for model in models]
    step = subject.compile(own)
    first, begin = state_of(subject.model), copy.deepcopy(own.state_dict())
    for count in COUNTS:
        for model, optimizer in zip(models, optimizers, strict=True):
            model.load_state_dict(first)
            optimizer.load_state_dict(copy.deepcopy(begin))
        for seed in range(5):
            batch = subject.batch(count, seed)
            wanted = take_loop(models[1], subject.loss_fn, batch, others)
            torch.testing.assert_close(step(batch), wanted, rtol=1e-4, atol=1e-5)
            in_float64 = {name: each.double() if each.is_floating_point() else each for name, each in batch.items()}
            take_loop(models[2], subject.loss_fn, in_float64, exact)
        assert_as_accurate(first, *(model.state_dict() for model in (models[2], models[1], models[0])))
    assert ran_as_programs(step, len(COUNTS))
    compilations = [tuner.program.variants.compilation for tuner in step.tuners]
    assert torch.get_num_threads() == 1 or any(each.plan.uses_lanes for each in compilations)
    rng = random.Random(0)
    for each in compilations:
        graph, broken = each.partition.graph, list(without_each_wait(each.program))
        assert [defect for _ in range(3) for defect in find_races(each.program, graph, rng)] == []
        assert all(find_races(program, graph, rng) for program in rng.sample(broken, min(len(broken), 8)))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("name", "kind", "bodies"),
    [
        pytest.param(name, kind, bodies, marks=() if (name, bodies) == ("two_tower", "eager") else pytest.mark.soak)
        for name, kind in zip(NAMES, 3 * tuple(MAKERS), strict=True)
        for bodies in ("eager", "native")
    ],
)
def test_steps_equal_the_compiled_loop_to_the_bit_with_deterministic_algorithms(
    name: str, kind: str, bodies: str
) -> None:
    """The same bodies run, and sums are added in the same order, whatever runs side by side."""
    subject = workload(name)
    expected = copy.deepcopy(subject.model)
    own, others = (MAKERS[kind](model.parameters()) for model in (subject.model, expected))
    step = subject.compile(own, **{"runtime.bodies": bodies})
    options = {**OPTIONS, "runtime.bodies": bodies}
    run = torch.compile(lambda part: subject.loss_fn(expected, part), backend="apollo", options=options, dynamic=False)
    for seed in range(6):
        batch = subject.batch(COUNTS[seed % 3], seed)
        assert torch.equal(step(batch), take_loop(expected, lambda _, part: run(part), batch, others))
        for (key, value), other in zip(subject.model.state_dict().items(), expected.state_dict().values(), strict=True):
            assert torch.equal(value, other), f"step {seed}: {key}"
    assert ran_as_programs(step, len(COUNTS))


@pytest.mark.soak
@pytest.mark.parametrize("kind", MAKERS)
def test_thousands_of_steps_hold_no_more_memory(kind: str) -> None:
    """Nor threads, nor files."""
    subject = workload("two_tower")
    step = subject.compile(MAKERS[kind](subject.model.parameters()))
    batches = [subject.batch(4, seed) for seed in range(8)]
    turn = iter(range(10**9))

    def take() -> None:
        step(batches[next(turn) % len(batches)])

    slices = watch(take, lambda: bool(step.verdicts), 2000)
    assert ran_as_programs(step, 1)
    tenth = len(slices) // 10
    assert find_growth(slices[tenth : 2 * tenth], slices[-tenth:]) == []
