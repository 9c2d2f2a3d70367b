"""Segments between backward and optimizer compute what torch's own functions compute, and move the bytes they say."""

from __future__ import annotations

import copy

import pytest
import torch

from apollo_compile.session.step import segments
from apollo_compile.torch_bridge.optimizers import OptimizerInParts
from tests.builders import graph

SHAPES = ((3, 4), (5,), (), (2, 2))
GROUPS = (
    segments.GradientGroup(name="a", module="image", sizes={2: 4, 0: 48}),
    segments.GradientGroup(name="b", module="text", sizes={1: 20, 3: 16}),
)
"""Of four parameters, in two groups, out of order."""


def gradients_of(seed: int) -> list[torch.Tensor]:
    """Return a gradient for each parameter."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def run(segment: segments.OneSegment, *taken: torch.Tensor) -> list[torch.Tensor]:
    """Run a segment's code with tensors of the sizes that its graph says."""
    graph = segment.graph
    assert [graph.buffers[buffer].num_bytes for buffer in graph.inputs] == [each.nbytes for each in taken]
    made = list(segment.body.function(list(taken)))
    expected = [graph.buffers[buffer].num_bytes for buffer in graph.outputs if buffer is not None]
    assert expected == [each.nbytes for each in made]
    return made


def test_small_gradients_of_several_segments_are_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters keep their order; a group ends where it has enough, or the dtype changes."""
    monkeypatch.setattr(segments, "FEWEST_BYTES", 100)
    names = ["net.first", "net.second", "net.third.a", "net.third.b", "/last", "large", "half", "other"]
    made = graph(*8 * [()], names=names, sizes=[*6 * [40], 100, 40, 40])
    dtypes = [*6 * [torch.float32], torch.bfloat16, torch.float32]
    parameters = {place: torch.empty(0, dtype=dtype) for place, dtype in enumerate(dtypes)}
    groups = segments.group_gradients(made, parameters)
    assert [(each.name, each.module, dict(each.sizes)) for each in groups] == [
        ("net.first to net.third.a", "net", {0: 40, 1: 40, 2: 40}),
        ("net.third.b to /last", "", {3: 40, 4: 40}),
        *((names[place], names[place], {place: 40 if place > 5 else 100}) for place in (5, 6, 7)),
    ]


def test_a_collective_runs_on_the_network() -> None:
    """The planner puts it on a lane without units; what it makes may have other sizes, as shards have."""
    gradients = gradients_of(0)
    segment = segments.communicate(GROUPS[0], "mean", [4, 24], lambda taken: [taken[0] / 2, taken[1][:, :2] / 2])
    assert [each.has_collective for each in segment.graph.segments] == [True]
    assert torch.equal(run(segment, gradients[2], gradients[0])[0], gradients[2] / 2)


@pytest.mark.parametrize("limit", [0.1, 1000.0])
@pytest.mark.parametrize("is_stepped", [True, False])
def test_adding_clipping_and_updating_in_groups_is_doing_so_at_once(limit: float, is_stepped: bool) -> None:
    """The bits are the same, since norms are added up in the order of the parameters."""
    earlier, later = gradients_of(0), gradients_of(1)
    parameters = [torch.nn.Parameter(torch.full(shape, 0.5)) for shape in SHAPES]
    expected = copy.deepcopy(parameters)
    for parameter, one, other in zip(expected, earlier, later, strict=True):
        parameter.grad = one + other
    torch.nn.utils.clip_grad_norm_(expected, limit)
    if is_stepped:
        torch.optim.SGD(expected, lr=0.1, momentum=0.9).step()
    optimizer = OptimizerInParts(torch.optim.SGD(parameters, lr=0.1, momentum=0.9)) if is_stepped else None

    gradients: dict[int, torch.Tensor] = {}
    for group in GROUPS:
        taken = [each[place] for each in (earlier, later) for place in group.sizes]
        gradients.update(zip(group.sizes, run(segments.add_gradients(group), *taken), strict=True))
    norms = [
        run(segments.measure_gradients(group), *(gradients[place] for place in group.sizes))[0] for group in GROUPS
    ]
    (factor,) = run(segments.limit_gradients(GROUPS, order=range(4), limit=limit), *norms)
    for group in GROUPS:
        own = [gradients[place] for place in group.sizes]
        written = [parameters[place] for place in group.sizes] if is_stepped else []
        segment = segments.update_parameters(group, dict(enumerate(parameters)), optimizer, is_clipped=True)
        for place, gradient in zip(group.sizes, run(segment, *written, *own, factor), strict=True):
            assert torch.equal(gradient, expected[place].grad)
    assert all(torch.equal(mine, other) for mine, other in zip(parameters, expected, strict=True))


def test_a_scalar_of_lower_precision_keeps_its_dtype() -> None:
    """`_foreach_mul` alone would return the dtype of the factor."""
    group = segments.GradientGroup(name="a", module="", sizes={0: 2})
    parameters = {0: torch.nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))}
    segment = segments.update_parameters(group, parameters, None, is_clipped=True)
    (made,) = run(segment, torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor(0.25))
    assert made.dtype == torch.bfloat16 and made == 0.5
