"""Cases by parameter: dtypes, sizes, layouts, and who shares memory with whom."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.utils import parametrizations, parametrize

from tests.end_to_end.step_cases.cases import CHANGE, End, Training, add_case, case
from tests.end_to_end.step_cases.models import (
    CLASSES,
    WIDTH,
    WORDS,
    Batch,
    Texts,
    Wrapped,
    chain,
    entropy,
    images,
    mse,
    rows,
    word_entropy,
    words,
)

sgd = partial(optim.SGD, lr=0.1)
momentum = partial(optim.SGD, lr=0.1, momentum=0.9)
adamw = partial(optim.AdamW, lr=0.01, eps=1e-3)

Make = Callable[[Iterable[Any]], optim.Optimizer]

# ----------------------------------------------------------------------------------------------------------- dtypes


def _of_dtype(dtype: torch.dtype, make: Make) -> Training:
    model = chain().to(dtype)
    return Training(model=model, optimizer=make(model.parameters()), batch=partial(rows, dtype=dtype), microbatches=2)


for dtype, rtol in {torch.float64: 1e-9, torch.bfloat16: 2e-2, torch.float16: 4e-3}.items():
    for make in (sgd, momentum, adamw):
        kind = "momentum" if make is momentum else make.func.__name__
        add_case(
            f"{str(dtype).removeprefix('torch.')} with {kind}",
            "All parameters and batches are of this dtype.",
            partial(_of_dtype, dtype, make),
            rtol=rtol,
            atol=rtol / 3,
        )


def _of_mixed_dtypes(make: Make, clip: float | None) -> Training:
    body = nn.Linear(WIDTH, 8, dtype=torch.bfloat16)
    head = nn.Linear(8, CLASSES, dtype=torch.float64)
    model = Wrapped(lambda own, x: own.head(own.body(x.bfloat16()).tanh().double()), body=body, head=head)
    return Training(
        model=model,
        loss_fn=lambda model, batch: nn.functional.mse_loss(model(batch["x"]), batch["y"].double()),
        optimizer=make(model.parameters()),
        microbatches=2,
        clip_grad_norm=clip,
    )


for make, clip in ((momentum, None), (adamw, 0.1)):
    name = f"bfloat16 and float64 in one model{', clipped' if clip else ''}"
    add_case(name, "One dtype after the other.", partial(_of_mixed_dtypes, make, clip), rtol=2e-2, atol=6e-3)


@case()
def a_complex_parameter() -> Training:
    """Gradients are complex, the loss is real."""
    model = Wrapped(lambda own, x: (x * own.phase).sum(-1).abs(), phase=nn.Parameter(torch.randn(WIDTH) + 1j))
    return Training(model=model, loss_fn=lambda m, batch: m(batch["x"]).mean(), optimizer=momentum(model.parameters()))


@case()
def buffers_of_other_dtypes() -> Training:
    """A count is a whole number, a mask is boolean, and both are written to."""

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        own.count.add_(x.shape[0])
        own.mask.logical_xor_(x[0] > 0)
        out: torch.Tensor = own.linear(x * own.mask) * (1 + own.count / 1000)
        return out

    count, mask = torch.zeros((), dtype=torch.int64), torch.zeros(WIDTH, dtype=torch.bool)
    model = Wrapped(forward, linear=nn.Linear(WIDTH, CLASSES), count=count, mask=mask)
    return Training(model=model, optimizer=sgd(model.parameters()), microbatches=2)


# ------------------------------------------------------------------------------------------------------------ sizes


def _with_scale(dtype: torch.dtype, clip: float | None, make: Make) -> Training:
    scale = nn.Parameter(torch.tensor(2.0, dtype=dtype))
    model = Wrapped(lambda own, x: own.linear(x) * own.scale, linear=nn.Linear(WIDTH, CLASSES), scale=scale)
    return Training(model=model, optimizer=make(model.parameters()), microbatches=2, clip_grad_norm=clip)


SCALES: dict[str, tuple[torch.dtype, float | None, Make]] = {
    "a parameter without dimensions": (torch.float32, None, adamw),
    "a parameter without dimensions, clipped": (torch.float32, 0.1, momentum),
    "a parameter without dimensions in bfloat16, clipped": (torch.bfloat16, 0.1, sgd),
    "a parameter without dimensions in float64, clipped": (torch.float64, 0.1, sgd),
}
for name, settings in SCALES.items():
    says = "A scale; in operations with others it does not decide the dtype."
    is_bfloat16 = settings[0] is torch.bfloat16
    add_case(name, says, partial(_with_scale, *settings), rtol=4e-3 if is_bfloat16 else 1e-4)


@case()
def a_parameter_without_elements() -> Training:
    """A part of a model that is switched off by its size."""
    model = Wrapped(
        lambda own, x: own.linear(x) + own.extra.sum(), linear=nn.Linear(WIDTH, 4), extra=nn.Parameter(torch.zeros(0))
    )
    return Training(model=model, optimizer=adamw(model.parameters()), microbatches=2, clip_grad_norm=1.0)


@case()
def a_hundred_small_parameters() -> Training:
    """More than there are kernels worth a lane."""
    model = nn.Sequential(*(layer for _ in range(25) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))))
    model.append(nn.Linear(WIDTH, CLASSES))
    return Training(model=model, optimizer=sgd(model.parameters()), microbatches=2)


# ---------------------------------------------------------------------------------------------------------- layouts


def _with_weight(make_weight: Callable[[], torch.Tensor], make: Make, microbatches: int) -> Training:
    model = chain()
    model[0].weight = nn.Parameter(make_weight())
    return Training(model=model, optimizer=make(model.parameters()), microbatches=microbatches)


LAYOUTS: dict[str, tuple[str, Callable[[], torch.Tensor]]] = {
    "every other column": ("It is a part of a larger matrix, with holes.", lambda: torch.randn(8, 2 * WIDTH)[:, ::2]),
    "every other row": ("Rows are dense, with holes between them.", lambda: torch.randn(16, WIDTH)[::2]),
    "transposed": ("It is dense, in the other order.", lambda: torch.randn(WIDTH, 8).T),
    "from the middle": ("It begins behind the beginning of its memory.", lambda: torch.randn(100)[7:55].view(8, WIDTH)),
    "of a diagonal": (
        "Elements follow each other along a diagonal.",
        lambda: torch.randn(8, WIDTH, WIDTH).diagonal(0, 1, 2),
    ),
}
for name, (says, make_weight) in LAYOUTS.items():
    for number, make in enumerate((sgd, momentum, adamw)):
        kind = "momentum" if make is momentum else make.func.__name__
        full = f"a weight {name}, with {kind}"
        add_case(full, says, partial(_with_weight, make_weight, make, 1 + number))


@case(end=End.RAISES)
def an_expanded_weight() -> Training:
    """All its rows are the same memory, so no optimizer can write to it, in eager neither."""
    model = chain()
    model[0].weight = nn.Parameter(torch.randn(1, WIDTH).expand(8, WIDTH))
    return Training(model=model, optimizer=sgd(model.parameters()))


@case()
def channels_last() -> Training:
    """Weights and images with channels in the innermost dimension."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))
    model = model.to(memory_format=torch.channels_last)

    def batch(number: int) -> dict[str, Any]:
        made = images(number)
        return {**made, "x": made["x"].to(memory_format=torch.channels_last)}

    return Training(model=model, loss_fn=entropy, batch=batch, optimizer=momentum(model.parameters()), microbatches=2)


# --------------------------------------------------------------------------------------------------- shared memory


@case()
def tied_weights() -> Training:
    """An embedding and the layer behind it are one parameter."""
    model = Texts()
    model.head = nn.Linear(8, WORDS, bias=False)
    model.head.weight = model.embedding.weight
    return Training(model=model, loss_fn=word_entropy, batch=words, optimizer=adamw(model.parameters()), microbatches=2)


def _sharing(share: Callable[[nn.Sequential], None], make: Make, microbatches: int) -> Training:
    model = chain(nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh())
    share(model)
    return Training(model=model, optimizer=make(model.parameters()), microbatches=microbatches)


def share_all(model: nn.Sequential) -> None:
    """Let two parameters be one memory."""
    model[4].weight.data = model[2].weight.data


def share_transposed(model: nn.Sequential) -> None:
    """Let one parameter be the other, transposed."""
    model[4].weight.data = model[2].weight.data.T


def share_some(model: nn.Sequential) -> None:
    """Let half of one parameter be half of another."""
    both = torch.randn(12, 8)
    model[2].weight.data, model[4].weight.data = both[:8], both[4:]


def flatten_all(model: nn.Sequential) -> None:
    """Let all parameters be views of one memory, without an overlap."""
    flat = torch.cat([parameter.data.flatten() for parameter in model.parameters()])
    begin = 0
    for parameter in model.parameters():
        parameter.data = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()


SHARED: dict[str, tuple[str, Callable[[nn.Sequential], None]]] = {
    "two parameters in one memory": ("Each is updated by its own gradient.", share_all),
    "two parameters in one memory, transposed": ("Each is updated by its own gradient.", share_transposed),
    "two parameters that overlap": ("Rows in the middle are updated twice.", share_some),
    "all parameters in one memory": ("As frameworks lay them out that shard models.", flatten_all),
}
for name, (says, share) in SHARED.items():
    for number, make in enumerate((sgd, adamw)):
        full = f"{name}, with {make.func.__name__}"
        add_case(
            full,
            says,
            partial(_sharing, share, make, 1 + number),
        )


@case()
def a_buffer_that_is_a_view_of_a_parameter() -> Training:
    """What is read there changes with every update."""
    model = Wrapped(lambda own, x: own.linear(x) + own.first_row.sum().detach(), linear=nn.Linear(WIDTH, CLASSES))
    model.register_buffer("first_row", model.linear.weight.detach()[0])
    return Training(model=model, optimizer=sgd(model.parameters()), microbatches=2)


@case(end=End.REFUSED, errors=BackendCompilerFailed, reason="backend='apollo' raised")
def a_buffer_that_is_the_whole_of_a_parameter() -> Training:
    """It is written to in the forward, which torch.compile refuses too."""

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        own.alias.mul_(0.99)
        out: torch.Tensor = own.linear(x)
        return out

    model = Wrapped(forward, linear=nn.Linear(WIDTH, CLASSES))
    model.register_buffer("alias", model.linear.weight.detach())
    return Training(model=model, optimizer=sgd(model.parameters()))


@case(end=End.LOOP, reason="some of them share memory")
def buffers_that_share_memory() -> Training:
    """One is written to, the other is read."""

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        own.all.lerp_(x.detach().mean(0), 0.1)
        out: torch.Tensor = own.linear(x) * own.some.sum()
        return out

    model = Wrapped(forward, linear=nn.Linear(WIDTH, CLASSES), all=torch.ones(WIDTH))
    model.register_buffer("some", model.all[:3])
    return Training(model=model, optimizer=sgd(model.parameters()), microbatches=2)


@case()
def a_module_used_twice() -> Training:
    """Under two names."""
    layer = nn.Linear(8, 8)
    model = chain(nn.Tanh(), layer, nn.Tanh(), layer)
    return Training(model=model, optimizer=adamw(model.parameters()), microbatches=2, clip_grad_norm=0.5)


@case()
def gradients_in_one_memory() -> Training:
    """Of the user's, as buckets that are sent at once; they are cleared in place and added to."""
    model = chain()
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))

    def clear(number: int) -> None:
        begin = 0
        flat.zero_()
        for parameter in model.parameters():
            parameter.grad = flat[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()

    return Training(model=model, before=clear, watched=lambda: flat, microbatches=2)


@case()
def a_parameter_reached_by_another_way_too() -> Training:
    """The loss function holds a view of it, made without gradients, so the optimizer steps after the program."""
    model = chain()
    view = model[0].weight.detach()[:2]
    return Training(
        model=model,
        loss_fn=lambda model, batch: mse(model, batch) + view.square().sum() * model[2].bias.sum(),
        optimizer=sgd(model.parameters()),
    )


# -------------------------------------------------------------------------------------------------- made of others


def _parametrized(change: Callable[[nn.Module], nn.Module], microbatches: int) -> Training:
    model = chain()
    change(model[0])
    return Training(model=model, optimizer=momentum(model.parameters()), microbatches=microbatches)


class Symmetric(nn.Module):
    """Makes a matrix of its upper triangle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return it."""
        return x.triu() + x.triu(1).transpose(-1, -2)


def symmetrize(layer: nn.Module) -> None:
    """Let a layer be square and symmetric."""
    layer.weight, layer.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), None
    parametrize.register_parametrization(layer, "weight", Symmetric())


add_case(
    "weight norm",
    "Length and direction of a weight.",
    partial(_parametrized, parametrizations.weight_norm, 2),
)
add_case(
    "spectral norm",
    "Every forward writes to a buffer.",
    partial(_parametrized, parametrizations.spectral_norm, 2),
    end=End.LOOP,
    reason="or the model assigns some",
)
add_case("an orthogonal weight", "A matrix exponential.", partial(_parametrized, parametrizations.orthogonal, 1))


@case()
def a_symmetric_weight() -> Training:
    """The upper triangle alone gets gradients."""
    layer = nn.Linear(WIDTH, WIDTH)
    symmetrize(layer)
    model = nn.Sequential(layer, nn.Linear(WIDTH, CLASSES))
    return Training(model=model, optimizer=adamw(model.parameters()), microbatches=2)


@case()
def a_low_rank_update_of_a_frozen_weight() -> Training:
    """Half of what is added is zero at first."""

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = own.head((own.frozen(x) + x @ own.a @ own.b).tanh())
        return out

    frozen, head = nn.Linear(WIDTH, 8).requires_grad_(False), nn.Linear(8, CLASSES).requires_grad_(False)
    a, b = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.zeros(2, 8))
    model = Wrapped(forward, frozen=frozen, head=head, a=a, b=b)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Training(model=model, optimizer=adamw(trained), microbatches=3, clip_grad_norm=1.0)


@case()
def parameters_in_lists_and_dictionaries() -> Training:
    """And one that nobody uses."""
    lists = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(3))
    by_name = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH)), "b": nn.Parameter(torch.randn(WIDTH, CLASSES))})
    model = Wrapped(
        lambda own, x: (x * sum(own.lists) + own.by_name["a"]) @ own.by_name["b"], lists=lists, by_name=by_name
    )
    model.unused = nn.Linear(2, 2)
    return Training(model=model, optimizer=adamw(model.parameters()), microbatches=2)


@case()
def a_teacher_that_follows() -> Training:
    """A copy of the model, updated by `lerp_` inside the loss function."""
    student = chain()
    model = Wrapped(
        lambda own, x: own.student(x), student=student, teacher=copy.deepcopy(student).requires_grad_(False)
    )

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            target = model.teacher(batch["x"])
        return nn.functional.mse_loss(model(batch["x"]), target) + mse(model, batch)

    return Training(model=model, loss_fn=loss_fn, optimizer=sgd(student.parameters()), microbatches=2)


@case()
def a_teacher_that_follows_between_steps() -> Training:
    """By the user, outside."""
    student = chain()
    model = Wrapped(
        lambda own, x: own.student(x), student=student, teacher=copy.deepcopy(student).requires_grad_(False)
    )

    @torch.no_grad()
    def follow(number: int) -> None:
        for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            slow.lerp_(fast, 0.1)

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            target = model.teacher(batch["x"])
        return nn.functional.mse_loss(model(batch["x"]), target) + mse(model, batch)

    return Training(model=model, loss_fn=loss_fn, optimizer=adamw(student.parameters()), before=follow, microbatches=2)


@case()
def gradients_of_a_layer_that_is_left_out_at_times() -> Training:
    """A flag of the model says so, and Dynamo compiles a graph for both."""
    model = Wrapped(
        lambda own, x: own.linear(x) + (own.extra(x) if own.is_used else 0), linear=nn.Linear(WIDTH, CLASSES)
    )
    model.extra, model.is_used = nn.Linear(WIDTH, CLASSES), True

    def switch(number: int) -> None:
        model.is_used = number % CHANGE < CHANGE // 2

    return Training(model=model, optimizer=adamw(model.parameters()), before=switch, microbatches=2)
