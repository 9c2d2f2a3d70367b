from __future__ import annotations

from pathlib import Path

import pytest

from apollo_compile.errors import InvariantError
from apollo_compile.observe import StageRunner


def refuse(product: object) -> None:
    """Find every product illegal."""
    raise InvariantError(f"{product} is not legal")


def test_a_stage_gets_its_arguments_and_returns_its_product() -> None:
    """Positional ones and options."""
    assert StageRunner().run("power", pow, 3, 4, mod=5) == 1


def test_dumps_are_numbered_in_the_order_of_the_calls(tmp_path: Path) -> None:
    """Stages without a text form count but leave no file."""
    runner = StageRunner(tmp_path / "new")
    runner.run("first", lambda: 1, text=str)
    runner.run("second", lambda: 2)
    runner.run("third", lambda: 3, text="value {}".format)
    files = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert files == {"00_first.txt": "1\n", "02_third.txt": "value 3\n"}


def test_an_illegal_product_is_dumped_and_refused(tmp_path: Path) -> None:
    """The dump shows what the check found."""
    with pytest.raises(InvariantError, match="7 is not legal"):
        StageRunner(tmp_path).run("stage", lambda: 7, check=refuse, text=str)
    assert (tmp_path / "00_stage.txt").read_text() == "7\n"


def test_a_text_that_fails_on_an_illegal_product_does_not_hide_the_reason(tmp_path: Path) -> None:
    """The check speaks, not the text form."""
    with pytest.raises(InvariantError, match="not legal"):
        StageRunner(tmp_path).run("stage", lambda: 7, check=refuse, text=lambda product: str(1 // 0))
