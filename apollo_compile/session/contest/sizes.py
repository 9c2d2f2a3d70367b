"""Sizes that change: which of them have CUDA graphs of their own, and a whole graph as one program for each.

    StepSizes.admit(arguments) -> bool  whether a step of these sizes may run as CUDA graphs
    SizedWhole(...).run(inputs)         the program for the sizes of its inputs: a `Runnable`

A CUDA graph is for one set of sizes. Inductor's code of a graph with changing sizes is for all of them, so it is
compiled once and captured for each set that comes often. All others are steps of torch.compile's function.

Bounds      `MOST_SIZES` sets have a program; another one replaces that which was not used for longest. A set is
            admitted when it comes for the `FIRST_PATIENCE`-th time, so that what comes once is never captured. That
            number doubles with every `MOST_SIZES` sets that were admitted: lengths that vary widely are captured less
            and less, as buckets on a CPU are planned (`session/buckets.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from apollo_compile.device.target import Contract, Run, Runnable, Unsegmented
from apollo_compile.ir import SegmentGraph
from apollo_compile.torch_bridge.boundary import Boundary

MOST_SIZES = 8
"""Sets of sizes that have programs at a time."""

FIRST_PATIENCE = 2
"""Steps of a set of sizes until it is admitted, for the first `MOST_SIZES` sets."""

COLD_RUNS = 4
"""Runs of a program until it is replayed: two that launch, one that captures, and a replay."""

_MOST_COUNTED = 1024
"""Sets whose steps are counted; beyond that, counts begin anew."""


class OftenSizes:
    """The sets of sizes that come often."""

    def __init__(self) -> None:
        self._admitted: dict[Hashable, None] = {}
        """That which was used last is the last."""
        self._counts: Counter[Hashable] = Counter()
        """Steps of all others."""
        self._num_admitted = 0

    def admit(self, sizes: Hashable) -> bool:
        """Note a step of these sizes; return whether it may be a CUDA graph."""
        if sizes in self._admitted:
            del self._admitted[sizes]
            self._admitted[sizes] = None
            return True
        if len(self._counts) >= _MOST_COUNTED:
            self._counts.clear()
        self._counts[sizes] += 1
        if self._counts[sizes] < FIRST_PATIENCE * 2 ** (self._num_admitted // MOST_SIZES):
            return False
        del self._counts[sizes]
        self._num_admitted += 1
        if len(self._admitted) >= MOST_SIZES:
            del self._admitted[next(iter(self._admitted))]
        self._admitted[sizes] = None
        return True


FEWEST_STEPS = 32
"""Steps until it is known whether sizes come again."""

LEAST_SHARE = 0.25
"""Share of steps with sizes that come often, below which CUDA graphs are not worth a compile."""


class StepSizes:
    """The sizes of steps.

    Arguments:
        places: positions of the arguments that are sizes, or tensors with sizes, that change; none where all steps are
            alike.
    """

    def __init__(self, places: Sequence[int]) -> None:
        self.change = bool(places)
        """Whether they change."""
        self._places = tuple(places)
        self._often = OftenSizes()
        self._num_steps = self._num_often = 0

    @property
    def are_known(self) -> bool:
        """Whether there were enough steps to know whether sizes come again."""
        return not self.change or self._num_steps >= FEWEST_STEPS

    @property
    def are_rare(self) -> bool:
        """Whether most steps have sizes that do not come often."""
        return self.change and self._num_often < LEAST_SHARE * self._num_steps

    def admit(self, arguments: Sequence[Any]) -> bool:
        """Note a step; return whether it may run as CUDA graphs."""
        if not self.change:
            return True
        values = (arguments[place] for place in self._places)
        is_often = self._often.admit(tuple(each.shape if isinstance(each, torch.Tensor) else each for each in values))
        self._num_steps += 1
        self._num_often += is_often
        return is_often

    def num_elements(self, arguments: Sequence[Any]) -> int:
        """Return how large a step is, to compare its time with that of others; 1 where all are alike."""
        values = (arguments[place] for place in self._places)
        return max(1, sum(value.numel() for value in values if isinstance(value, torch.Tensor)))


class SizedWhole(Unsegmented):
    """A whole graph as one program for each set of sizes.

    Arguments:
        boundary: has the positions of the sizes among the inputs, and computes those among the outputs.
        sized: positions of the inputs that are tensors with sizes that change.
        plain: the graph as Inductor compiled it, for all sizes.
        load: makes a program of it for fixed sizes, which takes tensors only.
    """

    def __init__(self, boundary: Boundary, sized: Sequence[int], plain: Run, load: Callable[[Run], Runnable]) -> None:
        self.num_cold_runs = 0
        """Runs of programs that were not replayed yet."""
        self._boundary = boundary
        self._sized = tuple(sized)
        self._plain = plain
        self._load = load
        self._programs: dict[Hashable, Runnable] = {}
        """That which was used last is the last."""
        self._num_forgotten = 0
        """Runs of programs that were replaced."""

    @property
    def num_runs(self) -> int:
        """Number of runs, for all sizes."""
        return self._num_forgotten + sum(program.num_runs for program in self._programs.values())

    def run(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the program for the sizes of these inputs; `inputs` is emptied."""
        numbers = {position: inputs[position] for position in self._boundary.numbers}
        program = self._program_for(numbers, [inputs[position].shape for position in self._sized])
        self.num_cold_runs += program.num_runs < COLD_RUNS
        for position in reversed(self._boundary.numbers):
            del inputs[position]
        return self._boundary.give(program.run(inputs), numbers)

    def _program_for(self, numbers: Mapping[int, int], shapes: Sequence[torch.Size]) -> Runnable:
        sizes = (*numbers.values(), *shapes)
        program = self._programs.pop(sizes, None) or self._load(_with_numbers(self._plain, numbers))
        self._programs[sizes] = program
        if len(self._programs) > MOST_SIZES:
            oldest = self._programs.pop(next(iter(self._programs)))
            self._num_forgotten += oldest.num_runs
            oldest.release()
        return program

    def release(self) -> None:
        """Release the CUDA graphs of all sizes."""
        for program in self._programs.values():
            program.release()


def _with_numbers(run: Run, numbers: Mapping[int, int]) -> Run:
    """Return a function that calls `run` with these numbers among the tensors that it is given."""
    ascending = sorted(numbers.items())

    def call(tensors: list[Any]) -> Sequence[Any]:
        arguments = list(tensors)
        tensors.clear()
        for position, number in ascending:
            arguments.insert(position, number)
        return run(arguments)

    return call


def without_numbers(graph: SegmentGraph, contract: Contract, boundary: Boundary) -> tuple[SegmentGraph, Contract]:
    """Return a graph and its contract without the inputs that are sizes; segments may still read them."""
    gone = set(boundary.numbers)
    kept = [position for position in range(len(graph.inputs)) if position not in gone]
    place = {position: index for index, position in enumerate(kept)}

    def moved(positions: frozenset[int]) -> frozenset[int]:
        return frozenset(place[position] for position in positions - gone)

    written = contract.written_inputs
    return (
        replace(graph, inputs=tuple(graph.inputs[position] for position in kept)),
        replace(
            contract,
            static_inputs=moved(contract.static_inputs),
            written_inputs=None if written is None else moved(written),
        ),
    )
