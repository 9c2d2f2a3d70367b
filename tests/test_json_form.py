from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from apollo_compile.ir import CostTable, Observation, Observations, Plan, SegmentGraph
from apollo_compile.json_form import from_json, to_json
from tests.builders import random_costs, random_graph, random_lanes, random_plan


@dataclass(frozen=True, kw_only=True)
class _Sample:
    kind: Literal["cpu", "cuda"] = "cpu"
    rate: float = 1.0
    pair: tuple[int, str] = (1, "a")
    names: tuple[str, ...] = ()
    by_name: Mapping[str, tuple[float, ...]] | None = None


@pytest.mark.parametrize("seed", range(10))
def test_products_come_back_as_they_were(seed: int) -> None:
    """Graphs, cost tables and plans, through real JSON text."""
    rng = random.Random(seed)
    graph = random_graph(rng, 12)
    lanes = random_lanes(rng)
    costs = random_costs(rng, graph, lanes)
    for product in (graph, costs, random_plan(rng, graph, lanes, costs), Observations(entries=())):
        assert from_json(type(product), json.loads(json.dumps(to_json(product)))) == product


def test_every_kind_of_field_comes_back() -> None:
    """Literals, numbers, fixed tuples, open tuples, mappings and None."""
    sample = _Sample(kind="cuda", rate=2.5, pair=(3, "b"), names=("x", "y"), by_name={"f": (1.0, 2.0)})
    assert from_json(_Sample, json.loads(json.dumps(to_json(sample)))) == sample
    assert from_json(_Sample, {}) == _Sample()


@pytest.mark.parametrize(
    ("cls", "value", "message"),
    [
        (_Sample, [], "_Sample is .*; expected an object"),
        (_Sample, {"kind": "tpu"}, r"_Sample.kind is 'tpu'; expected one of \['cpu', 'cuda'\]"),
        (_Sample, {"rate": "fast"}, "_Sample.rate is 'fast'; expected a number"),
        (_Sample, {"rate": True}, "_Sample.rate is True; expected a number"),
        (_Sample, {"rate": float("nan")}, "_Sample.rate is nan; expected a number"),
        (_Sample, {"pair": [1]}, r"_Sample.pair is \[1\]; expected a list of 2"),
        (_Sample, {"pair": [1.5, "a"]}, r"_Sample.pair\[0\] is 1.5; expected a value of type int"),
        (_Sample, {"names": "xy"}, "_Sample.names is 'xy'; expected a list"),
        (_Sample, {"names": ["x", 1]}, r"_Sample.names\[1\] is 1; expected a value of type str"),
        (_Sample, {"by_name": {"f": [None]}}, r"_Sample.by_name\['f'\]\[0\] is None; expected a number"),
        (_Sample, {"speed": 1}, r"_Sample has unknown fields \['speed'\]; known: kind, rate, pair, names, by_name"),
        *((cls, {}, f"{cls.__name__} has no field") for cls in (SegmentGraph, CostTable, Plan, Observation)),
    ],
)
def test_a_wrong_value_is_named_by_its_place(cls: type, value: Any, message: str) -> None:
    """The reader of the message finds it in the file; fields without a default must be there."""
    with pytest.raises(ValueError, match=message):
        from_json(cls, value)


def test_what_json_cannot_say_is_refused() -> None:
    """Instead of being turned into something else."""
    with pytest.raises(TypeError, match="cannot write a set as JSON"):
        to_json({"names": {1, 2}})
