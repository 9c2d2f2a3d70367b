"""Pairs of linear layers that devices may divide: found by trying, and only where the numbers stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from apollo_compile.distributed.deploy.pairs import find_pairs
from apollo_compile.passes.deploy import LinearPair

WIDTH = 32


class Gated(nn.Module):
    """Two layers side by side and one that reads them; `between` is the code before it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(nn.functional.silu(self.gate(x)) * self.up(x))) + x


class Scaled(Gated):
    """Reads the size, which is another on a device that has a share."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden / hidden.shape[-1]


class Normed(Gated):
    """Mixes what devices would divide."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden / hidden.norm(dim=-1, keepdim=True)


class Zeros(Normed):
    """Hides that, as long as its last layer is that of the first step."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down.weight)


class Adding(Gated):
    """Changes the output of its last layer in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x)).add_(x)


class Leaking(Gated):
    """Returns what devices would divide."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        hidden = nn.functional.silu(self.gate(x)) * self.up(x)
        return self.down(hidden), hidden.mean()


class Attention(nn.Module):
    """Four heads, which are counted from the data or given."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads = -1 if counts else 4
        self.width = WIDTH // 4 if counts else -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], self.heads, self.width).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(found.transpose(1, 2).flatten(2))


def mlp(*between: nn.Module) -> nn.Sequential:
    """Return two layers with something between them."""
    return nn.Sequential(nn.Linear(WIDTH, 24), *between, nn.Linear(24, WIDTH))


def tied() -> nn.Sequential:
    """Return two layers, the first of which shares its parameter with a third."""
    found = nn.Sequential(*mlp(), nn.Linear(WIDTH, 24))
    found[2].weight = found[0].weight
    return found


def pair(*columns: str, row: str, degree: int) -> LinearPair:
    """Return a pair."""
    return LinearPair(columns=columns, row=row, degree=degree)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Gated(), [pair("gate", "up", row="down", degree=8)]),
        (mlp(nn.GELU()), [pair("0", row="2", degree=8)]),
        (nn.Sequential(mlp(), mlp()), [pair("0.0", row="0.1", degree=8), pair("1.0", row="1.1", degree=8)]),
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), *mlp()), [pair("2", row="3", degree=8)]),
        (Attention(counts=True), [pair("q", "k", "v", row="out", degree=4)]),
        (nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0), [pair("linear1", row="linear2", degree=8)]),
        (mlp().requires_grad_(False), [pair("0", row="1", degree=8)]),
        (Attention(counts=False), []),
        (Scaled(), []),
        (Normed(), []),
        (Zeros(), []),
        (Adding(), [pair("gate", "up", row="down", degree=8)]),
        (Leaking(), []),
        (mlp(nn.LayerNorm(24)), []),
        (mlp(nn.Dropout(0.5)), []),
        (nn.Sequential(mlp(), nn.Dropout(0.5)), []),
        (tied(), []),
        (nn.Linear(WIDTH, WIDTH), []),
    ],
)
def test_pairs_are_those_whose_shares_sum_to_the_output(module: nn.Module, expected: list[LinearPair]) -> None:
    """Of all devices that divide the sizes; none where code mixes, leaks or counts what is divided, or is random."""
    torch.manual_seed(0)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    assert find_pairs(module, (torch.randn(4, 3, WIDTH),), {}, 8) == tuple(expected)
    torch.testing.assert_close(module.state_dict(), state, rtol=0, atol=0)


def test_no_more_devices_than_there_are() -> None:
    """And none for one device."""
    x = torch.randn(4, WIDTH)
    assert find_pairs(mlp(), (x,), {}, 2) == (pair("0", row="1", degree=2),)
    assert find_pairs(mlp(), (x,), {}, 1) == ()
