"""Matrix products go to the library that was measured to be the faster, and their numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from apollo_compile.device.cpu import matmul_libraries
from apollo_compile.device.cpu import target as cpu_target
from apollo_compile.device.cpu.matmul_libraries import Libraries, LibraryTimes
from apollo_compile.distributed.ranks import Ranks
from apollo_compile.session import backend, registry
from apollo_compile.target.matmul import Matmul
from apollo_compile.torch_bridge.bodies import compile_bodies
from apollo_compile.torch_bridge.interpret import real_tensors
from apollo_compile.torch_bridge.settings import may_choose_library
from tests.end_to_end.marks import needs_two_cores
from tests.end_to_end.models import TwoTowers, two_tower_loss
from tests.end_to_end.step_cases.models import Wrapped
from tests.torch_settings import threads

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")

FASTER, SLOWER = LibraryTimes(blas=2e6, onednn=1e6), LibraryTimes(blas=1e6, onednn=2e6)
"""Times of a product, by which oneDNN saves a millisecond or loses one."""


def run_layers(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Run layers, activations behind them, a sum, and one weight that two layers share."""
    y = torch.relu(own.up(x))
    y = y + torch.nn.functional.gelu(own.across(y)) + torch.tanh(own.across(-y))
    return x + own.down(y)


def train(options: dict[str, Any] | None, mode: str = "train") -> list[torch.Tensor]:
    """Return output and gradients of a step, in eager without options."""
    torch.manual_seed(0)
    layers = {"up": nn.Linear(24, 40), "across": nn.Linear(40, 40, bias=False), "down": nn.Linear(40, 24)}
    model, x = Wrapped(run_layers, **layers), torch.randn(32, 24, requires_grad=True)
    torch._dynamo.reset()
    run = model if options is None else torch.compile(model, backend="apollo", options=options)
    if mode == "inference":
        with torch.no_grad():
            return [run(x)]
    output = run(x)
    output.square().mean().backward()
    return [output.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Compile in segments whatever would be gained, and give every product of at least one operation to oneDNN."""

    def measure(product: Matmul, cores: int) -> LibraryTimes:
        """Look whether tensors have memory here, though forwards compile while tensors are fake."""
        assert not isinstance(torch.mm(torch.ones(2, 2), torch.ones(2, 2)), FakeTensor)
        assert not torch.is_grad_enabled()
        return FASTER

    monkeypatch.setattr(matmul_libraries, "LEAST_FLOPS", 1)
    monkeypatch.setattr(matmul_libraries, "_measure", measure)
    return {"debug.strict": True, "plan.planner": "serial", "device.cache": tmp_path}


def count_products(capfd: pytest.CaptureFixture[str], run: Callable[[], Any]) -> int:
    """Return how many products oneDNN computes in a call, by its own word."""
    capfd.readouterr()
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        run()
    lines = capfd.readouterr().out.splitlines()
    return sum("exec" in line and ("inner_product" in line or "matmul" in line) for line in lines)


TUNED = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}


@pytest.mark.parametrize(
    ("chosen", "of_inductor", "mode", "count"),
    [
        pytest.param({"runtime.bodies": "native"}, {}, "train", 12, id="native"),
        pytest.param({"runtime.bodies": "python"}, {}, "train", 12, id="python"),
        pytest.param({"runtime.bodies": "native"}, {}, "inference", 4, id="inference"),
        pytest.param({}, TUNED, "train", 12, id="tuned"),
        pytest.param({"runtime.onednn": False}, {}, "train", 0, id="left to BLAS"),
    ],
)
def test_oneDNN_computes_all_products_and_gradients_are_those_of_eager(  # noqa: N802
    chosen: dict[str, Any],
    of_inductor: dict[str, Any],
    mode: str,
    count: int,
    options: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Four forward, where an activation may be next to its product, and of each one by its input and by its weight.

    Of products with weights that are inputs, as in training, Inductor's tuning alone leaves all to BLAS. An option does
    so too; `torch_bridge/test_settings.py` has the settings of torch that forbid a choice.
    """
    got: list[torch.Tensor] = []
    with inductor_config.patch(of_inductor):
        assert count_products(capfd, lambda: got.extend(train({**options, **chosen}, mode))) == count
    torch.testing.assert_close(got, train(None, mode))


def test_no_setting_of_the_user_reaches_a_measurement() -> None:
    """Fake tensors, other types, devices and functions."""

    class Other(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{function} was seen")

    with FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16), Other(), real_tensors():
        matrix = torch.ones(2, 2, device="cpu")
        product = torch.mm(matrix, matrix)
        assert type(product) is torch.Tensor and product.dtype == torch.float32
        assert (product.data_ptr() != 0) and not torch.is_grad_enabled()


def test_code_that_inductor_keeps_the_same_is_left_to_it(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing may be measured then. A backward compiles without it: Dynamo resets the setting after every frame."""
    assert may_choose_library()
    monkeypatch.setattr(matmul_libraries, "_measure", lambda product, cores: pytest.fail("measured"))
    with inductor_config.patch({"deterministic": True}):
        assert not may_choose_library()
        train(options, "inference")


@needs_two_cores
@pytest.mark.parametrize("made_for", [1, 2])
def test_a_body_with_inductors_own_template_is_right_on_other_numbers_of_cores(made_for: int) -> None:
    """It has blocks for as many threads as there were when it was compiled; lanes have others."""
    left, right = torch.randn(3, 70, 40), torch.randn(3, 40, 50)
    with threads(made_for):
        with FakeTensorMode() as mode:
            piece = make_fx(lambda a, b: (torch.bmm(a, b),))(*map(mode.from_tensor, (left, right)))
        fakes = [node.meta["val"] for node in piece.graph.find_nodes(op="placeholder")]
        with inductor_config.patch({**TUNED, "max_autotune_gemm_backends": "CPP"}):
            (body,) = compile_bodies([("bmm", piece, fakes)], native=True, is_inference=True)
        assert body.entry_address is not None
    for cores in (1, 2, 3):
        with threads(cores):
            torch.testing.assert_close(body.function([left, right])[0], torch.bmm(left, right))


def products(own: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Multiply matrices that are slices, views, sums and outputs of others."""
    y = torch.addmm(own.bias[24:], x, own.weight)
    z = torch.addmm(x.sum(0), y, (own.weight * 2).t())
    left, right = (z @ own.weight).chunk(2, dim=1)
    one = (x[:1] @ own.weight) + (x @ own.weight[:, :1])
    again = (x.t() @ x) @ own.weight.reshape(8, 72).reshape(24, 24)
    return y, y.t(), left @ right.t(), one, again, (y @ own.weight).mul_(2)


def test_products_of_many_forms_are_those_of_eager(options: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    """Outputs and gradients."""

    def run(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight, bias = nn.Parameter(torch.randn(24, 24) / 5), nn.Parameter(torch.randn(48))
        model, x = Wrapped(products, weight=weight, bias=bias), torch.randn(20, 24, requires_grad=True)
        torch._dynamo.reset()
        outputs = (torch.compile(model, backend="apollo", options=options) if compiled else model)(x)
        sum(output.square().mean() for output in outputs).backward()  # type: ignore[union-attr]
        return [*(output.detach() for output in outputs), x.grad, model.weight.grad, model.bias.grad]  # type: ignore[list-item]

    got: list[torch.Tensor] = []
    assert count_products(capfd, lambda: got.extend(run(compiled=True))) >= 8
    torch.testing.assert_close(got, run(compiled=False), rtol=1e-4, atol=1e-4)


@needs_two_cores
def test_products_are_measured_on_as_many_cores_as_the_plan_gives_them(
    options: dict[str, Any], lanes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two towers on a lane each, and what comes before and behind."""
    measured: set[int] = set()

    def measure(product: Matmul, cores: int) -> LibraryTimes:
        measured.add(cores)
        return SLOWER

    monkeypatch.setattr(matmul_libraries, "_measure", measure)
    model = TwoTowers()
    own = {**lanes["options"], "device.cache": options["device.cache"]}
    two_tower_loss(torch.compile(model, backend="apollo", options=own)).backward()
    graphs = registry.compiled_models()[-1].graphs
    planned = {each.quota.units for graph in graphs for each in graph.compilation.plan.assignments}
    assert measured == planned and 1 in planned


def test_ranks_give_the_same_products_to_onednn(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever each of them measured; both are in this process. `session/test_planning.py` has what stops a rank."""

    def train_as_rank(store: dist.Store, times: LibraryTimes) -> int:
        ranks = Ranks(store)
        monkeypatch.setattr(backend, "find_ranks", lambda: ranks)
        monkeypatch.setattr(matmul_libraries, "_measure", lambda product, cores: times)
        return count_products(capfd, lambda: train({**options, "plan.remember": False}))

    monkeypatch.setattr(cpu_target, "libraries_in", lambda directory: Libraries(directory))
    for first, second in ((FASTER, SLOWER), (SLOWER, FASTER)):
        store = dist.HashStore()
        assert [train_as_rank(store, times) for times in (first, second)] == [12 if first is FASTER else 0] * 2


@pytest.mark.parametrize(("times", "falls_back"), [(FASTER, False), (SLOWER, True)], ids=["faster", "slower"])
def test_a_rank_without_lanes_compiles_segments_only_where_onednn_saves_enough(
    times: LibraryTimes, falls_back: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks compare nothing, so the gain over Inductor's whole graph has to be predicted."""
    ranks = Ranks(dist.HashStore())
    monkeypatch.setattr(backend, "find_ranks", lambda: ranks)
    monkeypatch.setattr(matmul_libraries, "_measure", lambda product, cores: times)
    train({**options, "plan.planner": "greedy", "device.units": 1}, "inference")
    reasons = [reason for _, reason in registry.compiled_models()[-1].fallbacks]
    assert [reason.startswith("nothing to gain") for reason in reasons] == [True] * falls_back
