"""Checks of whole models on a GPU: does training on lanes, in replays of CUDA graphs, give what it has to?

They compile tiny models, which takes most of their time; checks that follow each other share one where they can. They
time nothing, so other processes may use the GPU meanwhile. What else is checked, and in which order: `gpu_checks.py`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from apollo_compile import backend
from apollo_compile.device.gpu.check.experiments import poison
from apollo_compile.device.gpu.run.execute import CudaExecutable
from apollo_compile.device.gpu.run.gpu import TorchGpu
from apollo_compile.ir import Role
from apollo_compile.session import registry
from apollo_compile.units import format_bytes
from benchmarks.harness.gpu_lanes import Outcome
from benchmarks.workloads.gpu import SHAPES, build_gpu_workload

OPTIONS = {
    "debug.strict": True,
    "device.cuda_lanes": True,
    "plan.autotune": False,
    "plan.min_gain": 0.0,
    "plan.planner": "greedy",
    "runtime.isolation": True,
}
"""Run the plan, whatever is faster, and raise what would be hidden otherwise."""

FORMULA_OPTIONS = {**OPTIONS, "plan.replan": False, "device.profile": "h200"}
"""Keep the plan that rests on formulas and the data sheet, whatever was measured on this GPU: it has lanes even where
small models gain nothing by them."""

UNCOUNTED_STEPS = 5
"""Until forward and backward replay."""

STEPS = 50

NUM_MASKS = 8
"""Steps from one seed that all draw other masks."""

DROPOUT = 0.3

SLOPE_STEP = 1e-3
"""How far parameters are moved to find the slope of the loss."""


def replays_do_not_race(gpu: TorchGpu, names: Sequence[str] = ("flava",), count: int = 50) -> Outcome:
    """T4: training steps are replayed with the same numbers, with poison in all memory of the graphs before each."""
    seen, is_met = {}, True
    for name in names:
        run, inputs = _compiled(gpu, name)
        for _ in range(UNCOUNTED_STEPS):
            expected = _step(run.model, run, inputs)
        before, num_wrong = _num_replays(), 0
        for _ in range(count):
            for executable in _executables():
                _poison(executable)
            num_wrong += not _are_same(_step(run.model, run, inputs), expected)
        replays = _num_replays() - before
        has_lanes = _num_lanes() > 1 or len(SHAPES[name].towers) == 1  # of a chain nothing runs side by side
        is_met = is_met and num_wrong == 0 and replays == 2 * count and has_lanes
        seen[name] = f"{num_wrong} of {count} steps differ, with {replays} replays on {_num_lanes()} lanes"
    return Outcome(is_met=is_met, text="; ".join(f"{name}: {text}" for name, text in seen.items()), numbers=seen)


def _are_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether losses are equal, and gradients as far as libraries add them up in the same order; poison is neither."""
    (loss, *gradients), (expected_loss, *expected_gradients) = found, expected
    return torch.equal(loss, expected_loss) and all(
        torch.allclose(one, other, rtol=1e-3, atol=1e-4 * other.abs().max().item())
        for one, other in zip(gradients, expected_gradients, strict=True)
    )


def loops_are_as_in_eager(gpu: TorchGpu) -> Outcome:
    """T7: gradients of loops that keep, add up, hold or drop gradients in other orders than usual are eager's."""
    run, inputs = _compiled(gpu, "clip_b32")
    eager = build_gpu_workload("clip_b32", batch=4, scale="tiny", device=str(gpu.device)).model
    for _ in range(UNCOUNTED_STEPS):
        _step(run.model, run, inputs)
    replays = _num_replays()  # of forward and backward; the loops below compile another graph, without gradients
    worst: dict[str, float] = {}
    for name, loop in _LOOPS.items():
        expected, found = (loop(model, call, inputs) for model, call in ((eager, eager), (run.model, run)))
        worst[name] = max((one - other).abs().max().item() for one, other in zip(expected, found, strict=True))
    shown = ", ".join(f"{name} {difference:.1e}" for name, difference in worst.items())
    is_met = max(worst.values()) < 1e-3 and replays >= 2
    return Outcome(is_met=is_met, text=f"{shown}; {replays} replays before", numbers=worst)


_Call = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def _retain_graph(model: nn.Module, call: _Call, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Go through a graph twice."""
    model.zero_grad(set_to_none=True)
    with without_tf32():
        loss = call(inputs)
        loss.backward(retain_graph=True)
        loss.backward()
    return _gradients(model)


def _accumulate(model: nn.Module, call: _Call, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Add up three backwards, the last two with an inference between them."""
    model.zero_grad(set_to_none=True)
    with without_tf32():
        for _ in range(3):
            call(inputs).backward()
            with torch.no_grad():
                call(inputs)
    return _gradients(model)


def _two_forwards(model: nn.Module, call: _Call, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Take both forwards before the backwards."""
    model.zero_grad(set_to_none=True)
    with without_tf32():
        first, second = call(inputs), call({name: each.flip(0) for name, each in inputs.items()})
        first.backward()
        second.backward()
    return _gradients(model)


def _drop_after_forward(model: nn.Module, call: _Call, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Drop gradients between forward and backward, as Lightning's closure does; three steps."""
    with without_tf32():
        for _ in range(3):
            loss = call(inputs)
            model.zero_grad(set_to_none=True)
            loss.backward()
    return _gradients(model)


def _hold(model: nn.Module, call: _Call, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Hold the gradients of a step over the next one."""
    held = []
    with without_tf32():
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            call(inputs).backward()
            held += [each.grad for each in model.parameters() if each.grad is not None]
    return [each.clone() for each in held]


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


_LOOPS: Mapping[str, Callable[[nn.Module, _Call, dict[str, torch.Tensor]], list[torch.Tensor]]] = {
    "retain_graph": _retain_graph,
    "accumulation": _accumulate,
    "two forwards": _two_forwards,
    "zero_grad after forward": _drop_after_forward,
    "held gradients": _hold,
}


def masks_are_right_under_replay(gpu: TorchGpu) -> Outcome:
    """T5: other masks at every replay, the same again from the same seed, and the same as where nothing is replayed."""
    run, inputs = _compiled(gpu, "clip_b32", dropout=DROPOUT)
    for _ in range(UNCOUNTED_STEPS):
        _step(run.model, run, inputs)
    before, runs = _num_replays(), []
    for _ in range(2):
        torch.manual_seed(7)
        runs.append([_step(run.model, run, inputs)[0].item() for _ in range(NUM_MASKS)])
    replays = _num_replays() - before
    run.model.zero_grad(set_to_none=True)
    with without_tf32():
        held = run(inputs)  # what it saved is in the memory that replays write to, so none follows
        before = _num_replays()
        torch.manual_seed(7)
        launched = [run(inputs).item() for _ in range(NUM_MASKS)]
        is_launched = _num_replays() == before
    del held
    num_masks, is_same_again = len(set(runs[0])), runs[0] == runs[1]
    is_as_launched = all(math.isclose(*pair, rel_tol=1e-3) for pair in zip(runs[0], launched, strict=True))
    text = f"{num_masks} of {NUM_MASKS} steps differ; reseeded: {is_same_again}; as launched: {is_as_launched}"
    is_met = num_masks == NUM_MASKS and is_same_again and is_as_launched
    is_met = is_met and replays == 2 * 2 * NUM_MASKS and is_launched
    return Outcome(is_met=is_met, text=f"{text}; {replays} replays", numbers={"replayed": runs, "launched": launched})


def training_is_as_in_eager(gpu: TorchGpu) -> Outcome:
    """T7: losses and gradients over 12 steps, with the backward on autograd's thread."""
    run, inputs = _compiled(gpu, "imagebind")
    eager = build_gpu_workload("imagebind", batch=4, scale="tiny", device=str(gpu.device)).model
    worst = 0.0
    for _ in range(12):
        pairs = zip(_step(eager, eager, inputs), _step(run.model, run, inputs), strict=True)
        worst = max(worst, *((one - other).abs().max().item() for one, other in pairs))
    text = f"largest difference {worst:.1e}, {_num_replays()} replays on {_num_lanes()} lanes"
    is_met = worst < 1e-3 and _num_replays() >= 16 and _num_lanes() > 1
    return Outcome(is_met=is_met, text=text, numbers={"worst": worst})


def masks_are_those_of_inductor(gpu: TorchGpu) -> Outcome:
    """T5, T7: losses and gradients of 50 steps with dropout are Inductor's, from the same seed of the generator.

    Inductor draws the seeds of all its masks of a graph at once; so does the graph on lanes, in a replay as well.
    Kernels of attention draw their own, in the order in which they are launched, which lanes change: there is
    no dropout in attention here.
    """
    torch._dynamo.reset()
    reference = build_gpu_workload("clip_b32", batch=4, scale="tiny", device=str(gpu.device), dropout=DROPOUT)
    _drop_nothing_of_attention(reference.model)
    expected = _train(reference.model, torch.compile(reference.model), reference.inputs)
    run, inputs = _fresh(gpu, "clip_b32", dropout=DROPOUT)
    _drop_nothing_of_attention(run.model)
    found = _train(run.model, run, inputs)
    worst = max(
        (one - other).abs().max().item()
        for step, its in zip(expected, found, strict=True)
        for one, other in zip(step, its, strict=True)
    )
    num_masks = len({step[0].item() for step in found})
    text = f"largest difference {worst:.1e} over {STEPS} steps, {num_masks} of them with masks of their own"
    is_met = worst < 1e-3 and num_masks == STEPS and _num_replays() >= STEPS and _num_lanes() > 1
    return Outcome(is_met=is_met, text=f"{text}; {_num_replays()} replays", numbers={"worst": worst})


def _drop_nothing_of_attention(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def backwards_have_the_masks_of_their_forwards(gpu: TorchGpu) -> Outcome:
    """T5: with dropout in attention too, gradients are the slopes of losses from the same seed, in replays."""
    run, inputs = _compiled(gpu, "clip_b32", dropout=DROPOUT)
    parameters = list(run.model.parameters())
    generator = torch.Generator(gpu.device).manual_seed(1)
    directions = [torch.randn(each.shape, generator=generator, device=gpu.device) for each in parameters]

    def loss_at(place: float) -> float:
        with torch.no_grad():
            torch._foreach_add_(parameters, directions, alpha=place)
        torch.manual_seed(7)
        with without_tf32():
            loss = run(inputs).item()
        with torch.no_grad():
            torch._foreach_sub_(parameters, directions, alpha=place)
        return float(loss)

    for _ in range(UNCOUNTED_STEPS):
        _step(run.model, run, inputs)
    before = _num_replays()
    torch.manual_seed(7)
    _, *gradients = _step(run.model, run, inputs)
    run.model.zero_grad(set_to_none=True)  # lent gradients are in the memory that the next forward writes to
    slope = sum(float((one * other).sum()) for one, other in zip(gradients, directions, strict=True))
    found = (loss_at(SLOPE_STEP) - loss_at(-SLOPE_STEP)) / (2 * SLOPE_STEP)
    difference = abs(found - slope) / max(abs(found), abs(slope), 1e-6)
    replays = _num_replays() - before
    text = f"slope {slope:.4f} by gradients, {found:.4f} by losses, {difference:.1%} apart, in {replays} replays"
    return Outcome(
        is_met=difference < 0.02 and replays == 4, text=text, numbers={"by gradients": slope, "found": found}
    )


def _train(
    model: nn.Module, run: Callable[[dict[str, torch.Tensor]], torch.Tensor], inputs: dict[str, torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Return the loss and all gradients of every step, from a fixed seed of the generator."""
    torch.manual_seed(7)
    return [_step(model, run, inputs) for _ in range(STEPS)]


def lanes_account_for_their_memory(gpu: TorchGpu) -> Outcome:
    """T10: what lanes took, by the allocator's segments, for a forward of two encoders."""
    run, inputs = _compiled(gpu, "clip_b32")
    with torch.no_grad():
        for _ in range(4):
            run(inputs)
    forwards = [made for made in _executables() if made.graph.role is Role.INFERENCE]
    taken = {lane: size for made in forwards for lane, size in made.lane_bytes().items()}
    shown = ", ".join(f"lane {lane} {format_bytes(size)}" for lane, size in taken.items())
    return Outcome(is_met=bool(taken) and all(taken.values()), text=shown or "no lane took memory", numbers=taken)


class _Compiled:
    """A compiled tiny model, called with its inputs."""

    def __init__(self, gpu: TorchGpu, name: str, dropout: float) -> None:
        torch._dynamo.reset()
        workload = build_gpu_workload(name, batch=4, scale="tiny", device=str(gpu.device), dropout=dropout)
        self.key = (name, dropout)
        self.model: nn.Module = workload.model
        self.inputs = workload.inputs
        self._run = torch.compile(workload.model, backend=backend.apollo, options=FORMULA_OPTIONS)

    def __call__(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._run(inputs)


_shared: list[_Compiled] = []
"""The model that was compiled last, if checks may share it: only what leaves weights and modules as they were."""


def _fresh(gpu: TorchGpu, name: str, *, dropout: float = 0.0) -> tuple[_Compiled, dict[str, torch.Tensor]]:
    """Return a model that was not compiled yet, and its inputs; no other check gets it."""
    _shared.clear()  # to compile it ends whatever was compiled before
    made = _Compiled(gpu, name, dropout)
    return made, made.inputs


def _compiled(gpu: TorchGpu, name: str, *, dropout: float = 0.0) -> tuple[_Compiled, dict[str, torch.Tensor]]:
    """Return the model of the check before if it is the same, or else a new one, and its inputs."""
    if not _shared or _shared[0].key != (name, dropout):
        made, _ = _fresh(gpu, name, dropout=dropout)
        _shared.append(made)
    return _shared[0], _shared[0].inputs


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Multiply matrices of float32 as they are: rounded to TF32, small differences become large ones."""
    before = torch.get_float32_matmul_precision()
    places = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    precisions = [place.fp32_precision for place in places]  # by default "none": another key of caches than "ieee"
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for place, precision in zip(places, precisions, strict=True):
            place.fp32_precision = precision


def _step(
    model: nn.Module, run: Callable[[dict[str, torch.Tensor]], torch.Tensor], inputs: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Return the loss and all gradients of a training step."""
    model.zero_grad(set_to_none=True)
    with without_tf32():
        loss = run(inputs)
        loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def _executables() -> list[CudaExecutable]:
    """Return those of the model that was compiled last."""
    graphs = registry.compiled_models()[-1].graphs
    return [graph.executable for graph in graphs if isinstance(graph.executable, CudaExecutable)]


def _num_replays() -> int:
    return sum(each.num_replays for each in _executables())


def _num_lanes() -> int:
    """Return the lanes that the widest of its graphs uses."""
    return max(sum(map(bool, each.program.instructions)) for each in _executables())


def _poison(executable: CudaExecutable) -> None:
    """Fill all memory of a captured graph with NaNs; nobody may hold anything in it."""
    for captured in executable.captures:
        if captured.is_live:
            poison(captured.recording)
