"""Estimates of training steps on devices that are not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from apollo_compile.cost_model.cells import COPIES, Estimate
from apollo_compile.cost_model.collectives import Link
from apollo_compile.errors import ConfigError, TargetError
from apollo_compile.tools.estimate import ERRORS, estimate, format_estimate
from apollo_compile.tools.targets import ModelCall, default_loss
from tests.end_to_end.step_cases.models import Wrapped
from tests.tools.conftest import Apollo

MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)), (torch.randn(64, 256),)
"""


def call(*inputs: torch.Tensor) -> ModelCall:
    """Return a call of a chain of three equal layers, one of which is frozen."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(3)))
    layers[0].requires_grad_(False)
    chain = Wrapped(lambda own, x: own.layers(x), layers=layers)
    return ModelCall(name="chain", model=chain, args=inputs, kwargs={}, loss=default_loss)


@pytest.fixture(scope="module")
def found() -> Estimate:
    """The chain on one, two and four large GPUs and CPUs."""
    return estimate(call(torch.randn(64, 512)), [("h100", (1, 2, 4)), ("cpu64", (1, 2))], link=Link(1e-6, 1e12))


def test_every_number_of_devices_has_a_cell_per_number_of_stages(found: Estimate) -> None:
    """Three layers cannot be four stages."""
    assert [(cell.device, cell.devices, cell.stages) for cell in found.cells] == [
        *(("h100", *each) for each in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2))),
        *(("cpu64", *each) for each in ((1, 1), (2, 1), (2, 2))),
    ]
    assert all(cell.data * cell.tensor * cell.stages == cell.devices for cell in found.cells)
    assert found.batch == 64


def test_memory_holds_what_training_keeps(found: Estimate) -> None:
    """Two trained layers four times, the frozen one once, and the activations."""
    weights = (2 * COPIES + 1) * (512 * 512 * 4 + 512 * 4)
    assert weights < found.cells[0].memory_bytes < weights + 30 * 64 * 512 * 4


def test_two_devices_with_a_good_link_are_faster_on_a_cpu(found: Estimate) -> None:
    """Half as much is left to compute for each."""
    one, two = (next(c for c in found.cells if (c.device, c.devices, c.stages) == ("cpu64", n, 1)) for n in (1, 2))
    assert two.step_s < 0.9 * one.step_s


def test_the_band_is_as_wide_as_the_source_is_bad(found: Estimate) -> None:
    """And the text says what the source is."""
    gpu, cpu = (next(cell for cell in found.cells if cell.device == name) for name in ("h100", "cpu64"))
    assert gpu.high_s / gpu.step_s == pytest.approx(1 + ERRORS["datasheet"])
    assert cpu.high_s / cpu.step_s == pytest.approx(1 + ERRORS["default"])
    text = format_estimate(found)
    assert "h100: NVIDIA H100 SXM, datasheet; link as given" in text and "cpu64: default x64, default" in text


def test_the_command_prints_a_table_or_json(tmp_path: Path, apollo: Apollo) -> None:
    """With the same Cells."""
    (tmp_path / "train.py").write_text(MODEL)
    command = ("estimate", f"{tmp_path}/train.py:build", "--devices", "cpu64:1,2")
    as_json, table = apollo(*command, "--json", "--save", tmp_path / "saved.json"), apollo(*command)
    assert as_json.code == table.code == 0
    assert (tmp_path / "saved.json").read_text() == as_json.out.rstrip("\n")
    shown = [int(line.split()[1]) for line in table.out.splitlines()[4:7]]
    assert [cell["devices"] for cell in json.loads(as_json.out)["cells"]] == [1, 2, 2] == shown


def test_the_command_limits_tensor_parallelism(tmp_path: Path, apollo: Apollo) -> None:
    """Over a link on which sums of large gradients take longer than those of few samples."""
    (tmp_path / "train.py").write_text(MODEL)
    command = ("estimate", f"{tmp_path}/train.py:build", "--devices", "h100:2", "--link", "1e-6,1e6", "--json")
    splits = [
        [(cell["data"], cell["tensor"]) for cell in json.loads(ran.out)["cells"] if cell["stages"] == 1]
        for ran in (apollo(*command), apollo(*command, "--max-tensor", "1"))
    ]
    assert splits == [[(1, 2)], [(2, 1)]]


@pytest.mark.parametrize(
    ("inputs", "device", "error", "message"),
    [
        (torch.randn(4, 512), "h999", ConfigError, r"cannot read device profile h999: .*cpu, h100, h200"),
        (torch.tensor(1.0), "cpu64", TargetError, "chain has no input with a batch dimension"),
    ],
    ids=["no profile", "no batch"],
)
def test_what_cannot_be_estimated_is_an_error(
    inputs: torch.Tensor, device: str, error: type[Exception], message: str
) -> None:
    """A device without a profile, with the names of the packaged ones; inputs without anything to divide."""
    with pytest.raises(error, match=message):
        estimate(call(inputs), [(device, (1,))])


def test_a_frozen_model_has_no_gradients_to_sum() -> None:
    """It does not wait for the link, whatever that is."""
    frozen = call(torch.randn(64, 512))
    frozen.model.requires_grad_(False)  # type: ignore[attr-defined]
    slow, fast = (estimate(frozen, [("cpu64", (2,))], link=Link(x, 1e9), max_tensor=1) for x in (1.0, 1e-9))
    assert slow.cells[0].data == 2 and slow.cells[0].step_s == fast.cells[0].step_s


def test_a_number_of_devices_that_nothing_divides_is_told(tmp_path: Path, apollo: Apollo) -> None:
    """The count of devices has no row."""
    (tmp_path / "train.py").write_text(MODEL)
    ran = apollo("estimate", f"{tmp_path / 'train.py'}:build", "--devices", "h100:1,5", "--max-tensor", "1")
    assert ran.code == 0 and "nothing divides 64 samples, and the layers of the model, over 5 of h100" in ran.err


def test_a_part_of_the_batch_that_the_model_cannot_run_has_no_row(tmp_path: Path, apollo: Apollo) -> None:
    """A device of two has one sample, which BatchNorm does not take; without any row, its line in the model is told."""
    file = tmp_path / "norm.py"
    file.write_text(
        "import torch\n\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.norm = torch.nn.BatchNorm1d(8)\n    def forward(self, x):\n        return self.norm(x)\n\n"
        "def build():\n    return Model(), torch.randn(2, 8)\n"
    )
    failed = f"failed: {file}:8 in forward: ValueError: Expected more than 1 value per channel"
    ran = apollo("estimate", f"{file}:build", "--devices", "h100:1,2", "--max-tensor", "1", "--json")
    assert [cell["devices"] for cell in json.loads(ran.out)["cells"]] == [1] and ran.code == 0
    assert ran.err.count("no device gets 1 of 2 samples: ") == ran.err.count(failed) == 1
    ran = apollo("estimate", f"{file}:build", "--devices", "h100:2", "--max-tensor", "1")
    assert ran.code == 1 and "Traceback" not in ran.err and failed in ran.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--devices", "h100"], "expected NAME:N,N, as in h100:1,2,4,8, got 'h100'"),
        (["--devices", "h100:0"], "expected a number of at least 1, got '0'"),
        (["--devices", "h100:1", "--link", "fast"], "expected SECONDS,BYTES, as in 10e-6,360e9, got 'fast'"),
    ],
)
def test_wrong_arguments_are_refused(option: list[str], message: str, apollo: Apollo) -> None:
    """Before torch is imported."""
    ran = apollo("estimate", "train.py:build", *option)
    assert ran.code == 2 and message in ran.err
