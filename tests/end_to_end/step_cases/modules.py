"""Cases by module: statistics, random numbers, recurrence, embeddings, attention, checkpointing, hooks, functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

from tests.end_to_end.step_cases.cases import CHANGE, End, Training, add_case, case
from tests.end_to_end.step_cases.models import (
    CLASSES,
    WIDTH,
    WORDS,
    Texts,
    Towers,
    Wrapped,
    chain,
    entropy,
    images,
    word_entropy,
    words,
)

sgd = partial(optim.SGD, lr=0.1, momentum=0.9)


def train(model: nn.Module, microbatches: int = 2, **settings: Any) -> Training:
    """Return the training of a model by SGD."""
    return Training(model=model, optimizer=sgd(model.parameters()), microbatches=microbatches, **settings)


def _chain_with(make: Callable[[], nn.Module], microbatches: int) -> Training:
    return train(chain(make(), nn.Tanh()), microbatches)


def _texts_with(make: Callable[[], Texts], microbatches: int) -> Training:
    return train(make(), microbatches, loss_fn=word_entropy, batch=words)


# ------------------------------------------------------------------------------------- statistics and random numbers

CHAINS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "batch norm": ("Statistics go from micro-batch to micro-batch.", lambda: nn.BatchNorm1d(8)),
    "batch norm without statistics": ("It keeps none.", lambda: nn.BatchNorm1d(8, track_running_stats=False)),
    "batch norm in evaluation": ("It normalizes by what it has.", lambda: nn.BatchNorm1d(8).eval()),
    "batch norm without a scale": ("It has no parameters.", lambda: nn.BatchNorm1d(8, affine=False)),
    "layer norm": ("Each sample by itself.", lambda: nn.LayerNorm(8)),
    "group norm": ("Each group of features.", lambda: nn.GroupNorm(2, 8)),
    "RMS norm": ("Without a mean.", lambda: nn.RMSNorm(8)),
    "dropout": ("Numbers are drawn micro-batch by micro-batch.", lambda: nn.Dropout(0.5)),
    "dropout of nothing": ("With a probability of zero.", lambda: nn.Dropout(0.0)),
    "dropout of almost everything": ("With a probability near one.", lambda: nn.Dropout(0.95)),
    "alpha dropout": ("It keeps mean and variance.", lambda: nn.AlphaDropout(0.3)),
    "noise": (
        "Drawn by an operator of the user's.",
        lambda: Wrapped(lambda own, x: x + 0.1 * torch.randn_like(x) * own.training),
    ),
    "random leaky slopes": ("RReLU draws one for each element.", lambda: nn.RReLU()),
    "softmax and sorting": (
        "Indices depend on values.",
        lambda: Wrapped(lambda own, x: x.softmax(-1).sort(-1).values + x.topk(8).values),
    ),
    "a Fourier transform": ("Values in between are complex.", lambda: Wrapped(lambda own, x: torch.fft.fft(x).abs())),
    "a cumulative sum": ("And differences of it.", lambda: Wrapped(lambda own, x: x.cumsum(-1) - x.cumprod(-1))),
    "writes in place": (
        "Activations are overwritten.",
        lambda: Wrapped(lambda own, x: x.mul(2).add_(1).clamp_(min=-0.5).mul(own.training)),
    ),
    "writes to a slice": ("Of an activation.", lambda: Wrapped(write_to_slices)),
    "gated units": ("Two halves.", lambda: nn.Sequential(nn.Linear(8, 16), nn.GLU())),
    "bilinear": ("Two inputs that are one.", lambda: Wrapped(lambda own, x: own.both(x, x), both=nn.Bilinear(8, 8, 8))),
}


def write_to_slices(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a copy in which some columns are others."""
    out = x.clone()
    out[:, ::2] = x[:, 1::2].square()
    out[0] = 0
    return out


for number, (name, (says, make)) in enumerate(CHAINS.items()):
    add_case(
        name,
        says,
        partial(_chain_with, make, 1 + number % 4),
    )


@case(end=End.LOOP, reason="the loss function is not one graph")
def batch_norm_with_a_cumulative_average() -> Training:
    """Without momentum, it divides by the number of its calls, which it reads from a tensor."""
    return _chain_with(lambda: nn.BatchNorm1d(8, momentum=None), 2)


@case(end=End.LOOP, reason="falls back: node with_effects carries an effect token")
def a_matrix_is_inverted() -> Training:
    """An error code is checked, which is an effect."""

    def solve(own: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(own.a + 4 * torch.eye(8), x.T).T

    return _chain_with(lambda: Wrapped(solve, a=nn.Parameter(torch.randn(8, 8))), 2)


@case(end=End.REFUSED, errors=BackendCompilerFailed, reason="modified by an inplace operation")
def writes_that_no_backward_survives() -> Training:
    """An activation is overwritten that the backward needs, which eager finds later."""
    return _chain_with(lambda: Wrapped(lambda own, x: x.tanh_().mul_(2)), 2)


@case()
def dropout_as_a_function() -> Training:
    """Whatever mode the model is in."""
    return train(chain(Wrapped(lambda own, x: nn.functional.dropout(x, 0.5))), microbatches=3)


@case(options={"runtime.bodies": "eager"}, is_compiled=True)
def dropout_with_eager_bodies_beside_a_compiled_step() -> Training:
    """What Inductor compiles draws the numbers of what it does not compile."""
    return train(chain(nn.Dropout(0.5)), microbatches=2)


@case(is_compiled=True)
def dropout_compiled() -> Training:
    """With eager's numbers, which Inductor was asked for."""
    return train(chain(nn.Dropout(0.5)), microbatches=2)


@case(is_compiled=True, rtol=1e-3)
def two_towers_compiled() -> Training:
    """Everything is compiled, as users have it."""
    return train(Towers(), microbatches=2, clip_grad_norm=1.0)


@case(is_compiled=True, rtol=1e-3)
def attention_compiled() -> Training:
    """A layer of a transformer, whose words are padded."""
    return _texts_with(lambda: Texts(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)), 2)


@case(is_compiled=True, rtol=1e-3)
def convolutions_compiled() -> Training:
    """With statistics."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))
    return train(model, loss_fn=entropy, batch=images)


@case()
def a_part_in_evaluation() -> Training:
    """The body of a model keeps its statistics and its dropout off, the head does not."""
    model = chain(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    for layer in model[:3]:
        layer.eval()
    return train(model, microbatches=3)


@case()
def statistics_of_images() -> Training:
    """Instance norm that keeps them, and whole channels that are dropped."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.Dropout2d(0.5),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 2, 2),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(CLASSES),
    )
    model(torch.zeros(1, 3, 8, 8))
    return train(model, loss_fn=entropy, batch=images)


# ------------------------------------------------------------------------------- recurrence, embeddings, attention


class Unrolled(nn.Module):
    """A recurrent cell, unrolled over the words of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return states after every word."""
        state, states = None, []
        for word in x.unbind(1):
            state = self.cell(word, state)
            states.append(state[0])
        return torch.stack(states, 1)


TEXTS: dict[str, tuple[str, Callable[[], Texts], dict[str, Any]]] = {
    "an LSTM": (
        "Dynamo leaves recurrent modules to eager.",
        lambda: Texts(nn.LSTM(8, 8, batch_first=True)),
        {"end": End.LOOP, "reason": "not one graph"},
    ),
    "a GRU with two directions": (
        "And its dropout.",
        lambda: Texts(
            nn.Sequential(
                nn.GRU(8, 4, 2, batch_first=True, bidirectional=True, dropout=0.5), Wrapped(lambda own, x: x[0])
            )
        ),
        {"end": End.LOOP, "reason": "not one graph"},
    ),
    "a cell in a loop": ("Word by word, unrolled.", lambda: Texts(Unrolled()), {}),
    "an embedding": ("Rows get gradients where words are.", lambda: Texts(), {}),
    "an embedding with padding": (
        "The row of padding gets no gradient.",
        lambda: Texts(embedding=nn.Embedding(WORDS, 8, padding_idx=0)),
        {},
    ),
    "an embedding of limited norm": (
        "The forward writes to the parameter.",
        lambda: Texts(embedding=nn.Embedding(WORDS, 8, max_norm=0.5)),
        {"end": End.LOOP, "reason": "loop"},
    ),
    "an embedding by frequency": (
        "Gradients are divided by counts in a micro-batch.",
        lambda: Texts(embedding=nn.Embedding(WORDS, 8, scale_grad_by_freq=True)),
        {},
    ),
    "a sparse embedding": (
        "Its gradient is sparse.",
        lambda: Texts(embedding=nn.Embedding(WORDS, 8, sparse=True)),
        {"end": End.LOOP, "reason": "loop"},
    ),
    "a transformer's layer": (
        "With dropout inside of attention.",
        lambda: Texts(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)),
        {},
    ),
    "attention with a causal mask": (
        "One of torch's kernels.",
        lambda: Texts(Wrapped(attend, qkv=nn.Linear(8, 24))),
        {},
    ),
    "convolution over words": (
        "Depth-wise, with a stride.",
        lambda: Texts(Wrapped(lambda own, x: own.conv(x.mT).mT, conv=nn.Conv1d(8, 8, 3, stride=2, groups=8))),
        {},
    ),
}


def attend(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Return attention over words."""
    heads = [each.unflatten(-1, (2, 4)).transpose(1, 2) for each in own.qkv(x).chunk(3, -1)]
    out = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=0.2 if own.training else 0.0)
    return out.transpose(1, 2).flatten(2)


for number, (name, (says, make_texts, settings)) in enumerate(TEXTS.items()):
    add_case(name, says, partial(_texts_with, make_texts, 1 + number % 3), **settings)


@case()
def bags_of_words() -> Training:
    """Sums of embeddings, with offsets that depend on the batch."""
    model = nn.Sequential(nn.EmbeddingBag(WORDS, 8, mode="sum"), nn.Linear(8, CLASSES))
    return train(model, loss_fn=word_entropy, batch=words)


# ----------------------------------------------------------------------------------------------------- checkpointing


def _checkpointed(middle: nn.Module, use_reentrant: bool) -> Training:
    model = Wrapped(
        lambda own, x: own.head(checkpoint(own.middle, own.body(x), use_reentrant=use_reentrant)),
        body=nn.Linear(WIDTH, 8),
        middle=middle,
        head=nn.Linear(8, CLASSES),
    )
    return train(model, microbatches=2)


add_case(
    "checkpointing",
    "What is between is computed again.",
    lambda: _checkpointed(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), False),
)
add_case(
    "checkpointing with dropout",
    "The same numbers are drawn again.",
    lambda: _checkpointed(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()), False),
    end=End.LOOP,
    reason="falls back: node run_and_save_rng_state",
)
add_case(
    "reentrant checkpointing",
    "A backward inside of a backward.",
    lambda: _checkpointed(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), True),
)

# ------------------------------------------------------------------------------------------------------------- hooks


@case()
def hooks_on_forwards() -> Training:
    """One before changes the input, one behind the output."""
    model = chain()
    model[0].register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    model[0].register_forward_hook(lambda module, given, out: out + given[0].sum(-1, keepdim=True))
    return train(model)


@case(end=End.LOOP, reason="not one graph: Module-level backwards hooks")
def hooks_on_backwards_of_modules() -> Training:
    """They double what goes back through a layer."""
    model = chain()
    model[1].register_full_backward_hook(lambda module, given, made: tuple(2 * each for each in given))
    return train(model)


@case()
def a_hook_on_an_activation() -> Training:
    """Inside of the forward: gradients are clamped on their way."""

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = own.body(x)
        hidden.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
        out: torch.Tensor = own.head(hidden.tanh())
        return out

    return train(Wrapped(forward, body=nn.Linear(WIDTH, 8), head=nn.Linear(8, CLASSES)))


@case(end=End.LOOP, reason="hooks")
def a_hook_on_the_gradient_of_a_parameter() -> Training:
    """As for a mask of weights."""
    model = chain()
    mask = (torch.arange(8 * WIDTH) % 2).view(8, WIDTH)
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    return train(model)


@case(end=End.EITHER, reason="hooks")
def a_hook_that_comes_and_goes() -> Training:
    """On the gradient of a parameter, after it was added up."""
    model = chain()
    handles: list[Any] = []

    def double(parameter: Any) -> None:
        parameter.grad.mul_(2)

    def hook(number: int) -> None:
        if number == 4:
            handles.append(model[2].weight.register_post_accumulate_grad_hook(double))
        if number == CHANGE:
            handles[0].remove()

    return train(model, before=hook)


@case(end=End.LOOP, reason="hooks")
def updates_inside_of_the_backward() -> Training:
    """Hooks step parameters as soon as they have gradients, without an optimizer."""
    model = chain()

    @torch.no_grad()
    def update(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.sub_(0.1 * parameter.grad)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return Training(model=model, microbatches=2)


# ------------------------------------------------------------------------------------------------ functions, graphs


class Reverse(torch.autograd.Function):
    """The identity, whose gradients change their sign."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        """Return what is given."""
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the negative."""
        return -ctx.scale * gradient, None


class Quantize(torch.autograd.Function):
    """Rounds, with a gradient straight through, and indices that have none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rounded values and where they are positive."""
        positive = x > 0
        ctx.save_for_backward(positive)
        ctx.mark_non_differentiable(positive)
        return x.round(), positive

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> torch.Tensor:
        """Return the gradient where values were positive."""
        return gradient * ctx.saved_tensors[0]


add_case(
    "a reversed gradient",
    "A function of autograd with a number.",
    partial(_chain_with, lambda: Wrapped(lambda own, x: Reverse.apply(x, 0.5)), 2),
)
add_case(
    "a gradient straight through",
    "A function of autograd with an output without a gradient.",
    partial(_chain_with, lambda: Wrapped(lambda own, x: torch.where(*reversed(Quantize.apply(x)), x)), 2),
)


@case()
def a_codebook_that_follows() -> Training:
    """Vector quantization: the nearest vector goes straight through, and the book is an average of what came."""

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = own.encode(x)
        nearest = torch.cdist(hidden.detach(), own.book).argmin(-1)
        chosen = nn.functional.one_hot(nearest, 4).float()
        with torch.no_grad():
            own.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            own.book.lerp_(chosen.T @ hidden / (1 + chosen.sum(0))[:, None], 0.1)
        out: torch.Tensor = own.decode(hidden + (own.book[nearest] - hidden).detach())
        return out

    return train(
        Wrapped(
            forward,
            encode=nn.Linear(WIDTH, 3),
            decode=nn.Linear(3, CLASSES),
            book=torch.randn(4, 3),
            counts=torch.ones(4),
        )
    )


@case()
def a_queue_of_the_last_features() -> Training:
    """A buffer that is written to at a place that a buffer says."""

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        features = nn.functional.normalize(own.encode(x), dim=-1)
        scores: torch.Tensor = features @ own.queue.clone().T
        with torch.no_grad():
            places = (own.place + torch.arange(x.shape[0])) % own.queue.shape[0]
            own.queue[places] = features
            own.place.add_(x.shape[0])
        return scores

    model = Wrapped(
        forward, encode=nn.Linear(WIDTH, 5), queue=torch.randn(20, 5), place=torch.zeros((), dtype=torch.int64)
    )
    return train(model, loss_fn=lambda m, batch: m(batch["x"]).logsumexp(-1).mean())


@case(end=End.LOOP, reason="or the model assigns some")
def a_buffer_that_is_replaced() -> Training:
    """By another tensor in every forward."""

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        own.mean = 0.9 * own.mean + 0.1 * x.mean(0)
        out: torch.Tensor = own.linear(x - own.mean)
        return out

    return train(Wrapped(forward, linear=nn.Linear(WIDTH, CLASSES), mean=torch.zeros(WIDTH)))


@case(end=End.LOOP)
def a_count_of_calls_in_python() -> Training:
    """Dynamo compiles another graph for every number, until it does no more."""

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        own.calls += 1
        out: torch.Tensor = own.linear(x) * (1 + 0.1 * own.calls)
        return out

    model = Wrapped(forward, linear=nn.Linear(WIDTH, CLASSES))
    model.calls = 0
    return train(model, watched=lambda: model.calls)


@case()
def parts_without_gradients() -> Training:
    """An encoder under `no_grad`, and a branch that is detached."""

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = own.encode(x)
        out: torch.Tensor = own.head(hidden.tanh()) + own.other(hidden).detach()
        return out

    return train(Wrapped(forward, encode=nn.Linear(WIDTH, 8), other=nn.Linear(8, CLASSES), head=nn.Linear(8, CLASSES)))
