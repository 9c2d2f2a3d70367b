"""CUDA graphs that are kept, replaced and released: addresses that change, too little memory, captures that break."""

from __future__ import annotations

import pytest
import torch

from apollo_compile.device.gpu.run.captures import MOST_CAPTURES
from apollo_compile.device.gpu.run.gpu import Sharing
from tests.device.gpu.fake_gpu import FakeGpu, FakeRecording
from tests.device.gpu.run.test_execute import count, counts, expected, make_pair, run, step, two_towers


def live(gpu: FakeGpu) -> list[FakeRecording]:
    """Return the recordings that can still be replayed."""
    return [each.recording for each in gpu.captures]  # type: ignore[misc]


def test_parameters_that_move_back_and_forth_have_a_graph_at_either_place(gpu: FakeGpu) -> None:
    """As averaged weights that are swapped in, for a while or for every second step, where they never stay for two."""
    weights = torch.randn(4), torch.randn(4)
    for first, launched in ((4, 3), (1, 2)):
        executable = two_towers(gpu)
        for weight in weights:
            run(executable, weight, first)
        for _ in range(7):
            for weight in weights:
                run(executable, weight)
        assert counts(executable)[:2] == (launched, 2)


def test_a_third_place_replaces_the_one_that_was_not_used_for_longest(gpu: FakeGpu) -> None:
    """Its memory is released then, and that of the graph that is used goes on."""
    executable = two_towers(gpu)
    first, second, third = (torch.randn(4) for _ in range(3))
    run(executable, first, 12)
    run(executable, second, 12)
    run(executable, first)
    run(executable, third, 4)
    assert len(live(gpu)) == MOST_CAPTURES and gpu.recordings[1] not in live(gpu)
    launched = executable.num_launches
    run(executable, first)
    assert executable.num_launches == launched
    run(executable, second)
    assert executable.num_launches == launched + 1


def test_parameters_that_move_on_and_on_are_captured_less_and_less(gpu: FakeGpu) -> None:
    """A capture takes as long as a few runs on lanes, so each has to be worth it."""
    executable, places = two_towers(gpu), [torch.randn(4) for _ in range(60)]
    for weight in places:
        run(executable, weight, 3)
    assert executable.num_captures == MOST_CAPTURES + 2 and len(live(gpu)) == MOST_CAPTURES
    run(executable, torch.randn(4), 12)
    assert executable.num_captures == MOST_CAPTURES + 3 and gpu.recordings[-1].num_replays == 8


def test_a_backward_goes_with_its_forward(gpu: FakeGpu) -> None:
    """It reads what that saved, whose memory is used for other things now."""
    forward, backward = make_pair(gpu)
    for weight in [torch.randn(4) for _ in range(3)]:
        step((forward, backward), weight, times=12)
    assert (forward.num_captures, backward.num_captures) == (3, 3)
    assert sorted(map(id, live(gpu))) == sorted(map(id, gpu.recordings[2:]))


def test_released_graphs_leave_no_tensors_behind(gpu: FakeGpu, weight: torch.Tensor) -> None:
    """But for those that the caller holds."""
    forward, backward = make_pair(gpu)
    step((forward, backward), weight, times=4)
    captured = list(gpu.captures)
    kept = forward.run([torch.ones(4), weight])[1]
    forward.release()
    assert all(not each.kept.viewed and not each.copied_in and each.recording is None for each in captured)
    assert torch.equal(kept, weight) and live(gpu) == []
    step((forward, backward), weight)


def test_too_little_memory_for_a_capture_ends_captures_of_the_model_alone(
    gpu: FakeGpu, weight: torch.Tensor, info_log: pytest.LogCaptureFixture
) -> None:
    """Of both of its graphs, with what they had captured; the run itself goes on, and the caller can ask."""
    other, other_weight = two_towers(gpu), torch.randn(4)
    run(other, other_weight, 4)
    pair = forward, backward = make_pair(gpu)
    step(pair, weight, times=2)
    _, kept = forward.run([torch.ones(4), weight])
    gpu.fail_capture = torch.OutOfMemoryError("CUDA out of memory")
    gradient = backward.run([kept, weight, torch.ones(4)])[0]
    assert torch.equal(gradient, weight * weight)
    del kept, gradient
    step(pair, weight, times=3)
    assert [record.message for record in info_log.records] == [
        "test runs on lanes without a CUDA graph: OutOfMemoryError: CUDA out of memory"
    ]
    assert backward.capture_error == "OutOfMemoryError: CUDA out of memory"
    assert forward.shared.out_of_memory == backward.capture_error
    assert not forward.may_capture and not backward.may_capture and other.may_capture
    assert live(gpu) == gpu.recordings[:1] and ("give back memory",) in gpu.log
    assert counts(forward)[1:] == (1, 1) and counts(backward)[1:] == (1, 0)
    launched = other.num_launches
    run(other, other_weight)
    assert other.num_launches == launched


def test_a_run_that_finds_no_memory_on_lanes_gets_that_of_cuda_graphs(gpu: FakeGpu, weight: torch.Tensor) -> None:
    """Training goes on, more slowly; a run that writes to its inputs is not repeated."""
    state = {"fails": False}

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if state["fails"]:
            state["fails"] = False
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x * weight

    for written in ((), (1,)):
        executable = two_towers(gpu, product, torch.sin, torch.add, written=written)
        run(executable, weight, 4)
        gpu.free, state["fails"] = 20, True
        x, moved = torch.randn(4), torch.randn(4)
        if written:
            with pytest.raises(torch.OutOfMemoryError):
                executable.run([x, moved])
        else:
            assert all(map(torch.equal, executable.run([x, moved]), expected(x, moved)))
            assert live(gpu) == []
        gpu.free = 1 << 40
    state["fails"] = True
    fresh = two_towers(FakeGpu(units=2), product, torch.sin, torch.add)
    with pytest.raises(torch.OutOfMemoryError):
        fresh.run([torch.randn(4), weight])


def test_a_device_that_is_turned_off_launches_and_says_so_once(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    """Every CUDA graph on it is released, and none is captured any more, however lanes share it."""
    executables = [two_towers(gpu), two_towers(gpu.sharing(Sharing.FREE))]
    weight = torch.randn(4)
    for executable in executables:
        run(executable, weight, 4)
    assert len(list(gpu.captures)) == 2
    gpu.captures.turn_off("a capture failed")
    gpu.captures.turn_off("another capture failed")
    assert [record.message for record in caplog.records] == [
        "lanes are off for the rest of this process: a capture failed"
    ]
    assert live(gpu) == []
    for executable in executables:
        assert not executable.may_capture
        run(executable, weight, 4)
        assert counts(executable) == (6, 1, 2)


def test_a_rehearsal_changes_nothing_that_anybody_sees(gpu: FakeGpu) -> None:
    """No input, and no random number; it runs on the streams of the capture, right before it."""
    executable, counter = two_towers(gpu, count, torch.sin, torch.add, static=(), written=(1,)), torch.zeros(4)
    torch.manual_seed(2)
    drawn = []
    for number in range(1, 5):
        x = torch.randn(4)
        drawn.append((x, executable.run([x, counter])[0]))
        assert torch.equal(counter, torch.full((4,), float(number)))
    torch.manual_seed(2)
    for x, out in drawn:
        assert torch.equal(x, torch.randn(4))
        torch.testing.assert_close(out, x * torch.rand(4) + x.sin())
    begin, end = gpu.log.index(("rehearse",)), gpu.log.index(("capture",))
    launched = [on for what, *on in gpu.log[begin:end] if what == "launch"]
    assert launched == [["lane 1"], ["lane 2"], ["lane 1"]] and not gpu.races


def test_what_cannot_be_captured_is_told_before_it_is_tried(
    gpu: FakeGpu, weight: torch.Tensor, info_log: pytest.LogCaptureFixture
) -> None:
    """Say by how much buffers do not fit, or, after a rehearsal, that a body waits for the device."""
    runs = iter(range(100))

    def wait(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if next(runs) == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        return x * weight

    for free, body, omitted, reason in (
        (20, torch.mul, "rehearse", "of test needs 300 B for its buffers, and 20 B are free; use a smaller batch"),
        (1 << 40, wait, "capture", "without a CUDA graph: RuntimeError: called a synchronizing CUDA operation"),
    ):
        gpu.free = free
        executable = two_towers(gpu, body, torch.sin, torch.add)
        run(executable, weight, 5)
        assert counts(executable) == (5, 1, 0) and (omitted,) not in gpu.log and reason in info_log.text
