"""Deployments over several devices: predictions against sums by hand; baselines; limits; a published workload."""

from __future__ import annotations

import re
import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apollo_compile.cost_model.collectives import Link
from apollo_compile.errors import ConfigError, InfeasiblePlanError
from apollo_compile.passes import deploy

LINK = Link(1e-6, 1e9)
"""A microsecond, and a nanosecond per byte."""


def cluster(devices: int, memory: int | None = None) -> deploy.EqualDevices:
    """Return devices of one unit."""
    return deploy.EqualDevices(devices=devices, units=1, memory_bytes=memory, link=LINK)


def call(
    name: str, *forward_ns: int, inputs: tuple[str, ...] = (), sent: int = 0, returned: int = 0, module: str = ""
) -> deploy.ModuleCall:
    """Return a call with its times by group of devices, the backward twice as long; its activations take 100 bytes."""
    return deploy.ModuleCall(
        name=name,
        module=module or name,
        inputs=inputs,
        sent_bytes=sent,
        returned_bytes=returned,
        activation_bytes=100,
        forward_ns=forward_ns,
        backward_ns=tuple(2 * ns for ns in forward_ns),
    )


def divided(name: str, work: int, devices: int = 2, inputs: tuple[str, ...] = ()) -> deploy.ModuleCall:
    """Return a call that divides its work over 1, 2, 4, ... devices."""
    return call(name, *(work // size for size in deploy.group_sizes(devices)), inputs=inputs)


def state(name: str, num_bytes: int = 1000, *, devices: int = 2) -> deploy.ModuleState:
    """Return a module on 1, 2, 4, ... devices with four tensors per parameter."""
    groups = [(size, 1) for size in deploy.group_sizes(devices)]
    return deploy.replicated(name, groups, state_bytes=4 * num_bytes, gradient_bytes=num_bytes)


def change(module: deploy.ModuleState, **values: int) -> deploy.ModuleState:
    """Return a module with other values in all of its modes."""
    return replace(module, modes=tuple(replace(mode, **values) for mode in module.modes))  # type: ignore[arg-type]


def towers(image: int, text: int, num_bytes: int = 1000) -> deploy.StepWork:
    """Return two towers and a loss that reads both."""
    return deploy.StepWork(
        modules=(
            *(state(name, num_bytes) for name in ("image", "text")),
            deploy.replicated("loss", [(2, 1)], state_bytes=0, gradient_bytes=0),
        ),
        calls=(
            *(call(name, work, work // 2, sent=500) for name, work in (("image", image), ("text", text))),
            call("loss", 10, inputs=("image", "text"), returned=500),
        ),
    )


def groups_of(plan: deploy.Deployment) -> dict[str, tuple[int, int]]:
    """Return first device and number of devices by module."""
    return {group.module: (group.first, group.devices) for group in plan.groups}


def test_equal_towers_of_large_parameters_get_a_device_each() -> None:
    """Transfers of features are cheaper than sums of gradients; the step is the sum by hand."""
    plan = deploy.plan_deployment(towers(100_000, 100_000, 100_000), cluster(2), seconds=3)
    found = groups_of(plan)
    assert {found["image"], found["text"]} == {(0, 1), (1, 1)}
    transfer = 1_000 + 500
    assert plan.step_ns == 100_000 + transfer + 10 + 20 + transfer + 200_000
    assert plan.bound_ns >= plan.step_ns * 0.998
    assert plan.memory_bytes == (400_100 + 50, 400_100 + 50)


def test_unequal_towers_of_small_parameters_are_data_parallel() -> None:
    """As the first baseline; sums of two gradients come after the backwards."""
    plan = deploy.plan_deployment(towers(100_000, 10_000), cluster(2), seconds=3)
    assert groups_of(plan) == {"image": (0, 2), "text": (0, 2), "loss": (0, 2)}
    one_sum = 2 * (1_000 + 500)  # two rounds of half of the bytes
    transfers = 3 * (1_000 + 500)  # two outputs, and the gradients of the loss's inputs
    assert plan.step_ns == plan.baselines[0].step_ns == 3 * (50_000 + 5_000 + 10) + transfers + 2 * one_sum


def test_updates_of_the_optimizer_take_time_on_every_device_of_a_group() -> None:
    """Long updates are a reason to give towers a device each."""
    work = towers(100_000, 60_000)
    assert groups_of(deploy.plan_deployment(work, cluster(2), seconds=3))["image"] == (0, 2)
    slow = replace(work, modules=(*(change(each, update_ns=100_000) for each in work.modules[:2]), work.modules[2]))
    assert groups_of(deploy.plan_deployment(slow, cluster(2), seconds=3))["image"][1] == 1


@pytest.mark.parametrize(("num_bytes", "devices"), [(10_000, 2), (100_000, 1)])
def test_a_measured_plan_differs_from_data_parallelism_only_where_it_is_clearly_better(
    num_bytes: int, devices: int
) -> None:
    """A given one differs for any gain; the bound stays."""
    work = towers(100_000, 100_000, num_bytes)
    given = deploy.plan_deployment(work, cluster(2), seconds=3)
    measured = deploy.plan_deployment(work, replace(cluster(2), is_measured=True), seconds=3)
    assert groups_of(given)["image"][1] == 1 and groups_of(measured)["image"][1] == devices
    gain = 1 - given.step_ns / given.baselines[0].step_ns
    assert 0 < gain < deploy.LEAST_GAIN if devices == 2 else gain > deploy.LEAST_GAIN
    assert measured.bound_ns <= given.step_ns <= measured.step_ns


def test_a_frozen_module_sums_nothing() -> None:
    """Its group has no bar for that."""
    work = towers(100_000, 100_000, 100_000)
    frozen = replace(work, modules=(change(work.modules[0], gradient_bytes=0), *work.modules[1:]))
    plan = deploy.plan_deployment(frozen, cluster(2), seconds=3)
    assert {bar.module for bar in plan.bars if bar.kind == "sum"} <= {"text"}
    assert plan.baselines[0].step_ns < deploy.plan_deployment(work, cluster(2), seconds=3).baselines[0].step_ns


def test_waves_give_the_modules_of_a_level_disjoint_groups_as_large_as_their_work() -> None:
    """A later level has all devices again; more modules than devices take several waves."""
    work = deploy.StepWork(
        modules=tuple(state(name, devices=8) for name in ("a", "b", "c", "d")),
        calls=(
            *(divided(name, time, 8) for name, time in (("a", 80_000), ("b", 20_000), ("c", 20_000))),
            divided("d", 50_000, 8, inputs=("a", "b")),
        ),
    )
    plan = deploy.plan_deployment(work, cluster(8), seconds=3)
    waves = {group.module: (group.first, group.devices) for group in plan.baselines[1].groups}
    assert waves == {"a": (0, 4), "b": (4, 2), "c": (6, 2), "d": (0, 8)}
    assert plan.step_ns <= min(baseline.step_ns for baseline in plan.baselines)
    names = [f"m{index}" for index in range(5)]
    work = deploy.StepWork(modules=tuple(map(state, names)), calls=tuple(divided(name, 9_000) for name in names))
    plan = deploy.plan_deployment(work, cluster(2), seconds=2)
    found = [(group.first, group.devices) for group in plan.baselines[1].groups]
    assert found == [(0, 1), (1, 1), (0, 1), (1, 1), (0, 2)]


def test_an_infeasible_memory_names_the_least_that_works() -> None:
    """It is enough, and one byte less is not."""
    work = towers(100_000, 100_000, 10_000)
    alone = r"'image' alone needs 40050 bytes \(39.1 KiB\)"
    for memory, told in ((40_000, alone), (40_149, "")):
        least = f"keeps the memory of {memory} bytes per device: the least that is enough is 40150 bytes"
        with pytest.raises(InfeasiblePlanError, match=f"{least}.*{told}"):
            deploy.plan_deployment(work, cluster(2, memory), seconds=3)
    assert max(deploy.plan_deployment(work, cluster(2, 40_150), seconds=3).memory_bytes) == 40_150


def test_memory_may_forbid_data_parallelism() -> None:
    """It would be faster, and is shown as a baseline that exceeds the memory."""
    plan = deploy.plan_deployment(towers(100_000, 10_000), cluster(2, 5_000), seconds=3)
    assert {groups_of(plan)["image"], groups_of(plan)["text"]} == {(0, 1), (1, 1)}
    assert [baseline.keeps_memory for baseline in plan.baselines] == [False, True]
    assert plan.step_ns > plan.baselines[0].step_ns


def one(*modes: deploy.GroupMode, forward: Sequence[int]) -> deploy.StepWork:
    """Return a step of one module in some modes, with its forward in each."""
    return deploy.StepWork(modules=(deploy.ModuleState(name="model", modes=modes),), calls=(call("model", *forward),))


ALONE = deploy.GroupMode(devices=1, units=1, state_bytes=8_000, gradient_bytes=2_000)
REPLICAS = deploy.GroupMode(devices=4, units=1, state_bytes=8_000, gradient_bytes=2_000)
LAYERS = deploy.GroupMode(devices=4, units=1, tensor=2, state_bytes=4_000, gradient_bytes=1_000)
SHARDS = deploy.GroupMode(devices=4, units=1, is_sharded=True, state_bytes=3_000, gradient_bytes=0)


@pytest.mark.parametrize(
    ("memory", "slower", "best"),
    [(None, 0, LAYERS), (None, 9_000, REPLICAS), (5_000, 9_000, LAYERS), (4_000, 0, SHARDS)],
)
def test_how_a_group_divides_a_module_is_a_choice(memory: int | None, slower: int, best: deploy.GroupMode) -> None:
    """By time, with the sum over replicas of what each device has, and by memory, with activations of its samples."""
    times = (100_000, 25_000, 25_000 + slower, 60_000)
    plan = deploy.plan_deployment(one(ALONE, REPLICAS, LAYERS, SHARDS, forward=times), cluster(4, memory), seconds=3)
    assert plan.groups[0].key == best.key
    sums = {REPLICAS: 2 * 3 * (1_000 + 500), LAYERS: 2 * (1_000 + 500), SHARDS: 0}[best]
    assert plan.step_ns == 3 * times[[ALONE, REPLICAS, LAYERS, SHARDS].index(best)] + sums
    assert plan.memory_bytes == (best.state_bytes + 100 * best.tensor // 4,) * 4
    assert plan.baselines[0].groups[0].key == REPLICAS.key


@pytest.mark.parametrize("wrong", [{"devices": 3}, {"is_sharded": True}])
def test_a_division_that_cannot_be_is_an_error(wrong: dict[str, Any]) -> None:
    """That says what is expected."""
    with pytest.raises(
        ConfigError, match=r"'model' may have .* devices: expected .* multiples of those per replica, with"
    ):
        deploy.plan_deployment(one(replace(LAYERS, **wrong), forward=(10,)), cluster(4), seconds=1)


def test_given_groups_are_predicted_like_planned_ones_and_keep_the_memory_too() -> None:
    """Another order of the groups changes nothing; the error names the device."""
    work = towers(100_000, 60_000)
    plan = deploy.plan_deployment(work, cluster(2), seconds=3)
    assert deploy.deploy_on(work, cluster(2), plan.groups[::-1], known=plan) == plan
    both = [replace(group, first=0, devices=2 if group.module == "loss" else 1) for group in plan.groups]
    with pytest.raises(InfeasiblePlanError, match=r"device 0 would hold 8.1 KiB, and has 7.8 KiB"):
        deploy.deploy_on(work, cluster(2, 8_000), both)


@pytest.mark.parametrize(
    ("module", "first", "devices", "units", "text"),
    [
        ("image", 1, 2, 1, "cannot have 2 devices with 1 units from device 1 on"),
        ("image", 2, 1, 1, "cannot have 1 devices with 1 units from device 2 on"),
        ("image", 0, 1, 2, "a number of devices out of 1 with 1 units; 2 with 1"),
        ("vision", 0, 1, 1, "module 'image' has no group; there are groups for vision"),
    ],
)
def test_groups_that_cannot_be_are_errors(module: str, first: int, devices: int, units: int, text: str) -> None:
    """That name the module and what it can have."""
    wrong = deploy.DeviceGroup(module=module, first=first, devices=devices, units=units)
    rest = [
        deploy.DeviceGroup(module=name, first=0, devices=count, units=1) for name, count in (("text", 1), ("loss", 2))
    ]
    with pytest.raises(ConfigError, match=text):
        deploy.deploy_on(towers(100_000, 60_000), cluster(2), [wrong, *rest])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"inputs": ("audio",)}, "call 'text' reads 'audio', which is no call before it"),
        ({"module": "audio"}, "call 'text' of module 'audio': expected a known module"),
        ({"name": "image"}, "call 'image' of module 'text': expected a known module, and a new name"),
        (
            {"forward_ns": (10,)},
            "call 'text' has 1 times of forward and 2 of backward: expected one for each of 2 modes",
        ),
        ({"module": "image"}, "module 'text' may have .* up to 2, .* and a call of it"),
        ({}, "module 'image' may have \\[1, 2, 4\\] devices: expected some numbers up to 2"),
    ],
)
def test_nonsense_in_the_work_is_an_error(change: dict[str, object], text: str) -> None:
    """That names the call."""
    work = towers(100_000, 60_000)
    calls = (work.calls[0], replace(work.calls[1], **change))  # type: ignore[arg-type]
    modules = work.modules[:2]
    if not change:
        modules, calls = (state("image", devices=4), modules[1]), (divided("image", 10, 4), calls[1])
    with pytest.raises(ConfigError, match=text):
        deploy.plan_deployment(replace(work, calls=calls, modules=modules), cluster(2), seconds=1)


@pytest.fixture
def example() -> SimpleNamespace:
    """The example with Multitask-CLIP."""
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "examples" / "simulate_deployment.py")))


def published_cluster(example: SimpleNamespace, memory_bytes: int) -> deploy.EqualDevices:
    """Return the 64 devices of the publication."""
    return deploy.EqualDevices(devices=64, units=example.UNITS, memory_bytes=memory_bytes, link=Link(2e-5, 50e9))


@pytest.mark.parametrize("tasks", [7, 10])
def test_multitask_clip_on_64_devices_is_within_five_percent_of_the_bound(tasks: int, example: SimpleNamespace) -> None:
    """It is not behind waves or data parallelism either."""
    plan = deploy.plan_deployment(example.multitask_clip(tasks, 64), published_cluster(example, 80 * 2**30), seconds=8)
    assert 0 < plan.gap <= 0.05
    assert {baseline.name for baseline in plan.baselines} == {"data parallel", "waves"}
    assert all(plan.step_ns < baseline.step_ns and baseline.keeps_memory for baseline in plan.baselines)
    assert max(plan.memory_bytes) <= 80 * 2**30


def test_multitask_clip_names_a_memory_that_works(example: SimpleNamespace) -> None:
    """Vision's parameters cannot be divided; another search names the same memory."""
    work = example.multitask_clip(7, 64)
    told = r"(?:the least that is enough|enough) is (\d+) bytes; 'vision' alone needs (\d+) bytes"
    named = set()
    for memory in (2**30, 2**31):
        with pytest.raises(InfeasiblePlanError, match=told) as caught:
            deploy.plan_deployment(work, published_cluster(example, memory), seconds=3)
        named.update(re.findall(told, str(caught.value)))
    ((enough, alone),) = named
    plan = deploy.plan_deployment(work, published_cluster(example, int(enough)), seconds=3)
    assert int(alone) <= max(plan.memory_bytes) <= int(enough)
