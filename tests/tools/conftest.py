"""The command line, as tests call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from apollo_compile.tools.cli import main


class Ran(NamedTuple):
    """The exit code of a command, and what it printed."""

    code: Any
    out: str
    err: str


Apollo = Callable[..., Ran]


@pytest.fixture
def apollo(capsys: pytest.CaptureFixture[str]) -> Apollo:
    """Run a command of `apollo` in this process."""

    def run(*arguments: object) -> Ran:
        try:
            code: Any = main(list(map(str, arguments)))
        except SystemExit as stopped:
            code = stopped.code
        return Ran(code, *capsys.readouterr())

    return run
