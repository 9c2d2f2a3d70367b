"""What is kept is found again as it was, or to be missing, stale or damaged: never half of it, and never an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

import apollo_compile
from apollo_compile.store import files
from apollo_compile.store.files import LOCK, MAX_AGE_S, Dated, FileFormat, FileState, Found, Store
from tests.builders import in_threads


@dataclass(frozen=True, kw_only=True, slots=True)
class Note(Dated):
    """A content with all that matters: a date, text, numbers."""

    text: str = "ä"
    numbers: tuple[int, ...] = (1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """A content that does not age."""

    count: int


NOTES = FileFormat(kind="note", number=3, content=Note, max_bytes=1000)
COUNTS = FileFormat(kind="count", number=1, content=Count, max_bytes=1000)


def a_note(age_s: float = 0.0) -> Note:
    """Return one that was made some time ago."""
    return Note(made_at=time.time() - age_s)


# ------------------------------------------------------------------------------------------------------------ a format


def test_a_file_is_an_object_with_the_number_of_its_format(tmp_path: Path) -> None:
    """The same content is the same text, on one line or on several."""
    note = Note(made_at=1.5)
    assert json.loads(NOTES.format(note)) == {"format": 3, "made_at": 1.5, "text": "ä", "numbers": [1, 2]}
    NOTES.write(tmp_path / "new" / "folder" / "a", note)
    assert (tmp_path / "new" / "folder" / "a").read_text() == NOTES.format(note)
    assert NOTES.read(tmp_path / "new" / "folder" / "a") == NOTES.parse(NOTES.format(note)) == note
    short = FileFormat(kind="note", number=3, content=Note, max_bytes=1000, indent=None)
    assert short.format(note).count("\n") == 1 and short.parse(NOTES.format(note)) == note


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expecting value"),
        ("[]", "expected a note of format 3, got list"),
        ("{}", "expected a note of format 3, got format None"),
        ('{"format": 4, "made_at": 0.0}', "expected a note of format 3, got format 4"),
        ('{"format": 3}', "it has no field made_at"),
        ('{"format": 3, "made_at": 0, "more": 1}', "it has unknown fields"),
        ('{"format": 3, "made_at": 0, "numbers": [1, "a"]}', r"^numbers\[1\] is 'a'; expected a value of type int"),
        ("[" * 100_000, "it is nested too deeply"),
        (f'{{"format": 3, "made_at": 0, "text": "{1000 * "a"}"}}', "it has more than 1000 bytes"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, says: str) -> None:
    """As an error of a file that a user named, and as the detail of one of the cache."""
    path, large = tmp_path / "a.json", FileFormat(kind="note", number=3, content=Note, max_bytes=10**6)
    path.write_text(text)
    format = large if text.startswith("[[") else NOTES
    with pytest.raises(ValueError, match=says) as raised:
        format.read(path)
    assert Store(tmp_path, format).read("a") == Found(state=FileState.DAMAGED, detail=str(raised.value))


# --------------------------------------------------------------------------------------------------------------- faults


def test_a_file_that_was_cut_anywhere_is_damaged(tmp_path: Path) -> None:
    """Only the last line break may be missing; the next write makes it right."""
    store, note = Store(tmp_path, NOTES, max_age_s=MAX_AGE_S), a_note()
    store.write("a", note)
    raw = store.path("a").read_bytes()
    for length in range(len(raw)):
        store.path("a").write_bytes(raw[:length])
        whole = length == len(raw) - 1
        assert store.read("a").state is (FileState.CURRENT if whole else FileState.DAMAGED), raw[:length]
    store.write("a", note)
    assert store.read("a") == Found(state=FileState.CURRENT, content=note)


@pytest.mark.parametrize(
    ("age_s", "state"),
    [
        (0, FileState.CURRENT),
        (50, FileState.CURRENT),
        (150, FileState.STALE),
        (-3600, FileState.STALE),
        (1e300, FileState.STALE),
    ],
)
def test_content_ages(tmp_path: Path, age_s: float, state: FileState) -> None:
    """A date that is still to come is of a clock that was wrong. What has no limit counts for ever."""
    aging = Store(tmp_path, NOTES, max_age_s=100)
    aging.write("a", a_note(age_s))
    found = aging.read("a")
    assert found.state is state and (found.content is not None) == (state is FileState.CURRENT)
    assert ("ago" in found.detail or "future" in found.detail) == (state is FileState.STALE)
    assert Store(tmp_path, NOTES).read("a").state is FileState.CURRENT


@pytest.mark.parametrize(
    ("spoil", "state", "is_writable"),
    [
        pytest.param(lambda path: None, FileState.MISSING, True, id="not there"),
        pytest.param(lambda path: path.write_text(""), FileState.MISSING, False, id="a file"),
        pytest.param(lambda path: path.symlink_to(path), FileState.DAMAGED, False, id="a loop of links"),
        pytest.param(
            lambda path: (path / "a.json").mkdir(parents=True), FileState.DAMAGED, False, id="a folder inside"
        ),
        pytest.param(
            lambda path: (path.mkdir(), os.mkfifo(path / "a.json")), FileState.DAMAGED, True, id="a pipe inside"
        ),
    ],
)
def test_a_directory_may_be_anything(
    tmp_path: Path, spoil: Callable[[Path], object], state: FileState, is_writable: bool
) -> None:
    """Reading says what it is; writing raises the system's error, and leaves nothing behind."""
    directory = tmp_path / "store"
    spoil(directory)
    store = Store(directory, COUNTS, max_files=2)
    assert store.read("a").state is state and store.read("a").detail
    if is_writable:
        store.write("a", Count(count=1))
        assert store.update("a", next_count) == Count(count=2)
        return
    with pytest.raises(OSError):  # noqa: PT011  # which one is the system's business
        store.write("a", Count(count=1))
    with pytest.raises(OSError):  # noqa: PT011
        store.update("a", next_count)
    assert not list(tmp_path.rglob("*.tmp"))


# ------------------------------------------------------------------------------------------------------------- eviction


def written(path: Path, at: float) -> Path:
    """Make a file that was written some seconds after the epoch."""
    path.write_text("")
    os.utime(path, (at, at))
    return path


def test_what_was_written_longest_ago_is_evicted(tmp_path: Path) -> None:
    """Whatever its name, and whether or not it can be read; files of another kind are not."""
    store = Store(tmp_path, COUNTS, names="count-{key}.json", max_files=3)
    others = [written(tmp_path / name, 0) for name in ("note-1.json", "count-1.txt")]
    old, younger, youngest = (written(store.path(key), at) for key, at in (("z", 1), ("a", 2), ("m", 3)))
    store.write("b", Count(count=1))
    assert not old.exists() and set(tmp_path.iterdir()) == {*others, younger, youngest, store.path("b")}
    os.utime(younger)  # as if it had been written again
    store.write("c", Count(count=1))
    assert set(tmp_path.iterdir()) == {*others, younger, store.path("b"), store.path("c")}


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    """What may still be written is not, nor what writers of other files left."""
    store = Store(tmp_path, COUNTS, names="count-{key}.json")
    old = written(tmp_path / "count-1.json.17.4.tmp", 1)
    others = {written(tmp_path / "note-1.json.17.4.tmp", 1), written(tmp_path / "count-1.json.18.4.tmp", time.time())}
    store.write("1", Count(count=1))
    assert not old.exists() and set(tmp_path.iterdir()) == {*others, store.path("1")}


# ------------------------------------------------------------------------------------------------------ several at once


def next_count(before: Count | None) -> Count:
    """Count on."""
    return Count(count=1 if before is None else before.count + 1)


WORKER = """
import sys
from pathlib import Path
from apollo_compile.store.files import Store
from tests.store.test_files import COUNTS, LARGE, Note, next_count

directory = Path(sys.argv[1])
counts, numbers = Store(directory, COUNTS), Store(directory, LARGE, names="{key}.numbers")
for round in range(50):
    counts.update("a", next_count)
    numbers.write("a", Note(made_at=0.0, numbers=5000 * (round,)))
"""


LARGE = FileFormat(kind="note", number=1, content=Note, max_bytes=10**6)
"""A format of contents that take more than one page."""


def test_processes_write_at_once(tmp_path: Path) -> None:
    """No update is lost, and a reader sees each file whole at any time."""
    numbers = Store(tmp_path, LARGE, names="{key}.numbers")
    root = Path(apollo_compile.__file__).parent.parent
    processes = [subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)], cwd=root) for _ in range(2)]
    while any(process.poll() is None for process in processes):
        found = numbers.read("a")
        assert found.state is FileState.MISSING or found.content is not None, found
        if found.content is not None:
            assert len(found.content.numbers) == 5000 and len(set(found.content.numbers)) == 1
    assert [process.returncode for process in processes] == [0, 0]
    assert Store(tmp_path, COUNTS).read("a").content == Count(count=100)
    assert not list(tmp_path.glob("*.tmp"))


def test_threads_update_one_after_the_other(tmp_path: Path) -> None:
    """Each with a store of its own."""

    def work(number: int) -> None:
        for _ in range(20):
            Store(tmp_path, COUNTS).update("a", next_count)

    in_threads(work, 4)
    assert Store(tmp_path, COUNTS).read("a").content == Count(count=80)


def test_a_lock_that_is_not_given_back_is_an_error_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a process that was stopped; reading and writing need no lock."""
    monkeypatch.setattr(files, "LOCK_TIMEOUT_S", 0.01)
    store = Store(tmp_path, COUNTS)
    with FileLock(tmp_path / LOCK):
        with pytest.raises(OSError, match="lock"):
            store.update("a", next_count)
        store.write("a", Count(count=5))
        assert store.read("a").content == Count(count=5)
    assert store.update("a", next_count) == Count(count=6)


def test_a_change_that_fails_leaves_all_as_it_was(tmp_path: Path) -> None:
    """And the lock free."""
    store = Store(tmp_path, COUNTS)
    store.update("a", next_count)

    def fail(before: Count | None) -> Count:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.update("a", fail)
    assert store.read("a").content == Count(count=1)
    assert store.update("a", next_count) == Count(count=2)


def test_an_update_begins_anew_where_what_was_there_does_not_count(tmp_path: Path) -> None:
    """Missing, stale or damaged is all the same to it."""
    store, seen = Store(tmp_path, NOTES, max_age_s=100), []

    def change(before: Note | None) -> Note:
        seen.append(before)
        return a_note()

    store.update("missing", change)
    store.write("stale", a_note(150))
    store.update("stale", change)
    store.path("damaged").write_text("{")
    store.update("damaged", change)
    assert seen == [None, None, None]
    assert all(store.read(key).state is FileState.CURRENT for key in ("missing", "stale", "damaged"))
