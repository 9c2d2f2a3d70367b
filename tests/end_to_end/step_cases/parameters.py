"""Cases by parameter: dtypes, sizes, layouts, and who shares memory with whom."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.utils import parametrizations, parametrize

from tests.end_to_end.step_cases import models
from tests.end_to_end.step_cases.cases import CHANGE, RAISES, Training, add, add_texts, case, loop, refused, train
from tests.end_to_end.step_cases.models import CLASSES, WIDTH, WORDS, Texts, Wrapped, adamw, chain, mse, rows, sgd

OPTIMIZERS = {"SGD": sgd, "momentum": models.momentum, "AdamW": adamw}


def _linear() -> nn.Linear:
    return nn.Linear(WIDTH, CLASSES)


# ----------------------------------------------------------------------------------------------------------- dtypes

says = "All parameters and batches are of this dtype."
for dtype, rtol in {torch.float64: 1e-9, torch.bfloat16: 2e-2, torch.float16: 4e-3}.items():
    for kind, make in OPTIMIZERS.items():
        name = f"{str(dtype).removeprefix('torch.')} with {kind}"
        typed = {"model": lambda dtype=dtype: chain().to(dtype), "batch": partial(rows, dtype=dtype)}
        add(name, says, by=make, rtol=rtol, atol=rtol / 3, **typed)


def _mixed() -> nn.Module:
    body, head = nn.Linear(WIDTH, 8, dtype=torch.bfloat16), nn.Linear(8, CLASSES, dtype=torch.float64)
    return Wrapped(lambda own, x: own.head(own.body(x.bfloat16()).tanh().double()), body=body, head=head)


def _complex() -> nn.Module:
    return Wrapped(lambda own, x: (x * own.a).sum(-1).abs(), a=nn.Parameter(torch.randn(WIDTH) + 1j))


wide = {"loss": lambda m, batch: nn.functional.mse_loss(m(batch["x"]), batch["y"].double()), "rtol": 2e-2, "atol": 6e-3}
mixed = partial(add, says="One dtype after the other.", model=_mixed, **wide)
mixed("bfloat16 and float64 in one model")
mixed("bfloat16 and float64 in one model, clipped", by=adamw, clip=0.1)
add("a complex parameter", model=_complex, loss=lambda m, batch: m(batch["x"]).mean(), count=1)


@case()
def buffers_of_other_dtypes() -> Training:
    """A count is a whole number, a mask is boolean, and both are written to."""

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        own.count.add_(x.shape[0])
        own.mask.logical_xor_(x[0] > 0)
        return own.linear(x * own.mask) * (1 + own.count / 1000)

    count, mask = torch.zeros((), dtype=torch.int64), torch.zeros(WIDTH, dtype=torch.bool)
    return train(Wrapped(forward, linear=_linear(), count=count, mask=mask), by=sgd)


# ------------------------------------------------------------------------------------------------------------ sizes


def _scaled(dtype: torch.dtype) -> nn.Module:
    scale = nn.Parameter(torch.tensor(2.0, dtype=dtype))
    return Wrapped(lambda own, x: own.linear(x) * own.scale, linear=_linear(), scale=scale)


scaled = partial(add, by=sgd, clip=0.1, rtol=1e-4)
scaled("a parameter without dimensions", model=partial(_scaled, torch.float32), by=adamw, clip=None)
scaled("a parameter without dimensions, clipped", model=partial(_scaled, torch.float32), by=models.momentum)
scaled("a parameter without dimensions in bfloat16, clipped", model=partial(_scaled, torch.bfloat16), rtol=4e-3)
scaled("a parameter without dimensions in float64, clipped", model=partial(_scaled, torch.float64))


def _with_nothing() -> nn.Module:
    return Wrapped(lambda own, x: own.linear(x) + own.extra.sum(), linear=_linear(), extra=nn.Parameter(torch.zeros(0)))


def _of_many() -> nn.Module:
    layers = [layer for _ in range(25) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))]
    return nn.Sequential(*layers, _linear())


add("a parameter without elements", model=_with_nothing, by=adamw, clip=1.0)
add("a hundred small parameters", model=_of_many, by=sgd)

# ---------------------------------------------------------------------------------------------------------- layouts


def _with_weight(make_weight: Callable[[], torch.Tensor]) -> nn.Sequential:
    model = chain()
    model[0].weight = nn.Parameter(make_weight())
    return model


for name, says, make_weight in (
    ("every other column", "It is a part of a larger matrix.", lambda: torch.randn(8, 2 * WIDTH)[:, ::2]),
    ("every other row", "Rows are dense, with holes between them.", lambda: torch.randn(16, WIDTH)[::2]),
    ("transposed", "It is dense, in the other order.", lambda: torch.randn(WIDTH, 8).T),
    ("from the middle", "Its memory begins before it.", lambda: torch.randn(100)[7:55].view(8, WIDTH)),
    ("of a diagonal", "Elements are those of a diagonal.", lambda: torch.randn(8, WIDTH, WIDTH).diagonal(0, 1, 2)),
):
    for count, (kind, make) in enumerate(OPTIMIZERS.items(), 1):
        add(f"a weight {name}, with {kind}", says, model=partial(_with_weight, make_weight), by=make, count=count)
expanded = partial(_with_weight, lambda: torch.randn(1, WIDTH).expand(8, WIDTH))
add("an expanded weight", model=expanded, by=sgd, count=1, **RAISES)
last = {"memory_format": torch.channels_last}
images = {"loss": models.entropy, "batch": lambda n: {**models.images(n), "x": models.images(n)["x"].to(**last)}}
add("channels last", model=lambda: models.convolutions().to(**last), **images)

# --------------------------------------------------------------------------------------------------- shared memory


def _tied() -> Texts:
    model = Texts()
    model.head = nn.Linear(8, WORDS, bias=False)
    model.head.weight = model.embedding.weight
    return model


add_texts("tied weights", model=_tied, by=adamw)


def _sharing(share: Callable[[nn.Sequential], None]) -> nn.Sequential:
    model = chain(nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh())
    share(model)
    return model


def _share_all(model: nn.Sequential, view: Callable[[torch.Tensor], torch.Tensor] = lambda data: data) -> None:
    model[4].weight.data = view(model[2].weight.data)


def _share_some(model: nn.Sequential) -> None:
    both = torch.randn(12, 8)
    model[2].weight.data, model[4].weight.data = both[:8], both[4:]


def flatten_all(model: nn.Module) -> None:
    """Put all parameters next to each other into one tensor."""
    flat = torch.cat([parameter.data.flatten() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), _cut_like(model, flat), strict=True):
        parameter.data = part


def _cut_like(model: nn.Module, flat: torch.Tensor) -> list[torch.Tensor]:
    parts = flat.split([parameter.numel() for parameter in model.parameters()])
    return [part.view_as(parameter) for part, parameter in zip(parts, model.parameters(), strict=True)]


by_own = "Each is updated by its own gradient."
for name, says, share in (
    ("two parameters in one memory", by_own, _share_all),
    ("two parameters in one memory, transposed", by_own, partial(_share_all, view=torch.t)),
    ("two parameters that overlap", "Rows in the middle are updated twice.", _share_some),
    ("all parameters in one memory", "As frameworks lay them out that shard models.", flatten_all),
):
    for count, kind in enumerate(("SGD", "AdamW"), 1):
        add(f"{name}, with {kind}", says, model=partial(_sharing, share), by=OPTIMIZERS[kind], count=count)


def _with_view(forward: Callable[..., torch.Tensor], name: str, view: Callable[..., torch.Tensor]) -> nn.Module:
    model = Wrapped(forward, linear=_linear())
    model.register_buffer(name, view(model.linear.weight.detach()))
    return model


add_row = partial(_with_view, lambda own, x: own.linear(x) + own.row.sum().detach(), "row", lambda weight: weight[0])
shrink = partial(_with_view, lambda own, x: (own.all.mul_(0.99), own.linear(x))[1], "all", lambda weight: weight)
raised = refused("backend='apollo' raised", BackendCompilerFailed)
add("a buffer that is a view of a parameter", model=add_row, by=sgd)
add("a buffer that is the whole of a parameter", model=shrink, by=sgd, count=1, **raised)


@case(**loop("some of them share memory"))
def buffers_that_share_memory() -> Training:
    """One is written to, the other is read."""

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        own.all.lerp_(x.detach().mean(0), 0.1)
        return own.linear(x) * own.some.sum()

    model = Wrapped(forward, linear=_linear(), all=torch.ones(WIDTH))
    model.register_buffer("some", model.all[:3])
    return train(model, by=sgd)


def _twice() -> nn.Sequential:
    layer = nn.Linear(8, 8)
    return chain(nn.Tanh(), layer, nn.Tanh(), layer)


def _with_a_pair() -> nn.Module:
    pair = nn.ParameterList(nn.Parameter(torch.zeros(CLASSES)) for _ in range(2))
    return Wrapped(lambda own, x: own.linear(x) + own.pair[0] + own.pair[1], linear=_linear(), pair=pair)


says = "Clipping multiplies the gradient of each in place, once."
add("two parameters with one gradient, clipped", says, model=_with_a_pair, clip=0.1)
add("a module used twice", "Under two names.", model=_twice, by=adamw, clip=0.5)


@case()
def gradients_in_one_memory() -> Training:
    """Of the user's, as buckets that are sent at once; they are cleared in place and added to."""
    model = chain()
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))

    def clear(training: Training, number: int) -> None:
        flat.zero_()
        for parameter, part in zip(model.parameters(), _cut_like(model, flat), strict=True):
            parameter.grad = part

    return train(model, by=None, before=clear, watched=lambda _: flat)


@case()
def a_parameter_reached_by_another_way_too() -> Training:
    """The loss function holds a view of it, made without gradients, so the optimizer steps after the program."""
    model = chain()
    view = model[0].weight.detach()[:2]
    return train(model, lambda m, batch: mse(m, batch) + view.square().sum() * m[2].bias.sum(), by=sgd, count=1)


# -------------------------------------------------------------------------------------------------- made of others


def _parametrized(change: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    model = chain()
    change(model[0])
    return model


for name, says, change in (
    ("weight norm", "Length and direction of a weight.", parametrizations.weight_norm),
    ("spectral norm", "Buffers that every forward writes to.", parametrizations.spectral_norm),
    ("an orthogonal weight", "A matrix exponential.", parametrizations.orthogonal),
):
    add(name, says, model=partial(_parametrized, change), count=1 if "orthogonal" in name else 2)


@case()
def a_symmetric_weight() -> Training:
    """The upper triangle alone gets gradients."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    parametrize.register_parametrization(layer, "weight", Wrapped(lambda _, x: x.triu() + x.triu(1).mT))
    return train(nn.Sequential(layer, _linear()), by=adamw)


@case()
def a_low_rank_update_of_a_frozen_weight() -> Training:
    """Half of what is added is zero at first."""
    frozen, head = nn.Linear(WIDTH, 8).requires_grad_(False), nn.Linear(8, CLASSES).requires_grad_(False)
    a, b = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.zeros(2, 8))
    owned = {"frozen": frozen, "head": head, "a": a, "b": b}
    model = Wrapped(lambda own, x: own.head((own.frozen(x) + x @ own.a @ own.b).tanh()), **owned)
    return train(model, by=adamw([a, b]), count=3, clip=1.0)


@case()
def parameters_in_lists_and_dictionaries() -> Training:
    """And one that nobody uses."""
    lists = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(3))
    named = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH)), "b": nn.Parameter(torch.randn(WIDTH, CLASSES))})
    model = Wrapped(lambda own, x: (x * sum(own.lists) + own.named["a"]) @ own.named["b"], lists=lists, named=named)
    model.unused = nn.Linear(2, 2)
    return train(model, by=adamw)


def _with_teacher() -> nn.Module:
    student = chain()
    return Wrapped(lambda own, x: own.student(x), student=student, teacher=copy.deepcopy(student).requires_grad_(False))


@torch.no_grad()
def _follow(model: Any) -> None:
    for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
        slow.lerp_(fast, 0.1)


def _taught(model: Any, batch: models.Batch) -> torch.Tensor:
    with torch.no_grad():
        target = model.teacher(batch["x"])
    return nn.functional.mse_loss(model(batch["x"]), target) + mse(model, batch)


taught = partial(add, model=_with_teacher, params=lambda model: model.student.parameters())
taught("a teacher that follows", loss=lambda m, batch: (_follow(m), _taught(m, batch))[1], by=sgd)
taught("a teacher that follows between steps", loss=_taught, by=adamw, before=lambda t, _: _follow(t.model))


@case()
def a_teacher_outside_of_the_model() -> Training:
    """Its parameters require gradients, and get none."""
    teacher = _linear()

    def loss(model: nn.Module, batch: models.Batch) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(batch["x"])
        return nn.functional.mse_loss(model(batch["x"]), target)

    return train(chain(), loss, by=adamw)


@case()
def gradients_of_a_layer_that_is_left_out_at_times() -> Training:
    """A flag of the model says so, and Dynamo compiles a graph for both."""
    model = Wrapped(lambda own, x: own.linear(x) + (own.extra(x) if own.is_used else 0), linear=_linear())
    model.extra, model.is_used = _linear(), True
    return train(model, by=adamw, before=lambda t, n: setattr(t.model, "is_used", n % CHANGE < CHANGE // 2))
