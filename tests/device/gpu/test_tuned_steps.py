"""Whole steps with code that Inductor tunes, on the stand-in for the GPU."""

from __future__ import annotations

import logging

import pytest

from apollo_compile.ir import Variant
from apollo_compile.tools.report import report, status
from tests.device.gpu.fake_gpu import FakeGpu
from tests.device.gpu.test_steps import Pair, adamw, gpu, races_of, sgd, units  # noqa: F401  (fixtures)
from tests.device.gpu.test_tuned import Inductor, inductor  # noqa: F401

AT_ONCE = {"plan.autotune": True, "runtime.bodies": "native", "plan.compile_share": 1e9}
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
    settle(pair)
    (tuner,) = pair.run.tuners
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
    assert {each.name for each in tuner.verdict.standings} == {winner, Variant.TUNED, Variant.TUNED_INDUCTOR}
    assert not races_of(gpu)
    for _ in range(3):
        pair.step()
    assert tuner.is_settled and str(report(pair.run)).startswith(f"settled: {tuner.current}")


def test_code_that_is_not_faster_leaves_the_winner(
    gpu: FakeGpu,  # noqa: F811
    inductor: Inductor,  # noqa: F811
) -> None:
    """By times of the device nothing tuned promises more; so nothing is linked of it, for any number of steps."""
    inductor.is_quick = lambda name: False
    pair = Pair(gpu, sgd, **AT_ONCE)
    settle(pair)
    (tuner,) = pair.run.tuners
    winner = tuner.current
    for _ in range(8):
        pair.step()
        assert tuner.is_settled and tuner.verdict.winner == winner
    assert inductor.tuned and not {Variant.TUNED, Variant.TUNED_INDUCTOR} & set(tuner.program.variants.loaded())


def test_tuning_that_fails_leaves_the_winner(
    gpu: FakeGpu,  # noqa: F811
    inductor: Inductor,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With one WARNING."""
    inductor.failure = RuntimeError("no kernel is valid")
    pair = Pair(gpu, **{**AT_ONCE, "debug.strict": False})
    settle(pair)
    (tuner,) = pair.run.tuners
    for _ in range(8):
        pair.step()
    assert tuner.is_settled and not inductor.tuned
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [line.partition(": ")[2] for line in warned] == ["its code is not tuned: RuntimeError: no kernel is valid"]
