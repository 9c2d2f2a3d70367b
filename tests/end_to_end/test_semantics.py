"""Randomness, mutation, aliasing and errors behave as in eager or in Inductor."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from apollo_compile.errors import RuntimeClosedError
from apollo_compile.session import registry
from apollo_compile.torch_bridge import bodies, whole
from tests.end_to_end import models
from tests.end_to_end.step_cases.models import Wrapped
from tests.end_to_end.test_values import floats

APOLLO = {"backend": "apollo", "options": models.STRICT}
UNCOMPILED = {"backend": "apollo", "options": {**models.STRICT, "runtime.bodies": "eager"}}
"""Without a compiler, for what the traced graph decides; it takes most of the time."""


@pytest.mark.robustness("Values", "dropout, again and as Inductor draws it")
def test_dropout_is_reproducible_and_equal_to_inductors() -> None:
    """Random numbers are drawn in graph order, whatever the lanes do: the losses are Inductor's to the bit."""
    model = models.TwoTowers(depth=1, dropout=0.3)

    def losses(**options: object) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(7)
        return models.train(model, models.two_tower_loss, **options)[0], torch.get_rng_state()

    first, state = losses(**APOLLO)
    second, _ = losses(**APOLLO)
    inductor, inductor_state = losses(backend="inductor")
    assert [float(loss) for loss in first] == [float(loss) for loss in second]
    assert len({float(loss) for loss in first}) == len(first)
    torch.testing.assert_close(first, inductor)
    assert torch.equal(state, inductor_state)

    torch._dynamo.reset()
    torch.compile(model, **APOLLO)(*models.two_tower_inputs())
    segments = registry.find_models(model)[0].graphs[0].compilation.partition.graph.segments
    body_by_name = {segment.name: segment.body for segment in segments}
    assert body_by_name["image.layers.0"] == body_by_name["text.layers.0"], "the seed's number tells equal layers apart"


@pytest.mark.robustness("Values", "dropout with eager bodies")
def test_eager_bodies_need_no_compiler_and_draw_as_eager_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training with dropout on lanes gives eager's numbers, and nothing is compiled."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was compiled")

    for file in (bodies, whole):
        monkeypatch.setattr(file, "compile_fx_inner", refuse)
    model = models.TwoTowers(dropout=0.3)

    def run(**options: object) -> models.Training:
        torch.manual_seed(7)
        return models.train(model, models.two_tower_loss, **options)

    others = registry.compiled_models()
    models.assert_same_training(run(), run(**UNCOMPILED))
    graphs = [graph for model in registry.compiled_models() if model not in others for graph in model.graphs]
    assert len(graphs) == 2 and all(len({span.lane for span in graph.trace().spans}) > 1 for graph in graphs)


@pytest.mark.robustness("Training loops", "BatchNorm, frozen and unused modules")
def test_batch_norm_buffers_frozen_and_unused_modules_train_as_in_eager() -> None:
    """Mutated buffers end with eager's values; parameters without a gradient keep None."""
    left, right = (nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2))
    owned = {"left": left, "right": right, "frozen": nn.Linear(16, 8).requires_grad_(False), "unused": nn.Linear(2, 2)}
    model = Wrapped(lambda own, x: own.left(x) * own.right(x) + own.frozen(x), **owned)
    models.assert_trains_as_in_eager(model, lambda run: run(floats(32, 16)).pow(2).mean(), **UNCOMPILED)


def _mutate_input(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    before = x.sin().sum()
    x.mul_(2)
    after = x.cos() @ y
    x.add_(1)
    return after + before + x.sum()


def _alias_outputs(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = x @ y
    return z, z.t(), x.view(-1), y, z


def _none_and_constants(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return x + 1, None, torch.ones(3), (y @ x).sum()


def _many_values(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    left, right = x.split(4, dim=1)
    values, indices = (x @ y).topk(2)
    return left + right, values, indices, torch.sort(y)[0]


@pytest.mark.robustness("Values", "inputs written to, aliases, None and constants")
@pytest.mark.parametrize("function", [_mutate_input, _alias_outputs, _none_and_constants, _many_values])
def test_functions_with_effects_and_aliases_return_what_eager_returns(
    function: Callable[..., object], either: dict[str, Any]
) -> None:
    """Inputs are mutated alike, outputs alias alike, None and constants come back."""
    eager_inputs = floats(8, 8), floats(8, 8, seed=1)
    inputs = tuple(each.clone() for each in eager_inputs)
    expected, actual = function(*eager_inputs), torch.compile(function, **either)(*inputs)
    torch.testing.assert_close((actual, inputs), (expected, eager_inputs))
    assert _aliases(actual, inputs) == _aliases(expected, eager_inputs)


def _aliases(outputs: object, inputs: tuple[torch.Tensor, ...]) -> list[list[bool]]:
    tensors = [each for each in outputs if each is not None] if isinstance(outputs, tuple) else [outputs]
    return [[tensor.data_ptr() == each.data_ptr() for each in inputs] for tensor in tensors]


@pytest.mark.robustness("Training loops", "no_grad and inference_mode")
def test_no_grad_and_inference_mode_give_eagers_values() -> None:
    """The inference graph is cut and planned as well."""
    model = models.TwoTowers().eval()
    run = torch.compile(model, **APOLLO)
    inputs = models.two_tower_inputs()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(run(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.robustness("Training loops", "autocast")
def test_bf16_autocast_trains_within_its_tolerance() -> None:
    """Autocast is part of the traced graph."""
    model = models.TwoTowers()

    def loss_of(run: Callable[..., torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return run(*models.two_tower_inputs()).float().square().mean()

    expected, actual = models.train(model, loss_of)[0], models.train(model, loss_of, **UNCOMPILED)[0]
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)


seen: list[tuple[frozenset[int], int]] = []
"""Lane witnesses: affinity and thread count, read from inside a body."""


@torch.library.custom_op("apollo_tests::witness", mutates_args=(), tags=(torch.Tag.pointwise,))
def witness(x: torch.Tensor) -> torch.Tensor:
    """Record where it runs."""
    seen.append((frozenset(os.sched_getaffinity(0)), torch.get_num_threads()))
    return x.clone()


witness.register_fake(torch.empty_like)


@torch.library.custom_op("apollo_tests::explode", mutates_args=())
def explode(x: torch.Tensor) -> torch.Tensor:
    """Fail, if the first number says so."""
    if float(x.flatten()[0]) > 0:
        raise LookupError("lit")
    return x.clone()


explode.register_fake(torch.empty_like)


def _towers(forward: Callable[..., torch.Tensor], width: int, depth: int) -> nn.Module:
    left, right = (nn.ModuleList(nn.Linear(width, width) for _ in range(depth)) for _ in range(2))
    return Wrapped(forward, left=left, right=right)


@pytest.mark.robustness("Special operators", "operators that ask where they run")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="lanes need two cores")
def test_a_lane_holds_its_cores_and_threads_while_its_segments_run() -> None:
    """Affinity and OpenMP quota, read from inside bodies, are those of the lane that the plan names."""

    def watched(own: Any, x: torch.Tensor) -> torch.Tensor:
        left = right = x
        for one, other in zip(own.left, own.right, strict=True):
            left, right = witness(one(left)), witness(other(right))
        return left @ right.T

    model = _towers(watched, 256, 3)
    run = torch.compile(model, **APOLLO)
    x = torch.randn(256, 256)
    with torch.no_grad():
        run(x)
        seen.clear()
        run(x)
    (graph,) = registry.find_models(model)[0].graphs
    plan = graph.compilation.plan
    cores = sorted(os.sched_getaffinity(0))
    used = {assignment.lane for assignment in plan.assignments}
    assert len(plan.lanes) > 1 and len(used) > 1 and len(seen) == 6
    allowed = {frozenset(cores[unit] for unit in plan.lanes[lane].units) for lane in used}
    assert {affinity for affinity, _ in seen} <= allowed
    assert {(len(affinity), num_threads) for affinity, num_threads in seen} == {(1, 1)}
    for span in graph.trace().spans:
        assert span.core in {cores[unit] for unit in plan.lanes[span.lane].units}


@pytest.mark.robustness("Special operators", "operators that raise")
def test_an_exception_in_a_body_reaches_the_caller_as_itself_and_training_goes_on() -> None:
    """The type survives, a note names the segment, and the next call works."""

    def light(own: Any, x: torch.Tensor, fuse: torch.Tensor) -> torch.Tensor:
        left = own.left[1](own.left[0](x).relu()).relu()
        return left @ own.right[1](explode(fuse) + own.right[0](x)).T

    run = torch.compile(_towers(light, 64, 2), **APOLLO)
    x, safe, lit = torch.randn(64, 64), -torch.ones(64, 64), torch.ones(64, 64)
    with torch.no_grad():
        expected = run(x, safe)
        for _ in range(3):
            with pytest.raises(LookupError, match="lit") as caught:
                run(x, lit)
            assert any("raised in segment ~explode" in note for note in caught.value.__notes__)
            torch.testing.assert_close(run(x, safe), expected)


_inner = torch.compile(lambda x: (x @ x).relu(), **APOLLO)


@torch.library.custom_op("apollo_tests::nested", mutates_args=())
def nested(x: torch.Tensor) -> torch.Tensor:
    """Call another compiled function."""
    return _inner(x)


nested.register_fake(torch.empty_like)


@pytest.mark.robustness("Special operators", "operators that call a compiled function")
def test_a_body_may_call_another_compiled_function() -> None:
    """The inner run takes no lanes, which the outer run has."""
    x = torch.randn(16, 16)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(lambda x: nested(x) + 1, **APOLLO)(x), (x @ x).relu() + 1)


@pytest.mark.robustness("Values", "inference tensors that are written to")
def test_inference_tensors_can_be_written_to(either: dict[str, Any]) -> None:
    """A cache that was made in inference mode takes new values there."""

    def store(cache: torch.Tensor, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.index_put_((index,), x)
        return cache.sum() + (x @ x.T).sum()

    with torch.inference_mode():
        cache, index, x = torch.zeros(4, 8), torch.tensor([1, 3]), torch.randn(2, 8)
        expected_cache = cache.clone()
        torch.testing.assert_close(torch.compile(store, **either)(cache, index, x), store(expected_cache, index, x))
        torch.testing.assert_close(cache, expected_cache)


@pytest.mark.robustness("Training loops", "a fork after a step")
def test_a_forked_child_gets_a_clear_error() -> None:
    """Lanes are threads, and threads stay behind in the parent, which goes on; the child may compile for itself."""
    model = models.TwoTowers()
    run = torch.compile(model, **APOLLO)
    inputs = models.two_tower_inputs()
    with torch.no_grad():
        expected = run(*inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of every fork with threads
            child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(RuntimeClosedError):
                    run(*inputs)
                torch._dynamo.reset()
                torch.testing.assert_close(torch.compile(model, **APOLLO)(*inputs), expected)
                code = 17
            finally:
                os._exit(code)  # nothing else of the tests is to run here
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
        torch.testing.assert_close(run(*inputs), expected)


@pytest.mark.robustness("Special operators", "operators that raise in compiled code")
def test_an_error_in_compiled_code_says_what_torch_says() -> None:
    """A native body fails with the operator's own message, not only with the name of the call."""
    table = nn.Embedding(4, 8)
    run = torch.compile(lambda index, x: torch.linalg.cholesky(x) @ table(index).T, **APOLLO)
    index, fine = torch.tensor([0, 1]), torch.eye(8)
    with torch.no_grad():
        expected = run(index, fine)
        with pytest.raises(RuntimeError, match="not positive-definite"):
            run(index, -fine)
        torch.testing.assert_close(run(index, fine), expected)
