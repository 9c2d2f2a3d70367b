"""The catalogue is complete, and nothing stays in it that no supported torch needs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from torch.torch_version import TorchVersion

from apollo_compile.torch_bridge.upstream_bugs import catalogue
from apollo_compile.torch_bridge.upstream_bugs.catalogue import UPSTREAM_BUGS, UpstreamBug

HERE = Path(__file__).parent
PYPROJECT = HERE.parents[2] / "pyproject.toml"


def test_every_workaround_is_listed_once() -> None:
    """A file without an entry would stay for ever."""
    directory = Path(catalogue.__file__).parent
    files = sorted(path.name for path in directory.glob("*.py") if path.name not in ("__init__.py", "catalogue.py"))
    assert [bug.file for bug in UPSTREAM_BUGS] == files


@pytest.mark.parametrize("bug", UPSTREAM_BUGS, ids=lambda bug: bug.file)
def test_every_workaround_is_needed_and_has_a_test_that_tells_when_it_can_go(bug: UpstreamBug) -> None:
    """It is in the test file of the workaround; where the lowest supported release is fixed, the file goes."""
    tree = ast.parse((HERE / f"test_{bug.file}").read_text(encoding="utf-8"))
    assert bug.test in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    lowest = re.search(r'"torch>=([\d.]+)"', PYPROJECT.read_text(encoding="utf-8"))
    assert bug.seen_in
    is_needed = bug.fixed_in is None or TorchVersion(lowest[1]) < bug.fixed_in
    assert is_needed, f"every supported torch is fixed: {bug.file}, its tests and its entry can go"
