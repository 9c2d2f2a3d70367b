"""Which device a Dynamo graph is on, and what is said where no lanes of it can take the graph."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from apollo_compile.config import load_config
from apollo_compile.device.cpu.execute import available_units
from apollo_compile.device.open import reason_without_lanes, select_profile
from apollo_compile.errors import ConfigError
from apollo_compile.store.profiles import default_profile, save_profile
from tests.end_to_end.marks import needs_two_cores
from tests.torch_settings import threads

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        (["cpu"], None),
        (
            ["cpu", "cuda"],
            "it has tensors on cuda:0, and lanes run on the CPU only, since option 'device.cuda_lanes' is off",
        ),
        (["xpu"], "it has tensors on xpu:0, and lanes run on the CPU only"),
        (["cpu", "mps"], "it has tensors on mps:0, and lanes run on the CPU only"),
        (["cuda", "xpu"], "it has tensors on cuda:0, xpu:0, and lanes run on the CPU only"),
    ],
)
def test_an_option_for_cuda_is_named_on_cuda_only(kinds: list[str], reason: str | None) -> None:
    """It would help nowhere else."""
    with FakeTensorMode():
        tensors = [torch.empty(2, device=kind) for kind in kinds]
    assert reason_without_lanes(tensors, CPU) == reason


def test_a_profile_is_limited_to_the_units_that_were_asked_for(tmp_path: Path) -> None:
    """Even one of a machine with more cores than this one has; `cpu` fits any number of cores."""
    for units in (available_units(), 4096):
        save_profile(replace(default_profile(units), source="measured"), tmp_path / "mine.json")
        assert select_profile(load_config({"device.profile": tmp_path / "mine.json", "device.units": 1})).units == 1
    named = select_profile(load_config({"device.profile": "cpu"}))
    assert (named.source, named.units) == ("default", available_units())


@needs_two_cores
def test_a_profile_of_this_machine_serves_a_process_with_fewer_threads(
    tmp_path: Path, info_log: pytest.LogCaptureFixture
) -> None:
    """As in the workers of a `DataLoader`, where torch has one thread; one line says so."""
    num_cores, layer, x = os.cpu_count() or 1, nn.Linear(8, 8), torch.ones(4, 8)
    path = tmp_path / "mine.json"
    save_profile(replace(default_profile(num_cores), source="measured"), path)
    options = {"device.profile": path, "runtime.bodies": "eager", "debug.strict": True}
    with threads(1), torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend="apollo", options=options)(x), layer(x))
    assert info_log.text.count(f"device profile {path} is for {num_cores} cores; lanes use 1") == 1


@pytest.mark.parametrize(
    ("name", "problem"), [("large.json", r"is for 4096 cores, and this machine has"), ("h200", "is for a cuda device")]
)
def test_a_profile_that_does_not_fit_is_an_error(name: str, problem: str, tmp_path: Path) -> None:
    """A profile of more cores than there are says nothing about fewer, and one of a GPU nothing about cores."""
    save_profile(default_profile(4096), tmp_path / "large.json")
    with pytest.raises(ConfigError, match=problem):
        select_profile(load_config({"device.profile": tmp_path / name if name.endswith(".json") else name}))
