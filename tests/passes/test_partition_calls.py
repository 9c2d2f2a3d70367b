"""Modules that are called several times, and modules that share small values: what is independent stays so."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.config import Config, PartitionConfig
from apollo_compile.ir import Partition, Role, Segment
from apollo_compile.passes.partition import partition_graph
from apollo_compile.passes.partition.pieces import LONG
from apollo_compile.session.dry_run import trace
from apollo_compile.store.profiles import default_profile
from benchmarks.workloads.act import Act, FrozenBatchNorm, ResNet
from tests.end_to_end.models import TwoTowers, embedded_tower
from tests.end_to_end.step_cases.models import Wrapped
from tests.passes.test_partition import (
    APART,
    FINE,
    LAYER,
    MODULE,
    Recorded,
    assert_independent,
    assert_replays,
    closure,
    record,
    sized,
)

NORMS: dict[str, Callable[[int], nn.Module]] = {"frozen": FrozenBatchNorm, "live": nn.BatchNorm2d}

FEW = 32
"""Width of the first layers: enough that the arithmetic of a batch norm's scale is next to no work."""


def see(own: Any, *images: torch.Tensor) -> torch.Tensor:
    """Run a backbone for all cameras, or one for each, and a head on the features of all of them."""
    found = torch.zeros(())
    for number, camera in enumerate(images):
        backbone = own.backbones[number % len(own.backbones)]
        found = found + backbone(camera).mean((2, 3))
    return own.head(found)


def act(own: Any, *images: torch.Tensor) -> torch.Tensor:
    """Run a backbone inside another module, so that its stem has one label, as in most policies."""
    return torch.cat([own.model["backbone"](camera) for camera in images], dim=1).mean((2, 3))


@functools.cache
def graphs_of(kind: str, norm: str, num_cameras: int) -> dict[Role, Recorded]:
    """Return forward and backward of a model; several tests read them and none changes them."""
    torch.manual_seed(0)
    backbones = [ResNet(FEW, (1, 1), NORMS[norm]) for _ in range(num_cameras if kind == "separate" else 1)]
    if kind == "policy":
        model = Wrapped(act, model=nn.ModuleDict({"backbone": backbones[0]}))
    else:
        model = Wrapped(see, backbones=nn.ModuleList(backbones), head=nn.Linear(2 * FEW, 8))
    return record(model.train(), [sized(4, 3, 48, 48) + number for number in range(num_cameras)])


CASES = [
    *((kind, norm, count) for kind, count in (("policy", 1), ("policy", 2), ("shared", 2)) for norm in NORMS),
    ("policy", "frozen", 3),
    ("policy", "live", 4),
    ("separate", "frozen", 2),
    ("separate", "live", 2),
]


def convolutions(partition: Partition, recorded: Recorded) -> list[list[int]]:
    """Return the convolutions of every segment, as many as there are outputs of them."""
    nodes = recorded.captured.nodes
    return [[n for n in content if "convolution" in nodes[n].target] for content in partition.nodes_by_segment]


def main_segments(partition: Partition, recorded: Recorded) -> list[Segment]:
    """Return the segments with a convolution."""
    found = convolutions(partition, recorded)
    return [segment for segment in partition.graph.segments if found[segment.id]]


@pytest.mark.parametrize("config", (LAYER, FINE, MODULE, APART), ids=("layer", "fine", "module", "apart"))
@pytest.mark.parametrize(("kind", "norm", "num_cameras"), CASES)
def test_bodies_of_cameras_replay_bit_for_bit(kind: str, norm: str, num_cameras: int, config: PartitionConfig) -> None:
    """Forward and backward, however they are cut."""
    for recorded in graphs_of(kind, norm, num_cameras).values():
        assert_replays(recorded, config)


@pytest.mark.parametrize(("kind", "norm", "num_cameras"), CASES)
@pytest.mark.parametrize("role", (Role.FORWARD, Role.BACKWARD))
def test_calls_of_a_backbone_are_independent_but_for_one_segment_in_front_and_one_behind(
    kind: str, norm: str, num_cameras: int, role: Role
) -> None:
    """Segments with convolutions fall into as many parts as there are cameras, without a path between the parts.

    Scales of frozen norms and running statistics of live ones are no segments of their own.
    """
    recorded = graphs_of(kind, norm, num_cameras)[role]
    partition = partition_graph(recorded.captured, config=LAYER)
    before, own = closure(partition.graph), main_segments(partition, recorded)
    parts: list[set[int]] = []
    for segment in own:
        joined = [part for part in parts if part & before[segment.id]]
        parts = [part for part in parts if part not in joined] + [{segment.id}.union(*joined)]
    assert len(parts) == num_cameras, [[partition.graph.segments[s].name for s in part] for part in parts]
    names = [segment.name for segment in partition.graph.segments]
    assert names.count("~first") <= 1 and names.count("~last") <= 1
    if num_cameras > 1 and kind != "separate":
        where = "~first" if norm == "frozen" else "~last"
        assert where in names or (norm, role) == ("live", Role.BACKWARD)
    others = [segment for segment in partition.graph.segments if segment not in own]
    assert len(others) <= 2 + 2 + sum(name.partition("#")[0].endswith(":update") for name in names), names


@pytest.mark.parametrize("role", (Role.FORWARD, Role.BACKWARD))
@pytest.mark.parametrize("num_cameras", (2, 3))
def test_equal_calls_share_bodies(num_cameras: int, role: Role) -> None:
    """Also where a later call reads views that an earlier one made; with live norms, calls may save other values."""
    recorded = graphs_of("policy", "frozen", num_cameras)[role]
    own = main_segments(partition_graph(recorded.captured, config=LAYER), recorded)
    assert len({segment.body for segment in own}) == len(own) / num_cameras


def test_the_stems_of_two_cameras_run_side_by_side() -> None:
    """In the plan of a policy with a ResNet on two cores, forward and backward, and calls share bodies."""
    torch.manual_seed(0)
    model = Act(backbone=32, stages=(1, 1, 1, 1), width=64, hidden=128, layers=1, heads=2, chunk=10)
    inputs = sized(4, 3, 96, 96), sized(4, 3, 96, 96), sized(4, 14), sized(4, 10, 14)
    config = Config(plan=replace(Config().plan, planner="greedy", time_limit_s=1.0))
    for compilation, _ in trace(model, (inputs, {}), config, default_profile(2)).planned:
        graph, plan = compilation.partition.graph, compilation.plan
        own = [s for s in graph.segments if s.module.startswith("backbone") and not s.name.endswith(":update")]
        times = {a.segment: (a.start_ns, a.end_ns) for a in plan.assignments}
        stems = [s for s in own if s.module == "backbone.conv1"]
        assert len(stems) == 2, [s.name for s in graph.segments]
        assert len({s.body for s in own}) <= len(own) // 2 + 1
        assert stems[0].id not in closure(graph)[stems[1].id]
        overlap = sum(
            max(0, min(times[a.id][1], times[b.id][1]) - max(times[a.id][0], times[b.id][0]))
            for a in own
            for b in own
            if a.id < b.id
        )
        total = sum(end - start for start, end in (times[s.id] for s in own))
        assert overlap >= total / 4, f"{compilation.capture.role}: calls overlap for {overlap} of {total} ns"
        assert plan.makespan_ns < plan.serial_ns


def home_of_seeds(partition: Partition, recorded: Recorded) -> Segment:
    """Return the segment that draws all seeds."""
    seeds = {node.id for node in recorded.captured.nodes if node.target == "prims.inductor_seeds.default"}
    (home,) = (s for s, content in enumerate(partition.nodes_by_segment) if seeds & set(content))
    return partition.graph.segments[home]


@pytest.mark.parametrize("config", (LAYER, FINE), ids=("layer", "fine"))
def test_seeds_of_dropout_tie_no_towers_together(config: PartitionConfig) -> None:
    """All are drawn at once, in a segment of their own or in front."""
    torch.manual_seed(0)
    recorded = record(TwoTowers(64, 2, dropout=0.4), (sized(64, 64), sized(64, 64)))[Role.FORWARD]
    partition = assert_replays(recorded, config)
    assert_independent(partition.graph, "image", "text")
    home = home_of_seeds(partition, recorded)
    readers = [s for s in partition.graph.segments if home.id in partition.graph.predecessors(s.id)]
    assert {s.module.partition(".")[0] for s in readers} >= {"image", "text"} and not home.module


def test_an_embedding_with_dropout_does_not_draw_the_seeds_of_others() -> None:
    """It is tiny beside its tower and reads nothing else, but takes longer than a launch."""
    torch.manual_seed(0)
    model = TwoTowers()
    for name in ("image", "text"):
        model.add_module(name, embedded_tower(0.4))
    recorded = record(model, [torch.arange(512) % 100] * 2)[Role.FORWARD]
    assert_independent(assert_replays(recorded, LAYER).graph, "image", "text")


def tower(hidden: int, dropout: float) -> nn.Module:
    """Return two layers."""
    layers = ((nn.Linear(64, hidden), nn.GELU(), nn.Linear(hidden, 64), nn.Dropout(dropout)) for _ in range(2))
    return nn.Sequential(OrderedDict(layers=nn.Sequential(*(nn.Sequential(*each) for each in layers))))


@pytest.mark.parametrize(("hidden", "is_apart"), [(64, True), (512, False), (2048, False)])
def test_seeds_that_one_tower_reads_are_drawn_in_it_if_its_layers_are_wide(hidden: int, is_apart: bool) -> None:
    """A segment of their own would cost a launch; beside narrow layers they have one, and the other tower is free."""
    torch.manual_seed(0)
    model = TwoTowers()
    model.image, model.text = tower(hidden, 0.0), tower(hidden, 0.4)  # type: ignore[assignment]
    recorded = record(model, (sized(64, 64), sized(64, 64)))[Role.FORWARD]
    partition = assert_replays(recorded, LAYER)
    assert home_of_seeds(partition, recorded).module.startswith("text.") is not is_apart
    assert_independent(partition.graph, "image", "text")


def loop(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Run an encoder, and carry a state over many small steps beside it."""
    seen = own.encoder(x).unflatten(1, (-1, 16))
    state = seen.new_zeros(len(seen), 16)
    for step in range(seen.shape[1]):
        given = own.before(seen[:, step])
        reset, new, update = own.gates(torch.cat([given, state], dim=-1)).chunk(3, dim=-1)
        state = update.sigmoid() * (reset.sigmoid() * new).tanh() + (1 - update.sigmoid()) * state
    return state


def test_small_steps_of_a_long_loop_share_bodies() -> None:
    """Forward and backward: little of the loop is compiled, and no segment has more than a few steps."""
    torch.manual_seed(0)
    model = Wrapped(
        loop,
        encoder=nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 14 * 16)),
        before=nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.SiLU()),
        gates=nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48)),
    )
    for recorded in record(model, (sized(512, 512),)).values():
        lengths = [len(body.nodes) for body in assert_replays(recorded, LAYER).bodies]
        assert max(lengths) <= 2 * LONG and sum(lengths) < 0.6 * len(recorded.captured.nodes)
