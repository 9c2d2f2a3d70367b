"""Matrix products go to the library that was measured to be the faster, and their numbers stay."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile import matmul
from apollo_compile.matmul import LEAST_FLOPS, MOST_FLOPS, Libraries, Matmul, give_to_onednn, has_choice

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
pytestmark = needs_onednn

LINEAR = "apollo.linear.default"


def a_matmul(rows: int = 256, **changes: Any) -> Matmul:
    """Return a product that is worth measuring."""
    lies: dict[str, Any] = {"is_left_transposed": False, "is_right_transposed": True, "has_bias": False}
    return Matmul(**{"rows": rows, "inner": 64, "columns": 128, **lies, **changes})


def trace(function: Callable[..., Any], *inputs: torch.Tensor, mode: str = "fake") -> fx.GraphModule:
    """Return the graph of a function."""
    return make_fx(function, tracing_mode=mode)(*inputs)


def targets(graph: fx.Graph) -> list[str]:
    """Return the names of the operators that multiply."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name for name in names if name == LINEAR or "mm" in name]


def step(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, up: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return what a layer computes forward and backward."""
    return torch.addmm(bias, x, weight.t()), torch.mm(up, weight), torch.mm(up.t(), x)


def layer() -> tuple[torch.Tensor, ...]:
    """Return inputs of `step`."""
    torch.manual_seed(0)
    return torch.randn(20, 12), torch.randn(16, 12), torch.randn(16), torch.randn(20, 16)


# ------------------------------------------------------------------------------------------------------- the graphs


def test_all_three_products_of_a_layer_can_go_and_have_the_same_numbers() -> None:
    """They are told as they lie in memory."""
    inputs, seen = layer(), []

    def is_faster(product: Matmul) -> bool:
        seen.append(product)
        return True

    graph_module = trace(step, *inputs)
    assert give_to_onednn(graph_module.graph, is_faster) == 3
    assert [product.name for product in seen] == ["20x12 12x16T+bias", "20x16 16x12", "16x20T 20x12"]
    assert [product.flops for product in seen] == [2 * 20 * 12 * 16] * 3
    assert targets(graph_module.graph) == [LINEAR] * 3
    graph_module.recompile()
    torch.testing.assert_close(graph_module(*inputs), step(*inputs))


def test_only_what_is_faster_goes() -> None:
    """The other products stay as they were."""
    graph_module = trace(step, *layer())
    assert give_to_onednn(graph_module.graph, lambda product: product.has_bias) == 1
    assert targets(graph_module.graph) == [LINEAR, "aten.mm.default", "aten.mm.default"]


@pytest.mark.parametrize(
    ("function", "inputs", "mode"),
    [
        pytest.param(torch.mm, [torch.ones(4, 6).double(), torch.ones(6, 8).double()], "fake", id="float64"),
        pytest.param(torch.mm, [torch.ones(4, 6).bfloat16(), torch.ones(6, 8).bfloat16()], "fake", id="bfloat16"),
        pytest.param(torch.mm, [torch.ones(4, 6), torch.ones(6, 8)], "symbolic", id="dynamic sizes"),
        pytest.param(lambda x, y: x[:, :6] @ y, [torch.ones(4, 9), torch.ones(6, 8)], "fake", id="part on the left"),
        pytest.param(lambda x, y: x @ y[:, :8], [torch.ones(4, 6), torch.ones(6, 9)], "fake", id="part on the right"),
        pytest.param(torch.bmm, [torch.ones(2, 4, 6), torch.ones(2, 6, 8)], "fake", id="batched"),
        pytest.param(torch.addmm, [torch.ones(4, 8), torch.ones(4, 6), torch.ones(6, 8)], "fake", id="matrix added"),
        pytest.param(torch.addmm, [torch.ones(1), torch.ones(4, 6), torch.ones(6, 8)], "fake", id="number added"),
        pytest.param(
            lambda b, x, y: torch.addmm(b, x, y, beta=2),
            [torch.ones(8), torch.ones(4, 6), torch.ones(6, 8)],
            "fake",
            id="scaled",
        ),
    ],
)
def test_other_products_stay(function: Callable[..., Any], inputs: list[torch.Tensor], mode: str) -> None:
    """They are not even asked for."""
    graph = trace(function, *inputs, mode=mode).graph
    before = targets(graph)
    assert before and give_to_onednn(graph, lambda product: pytest.fail(f"asked for {product}")) == 0
    assert targets(graph) == before


# ---------------------------------------------------------------------------------------------------- the libraries


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Matmul, int]]:
    """Return what is measured; oneDNN is twice as fast where there is a bias, else half as fast."""
    found: list[tuple[Matmul, int]] = []

    def measure(product: Matmul, cores: int) -> float:
        found.append((product, cores))
        return 2.0 if product.has_bias else 0.5

    monkeypatch.setattr(matmul, "_measure_gain", measure)
    return found


def test_a_product_is_measured_once_per_number_of_cores(measured: list[Any], tmp_path: Path) -> None:
    """And in the next process not again."""
    for libraries in (Libraries(tmp_path / "new"), Libraries(tmp_path / "new")):
        for _ in range(2):
            assert not libraries.is_onednn_faster(a_matmul(), 1)
            assert libraries.is_onednn_faster(a_matmul(has_bias=True), 1)
            assert not libraries.is_onednn_faster(a_matmul(), 2)
    assert measured == [(a_matmul(), 1), (a_matmul(has_bias=True), 1), (a_matmul(), 2)]


def test_nothing_is_kept_without_a_directory(measured: list[Any], tmp_path: Path) -> None:
    """It is known in this process only."""
    libraries = Libraries(None)
    assert [libraries.is_onednn_faster(a_matmul(), 1) for _ in range(2)] == [False, False]
    assert len(measured) == 1 and not list(tmp_path.iterdir())


def test_small_products_are_left_and_large_ones_stand_for_larger(measured: list[Any]) -> None:
    """The border is a number of operations."""
    libraries = Libraries(None)
    assert not libraries.is_onednn_faster(a_matmul(rows=4, has_bias=True), 1) and not measured
    assert a_matmul(rows=4).flops < LEAST_FLOPS
    for rows in (2**20, 2**21):
        assert libraries.is_onednn_faster(a_matmul(rows=rows, has_bias=True), 1)
    ((product, _),) = measured
    assert MOST_FLOPS / 2 < product.flops <= MOST_FLOPS and (product.inner, product.columns) == (64, 128)


def change(path: Path, **changes: Any) -> None:
    """Change fields of a file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda path: path.write_bytes(b"\xff{"), id="no text"),
        pytest.param(lambda path: path.write_text("[]"), id="another kind"),
        pytest.param(lambda path: change(path, format=0), id="another format"),
        pytest.param(lambda path: change(path, gains={"a": "b"}), id="a word"),
        pytest.param(lambda path: change(path, made_at=time.time() - matmul.MAX_AGE_S - 1), id="too old"),
        pytest.param(lambda path: change(path, made_at=time.time() + 3600), id="of the future"),
        pytest.param(
            lambda path: change(path, fingerprint={**json.loads(path.read_text())["fingerprint"], "torch": "1.0"}),
            id="another torch",
        ),
    ],
)
def test_what_cannot_be_used_is_measured_anew(
    measured: list[Any], tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    """And is right afterwards."""
    assert Libraries(tmp_path).is_onednn_faster(a_matmul(has_bias=True), 1)
    (path,) = tmp_path.iterdir()
    spoil(path)
    assert Libraries(tmp_path).is_onednn_faster(a_matmul(has_bias=True), 1)
    assert Libraries(tmp_path).is_onednn_faster(a_matmul(has_bias=True), 1)
    assert len(measured) == 2


def test_a_directory_that_cannot_be_written_costs_a_measurement_only(measured: list[Any], tmp_path: Path) -> None:
    """A file is in its place."""
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert Libraries(tmp_path / "file").is_onednn_faster(a_matmul(has_bias=True), 1)
    assert len(measured) == 2


def test_old_measurements_make_room(measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the file does not grow for ever."""
    monkeypatch.setattr(matmul, "MAX_ENTRIES", 3)
    libraries = Libraries(tmp_path)
    for rows in range(256, 261):
        libraries.is_onednn_faster(a_matmul(rows), 1)
    (path,) = tmp_path.iterdir()
    assert list(json.loads(path.read_text())["gains"]) == [a_matmul(rows).name for rows in (258, 259, 260)]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_a_measurement_leaves_threads_as_they_were(left: bool, right: bool, tmp_path: Path) -> None:
    """It takes place, and gives a ratio of times."""
    threads = torch.get_num_threads()
    product = a_matmul(is_left_transposed=left, is_right_transposed=right, has_bias=right)
    Libraries(tmp_path).is_onednn_faster(product, 1)
    assert torch.get_num_threads() == threads
    (path,) = tmp_path.iterdir()
    (gain,) = json.loads(path.read_text())["gains"].values()
    assert 0.01 < gain < 100


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_the_user_may_have_forbidden_it() -> None:
    """Deterministic algorithms, oneDNN switched off, less precision."""
    assert has_choice()
    torch.use_deterministic_algorithms(True)
    try:
        assert not has_choice()
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not has_choice()
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert not has_choice()
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert has_choice()


# ------------------------------------------------------------------------------------------------------- the whole


class Layers(nn.Module):
    """Layers, activations behind them, a sum, and one weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.across = nn.Linear(24, 40), nn.Linear(40, 40, bias=False)
        self.down = nn.Linear(40, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as much as was given."""
        y = torch.relu(self.up(x))
        y = y + torch.nn.functional.gelu(self.across(y)) + torch.tanh(self.across(-y))
        return x + self.down(y)


def train(options: dict[str, Any] | None, mode: str = "train") -> list[torch.Tensor]:
    """Return output and gradients of a step, in eager without options."""
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(32, 24, requires_grad=True)
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
    monkeypatch.setattr(matmul, "LEAST_FLOPS", 1)
    monkeypatch.setattr(matmul, "_measure_gain", lambda product, cores: 2.0)
    return {"debug.strict": True, "plan.planner": "serial", "device.cache": tmp_path}


def count_products(capfd: pytest.CaptureFixture[str], run: Callable[[], Any]) -> int:
    """Return how many products oneDNN computes in a call, by its own word."""
    capfd.readouterr()
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        run()
    lines = capfd.readouterr().out.splitlines()
    return sum("exec" in line and ("inner_product" in line or "matmul" in line) for line in lines)


@pytest.mark.parametrize("bodies", ["native", "python"])
def test_oneDNN_computes_all_products_of_a_step_and_gradients_are_those_of_eager(  # noqa: N802
    options: dict[str, Any], bodies: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Four forward, and for each of them one by its input and one by its weight."""
    got: list[torch.Tensor] = []
    assert count_products(capfd, lambda: got.extend(train({**options, "runtime.bodies": bodies}))) == 12
    for one, other in zip(got, train(None), strict=True):
        torch.testing.assert_close(one, other)


def test_inference_too(options: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    """Without gradients, an activation may be next to its product."""
    got: list[torch.Tensor] = []
    assert count_products(capfd, lambda: got.extend(train(options, "inference"))) == 4
    torch.testing.assert_close(got, train(None, "inference"))


@pytest.mark.parametrize("forbid", ["option", "deterministic"])
def test_products_stay_with_BLAS_where_the_user_says_so(  # noqa: N802
    options: dict[str, Any], forbid: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """By an option of apollo, or one of torch."""
    own = {**options, "runtime.onednn": forbid != "option"}
    torch.use_deterministic_algorithms(forbid == "deterministic")
    try:
        assert count_products(capfd, lambda: train(own)) == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_in_the_midst_of_a_compile_products_are_measured_on_tensors_with_memory(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards compile while tensors are fake, and under the user's settings."""
    seen: list[tuple[bool, torch.dtype, bool]] = []

    def look(product: Matmul, cores: int) -> float:
        result = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        seen.append((isinstance(result, FakeTensor), result.dtype, torch.is_grad_enabled()))
        return 0.5

    monkeypatch.setattr(matmul, "_measure_gain", look)
    train(options)
    assert set(seen) == {(False, torch.float32, False)}
    assert len(seen) == 9  # one layer is used twice, and its products are alike
