"""Batches are split as a loop would cut them, and weights sum to one."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apollo_compile.errors import TargetError
from apollo_compile.session.step.split import kind_of, split_evenly, weigh_parts


@given(st.integers(1, 5), st.integers(1, 4))
def test_parts_are_the_rows_in_order(count: int, rows: int) -> None:
    """Of all tensors, wherever they are; everything else goes to every part."""
    x, y = torch.randn(count * rows, 3), torch.arange(count * rows)
    parts = split_evenly({"images": x, "rest": [y, "a word", (y.bool(), 0.5)]}, count)
    assert len(parts) == count
    for place, part in enumerate(parts):
        own = slice(place * rows, (place + 1) * rows)
        assert torch.equal(part["images"], x[own])
        assert torch.equal(part["rest"][0], y[own])
        assert torch.equal(part["rest"][2][0], y[own].bool())
        assert (part["rest"][1], part["rest"][2][1]) == ("a word", 0.5)


@dataclass(frozen=True)
class Sample:
    """Samples, and objects that belong to them."""

    x: torch.Tensor
    name: str
    rest: Any


class Table(dict[str, Any]):
    """A dictionary whose keys are attributes, too."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(parts)
        self.__dict__ = self


class Rows(list[Any]):
    """A list of a class of its own."""


def test_objects_with_named_parts_are_split_like_dictionaries() -> None:
    """Data classes, namespaces and what is like a dictionary, inside of each other; sizes in them are a kind."""
    rows = Rows([SimpleNamespace(y=torch.arange(4) + 4)])
    batch = Table(all=Sample(torch.arange(4), "four", UserDict({"mask": rows})))
    first, second = split_evenly(batch, 2)
    assert torch.equal(second["all"].x, torch.tensor([2, 3])) and second["all"].name == "four"
    assert second.all is second["all"] and isinstance(second, Table) and isinstance(second.all.rest["mask"], Rows)
    assert torch.equal(second["all"].rest["mask"][0].y, torch.tensor([6, 7]))
    assert torch.equal(batch["all"].rest["mask"][0].y, torch.arange(4) + 4)
    assert kind_of([first]) == kind_of([second]) != kind_of([batch])


def test_a_single_part_is_the_batch_itself() -> None:
    """Nothing is looked at, so it may be of any type."""
    batch = object()
    assert split_evenly(batch, 1) == [batch]


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ({"x": torch.zeros(8, 2), "y": torch.zeros(4)}, r"sizes \[4, 8\] along dimension 0"),
        ({"x": torch.zeros(7)}, r"sizes \[7\] along dimension 0.*; expected one size, a multiple of 2"),
        ({"x": torch.zeros(8), "scale": torch.tensor(1.0)}, r"sizes \[0, 8\] .* \(0 if there is none\)"),
        ({"names": "no tensors"}, "found no tensors in a dict"),
        ({"x": torch.zeros(8), "weights": [0.5] * 8}, "a list in it has 8 elements, one for every sample, such as 0.5"),
        ((torch.zeros(8), {"ids": tuple(range(8))}), "a tuple in it has 8 elements"),
        (Sample(torch.zeros(8), "eight", ["a"] * 8), "a list in it has 8 elements"),
    ],
)
def test_what_would_not_be_split_is_refused(batch: Any, problem: str) -> None:
    """A list with an element for every sample would go to every part whole."""
    with pytest.raises(TargetError, match=problem):
        split_evenly(batch, 2)


def test_weights_sum_to_one() -> None:
    """Equal ones where the user gives none."""
    assert weigh_parts([1, 2, 3, 4], None) == [0.25] * 4
    assert weigh_parts([1, 3], float) == [0.25, 0.75]


@pytest.mark.parametrize("weight", [0.0, math.nan, math.inf])
def test_weights_without_a_sum_are_refused(weight: float) -> None:
    """Dividing by their sum would make every gradient NaN."""
    with pytest.raises(TargetError, match="the 2 micro-batches weigh"):
        weigh_parts([1, 2], lambda part: weight)


def test_kinds_differ_where_code_would() -> None:
    """By shape, dtype, need of a gradient, structure, and types of other leaves, but not by values."""
    x = torch.zeros(4, 2)
    assert kind_of([{"x": x}, {"x": x + 1}]) is not None
    assert kind_of([[x, 1], [x, 2]]) is not None
    named = [SimpleNamespace(x=x), UserDict(x=x), OrderedDict(x=x), SimpleNamespace(y=x), SimpleNamespace(x={"x": x})]
    others: list[Any] = [x, {"x": x}, {"y": x}, x[:2], x.double(), x.clone().requires_grad_(), [x], (x,), 1.0, *named]
    for place, other in enumerate(others):
        assert kind_of([{"x": other}, {"x": copy.copy(other)}]) is not None
        assert all(kind_of([{"x": other}, {"x": another}]) is None for another in others[:place])
