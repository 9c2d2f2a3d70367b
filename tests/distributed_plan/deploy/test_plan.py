"""Deployment plans as users have them: text, pictures, files, edits, differences."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from apollo_compile import DeploymentPlan
from apollo_compile.cost_model.collectives import Link
from apollo_compile.errors import ConfigError, DeploymentError, PlanFileError
from apollo_compile.passes.deploy import (
    REST,
    DeviceGroup,
    EqualDevices,
    LinearPair,
    ModuleCall,
    StepWork,
    deploy_on,
    replicated,
)

MS = 1_000_000


GROUPS = tuple((size, units) for size in (1, 2, 4) for units in (2, 4))


def call(name: str, work: int, *, inputs: tuple[str, ...] = ()) -> ModuleCall:
    """Return a call that divides its work over devices, and takes as long with half of the units."""
    return ModuleCall(
        name=name,
        module=name,
        inputs=inputs,
        sent_bytes=0,
        returned_bytes=0,
        activation_bytes=1 << 20,
        forward_ns=tuple(work // size for size, _ in GROUPS),
        backward_ns=tuple(2 * work // size for size, _ in GROUPS),
    )


@pytest.fixture(scope="module")
def plan() -> DeploymentPlan:
    """Return vision on devices 0 and 1, text beside audio on half of devices 2 and 3, a reader of all on all."""
    names = ("vision", "text", "audio")
    work = StepWork(
        modules=(
            *(replicated(name, GROUPS, state_bytes=1 << 24, gradient_bytes=1 << 22) for name in names),
            replicated("a <reader>", GROUPS, state_bytes=0, gradient_bytes=0),
        ),
        calls=(*(call(name, 8 * MS) for name in names), call("a <reader>", MS, inputs=names)),
    )
    places = {"vision": (0, 2, 4), "text": (2, 2, 2), "audio": (2, 2, 2), "a <reader>": (0, 4, 4)}
    groups = [DeviceGroup(module=name, first=at[0], devices=at[1], units=at[2]) for name, at in places.items()]
    cluster = EqualDevices(devices=4, units=4, memory_bytes=1 << 30, link=Link(1e-6, 1e9))
    return DeploymentPlan(replace(deploy_on(work, cluster, groups), bound_ns=10 * MS))


def test_the_text_has_a_row_per_module_and_the_baselines(plan: DeploymentPlan) -> None:
    """With groups, units, times, memory; and says that it is simulated."""
    lines = str(plan).splitlines()
    assert lines[0].startswith("deployment on 4 devices of 4 units, simulated: a step is predicted to take ")
    rows = {line[:10].strip(): line.split("  ") for line in lines[3:7]}
    text = [cell.strip() for cell in rows["text"] if cell.strip()]
    assert text == ["text", "devices 2 to 3", "2 of 4", "4.00 ms", "8.00 ms", "4.20 ms", "16.00 MiB"]
    assert lines[7] == "most memory of a device: 33.25 MiB of 1.00 GiB"
    assert lines[8].startswith("data parallel: ") and lines[9].startswith("waves: ")


def test_the_text_says_which_work_is_not_placed() -> None:
    """If it is much of the step."""
    cluster = EqualDevices(devices=4, units=4, memory_bytes=None, link=Link(1e-6, 1e9))
    modules = [replicated(name, GROUPS, state_bytes=0, gradient_bytes=0) for name in ("vision", REST)]
    groups = [DeviceGroup(module=name, first=0, devices=4, units=4) for name in ("vision", REST)]
    for much, hint in ((4 * MS, [f"{REST} takes 67% of the step on every device"]), (MS // 2, [])):
        work = StepWork(modules=tuple(modules), calls=(call("vision", 2 * MS), call(REST, much, inputs=("vision",))))
        last = str(DeploymentPlan(deploy_on(work, cluster, groups))).splitlines()[-1]
        assert [line for line in [last.split(":")[0]] if REST in line] == hint


def test_a_file_gives_the_same_plan(plan: DeploymentPlan, tmp_path: Path) -> None:
    """Equal plans give equal bytes."""
    plan.save(tmp_path / "plan.json")
    again = DeploymentPlan.load(tmp_path / "plan.json")
    assert again == plan
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_groups_in_a_file_may_be_edited(plan: DeploymentPlan, tmp_path: Path) -> None:
    """The prediction is computed again; a group that cannot be is an error."""
    path = tmp_path / "plan.json"
    plan.save(path)
    content = json.loads(path.read_text())
    content["deployment"]["groups"][1] |= {"first": 0, "devices": 4}
    path.write_text(json.dumps(content))
    assert DeploymentPlan.load(path) == plan.move("text", first=0, devices=4)
    content["deployment"]["groups"][1] |= {"first": 1}
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="'text' cannot have 4 devices with 2 units from device 1 on"):
        DeploymentPlan.load(path)


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1}', '{"format": 2, "deployment": {}}'])
def test_a_file_that_is_no_plan_is_an_error(content: str, tmp_path: Path) -> None:
    """With its path."""
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(PlanFileError, match=f"cannot read a deployment plan from {path}: "):
        DeploymentPlan.load(path)


def test_an_edit_changes_one_group_and_the_prediction(plan: DeploymentPlan) -> None:
    """And the difference says so."""
    moved = plan.move("audio", first=0, devices=1, units=4)
    assert moved.deployment.step_ns > plan.deployment.step_ns >= plan.deployment.bound_ns
    lines = plan.diff(moved).splitlines()
    assert lines[0] == "audio: devices 2 to 3 with 2 units -> device 0 with 4 units"
    assert len(lines) == 3 and lines[1].startswith("step: ") and lines[2].startswith("most memory of a device: ")
    assert plan.diff(plan).splitlines()[0] == "the same groups"
    with pytest.raises(DeploymentError, match="the plan has no module 'depth'; it has vision, text, audio, a <reader>"):
        plan.move("depth", first=0, devices=1)


def test_divided_layers_and_sharded_state_are_said_in_text_file_and_difference(
    plan: DeploymentPlan, tmp_path: Path
) -> None:
    """Where a module has such modes; else the error lists those that it has."""
    text, *rest = plan.deployment.work.modules[1:]
    half = replace(text.modes[-1], tensor=2, state_bytes=1 << 23)
    shards = replace(text.modes[-1], is_sharded=True, state_bytes=1 << 22, gradient_bytes=0)
    pairs = (LinearPair(columns=("fc1",), row="fc2", degree=2),)
    module = replace(text, modes=(*text.modes, half, shards), pairs=pairs)
    vision, old, *others = plan.deployment.work.calls
    own = {name: (*getattr(old, name), MS, MS) for name in ("forward_ns", "backward_ns")}
    work = StepWork(
        modules=(plan.deployment.work.modules[0], module, *rest), calls=(vision, replace(old, **own), *others)
    )
    found = DeploymentPlan(replace(plan.deployment, work=work))
    divided = found.move("text", first=0, devices=4, units=4, tensor=2)
    sharded = found.move("text", first=0, devices=4, units=4, is_sharded=True)
    assert "devices 0 to 3, 2 per replica" in str(divided) and "8.00 MiB" in str(divided)
    assert "devices 0 to 3, sharded" in str(sharded) and "text" not in {
        bar.name for bar in sharded.deployment.bars if bar.kind == "sum"
    }
    difference = divided.diff(sharded).splitlines()[0]
    assert difference == "text: devices 0 to 3, 2 per replica with 4 units -> devices 0 to 3, sharded with 4 units"
    for each in (divided, sharded):
        each.save(tmp_path / "plan.json")
        assert DeploymentPlan.load(tmp_path / "plan.json") == each
        assert "sharded" in each.to_svg() or "2 per replica" in each.to_svg()
    content = json.loads((tmp_path / "plan.json").read_text())
    content["deployment"]["groups"][1] |= {"tensor": 4}
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match="'text' cannot have 4 devices with 4 units, sharded, 4 per replica from device 0 on"
    ):
        DeploymentPlan.load(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match=r"'vision' cannot .* out of 1 with 2 units; .*; 4 with 4 units$"):
        found.move("vision", first=0, devices=4, units=4, tensor=2)


def test_the_picture_has_a_row_per_kind_of_device_and_all_bars(plan: DeploymentPlan) -> None:
    """Bars that run at once share the height of a row; names are escaped."""
    root = ET.fromstring(plan.to_svg())
    space = "{http://www.w3.org/2000/svg}"
    labels = [each.text for each in root.iter(f"{space}text")]
    assert "devices 0 to 1" in labels and "devices 2 to 3" in labels
    boxes: dict[str, list[ET.Element]] = {}
    for box in root.iter(f"{space}svg"):
        for title in box.findall(f"{space}title"):
            boxes.setdefault(str(title.text), []).append(box)
    assert len(boxes["a <reader>, forward, 250.0 us"]) == 2  # on both rows
    text, audio = (boxes[f"{name}, forward, 4.00 ms"][0] for name in ("text", "audio"))
    assert text.get("x") == audio.get("x") and text.get("height") == audio.get("height") == "50.00%"
    assert {text.get("y"), audio.get("y")} == {"0.00%", "50.00%"}
    assert len(boxes) == len(plan.deployment.bars)
