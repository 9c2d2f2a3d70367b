"""Models made of random operators, for property tests.

A recipe is a list of steps; each names an operator and what it reads by numbers that are taken modulo what there is.
So every list of numbers is a model, and a test that fails shrinks it by itself. A step that does not fit the shapes
at hand is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn

WIDTH = 4
"""Of the last dimension of everything that a model starts from."""

Values = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """One operator: which, two numbers that say what it reads, one for whatever else it needs to know."""

    operator: int
    left: int
    right: int
    number: int


_SMALL = st.integers(0, 11)


def recipes(most_steps: int) -> st.SearchStrategy[list[Step]]:
    """Return the recipes of models of at least 4 steps."""
    steps = st.builds(Step, st.integers(0, 63), _SMALL, _SMALL, st.integers(0, 5))
    return st.lists(steps, min_size=4, max_size=most_steps)


class RandomModel(nn.Module):
    """Runs a recipe on its parameters, buffers and two inputs; what the last steps made is returned.

    With `scales`, every output is a tensor of its own: AOTAutograd makes views that are returned again after every
    call, and fails at some that have dynamic shapes, with every backend. It also fails where a view of something that
    the graph computes is returned with its own `detach()`; so one output is detached, of something that is no view.
    """

    def __init__(self, recipe: list[Step], *, scales: bool = False) -> None:
        super().__init__()
        self.recipe = recipe
        self.scales = scales
        generator = torch.Generator().manual_seed(len(recipe))
        draw = [torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3)]
        self.weight, self.other = nn.Parameter(draw[0]), nn.Parameter(draw[1])
        self.scale = nn.Parameter(draw[2][0].clone())
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x, y, self.weight, self.other, self.scale]
        computed: torch.Tensor = self.scale
        for step in self.recipe:
            left, right = values[step.left % len(values)], values[-1 - step.right % len(values)]
            number = step.operator % len(_OPERATORS)
            made = _OPERATORS[number](left, right, step.number)
            if made is not None and made.numel() <= 4096:
                values.append(made)
                computed = computed if number in _VIEWS else made
        if self.training:
            self.seen.mul_(0.9).add_(values[-1].detach().to(torch.float64).mean())
        outputs = (*values[5:][-4:], computed.detach())
        return tuple(output * (2 + place) for place, output in enumerate(outputs)) if self.scales else outputs


def inputs(recipe: list[Step], rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of a recipe's model, the same on every call."""
    generator = torch.Generator().manual_seed(1000 + len(recipe))
    x = torch.randn(rows, 2, WIDTH, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return a number on which every output that has a gradient bears, each element in its own way."""
    total = torch.zeros((), dtype=torch.float64)
    for place, output in enumerate(outputs):
        if output.is_floating_point():
            weights = torch.linspace(0.5, 1.5 + place, output.numel(), dtype=torch.float64)
            total = total + (output.reshape(-1) * weights).sum()
    return total


Operator = Callable[[torch.Tensor, torch.Tensor, int], "torch.Tensor | None"]


def _last(value: torch.Tensor) -> int:
    return value.shape[-1] if value.dim() else 0


def _real(value: torch.Tensor) -> torch.Tensor:
    return value if value.is_floating_point() else value.to(torch.float64)


def _matches(left: torch.Tensor, right: torch.Tensor) -> bool:
    pairs = zip(reversed(left.shape), reversed(right.shape), strict=False)
    return all(a == b or a == 1 or b == 1 for a, b in pairs)  # Dynamo finds no 1 `in` two sizes that are symbols


def _binary(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Operator:
    def run(left: torch.Tensor, right: torch.Tensor, number: int) -> torch.Tensor | None:
        return function(_real(left), _real(right)) if _matches(left, right) else None

    return run


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Operator:
    return lambda left, right, number: function(_real(left))


def _along(function: Callable[[torch.Tensor, int], torch.Tensor]) -> Operator:
    """Operators that have a dimension."""
    return lambda left, right, number: function(_real(left), number % left.dim()) if left.dim() else None


def _product(left: torch.Tensor, right: torch.Tensor, number: int) -> torch.Tensor | None:
    fits = right.dim() == 2 and left.dim() >= 1 and _last(left) == _last(right)
    return torch.tanh(_real(left) @ _real(right).T) if fits else None


def _batched_product(left: torch.Tensor, right: torch.Tensor, number: int) -> torch.Tensor | None:
    fits = left.dim() == right.dim() == 3 and left.shape[0] == right.shape[0] and _last(left) == _last(right)
    return torch.tanh(_real(left).bmm(_real(right).mT)) if fits else None


def _attend(left: torch.Tensor, right: torch.Tensor, number: int) -> torch.Tensor | None:
    if left.dim() != 3 or right.dim() != 3 or left.shape[0] != right.shape[0] or _last(left) != _last(right):
        return None
    query, key = _real(left)[:, None], _real(right)[:, None]
    return nn.functional.scaled_dot_product_attention(query, key, key, is_causal=number == 0)[:, 0]


def _batch_normalize(left: torch.Tensor, right: torch.Tensor, number: int) -> torch.Tensor | None:
    fits = left.dim() >= 2 and left.numel() > left.shape[1]
    return nn.functional.batch_norm(_real(left), None, None, training=True) if fits else None


def _join(left: torch.Tensor, right: torch.Tensor, number: int) -> torch.Tensor | None:
    if not left.dim() or left.dim() != right.dim():
        return None
    along = number % left.dim()
    others = [a == b for dim, (a, b) in enumerate(zip(left.shape, right.shape, strict=True)) if dim != along]
    return torch.cat([_real(left), _real(right), _real(left)], along) if all(others) else None


def _stack(left: torch.Tensor, right: torch.Tensor, number: int) -> torch.Tensor | None:
    return torch.stack([_real(left), _real(right)], number % (left.dim() + 1)) if left.shape == right.shape else None


def _rows(left: torch.Tensor, right: torch.Tensor, number: int) -> torch.Tensor | None:
    if left.dim() != 2:
        return None
    index = _real(right).detach().reshape(-1)[:5].abs().mul(7).long() % left.shape[0]
    return nn.functional.embedding(index, _real(left)) if number % 2 else _real(left).index_select(0, index)


def _scatter(left: torch.Tensor, right: torch.Tensor, number: int) -> torch.Tensor | None:
    if left.dim() != 2 or right.dim() != 2 or _last(left) != _last(right):
        return None
    return _real(left).index_add(0, torch.arange(right.shape[0]) * (number + 1) % left.shape[0], _real(right))


def _write(left: torch.Tensor, right: torch.Tensor, number: int) -> torch.Tensor | None:
    """Writes to a view of a copy, and goes on with the copy."""
    if not left.dim():
        return None
    copied = _real(left).clone()
    view = copied.select(number % left.dim(), -1)
    if right.numel() and _matches(view, right) and torch.broadcast_shapes(view.shape, right.shape) == view.shape:
        view.add_(_real(right))
    else:
        view.mul_(0.5)
    return copied


def _write_masked(left: torch.Tensor, right: torch.Tensor, number: int) -> torch.Tensor | None:
    return _real(left).masked_fill(_real(right) > 0.3, 0.25) if left.shape == right.shape else None


def _convolve(left: torch.Tensor, right: torch.Tensor, number: int) -> torch.Tensor | None:
    if left.dim() != 3 or right.dim() != 3 or left.shape[1] != right.shape[1] or _last(right) > _last(left):
        return None
    return torch.tanh(nn.functional.conv1d(_real(left), _real(right), padding=number % 2))


def _cross_entropy(left: torch.Tensor, right: torch.Tensor, number: int) -> torch.Tensor | None:
    return nn.functional.cross_entropy(_real(left), torch.arange(len(left)) % _last(left)) if left.dim() == 2 else None


_viewing: list[Operator] = []


def _may_view(operator: Operator) -> Operator:
    """Note that what the operator makes may be a view."""
    _viewing.append(operator)
    return operator


_OPERATORS: tuple[Operator, ...] = (
    *(_product, _product, _product, _batched_product, _may_view(_attend)),
    lambda left, right, number: nn.functional.layer_norm(_real(left), [_last(left)]) if _last(left) > 1 else None,
    _batch_normalize,
    *map(_binary, (torch.add, torch.mul, torch.sub, torch.maximum)),
    _binary(lambda a, b: torch.where(a > b, a, 0.5 * b)),
    *map(_unary, (torch.relu, nn.functional.gelu, torch.tanh, torch.sigmoid, torch.clone)),
    _unary(lambda value: value.detach() * 0.5),
    _unary(lambda value: value.to(torch.float32).to(torch.float64)),
    *map(_along, (torch.softmax, torch.logsumexp)),
    _along(lambda value, dim: value.sum(dim, keepdim=True)),
    *map(_along, (torch.Tensor.mean, torch.Tensor.amax)),
    _along(lambda value, dim: torch.tanh(torch.cumsum(value, dim))),
    _along(torch.Tensor.flip),
    _along(lambda value, dim: value.roll(1, dim)),
    _may_view(_along(lambda value, dim: value.transpose(0, dim))),
    _may_view(_along(lambda value, dim: value.unsqueeze(dim))),
    _may_view(_along(lambda value, dim: value.select(dim, 0))),
    _may_view(_along(lambda value, dim: value.narrow(dim, 0, (value.shape[dim] + 1) // 2))),
    *(_join, _stack),
    _may_view(lambda left, right, number: left.chunk(2, number % left.dim())[-1] if left.dim() else None),
    _may_view(lambda left, right, number: None if left.numel() % WIDTH else left.reshape(-1, WIDTH)),
    _may_view(lambda left, right, number: left.expand(2, *left.shape) if left.dim() < 4 else None),
    *(_rows, _scatter, _write, _write, _write_masked, _convolve),
    lambda left, right, number: _real(left).argmax(-1) if left.dim() else None,
    _cross_entropy,
)

_VIEWS = tuple(number for number, operator in enumerate(_OPERATORS) if operator in _viewing)
