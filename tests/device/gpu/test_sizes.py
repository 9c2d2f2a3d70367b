"""Graphs on a GPU whose sizes change: a CUDA graph for each set of sizes that comes often, on the stand-in."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import nn

from apollo_compile.ir import Variant
from apollo_compile.session.contest.sizes import FIRST_PATIENCE, MOST_SIZES, OftenSizes
from apollo_compile.tools.report import report
from tests.device.gpu.test_default import COMPILED, ENOUGH, EVEN, WHOLE, Chain, Default, S, interpret_plainly

FASTER = {**EVEN, WHOLE: 8 * S}


@pytest.fixture(autouse=True)
def _without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_plainly(monkeypatch)


class Lengths:
    """A training loop over sequences of several lengths beside the same in eager; a step takes as long as they are."""

    def __init__(self, default: Default, build: Callable[[], nn.Module] = Chain) -> None:
        torch.manual_seed(0)
        self.default = default
        self.eager = build().double()
        self.model = copy.deepcopy(self.eager)
        self._run = torch.compile(self.model, backend=default)
        self._optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (self.eager, self.model)]
        self.ran: list[Variant] = []
        for length in (3, 4):  # the second makes it a size that changes
            self.step(length)
        self.ran.clear()

    def step(self, length: int, times: Mapping[Variant, int] = EVEN) -> None:
        """Train one step."""
        x = torch.randn(length, 8, dtype=torch.float64)
        losses = []
        for call, optimizer in zip((self.eager, self._run), self._optimizers, strict=True):
            loss = call(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-7, atol=1e-9)
        challenge = self.default.models[-1].challenge
        self.ran.append(COMPILED if challenge is None else challenge.variant)
        self.default.clock.now += times[self.ran[-1]] * length // 8

    def settle(self, lengths: Iterator[int], times: Mapping[Variant, int]) -> None:
        """Train until nothing is being decided."""
        for length in itertools.islice(lengths, ENOUGH):
            self.step(length, times)
            if self.is_settled:
                return
        raise AssertionError(f"not settled: {self.state}")

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being decided about the graph of all lengths."""
        return not self.state.startswith("measuring")

    @property
    def state(self) -> str:
        """The first line of its report."""
        state = self.default.models[-1].state()
        return f"{state.stage}: {state.detail}"

    @property
    def num_captures(self) -> int:
        """Captures until now."""
        return self.default.gpu.log.count(("capture",))


def of(*lengths: int) -> Iterator[int]:
    """Return these lengths in random order, for ever."""
    rng = random.Random(0)
    return (rng.choice(lengths) for _ in itertools.count())


class Counting(nn.Module):
    """A model that writes to its buffers, and whose backward needs the length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Chain(), nn.BatchNorm1d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` after all layers, over its length."""
        return (self.layers(x).reshape(-1, 4) / x.shape[0]).sigmoid().reshape(x.shape)


def test_lengths_that_come_often_are_replayed_and_others_are_torch_compiles() -> None:
    """By time for as many elements; a new length is captured once it has come often enough."""
    loop = Lengths(Default(), Counting)
    loop.settle(of(4, 6, 9), FASTER)
    assert loop.state.startswith("settled: one CUDA graph, 1.25x as fast as torch.compile; lanes are for sizes that do")
    assert len(loop.default.models) == 2 and not loop.default.gpu.races
    assert "one CUDA graph" in str(report(loop.model)) and "torch.compile" in str(report(loop.model))
    loop.ran.clear()
    for length in (4, 6, 9, 4, 6, 9):
        loop.step(length)
    assert loop.ran == 6 * [WHOLE]
    before, replays = loop.num_captures, loop.default.gpu.log.count(("replay",))
    for length in (4, 6, 9):
        loop.step(length)
    assert loop.num_captures == before and loop.default.gpu.log.count(("replay",)) == replays + 6
    for length in range(20, 40):
        loop.step(length)
    assert loop.num_captures == before and loop.ran[-20:] == 20 * [COMPILED]
    for _ in range(FIRST_PATIENCE + 3):
        loop.step(40)
    assert loop.num_captures == before + 2 and loop.ran[-4:] == 4 * [WHOLE]
    assert not loop.default.gpu.races


def test_lengths_that_differ_in_every_step_are_never_captured() -> None:
    """Nothing is compiled to be compared, and torch.compile stays."""
    loop = Lengths(Default())
    loop.settle(itertools.count(5), FASTER)
    assert loop.state.startswith("settled: torch.compile; its sizes seldom come again")
    assert set(loop.ran) == {COMPILED} and not loop.default.gpu.log


def test_a_mode_with_cuda_graphs_has_one_for_each_size_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled to be compared; one line says why."""
    monkeypatch.setattr("apollo_compile.session.contest.default.replays_cuda_graphs", lambda settings: True)
    loop = Lengths(Default())
    assert loop.state == "falls back: its sizes change, and its mode makes CUDA graphs for each of them"


def test_lanes_at_once_are_for_sizes_that_do_not_change() -> None:
    """With the way out."""
    loop = Lengths(Default(**{"device.cuda_lanes": True}))
    assert loop.state.startswith(
        "falls back: graphs with dynamic shapes run on CPU lanes only; compile with dynamic=False"
    )


def test_what_comes_once_is_not_admitted_and_what_was_not_used_for_longest_is_replaced() -> None:
    """As many sets as may be; each that is new then has to come more often."""
    often = OftenSizes()
    for number in range(MOST_SIZES):
        admitted = [often.admit(number) for _ in range(FIRST_PATIENCE + 1)]
        assert admitted == [False] * (FIRST_PATIENCE - 1) + 2 * [True]
    assert not any(often.admit(number) for number in range(MOST_SIZES, 3 * MOST_SIZES))
    assert often.admit(0), "it was used last, and 1 for longest not"
    assert [often.admit("new") for _ in range(2 * FIRST_PATIENCE)] == [False] * (2 * FIRST_PATIENCE - 1) + [True]
    assert often.admit(0) and not often.admit(1)
