"""Whole steps with code that Inductor tunes, on the stand-in for the GPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.device.gpu.capturer import Capturer
from apollo_compile.device.gpu.execute import CudaExecutable
from apollo_compile.ir import Phase, Role, Variant
from apollo_compile.session.step.tuning import StepTuner
from apollo_compile.step import compile_step
from apollo_compile.tools.report import report, status
from tests.device.gpu.fake_gpu import FakeGpu
from tests.device.gpu.test_steps import PROGRAM, Optimize, Pair, adamw, gpu, loss_fn, races_of, sgd, units  # noqa: F401  (fixtures)
from tests.device.gpu.test_tuned import Inductor, inductor  # noqa: F401

AT_ONCE = {"plan.autotune": True, "runtime.bodies": "native", "plan.late_share": 1e9}
"""Whatever may be compiled later is due as soon as something has won."""

MOST = 1500
"""Steps in which everything is decided."""


def settle(pair: Pair) -> None:
    """Train until it is known what runs."""
    for _ in range(MOST):
        pair.step()
        if pair.run.tuners and pair.run.tuners[0].is_settled:
            return
    raise AssertionError(f"not settled: {status(pair.run)}")


def settle_with_joint_graph(pair: Pair) -> StepTuner:
    """Train until forward and backward as one graph of Inductor's were compared, too."""
    settle(pair)
    (tuner,) = pair.run.tuners
    assert Variant.JOINT not in tuner.program.variants.loaded()
    before = {each.name for each in tuner.verdict.standings}
    pair.step()
    settle(pair)
    assert {each.name for each in tuner.verdict.standings} == {*before, Variant.JOINT}
    return tuner


SOAKED = ((adamw, 1, None, "eager"), (sgd, 2, None, "eager"), (adamw, 2, None, "native"))


@pytest.mark.parametrize(
    ("optimize", "microbatches", "clip", "bodies"),
    [(adamw, 2, 0.1, "eager"), *(pytest.param(*case, marks=pytest.mark.soak) for case in SOAKED)],
)
def test_forward_and_backward_as_one_graph_take_turns_with_the_winner(
    gpu: FakeGpu,  # noqa: F811
    optimize: Optimize,
    microbatches: int,
    clip: float | None,
    bodies: str,
) -> None:
    """A step is one replay then, with the numbers of the loop, statistics of normalizations included."""
    options = {**AT_ONCE, "runtime.bodies": bodies, "inductor.max_autotune": False}
    pair = Pair(gpu, optimize, microbatches=microbatches, clip=clip, **options)
    tuner = settle_with_joint_graph(pair)
    loaded = tuner.program.variants.loaded()[Variant.JOINT]
    assert not loaded.num_launches and loaded.num_replays > 12
    phases = [(segment.name, segment.phase) for segment in loaded.graph.segments]
    assert [phase for _, phase in phases].count(Phase.BACKWARD) == microbatches, phases
    assert Phase.FORWARD not in dict(phases).values(), phases
    assert not races_of(gpu)
    for _ in range(3):
        pair.step()
    assert tuner.is_settled, "the options say that nothing is tuned"


def test_tuned_programs_take_turns_with_the_winner(
    gpu: FakeGpu,  # noqa: F811
    inductor: Inductor,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two or three steps are loops, in which code is compiled and timed; then everything tuned is compared, and stays
    right: losses, gradients, parameters and the optimizer's state.
    """
    caplog.set_level(logging.INFO, logger="apollo_compile")
    pair = Pair(gpu, adamw, **AT_ONCE)
    tuner = settle_with_joint_graph(pair)
    winner, variants = tuner.current, tuner.program.variants
    assert not inductor.tuned and not {Variant.TUNED, Variant.TUNED_INDUCTOR} & set(variants.loaded())
    before = caplog.text.count("compiled again, tuned")
    while tuner.is_settled:
        pair.step()
    assert caplog.text.count("compiled again, tuned") == before + 1
    assert {Variant.TUNED, Variant.TUNED_INDUCTOR} <= set(variants.loaded())
    plain, tuned = variants.plan.bodies, variants.loaded()[Variant.TUNED].bodies
    assert len(plain) == len(tuned) and any(one is not other for one, other in zip(plain, tuned, strict=True))
    settle(pair)
    assert {Variant.LOOP, winner, Variant.TUNED, Variant.TUNED_INDUCTOR} <= {
        each.name for each in tuner.verdict.standings
    }
    assert tuner.verdict.winner == tuner.current and tuner.verdict.standings[0].ratio == 1
    assert not races_of(gpu)
    for _ in range(3):
        pair.step()
    assert tuner.is_settled and str(report(pair.run)).startswith(f"settled: {tuner.current}")


@pytest.mark.soak
def test_code_that_is_not_faster_leaves_the_winner(
    gpu: FakeGpu,  # noqa: F811
    inductor: Inductor,  # noqa: F811
) -> None:
    """By times of the device nothing tuned promises more; so nothing is linked of it, for any number of steps."""
    inductor.is_quick = lambda name: False
    pair = Pair(gpu, sgd, **AT_ONCE)
    tuner = settle_with_joint_graph(pair)
    winner = tuner.current
    for _ in range(8):
        pair.step()
        assert tuner.is_settled and tuner.verdict.winner == winner
    assert inductor.tuned and not {Variant.TUNED, Variant.TUNED_INDUCTOR} & set(tuner.program.variants.loaded())


@pytest.mark.soak
def test_tuning_that_fails_leaves_the_winner(
    gpu: FakeGpu,  # noqa: F811
    inductor: Inductor,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With one WARNING."""
    inductor.failure = RuntimeError("no kernel is valid")
    pair = Pair(gpu, **{**AT_ONCE, "debug.strict": False})
    tuner = settle_with_joint_graph(pair)
    for _ in range(8):
        pair.step()
    assert tuner.is_settled and not inductor.tuned
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [line.partition(": ")[2] for line in warned] == [
        "its code is not tuned: RuntimeError: no kernel is valid; what runs stays, and 'plan.late_share' 0 leaves "
        "tuning out"
    ]


@pytest.mark.soak
def test_tuned_programs_that_find_no_memory_leave_the_winner(
    gpu: FakeGpu,  # noqa: F811
    inductor: Inductor,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one WARNING for each; the verdict until then holds, and what won goes on."""
    pair = Pair(gpu, adamw, **{**AT_ONCE, "debug.strict": False})
    tuner = settle_with_joint_graph(pair)
    winner, verdict = tuner.current, tuner.verdict
    while tuner.is_settled:
        pair.step()
    lost = (Variant.TUNED_INDUCTOR, Variant.TUNED)
    programs = [tuner.program.variants.loaded()[each].program for each in lost]
    capture = Capturer.capture

    def find_no_memory(capturer: Capturer, *arguments: Any) -> Any:
        if any(capturer.program is each for each in programs):
            raise torch.OutOfMemoryError("no memory")
        return capture(capturer, *arguments)

    monkeypatch.setattr(Capturer, "capture", find_no_memory)
    settle(pair)
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 2
    assert all(f"no {each}: OutOfMemoryError: no memory" in "".join(warned) for each in lost)
    assert tuner.verdict is verdict and tuner.current is winner
    for _ in range(3):
        pair.step()
    assert tuner.held_back is None and tuner.current is winner and not tuner.is_more_to_come


@pytest.mark.soak
def test_too_few_steps_of_a_late_comparison_leave_the_winner(
    gpu: FakeGpu,  # noqa: F811
) -> None:
    """Where batches of two sizes come in turn, no turn is of one of them alone, and late variants stay unknown."""
    pair = Pair(gpu, adamw, **{**AT_ONCE, "runtime.bodies": "eager"})
    settle(pair)
    (tuner,) = pair.run.tuners
    verdict = tuner.verdict
    for _ in range(MOST):
        pair.step()
        pair.step(12)
        if not tuner.is_more_to_come and tuner.is_settled:
            break
    assert tuner.verdict is verdict and tuner.current == verdict.winner


@pytest.mark.soak
def test_an_interrupt_of_a_late_compile_is_not_repeated(
    gpu: FakeGpu,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who goes on training, as in a notebook, does so with what won."""
    pair = Pair(gpu, None, **{**AT_ONCE, "runtime.bodies": "eager", "inductor.max_autotune": False})
    compiled: list[int] = []

    def interrupt(*_: Any, **__: Any) -> Any:
        compiled.append(1)
        raise KeyboardInterrupt

    for _ in range(MOST):
        for model in (pair.eager, pair.model):
            model.zero_grad()
        pair.step()
        if pair.run.tuners and pair.run.tuners[0].is_settled:
            break
    monkeypatch.setattr("apollo_compile.session.contest.challenger.join_graphs", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pair.run(torch.randn(8, 8, dtype=torch.float64))
    winner = pair.run.tuners[0].current
    for _ in range(3):
        pair.run(torch.randn(8, 8, dtype=torch.float64))
    assert len(compiled) == 1 and pair.run.tuners[0].current is winner


@pytest.mark.soak
def test_timing_that_fails_in_the_backward_leaves_the_winner(
    gpu: FakeGpu,  # noqa: F811
    inductor: Inductor,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Code of the forward alone is no use."""
    pair = Pair(gpu, adamw, **{**AT_ONCE, "debug.strict": False})
    tuner = settle_with_joint_graph(pair)
    measured: list[int] = []
    measure = CudaExecutable.measure

    def run_out_of_memory(executable: CudaExecutable, inputs: Sequence[torch.Tensor]) -> Any:
        measured.append(1)
        if executable.graph.role is Role.BACKWARD:
            raise torch.OutOfMemoryError("no memory")
        return measure(executable, inputs)

    monkeypatch.setattr(CudaExecutable, "measure", run_out_of_memory)
    for _ in range(8):
        pair.step()
    assert measured and tuner.is_settled and not tuner.is_more_to_come
    assert "its code is not tuned: OutOfMemoryError: no memory" in caplog.text


class Dropping(nn.Module):
    """Two layers with dropout that are independent of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(p), nn.Linear(16, 8)) for p in (0.5, 0.3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the similarities of what both make of `x`."""
        return self.left(x) @ self.right(x).T


@pytest.mark.soak
def test_the_joint_graph_drops_what_others_drop_and_its_gradient_is_the_slope(
    gpu: FakeGpu,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Masks follow the seed, and agree between forward and backward, as Inductor itself compiles it."""
    torch.manual_seed(0)
    model = Dropping().double()
    options = {**PROGRAM, **AT_ONCE, "inductor.max_autotune": False}
    frozen = torch.optim.SGD(model.parameters(), lr=0.0)
    step = compile_step(model, loss_fn, frozen, microbatches=2, options=options)
    batch = torch.randn(32, 16, dtype=torch.float64)
    for _ in range(MOST):
        step(batch)
        if step.tuners and step.tuners[0].is_settled and not step.tuners[0].is_more_to_come:
            break

    def take(variant: Variant, seed: int) -> tuple[float, list[torch.Tensor]]:
        monkeypatch.setattr(StepTuner, "begin_step", lambda tuner, number: variant)
        torch.manual_seed(seed)
        loss = step(batch).item()
        return loss, [parameter.grad.clone() for parameter in model.parameters()]

    for seed in range(3):
        losses, gradients = zip(*(take(each, seed) for each in (Variant.INDUCTOR, Variant.JOINT)), strict=True)
        assert losses[0] == losses[1]
        torch.testing.assert_close(*gradients)
    weight = model.left[0].weight
    direction, small = torch.randn_like(weight), 1e-5
    along = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(sign * small * direction)
        along.append(take(Variant.JOINT, 3)[0])
        with torch.no_grad():
            weight.sub_(sign * small * direction)
    slope = (take(Variant.JOINT, 3)[1][0] * direction).sum().item()
    assert (along[0] - along[1]) / (2 * small) == pytest.approx(slope, rel=1e-5)
