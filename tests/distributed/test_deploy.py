"""Two ranks over gloo that train as a deployment plan says: the numbers of one process.

The ranks start once and run everything one after the other; a test reads what they wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import apollo_compile
from apollo_compile.cost_model.collectives import Link
from apollo_compile.distributed.deploy.build import pieces_of, trace_step, work_of
from apollo_compile.errors import DeploymentError
from apollo_compile.passes.deploy import REST, EqualDevices
from tests.distributed import deploy_work as work
from tests.distributed.conftest import needs_gloo, read_ranks, start_ranks

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run the scenarios; return what every rank saw."""
    folder: Path = tmp_path_factory.mktemp("deployments")
    start_ranks(work.run_rank, work.__name__, work.SIZE, folder)
    return read_ranks(folder, work.SIZE)


@pytest.mark.parametrize(("kind", "where"), work.PLACES)
def test_ten_steps_give_the_numbers_of_one_process(ranks: list[dict[str, Any]], kind: str, where: str) -> None:
    """Losses and all parameters, on both ranks; the model without gradients too."""
    for rank in ranks:
        expected, found = rank[kind], rank[kind]["places"][where]
        assert len(found["losses"]) == work.STEPS and found["losses"][-1] < found["losses"][0]
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found["state"], dict(expected["state"]), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(found["scores"], expected["scores"], rtol=1e-3, atol=1e-4)
    both = [rank[kind]["places"][where]["state"] for rank in ranks]
    torch.testing.assert_close(both[0], both[1], rtol=0, atol=0)


@pytest.mark.parametrize("kind", work.KINDS)
def test_modules_of_other_devices_take_no_memory(ranks: list[dict[str, Any]], kind: str) -> None:
    """Their parameters are on the device "meta"."""
    names = list(ranks[0][kind]["places"]["apart"]["is_meta"])
    for rank, seen in enumerate(ranks):
        places = seen[kind]["places"]
        assert places["apart"]["is_meta"] == {name: index % 2 != rank for index, name in enumerate(names)}
        assert places["one device"]["is_meta"] == dict.fromkeys(names, rank != 1)
        assert not any(places["data parallel"]["is_meta"].values())


@pytest.mark.parametrize(("kind", "where"), [each for each in work.PLACES if each[1] in work.DIVISIONS])
def test_a_rank_has_the_part_of_the_parameters_that_the_plan_predicts(
    ranks: list[dict[str, Any]], kind: str, where: str
) -> None:
    """Half of divided layers, and of all parameters if they are sharded; where they are gathered, that is added."""
    found = ranks[0][kind]["places"]
    modules = {module.name: module for module in ranks[0][kind]["plan"].deployment.work.modules}
    division = {"tensor": 1, "is_sharded": False, **work.DIVISIONS[where]}
    for name, num_bytes in found[where]["bytes"].items():
        whole = found["data parallel"]["bytes"][name]
        modes = [mode for mode in modules[name].modes if mode.key.items() >= division.items()]
        assert len(modes) == 1 and whole * 0.5 <= num_bytes <= whole * (1.0 if where == "data parallel" else 0.9)
        copies = 1 if name == "frozen" else 4  # gradients and two states of the optimizer
        if where == "sharded":
            assert modes[0].gradient_bytes == 0 and modes[0].state_bytes > copies * num_bytes
        else:
            assert modes[0].gradient_bytes == (0 if name == "frozen" else num_bytes)
            assert modes[0].state_bytes == copies * num_bytes


def test_four_ranks_are_replicas_that_are_divided(tmp_path: Path) -> None:
    """And modules on other halves of them; with two backwards per step, with clipping, and from a checkpoint."""
    start_ranks(work.run_one_of_four, work.__name__, 4, tmp_path)
    seen = read_ranks(tmp_path, 4)
    for rank in seen:
        for name in work.FOUR:
            torch.testing.assert_close(rank[name][0], rank[""][0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(rank[name][1], dict(rank[""][1]), rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(rank[name][1], seen[0][name][1], rtol=0, atol=0)
            *found, optimizer = rank["resumed"][name]
            *expected, expected_optimizer = rank["resumed"]["alone"]
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(optimizer["state"], expected_optimizer["state"], rtol=1e-3, atol=1e-5)
            assert optimizer["param_groups"] == expected_optimizer["param_groups"]


def test_both_ranks_have_one_plan_with_the_graph_of_the_model(ranks: list[dict[str, Any]]) -> None:
    """A call reads what it is given, and comes after code between the modules that read more."""
    for kind in work.KINDS:
        assert ranks[0][kind]["plan"] == ranks[1][kind]["plan"]
    calls = {call.name: call for call in ranks[0]["chain"]["plan"].deployment.work.calls}
    assert calls["encoder"].inputs == () and calls["reader"].inputs == calls["reader#1"].inputs == ("encoder",)
    assert set(calls) == {"encoder", "reader", "reader#1", "code between the modules"}


def test_a_graph_that_is_kept_has_a_second_backward(ranks: list[dict[str, Any]]) -> None:
    """With gradients that add up."""
    assert [rank["errors"]["kept graph"] for rank in ranks] == ["True", "True"]


def test_outputs_that_no_code_read_are_there_too(ranks: list[dict[str, Any]]) -> None:
    """On both ranks, with the numbers of one process."""
    assert [rank["errors"]["unused"] for rank in ranks] == ["True", "True"]


def test_the_whole_state_has_counts_of_modules_on_other_ranks(ranks: list[dict[str, Any]]) -> None:
    """Tensors without dimensions, as of BatchNorm."""
    assert [rank["errors"]["counted"] for rank in ranks] == ["True", "True"]


def test_the_link_is_measured_unless_it_is_given(ranks: list[dict[str, Any]]) -> None:
    """And times are."""
    given, measured = (ranks[0][kind]["plan"].deployment.cluster for kind in ("chain", "ten to one"))
    assert (given.link.latency, given.link.bandwidth) == (1e-4, 1e9)
    assert measured.link != given.link and measured.link.latency > 0
    assert given.is_measured and "times measured" in str(ranks[0]["chain"]["plan"])


def test_gradients_accumulate(ranks: list[dict[str, Any]]) -> None:
    """Two backwards before an update, as in one process."""
    alone, together = ranks[0]["accumulated"]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("simulated", "DeploymentError: the plan is for 4 devices, and there are 2 ranks"),
        ("no link", "DeploymentError: a simulation needs a device or more, got 4, and a link=Link(...), got None"),
        ("no module", "DeploymentError: the model has no module 'vision'; it has frozen, "),
        (
            "some ranks",
            "DeploymentError: expected a process group of all ranks: call torch.distributed.init_process_group",
        ),
        ("nested", "DeploymentError: module 'pair.layers' is inside of 'pair'"),
        ("memory", "InfeasiblePlanError: no placement of 3 modules on 2 devices keeps the memory of 1000 bytes"),
        ("twice", "DeploymentError: a plan has been applied to this model"),
        (
            "other groups",
            "DeploymentError: the state's optimizer has 'frozen.0.0.weight' in group 0 where this one has 'pair.",
        ),
        ("early optimizer", "DeploymentError: the optimizer has a parameter of shape () that the model does not have"),
        ("other model", "DeploymentError: the plan is for another model: there is no module 'pair'"),
        ("small batch", "DeploymentError: module 'pair' got 1 samples for 2 replicas"),
        ("tied", "DeploymentError: 'text' and 'image' share a parameter"),
        ("batch norm", "ConfigError: module 'image' cannot have 2 devices with 1 units from"),
        ("no pairs", "ConfigError: module 'text' cannot have 2 devices with 1 units, 2 per replica from device 0 on"),
        ("random", "DeploymentError: module 'image' draws random numbers, which would differ among 2 devices per"),
        ("no layer", "DeploymentError: the plan divides image.2.up over 2 devices: expected a linear layer whose size"),
    ],
)
def test_mistakes_are_errors_on_both_ranks(ranks: list[dict[str, Any]], name: str, text: str) -> None:
    """That say what is wrong."""
    for rank in ranks:
        assert rank["errors"][name].startswith(text)


def test_one_process_simulates_a_number_of_devices_and_leaves_the_model_as_it_was() -> None:
    """From its own times, and a given link; gradients, statistics and random numbers are not touched."""
    torch.manual_seed(0)
    towers = work.Towers(2, 2)
    towers.text = nn.Sequential(nn.Linear(work.WIDTH, work.WIDTH), nn.BatchNorm1d(work.WIDTH), nn.Dropout(0.5))
    batch = {"image": torch.randn(work.BATCH, work.WIDTH), "text": torch.randn(work.BATCH, work.WIDTH)}
    towers.scale.grad = torch.tensor(3.0)
    before = {name: value.clone() for name, value in towers.state_dict().items()}
    state = torch.get_rng_state()
    plan = apollo_compile.deploy(
        towers, batch, mesh=4, loss_fn=work.diagonal_loss, link=Link(1e-5, 1e10), modules=["image", "text"], seconds=1
    )
    assert str(plan).startswith("deployment on 4 devices of ") and " simulated: " in str(plan)
    sizes = {module.name: [mode.devices for mode in module.modes] for module in plan.deployment.work.modules}
    units = [mode.units for mode in plan.deployment.work.modules[1].modes]  # of all cores, a half and a quarter
    assert sizes == {"image": [1, 2, 4] * len(units), "text": [1] * len(units), "code between the modules": [4]}
    assert units == [torch.get_num_threads() >> power for power in range(len(units))]
    torch.testing.assert_close(towers.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert towers.scale.grad == 3 and towers.image[0][0].weight.grad is None  # type: ignore[index]
    assert "forward" not in towers.image.__dict__


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"mesh": 0}, "a simulation needs a device or more, got 0"),
        ({"loss_fn": None}, "loss_fn is None: expected a function from the model's output to the loss"),
        ({"loss_fn": nn.Identity()}, r"the loss is torch.Size\(\[4, 4\]\): expected a tensor of one element"),
        ({"loss_fn": torch.Tensor.retain_grad}, "the loss is None: expected a tensor of one element"),
        ({"loss_fn": lambda output: output.detach().sum()}, "the loss has no graph"),
        ({"batch": torch.randn(0, 4)}, "the batch has no tensor with samples"),
        ({"modules": ["0.list"]}, "module '0.list' returned no tensors in the step: name modules that do"),
    ],
    ids=["no devices", "no function", "no loss", "nothing", "detached", "no samples", "not called"],
)
def test_what_cannot_be_deployed_is_told_in_one_process(argument: dict[str, Any], text: str) -> None:
    """The error comes before anything is timed."""
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].add_module("list", nn.ModuleList())
    given = {"batch": torch.randn(4, 4), "mesh": 2, "loss_fn": torch.sum, "link": Link(1e-5, 1e10), **argument}
    with pytest.raises(DeploymentError, match=text):
        apollo_compile.deploy(model, **given)


class Centers(nn.Module):
    """Subtracts the mean of the samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Sums(nn.Module):
    """Adds up earlier samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0)


class Counts(nn.Module):
    """Divides by the number of samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / len(x)


@pytest.mark.parametrize(
    ("layers", "is_equal", "sizes"),
    [
        ([nn.Dropout(0.5), nn.LayerNorm(work.WIDTH)], False, [1, 2, 4]),
        ([Centers()], False, [1]),
        ([nn.Dropout(0.5), Centers()], False, [1]),
        ([Centers()], True, [1]),
        ([Counts()], False, [1]),
        ([Sums()], False, [1]),
    ],
)
def test_a_module_that_mixes_or_counts_samples_gets_no_replicas(
    layers: list[nn.Module], is_equal: bool, sizes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so; a random module keeps its random numbers, and equal samples are told apart."""
    towers = work.Towers(2, 2)
    towers.text = nn.Sequential(nn.Linear(work.WIDTH, work.WIDTH), *layers)
    text = torch.ones(work.BATCH, work.WIDTH) if is_equal else torch.randn(work.BATCH, work.WIDTH)
    batch = {"image": torch.randn(work.BATCH, work.WIDTH), "text": text}
    options: dict[str, Any] = {"loss_fn": work.diagonal_loss, "link": Link(1e-5, 1e10), "modules": ["text"]}
    plan = apollo_compile.deploy(towers, batch, mesh=4, seconds=0.1, **options)
    assert sorted({mode.devices for mode in plan.deployment.work.modules[0].modes}) == sizes
    assert ("'text' gets no replicas" in caplog.text) is (sizes == [1])


class Stack(nn.Module):
    """Calls the layers of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(work.tower(2) for _ in range(2))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of a batch."""
        for layer in self.layers:
            image = layer(image)
        return image @ text.T


def test_layers_of_a_list_are_modules_to_place() -> None:
    """The model's own code calls them, not their list."""
    batch = {"image": torch.randn(work.BATCH, work.WIDTH), "text": torch.randn(work.BATCH, work.WIDTH)}
    plan = apollo_compile.deploy(Stack(), batch, mesh=2, loss_fn=work.diagonal_loss, link=Link(1e-5, 1e10), seconds=1)
    assert [module.name for module in plan.deployment.work.modules] == ["layers.0", "layers.1", REST]


@pytest.mark.parametrize(
    ("order", "named", "expected"),
    [
        (["encoder", "small", "reader"], None, {"encoder": (), "reader": ("encoder",)}),
        (
            ["encoder", "small", "reader"],
            {"encoder", "small", "reader"},
            {"encoder": (), "small": ("encoder",), "reader": ("encoder", "small")},
        ),
        (["encoder", "small", "apart"], None, {"encoder": (), "small": ("encoder",), "apart": ()}),
        (["encoder", "small", "apart"], {"encoder", "apart"}, {"encoder": (), "small": ("encoder",), "apart": ()}),
        (["encoder", "code", "apart"], None, {"encoder": (), "apart": ("encoder",)}),
    ],
)
def test_small_modules_are_code_unless_a_later_module_would_wait_for_them(
    order: list[str], named: set[str] | None, expected: dict[str, tuple[str, ...]]
) -> None:
    """A reader gets what was made before, a module apart does not; what code reads is waited for. Times are given."""
    model = work.Chain()
    model.small, model.apart = nn.Identity(), work.tower(2)

    def forward(image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        found = image
        for name in order:
            if name == "apart":
                found = found + model.apart(text)
            else:
                found = found * 2 if name == "code" else model.get_submodule(name)(found)
        return found @ text.T

    model.forward = forward  # type: ignore[method-assign]
    batch = {"image": torch.randn(work.BATCH, work.WIDTH), "text": torch.randn(work.BATCH, work.WIDTH)}
    trace = trace_step(model, batch, work.diagonal_loss, [name for name in order if name != "code"])
    cluster = EqualDevices(devices=2, units=1, memory_bytes=None, link=Link(1e-5, 1e10))
    pieces = pieces_of(trace, cluster, None, 2)
    times = {key: (10, 20) if "small" in key else (1000, 2000) for key in pieces}
    found = {call.name: call.inputs for call in work_of(trace, pieces, times, cluster, 2, named).calls}
    assert found == {**expected, REST: tuple(expected)}


def test_a_rank_does_not_wait_for_others_before_it_has_computed_its_modules(ranks: list[dict[str, Any]]) -> None:
    """A tower waits on one rank until the tower that the code calls later has run on the other."""
    for rank in ranks:
        alone, apart = rank["late"]
        torch.testing.assert_close(apart, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "where", "graphs"), work.SHARED)
def test_modules_that_share_a_device_are_one_graph(
    ranks: list[dict[str, Any]], kind: str, where: str, graphs: int
) -> None:
    """With losses and parameters of one process."""
    for number, rank in enumerate(ranks):
        found = rank["shared"][kind, where]
        torch.testing.assert_close(*found["losses"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(*found["states"], rtol=1e-3, atol=1e-5)
        assert len(found["graphs"]) == (graphs if where == "both devices" or number == 1 else 0)


def test_an_input_that_is_written_to_before_its_module_runs_is_an_error(ranks: list[dict[str, Any]]) -> None:
    """And not a wrong number."""
    for rank in ranks:
        assert rank["errors"]["written"].startswith(
            "DeploymentError: an input of module 'image' was written to, or its mode changed"
        )
