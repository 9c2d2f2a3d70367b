"""The command line: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from apollo_compile import calibrate as calibration  # noqa: E402
from apollo_compile.calibrate import Calibration, Progress  # noqa: E402
from apollo_compile.cli import main  # noqa: E402
from apollo_compile.device import cached_profile_path, default_profile, discover_profile, load_profile  # noqa: E402


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "apollo_compile"


def _measure(monkeypatch: pytest.MonkeyPatch, disturbed_share: float = 0.0) -> None:
    """Replace the measurement, which takes a minute, by the default profile."""

    def calibrate(units: int, *, progress: Progress) -> Calibration:
        if units > 8:
            raise ValueError(f"cannot calibrate {units} units")
        for done, what in enumerate(("compiling", "measuring", "measuring", "done")):
            progress(what, done, 4)
        return Calibration(profile=default_profile(units), disturbed_share=disturbed_share)

    monkeypatch.setattr(calibration, "calibrate", calibrate)


def test_a_calibration_is_kept_where_compiles_look(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its fingerprint, so that discovery takes it as it is; progress is a line per kind of step."""
    _measure(monkeypatch)
    assert main(["calibrate", "--units", "2"]) == 0
    path = cached_profile_path(cache, 2)
    printed = capsys.readouterr()
    assert str(path) in printed.out
    assert printed.err.splitlines() == ["compiling", "measuring", "done"]
    assert discover_profile(2, cache_dir=cache) == load_profile(path) == default_profile(2)


def test_a_profile_goes_where_it_is_asked_for(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nowhere else; `--json` prints what the file holds."""
    _measure(monkeypatch)
    path = tmp_path / "mine.json"
    assert main(["calibrate", "--units", "3", "--output", str(path), "--json"]) == 0
    assert capsys.readouterr().out == path.read_text()
    assert load_profile(path) == default_profile(3)
    assert not cache.exists()


def test_a_disturbed_calibration_is_not_kept(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code says so, and the message what to do; a file that was asked for is written all the same."""
    _measure(monkeypatch, disturbed_share=0.75)
    assert main(["calibrate", "--units", "2"]) == 1
    assert "75%" in (error := capsys.readouterr().err) and "not kept" in error
    assert not cache.exists()
    assert main(["calibrate", "--units", "2", "--output", str(tmp_path / "p.json")]) == 1
    assert load_profile(tmp_path / "p.json") == default_profile(2)


def test_what_cannot_be_done_is_one_line(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback: too many units, and a file where none can be written."""
    _measure(monkeypatch)
    assert main(["calibrate", "--units", "9"]) == 1
    assert capsys.readouterr().err == "apollo calibrate: cannot calibrate 9 units\n"
    (tmp_path / "file").write_text("")
    assert main(["calibrate", "--units", "2", "--output", str(tmp_path / "file" / "p.json")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("apollo calibrate: ")


@pytest.mark.parametrize("arguments", ([], ["unknown"], ["calibrate", "--units", "two"]))
def test_a_wrong_call_shows_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: apollo" in capsys.readouterr().err


def test_help_does_not_import_torch() -> None:
    """It should be there at once."""
    code = (
        "import sys; from apollo_compile.cli import _parser; _parser().format_help(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
