"""The door of these tests: every variant that a step offers takes its steps in turn, instead of the fastest."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from apollo_compile.ir import Variant
from apollo_compile.session.step.tuning import StepTuner
from apollo_compile.torch_bridge import traced_step


class Turns:
    """Which variants took steps.

    A `StepTuner` selects what a step begins with, and is told when that has taken it. So nothing but these two methods
    is replaced, and a step that had to be a loop is not counted for what was selected.
    """

    def __init__(self) -> None:
        self.num_steps: Counter[str] = Counter()
        """Steps that each variant took."""
        self.latest: list[str] = []
        """What took the latest steps; the reader clears it."""
        self._asked: weakref.WeakKeyDictionary[StepTuner, int] = weakref.WeakKeyDictionary()
        """How often each tuner was asked."""
        self._selected: weakref.WeakKeyDictionary[StepTuner, Variant] = weakref.WeakKeyDictionary()
        self._taken: weakref.WeakKeyDictionary[StepTuner, set[Variant]] = weakref.WeakKeyDictionary()

    def begin_step(self, tuner: StepTuner) -> Variant:
        """Select the next variant of a step."""
        asked, offered = self._asked.get(tuner, 0), offers(tuner)
        self._asked[tuner] = asked + 1
        num_rounds = asked // len(
            offered
        )  # each begins with another variant, so that none meets the same changes always
        selected = offered[(asked + num_rounds) % len(offered)]
        prepare = tuner._tuner._candidates._all[selected].prepare
        if prepare is not None and selected not in tuner.program.variants.loaded():
            prepare()
        self._selected[tuner] = tuner._tuner.current = selected
        return selected

    def record(self, tuner: StepTuner) -> None:
        """Note that what was selected has taken the step."""
        self._taken.setdefault(tuner, set()).add(self._selected[tuner])
        self.num_steps[str(self._selected[tuner])] += 1
        self.latest.append(str(self._selected[tuner]))

    def missing(self, tuner: StepTuner) -> Sequence[str]:
        """Return what a step offers and has never taken one."""
        return [str(variant) for variant in offers(tuner) if variant not in self._taken.get(tuner, set())]

    @property
    def has_left_the_loop(self) -> bool:
        """Whether anything but a loop took a step."""
        return bool(self.num_steps.keys() - {str(Variant.LOOP)})


def offers(tuner: StepTuner) -> Sequence[Variant]:
    """Return all variants that a step can take now."""
    return [variant for variant in Variant if variant in tuner._tuner._candidates._all]


def take_turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """Let variants take turns until the end of a test."""
    turns = Turns()
    monkeypatch.setattr(StepTuner, "begin_step", lambda tuner, number: turns.begin_step(tuner))
    monkeypatch.setattr(StepTuner, "record", lambda tuner, ns: turns.record(tuner))
    return turns


def compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let AOTAutograd alone make the traced step, as it does the segments of eager bodies."""
    compile_apart: Callable[..., Any] = traced_step.compile_apart

    def trace(function: Callable[..., Any], *, backend: Any, **settings: Any) -> Callable[..., Any]:
        made: Callable[..., Any] = compile_apart(function, backend="aot_eager", **settings)
        return made

    monkeypatch.setattr(traced_step, "compile_apart", trace)
