"""Measured gains are kept for the same machine and the same number of cores, with what other processes measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apollo_compile.store import matmul_gains
from apollo_compile.store.files import MAX_AGE_S
from apollo_compile.store.matmul_gains import MatmulGains
from apollo_compile.target.fingerprint import Fingerprint

MINE = Fingerprint(device="a CPU", driver=None, torch="2.11", cores=4, units=2)


def test_gains_are_recalled_as_they_were(tmp_path: Path) -> None:
    """There is a file per number of cores."""
    kept = MatmulGains(tmp_path / "new")
    assert kept.recall(MINE) == {}
    assert kept.add(MINE, {"a": 2.0}) == kept.recall(MINE) == {"a": 2.0}
    assert kept.recall(replace(MINE, units=1)) == {}
    assert (tmp_path / "new" / "matmul-2.json").exists()


def test_processes_add_to_each_other(tmp_path: Path) -> None:
    """The later measurement of the same product counts; all are as old as the first."""
    one, other = MatmulGains(tmp_path), MatmulGains(tmp_path)
    one.add(MINE, {"a": 2.0, "b": 3.0})
    made_at = json.loads((tmp_path / "matmul-2.json").read_text())["made_at"]
    assert other.add(MINE, {"c": 4.0}) == {"a": 2.0, "b": 3.0, "c": 4.0}
    assert one.add(MINE, {"a": 5.0}) == {"a": 5.0, "b": 3.0, "c": 4.0}
    assert json.loads((tmp_path / "matmul-2.json").read_text())["made_at"] == made_at


def test_old_measurements_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the file does not grow for ever; what was measured again is young."""
    monkeypatch.setattr(matmul_gains, "MAX_ENTRIES", 3)
    kept = MatmulGains(tmp_path)
    for name in "abcad":
        kept.add(MINE, {name: 1.0})
    assert list(json.loads((tmp_path / "matmul-2.json").read_text())["gains"]) == ["c", "a", "d"]


def change(path: Path, **changes: Any) -> None:
    """Change fields of a file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda path: path.write_bytes(b"\xff{"), id="no text"),
        pytest.param(lambda path: path.write_text("[]"), id="another kind"),
        pytest.param(lambda path: change(path, format=0), id="another format"),
        pytest.param(lambda path: change(path, gains={"a": "b"}), id="a word"),
        pytest.param(lambda path: change(path, made_at=time.time() - MAX_AGE_S - 1), id="too old"),
        pytest.param(lambda path: change(path, made_at=time.time() + 3600), id="of the future"),
        pytest.param(
            lambda path: change(path, fingerprint={**json.loads(path.read_text())["fingerprint"], "torch": "1.0"}),
            id="another torch",
        ),
    ],
)
def test_what_cannot_be_used_is_replaced(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    """It is as if nothing had been measured."""
    kept = MatmulGains(tmp_path)
    kept.add(MINE, {"a": 2.0})
    spoil(tmp_path / "matmul-2.json")
    assert kept.recall(MINE) == {}
    assert kept.add(MINE, {"b": 3.0}) == kept.recall(MINE) == {"b": 3.0}


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    """A file is in the directory's place."""
    (tmp_path / "file").write_text("")
    kept = MatmulGains(tmp_path / "file")
    assert kept.add(MINE, {"a": 2.0}) == {"a": 2.0}
    assert kept.recall(MINE) == {}
