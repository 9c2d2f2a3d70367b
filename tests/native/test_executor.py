"""The native runtime, driven from Python with torch tensors; runtime/tests has what needs neither."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch

from apollo_compile import _native
from apollo_compile.errors import InvariantError
from tests.native.runner import JOIN, Runner, Tensors, take


def add_one(tensors: Tensors) -> Tensors:
    """Return the tensor plus one."""
    return [tensors[0] + 1]


def add(tensors: Tensors) -> Tensors:
    """Return the sum."""
    return [tensors[0] + tensors[1]]


def fail(tensors: Tensors) -> Tensors:
    """Raise ValueError."""
    raise ValueError("no")


def test_segments_on_several_lanes_compute_what_torch_computes(lanes: _native.Lanes) -> None:
    """Two threads work for the caller, again and again."""
    run = Runner(lanes, JOIN, [add_one, add_one, add], outputs=[3])
    for step in range(200):
        (result,) = run(torch.full((3,), float(step)))
        assert result.tolist() == [2 * step + 2] * 3


def test_an_input_that_is_returned_is_the_same_object(lanes: _native.Lanes) -> None:
    """Handles carry the identity of tensors through the runtime."""
    run = Runner(lanes, ["", "", ""], [], outputs=[0, -1, 0])
    tensor = torch.ones(3)
    first, nothing, second = run(tensor)
    assert first is second is tensor and nothing is None


def test_a_buffer_dies_inside_the_body_that_took_it_or_where_it_is_released(lanes: _native.Lanes) -> None:
    """The body has the only reference, so that dropping it frees the memory; a lent buffer lives on until then."""
    seen: list[weakref.ref[Any]] = []

    def is_dead_when_dropped(tensors: Tensors) -> Tensors:
        alive = weakref.ref(tensors[0])
        tensors.clear()
        return [torch.tensor(alive() is None)]

    def make(tensors: Tensors) -> Tensors:
        tensors[0] = tensors[0] + 1
        seen.append(weakref.ref(tensors[0]))
        return tensors

    def is_dead(tensors: Tensors) -> Tensors:
        return [torch.tensor(seen[0]() is None)]

    taken, released = "0: 0 -> 1; 1: 1 -> 2; 2: 1! -> 3", "3: 0 -> 4; 4: 0 -> 5; release 4; 5: 0 -> 6"
    bodies = [add_one, is_dead_when_dropped, is_dead_when_dropped, make, is_dead, is_dead]
    run = Runner(lanes, [f"{taken}; {released}", "", ""], bodies, outputs=[2, 3, 5, 6])
    assert [bool(output) for output in run(torch.ones(3)) if output is not None] == [False, True, False, True]


def test_nothing_that_crossed_a_run_is_kept(lanes: _native.Lanes) -> None:
    """After a run the executor holds no tensor, whether it succeeded or failed."""
    for last in (add, fail):
        run = Runner(lanes, JOIN, [add_one, add_one, last], outputs=[3])
        tensor = torch.ones(3)
        alive = weakref.ref(tensor)
        with contextlib.suppress(ValueError):
            run(tensor)
        del tensor
        gc.collect()
        assert alive() is None


def test_an_exception_comes_out_as_the_same_object(lanes: _native.Lanes) -> None:
    """It keeps type, identity and traceback, and the segment is known."""
    error = KeyError("mine")

    def fail_with_it(tensors: Tensors) -> Tensors:
        raise error

    run = Runner(lanes, JOIN, [add_one, fail_with_it, add], outputs=[3])
    with pytest.raises(KeyError) as caught:
        run(torch.ones(3))
    assert caught.value is error
    assert "fail_with_it" in [entry.name for entry in caught.traceback]
    assert run.native.last_failure == 1
    assert all(span[0] != 2 for span in run.native.spans())


def test_programs_bodies_and_inputs_that_do_not_fit_are_errors(lanes: _native.Lanes) -> None:
    """The message has the numbers, or says what is wanted, or what is wrong and where."""

    def unwrapped(body: Any) -> Runner:
        return Runner(lanes, ["0: 0! -> 1", "", ""], [body], outputs=[1], wrap=lambda body: body)

    twice, once = (Runner(lanes, ["0: 0 -> 1", "", ""], [lambda t, n=n: n * t], outputs=[1]) for n in (2, 1))
    with pytest.raises(ValueError, match="returned 2 tensors instead of 1"):
        twice(torch.ones(3))
    with pytest.raises(TypeError, match="unnamed capsules"):
        once.native.run([1])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="takes 1 inputs and got 0"):
        once()
    with pytest.raises(TypeError, match="a body must be a NativeBody or callable"):
        unwrapped(5)
    with pytest.raises(TypeError, match="tensors must come as a list of capsules"):
        unwrapped(lambda handles: len(take(handles)))(torch.ones(3))
    with pytest.raises(InvariantError, match=r"in a circle.*lane 1, instruction 0"):
        Runner(lanes, ["", "wait 0; record 1", "wait 1; record 0"], [], outputs=[0])


def test_an_executor_in_a_reference_cycle_is_collected(lanes: _native.Lanes) -> None:
    """The garbage collector sees through bodies."""

    class Owner:
        def __init__(self) -> None:
            self.run = Runner(lanes, ["0: 0 -> 1", "", ""], [self.copy], outputs=[1])

        def copy(self, tensors: Tensors) -> Tensors:
            return tensors

    owner = Owner()
    owner.run(torch.ones(3))
    is_alive = weakref.ref(owner)
    del owner
    gc.collect()
    assert is_alive() is None


def test_spans_can_be_asked_for_inside_a_run() -> None:
    """By a body, or by a handler of signals: they are those of the run before."""
    seen: list[list[tuple[int, ...]]] = []

    def ask(tensors: Tensors) -> Tensors:
        seen.append(run.native.spans())
        assert (run.native.duration_ns > 0) == (len(seen) > 2)
        return [tensors[0] + 1]

    cores = [[], [_native.available_cores()[0]]]
    run = Runner(_native.Lanes(cores), ["0: 0 -> 1; record 0", "wait 0; 1: 1 -> 2"], [ask, ask], outputs=[2])
    for _ in range(2):
        run(torch.ones(1))
    assert [len(spans) for spans in seen] == [0, 0, 2, 2]
    assert seen[2] == seen[3] != run.native.spans()
