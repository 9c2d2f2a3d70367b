"""What was found out about a graph is recalled for the same graph on the same machine, and for no other."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from apollo_compile.config import Config, load_config
from apollo_compile.device.lanes import lane_catalogue
from apollo_compile.device.profile import DeviceProfile, default_profile
from apollo_compile.ir import Capture, Node, NodeId, NodeKind, Observations, Role, Standing, Verdict
from apollo_compile.passes.partition import partition_graph
from apollo_compile.store import history
from apollo_compile.store.history import Finding, History, circumstances, key_of
from tests.builders import random_costs, random_graph, random_plan

PROFILE = default_profile(4)


def chain_capture(length: int) -> Capture:
    """Return a graph of products, one after the other."""
    nodes = [Node(id=NodeId(0), name="x", kind=NodeKind.INPUT, target="x", inputs=(), num_bytes=4)]
    nodes += [
        Node(
            id=NodeId(index),
            name=f"mm{index}",
            kind=NodeKind.COMPUTE,
            target="aten.mm",
            inputs=(NodeId(index - 1),),
            num_bytes=4,
            signature="mm",
        )
        for index in range(1, length)
    ]
    return Capture(name="chain", role=Role.INFERENCE, nodes=tuple(nodes), outputs=(NodeId(length - 1),))


def a_finding() -> Finding:
    """Return one with a plan and a verdict."""
    rng = random.Random(0)
    graph, lanes = random_graph(rng, 5), lane_catalogue(4)
    standings = (Standing(name="plan", step_ns=5.0, ratio=1.0, num_rounds=5),)
    return Finding(
        observations=Observations(),
        plan=random_plan(rng, graph, lanes, random_costs(rng, graph, lanes)),
        way="plan",
        verdict=Verdict(winner="plan", choice=("plan",), standings=standings, num_steps=30),
    )


def test_a_finding_is_recalled_as_it_was(tmp_path: Path) -> None:
    """By its key only."""
    kept = History(tmp_path / "new" / "folder")
    assert kept.recall("a") is None
    kept.keep("a", a_finding())
    assert kept.recall("a") == a_finding()
    assert kept.recall("b") is None


def test_old_findings_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So are those from a clock that was ahead, and all but the youngest."""
    kept = History(tmp_path)
    kept.keep("a", a_finding())
    file = tmp_path / "a.json"
    content = json.loads(file.read_text())
    for made_at in (content["made_at"] - history.MAX_AGE_S - 1, content["made_at"] + 3600):
        file.write_text(json.dumps({**content, "made_at": made_at}))
        assert kept.recall("a") is None
    monkeypatch.setattr(history, "MAX_FILES", 2)
    for age, name in enumerate("cde"):
        kept.keep(name, a_finding())
        os.utime(tmp_path / f"{name}.json", (age, age))
    kept.keep("f", a_finding())
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "f"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "made_at": 0, "finding": {"way": 3}}'])
def test_a_damaged_file_is_as_none(tmp_path: Path, text: str) -> None:
    """Whatever is in it."""
    (tmp_path / "a.json").write_text(text)
    assert History(tmp_path).recall("a") is None


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    """Training does not end because of that."""
    (tmp_path / "file").write_text("")
    kept = History(tmp_path / "file")
    kept.keep("a", a_finding())
    assert kept.recall("a") is None


def test_a_key_holds_all_that_shapes_a_finding() -> None:
    """Graph, role, profile, options, how cores lie to each other, and threads."""
    capture = chain_capture(4)
    config = load_config()

    def key(
        capture: Capture = capture,
        config: Config = config,
        profile: DeviceProfile = PROFILE,
        machine: Sequence[object] = (((0, 0), (1, 0)), 4),
        compiler: str = "",
    ) -> str:
        partition = partition_graph(capture, config=config.partition)
        around = circumstances(profile=profile, config=config, machine=machine, compiler=compiler)
        return key_of(capture, partition, around)

    keys = [
        key(),
        key(capture=chain_capture(5)),
        key(profile=replace(PROFILE, handover_ns=PROFILE.handover_ns + 1)),
        key(profile=default_profile(3)),
        key(config=load_config({"partition.granularity": "module"})),
        key(config=load_config({"plan.min_gain": 0.5})),
        key(config=load_config({"runtime.bodies": "python"})),
        key(machine=(((0, 0), (0, 0)), 4)),
        key(machine=(((0, 0), (1, 0)), 3)),
        key(compiler="freezing"),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]
    assert key(config=load_config({"debug.log": "INFO"})) == keys[0]
    assert key(capture=replace(capture, name="another")) == keys[0]
