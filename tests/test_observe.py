from __future__ import annotations

from pathlib import Path

import pytest

from apollo_compile.errors import InvariantError
from apollo_compile.observe import StageRunner


def refuse(product: object) -> None:
    """Find every product illegal."""
    raise InvariantError(f"{product} is not legal")


def test_dumps_are_numbered_in_the_order_of_the_calls(tmp_path: Path) -> None:
    """A stage gets its arguments and returns its product; one without a text form counts but leaves no file."""
    runner = StageRunner(tmp_path / "new")
    runner.run("first", lambda: 1, text=str)
    assert runner.run("second", pow, 3, 4, mod=5) == 1
    runner.run("third", lambda: 3, text="value {}".format)
    files = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert files == {"00_first.txt": "1\n", "02_third.txt": "value 3\n"}


@pytest.mark.parametrize(("one", "dumps"), [(1, ["7\n"]), (0, [])], ids=["has a text", "its text fails"])
def test_an_illegal_product_is_dumped_and_refused(tmp_path: Path, one: int, dumps: list[str]) -> None:
    """The dump shows what the check found; the check speaks, not a text form that fails on such a product."""
    with pytest.raises(InvariantError, match="7 is not legal"):
        StageRunner(tmp_path).run("stage", lambda: 7, check=refuse, text=lambda product: str(product // one))
    assert [path.read_text() for path in tmp_path.glob("00_stage.txt")] == dumps
