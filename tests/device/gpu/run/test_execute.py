from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apollo_compile.device.gpu.run.execute import WARMUP_RUNS, CudaExecutable
from apollo_compile.device.gpu.run.launch import Launcher
from apollo_compile.device.gpu.run.memory import ModelMemory
from apollo_compile.device.gpu.target import as_one_segment
from apollo_compile.errors import MemoryQuotaError, UnsupportedGraphError
from apollo_compile.ir import Buffer, BufferId, Lane, LaneId, Role, SegmentGraph, SegmentId
from apollo_compile.target.target import CompiledBody, Contract
from tests.builders import graph, in_threads, plan
from tests.device.gpu.arena import SEGMENT_BYTES
from tests.device.gpu.fake_gpu import CALLER, FakeGpu
from tests.device.gpu.run.test_launch import program_of

Tensors = list[torch.Tensor]


def add_input(made: SegmentGraph, reader: int) -> SegmentGraph:
    """Return the graph with one more input, which `reader` reads behind its others."""
    new = BufferId(len(made.buffers))
    buffer = Buffer(id=new, name=f"x{new}", producer=None, readers=(SegmentId(reader),), num_bytes=8, is_output=False)
    segments = tuple(
        replace(segment, inputs=(*segment.inputs, new)) if segment.id == reader else segment
        for segment in made.segments
    )
    return replace(made, segments=segments, buffers=(*made.buffers, buffer), inputs=(*made.inputs, new))


def executable_of(
    made: SegmentGraph,
    letters: str,
    functions: Sequence[Callable[..., Any]],
    gpu: FakeGpu,
    *,
    shared: ModelMemory | None = None,
    contract: Contract | None = None,
    **options: Any,
) -> CudaExecutable:
    """Return a graph on the lanes with these letters, whose bodies are functions of tensors that return one."""

    def body(function: Callable[..., Any]) -> CompiledBody:
        def run(inputs: Tensors) -> Sequence[torch.Tensor]:
            arguments = list(inputs)
            inputs.clear()
            return [function(*arguments)]

        return CompiledBody(function=run)

    return CudaExecutable(
        program=program_of(made, plan(made, letters)),
        graph=made,
        bodies=list(map(body, functions)),
        gpu=gpu,
        contract=contract or Contract(user_outputs=frozenset(range(len(made.outputs)))),
        shared=shared or ModelMemory(),
        **options,
    )


def two_towers(
    gpu: FakeGpu,
    *functions: Callable[..., Any],
    role: Role = Role.FORWARD,
    static: Sequence[int] = (1,),
    written: Sequence[int] | None = (),
    user: Sequence[int] = (0,),
    outputs: Sequence[int] = (2, 0),
    **options: Any,
) -> CudaExecutable:
    """Return segments 0 and 1 on two lanes, which segment 2 joins; input 1 is read by segment 0 too.

    By default output 0, of segment 2, is the user's, and output 1, of segment 0, is kept for a backward.
    """
    made = replace(add_input(graph((), (), (0, 1), outputs=outputs), 0), role=role)
    contract = Contract(
        static_inputs=frozenset(static),
        written_inputs=None if written is None else frozenset(written),
        user_outputs=frozenset(user),
    )
    functions = functions or (torch.mul, torch.sin, torch.add)
    return executable_of(made, "ABA", functions, gpu, contract=contract, **options)


def warm_up(executable: CudaExecutable) -> torch.Tensor:
    """Run up to the first capture; return the parameter."""
    weight = torch.randn(4)
    for _ in range(WARMUP_RUNS):
        executable.run([torch.randn(4), weight])
    return weight


def expected(x: torch.Tensor, weight: torch.Tensor) -> Tensors:
    """Return what `two_towers` computes."""
    return [x * weight + x.sin(), x * weight]


def run(executable: CudaExecutable, weight: torch.Tensor, times: int = 1) -> None:
    """Run so often with that parameter, and check the results."""
    for _ in range(times):
        x = torch.randn(4)
        assert all(map(torch.equal, executable.run([x, weight]), expected(x, weight)))


def counts(executable: CudaExecutable) -> tuple[int, int, int]:
    """Return launches on lanes, captures, replays."""
    return executable.num_launches, executable.num_captures, executable.num_replays


def test_the_first_runs_are_on_lanes_and_later_ones_replay(gpu: FakeGpu, weight: torch.Tensor) -> None:
    """Other inputs at every run; the outputs of a run live as long as that of an eager model."""
    executable = two_towers(gpu)
    results = []
    for step in range(6):
        x = torch.randn(4)
        loss, kept = executable.run([x, weight])
        assert all(map(torch.equal, (loss, kept), expected(x, weight)))
        results.append((loss, x))
        del kept
        num_launches = min(step + 1, WARMUP_RUNS)
        assert counts(executable) == (num_launches, int(step >= WARMUP_RUNS), step + 1 - num_launches)
    for loss, x in results:
        assert torch.equal(loss, expected(x, weight)[0])
    assert not gpu.races


def test_what_was_let_go_is_captured_again_however_often(gpu: FakeGpu) -> None:
    """No input has moved, so that does not count."""
    executable = two_towers(gpu)
    weight = warm_up(executable)
    for number in range(5):
        run(executable, weight)
        assert executable.lane_bytes() and len(gpu.recordings) == number + 1
        executable.release()
        executable.release()
        assert executable.lane_bytes() == {} and executable.shared.forwards == ()
    assert counts(executable) == (WARMUP_RUNS, 5, 5)


def make_pair(
    gpu: FakeGpu,
    *functions: Callable[..., Any],
    outputs: Sequence[int] = (2, 0),
    made: Sequence[int] = (0, 1),
    shared: ModelMemory | None = None,
    **options: Any,
) -> tuple[CudaExecutable, CudaExecutable]:
    """Return a forward that keeps `x * weight`, and its backward, which reads that, the weight and a tangent.

    The forward has `outputs`. One function of the backward takes the first two of its inputs, one the other two; it
    returns what those make.
    """
    shared = shared or ModelMemory()
    forward = two_towers(gpu, outputs=outputs, shared=shared, **options)
    backward_graph = replace(add_input(add_input(graph((), (), outputs=made), 0), 1), role=Role.BACKWARD)
    contract = Contract(static_inputs=frozenset({0, 1}), user_outputs=frozenset({0, 1}))
    functions = functions or (torch.mul, torch.sub)
    return forward, executable_of(backward_graph, "AB", functions, gpu, contract=contract, shared=shared, **options)


def step(pair: tuple[CudaExecutable, CudaExecutable], weight: torch.Tensor, times: int = 1) -> None:
    """Run forward and backward so often, and check the gradients."""
    forward, backward = pair
    for _ in range(times):
        x, tangent = torch.randn(4), torch.randn(4)
        _, kept = forward.run([x, weight])
        first, second = backward.run([kept, weight, tangent])
        assert torch.equal(first, x * weight * weight) and torch.equal(second, x * weight - tangent)
        del kept, first, second


def test_variants_of_a_model_overlay_each_other(gpu: FakeGpu) -> None:
    """Together they take what one of them takes; a forward is not replayed while another's saved tensors are used."""
    pairs = [make_pair(gpu, variant="first")]
    pairs.append(make_pair(gpu, shared=pairs[0][0].shared, variant="second"))
    weight, sizes = torch.randn(4), []
    for pair in (*pairs, *pairs):
        step(pair, weight, times=4)
        sizes.append(sum(segment.num_bytes for segment in gpu.recordings[0].pool.segments))
    assert len(set(sizes)) == 1 and len(gpu.recordings) == 4
    (first, first_back), (second, second_back) = pairs
    x, y, tangent = torch.randn(4), torch.randn(4), torch.randn(4)
    kept, other = first.run([x, weight])[1], second.run([y, weight])[1]
    assert (first.num_launches, second.num_launches) == (2, 3)
    assert torch.equal(second_back.run([other, weight, tangent])[1], y * weight - tangent)
    assert torch.equal(first_back.run([kept, weight, tangent])[1], x * weight - tangent)
    assert (first_back.num_launches, second_back.num_launches) == (2, 3)


def test_a_failed_capture_is_told_once_and_lanes_stay(gpu: FakeGpu, info_log: pytest.LogCaptureFixture) -> None:
    """With `strict`, it is raised."""
    gpu.fail_capture = RuntimeError("operation not permitted when stream is capturing")
    executable = two_towers(gpu)
    run(executable, torch.randn(4), 6)
    assert [record.message for record in info_log.records] == [
        "test runs on lanes without a CUDA graph: RuntimeError: operation not permitted when stream is capturing"
    ]
    assert counts(executable) == (6, 1, 0)
    strict = two_towers(gpu, strict=True)
    weight = warm_up(strict)
    with pytest.raises(RuntimeError, match="not permitted"):
        strict.run([torch.randn(4), weight])


def test_an_operator_that_must_not_be_captured_is_launched_at_every_step(gpu: FakeGpu, weight: torch.Tensor) -> None:
    """It counts its calls; nor is it called to time its body."""
    calls = itertools.count(1)
    executable = two_towers(gpu, lambda x, weight: torch.full((4,), float(next(calls))), torch.sin, torch.add)
    executable = replace(executable, contract=replace(executable.contract, unsafe="mine::count"), num_launches=0)
    for number in range(1, 6):
        x = torch.randn(4)
        out, _ = executable.run([x, weight])
        assert torch.equal(out, number + x.sin())
    with pytest.raises(UnsupportedGraphError, match="test has mine::count, which no CUDA graph may hold"):
        executable.measure([x, weight])
    assert counts(executable) == (5, 0, 0)


def test_lanes_wait_for_every_stream_that_may_read_what_they_made(gpu: FakeGpu, weight: torch.Tensor) -> None:
    """The memory of what one caller still reads on its stream is given to a run that another one starts.

    A graph that may write to any tensor is never captured, since its addresses cannot be held to.
    """
    executable = two_towers(gpu, written=None)
    for _ in range(2):
        gpu.caller = CALLER
        out, _ = executable.run([torch.randn(4), weight])
        gpu.call(lambda tensors: [tensors[0] + 1], [out], CALLER)
        del out
        gpu.caller = "another stream"
        executable.run([torch.randn(4), weight])
    assert not gpu.races and counts(executable) == (4, 0, 0)


def test_one_thread_at_a_time_launches_on_a_device(gpu: FakeGpu) -> None:
    """Lanes are the same streams for all executables, and one may be capturing."""
    inside, most = [0], [0]

    def slow(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1
        return x * weight

    def run(number: int) -> None:
        executable, weight = two_towers(gpu, slow, torch.sin, torch.add), torch.randn(4)
        for _ in range(3):
            executable.run([torch.randn(4), weight])

    in_threads(run, 3)
    assert most == [1]


def test_an_exception_of_a_body_comes_out_and_the_next_run_is_right(gpu: FakeGpu, weight: torch.Tensor) -> None:
    """On lanes and in a capture."""
    state = SimpleNamespace(fails=True)

    def fail(x: torch.Tensor) -> torch.Tensor:
        if state.fails:
            raise ZeroDivisionError("a body's own")
        return x.sin()

    executable = two_towers(gpu, torch.mul, fail, torch.add)
    with pytest.raises(ZeroDivisionError, match="a body's own"):
        executable.run([torch.randn(4), weight])
    state.fails = False
    run(executable, weight, 4)


def test_a_lane_over_its_memory_quota_is_refused_by_name_before_it_is_replayed(gpu: FakeGpu) -> None:
    """One that fits is accounted for."""
    weight = torch.randn(4)
    fitting = two_towers(gpu, lane_memory_quota=SEGMENT_BYTES)
    run(fitting, weight, 3)
    assert fitting.lane_bytes() == {1: SEGMENT_BYTES, 2: SEGMENT_BYTES}
    over = two_towers(gpu, lane_memory_quota=SEGMENT_BYTES // 2)
    weight = warm_up(over)
    with pytest.raises(MemoryQuotaError) as caught:
        over.run([torch.randn(4), weight])
    assert str(caught.value) == (
        "lane 1 of test took 2.0 KiB for 2 segments; it may take 1.0 KiB; most of it is kept for m0: raise "
        "'device.lane_memory_quota', or cut the graph with 'partition.max_segment_share'"
    )
    assert over.num_replays == 0 and over.lane_bytes() == {}


def test_the_lane_with_every_unit_has_no_quota(gpu: FakeGpu) -> None:
    """It is the caller's stream, on which segments run in turn: that must stay possible."""
    made = graph((), (), (0, 1))
    executable = executable_of(made, "***", (torch.cos, torch.sin, torch.add), gpu, lane_memory_quota=1)
    for _ in range(4):
        x = torch.randn(4)
        (out,) = executable.run([x])
        assert torch.equal(out, x.cos() + x.sin())
    assert counts(executable) == (2, 1, 2)


def count(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Write to an input, and draw random numbers."""
    counter.add_(1)
    return x * torch.rand(4)


def test_bodies_are_timed_on_every_quota_without_a_trace(gpu: FakeGpu) -> None:
    """On the whole device and on the first lane of every other size; nothing is written, no random number drawn."""
    gpu.ns_by_stream = {"origin of the capture": 500, "lane 1": 900}
    executable = two_towers(gpu, count, torch.sin, torch.add, static=(), written=(1,))
    counter, x = torch.zeros(4), torch.randn(4)
    torch.manual_seed(1)
    observations = executable.measure([x, counter])
    assert [(each.body, each.units, each.median_ns, each.count) for each in observations.entries] == [
        (body, units, ns, 5) for body in range(3) for units, ns in ((1, 900), (2, 500))
    ]
    assert torch.equal(counter, torch.zeros(4)) and not gpu.races
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))
    with pytest.raises(UnsupportedGraphError, match="test writes to other tensors than its inputs; it is not timed"):
        two_towers(gpu, written=None).measure([x, counter])


def test_code_has_run_before_it_is_timed(gpu: FakeGpu) -> None:
    """Tuning at the first run waits for the device, which a capture refuses."""
    seen: dict[str, bool] = {}

    def noting(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            seen.setdefault(name, ("capture",) in gpu.log)
            return x.sin()

        return run

    two_towers(gpu, torch.mul, noting("sine"), torch.add).measure([torch.randn(4), torch.randn(4)])
    assert seen == {"sine": False} and ("capture",) in gpu.log


def test_a_whole_graph_takes_the_inputs_that_it_does_not_return(gpu: FakeGpu) -> None:
    """So that what a backward has read goes before its end."""
    made = add_input(graph((), (0,)), 1)
    buffers = [replace(each, is_output=each.is_output or each.id == made.inputs[1]) for each in made.buffers]
    made = replace(made, outputs=(*made.outputs, made.inputs[1]), buffers=tuple(buffers))
    is_gone: list[bool] = []

    def run(arguments: Tensors) -> Tensors:
        taken, kept = arguments
        arguments.clear()
        reference = weakref.ref(taken)
        outputs = [taken + kept, kept]
        del taken
        is_gone.append(reference() is None)
        return outputs

    kept, lane = torch.ones(2), Lane(id=LaneId(0), units=(0, 1))
    _, program, body = as_one_segment(made, lane, run)
    total, same = Launcher(program, [body.function], gpu).launch([torch.ones(2), kept], CALLER)
    assert is_gone == [True] and same is kept and torch.equal(total, torch.full((2,), 2.0))


def test_replays_from_different_streams_take_turns(gpu: FakeGpu) -> None:
    """They work in the same memory: the second waits for the first before it copies anything in."""
    executable = two_towers(gpu)
    weight = warm_up(executable)
    executable.run([torch.randn(4), weight])
    gpu.log.clear()
    gpu.caller = "another stream"
    executable.run([torch.randn(4), weight])
    assert gpu.log == [("record", CALLER), ("wait", "another stream"), ("copy", "1"), ("replay",), ("copy", "1")]


def test_a_profile_has_the_names_of_segments_and_of_replays(gpu: FakeGpu) -> None:
    """Launches have a range for each segment, also under `emit_nvtx`; a replay is one, with the name of its graph."""
    executable = two_towers(gpu)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as launched:
        executable.run([torch.randn(4), torch.randn(4)])
    weight = warm_up(executable)
    executable.run([torch.randn(4), weight])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as replayed:
        executable.run([torch.randn(4), weight])
    names = [{event.key for event in profile.key_averages()} for profile in (launched, replayed)]
    ranges = [{name for name in found if name.endswith(")") and "lane" in name} for found in names]
    assert len(ranges[0]) == len(executable.graph.segments) and not ranges[1]
    assert executable.graph.name in names[1] - names[0]
