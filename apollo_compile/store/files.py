"""Files that outlive a process: format, age, eviction, lock, atomic write, damage.

    FileFormat(kind=..., number=..., content=...)   format of one kind of file: read, write, inspect
    Store(directory, format, ...)                   files of one kind in a directory of the cache, by key
    Found                                           result of a read: CURRENT, MISSING, STALE or DAMAGED

A file is a JSON object: the number of its format, and the fields of a frozen dataclass. The number is raised when files
of the old format would be misread; a file with another number counts as damaged.

Files that a user names are read with `FileFormat.read`, which raises errors. Files of the cache are in a `Store`, whose
`read` raises nothing but returns `Found`; at worst, the caller measures or plans again. Writing raises `OSError`; the
caller logs the consequence.

A write is atomic: a reader sees the old file or the new file, never a part. So readers and writers need no lock; for a
read-modify-write (`Store.update`), processes take the lock file `.lock` of the directory. With `max_age_s`, content is
stale if it is older than that, or dated in the future. With `max_files`, a write evicts the oldest files.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from apollo_compile.json_form import from_json, parse, to_json

LOCK = ".lock"
"""Lock file of a directory; its holder may update files there."""

LOCK_TIMEOUT_S = 10.0
"""Longest wait for a lock. It is held for milliseconds; a process that holds it longer was stopped."""

MAX_AGE_S = 7 * 24 * 3600
"""Age at which measurements expire, and at which a temporary file is known to be abandoned."""


class FileState(enum.StrEnum):
    """Whether a file can be used."""

    CURRENT = "current"
    MISSING = "missing"
    STALE = "stale"
    """The file is intact, but too old."""
    DAMAGED = "damaged"
    """The file is unreadable, or of another kind or format."""


_Content = TypeVar("_Content")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found(Generic[_Content]):
    """The result of reading a key or a path."""

    state: FileState
    detail: str = ""
    """Reason why it is not current."""
    content: _Content | None = None
    """Content of a current file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dated:
    """Base of content that expires, since a machine changes in ways that no key captures."""

    made_at: float
    """Seconds since the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFormat(Generic[_Content]):
    """The format of one kind of file."""

    kind: str
    """Name of the kind in messages."""
    number: int
    content: type[_Content]
    """A frozen dataclass."""
    max_bytes: int
    """Size limit; a larger file is of another kind."""
    indent: int | None = 1
    """Indent of the JSON text; None writes one line."""

    def format(self, content: _Content) -> str:
        """Return the text of a file; equal content gives equal text."""
        return json.dumps({"format": self.number, **to_json(content)}, indent=self.indent) + "\n"

    def parse(self, text: str) -> _Content:
        """Return the content of a file's text. Raises `ValueError` if it is of another kind or format."""
        return self._content_of(parse(text))

    def read(self, path: Path) -> _Content:
        """Return the content of a file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is of another kind or format, or a field has a wrong value.
        """
        return self._content_of(read_file(path, max_bytes=self.max_bytes))

    def write(self, path: Path, content: _Content) -> None:
        """Write a file atomically. Raises `OSError` if that fails."""
        write_file(path, self.format(content))

    def inspect(self, path: Path) -> Found[_Content]:
        """Return the state and content of a file. Raises nothing."""
        try:
            content = self.read(path)
        except (FileNotFoundError, NotADirectoryError):
            return Found(state=FileState.MISSING, detail="there is no such file")
        except (OSError, ValueError) as error:
            return Found(state=FileState.DAMAGED, detail=str(error))
        return Found(state=FileState.CURRENT, content=content)

    def _content_of(self, value: Any) -> _Content:
        fields = check_format(value, self.kind, self.number)
        return from_json(self.content, {name: fields[name] for name in fields if name != "format"}, place="")


class Store(Generic[_Content]):
    """Files of one kind in a directory, which need not exist yet."""

    def __init__(
        self,
        directory: Path,
        format: FileFormat[_Content],
        *,
        names: str = "{key}.json",
        max_age_s: float | None = None,
        max_files: int | None = None,
    ) -> None:
        """Keep files in `directory`.

        Arguments:
            directory: directory, which may have files of other kinds.
            format: format of the files.
            names: pattern of file names, with `{key}`; no other kind of file in the directory matches it.
            max_age_s: age above which content is stale; content must be `Dated`.
            max_files: number of files to keep; the oldest are evicted.
        """
        assert max_age_s is None or issubclass(format.content, Dated), "content without a date does not age"
        self._directory = directory
        self._format = format
        self._names = names
        self._max_age_s = max_age_s
        self._max_files = max_files

    def path(self, key: str) -> Path:
        """Return the file of a key."""
        return self._directory / self._names.format(key=key)

    def read(self, key: str) -> Found[_Content]:
        """Return the state and content under a key. Raises nothing."""
        found = self._format.inspect(self.path(key))
        if self._max_age_s is None or not isinstance(found.content, Dated):
            return found
        age_s = time.time() - found.content.made_at
        if age_s < 0:
            return Found(state=FileState.STALE, detail="it is dated in the future")
        if age_s > self._max_age_s:
            detail = f"it was made {age_s:.0f} s ago, and is valid for {self._max_age_s:.0f} s"
            return Found(state=FileState.STALE, detail=detail)
        return found

    def write(self, key: str, content: _Content) -> None:
        """Write the content of a key, and evict old files. Raises `OSError` if that fails."""
        self._format.write(self.path(key), content)
        self._evict()

    def update(self, key: str, change: Callable[[_Content | None], _Content]) -> _Content:
        """Write and return `change(current content)` under the lock of the directory; None is no current content.

        Raises:
            OSError: it cannot be written, or the lock cannot be taken.
        """
        from filelock import FileLock  # slow to import (asyncio), and most processes update nothing

        self._directory.mkdir(parents=True, exist_ok=True)
        with FileLock(self._directory / LOCK, timeout=LOCK_TIMEOUT_S, poll_interval=0.01):
            content = change(self.read(key).content)
            self.write(key, content)
        return content

    def _evict(self) -> None:
        """Remove the oldest files, and temporary files of killed writers."""
        leftovers = [path for age_s, path in self._ages("{}.*.tmp") if age_s > MAX_AGE_S]
        surplus = [] if self._max_files is None else [path for _, path in self._ages("{}")][self._max_files :]
        for path in [*leftovers, *surplus]:
            path.unlink(missing_ok=True)

    def _ages(self, pattern: str) -> Iterator[tuple[float, Path]]:
        """Yield (age in seconds, path) of the files of this kind, the youngest first."""
        times = []
        for path in self._directory.glob(pattern.format(self._names.format(key="*"))):
            with contextlib.suppress(FileNotFoundError):  # another process evicted it
                times.append((path.stat().st_mtime, path))
        now = time.time()
        return ((now - written_at, path) for written_at, path in sorted(times, reverse=True))


# --------------------------------------------------------------------------------------------------- text and bytes


def check_format(content: Any, kind: str, number: int) -> dict[str, Any]:
    """Return `content` after checking that it is a JSON object with the format `number`; `kind` is for messages.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(content, dict):
        raise ValueError(f"expected a {kind} of format {number}, got {type(content).__name__}")
    if content.get("format") != number:
        raise ValueError(f"expected a {kind} of format {number}, got format {content.get('format')!r:.40}")
    return content


def read_file(path: Path, *, max_bytes: int) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, not a regular file, or not JSON.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # checked before opening: a pipe would block
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return parse(content.decode("utf-8"))


def write_file(path: Path, text: str) -> None:
    """Write a file atomically, and create its folders. Raises `OSError` if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
