"""Random training programs on the stand-in for a GPU, whose memory is used again as on a device.

A program is a random forward and a random function of what it saves as its backward, in several variants, and a script
of what a training loop does with them. Its outputs, gradients and parameters are those of an interpretation in eager,
bit for bit, and no lane reads or overwrites what another one is not done with.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.device.gpu.run import capturer, execute
from apollo_compile.device.gpu.run.execute import CudaExecutable
from apollo_compile.device.gpu.run.gpu import Sharing
from apollo_compile.device.gpu.run.launch import Releases, find_releases
from apollo_compile.device.gpu.run.memory import ModelMemory
from apollo_compile.ir import BufferId, LaneId, Launch, Program, Role, SegmentGraph
from apollo_compile.target.lanes import lane_catalogue
from apollo_compile.target.target import CompiledBody, Contract
from apollo_compile.trials import TrialStep, write_program
from tests.builders import plan, random_costs, random_plan, seeds
from tests.device.gpu.arena import ROUNDING
from tests.device.gpu.fake_gpu import FakeGpu
from tests.device.gpu.run.test_launch import interpret, program_of

UNITS = 2
Tensors = list[torch.Tensor]
Body = Callable[[Tensors], Tensors]
STATISTICS = 1
"""The input of a forward that it writes to; input 0 is the batch, and weights follow."""


@dataclass(frozen=True, kw_only=True)
class Function:
    """A graph, its bodies, and what its caller promises."""

    graph: SegmentGraph
    bodies: tuple[Body, ...]
    contract: Contract

    def interpret(self, inputs: Tensors) -> list[torch.Tensor | None]:
        """Run segments in the order of their ids."""
        return interpret(self.graph, self.bodies, inputs)


def body_of(number: int, sizes: Sequence[int], *, writes: bool) -> Body:
    """Return a function to tensors of these sizes that depend on every element of its inputs.

    It may write to its last input, and lets its inputs go before it makes its outputs.
    """
    steps = [torch.arange(size) * 0.1 * (number + 1) for size in sizes]

    def run(inputs: Tensors) -> Tensors:
        total = sum((place + 2) * tensor.mean() for place, tensor in enumerate(inputs))
        if writes:
            inputs[-1].add_(0.1)
        inputs.clear()
        return [torch.sin(step + total * (place + 1)) for place, step in enumerate(steps)]

    return run


def random_function(
    rng: random.Random, role: Role, inputs: Sequence[int], made: Sequence[int], *, writes: int | None = None
) -> tuple[SegmentGraph, tuple[Body, ...]]:
    """Return a random graph of role `role` without outputs, whose first buffers are inputs of these sizes.

    Every input is read, `writes` by one segment, which writes to it. The last segments make buffers of the sizes
    `made`, one each, from at least one buffer of another segment where there is one.
    """
    sizes, num_inner = list(inputs), rng.randrange(2, 7)
    unread = [index for index in range(len(inputs)) if index != writes]
    rng.shuffle(unread)
    reads: list[list[int]] = []
    outputs: list[list[int]] = []
    for number in range(num_inner + len(made)):
        is_inner = number < num_inner
        candidates = [index for index in range(len(sizes)) if index != writes]
        chosen = rng.sample(candidates, min(len(candidates), rng.choice((1, 1, 2, 3))))
        if not is_inner:
            chosen.append(rng.randrange(len(inputs), len(inputs) + num_inner))
        chosen += [unread.pop() for _ in range(min(len(unread), 1 + len(unread) // max(1, num_inner - number)))]
        chosen = list(dict.fromkeys(chosen)) + ([writes] if writes is not None and number == 0 else [])
        new = [rng.choice((1, 7, 64, 100, 129, 300)) for _ in range(rng.choice((1, 1, 2)))] if is_inner else []
        new = new[: 1 if number else 2] or [made[number - num_inner]]
        reads.append(chosen)
        outputs.append(list(range(len(sizes), len(sizes) + len(new))))
        sizes += new
    steps = [
        TrialStep(body=number, reads=tuple(read), lane=0, makes=len(new))
        for number, (read, new) in enumerate(zip(reads, outputs, strict=True))
    ]
    made_graph, _ = write_program("test", steps, lane_catalogue(1), num_inputs=len(inputs), role=role)
    buffers = tuple(replace(buffer, num_bytes=4 * sizes[buffer.id]) for buffer in made_graph.buffers)
    bodies = tuple(
        body_of(number, [sizes[buffer] for buffer in outputs[number]], writes=writes in reads[number])
        for number in range(len(reads))
    )
    return replace(made_graph, buffers=buffers), bodies


def with_outputs(graph: SegmentGraph, outputs: Sequence[int]) -> SegmentGraph:
    """Return the graph with these buffers as outputs."""
    buffers = tuple(replace(buffer, is_output=buffer.id in outputs) for buffer in graph.buffers)
    return replace(graph, buffers=buffers, outputs=tuple(map(BufferId, outputs)))


@dataclass(frozen=True, kw_only=True)
class Model:
    """A forward with its backward, and the same forward without one."""

    forward: Function
    backward: Function
    inference: Function
    sizes: tuple[int, ...]
    """Of the batch, the statistics and the weights."""
    num_user_outputs: int


def random_model(rng: random.Random) -> Model:
    """Return a model: its backward reads what the forward saves, the weights, and tangents, in that order."""
    weights = [rng.choice((5, 64, 130, 300)) for _ in range(rng.randrange(2, 5))]
    sizes = [rng.choice((3, 90, 200)), 4, *weights]
    user = [rng.choice((1, 70, 140)) for _ in range(rng.choice((1, 1, 2)))]
    graph, bodies = random_function(rng, Role.FORWARD, sizes, user, writes=STATISTICS)
    made = [buffer.id for buffer in graph.buffers[len(sizes) :]]
    shown = made[-len(user) :]
    saved = rng.sample(made, min(len(made), rng.randrange(1, 5)))  # some may be shown, too
    saved += [BufferId(0)] if rng.random() < 0.3 else []
    forward = Function(
        graph=with_outputs(graph, [*shown, *saved]),
        bodies=bodies,
        contract=Contract(
            static_inputs=frozenset(range(2, len(sizes))),
            written_inputs=frozenset({STATISTICS}),
            user_outputs=frozenset(range(len(user))),
        ),
    )
    inference = Function(
        graph=replace(with_outputs(graph, shown), role=Role.INFERENCE), bodies=bodies, contract=forward.contract
    )
    num_static = len(saved) + len(weights)
    given = [graph.buffers[buffer].num_bytes // 4 for buffer in saved] + weights + user
    gradients = list(range(len(weights)))
    if len(set(weights)) < len(weights) and rng.random() < 0.5:  # two weights have one gradient
        gradients = [weights.index(size) for size in weights]
    graph, bodies = random_function(rng, Role.BACKWARD, given, [weights[place] for place in sorted(set(gradients))])
    first = len(graph.buffers) - len(set(gradients))
    returned = [first + sorted(set(gradients)).index(place) for place in gradients]
    backward = Function(
        graph=with_outputs(graph, returned),
        bodies=bodies,
        contract=Contract(static_inputs=frozenset(range(num_static)), user_outputs=frozenset(range(len(gradients)))),
    )
    return Model(
        forward=forward, backward=backward, inference=inference, sizes=tuple(sizes), num_user_outputs=len(user)
    )


class OnLanes:
    """The model on a device, in several variants."""

    owners_release = True

    def __init__(self, model: Model, rng: random.Random) -> None:
        self.gpu = FakeGpu(units=UNITS)
        lanes = lane_catalogue(UNITS)

        def load(function: Function, gpu: FakeGpu, variant: int, *, is_serial: bool) -> CudaExecutable:
            graph = function.graph
            planned = (
                plan(graph, "*" * len(graph.segments), lanes=lanes)
                if is_serial
                else random_plan(rng, graph, lanes, random_costs(rng, graph, lanes))
            )
            return CudaExecutable(
                program=program_of(graph, planned, owners_release=self.owners_release),
                graph=graph,
                bodies=[CompiledBody(function=body) for body in function.bodies],
                gpu=gpu,
                contract=function.contract,
                shared=other if graph.role is Role.INFERENCE else memory,
                variant=variant,
                strict=True,
            )

        memory, other = ModelMemory(), ModelMemory()
        functions = (model.forward, model.backward, model.inference)
        ways = ((self.gpu, False), (self.gpu, True), (self.gpu.sharing(Sharing.FREE), False))
        self.variants = [
            tuple(load(each, gpu, variant, is_serial=is_serial) for each in functions)
            for variant, (gpu, is_serial) in enumerate(ways)
        ]
        self.use(0)

    def use(self, variant: int) -> None:
        """Run this variant from now on."""
        self.forward, self.backward, self.inference = (each.run for each in self.variants[variant])

    @property
    def num_replays(self) -> list[int]:
        """Replays of forwards, backwards and inference, over all variants."""
        return [sum(each.num_replays for each in executables) for executables in zip(*self.variants, strict=True)]


class _Apply(torch.autograd.Function):
    """The model in autograd, as AOTAutograd puts it there."""

    @staticmethod
    def forward(ctx: Any, runs: Any, model: Model, x: torch.Tensor, statistics: torch.Tensor, *weights: Any) -> Any:
        made = runs.forward([x, statistics, *weights])
        ctx.save_for_backward(*made[model.num_user_outputs :], *weights)
        ctx.runs = runs
        return tuple(made[: model.num_user_outputs])

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        return (None, None, None, None, *ctx.runs.backward([*ctx.saved_tensors, *tangents]))


@dataclass(frozen=True, kw_only=True)
class LoopStep:
    """What one step of a training loop does."""

    zero_grad: str = "after the step"
    """Or "before the backward", "in place before the backward" or "never"."""
    forwards: int = 1
    reverse: bool = False
    """Backwards in the reverse order of their forwards."""
    retain: bool = False
    """Every backward is gone through twice."""
    drop: bool = False
    """There is one more forward, without a backward."""
    validate: bool = False
    """Between forwards and backwards."""
    swap: bool = False
    """Validation is with other weights at other addresses."""
    hooks: str = ""
    """Saved tensors are replaced: "clone", or stay: "identity", and are looked at later: "keep"."""
    hold: bool = False
    """Gradients are collected."""
    variant: int = 0
    backward_variant: int = 0


def random_step(rng: random.Random, **fixed: Any) -> LoopStep:
    """Return any step."""
    variant = rng.randrange(3)
    chosen: dict[str, Any] = {
        "zero_grad": rng.choice(("after the step", "after the step", "before the backward", "never")),
        "forwards": rng.choice((1, 1, 1, 2)),
        "reverse": rng.random() < 0.5,
        "retain": rng.random() < 0.15,
        "drop": rng.random() < 0.1,
        "validate": rng.random() < 0.2,
        "swap": rng.random() < 0.5,
        "hooks": rng.choice(("", "", "", "", "clone", "keep")),
        "hold": rng.random() < 0.1,
        "variant": variant,
        "backward_variant": rng.choice((variant, variant, variant, rng.randrange(3))),
    }
    return LoopStep(**{**chosen, **fixed})


SCENARIOS: dict[str, Callable[[random.Random, int], LoopStep]] = {
    "zero_grad after the step": lambda rng, number: LoopStep(),
    "zero_grad before the backward": lambda rng, number: LoopStep(zero_grad="before the backward"),
    "two forwards": lambda rng, number: LoopStep(forwards=1 + number % 2, reverse=rng.random() < 0.5),
    "retain_graph": lambda rng, number: LoopStep(retain=number >= 4),
    "accumulation": lambda rng, number: LoopStep(zero_grad="never" if number % 3 else "after the step"),
    "validation": lambda rng, number: LoopStep(validate=number % 3 < 2),
    "swapped weights": lambda rng, number: LoopStep(validate=True, swap=number % 2 == 0),
    "saved-tensor hooks": lambda rng, number: LoopStep(hooks=("", "clone", "keep", "identity")[number % 4]),
    "collected gradients": lambda rng, number: LoopStep(hold=number == 5),
    "all gradients are collected": lambda rng, number: LoopStep(hold=True),
    "accumulation, zero_grad before the backward": lambda rng, number: LoopStep(
        zero_grad="never" if number > 4 and number % 3 else "before the backward"
    ),
    "zero_grad in place": lambda rng, number: LoopStep(zero_grad="in place before the backward"),
    "dropped forwards": lambda rng, number: LoopStep(drop=number >= 4),
    "variants in turn": lambda rng, number: LoopStep(variant=number // 4 % 3, backward_variant=number // 4 % 3),
    "a switch before the backward": lambda rng, number: LoopStep(
        forwards=2, variant=number // 4 % 3, backward_variant=(number + 1) // 4 % 3
    ),
    "anything": lambda rng, number: random_step(rng),
    "anything, one variant": lambda rng, number: random_step(rng, variant=0, backward_variant=0),
}


for name in ("two forwards", "retain_graph", "swapped weights", "collected gradients", "a switch before the backward"):
    SCENARIOS[f"{name}, zero_grad before the backward"] = lambda rng, number, name=name: replace(  # type: ignore[misc]
        SCENARIOS[name](rng, number), zero_grad="before the backward"
    )


def script_of(scenario: str, seed: int) -> list[LoopStep]:
    """Return the steps of a training loop."""
    rng = random.Random(f"{scenario}, {seed}")
    return [SCENARIOS[scenario](rng, number) for number in range(16)]


def train(model: Model, runs: Any, script: Sequence[LoopStep]) -> list[torch.Tensor]:
    """Return everything that a user sees in a training loop."""
    generator = torch.Generator().manual_seed(0)
    x_size, statistics_size, *weight_sizes = model.sizes
    weights = [nn.Parameter(torch.randn(size, generator=generator)) for size in weight_sizes]
    averages = [weight.detach().clone() for weight in weights]
    statistics = torch.zeros(statistics_size)
    seen: list[torch.Tensor] = []

    def clear() -> None:
        for weight in weights:
            weight.grad = None

    for step in script:
        runs.use(step.variant)
        kept: Tensors = []
        with _hooks(step.hooks, kept):
            outputs = [
                _Apply.apply(runs, model, torch.randn(x_size, generator=generator), statistics, *weights)
                for _ in range(step.forwards + step.drop)
            ]
        seen += [output.detach() for each in outputs for output in each]
        losses = [sum(output.square().mean() for output in each) for each in outputs[step.drop :]]
        del outputs
        if step.validate:
            if step.swap:
                _swap(weights, averages)
            x = torch.randn(x_size, generator=generator)
            seen += runs.inference([x, statistics, *map(torch.Tensor.detach, weights)])
            if step.swap:
                _swap(weights, averages)
        if step.zero_grad == "before the backward":
            clear()
        if step.zero_grad == "in place before the backward":
            for weight in weights:
                weight.grad = None if weight.grad is None else weight.grad.zero_()
        runs.use(step.backward_variant)
        for loss in losses[:: -1 if step.reverse else 1]:
            for is_last in (False, True) if step.retain else (True,):
                loss.backward(retain_graph=not is_last)  # type: ignore[union-attr]
        del loss, losses
        seen += [tensor.clone() for tensor in kept]
        del kept
        seen += [weight.grad.clone() for weight in weights if weight.grad is not None]
        seen += [weight.grad for weight in weights if step.hold and weight.grad is not None]
        with torch.no_grad():
            for weight, average in zip(weights, averages, strict=True):
                weight -= 0.1 * weight.grad
                average.lerp_(weight, 0.1)
        if step.zero_grad == "after the step":
            clear()
    return [*seen, *(weight.detach() for weight in weights), statistics]


def _swap(weights: Sequence[nn.Parameter], others: Tensors) -> None:
    for place, weight in enumerate(weights):
        weight.data, others[place] = others[place], weight.data


@contextlib.contextmanager
def _hooks(kind: str, kept: Tensors) -> Iterator[None]:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if kind == "keep":
            kept.append(tensor.detach())
        return tensor.clone() if kind == "clone" else tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks if kind else contextlib.nullcontext():
        yield


@functools.cache
def expected(scenario: str, seed: int) -> tuple[Model, list[torch.Tensor]]:
    """Return a random model and what a user sees of its training in eager, where there is one variant."""
    model = random_model(random.Random(seed))
    interpreted = {name: getattr(model, name).interpret for name in ("forward", "backward", "inference")}
    return model, train(model, SimpleNamespace(**interpreted, use=id), script_of(scenario, seed))


def check(scenario: str, seed: int) -> OnLanes:
    """Expect what a user sees on the device to be what eager shows, and no races."""
    model, wanted = expected(scenario, seed)
    runs = OnLanes(model, random.Random(seed))
    found = train(model, runs, script_of(scenario, seed))
    assert len(found) == len(wanted)
    assert [index for index, pair in enumerate(zip(found, wanted, strict=True)) if not torch.equal(*pair)] == []
    assert runs.gpu.races == []
    return runs


@pytest.mark.parametrize("seed", seeds(3, 40))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_training_is_as_in_eager(scenario: str, seed: int) -> None:
    """Whatever the loop does between forward and backward; most of it is replayed."""
    forwards, backwards, _ = check(scenario, seed).num_replays
    assert forwards >= 2 and (backwards >= 2 or scenario == "saved-tensor hooks")


def test_memory_is_used_again_within_a_capture_and_by_others_of_its_pool() -> None:
    """Else these tests would show nothing."""
    runs = check("zero_grad after the step", 1)
    written = [
        out.data_ptr() for each in runs.gpu.recordings for operation in each.operations for out in operation.outputs
    ]
    assert len(set(written)) < len(written) and all(address % ROUNDING == 0 for address in written)


def _check_own_outputs(memory: ModelMemory) -> bool:
    """Look at the outputs of the graph that was captured last, instead of those of all graphs in the pool."""
    return all(captured.is_unused() for captured in memory._handed_out[:1] if captured in memory._captures[:1])


def _forget_gradients(memory: ModelMemory) -> bool:
    """Look at what forwards handed out, and at no gradients."""
    return all(captured.is_unused() for captured in memory._handed_out if captured.role is not Role.BACKWARD)


def _release_on_lane_of_reader(program: Program, owners: Mapping[BufferId, LaneId]) -> Releases:
    """Release inputs as if any lane that reads them owned them."""
    readers = {
        buffer: lane.id
        for lane, instructions in zip(program.lanes, program.instructions, strict=True)
        for instruction in instructions
        if isinstance(instruction, Launch)
        for buffer in instruction.inputs
    }
    return find_releases(program, {buffer: readers.get(buffer, owner) for buffer, owner in owners.items()})


_latest_forward = property(lambda memory: next(iter(memory.forwards), None))

MUTANTS: dict[str, tuple[str, object, str, object]] = {
    "what was handed out is not looked at": ("two forwards", ModelMemory, "is_free", lambda memory: True),
    "liveness is that of one variant": ("a switch before the backward", ModelMemory, "is_free", _check_own_outputs),
    "a backward asks for addresses alone": ("saved-tensor hooks", ModelMemory, "contents", _latest_forward),
    "a graph that is kept is replayed": ("retain_graph", execute, "keeps_graph", lambda: False),
    "hooks are not looked at": ("saved-tensor hooks", execute, "has_saved_tensor_hooks", lambda: False),
    "inputs are released on the lane of the reader": (
        *("zero_grad after the step", capturer, "find_releases", _release_on_lane_of_reader),
    ),
    "lent gradients in use are not looked at": ("collected gradients", ModelMemory, "is_free", _forget_gradients),
    "buffers are released on the lane of the reader": ("zero_grad after the step", OnLanes, "owners_release", False),
}
"""Changes to single rules, each behind the scenario in which it makes some program wrong."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By numbers that differ, or by races."""
    scenario, *change = MUTANTS[mutant]
    monkeypatch.setattr(*change)
    for seed in range(64):
        try:
            check(scenario, seed)
        except AssertionError:
            return
    pytest.fail("no random program told the difference")
