"""Cases by module: statistics, random numbers, recurrence, embeddings, attention, checkpointing, hooks, functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

from tests.end_to_end.step_cases.cases import CHANGE, EITHER, Training, add, add_images, add_texts, loop, refused
from tests.end_to_end.step_cases.models import CLASSES, WIDTH, WORDS, Texts, Towers, Wrapped, chain

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


def _invert(own: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve(own.a + 4 * torch.eye(8), x.T).T


NOT_ONE_GRAPH = loop("the loss function is not one graph")
DIFFERENTLY: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    # It reads the number of its calls from a tensor, to divide by it.
    "batch norm with a cumulative average": (partial(BATCH_NORM, momentum=None), NOT_ONE_GRAPH),
    "a matrix is inverted": (
        lambda: Wrapped(_invert, a=nn.Parameter(torch.randn(8, 8))),
        loop("falls back: node with_effects carries an effect token"),
    ),
    "writes that no backward survives": (
        _computing(lambda x: x.tanh_().mul_(2)),
        refused("modified by an inplace operation", BackendCompilerFailed),
    ),
}
for name, (make, ends) in DIFFERENTLY.items():
    add(name, model=partial(_chain_with, make), **ends)


def _in_part_evaluated() -> nn.Module:
    model = chain(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    model[:3].eval()
    return model


def _with_instance_norm() -> nn.Module:
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    behind = (nn.ConvTranspose2d(4, 2, 2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, CLASSES))
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Dropout2d(0.5), nn.ReLU(), *behind)


compiled = {"is_compiled": True, "rtol": 1e-3}
dropout = {"model": lambda: chain(nn.Dropout(0.5)), "is_compiled": True}
attention = partial(nn.TransformerEncoderLayer, 8, 2, 16, batch_first=True)
add("dropout as a function", model=lambda: chain(Wrapped(lambda own, x: nn.functional.dropout(x, 0.5))), count=3)
add("dropout with eager bodies beside a compiled step", options={"runtime.bodies": "eager"}, **dropout)
add("dropout compiled", **dropout)
add("two towers compiled", "Everything is compiled, as users have it.", model=Towers, clip=1.0, **compiled)
add_texts("attention compiled", model=lambda: Texts(attention(dropout=0.0)), **compiled)
add_images("convolutions compiled", "With statistics.", **compiled)
says = "The body of a model keeps its statistics and its dropout off, the head does not."
add("a part in evaluation", says, model=_in_part_evaluated, count=3)
says = "Instance norm that keeps them, and whole channels that are dropped."
add_images("statistics of images", says, model=_with_instance_norm)


# ------------------------------------------------------------------------------- recurrence, embeddings, attention


def _unroll(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Run a recurrent cell over the words of a text."""
    state, states = None, []
    for word in x.unbind(1):
        state = own.cell(word, state)
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


TEXTS: list[tuple[str, Callable[[], nn.Module], dict[str, Any]]] = [
    ("an LSTM", lambda: Texts(nn.LSTM(8, 8, batch_first=True)), NOT_ONE_GRAPH),
    ("a GRU with two directions", lambda: Texts(_gru()), NOT_ONE_GRAPH),
    ("a cell in a loop", lambda: Texts(Wrapped(_unroll, cell=nn.LSTMCell(8, 8))), {}),
    ("an embedding", Texts, {}),
    ("an embedding with padding", _embedded(padding_idx=0), {}),
    ("an embedding of limited norm", _embedded(max_norm=0.5), loop("loop")),
    ("an embedding by frequency", _embedded(scale_grad_by_freq=True), {}),
    ("a sparse embedding", _embedded(sparse=True), loop("loop")),
    ("a transformer's layer", lambda: Texts(attention(dropout=0.1)), {}),
    ("attention with a causal mask", lambda: Texts(Wrapped(_attend, qkv=nn.Linear(8, 24))), {}),
    ("convolution over words", lambda: Texts(_convolve()), {}),
]
for number, (name, make, ends) in enumerate(TEXTS):
    add_texts(name, model=make, count=1 + number % 3, **ends)
add_texts("bags of words", model=lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 8, mode="sum"), nn.Linear(8, CLASSES)))

# ----------------------------------------------------------------------------------------------------- checkpointing


def _checkpointed(*middle: nn.Module, use_reentrant: bool = False) -> nn.Module:
    return Wrapped(
        lambda own, x: own.head(checkpoint(own.middle, own.body(x), use_reentrant=use_reentrant)),
        body=nn.Linear(WIDTH, 8),
        middle=nn.Sequential(nn.Linear(8, 8), *middle, nn.Tanh()),
        head=nn.Linear(8, CLASSES),
    )


add("checkpointing", "What is between is computed again.", model=_checkpointed)
random = loop("falls back: node run_and_save_rng_state .* keeps the state of random numbers")
add("checkpointing with dropout", model=lambda: _checkpointed(nn.Dropout(0.5)), **random)
add("reentrant checkpointing", "A backward inside of a backward.", model=partial(_checkpointed, use_reentrant=True))

# ------------------------------------------------------------------------------------------------------------- hooks


def _hooked(hook: Callable[[nn.Sequential], object]) -> nn.Sequential:
    model = chain()
    hook(model)
    return model


def _hook_forwards(model: nn.Sequential) -> None:
    model[0].register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    model[0].register_forward_hook(lambda module, given, out: out + given[0].sum(-1, keepdim=True))


def _hook_backward(model: nn.Sequential) -> None:
    model[1].register_full_backward_hook(lambda module, given, made: tuple(2 * x for x in given))


def _hook_a_parameter(model: nn.Sequential) -> None:
    mask = (torch.arange(8 * WIDTH) % 2).view(8, WIDTH)
    model[0].weight.register_hook(lambda gradient: gradient * mask)


def _update_in_backward(model: nn.Sequential) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_update)


def _clamp_gradients(own: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = own.body(x)
    hidden.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
    return own.head(hidden.tanh())


def _double(parameter: Any) -> None:
    parameter.grad.mul_(2)


def _double_for_a_while(training: Training, number: int) -> None:
    if number == 4:
        training.notes.append(training.model[2].weight.register_post_accumulate_grad_hook(_double))
    if number == CHANGE:
        training.notes[0].remove()


@torch.no_grad()
def _update(parameter: torch.Tensor) -> None:
    parameter.sub_(0.1 * parameter.grad)
    parameter.grad = None


def _with_head(forward: Callable[..., torch.Tensor], **more: Any) -> nn.Module:
    return Wrapped(forward, body=nn.Linear(WIDTH, 8), **more, head=nn.Linear(8, CLASSES))


says, broken = "One before changes the input, one behind the output.", "not one graph: Module-level backwards hooks"
add("hooks on forwards", says, model=partial(_hooked, _hook_forwards))
add("hooks on backwards of modules", model=partial(_hooked, _hook_backward), **loop(broken))
add("a hook on an activation", model=partial(_with_head, _clamp_gradients))
add("a hook on the gradient of a parameter", model=partial(_hooked, _hook_a_parameter), **loop("hooks"))
add("a hook that comes and goes", before=_double_for_a_while, **EITHER, reason="hooks")
add("updates inside of the backward", model=partial(_hooked, _update_in_backward), by=None, **loop("hooks"))

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


for name, function in (
    ("a reversed gradient", lambda x: Reverse.apply(x, 0.5)),
    ("a gradient straight through", lambda x: torch.where(*reversed(Quantize.apply(x)), x)),
):
    add(name, model=partial(_chain_with, _computing(function)))


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
        own.queue[(own.place + torch.arange(x.shape[0])) % own.queue.shape[0]] = features
        own.place.add_(x.shape[0])
    return scores


def _replace_buffer(own: Any, x: torch.Tensor) -> torch.Tensor:
    own.mean = 0.9 * own.mean + 0.1 * x.mean(0)
    return own.head(own.body(x - own.mean))


def _count_calls(own: Any, x: torch.Tensor) -> torch.Tensor:
    own.calls += 1
    return own.head(own.body(x)) * (1 + 0.1 * own.calls)


def _detach_parts(own: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        hidden = own.body(x)
    return own.head(hidden.tanh()) + own.other(hidden).detach()


def _with_a_codebook() -> nn.Module:
    encode, decode = nn.Linear(WIDTH, 3), nn.Linear(3, CLASSES)
    return Wrapped(_quantize_vectors, encode=encode, decode=decode, book=torch.randn(4, 3), counts=torch.ones(4))


def _with_a_queue() -> nn.Module:
    place = torch.zeros((), dtype=torch.int64)
    return Wrapped(_enqueue, encode=nn.Linear(WIDTH, 5), queue=torch.randn(20, 5), place=place)


counted = {"model": lambda: _with_head(_count_calls, calls=0), "watched": lambda t: t.model.calls}
replaced = {"model": lambda: _with_head(_replace_buffer, mean=torch.zeros(WIDTH)), **loop("or the model assigns some")}
add("a codebook that follows", model=_with_a_codebook)
add("a queue of the last features", model=_with_a_queue, loss=lambda m, b: m(b["x"]).logsumexp(-1).mean())
add("a buffer that is replaced", **replaced)
add("a count of calls in python", **counted, **loop())
add("parts without gradients", model=lambda: _with_head(_detach_parts, other=nn.Linear(8, CLASSES)))
