"""A step in parts is the step of the optimizer, for every optimizer that may be taken so."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from apollo_compile.torch_bridge import optimizers
from apollo_compile.torch_bridge.optimizers import OptimizerInParts
from tests.torch_settings import changed

CASES: list[tuple[str, Mapping[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    ("AdamW", {"lr": 0.1}),
    ("AdamW", {"lr": 0.1, "fused": True}),
    ("AdamW", {"lr": 0.1, "fused": True, "amsgrad": True, "maximize": True}),
    ("Adam", {"lr": 0.1, "fused": True, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    ("Adam", {"lr": torch.tensor(0.1), "fused": True}),
    ("AdamW", {"lr": 0.1, "foreach": True}),
    ("Adam", {"lr": 0.1, "amsgrad": True}),
    ("Adam", {"lr": torch.tensor(0.1)}),
    *((name, {}) for name in ("Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")),
]


def gradients_of(step: int, shapes: list[torch.Size]) -> list[torch.Tensor]:
    """Return gradients; one of them is laid out unlike its parameter."""
    generator = torch.Generator().manual_seed(step)
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    return [made[0].t().contiguous().t(), *made[1:]]


@pytest.mark.parametrize(("name", "settings"), CASES, ids=[f"{name}-{'-'.join(given)}" for name, given in CASES])
@pytest.mark.parametrize("are_numbers_fixed", [False, True], ids=["free", "deterministic"])
def test_steps_in_parts_are_those_of_the_optimizer(
    name: str, settings: Mapping[str, Any], are_numbers_fixed: bool
) -> None:
    """Parameters and state: up to rounding where the kernel is chosen for the user, else bit by bit."""
    torch.manual_seed(0)
    with changed(torch.use_deterministic_algorithms, are_numbers_fixed, False):
        dtypes = [torch.float32, torch.float32, torch.float64, torch.float32]
        mine = [torch.nn.Parameter(torch.randn(3 + number, 4, dtype=each)) for number, each in enumerate(dtypes)]
        others = copy.deepcopy(mine)
        own, expected = (
            getattr(torch.optim, name)([{"params": each[:2]}, {"params": each[2:], "lr": 0.01}], **settings)
            for each in (mine, others)
        )
        parts = OptimizerInParts(own)
        assert OptimizerInParts.problem_of(own) is None
        for number in range(4):
            made = gradients_of(number, [each.shape for each in mine])
            gradients = [gradient.to(each.dtype) for gradient, each in zip(made, mine, strict=True)]
            for parameter, gradient in zip(others, gradients, strict=True):
                parameter.grad = gradient.contiguous()
            expected.step()
            if number == 0:  # makes the state
                for parameter, gradient in zip(mine, gradients, strict=True):
                    parameter.grad = gradient.contiguous()
                own.step()
                own.zero_grad()
                continue
            parts.refresh()
            assert parts.reason_against() is None
            parts.step(mine[1:3], gradients[1:3])
            parts.step([mine[0], mine[3]], [gradients[0], gradients[3]])
            assert all(parameter.grad is None for parameter in mine)
    is_exact = are_numbers_fixed or "fused" in settings
    tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(mine, others, **tolerance)
    torch.testing.assert_close(own.state_dict(), expected.state_dict(), **tolerance)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.randn(16, 16, dtype=torch.bfloat16), id="bfloat16"),
        pytest.param(lambda: torch.randn(16, 16, dtype=torch.float16), id="float16"),
        pytest.param(lambda: torch.randn(16, 32)[:, ::2], id="gaps"),
        pytest.param(lambda: torch.randn(16, 16).t(), id="transposed"),
    ],
)
def test_a_fused_kernel_is_not_chosen_where_it_would_do_something_else(
    make: Callable[[], torch.Tensor], momentum: float
) -> None:
    """In lower precision, and where there is something between the elements of a parameter."""
    torch.manual_seed(0)
    values = make()
    memory = torch.empty(0, dtype=values.dtype).set_(values.untyped_storage())
    is_between = torch.ones_like(memory, dtype=torch.bool)
    is_between.as_strided(values.shape, values.stride()).fill_(False)
    before = memory[is_between]
    mine = torch.nn.Parameter(values)
    other = torch.nn.Parameter(values.clone())
    own, expected = (torch.optim.SGD([each], lr=0.5, momentum=momentum) for each in (mine, other))
    parts = OptimizerInParts(own)
    for number in range(3):
        gradient = torch.randn(16, 16, generator=torch.Generator().manual_seed(number)).to(mine.dtype)
        other.grad = gradient
        expected.step()
        parts.refresh()
        parts.step([mine], [gradient])
    torch.testing.assert_close(mine, other)
    torch.testing.assert_close(own.state_dict(), expected.state_dict())
    torch.testing.assert_close(memory[is_between], before, rtol=0, atol=0)


def _widen(state: dict[str, Any]) -> None:
    state["momentum_buffer"] = state["momentum_buffer"].double()


@pytest.mark.parametrize("change", [dict.clear, _widen], ids=["dropped", "of another dtype"])
def test_state_that_a_fused_kernel_does_not_take_is_updated_as_ever(change: Callable[[Any], None]) -> None:
    """Drop or change the momentum of one parameter, where the fused kernel would raise."""
    mine, others = ([torch.nn.Parameter(torch.ones(8)) for _ in range(2)] for _ in range(2))
    own, expected = (torch.optim.SGD(each, lr=0.1, momentum=0.9, weight_decay=0.1) for each in (mine, others))
    for number in range(4):
        gradients = gradients_of(number, [torch.Size((8, 1)), torch.Size((8,))])
        for optimizer, (first, second) in ((own, mine), (expected, others)):
            if number == 2:
                change(optimizer.state[first])
            first.grad, second.grad = gradients[0][:, 0], gradients[1]
        expected.step()
        OptimizerInParts(own).step(mine, [each.grad for each in mine if each.grad is not None])
    torch.testing.assert_close(mine, others)
    torch.testing.assert_close(own.state_dict(), expected.state_dict())


@pytest.mark.parametrize(
    ("dtype", "settings", "expected"),
    [
        (torch.float32, {}, None),
        (torch.float32, {"momentum": 0.9}, True),
        (torch.float32, {"weight_decay": 0.1}, True),
        *((torch.bfloat16, {"fused": asked}, asked) for asked in (True, False, None)),
    ],
)
def test_plain_sgd_on_a_cpu_is_not_fused_and_what_the_user_asked_for_stays(
    dtype: torch.dtype, settings: Mapping[str, Any], expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one addition per parameter, bit by bit that of the loop; whatever does more is one fused kernel."""
    taken = []
    monkeypatch.setattr(torch.optim.SGD, "step", lambda view: taken.append(view.param_groups[0]["fused"]))
    parameter = torch.nn.Parameter(torch.zeros(256, dtype=dtype))
    OptimizerInParts(torch.optim.SGD([parameter], lr=0.1, **settings)).step([parameter], [torch.ones_like(parameter)])
    assert taken[-1] is expected  # before it, the kernel itself is checked


def test_a_fused_kernel_that_is_wrong_is_not_chosen_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once."""
    monkeypatch.setattr(optimizers, "differs_from_plain", lambda *_: True)
    optimizers._warn_of_kernel.cache_clear()
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
    taken = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda view: taken.append(view.param_groups[0]["fused"]) or step(view))
    for _ in range(2):
        OptimizerInParts(optimizer).step([parameter], [torch.ones(2)])
    assert taken == [None, None] and parameter.tolist() == [-2.5, -2.5]
    assert len([each for each in caplog.messages if "fused kernel of SGD for torch.float32 on cpu" in each]) == 1


def test_an_optimizer_is_taken_whole_where_parts_would_not_be_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown classes, hooks, and a step that was replaced; a scheduler's counter is no such step.

    That of a class may be replaced by one that says what it wraps, or does not.
    """
    parameters = [torch.nn.Parameter(torch.randn(2)) for _ in range(3)]

    class Own(torch.optim.SGD):
        """May do anything."""

    assert "Own may use several parameters" in str(OptimizerInParts.problem_of(Own(parameters)))
    assert "LBFGS may use several parameters" in str(OptimizerInParts.problem_of(torch.optim.LBFGS(parameters)))
    optimizer = torch.optim.AdamW(parameters[:2])
    parts = OptimizerInParts(optimizer)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    assert parts.reason_against() is None
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    assert "hooks" in str(parts.reason_against())
    hook.remove()
    step = optimizer.step
    optimizer.step = lambda *args: step(*args)  # type: ignore[method-assign]
    assert "replaced" in str(parts.reason_against())
    parts, of_class = OptimizerInParts(torch.optim.AdamW(parameters)), torch.optim.AdamW.step

    def plain(self: torch.optim.AdamW) -> None:
        of_class(self)

    assert parts.reason_against() is None
    for wrap in (copy.copy, functools.wraps(of_class)):
        monkeypatch.setattr(torch.optim.AdamW, "step", wrap(plain))
        assert parts.reason_against() == "the optimizer's step was replaced"


def test_schedulers_see_steps_in_parts() -> None:
    """One that is made later does not warn that the optimizer has not stepped."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    parts = OptimizerInParts(optimizer)
    parts.step([parameter], [torch.ones(2)])
    parts.note_taken()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_a_step_in_parts_obeys_a_gradient_scaler_and_is_named_in_a_profile() -> None:
    """`grad_scale` and `found_inf`, which a scaler sets, count; and the profiler finds the optimizer's step."""
    parameter = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.Adam([parameter], fused=True)
    parts, gradient = OptimizerInParts(optimizer), torch.ones(8)
    parts.step([parameter], [gradient])
    before = parameter.detach().clone()
    vars(optimizer).update(grad_scale=torch.ones(()), found_inf=torch.ones(()))
    parts.step([parameter], [gradient])
    assert torch.equal(parameter, before)
    vars(optimizer).update(grad_scale=None, found_inf=None)
    with torch.profiler.profile() as profile:
        parts.step([parameter], [gradient])
    assert not torch.equal(parameter, before)
    assert "Optimizer.step#Adam.step" in {event.key for event in profile.key_averages()}
