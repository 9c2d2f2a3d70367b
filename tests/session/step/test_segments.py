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
        add = segments.add_gradients(group, dict(enumerate(parameters)), in_place=False)
        gradients.update(zip(group.sizes, run(add, *taken), strict=True))
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


def test_narrow_gradients_are_cast_while_they_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those of casting first, and what the backward made stays as it was."""
    monkeypatch.setattr(segments, "_PIECE", 7)
    monkeypatch.setattr(segments, "FEWEST_BYTES", 100)
    parameters = dict(enumerate(gradients_of(0)))
    made = [[g.bfloat16() if place in (0, 3) else g for place, g in enumerate(gradients_of(seed))] for seed in range(3)]
    backward = graph(*4 * [()], sizes=[0, *(each.nbytes for each in made[0])])
    (group,) = segments.group_gradients(backward, parameters)
    assert (group.sizes, group.narrow) == ({0: 48, 1: 20, 2: 4, 3: 16}, {0: 24, 3: 8})
    wide = run(segments.widen_gradients(group, parameters), made[0][0], made[0][3])
    first, second, third = [[each.float() for each in gradients] for gradients in made]
    assert all(map(torch.equal, wide, (first[0], first[3])))
    sums = run(segments.add_gradients(group, parameters, in_place=False), *made[0], *made[1])
    assert all(map(torch.equal, sums, map(torch.add, first, second)))
    assert all(map(torch.equal, first, (each.float() for each in made[0])))
    assert not run(segments.add_gradients(group, parameters, in_place=True), *sums, *made[2])
    assert all(
        map(torch.equal, sums, (one + two + three for one, two, three in zip(first, second, third, strict=True)))
    )


def test_a_scalar_of_lower_precision_keeps_its_dtype() -> None:
    """`_foreach_mul` alone would return the dtype of the factor."""
    group = segments.GradientGroup(name="a", module="", sizes={0: 2})
    parameters = {0: torch.nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))}
    segment = segments.update_parameters(group, parameters, None, is_clipped=True)
    (made,) = run(segment, torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor(0.25))
    assert made.dtype == torch.bfloat16 and made == 0.5
