"""Costs per sample: tables, corrections, and metadata that is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apollo_compile.distributed.loader.costs import ModuleCosts, ModuleTable, to_nanoseconds
from apollo_compile.errors import SampleError
from apollo_compile.reports.report import Report


def encoder_seconds(patches: float) -> float:
    """Return what the encoder of these tests takes."""
    return 3e-6 * patches + 1e-9 * patches**2


def language_seconds(tokens: float, patches: float) -> float:
    """Return what the language model takes: quadratic in both together."""
    length = tokens + patches / 4
    return 1e-3 + 8e-6 * length + 6e-10 * length**2


@pytest.fixture
def costs() -> ModuleCosts:
    """Return costs that are polynomials of degree two."""
    tokens, patches = (16.0, 64.0, 256.0, 1024.0), (16.0, 64.0, 256.0)
    return ModuleCosts(
        sizes=("tokens", "patches"),
        modules=(
            ModuleTable(
                name="vision",
                sizes=("patches",),
                nodes=(patches,),
                seconds=tuple(map(encoder_seconds, patches)),
                needs=("patches",),
            ),
            ModuleTable(
                name="language",
                sizes=("tokens", "patches"),
                nodes=(tokens, patches),
                seconds=tuple(language_seconds(t, p) for t in tokens for p in patches),
            ),
            ModuleTable(name="", sizes=(), nodes=(), seconds=(2e-3,)),
        ),
    )


def test_polynomials_of_degree_two_are_exact_everywhere(costs: ModuleCosts) -> None:
    """In the table, between its entries and beyond both ends; a sample without images does not run the encoder."""
    tokens = [16, 17, 100, 900, 5000, 3, 0]
    patches = [0, 256, 130, 16, 2000, 5, 0]
    found = costs.seconds({"tokens": tokens, "patches": patches})
    for row, t, p in zip(found, tokens, patches, strict=True):
        expected = [encoder_seconds(p) if p else 0.0, language_seconds(t, p), 2e-3]
        np.testing.assert_allclose(row, expected, rtol=1e-9)


def test_a_sample_beyond_the_table_costs_more_than_one_at_its_end() -> None:
    """Costs per token may have fallen within the table, so that the polynomial through its end turns down."""
    sizes = (16.0, 64.0, 256.0)
    seconds = {
        "alone": [size**0.5 for size in sizes],
        "both": [(one * other) ** 0.5 for one in sizes for other in sizes],
    }
    names = {"alone": ("tokens",), "both": ("tokens", "patches")}
    tables = [
        ModuleTable(name=name, sizes=own, nodes=(sizes,) * len(own), seconds=tuple(seconds[name]))
        for name, own in names.items()
    ]
    costs = ModuleCosts(sizes=("tokens", "patches"), modules=tuple(tables))
    found = costs.seconds({"tokens": [256, 300, 1000, 10**5, 10**5], "patches": [256, 256, 200, 100, 10**5]})
    assert (found[1:] > found[0] * (200 / 256) ** 0.5).all()
    assert (np.diff(found[:, 0])[:-1] > 0).all()


def test_samples_may_come_as_columns_or_as_rows(costs: ModuleCosts) -> None:
    """With the same result."""
    columns = costs.seconds({"tokens": np.array([20, 30]), "patches": np.array([0, 40])})
    rows = costs.seconds([{"tokens": 20, "patches": 0}, {"tokens": 30, "patches": 40}])
    np.testing.assert_array_equal(columns, rows)


def test_phases_are_the_encoders_and_the_rest(costs: ModuleCosts) -> None:
    """All modules are in one of the two."""
    sizes = {"tokens": [20, 30], "patches": [64, 0]}
    phases, seconds = costs.phases(sizes, encoders=["vision"]), costs.seconds(sizes)
    np.testing.assert_array_equal(phases[:, 0], seconds[:, 0])
    np.testing.assert_allclose(phases.sum(axis=1), seconds.sum(axis=1), rtol=1e-12)
    with pytest.raises(LookupError, match=r"there is no module 'visoin': modules are 'vision', 'language', ''"):
        costs.phases(sizes, encoders=["visoin"])


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, None, "many"])
def test_a_bad_size_names_its_sample(costs: ModuleCosts, bad: Any) -> None:
    """As a column and as a row."""
    with pytest.raises(
        SampleError, match=r"sample 1 has (no|a) size 'patches'.*expected a finite number of at least 0"
    ):
        costs.seconds({"tokens": [1, 2, 3], "patches": [0, bad, 0]})
    with pytest.raises(SampleError, match=r"sample 1 has (no|a) size 'tokens'"):
        costs.seconds([{"tokens": 1, "patches": 0}, {"tokens": bad, "patches": 1}])


@pytest.mark.parametrize(
    ("sizes", "sample"),
    [
        ({"tokens": [1, 2]}, 0),
        ({"tokens": [1, 2, 3], "patches": [1]}, 1),
        ([{"tokens": 1, "patches": 1}, {"tokens": 1}], 1),
    ],
)
def test_a_missing_size_names_its_sample(costs: ModuleCosts, sizes: Any, sample: int) -> None:
    """Whether the column, an entry of it, or a key of a row is missing."""
    with pytest.raises(SampleError, match=f"sample {sample} has no size 'patches'"):
        costs.seconds(sizes)


def test_costs_survive_a_file(costs: ModuleCosts, tmp_path: Any) -> None:
    """With their factors; and their digest tells them from others."""
    changed = costs.corrected({"vision": 1.5})
    changed.save(tmp_path / "costs.json")
    again = ModuleCosts.load(tmp_path / "costs.json")
    assert again == changed and again.digest == changed.digest != costs.digest


def test_a_factor_multiplies_one_module(costs: ModuleCosts) -> None:
    """And nothing but a positive number is one."""
    sizes = {"tokens": [50], "patches": [70]}
    before, after = costs.seconds(sizes)[0], costs.corrected({"language": 2.0}).seconds(sizes)[0]
    np.testing.assert_allclose(after, before * [1.0, 2.0, 1.0])
    with pytest.raises(ValueError, match="factor of module 'vision' is nan"):
        costs.corrected({"vision": math.nan})


def test_a_report_corrects_by_what_it_measured() -> None:
    """Measured over predicted, of each module; the others get the factor of all."""
    report = Report.load(Path(__file__).parents[3] / "docs" / "reports" / "clip.json")
    totals = {name: [0, 0] for name in ("text_model", "vision_model")}
    everything = [0, 0]
    for module in (module for graph in report.graphs for module in graph.modules if module.measured_ns is not None):
        for found in (everything, totals.get(module.name.split(".")[0], [0, 0])):
            found[0] += module.measured_ns or 0
            found[1] += module.predicted_ns
    tables = tuple(ModuleTable(name=name, sizes=(), nodes=(), seconds=(1.0,)) for name in (*totals, "never_seen", ""))
    factors = [table.factor for table in ModuleCosts(sizes=(), modules=tables).corrected_by(report).modules]
    expected = [measured / predicted for measured, predicted in (*totals.values(), everything)]
    np.testing.assert_allclose(factors[:3], expected)


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf, 1e10])
def test_a_bad_cost_names_its_sample(bad: float) -> None:
    """And the phase."""
    with pytest.raises(SampleError, match=r"sample 2 costs .* seconds in phase 1"):
        to_nanoseconds([[1, 1], [1, 1], [1, bad]])
    with pytest.raises(SampleError, match=r"sample 'a\.tar:7' costs"):
        to_nanoseconds([bad], names=["a.tar:7"])


def test_costs_of_another_shape_are_refused() -> None:
    """They are no array of (samples, phases)."""
    for bad in ([[[1.0]]], [[1.0], [1.0, 2.0]]):
        with pytest.raises(ValueError, match="costs "):
            to_nanoseconds(bad)
