"""Matrix products go to the library that was measured to be the faster, and their numbers stay."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from apollo_compile import backend
from apollo_compile.distributed.ranks import Ranks, Store
from apollo_compile.session import bodies as session_bodies
from apollo_compile.session import registry
from apollo_compile.torch_bridge import onednn
from apollo_compile.torch_bridge.bodies import compile_bodies
from apollo_compile.torch_bridge.interpret import real_tensors
from apollo_compile.torch_bridge.onednn import (
    LEAST_FLOPS,
    MARGIN,
    MOST_BYTES,
    MOST_FLOPS,
    Libraries,
    Matmul,
    find_matmuls,
    replace_with_onednn,
)
from apollo_compile.torch_bridge.settings import may_choose_library
from tests.end_to_end.marks import needs_two_cores
from tests.end_to_end.models import TwoTowers, two_tower_inputs

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
pytestmark = needs_onednn

LINEAR = "apollo_compile.linear.default"


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
    inputs = layer()
    graph_module = trace(step, *inputs)
    found = find_matmuls(graph_module.graph)
    assert replace_with_onednn(graph_module.graph, lambda product: product in found) == 3
    assert [product.name for product in found] == ["20x12 12x16T+bias", "20x16 16x12", "16x20T 20x12"]
    assert [product.flops for product in found] == [2 * 20 * 12 * 16] * 3
    assert targets(graph_module.graph) == [LINEAR] * 3
    graph_module.recompile()
    torch.testing.assert_close(graph_module(*inputs), step(*inputs))


def test_only_what_is_faster_goes() -> None:
    """The other products stay as they were."""
    graph_module = trace(step, *layer())
    assert replace_with_onednn(graph_module.graph, lambda product: product.has_bias) == 1
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
    assert (
        before
        and not find_matmuls(graph)
        and replace_with_onednn(graph, lambda product: pytest.fail(f"asked for {product}")) == 0
    )
    assert targets(graph) == before


# ---------------------------------------------------------------------------------------------------- the libraries


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Matmul, int]]:
    """Return what is measured; oneDNN is twice as fast where there is a bias, else half as fast."""
    found: list[tuple[Matmul, int]] = []

    def measure(product: Matmul, cores: int) -> float:
        found.append((product, cores))
        return 2.0 if product.has_bias else 0.5

    monkeypatch.setattr(onednn, "_measure_gain", measure)
    return found


LOSES, WINS = a_matmul(), a_matmul(has_bias=True)


def test_a_product_is_measured_once_per_number_of_cores(measured: list[Any], tmp_path: Path) -> None:
    """And in the next process not again."""
    cases = [(LOSES, 1), (WINS, 1), (WINS, 1), (LOSES, 2)]
    for libraries in (Libraries(tmp_path / "new"), Libraries(tmp_path / "new")):
        for _ in range(2):
            assert libraries.choose(cases) == {(WINS, 1)}
    assert measured == [(LOSES, 1), (WINS, 1), (LOSES, 2)]


def test_processes_keep_what_others_have_measured(measured: list[Any], tmp_path: Path) -> None:
    """Although both had looked into the file before."""
    one, other = Libraries(tmp_path), Libraries(tmp_path)
    for libraries, rows in ((one, 256), (other, 300), (one, 400)):
        libraries.choose([(a_matmul(rows), 1)])
    Libraries(tmp_path).choose([(a_matmul(rows), 1) for rows in (256, 300, 400)])
    assert len(measured) == 3


def test_threads_that_compile_at_once_measure_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And each product once."""
    inside, seen = threading.Lock(), []

    def measure(product: Matmul, cores: int) -> float:
        assert inside.acquire(blocking=False)
        time.sleep(0.001)
        seen.append(product)
        inside.release()
        return 2.0

    monkeypatch.setattr(onednn, "_measure_gain", measure)
    libraries, cases = Libraries(tmp_path), [(a_matmul(rows), 1) for rows in range(256, 276)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(libraries.choose, [cases] * 4)) == [set(cases)] * 4
    assert len(seen) == 20


def test_nothing_is_kept_without_a_directory(measured: list[Any], tmp_path: Path) -> None:
    """It is known in this process only."""
    libraries = Libraries(None)
    assert [libraries.choose([(WINS, 1)]) for _ in range(2)] == [{(WINS, 1)}] * 2
    assert len(measured) == 1 and not list(tmp_path.iterdir())


def test_small_products_are_left_and_smaller_ones_stand_for_large_ones(measured: list[Any]) -> None:
    """The borders are numbers of operations and of bytes."""
    libraries, small = Libraries(None), a_matmul(4, has_bias=True)
    assert small.flops < LEAST_FLOPS and not libraries.choose([(small, 1)]) and not measured
    large = {(a_matmul(rows, has_bias=True), 1) for rows in (2**20, 2**21)}
    assert libraries.choose(large) == large
    ((product, _),) = measured
    assert MOST_FLOPS / 2 < product.flops <= MOST_FLOPS and (product.inner, product.columns) == (64, 128)
    flat = a_matmul(1, inner=2**13, columns=2**14, has_bias=True)
    assert flat.flops > MOST_FLOPS and libraries.choose([(flat, 1)])
    assert MOST_BYTES / 2 < measured[-1][0].num_bytes <= MOST_BYTES


@pytest.mark.parametrize(("gain", "is_enough"), [(1 + MARGIN / 2, False), (1 + 2 * MARGIN, True)])
def test_a_gain_within_noise_is_none(monkeypatch: pytest.MonkeyPatch, gain: float, is_enough: bool) -> None:
    """BLAS is what the user had."""
    monkeypatch.setattr(onednn, "_measure_gain", lambda product, cores: gain)
    assert bool(Libraries(None).choose([(LOSES, 1)])) == is_enough


def test_what_cannot_be_used_is_measured_anew(measured: list[Any], tmp_path: Path) -> None:
    """And is right afterwards."""
    assert Libraries(tmp_path).choose([(WINS, 1)])
    (tmp_path / "matmul-1.json").write_text("[]")
    assert Libraries(tmp_path).choose([(WINS, 1)])
    assert Libraries(tmp_path).choose([(WINS, 1)])
    assert len(measured) == 2


def test_a_directory_that_cannot_be_written_costs_a_measurement_only(measured: list[Any], tmp_path: Path) -> None:
    """A file is in its place."""
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert Libraries(tmp_path / "file").choose([(WINS, 1)])
    assert len(measured) == 2


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_a_measurement_leaves_threads_as_they_were(left: bool, right: bool, tmp_path: Path) -> None:
    """It takes place, and gives a ratio of times."""
    threads = torch.get_num_threads()
    product = a_matmul(is_left_transposed=left, is_right_transposed=right, has_bias=right)
    Libraries(tmp_path).choose([(product, threads + 1)])
    assert torch.get_num_threads() == threads
    (path,) = tmp_path.glob("matmul-*.json")
    (gain,) = json.loads(path.read_text())["gains"].values()
    assert 0.01 < gain < 100


def test_what_a_library_cannot_compute_stays_with_blas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That is asked once by a process, and no other one is told; threads stay as they were."""
    calls: list[torch.Tensor] = []

    def refuse(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(value)
        raise RuntimeError("could not create a primitive descriptor")

    monkeypatch.setattr(onednn, "_call_onednn", refuse)
    threads, libraries = torch.get_num_threads(), Libraries(tmp_path)
    for _ in range(2):
        assert not libraries.choose([(WINS, threads + 1)])
    assert len(calls) == 1 and torch.get_num_threads() == threads and not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_the_user_may_have_forbidden_it() -> None:
    """Deterministic algorithms, oneDNN switched off, less precision."""
    assert may_choose_library()
    torch.use_deterministic_algorithms(True)
    try:
        assert not may_choose_library()
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not may_choose_library()
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert not may_choose_library()
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert may_choose_library()


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
    monkeypatch.setattr(onednn, "LEAST_FLOPS", 1)
    monkeypatch.setattr(onednn, "_measure_gain", lambda product, cores: 2.0)
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
    """Forwards compile while tensors are fake."""
    seen: list[tuple[bool, bool]] = []

    def look(product: Matmul, cores: int) -> float:
        seen.append((isinstance(torch.mm(torch.ones(2, 2), torch.ones(2, 2)), FakeTensor), torch.is_grad_enabled()))
        return 0.5

    monkeypatch.setattr(onednn, "_measure_gain", look)
    train(options)
    assert set(seen) == {(False, False)}
    assert len(seen) == 9  # one layer is used twice, and its products are alike


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
    monkeypatch.setattr(onednn, "_measure_gain", lambda product, cores: pytest.fail("measured"))
    with inductor_config.patch({"deterministic": True}):
        assert not may_choose_library()
        train(options, "inference")


TUNED = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}


def test_products_go_to_onednn_where_inductor_tunes_too(
    options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Of products with weights that are inputs, as in training, Inductor's tuning leaves all to BLAS."""
    expected = train(None)
    with inductor_config.patch(TUNED):
        found: list[list[torch.Tensor]] = []
        assert count_products(capfd, lambda: found.append(train(options))) == 12
    torch.testing.assert_close(found, [expected])


@needs_two_cores
@pytest.mark.parametrize("made_for", [1, 2])
def test_a_body_with_inductors_own_template_is_right_on_other_numbers_of_cores(made_for: int) -> None:
    """It has blocks for as many threads as there were when it was compiled; lanes have others."""
    left, right = torch.randn(3, 70, 40), torch.randn(3, 40, 50)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(made_for)
        with FakeTensorMode() as mode:
            piece = make_fx(lambda a, b: (torch.bmm(a, b),))(*map(mode.from_tensor, (left, right)))
        fakes = [node.meta["val"] for node in piece.graph.find_nodes(op="placeholder")]
        with inductor_config.patch({**TUNED, "max_autotune_gemm_backends": "CPP"}):
            (body,) = compile_bodies([("bmm", piece, fakes)], native=True, is_inference=True)
        assert body.entry_address is not None
        for cores in (1, 2, 3):
            torch.set_num_threads(cores)
            torch.testing.assert_close(body.function([left, right])[0], torch.bmm(left, right))
    finally:
        torch.set_num_threads(threads)


class ManyForms(nn.Module):
    """Products whose matrices are slices, views, sums and outputs of others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 24) / 5)
        self.bias = nn.Parameter(torch.randn(48))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return products and views of them."""
        y = torch.addmm(self.bias[24:], x, self.weight)
        z = torch.addmm(x.sum(0), y, (self.weight * 2).t())
        left, right = (z @ self.weight).chunk(2, dim=1)
        one = (x[:1] @ self.weight) + (x @ self.weight[:, :1])
        again = (x.t() @ x) @ self.weight.reshape(8, 72).reshape(24, 24)
        return y, y.t(), left @ right.t(), one, again, (y @ self.weight).mul_(2)


def test_products_of_many_forms_are_those_of_eager(options: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    """Outputs and gradients."""

    def run(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = ManyForms(), torch.randn(20, 24, requires_grad=True)
        torch._dynamo.reset()
        outputs = (torch.compile(model, backend="apollo", options=options) if compiled else model)(x)
        sum(output.square().mean() for output in outputs).backward()  # type: ignore[union-attr]
        return [*(output.detach() for output in outputs), x.grad, model.weight.grad, model.bias.grad]  # type: ignore[list-item]

    got: list[torch.Tensor] = []
    assert count_products(capfd, lambda: got.extend(run(compiled=True))) >= 8
    torch.testing.assert_close(got, run(compiled=False), rtol=1e-4, atol=1e-4)


@needs_two_cores
def test_products_are_measured_on_as_many_cores_as_the_plan_gives_them(
    options: dict[str, Any], measured: list[Any], lanes: dict[str, Any]
) -> None:
    """Two towers on a lane each, and what comes before and behind."""
    model = TwoTowers()
    compiled = torch.compile(
        model, backend="apollo", options={**lanes["options"], "device.cache": options["device.cache"]}
    )
    compiled(*two_tower_inputs()).square().mean().backward()
    (made,) = (made for made in registry.compiled_models() if made.graphs and made is registry.compiled_models()[-1])
    planned = {a.quota.units for graph in made.graphs for a in graph.compilation.plan.assignments}
    assert {cores for _, cores in measured} == planned and 1 in planned


class Meddler:
    """A store in which somebody has written something else."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        version = desired.partition("\n")[0]
        return (f"{version}\n{{" if "products" in key else desired).encode()


def test_ranks_give_the_same_products_to_onednn(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever each of them measured; both are in this process. What is no list of names stops the rank."""

    def train_as_rank(store: Store, gain: float) -> int:
        ranks = Ranks(store)
        monkeypatch.setattr(backend, "find_ranks", lambda: ranks)
        monkeypatch.setattr(onednn, "_measure_gain", lambda product, cores: gain)
        return count_products(capfd, lambda: train({**options, "plan.remember": False}))

    monkeypatch.setattr(session_bodies, "libraries_in", lambda directory: Libraries(directory))
    for first, second in ((2.0, 0.5), (0.5, 2.0)):
        store = dist.HashStore()
        assert [train_as_rank(store, gain) for gain in (first, second)] == [12 if first > 1 else 0] * 2
    with pytest.raises(BackendCompilerFailed, match="the products for oneDNN that ranks agreed on cannot be read"):
        train_as_rank(Meddler(), 2.0)
