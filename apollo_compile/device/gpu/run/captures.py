"""The CUDA graphs of one program, each for other addresses of the inputs that it reads in place.

    ProgramCaptures.find(inputs) -> Captured | None
    ProgramCaptures.add(captured)       keeps it in place of the one that was not used for longest
    ProgramCaptures.note(addresses)     whether a run with these addresses is worth a capture

Addresses that change too fast to pay for captures are captured less and less.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from apollo_compile.device.gpu.run.captured import Captured
from apollo_compile.device.gpu.run.memory import ModelMemory

MOST_CAPTURES = 2
"""CUDA graphs of one program that are kept, each for other addresses of the inputs in place."""

FEWEST_REPLAYS = 8
"""Replays of a CUDA graph that make up for its capture, which takes as long as a few runs on lanes."""

Addresses = tuple[int, ...]
"""Addresses of the inputs that can be in place, in the order of their positions."""


class ProgramCaptures:
    """The CUDA graphs of one program, `MOST_CAPTURES` at most, and the addresses of runs that could not replay."""

    def __init__(self, shared: ModelMemory) -> None:
        self._shared = shared
        self._captures: list[Captured] = []
        """The one that was used last first."""
        self._num_runs: dict[Addresses, int] = {}
        """Number of runs that could not replay, by addresses, for the latest few addresses, most recent last."""
        self._patience = 1
        """Number of such runs with the same addresses before one of them is captured."""

    def __iter__(self) -> Iterator[Captured]:
        return (each for each in self._captures if each.is_live)

    @property
    def latest(self) -> Captured | None:
        """The CUDA graph that was used last; None if there is none."""
        return next(iter(self), None)

    def find(self, inputs: list[torch.Tensor]) -> Captured | None:
        """Return the CUDA graph that reads these inputs, and put it first; of a backward, that of the last forward."""
        self._captures = list(self)
        for place, captured in enumerate(self._captures):
            if captured.reads(inputs) and (captured.forward is None or captured.forward is self._shared.contents):
                self._captures.insert(0, self._captures.pop(place))
                return captured
        return None

    def make_place(self) -> None:
        """Release the CUDA graph that was not used for longest, if there are as many as may be."""
        while len(self._captures) >= MOST_CAPTURES:
            oldest = self._captures.pop()
            self._num_runs.pop(tuple(oldest.addresses.values()), None)
            if oldest.num_replays < FEWEST_REPLAYS:
                self._patience *= 2
            oldest.release()

    def note(self, addresses: Addresses, *, head_start: bool) -> bool:
        """Count a run with these addresses that could not replay, and return whether it is worth a capture.

        Arguments:
            addresses: those of the run.
            head_start: count one run more, since the addresses are known to stay.
        """
        before = self._num_runs.pop(addresses, 0)
        self._num_runs[addresses] = before + 1
        if len(self._num_runs) > MOST_CAPTURES:
            del self._num_runs[next(iter(self._num_runs))]
        return before + head_start >= self._patience or not addresses

    def add(self, captured: Captured) -> None:
        """Put a CUDA graph first, also in the memory of the model."""
        self._captures.insert(0, captured)
        self._shared.add(captured)

    def release(self) -> None:
        """Release all CUDA graphs of the program."""
        for captured in self._captures:
            self._shared.drop(captured)
        self._captures.clear()
