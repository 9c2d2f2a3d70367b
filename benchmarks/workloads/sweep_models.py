"""Hand-written models of the correctness sweep: habits of real training code that models of a library do not have.

    OWN_MODELS   their names
    build_own    the model, its inputs and loss as a `Workload`

Each is made of torch alone. Where it matters to a compiler, the docstring of a model names its oddity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from benchmarks.workloads import Workload, weigh_outputs

WIDTH = 32


class Transformer(nn.Module):
    """Encoder and decoder of torch, with a causal mask and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(WIDTH, 2, 1, 1, 64, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        return self.body(source, target, tgt_mask=mask, src_key_padding_mask=padding)


class Recurrent(nn.Module):
    """An LSTM and a GRU side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.frames = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)

    def forward(self, words: Tensor, frames: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left, (hidden, _) = self.words(words)
        right, _ = self.frames(frames)
        return left, right, hidden


class Attention(nn.Module):
    """Multi-head attention that also returns its weights, beside scaled dot products with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weighted = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed, weights = self.weighted(x, x, x, key_padding_mask=padding)
        query, key, value = self.project(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        masked = functional.scaled_dot_product_attention(query, key, value, attn_mask=~padding[:, None, None, :])
        return mixed, weights, masked


class Normalizations(nn.Module):
    """Every normalization; batch and instance norms with running statistics, one of them a cumulative average."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.branches = nn.ModuleList(
            [
                nn.BatchNorm2d(8),
                nn.BatchNorm2d(8, momentum=None),
                nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
                nn.GroupNorm(2, 8),
                nn.LocalResponseNorm(3),
                nn.LayerNorm([8, 16, 16]),
                nn.RMSNorm([16]),
            ]
        )
        self.frozen = nn.BatchNorm2d(8).eval()

    def train(self, mode: bool = True) -> Normalizations:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, image: Tensor) -> list[Tensor]:
        stem = self.stem(image)
        return [branch(stem) for branch in (*self.branches, self.frozen)]


class UNet(nn.Module):
    """Skip connections, transposed and grouped convolutions, up- and down-sampling."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 16, 4, 2, 1)
        self.deep = nn.Sequential(nn.Conv2d(16, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.SiLU())
        self.middle = nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=4)
        self.up = nn.ConvTranspose2d(32, 16, 4, 2, 1)
        self.shuffle = nn.PixelShuffle(2)
        self.head = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        first = functional.leaky_relu(self.down(image), 0.1)
        up = self.up(self.middle(self.deep(first)))
        joined = self.shuffle(torch.cat([first, up], dim=1))
        side = functional.interpolate(image, scale_factor=0.5, mode="bilinear", antialias=False)
        return self.head(joined) + functional.interpolate(functional.avg_pool2d(side, 2), size=(32, 32))


class DiffusionTransformer(nn.Module):
    """A DiT: patches of noisy latents; timestep and class scale, shift and gate every block (adaLN-Zero).

    Gates start at zero, as published, so that the first step trains little besides them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, WIDTH, 2, 2)
        self.positions = nn.Parameter(torch.randn(1, 16, WIDTH) * 0.02)
        self.register_buffer("frequencies", torch.logspace(0, -4, WIDTH // 2))
        self.timestep = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.classes = nn.Embedding(11, WIDTH)  # the last one is none, for guidance
        self.blocks = nn.ModuleList(_DiffusionBlock() for _ in range(2))
        self.last = nn.Linear(WIDTH, 2 * 2 * 4)

    def forward(self, latents: Tensor, noise: Tensor, time: Tensor, label: Tensor) -> Tensor:
        level = time.to(latents.dtype)[:, None, None, None] / 1000
        x = self.patches(latents * (1 - level).sqrt() + noise * level.sqrt()).flatten(2).mT + self.positions
        angles = time.to(latents.dtype)[:, None] * self.frequencies
        condition = self.timestep(torch.cat([angles.cos(), angles.sin()], dim=1)) + self.classes(label)
        for block in self.blocks:
            x = block(x, condition)
        found = self.last(functional.layer_norm(x, (WIDTH,))).mT
        return functional.mse_loss(functional.fold(found, latents.shape[2:], 2, stride=2), noise)


class _DiffusionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(2 * WIDTH, WIDTH))
        self.modulate = nn.Linear(WIDTH, 6 * WIDTH)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shifts = self.modulate(functional.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        attended = functional.layer_norm(x, (WIDTH,)) * (1 + shifts[0]) + shifts[1]
        x = x + shifts[2] * self.attention(attended, attended, attended, need_weights=False)[0]
        return x + shifts[3] * self.feed(functional.layer_norm(x, (WIDTH,)) * (1 + shifts[4]) + shifts[5])


class Recommender(nn.Module):
    """Bags of embeddings of unequal lengths, and products of all pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, WIDTH, mode=mode) for mode in ("sum", "mean", "max"))
        self.dense = nn.Sequential(nn.Linear(13, WIDTH), nn.ReLU())
        pairs = torch.triu_indices(4, 4, 1)
        self.register_buffer("pairs", pairs, persistent=False)
        self.top = nn.Linear(6 + WIDTH, 1)

    def forward(self, dense: Tensor, items: Tensor, offsets: Tensor, clicked: Tensor) -> Tensor:
        bottom = self.dense(dense)
        features = torch.stack([bottom, *(table(items, offsets) for table in self.tables)], dim=1)
        products = torch.bmm(features, features.mT)[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat([bottom, products], dim=1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, clicked)


class Quantizer(nn.Module):
    """A codebook in a buffer that the forward moves in place; gradients pass straight through it."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.decode = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(8, WIDTH))
        self.register_buffer("counts", torch.ones(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        index = torch.cdist(z.detach(), self.codes).argmin(dim=1)
        if self.training:
            hot = functional.one_hot(index, 8).to(z.dtype)
            self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.codes.lerp_((hot.T @ z.detach()) / self.counts.unsqueeze(1), 0.1)
            self.steps += 1
        quantized = z + (self.codes[index] - z).detach()
        return (self.decode(quantized) - x).pow(2).mean() + (z - self.codes[index].detach()).pow(2).mean()


class MessagePassing(nn.Module):
    """A graph network: gather, scatter with sums and maxima, and a scatter of messages into a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(2 * WIDTH, WIDTH)
        self.update = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for _ in range(2):
            sent = self.message(torch.cat([nodes[edges[0]], nodes[edges[1]]], dim=1)).relu()
            total = torch.zeros_like(nodes).index_add_(0, edges[1], sent)
            index = edges[1].unsqueeze(1).expand_as(sent)
            largest = torch.zeros_like(nodes).scatter_reduce(0, index, sent, "amax", include_self=True)
            nodes = self.update(total + largest, nodes)
        return nodes


class Spectral(nn.Module):
    """Fourier transforms with a complex parameter, and a complex linear layer beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(9, WIDTH, dtype=torch.complex64) * 0.1)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.phase = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.mix(x), dim=1) * self.filter
        turned = torch.view_as_real(torch.complex(x, -x) @ self.phase).pow(2).sum(-1)
        return torch.fft.irfft(spectrum, n=x.shape[1], dim=1) + turned.sqrt()


class Parametrized(nn.Module):
    """Weights that are computed in every forward; spectral norm also writes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.bounded = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="householder")

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x).tanh() * self.bounded(x) + self.orthogonal(x[..., :8]).repeat(1, 4)


class Experts(nn.Module):
    """Two of four experts for every token, with a loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in "1234"
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.router(x).softmax(-1)
        weight, index = chances.topk(2, dim=-1)
        gates = torch.zeros_like(chances).scatter(-1, index, weight / weight.sum(-1, keepdim=True))
        mixed = sum(gates[:, number, None] * expert(x) for number, expert in enumerate(self.experts))
        used = functional.one_hot(index, 4).sum(1).to(x.dtype).mean(0)
        return mixed, (used * chances.mean(0)).sum() * 4


class Recursive(nn.Module):
    """One layer applied three times, with weights that input and output embedding share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(3):
            x = self.layer(x)
        return functional.cross_entropy(
            self.head(x).flatten(0, 1), labels.flatten(), ignore_index=0, label_smoothing=0.1
        )


class Contrast(nn.Module):
    """A teacher that follows the student and a queue of keys, both buffers written in the forward (MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.teacher = nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.teacher.requires_grad_(False)
        self.register_buffer("queue", functional.normalize(torch.randn(16, WIDTH), dim=1))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        query = functional.normalize(self.student(one), dim=1)
        with torch.no_grad():
            for kept, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                kept.mul_(0.9).add_(new, alpha=0.1)
            key = functional.normalize(self.teacher(other), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().T], dim=1) / 0.2
        self.queue.copy_(torch.cat([key, self.queue[: -key.shape[0]]]))
        return functional.cross_entropy(logits, torch.zeros(len(one), dtype=torch.int64))


class Adversaries(nn.Module):
    """A generator and a critic in one step: detached inputs, and a penalty on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        fake = self.generator(noise)
        critic = functional.softplus(self.critic(fake.detach())) + functional.softplus(-self.critic(real))
        penalty = sum(weight.norm() for weight in self.critic.parameters())
        return critic.mean() - functional.logsigmoid(self.critic(fake)).mean() + 1e-3 * penalty


class Objectives(nn.Module):
    """Losses with loops of their own: CTC, adaptive softmax, triplets, histograms of distances."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.characters = nn.Linear(WIDTH, 12)
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, 4)

    def forward(self, x: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        y = self.encode(x)
        chances = self.characters(y).transpose(0, 1).log_softmax(-1)
        spelled = functional.ctc_loss(chances, text, torch.full_like(lengths, x.shape[1]), lengths, zero_infinity=True)
        triplet = functional.triplet_margin_loss(y[:, 0], y[:, 1], y[:, 2])
        ordered = torch.cumsum(self.bilinear(y, y.flip(0)).sort(dim=1).values, dim=1)
        return spelled + triplet + functional.huber_loss(ordered, torch.zeros_like(ordered))


class _Clamp(torch.autograd.Function):
    """Clamp whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.where(x.abs() > 3, 0.5, 1.0).to(gradient.dtype)


class Checkpointed(nn.Module):
    """Layers that the backward runs again, with an autograd function of one's own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _Clamp.apply(checkpoint(layer, x, use_reentrant=False)) + x
        return x


class Broken(nn.Module):
    """Two branches with a graph break in each, and one whose length depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x).relu()
        torch._dynamo.graph_break()
        right = self.right(x).tanh()
        if right.sum().item() > -1e9:
            right = right * 2
        return self.last(left * right)


class Warped(nn.Module):
    """Sampling on a grid, positional waves, einsum over many dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Linear(3 * 16 * 16, 6)
        self.mix = nn.Parameter(torch.randn(3, 4, 5) * 0.3)
        self.register_buffer("octaves", 2.0 ** torch.arange(3))

    def forward(self, image: Tensor) -> Tensor:
        theta = self.locate(image.flatten(1)).view(-1, 2, 3) * 0.1 + torch.eye(2, 3, dtype=image.dtype)
        grid = functional.affine_grid(theta, list(image.shape), align_corners=False)
        warped = functional.grid_sample(image, grid, align_corners=False)
        waves = (grid.unsqueeze(-1) * self.octaves).sin().flatten(3)
        return torch.einsum("bchw,cde,bhwk->bdek", warped, self.mix, waves)


def _floats(*shape: int) -> Tensor:
    return torch.randn(shape)


def _inputs_of_recommender(batch: int) -> dict[str, Tensor]:
    return {
        "dense": _floats(batch, 13),
        "items": torch.randint(50, (3 * batch,)),
        "offsets": (torch.arange(batch) * 5 + 1) // 2,
        "clicked": (torch.arange(batch) % 3 == 0).float(),
    }


def _padding(batch: int) -> Tensor:
    """Return a mask of 8 positions, the last three of every other row masked."""
    return (torch.arange(batch) % 2 == 1).unsqueeze(1) & (torch.arange(8) >= 5)


_OWN: dict[str, tuple[Callable[[], nn.Module], int, Callable[[int], dict[str, Any]]]] = {
    "adversaries": (Adversaries, 8, lambda batch: {"noise": _floats(batch, 8), "real": _floats(batch, WIDTH)}),
    "attention": (Attention, 2, lambda batch: {"x": _floats(batch, 8, WIDTH), "padding": _padding(batch)}),
    "channels_last": (
        lambda: UNet().to(memory_format=torch.channels_last),
        2,
        lambda batch: {"image": _floats(batch, 3, 32, 32).to(memory_format=torch.channels_last)},
    ),
    "checkpointed": (Checkpointed, 8, lambda batch: {"x": _floats(batch, WIDTH)}),
    "contrast": (Contrast, 4, lambda batch: {"one": _floats(batch, WIDTH), "other": _floats(batch, WIDTH)}),
    "dit": (
        DiffusionTransformer,
        2,
        lambda batch: {
            "latents": _floats(batch, 4, 8, 8),
            "noise": _floats(batch, 4, 8, 8),
            "time": torch.randint(1000, (batch,)),
            "label": torch.randint(11, (batch,)),
        },
    ),
    "experts": (Experts, 16, lambda batch: {"x": _floats(batch, WIDTH)}),
    "graph_breaks": (Broken, 8, lambda batch: {"x": _floats(batch, WIDTH)}),
    "message_passing": (
        MessagePassing,
        6,
        lambda batch: {"nodes": _floats(batch, WIDTH), "edges": torch.randint(batch, (2, 20))},
    ),
    "normalizations": (Normalizations, 4, lambda batch: {"image": _floats(batch, 3, 16, 16)}),
    "objectives": (
        Objectives,
        4,
        lambda batch: {
            "x": _floats(batch, 12, WIDTH),
            "text": torch.randint(1, 12, (batch, 5)),
            "lengths": torch.tensor([5, 3, 4, 1, 2])[:batch],
        },
    ),
    "parametrized": (Parametrized, 8, lambda batch: {"x": _floats(batch, WIDTH)}),
    "quantizer": (Quantizer, 16, lambda batch: {"x": _floats(batch, WIDTH)}),
    "recommender": (Recommender, 4, _inputs_of_recommender),
    "recurrent": (Recurrent, 2, lambda batch: {"words": _floats(batch, 4, WIDTH), "frames": _floats(batch, 3, WIDTH)}),
    "recursive": (
        Recursive,
        2,
        lambda batch: {"tokens": torch.randint(50, (batch, 8)), "labels": torch.randint(50, (batch, 8))},
    ),
    "spectral": (Spectral, 2, lambda batch: {"x": _floats(batch, 16, WIDTH)}),
    "transformer": (
        Transformer,
        2,
        lambda batch: {
            "source": _floats(batch, 8, WIDTH),
            "target": _floats(batch, 6, WIDTH),
            "padding": _padding(batch),
        },
    ),
    "unet": (UNet, 2, lambda batch: {"image": _floats(batch, 3, 32, 32)}),
    "warped": (Warped, 2, lambda batch: {"image": _floats(batch, 3, 16, 16)}),
}
"""Models, the rows that they usually see, and inputs of so many."""


def build_own(name: str, batch: int | None = None) -> Workload:
    """Return a hand-written model and its inputs; equal names give equal weights, and equal batches equal inputs."""
    torch.manual_seed(0)
    make_model, usual, make_inputs = _OWN[name]
    model, inputs = make_model().train(), make_inputs(batch or usual)
    return Workload(name=name, model=model, inputs=inputs, loss=weigh_outputs, branches=())


OWN_MODELS = tuple(_OWN)
"""Names that `build_own` takes."""
