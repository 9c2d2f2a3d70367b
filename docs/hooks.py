"""Hooks of mkdocs that put files outside `docs/` into the site, and take the picture of a report anew.

The site is the repository with `docs/` as its root: a link `../benchmarks/README.md` of a page in `docs/` works where
the repository is shown, and becomes `benchmarks/README.md` on the site. A link to a file that does not exist stays as
it is, and mkdocs warns of it.
"""

from __future__ import annotations

import importlib.util
import logging
import posixpath
import re
import shutil
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PICTURE = "report.png"
LINK = re.compile(r"(?<=\]\()[^)#:\s]+")

_logger = logging.getLogger("mkdocs.hooks")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, those that added pages link to, and the picture of a report as it looks now."""
    pages = list(files.documentation_pages())
    for page in pages:
        for link in LINK.findall(page.content_string):
            target = _target_of(link, page)
            if target is not None and files.get_file_from_path(_uri_of(target)) is None:
                added = File.generated(config, _uri_of(target), abs_src_path=str(target))
                files.append(added)
                pages += [added] if added.is_documentation_page() else []
    picture, kept = _take_picture(), files.get_file_from_path(PICTURE)
    if picture is not None:
        if kept is not None:
            files.remove(kept)
        files.append(File.generated(config, PICTURE, content=picture))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links between files of the repository by links between files of the site."""

    def replace(found: re.Match[str]) -> str:
        target = _target_of(found[0], page.file)
        folder = posixpath.dirname(page.file.src_uri)
        return found[0] if target is None else posixpath.relpath(_uri_of(target), folder or ".")

    return LINK.sub(replace, markdown)


def _take_picture() -> bytes | None:
    """Return what a browser shows of a report; None without one, where the picture stays that of the repository."""
    if shutil.which("chromium") is None or importlib.util.find_spec("playwright") is None:
        return None
    from playwright.sync_api import Error

    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    assert spec is not None and spec.loader is not None
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / PICTURE
        try:
            figures.take_screenshot(taken)
        except Error as error:  # such as a browser whose libraries are not there
            _logger.info("%s is not taken anew: %s", PICTURE, error)
            return None
        return taken.read_bytes()


def _target_of(link: str, page: File) -> Path | None:
    """Return the file of the repository that a link of a page leads to, None if there is none."""
    assert page.abs_src_path is not None
    target = Path(posixpath.normpath(Path(page.abs_src_path).parent / link))
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def _uri_of(file: Path) -> str:
    """Return the place of a file on the site."""
    return file.relative_to(ROOT).as_posix().removeprefix("docs/")
