"""Training steps as one CUDA graph, on the stand-in for the GPU: numbers of the loop, and what a replay must see."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.device.gpu.run.gpu import Sharing
from apollo_compile.device.gpu.target import GpuTarget
from apollo_compile.ir import Variant
from apollo_compile.session.step import segments
from apollo_compile.session.step.split import split_evenly
from apollo_compile.store.profiles import load_profile
from apollo_compile.tools.report import report, status
from apollo_compile.torch_bridge.interpret import interpret_bodies
from tests.builders import most_at_once
from tests.device.gpu.fake_gpu import FakeGpu
from tests.end_to_end.twins import Twins
from tests.session.test_captured import BusyGpu, branches
from tests.session.trained import interpret_plainly

PROGRAM = {
    "debug.strict": True,
    "plan.autotune": False,
    "plan.min_gain": 0.0,
    "plan.planner": "greedy",
    "plan.time_limit_s": 0.1,
    "partition.granularity": "module",
    "runtime.bodies": "eager",
}
"""The program runs as soon as it can."""

FIRST = 3
"""Steps until then: loops of the same segments; in the second of them bodies are timed."""


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss."""
    loss: torch.Tensor = model(batch).square().mean()
    return loss


class Teacher:
    """A loss with weights of another module, which is not trained, and a factor that the test may replace."""

    def __init__(self) -> None:
        self.model = nn.Linear(8, 8).double().requires_grad_(False)
        self.others = {"factor": torch.rand(8, dtype=torch.float64)}

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Return how far the model is from its teacher."""
        expected = self.model(batch) * self.others["factor"]
        loss: torch.Tensor = (model(batch) - expected @ expected.T).square().mean()
        return loss


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Let tensors on the CPU be on a GPU, and let torch.compile interpret, which takes no time."""
    gpu, profile = BusyGpu(), load_profile(Path("h200"))
    monkeypatch.setattr(
        "apollo_compile.session.backend.open_target",
        lambda _, config: (GpuTarget(gpu, profile, config, device=torch.device("cpu")), None),
    )
    interpret_plainly(monkeypatch)
    torch._dynamo.reset()
    return gpu


Optimize = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that counts its steps on the device."""
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return one with state and no count."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class Pair:
    """A compiled step beside the loop in eager, whose losses and parameters must be equal after every step."""

    def __init__(
        self,
        gpu: FakeGpu,
        optimize: Optimize | None = adamw,
        *,
        microbatches: int = 1,
        clip: float | None = None,
        loss: Callable[[nn.Module, Any], torch.Tensor] = loss_fn,
        split: Callable[[Any, int], Sequence[Any]] = split_evenly,
        **options: Any,
    ) -> None:
        self._twins = Twins(
            lambda: branches()[0].double(),
            loss,
            optimize,
            count=microbatches,
            split=split,
            options={**PROGRAM, **options},
            tolerance=(1e-6, 1e-8),
            of_gradients=(1e-6, 1e-8),
            clip_grad_norm=clip,
        )
        self.model, self.run, self._seed = self._twins.model, self._twins.step, 0
        self.optimizers = [self._twins.others, self._twins.own]
        gpu.hidden = self._hidden

    def step(self, size: int = 8) -> torch.Tensor:
        self._seed += 1
        batch = torch.randn(size, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(self._seed))
        return self._twins.take(batch)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def _hidden(self) -> list[torch.Tensor]:
        optimizer = self.optimizers[1]
        states = () if optimizer is None else optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]

    @property
    def program(self) -> Any:
        (tuner,) = self.run.tuners
        return tuner.program.variants.plan


MORE_CASES = ((sgd, 1, 0.1), (sgd, 2, None), (adamw, 2, None), (adamw, 2, 0.1), (None, 1, None))


@pytest.mark.parametrize(
    ("optimize", "microbatches", "clip"),
    [(adamw, 1, None), *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE_CASES), (None, 2, 0.1)],
)
def test_steps_are_one_replay_with_the_numbers_of_the_loop(
    gpu: FakeGpu, optimize: Optimize | None, microbatches: int, clip: float | None
) -> None:
    """Losses, gradients, parameters, statistics and the optimizer's state, step by step."""
    pair = Pair(gpu, optimize, microbatches=microbatches, clip=clip)
    pair.steps(FIRST + 5)
    program = pair.program
    assert (program.num_captures, program.num_launches) == (1, 0) and program.num_replays >= 5
    assert sum(map(bool, program.program.instructions)) > 1, "more than one lane"
    assert not gpu.races
    for one, other in zip(*(each.state_dict()["state"].values() for each in pair.optimizers if each), strict=False):
        torch.testing.assert_close(one, other)


def test_a_replay_sees_what_changes_about_the_optimizer_and_where_weights_are(gpu: FakeGpu) -> None:
    """A learning rate by a scheduler needs no capture; other settings, a loaded state, weights elsewhere need one."""
    pair = Pair(gpu)
    pair.steps(FIRST + 2)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in pair.optimizers]
    for _ in range(2):
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
    pair.step()
    program = pair.program
    assert program.num_captures == 1
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["weight_decay"] = 0.5
    pair.step()
    assert program.num_captures == 2
    for optimizer in pair.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pair.steps(2)
    assert program.num_captures == 3
    for parameter in pair.model.parameters():  # as averaged weights are swapped in
        parameter.data = parameter.data.clone()
    pair.steps(2)
    assert (program.num_captures, program.num_launches) == (4, 0) and not gpu.races


def test_gradients_that_are_in_use_make_a_step_a_loop(gpu: FakeGpu, info_log: pytest.LogCaptureFixture) -> None:
    """They are in the memory that a replay writes to; once they are released it replays again."""
    pair = Pair(gpu)
    pair.steps(FIRST + 1)
    held = [parameter.grad for parameter in pair.model.parameters()]
    before, replays = [each.clone() for each in held], pair.program.num_replays
    pair.step()
    assert pair.program.num_replays == replays and "outputs of an earlier run are in use" in info_log.text
    for one, other in zip(held, before, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    held.clear()
    del one
    pair.step()
    assert pair.program.num_replays == replays + 1


def copies_in(log: Sequence[tuple[str, ...]]) -> int:
    """Return how many tensors the first copy takes."""
    return next(int(entry[1]) for entry in log if entry[0] == "copy")


def test_tensors_besides_model_and_batch_are_read_where_they_are(gpu: FakeGpu) -> None:
    """A replay copies in batches and weights of losses; what moves is copied from then on, once a step."""
    teacher = Teacher()
    pair = Pair(gpu, sgd, microbatches=2, loss=teacher.loss)
    pair.steps(FIRST + 2)
    log = gpu.sharing(Sharing.FREE).log

    def copied_in() -> int:
        log.clear()
        pair.step()
        return copies_in(log)

    program = pair.program
    assert copied_in() == 4 and (program.num_captures, program.num_launches) == (1, 0)
    teacher.model.weight.mul_(0.5)
    pair.step()
    assert program.num_captures == 1
    for number in range(3):
        teacher.others["factor"] = teacher.others["factor"] * 0.9
        assert copied_in() == 5 or not number, "the first time it is captured"
    assert (program.num_captures, program.num_launches) == (2, 0)
    teacher.model.weight.mul_(0.5)
    pair.step()
    assert not gpu.races


def test_a_tensor_that_micro_batches_share_no_more_is_linked_anew(gpu: FakeGpu) -> None:
    """The step in which that is found is the loop; the verdict of another program would be of other inputs."""
    masks: list[torch.Tensor] = []

    def loss_of(model: nn.Module, part: Sequence[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = (model(part[0]) * part[1]).square().mean()
        return loss

    def split(batch: torch.Tensor, count: int) -> list[Any]:
        return list(zip(batch.chunk(count), masks, strict=True))

    pair = Pair(gpu, None, microbatches=2, loss=loss_of, split=split)
    log = gpu.sharing(Sharing.FREE).log
    for number in range(FIRST + 6):
        mask = torch.rand(4, dtype=torch.float64)
        masks[:] = [mask, mask] if number < FIRST + 2 else [mask, mask.clone() * 2]
        log.clear()
        pair.step()
        if number == FIRST + 1:
            assert copies_in(log) == 5, "two batches, two weights, and one mask"
    assert copies_in(log) == 6 and not gpu.races


def test_variants_take_turns(gpu: FakeGpu) -> None:
    """The plan first, whose turn begins with its capture, segments in turn, and the loop."""
    pair = Pair(gpu, **{"plan.autotune": True})
    while not pair.run.tuners:
        pair.step()
    (tuner,) = pair.run.tuners
    ran = []
    for _ in range(16 + 2):
        pair.step()
        ran.append(tuner.current)
    assert ran == 16 * [Variant.PLAN] + 2 * [Variant.SERIAL]
    variants = tuner.program.variants
    loaded = variants.loaded()
    assert [loaded[each].num_replays for each in (Variant.PLAN, Variant.SERIAL)] == [16, 2]
    assert most_at_once(variants.compilation.plan) == 4 and loaded[Variant.SERIAL].bodies is variants.plan.bodies
    assert status(pair.run).startswith("measuring, about ") and not gpu.races


def test_a_step_replays_from_its_fourth_call_on_with_one_compile_of_each_body(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor compiles no whole graph before that is a small share of the training time."""
    compiled: list[list[str]] = []
    whole: list[int] = []

    def interpret(pieces: Sequence[Any]) -> Any:
        compiled.append([name for name, *_ in pieces])
        return interpret_bodies(pieces)

    monkeypatch.setattr("apollo_compile.session.bodies.interpret_bodies", interpret)
    monkeypatch.setattr("apollo_compile.session.compile.compile_again", lambda *_, **__: whole.append(1))
    pair = Pair(gpu, **{"plan.autotune": True})
    replays = []
    for _ in range(6):
        pair.step()
        replays.append(gpu.num_replays)
    assert replays[2] < replays[3] < replays[4] < replays[5] and pair.program.num_replays == 3
    assert len(compiled) == 2, "forward and backward"
    assert all(len(names) == len(set(names)) for names in compiled) and not whole


def test_sizes_that_come_often_have_a_replay_each_in_the_same_memory(gpu: FakeGpu) -> None:
    """Lengths padded to a few sizes: a program for each that has come three times; all others are loops."""
    pair = Pair(gpu)
    num_replays = {8: 0, 12: 0, 16: 0}
    for number in range(FIRST + 11):
        for size in (8, 12, *([16] if number in (1, 9) else [])):
            before = gpu.num_replays
            pair.step(size)
            num_replays[size] += gpu.num_replays - before == 1
    assert len(pair.run.tuners) == 2 and min(num_replays[8], num_replays[12]) >= 3 and not num_replays[16]
    recordings = [captured.recording for captured in gpu.captures]
    assert len(recordings) == 2 and len({id(each.pool) for each in recordings}) == 1 and not gpu.races


def test_state_is_not_put_where_activations_were(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is given back before the optimizer makes its state, in the first step only."""
    states: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: states.append(len(pair.optimizers[1].state)))
    pair = Pair(gpu)
    pair.steps(3)
    assert states == [0]


@pytest.mark.soak
def test_what_is_fastest_stays(gpu: FakeGpu) -> None:
    """The loop over replayed graphs, segments in turn, and the plan take turns."""
    pair = Pair(gpu, **{"plan.autotune": True})
    for _ in range(800):
        pair.step()
        if pair.run.tuners and pair.run.tuners[0].is_settled:
            break
    (tuner,) = pair.run.tuners
    assert {each.name for each in tuner.verdict.standings} == {Variant.LOOP, Variant.SERIAL, Variant.PLAN}
    assert tuner.verdict.standings[0].name == tuner.current and not gpu.races
    pair.step()


def test_a_capture_that_fails_leaves_the_loop(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    """With one WARNING for each variant, and nothing has changed by then."""
    pair = Pair(gpu, **{"debug.strict": False})
    pair.steps(FIRST)
    for device in gpu.others.values():
        device.fail_capture = RuntimeError("operation not permitted when stream is capturing")
    pair.steps(30)
    assert "plan failed, and is not run again: RuntimeError: operation not permitted" in caplog.text
    assert pair.run.tuners[0].current is Variant.LOOP


def test_a_loop_that_finds_no_memory_gets_that_of_the_program(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    """As the last batch of an epoch, which has another shape; the program is captured again."""
    pair = Pair(gpu)
    pair.steps(FIRST + 1)
    failures = [torch.OutOfMemoryError("no memory")]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if failures and not any(gpu.captures):
            failures.clear()
        if failures:
            raise failures[0]
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        pair.run(torch.ones(4, 8, dtype=torch.float64))
    assert "CUDA graphs of whole steps are released, and it runs again" in caplog.text and not failures
    captures = pair.program.num_captures
    pair.run(torch.ones(8, 8, dtype=torch.float64))
    assert pair.program.num_captures == captures + 1


def test_an_optimizer_that_counts_on_the_host_steps_afterwards(
    gpu: FakeGpu, info_log: pytest.LogCaptureFixture
) -> None:
    """One line says what to change."""
    pair = Pair(gpu, lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    pair.steps(FIRST + 2)
    assert "steps after the program: AdamW counts steps on the host; make it with fused=True" in info_log.text
    assert pair.program.num_replays == 2


@pytest.mark.parametrize("least", [0, segments.FEWEST_BYTES], ids=["apart", "joined"])
def test_an_empty_parameter_hides_no_rehearsal(gpu: FakeGpu, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of it is where it is itself, and the others of its update must not step in a rehearsal."""
    monkeypatch.setattr(segments, "FEWEST_BYTES", least)

    model = branches()[0]
    model.register_parameter("nothing", nn.Parameter(torch.empty(0, 8)))
    monkeypatch.setitem(globals(), "branches", lambda: [model])
    pair = Pair(gpu, loss=lambda model, batch: model.get_parameter("nothing").sum() + loss_fn(model, batch))
    pair.steps(FIRST + 2)
    assert pair.program.num_replays


def test_a_report_shows_the_program(gpu: FakeGpu) -> None:
    """Its plan on the lanes of the GPU; first where it is."""
    pair = Pair(gpu)
    pair.step()
    assert re.fullmatch(r"measuring, about \d+ steps? left: the loop first", status(pair.run))
    pair.steps(FIRST)
    text = str(report(pair.run))
    assert "0/0 step" in text and "left" in text and ":AdamW" in text, text
