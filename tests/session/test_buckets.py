"""Plans by bucket of sizes: which one a call runs on, what is planned when, and what is kept."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apollo_compile.session import buckets
from apollo_compile.session.buckets import FIRST_PATIENCE, MAX_BUCKETS, GraphFamily, bucket_of, in_background
from apollo_compile.torch_bridge.boundary import Boundary

BOUNDARY = Boundary(
    objects=(),
    returned=(),
    numbers=(0, 2),
    symbols=(("s0", 0), ("s1", 2)),
    traced=(4, 4),
    computed=((1, lambda first, second: first * second),),
)
"""Takes a size, a tensor, a size; returns a tensor and the product of the sizes."""


class Recorder:
    """A graph that notes its calls."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.calls: list[str] = []

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        return self._note("own", inputs)

    def run_once(self, inputs: list[Any]) -> Sequence[Any]:
        return self._note("stand-in", inputs)

    def _note(self, kind: str, inputs: list[Any]) -> Sequence[Any]:
        assert all(isinstance(item, torch.Tensor) for item in inputs)
        self.calls.append(kind)
        return [inputs[1] * inputs[0] * inputs[2], None]


class Maker:
    """Makes graphs, as the family asks for them."""

    def __init__(self) -> None:
        self.made: list[Recorder] = []
        self.dropped: list[Recorder] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False

    def __call__(self, sizes: Mapping[str, int]) -> Recorder:
        assert self.gate.wait(60)
        if self.fails:
            raise ValueError("no plan for this")
        self.made.append(Recorder(sizes))
        return self.made[-1]


def family(
    maker: Maker, *, is_strict: bool = False, symbols: Sequence[str] = ("s0", "s1")
) -> tuple[GraphFamily[Recorder], Recorder]:
    """Return the plans of one graph, and the first of them."""
    first = Recorder({"s0": 4, "s1": 4})
    made = GraphFamily(
        name="0/0 forward",
        boundary=BOUNDARY,
        symbols=symbols,
        sizes=first.sizes,
        first=first,
        make=maker,
        drop=maker.dropped.append,
        is_strict=is_strict,
    )
    return made, first


def call(graphs: GraphFamily[Recorder], first: int, second: int) -> None:
    """Call a family, and check what it returns."""
    product, size = graphs([first, torch.ones(3), second])
    assert torch.equal(product, torch.full((3,), float(first * second)))
    assert size == first * second and isinstance(size, int)


def insist(graphs: GraphFamily[Recorder], first: int, second: int) -> None:
    """Call a family until it has a plan for these sizes, or knows that there is none."""
    for _ in range(FIRST_PATIENCE):
        call(graphs, first, second)
    wait()


def wait() -> None:
    """Return when all that was to be planned is planned."""
    in_background(lambda: None).result(60)


@given(st.integers(1, 2**40))
def test_a_bucket_is_an_eighth_to_a_quarter_wide(size: int) -> None:
    """It has its own largest size, and all sizes between two buckets are in the larger one."""
    top = bucket_of(size)
    assert size <= top < max(size + 1, 1.25 * size)
    assert bucket_of(top) == top
    assert bucket_of(size + 1) in (top, bucket_of(top + 1))
    assert bucket_of(-size) == top


def test_sizes_of_one_bucket_share_a_plan() -> None:
    """Nothing is planned for them."""
    maker = Maker()
    graphs, first = family(maker)
    for sizes in ((4, 4), (4, 4)):
        call(graphs, *sizes)
    wait()
    assert first.calls == ["own", "own"]
    assert maker.made == []


def test_a_new_bucket_runs_on_the_nearest_plan_until_it_has_its_own() -> None:
    """No call waits for a plan."""
    maker = Maker()
    graphs, first = family(maker)
    maker.gate.clear()
    call(graphs, 64, 64)
    wait()
    assert maker.made == []  # once is not enough
    call(graphs, 60, 60)
    call(graphs, 60, 60)
    assert first.calls == ["stand-in"] * 3
    maker.gate.set()
    wait()
    call(graphs, 63, 57)
    assert [made.sizes for made in maker.made] == [{"s0": 60, "s1": 60}]
    assert maker.made[0].calls == ["own"]
    call(graphs, 70, 64)
    assert maker.made[0].calls == ["own", "stand-in"]
    call(graphs, 4, 4)
    assert first.calls[-1] == "own"


def test_one_bucket_is_planned_at_a_time() -> None:
    """What else is new has its turn when it is called again."""
    maker = Maker()
    graphs, _ = family(maker)
    maker.gate.clear()
    for size in (16, 32, 64) * FIRST_PATIENCE:
        call(graphs, size, 4)
    maker.gate.set()
    wait()
    assert [made.sizes["s0"] for made in maker.made] == [16]
    call(graphs, 64, 4)
    wait()
    assert [made.sizes["s0"] for made in maker.made] == [16, 64]


def test_what_was_not_used_for_longest_makes_room() -> None:
    """The number of plans is bounded; a bucket that was dropped is planned anew."""
    maker = Maker()
    graphs, first = family(maker)
    for size in range(1, MAX_BUCKETS):
        insist(graphs, 4, 2**size * 8)
        call(graphs, 4, 4)
    assert len(graphs.buckets) == MAX_BUCKETS
    assert maker.dropped == []
    insist(graphs, 8, 8)
    assert maker.dropped == maker.made[:1]
    assert len(graphs.buckets) == MAX_BUCKETS
    assert first in graphs.buckets.values()
    insist(graphs, 4, 16)
    assert maker.made[-1].sizes == {"s0": 8, "s1": 8}  # it takes longer now
    insist(graphs, 4, 16)
    assert maker.made[-1].sizes == {"s0": 4, "s1": 16}


def test_great_variety_is_planned_less_and_less() -> None:
    """Every size is new: for as many plans as are kept, twice as many calls are needed every time."""
    maker = Maker()
    graphs, _ = family(maker)
    made = []
    for calls in (2, 4, 8):
        before = len(maker.made)
        for number in range(4 * MAX_BUCKETS):
            for _ in range(calls):
                call(graphs, 2 ** (number % 8), 2 ** (number // 8 + calls + 8))
            wait()
        made.append(len(maker.made) - before)
    assert made == [MAX_BUCKETS] * 3


def test_only_symbols_on_which_plans_depend_make_buckets() -> None:
    """A number that is only added, as the step of a schedule, needs no plan."""
    maker = Maker()
    graphs, first = family(maker, symbols=("s1",))
    for number in range(40):
        call(graphs, 100 + number, 4)
    wait()
    assert maker.made == []
    assert first.calls == ["own"] * 40


def test_nothing_is_planned_when_the_program_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is still at it runs on the plans there are."""

    def refuse() -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(buckets, "_planner", refuse)
    maker = Maker()
    graphs, first = family(maker, is_strict=True)
    for _ in range(5):
        call(graphs, 64, 64)
    assert first.calls == ["stand-in"] * 5


def test_sizes_are_on_the_cpu_whatever_the_default_device_is() -> None:
    """The bodies read them there."""
    graphs, _ = family(Maker())
    tensor = torch.ones(3)
    with torch.device("meta"):
        product, _ = graphs([4, tensor, 4])
    assert product.device.type == "cpu"


def test_a_plan_that_cannot_be_made_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Its bucket runs on its neighbour's plan, which is dropped when no bucket has it any more."""
    maker = Maker()
    graphs, first = family(maker)
    maker.fails = True
    with caplog.at_level(logging.WARNING, logger="apollo_compile"):
        for _ in range(3):
            insist(graphs, 64, 64)
    assert [record.getMessage() for record in caplog.records] == [
        "0/0 forward has no plan of its own for s0=64, s1=64: ValueError: no plan for this"
    ]
    assert first.calls == ["stand-in"] * 2 + ["own"] * 4


def test_strict_raises_what_went_wrong() -> None:
    """In the call after it."""
    maker = Maker()
    graphs, _ = family(maker, is_strict=True)
    maker.fails = True
    insist(graphs, 64, 64)
    with pytest.raises(ValueError, match="no plan for this"):
        call(graphs, 64, 64)


def test_calls_from_many_threads() -> None:
    """Every one returns what it should, whichever plan is there."""
    maker = Maker()
    graphs, _ = family(maker)
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(100):
                call(graphs, 1 + (seed * 37 + step * 11) % 200, 1 + (seed * 5 + step) % 50)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait()
    assert failed == []
    assert len(graphs.buckets) <= MAX_BUCKETS
