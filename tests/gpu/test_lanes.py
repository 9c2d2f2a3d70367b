"""Lanes on a real GPU: SMs, captures, and training as in eager."""

from __future__ import annotations

import pytest
import torch

from apollo_compile.device.gpu.check.examine import examine_cuda
from apollo_compile.device.gpu.check.self_check import run_checks
from apollo_compile.device.gpu.run.execute import CudaExecutable
from apollo_compile.device.gpu.run.gpu import TorchGpu
from apollo_compile.session import registry
from apollo_compile.target.check_result import Level
from benchmarks.gpu_training_checks import OPTIONS as CHECKED
from tests.end_to_end.models import TwoTowers, assert_same_training, train, two_tower_inputs

OPTIONS = {**CHECKED, "plan.replan": False}  # formulas give small models lanes, whether or not these gain by them


def test_the_examination_finds_nothing_wrong() -> None:
    """Censuses in eager and in replay, nodes of captured graphs, lanes that overlap, and the experiments."""
    results = (*examine_cuda(), *run_checks(TorchGpu(0)))
    assert len(results) >= 13
    assert [result for result in results if result.level == Level.ERROR] == []


@pytest.mark.parametrize("dropout", (0.0, 0.3))
def test_training_is_as_in_inductor_for_fifty_steps(dropout: float) -> None:
    """Most of them replays of CUDA graphs over several lanes.

    Inductor draws the seeds of all masks of a graph at once, and so does the graph on lanes: from the same seed of the
    generator both have the same masks at every step.
    """
    model = TwoTowers(width=256, depth=4, dropout=dropout).cuda()
    image, text = (each.cuda() for each in two_tower_inputs(batch=128, width=256))

    def loss_of(run):  # type: ignore[no-untyped-def]
        return run(image, text).square().mean()

    torch.manual_seed(7)
    expected = train(model, loss_of, steps=50, backend="inductor")
    after = torch.cuda.get_rng_state()
    torch.manual_seed(7)
    actual = train(model, loss_of, steps=50, backend="apollo", options=OPTIONS)
    assert_same_training(expected, actual)
    assert torch.equal(torch.cuda.get_rng_state(), after), "as many random numbers were drawn"
    executables = [graph.executable for made in registry.compiled_models() for graph in made.graphs]
    assert sum(each.num_replays for each in executables if isinstance(each, CudaExecutable)) >= 80


def test_a_thousand_replays_give_the_same_numbers() -> None:
    """A race would show."""
    torch._dynamo.reset()
    model = TwoTowers(width=256, depth=4).cuda()
    run = torch.compile(model, backend="apollo", options=OPTIONS)
    inputs = tuple(each.cuda() for each in two_tower_inputs(width=256))
    with torch.no_grad():
        first = [run(*inputs) for _ in range(3)][-1]
        assert all(torch.equal(run(*inputs), first) for _ in range(1000))
