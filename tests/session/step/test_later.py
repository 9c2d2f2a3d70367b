"""What is compiled late for steps: when, at what cost, and what becomes of failures; on a clock that the test moves."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import Variant
from apollo_compile.session.compile_budget import CompileBudget
from apollo_compile.session.step.later import LateRival, LateVariants

STEP_NS, COST_NS = 1_000_000, 20_000_000


class Clock:
    """Says what it was set to."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class Failing:
    """A compile that fails."""

    variants: Sequence[Variant] = (Variant.TRACED,)
    cost_ns = 0

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def advance(self) -> Sequence[Variant] | None:
        """Fail."""
        raise self._error


def late(clock: Clock, *stages: LateRival | Failing, share: float = 0.05) -> LateVariants:
    """Return what is compiled late, in this order."""
    budget = CompileBudget(clock)
    return LateVariants("0/0 step", stages, budget=budget, share=share, clock=clock, is_strict=False)


def steps_until_something_comes(later: LateVariants, clock: Clock) -> int:
    """Take steps until a variant is to be compared."""
    for number in range(100_000):
        if later.advance():
            return number
        clock.now_ns += STEP_NS
    raise AssertionError("nothing comes")


def test_a_rival_competes_when_its_compile_is_a_small_share_of_the_time() -> None:
    """Twenty times its cost at 5 %; the next one has to earn what the first has taken, too."""
    clock = Clock()
    first, second = LateRival((Variant.TRACED,), COST_NS), LateRival((Variant.EAGER,), COST_NS)
    later = late(clock, first, second)
    assert later.awaited == {Variant.TRACED, Variant.EAGER}
    assert steps_until_something_comes(later, clock) == 20 * COST_NS // STEP_NS
    assert later.awaited == {Variant.EAGER}
    later.spend(3 * COST_NS)  # it took longer than was thought
    assert steps_until_something_comes(later, clock) == 3 * 20 * COST_NS // STEP_NS
    assert not later.is_more_to_come and later.advance() == ()


def test_a_large_share_compares_at_once() -> None:
    """As `plan.compile_share` at 1000 does."""
    clock = Clock()
    assert steps_until_something_comes(late(clock, LateRival((Variant.TRACED,), COST_NS), share=1e3), clock) == 1


def test_what_an_earlier_process_has_compared_is_left_out() -> None:
    """A rival with another one to take its place stays, until both were compared."""
    clock = Clock()
    later = late(clock, LateRival((Variant.TRACED,), 0), LateRival((Variant.EAGER, Variant.LOOP), 0))
    later.leave_out({Variant.TRACED, Variant.EAGER})
    assert later.awaited == {Variant.EAGER, Variant.LOOP}
    assert later.advance() == (Variant.EAGER,)


@pytest.mark.parametrize(
    ("error", "level"), [(ValueError("no"), logging.WARNING), (UnsupportedGraphError("no"), logging.INFO)]
)
def test_a_compile_that_fails_leaves_what_runs(error: Exception, level: int, caplog: pytest.LogCaptureFixture) -> None:
    """One line says why, and the next one is tried."""
    clock = Clock()
    later = late(clock, Failing(error), LateRival((Variant.TRACED,), 0))
    with caplog.at_level(logging.INFO, "apollo_compile"):
        assert later.advance() == ()
        assert later.advance() == (Variant.TRACED,)
    (record,) = caplog.records
    assert record.levelno == level and f"{type(error).__name__}: no" in record.getMessage()


def test_an_interrupt_is_not_met_again() -> None:
    """The compile that it ended is not begun again."""
    later = late(Clock(), Failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        later.advance()
    assert not later.is_more_to_come
