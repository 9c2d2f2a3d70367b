"""Experiments on lanes: each computes something small on them and in eager, and compares bit by bit.

    try_hand_overs(gpu)       two lanes and the caller's stream that wait for each other at every step, launched and
                              replayed, with slow producers in front of quick readers
    try_training_step(gpu)    forward and backward, launched and then replayed as a model's graphs are
    try_dropout(gpu)          masks drawn on two lanes: other ones at every step, the same in forward and backward, and
                              the same again from the same seed

Before every replay all memory of the CUDA graphs is filled with NaNs, so a read before the write shows in the result.
Inputs differ between runs, so a read of an earlier result shows, too. All numbers are small integers and matrices
permute, which is exact in every precision and order of additions.

They need no compiler, take about a second on a GPU, and run on the stand-in of the tests as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from apollo_compile.device.gpu.check.examine import split_lanes
from apollo_compile.device.gpu.run.execute import CudaExecutable
from apollo_compile.device.gpu.run.gpu import BodyFunction, Gpu, Recording
from apollo_compile.device.gpu.run.launch import Launcher
from apollo_compile.device.gpu.run.memory import ModelMemory
from apollo_compile.device.gpu.run.torch_capture import TorchRecording, bytes_at
from apollo_compile.ir import Lane, LaneId, Program, Role, SegmentGraph
from apollo_compile.target.check_result import CheckResult, Level
from apollo_compile.target.target import CompiledBody, Contract
from apollo_compile.trials import TrialStep, write_program

NUM_LEVELS = 12
"""Hand-overs in either direction."""

NUM_RUNS = 8
"""Runs of every experiment, with other inputs."""

SLOW_MATMULS = 4
"""Matmuls of a slow segment; a quick one has none."""

SEED = 7


def three_lanes(sizes: Sequence[int]) -> tuple[Lane, ...]:
    """Return the lane with all units of these atoms, and its two halves."""
    whole = Lane(id=LaneId(0), units=tuple(range(sum(sizes))))
    return (whole, *split_lanes(sizes, (1, 1)))


def poison(recording: Recording) -> None:
    """Fill all memory of a captured graph with NaNs; nobody may need anything in it."""
    if not isinstance(recording, TorchRecording):
        return  # the stand-in of the tests poisons by itself
    torch.cuda.synchronize()
    for segment in recording.segments():
        bytes_at(segment["address"], segment["total_size"], torch.device("cuda")).fill_(255)
    torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------------------- hand-overs


def try_hand_overs(gpu: Gpu, sizes: Sequence[int], device: torch.device, *, width: int = 1024) -> CheckResult:
    """Return whether a lane reads the results of the other one, in eager launches and in replays.

    Arguments:
        gpu: the device.
        sizes: of its atoms.
        device: of tensors there.
        width: of the matrices; the more, the slower are slow segments.
    """
    subject = "hand-overs"
    shuffle = _permutation(width, device)
    bodies = [partial(_mix, shuffle, 0), partial(_mix, shuffle, SLOW_MATMULS)]
    steps = _ladder()
    last = 2 + len(steps) - 1
    graph, program = write_program(subject, steps, three_lanes(sizes), num_inputs=2, outputs=(last - 1, last))
    launcher = Launcher(program, bodies, gpu)
    for run in range(NUM_RUNS):
        inputs = _integers(2, width, device, run)
        made = launcher.launch(list(inputs), gpu.caller_stream())
        if text := _differs(gpu, made, interpret(graph, bodies, inputs)):
            return _error(subject, f"launch {run}: {text}")
        del made
    slots = [torch.empty_like(each) for each in inputs]
    outputs: list[torch.Tensor | None] = []
    recording = gpu.capture(lambda origin: outputs.extend(launcher.launch(list(slots), origin)), None)
    for run in range(NUM_RUNS):
        inputs = _integers(2, width, device, NUM_RUNS + run)
        expected = interpret(graph, bodies, inputs)
        poison(recording)
        gpu.copy(slots, inputs)
        recording.replay()
        if text := _differs(gpu, outputs, expected):
            return _error(subject, f"replay {run}: {text}")
    text = f"{2 * NUM_LEVELS} of them are in order in {NUM_RUNS} launches and {NUM_RUNS} replays"
    return CheckResult(subject=subject, level=Level.OK, message=text)


def _ladder() -> tuple[TrialStep, ...]:
    """Return steps on lanes 1 and 2 that each read the last results of both, slow ones on one lane beside quick ones.

    Every fourth rung also goes over lane 0, the caller's stream.
    """
    steps: list[TrialStep] = []
    left, right, free = 0, 1, 2
    for level in range(NUM_LEVELS):
        is_left_slow = level % 2
        steps += [TrialStep(body=is_left_slow, reads=(left, right), lane=1)]
        steps += [TrialStep(body=1 - is_left_slow, reads=(right, left), lane=2)]
        left, right, free = free, free + 1, free + 2
        if level % 4 == 3:
            steps += [TrialStep(body=0, reads=(left, right), lane=0), TrialStep(body=0, reads=(free, left), lane=1)]
            left, right, free = free + 1, free, free + 2
    steps += [TrialStep(body=0, reads=(left, right), lane=1), TrialStep(body=0, reads=(right, left), lane=2)]
    return tuple(steps)


def _mix(shuffle: torch.Tensor, matmuls: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a mixture of two matrices of integers below 509; NaNs stay NaNs."""
    second, first = inputs.pop(), inputs.pop()
    total = (first + 2 * second + 1).remainder(509)
    for _ in range(matmuls):
        total = shuffle @ total
    return [total]


def interpret(
    graph: SegmentGraph, bodies: Sequence[BodyFunction], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the outputs of a graph, its segments one after the other on the caller's stream."""
    values = dict(zip(graph.inputs, inputs, strict=True))
    for segment in graph.segments:
        made = bodies[segment.body]([values[buffer] for buffer in segment.inputs])
        values.update(zip(segment.outputs, made, strict=True))
    return [values[buffer] for buffer in graph.outputs if buffer is not None]


# ----------------------------------------------------------------------------------------------------- training steps


@dataclass(frozen=True, slots=True)
class _Pair:
    """Forward and backward, loaded as those of a model are, and the same in eager."""

    graphs: tuple[SegmentGraph, SegmentGraph]
    bodies: tuple[Sequence[BodyFunction], Sequence[BodyFunction]]
    executables: tuple[CudaExecutable, CudaExecutable]

    @property
    def num_replays(self) -> int:
        """Runs of either that were replays, of the one with fewer."""
        return min(each.num_replays for each in self.executables)

    def poison(self) -> None:
        """Poison the memory of both."""
        for captured in (each for executable in self.executables for each in executable.captures):
            if captured.recording is not None:
                poison(captured.recording)


def _load_pair(
    gpu: Gpu,
    programs: Sequence[tuple[SegmentGraph, Program]],
    bodies: tuple[Sequence[BodyFunction], Sequence[BodyFunction]],
    contracts: Sequence[Contract],
) -> _Pair:
    shared = ModelMemory()
    forward, backward = (
        CudaExecutable(
            program=program,
            graph=graph,
            bodies=[CompiledBody(function=body) for body in own],
            gpu=gpu,
            contract=contract,
            shared=shared,
            strict=True,
        )
        for (graph, program), own, contract in zip(programs, bodies, contracts, strict=True)
    )
    return _Pair((programs[0][0], programs[1][0]), bodies, (forward, backward))


def try_training_step(gpu: Gpu, sizes: Sequence[int], device: torch.device, *, width: int = 512) -> CheckResult:
    """Return whether a forward on two lanes and its backward give the results of eager; arguments as above."""
    subject = "training step"
    lanes = three_lanes(sizes)
    # Inputs are two parameters and two inputs, then the saved tensors of the forward and the gradient of its output.
    forward = (
        TrialStep(body=0, reads=(0, 2), lane=1),
        TrialStep(body=0, reads=(1, 3), lane=2),
        TrialStep(body=1, reads=(4, 5), lane=1),
    )
    backward = (TrialStep(body=0, reads=(0, 2, 4), lane=2), TrialStep(body=0, reads=(1, 3, 4), lane=1))
    pair = _load_pair(
        gpu,
        (
            write_program("trial forward", forward, lanes, num_inputs=4, outputs=(6, 4, 5), role=Role.FORWARD),
            write_program("trial backward", backward, lanes, num_inputs=5, outputs=(5, 6), role=Role.BACKWARD),
        ),
        ([_layer, _sum], [_layer_backward]),
        (
            Contract(static_inputs=frozenset({0, 1}), user_outputs=frozenset({0})),
            Contract(static_inputs=frozenset({0, 1, 2, 3}), user_outputs=frozenset({0, 1})),
        ),
    )
    parameters = [_permutation(width, device, seed) for seed in (1, 2)]
    for run in range(NUM_RUNS):
        inputs = [*parameters, *_integers(2, width, device, run)]
        (gradient,) = _integers(1, width, device, 100 + run)
        expected = interpret(pair.graphs[0], pair.bodies[0], inputs)
        expected += interpret(pair.graphs[1], pair.bodies[1], [*parameters, *expected[1:], gradient])
        if text := _differs(gpu, _train(pair, inputs, parameters, gradient), expected):
            return _error(subject, f"step {run}, with {pair.num_replays} replays before: {text}")
    return _judge_replays(subject, pair, f"{NUM_RUNS} steps are as in eager")


def _train(
    pair: _Pair, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], gradient: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return copies of all outputs of a forward, and of the gradients; afterwards nobody refers to the originals."""
    pair.poison()
    forward, backward = pair.executables
    made = forward.run(list(inputs))
    returned = [None if each is None else each.clone() for each in made]
    saved = [each for each in made[1:] if each is not None]
    del made
    return returned + [None if each is None else each.clone() for each in backward.run([*parameters, *saved, gradient])]


def _layer(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    value, parameter = inputs.pop(), inputs.pop()
    return [(parameter @ value - 100).relu()]


def _sum(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [inputs.pop() + inputs.pop()]


def _layer_backward(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    gradient, hidden, parameter = inputs.pop(), inputs.pop(), inputs.pop()
    return [parameter.T @ torch.where(hidden > 0, gradient, hidden)]  # NaNs among saved tensors stay NaNs


# ------------------------------------------------------------------------------------------------------------ dropout


def try_dropout(gpu: Gpu, sizes: Sequence[int], device: torch.device, *, width: int = 4096) -> CheckResult:
    """Return whether masks drawn on two lanes are right; arguments as above."""
    subject = "dropout"
    lanes = three_lanes(sizes)
    forward = (TrialStep(body=0, reads=(0,), lane=1, makes=2), TrialStep(body=0, reads=(1,), lane=2, makes=2))
    backward = (TrialStep(body=0, reads=(0, 2), lane=2), TrialStep(body=0, reads=(1, 3), lane=1))
    pair = _load_pair(
        gpu,
        (
            write_program("dropout", forward, lanes, num_inputs=2, outputs=(2, 4, 3, 5), role=Role.FORWARD),
            write_program("dropout backward", backward, lanes, num_inputs=4, outputs=(4, 5), role=Role.BACKWARD),
        ),
        ([_drop], [_drop_backward]),
        (
            Contract(user_outputs=frozenset({0, 1})),
            Contract(static_inputs=frozenset({0, 1}), user_outputs=frozenset({0, 1})),
        ),
    )
    ones = torch.ones(width, device=device)
    for _ in range(NUM_RUNS):
        _drop_once(pair, ones)
    gpu.synchronize()
    series: list[list[torch.Tensor]] = []
    for _ in range(2):
        torch.manual_seed(SEED)
        series.append([])
        for run in range(NUM_RUNS):
            made = _drop_once(pair, ones)
            gpu.synchronize()
            if not all(bool(((each == 0) | (each == 2)).all()) for each in made):
                return _error(subject, f"replay {run}: other values than 0 and 2")
            if not all(torch.equal(one, other) for one, other in zip(made[:2], made[2:], strict=True)):
                return _error(subject, f"replay {run}: a backward has another mask than its forward")
            series[-1] += made[:2]
    first, again = series
    equal = next(((a, b) for b in range(len(first)) for a in range(b) if torch.equal(first[a], first[b])), None)
    if equal is not None:
        shown = " and ".join(f"lane {1 + index % 2} in replay {index // 2}" for index in equal)
        return _error(subject, f"equal masks: {shown}")
    if not all(torch.equal(one, other) for one, other in zip(first, again, strict=True)):
        return _error(subject, "other masks from the same seed")
    return _judge_replays(subject, pair, f"{len(first)} masks differ, and follow the seed")


def _drop_once(pair: _Pair, ones: torch.Tensor) -> list[torch.Tensor]:
    """Return copies of both outputs and of both gradients; afterwards nobody refers to saved tensors."""
    pair.poison()
    forward, backward = pair.executables
    *returned, first, second = (each for each in forward.run([ones, ones.clone()]) if each is not None)
    copies = [each.clone() for each in returned]
    inputs = [first, second, ones, ones]
    del returned, first, second
    return copies + [each.clone() for each in backward.run(inputs) if each is not None]


def _drop(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.native_dropout(inputs.pop(), 0.5, True))


def _drop_backward(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    gradient, mask = inputs.pop(), inputs.pop()
    return [gradient * mask * 2]


# ------------------------------------------------------------------------------------------------------------- pieces


def _integers(count: int, width: int, device: torch.device, seed: int) -> list[torch.Tensor]:
    """Return matrices of integers below 509, other ones for every seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(509, (width, width), generator=generator).float().to(device) for _ in range(count)]


def _permutation(width: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Return a matrix that permutes rows."""
    order = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
    return torch.eye(width)[order].to(device)


def _differs(gpu: Gpu, made: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor]) -> str:
    """Return the difference between results and the expected ones as a text; "" if there is none."""
    gpu.synchronize()
    for index, (found, wanted) in enumerate(zip(made, expected, strict=True)):
        assert found is not None
        if torch.equal(found, wanted):
            continue
        num_nans, num_wrong = int(found.isnan().sum()), int((found != wanted).sum())
        place = "memory that was not written yet" if num_nans else "the result of an earlier run"
        return (
            f"{num_wrong} of {found.numel()} elements of result {index} are wrong, {num_nans} are NaN: {place} was read"
        )
    return ""


def _judge_replays(subject: str, pair: _Pair, text: str) -> CheckResult:
    if pair.num_replays == 0:
        return _error(subject, f"{text}, but none was replayed")
    return CheckResult(subject=subject, level=Level.OK, message=f"{text}, {pair.num_replays} of them replayed")


def _error(subject: str, text: str) -> CheckResult:
    return CheckResult(subject=subject, level=Level.ERROR, message=text)


Trial = Callable[[Gpu, Sequence[int], torch.device], CheckResult]

TRIALS: Mapping[str, Trial] = {"hand-overs": try_hand_overs, "training step": try_training_step, "dropout": try_dropout}
"""By the subject of their results."""
