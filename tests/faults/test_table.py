"""docs/faults.md lists what the tests of this folder inject, and nothing else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "faults.md"

NO_FAULTS = {
    "test_an_infeasible_problem_is_the_same_error",
    "test_the_files_of_this_test_are_valid",
    "test_the_process_finds_what_this_process_would",
}
"""Tests of what happens while nothing fails."""


def test_every_fault_has_a_row_and_every_row_a_test() -> None:
    """A row without a test would be a claim, a test without a row would be unknown to users."""
    trees = [ast.parse(path.read_text()) for path in HERE.glob("test_*.py") if path != Path(__file__)]
    tests = [n.name for t in trees for n in t.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    assert sorted(re.findall(r"\| `(test_\w+)` \|$", PAGE.read_text(), re.MULTILINE)) == sorted(set(tests) - NO_FAULTS)
    assert len(tests) == len(set(tests))
    assert set(tests) >= NO_FAULTS
