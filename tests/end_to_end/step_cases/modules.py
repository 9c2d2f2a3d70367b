"""Cases by module: statistics, random numbers, recurrence, embeddings, attention, checkpointing, hooks, functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

from tests.end_to_end.step_cases.cases import CHANGE, EITHER, Training, add, case, loop, refused, train
from tests.end_to_end.step_cases.models import (
    CLASSES,
    WIDTH,
    WORDS,
    Texts,
    Towers,
    Wrapped,
    chain,
    convolutions,
    entropy,
    images,
    word_entropy,
    words,
)

# ------------------------------------------------------------------------------------- statistics and random numbers


def _write_to_slices(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out[:, ::2] = x[:, 1::2].square()
    out[0] = 0
    return out


def _chain_with(make: Callable[[], nn.Module]) -> nn.Sequential:
    return chain(make(), nn.Tanh())


def _computing(function: Callable[..., Any]) -> Callable[[], nn.Module]:
    return partial(Wrapped, lambda own, x: function(x))


BATCH_NORM = partial(nn.BatchNorm1d, 8)
MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": BATCH_NORM,
    "batch norm without statistics": partial(BATCH_NORM, track_running_stats=False),
    "batch norm in evaluation": lambda: nn.BatchNorm1d(8).eval(),
    "batch norm without a scale": partial(BATCH_NORM, affine=False),
    "layer norm": partial(nn.LayerNorm, 8),
    "group norm": partial(nn.GroupNorm, 2, 8),
    "RMS norm": partial(nn.RMSNorm, 8),
    "dropout": partial(nn.Dropout, 0.5),
    "dropout of nothing": partial(nn.Dropout, 0.0),
    "dropout of almost everything": partial(nn.Dropout, 0.95),
    "alpha dropout": partial(nn.AlphaDropout, 0.3),
    "noise": partial(Wrapped, lambda own, x: x + 0.1 * torch.randn_like(x) * own.training),
    "random leaky slopes": nn.RReLU,
    "softmax and sorting": _computing(lambda x: x.softmax(-1).sort(-1).values + x.topk(8).values),
    "a Fourier transform": _computing(lambda x: torch.fft.fft(x).abs()),
    "a cumulative sum": _computing(lambda x: x.cumsum(-1) - x.cumprod(-1)),
    "writes in place": partial(Wrapped, lambda own, x: x.mul(2).add_(1).clamp_(min=-0.5).mul(own.training)),
    "writes to a slice": partial(Wrapped, _write_to_slices),
    "gated units": lambda: nn.Sequential(nn.Linear(8, 16), nn.GLU()),
    "bilinear": lambda: Wrapped(lambda own, x: own.both(x, x), both=nn.Bilinear(8, 8, 8)),
}
for number, (name, make) in enumerate(MIDDLES.items()):
    add(name, model=partial(_chain_with, make), count=1 + number % 4)


def _invert() -> nn.Module:
    return Wrapped(
        lambda own, x: torch.linalg.solve(own.a + 4 * torch.eye(8), x.T).T, a=nn.Parameter(torch.randn(8, 8))
    )


for name, make, ends in (
    (
        "batch norm with a cumulative average",  # it reads the number of its calls from a tensor, to divide by it
        partial(BATCH_NORM, momentum=None),
        loop("the loss function is not one graph"),
    ),
    ("a matrix is inverted", _invert, loop("falls back: node with_effects carries an effect token")),
    (
        "writes that no backward survives",
        _computing(lambda x: x.tanh_().mul_(2)),
        refused("modified by an inplace operation", BackendCompilerFailed),
    ),
):
    add(name, model=partial(_chain_with, make), **ends)


def _dropout() -> nn.Module:
    return chain(nn.Dropout(0.5))


compiled = {"is_compiled": True, "rtol": 1e-3}
add("dropout as a function", model=lambda: chain(Wrapped(lambda own, x: nn.functional.dropout(x, 0.5))), count=3)
add(
    "dropout with eager bodies beside a compiled step",
    model=_dropout,
    options={"runtime.bodies": "eager"},
    is_compiled=True,
)
add("dropout compiled", model=_dropout, is_compiled=True)
add("two towers compiled", "Everything is compiled, as users have it.", model=Towers, clip=1.0, **compiled)
add(
    "attention compiled",
    model=lambda: Texts(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)),
    loss=word_entropy,
    batch=words,
    **compiled,
)
add("convolutions compiled", "With statistics.", model=convolutions, loss=entropy, batch=images, **compiled)


@case()
def a_part_in_evaluation() -> Training:
    """The body of a model keeps its statistics and its dropout off, the head does not."""
    model = chain(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    model[:3].eval()
    return train(model, count=3)


@case()
def statistics_of_images() -> Training:
    """Instance norm that keeps them, and whole channels that are dropped."""
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    behind = (nn.ConvTranspose2d(4, 2, 2), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(CLASSES))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Dropout2d(0.5), nn.ReLU(), *behind)
    model(torch.zeros(1, 3, 8, 8))
    return train(model, loss=entropy, batch=images)


# ------------------------------------------------------------------------------- recurrence, embeddings, attention


class Unrolled(nn.Module):
    """A recurrent cell, unrolled over the words of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, states = None, []
        for word in x.unbind(1):
            state = self.cell(word, state)
            states.append(state[0])
        return torch.stack(states, 1)


def _gru() -> nn.Module:
    layer = nn.GRU(8, 4, 2, batch_first=True, bidirectional=True, dropout=0.5)
    return nn.Sequential(layer, Wrapped(lambda own, x: x[0]))


def _attend(own: Any, x: torch.Tensor) -> torch.Tensor:
    heads = [each.unflatten(-1, (2, 4)).transpose(1, 2) for each in own.qkv(x).chunk(3, -1)]
    out = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=0.2 if own.training else 0.0)
    return out.transpose(1, 2).flatten(2)


def _convolve() -> nn.Module:
    return Wrapped(lambda own, x: own.conv(x.mT).mT, conv=nn.Conv1d(8, 8, 3, stride=2, groups=8))


def _embedded(**settings: Any) -> Callable[[], Texts]:
    return lambda: Texts(embedding=nn.Embedding(WORDS, 8, **settings))


NOT_ONE_GRAPH = loop("not one graph")
TEXTS: list[tuple[str, Callable[[], nn.Module], dict[str, Any]]] = [
    ("an LSTM", lambda: Texts(nn.LSTM(8, 8, batch_first=True)), NOT_ONE_GRAPH),
    ("a GRU with two directions", lambda: Texts(_gru()), NOT_ONE_GRAPH),
    ("a cell in a loop", lambda: Texts(Unrolled()), {}),
    ("an embedding", Texts, {}),
    ("an embedding with padding", _embedded(padding_idx=0), {}),
    ("an embedding of limited norm", _embedded(max_norm=0.5), loop("loop")),
    ("an embedding by frequency", _embedded(scale_grad_by_freq=True), {}),
    ("a sparse embedding", _embedded(sparse=True), loop("loop")),
    ("a transformer's layer", lambda: Texts(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)), {}),
    ("attention with a causal mask", lambda: Texts(Wrapped(_attend, qkv=nn.Linear(8, 24))), {}),
    ("convolution over words", lambda: Texts(_convolve()), {}),
]
for number, (name, make, ends) in enumerate(TEXTS):
    add(name, model=make, loss=word_entropy, batch=words, count=1 + number % 3, **ends)
add(
    "bags of words",
    model=lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 8, mode="sum"), nn.Linear(8, CLASSES)),
    loss=word_entropy,
    batch=words,
)

# ----------------------------------------------------------------------------------------------------- checkpointing


def _checkpointed(*middle: nn.Module, use_reentrant: bool = False) -> nn.Module:
    return Wrapped(
        lambda own, x: own.head(checkpoint(own.middle, own.body(x), use_reentrant=use_reentrant)),
        body=nn.Linear(WIDTH, 8),
        middle=nn.Sequential(nn.Linear(8, 8), *middle, nn.Tanh()),
        head=nn.Linear(8, CLASSES),
    )


add("checkpointing", "What is between is computed again.", model=_checkpointed)
add(
    "checkpointing with dropout",
    model=lambda: _checkpointed(nn.Dropout(0.5)),
    **loop("falls back: node run_and_save_rng_state"),
)
add("reentrant checkpointing", "A backward inside of a backward.", model=partial(_checkpointed, use_reentrant=True))

# ------------------------------------------------------------------------------------------------------------- hooks


def _hooked(hook: Callable[[nn.Sequential], object]) -> nn.Sequential:
    model = chain()
    hook(model)
    return model


def _hook_forwards(model: nn.Sequential) -> None:
    model[0].register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    model[0].register_forward_hook(lambda module, given, out: out + given[0].sum(-1, keepdim=True))


def _hook_a_parameter(model: nn.Sequential) -> None:
    mask = (torch.arange(8 * WIDTH) % 2).view(8, WIDTH)
    model[0].weight.register_hook(lambda gradient: gradient * mask)


def _clamp_gradients(own: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = own.body(x)
    hidden.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
    return own.head(hidden.tanh())


def _double(parameter: Any) -> None:
    parameter.grad.mul_(2)


def _double_for_a_while(training: Training, number: int) -> None:
    if number == 4:
        weight = training.model[2].weight
        training.notes.append(weight.register_post_accumulate_grad_hook(_double))
    if number == CHANGE:
        training.notes[0].remove()


@torch.no_grad()
def _update(parameter: torch.Tensor) -> None:
    parameter.sub_(0.1 * parameter.grad)
    parameter.grad = None


add("hooks on forwards", "One before changes the input, one behind the output.", model=lambda: _hooked(_hook_forwards))
add(
    "hooks on backwards of modules",
    model=lambda: _hooked(
        lambda model: model[1].register_full_backward_hook(lambda module, given, made: tuple(2 * x for x in given))
    ),
    **loop("not one graph: Module-level backwards hooks"),
)
add(
    "a hook on an activation",
    model=lambda: Wrapped(_clamp_gradients, body=nn.Linear(WIDTH, 8), head=nn.Linear(8, CLASSES)),
)
add("a hook on the gradient of a parameter", model=lambda: _hooked(_hook_a_parameter), **loop("hooks"))
add("a hook that comes and goes", before=_double_for_a_while, **EITHER, reason="hooks")
add(
    "updates inside of the backward",
    model=lambda: _hooked(lambda model: [p.register_post_accumulate_grad_hook(_update) for p in model.parameters()]),
    by=None,
    **loop("hooks"),
)

# ------------------------------------------------------------------------------------------------ functions, graphs


class Reverse(torch.autograd.Function):
    """The identity, whose gradients change their sign."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.scale * gradient, None


class Quantize(torch.autograd.Function):
    """Rounds, with a gradient straight through, and indices that have none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positive = x > 0
        ctx.save_for_backward(positive)
        ctx.mark_non_differentiable(positive)
        return x.round(), positive

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


add("a reversed gradient", model=partial(_chain_with, _computing(lambda x: Reverse.apply(x, 0.5))))
add(
    "a gradient straight through",
    model=partial(_chain_with, _computing(lambda x: torch.where(*reversed(Quantize.apply(x)), x))),
)


def _quantize_vectors(own: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = own.encode(x)
    nearest = torch.cdist(hidden.detach(), own.book).argmin(-1)
    chosen = nn.functional.one_hot(nearest, 4).float()
    with torch.no_grad():
        own.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        own.book.lerp_(chosen.T @ hidden / (1 + chosen.sum(0))[:, None], 0.1)
    return own.decode(hidden + (own.book[nearest] - hidden).detach())


def _enqueue(own: Any, x: torch.Tensor) -> torch.Tensor:
    features = nn.functional.normalize(own.encode(x), dim=-1)
    scores = features @ own.queue.clone().T
    with torch.no_grad():
        places = (own.place + torch.arange(x.shape[0])) % own.queue.shape[0]
        own.queue[places] = features
        own.place.add_(x.shape[0])
    return scores


def _replace_buffer(own: Any, x: torch.Tensor) -> torch.Tensor:
    own.mean = 0.9 * own.mean + 0.1 * x.mean(0)
    return own.linear(x - own.mean)


def _count_calls(own: Any, x: torch.Tensor) -> torch.Tensor:
    own.calls += 1
    return own.linear(x) * (1 + 0.1 * own.calls)


def _detach_parts(own: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        hidden = own.encode(x)
    return own.head(hidden.tanh()) + own.other(hidden).detach()


add(
    "a codebook that follows",
    model=lambda: Wrapped(
        _quantize_vectors,
        encode=nn.Linear(WIDTH, 3),
        decode=nn.Linear(3, CLASSES),
        book=torch.randn(4, 3),
        counts=torch.ones(4),
    ),
)
add(
    "a queue of the last features",
    model=lambda: Wrapped(
        _enqueue, encode=nn.Linear(WIDTH, 5), queue=torch.randn(20, 5), place=torch.zeros((), dtype=torch.int64)
    ),
    loss=lambda m, batch: m(batch["x"]).logsumexp(-1).mean(),
)
add(
    "a buffer that is replaced",
    model=lambda: Wrapped(_replace_buffer, linear=nn.Linear(WIDTH, CLASSES), mean=torch.zeros(WIDTH)),
    **loop("or the model assigns some"),
)
add(
    "a count of calls in python",
    model=lambda: Wrapped(_count_calls, linear=nn.Linear(WIDTH, CLASSES), calls=0),
    watched=lambda t: t.model.calls,
    **loop(),
)
add(
    "parts without gradients",
    model=lambda: Wrapped(
        _detach_parts, encode=nn.Linear(WIDTH, 8), other=nn.Linear(8, CLASSES), head=nn.Linear(8, CLASSES)
    ),
)
