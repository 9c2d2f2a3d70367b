"""Run the stages of a compile: call, check and dump them.

    StageRunner(dump_dir).run("plan", make_plan, graph, costs, lanes=lanes, check=..., text=...) -> product

The runner is independent of the stages. The check and the text form take only the product; the caller binds other
arguments. A dump directory gets one file per stage, `{number:02d}_{stage}.txt`, in the order of the calls. Dumps
contain no timings, so two compiles of the same graph give the same files. If a dump cannot be written, one WARNING is
logged and nothing more is dumped, so that a full disk does not fail the compile.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from apollo_compile.errors import InvariantError

_Product = TypeVar("_Product")

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def warn_of_files(what: str) -> Iterator[None]:
    """Turn an `OSError` into one WARNING that begins with `what`."""
    try:
        yield
    except OSError as error:
        _logger.warning("%s: %s", what, error)


class StageRunner:
    """Runs stages one after the other."""

    def __init__(self, dump_dir: Path | None = None) -> None:
        self._num_stages = 0
        self._dump_dir = dump_dir

    def run(
        self,
        stage_name: str,
        function: Callable[..., _Product],
        *args: object,
        check: Callable[[_Product], object] | None = None,
        text: Callable[[_Product], str] | None = None,
        **options: object,
    ) -> _Product:
        """Call a stage, check and dump its product, and return it.

        A product that fails its check is also dumped, if its text form can be made.

        Raises:
            InvariantError: the product failed its check.
        """
        product = function(*args, **options)
        self._num_stages += 1
        if check is not None:
            try:
                check(product)
            except InvariantError:
                with contextlib.suppress(Exception):
                    self._dump(stage_name, product, text)
                raise
        self._dump(stage_name, product, text)
        return product

    def _dump(self, stage_name: str, product: _Product, text: Callable[[_Product], str] | None) -> None:
        if self._dump_dir is None or text is None:
            return
        path, self._dump_dir = self._dump_dir / f"{self._num_stages - 1:02d}_{stage_name}.txt", None
        with warn_of_files(f"nothing more is dumped, {stage_name} failed"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text(product).rstrip("\n") + "\n", encoding="utf-8")
            self._dump_dir = path.parent
