"""When rivals of a program may compile, on a clock that the test moves."""

from __future__ import annotations

from apollo_compile.ir import Variant
from apollo_compile.session.compile_budget import CompileBudget
from apollo_compile.session.step.later import LateRivals

STEP_NS, COST_NS = 1_000_000, 20_000_000


class Training:
    """A loop whose steps take `STEP_NS`."""

    def __init__(self, *variants: Variant, share: float = 0.05) -> None:
        self.now_ns = 0
        budget = CompileBudget(lambda: self.now_ns)
        self.rivals = LateRivals(dict.fromkeys(variants, COST_NS), budget=budget, share=share)

    def steps_until_one_compiles(self) -> int:
        """Take steps until a rival may compile; return how many there were before."""
        for number in range(100_000):
            if self.rivals.take_due() is not None:
                return number
            self.now_ns += STEP_NS
        raise AssertionError("none may")


def test_a_rival_compiles_when_that_is_a_small_share_of_the_time() -> None:
    """Twenty times its cost at 5 %; the next one has to earn the time of the first, too."""
    training = Training(Variant.TRACED, Variant.EAGER)
    assert list(training.rivals.awaited) == [Variant.TRACED, Variant.EAGER]
    assert training.steps_until_one_compiles() == 20 * COST_NS // STEP_NS
    assert list(training.rivals.awaited) == [Variant.EAGER]
    training.rivals.spend(3 * COST_NS)  # it took longer than expected
    assert training.steps_until_one_compiles() == 3 * 20 * COST_NS // STEP_NS
    assert not training.rivals.awaited and training.rivals.take_due() is None


def test_a_large_share_compiles_at_once() -> None:
    """As `plan.compile_share` at 1000 does."""
    assert Training(Variant.TRACED, share=1e3).steps_until_one_compiles() == 1


def test_pauses_pay_for_little() -> None:
    """A night in which a notebook waits counts as a minute."""
    training = Training(Variant.TRACED, share=1e-4)
    training.now_ns += 8 * 3600 * 10**9
    assert training.rivals.take_due() is None


def test_a_variant_that_an_earlier_process_has_compared_is_left_out() -> None:
    """By its name in the verdict."""
    training = Training(Variant.TRACED)
    training.rivals.leave_out(["Inductor, traced step", "MIXTURE"])
    assert not training.rivals.awaited
