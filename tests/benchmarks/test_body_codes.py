"""What other code for bodies is said to be worth."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from benchmarks.body_codes import NATIVE, BodyTimes, Code, even_out, find_gains, main, measure_codes
from benchmarks.workloads import Workload

NAMES = (NATIVE, "python", "eager", "narrow")


def _body(**times: list[float]) -> BodyTimes:
    return BodyTimes(graph="0/0 forward", segment="tower", num_segments=1, times=times)


def test_a_gain_is_that_of_the_bodies_which_another_code_makes_faster() -> None:
    """10 ms become 6, and 10 ms stay: of 20, 4 are gained."""
    bodies = [_body(native=[10] * 8, eager=[6] * 8), _body(native=[10] * 8, eager=[13] * 8)]
    assert find_gains(bodies) == pytest.approx((0.2, 0.2))


def test_luck_is_no_gain() -> None:
    """Four kinds of code that take the same time but for noise: the least of four medians is no gain."""
    rng = random.Random(0)
    bodies = [_body(**{name: [rng.gauss(10, 1) for _ in range(20)] for name in NAMES}) for _ in range(200)]
    luckiest = sum(min(body.median(name) for name in NAMES) for body in bodies)
    assert 1 - luckiest / sum(body.median(NATIVE) for body in bodies) > 0.02
    assert find_gains(bodies) == pytest.approx((0, 0), abs=0.01)


def test_what_was_faster_in_one_half_only_shows_in_the_other() -> None:
    """Rounds belong to the halves in pairs, so that both have rounds in either order."""
    bodies = [_body(native=[10] * 8, eager=[8, 8, 14, 14] * 2)]
    assert find_gains(bodies) == pytest.approx((-0.4, 0.0))


def test_rounds_in_which_the_machine_was_slower_count_as_the_others() -> None:
    """From the middle on everything takes 1.5 times as long, and one kind got one slow round more than the others."""
    slow = [1.0] * 9 + [1.5] * 11
    late = [1.0] * 10 + [1.5] * 10
    bodies = [
        _body(native=[size * each for each in late], **{n: [size * e for e in slow] for n in NAMES[1:]})
        for size in (10, 30)
    ]
    assert bodies[0].median("eager") / bodies[0].median(NATIVE) == pytest.approx(1.2)
    evened = even_out(bodies)
    for body in evened:
        for name in NAMES:
            assert body.median(name) / body.median(NATIVE) == pytest.approx(1.0)
    assert find_gains(evened) == pytest.approx((0, 0))


def test_too_few_rounds_are_refused_before_anything_is_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    """There would be nothing to measure what was chosen."""
    with pytest.raises(ValueError, match="3 rounds cannot be halved, 4 can"):
        find_gains([_body(native=[1, 2, 3])])
    with pytest.raises(SystemExit):
        main(["--rounds", "3"])
    assert "at least 4 rounds" in capsys.readouterr().err


class Halves(nn.Module):
    """Two layers with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of `x`."""
        between = self.first(x).sin()
        torch._dynamo.graph_break()
        return self.second(between)


def test_every_body_of_a_step_is_timed_in_every_round() -> None:
    """With graph breaks, each kind of code has several entries among the few that Dynamo allows of a function."""
    names = [f"eager {number}" for number in range(5)]
    codes = [Code(name=name, options={"runtime.bodies": "eager"}) for name in names]
    inputs = {"x": torch.ones(4, 8)}
    workload = Workload(name="halves", model=Halves(), inputs=inputs, loss=torch.Tensor.sum, branches=())
    bodies = measure_codes(workload, codes, rounds=2)
    assert len({body.graph for body in bodies}) > 2
    assert len({(body.graph, body.segment) for body in bodies}) == len(bodies)
    for body in bodies:
        assert list(body.times) == names
        assert all(len(found) == 2 and min(found) > 0 for found in body.times.values())
