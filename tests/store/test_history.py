"""What was found out about a graph is recalled for the same graph on the same machine, and for no other."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from apollo_compile.ir import Observations, Standing, Verdict
from apollo_compile.store.files import MAX_AGE_S
from apollo_compile.store.history import MAX_FILES, History
from apollo_compile.target.compilation import Finding
from apollo_compile.target.lanes import lane_catalogue
from tests.builders import random_costs, random_graph, random_plan


def a_finding() -> Finding:
    """Return one with a plan and a verdict."""
    rng = random.Random(0)
    graph, lanes = random_graph(rng, 5), lane_catalogue(4)
    return Finding(
        observations=Observations(),
        plan=random_plan(rng, graph, lanes, random_costs(rng, graph, lanes)),
        variant="plan",
        verdict=Verdict(standings=(Standing(name="plan", step_ns=5.0, ratio=1.0, num_rounds=5),), num_steps=30),
    )


def test_a_finding_is_recalled_as_it_was(tmp_path: Path) -> None:
    """By its key only, unless it is old or from a clock that was ahead."""
    kept = History(tmp_path / "new" / "folder")
    assert kept.recall("a") is None
    kept.keep("a", a_finding())
    assert kept.recall("a") == a_finding()
    assert kept.recall("b") is None
    file = tmp_path / "new" / "folder" / "a.json"
    content = json.loads(file.read_text())
    for made_at in (content["made_at"] - MAX_AGE_S - 1, content["made_at"] + 3600):
        file.write_text(json.dumps({**content, "made_at": made_at}))
        assert kept.recall("a") is None


@pytest.mark.parametrize(
    ("ending", "keep"),
    [
        (".json", lambda kept, key: kept.keep(key, a_finding())),
        (".generation", lambda kept, key: kept.begin_generation(key)),
    ],
)
def test_a_directory_does_not_grow_for_ever(tmp_path: Path, ending: str, keep: Callable[[History, str], None]) -> None:
    """The youngest stay; findings and generations do not take each other's place."""
    others = [tmp_path / f"other{'.json' if ending != '.json' else '.generation'}"]
    old = [tmp_path / f"{number}{ending}" for number in range(MAX_FILES + 1)]
    for age, path in enumerate([*others, *old]):
        path.write_text("{}")
        os.utime(path, (age, age))
    keep(History(tmp_path), "new")
    left = {path for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert left == {*others, tmp_path / f"new{ending}", *old[2:]}


def test_generations_of_bundles_begin_one_after_the_other(tmp_path: Path) -> None:
    """Each name has its own; what cannot be read begins anew."""
    one, other = History(tmp_path / "new"), History(tmp_path / "new")
    assert one.generation("a") == 0
    for number, history in enumerate((one, other, one), start=1):
        history.begin_generation("a")
        assert (one.generation("a"), other.generation("a"), one.generation("b")) == (number, number, 0)
    (tmp_path / "new" / "a.generation").write_text("7")
    assert one.generation("a") == 0
    one.begin_generation("a")
    assert one.generation("a") == 1


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    """Training does not end because of that."""
    (tmp_path / "file").write_text("")
    kept = History(tmp_path / "file")
    kept.keep("a", a_finding())
    kept.begin_generation("a")
    assert kept.recall("a") is None and kept.generation("a") == 0
