"""The command line: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import apollo_compile  # noqa: E402
from apollo_compile.device.cpu import calibrate as calibration  # noqa: E402
from apollo_compile.device.cpu.calibrate import Calibration, ReportStep  # noqa: E402
from apollo_compile.device.cpu.discover import discover_profile  # noqa: E402
from apollo_compile.reports.report import Report  # noqa: E402
from apollo_compile.store.profiles import cached_profile_path, default_profile, load_profile  # noqa: E402
from apollo_compile.tools.bench import turns  # noqa: E402
from apollo_compile.tools.bench.numbers import LOSS, Measurement, VariantResult, compare_digests, summarize  # noqa: E402
from apollo_compile.tools.bench.task import MeasuredTask, MeasuredVariant  # noqa: E402
from apollo_compile.tools.cli import main  # noqa: E402
from apollo_compile.tools.targets import load_target  # noqa: E402
from tests.reports.reports import workload_report  # noqa: E402

MODEL = """
import torch

import apollo_compile
from torch import nn

class Towers(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.image = nn.Linear(width, width)
        self.text = nn.Linear(width, width)

    def forward(self, image, text):
        return self.image(image) @ self.text(text).T

def build(width=64, batch=32):
    return Towers(width), (torch.ones(batch, width), torch.ones(batch, width))

def by_name():
    model, (image, text) = build()
    return model, {"image": image, "text": text}

def broken():
    raise RuntimeError("no weights")

def nothing():
    return None
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "apollo_compile"


def _measure(monkeypatch: pytest.MonkeyPatch, disturbed_share: float = 0.0) -> None:
    """Replace the measurement, which takes a minute, by the default profile."""

    def calibrate(units: int, *, rounds: int, progress: ReportStep) -> Calibration:
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
    assert main(["calibrate", "--units", "2", "--output", str(tmp_path / "file" / "p.json")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("apollo calibrate: ")


@pytest.mark.parametrize(
    "arguments", ([], ["unknown"], ["calibrate", "--units", "two"], ["explain", "a:b", "--option", "units"])
)
def test_a_wrong_call_shows_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: apollo" in capsys.readouterr().err


def test_help_does_not_import_torch() -> None:
    """It should be there at once."""
    code = (
        "import sys; from apollo_compile.tools.cli import _parser; _parser().format_help(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------------------- explain and report


@pytest.fixture
def model_file(tmp_path: Path) -> Iterator[str]:
    """A file of a user, with several functions that build."""
    path = tmp_path / "towers_of_a_user.py"
    path.write_text(MODEL)
    yield str(path)
    sys.modules.pop("towers_of_a_user", None)
    sys.path[:] = [place for place in sys.path if place != str(tmp_path)]
    torch._dynamo.reset()


def test_explain_writes_every_form_and_prints_a_report(
    model_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a file and a function, with arguments and options, for another device."""
    files = {name: tmp_path / f"report.{name}" for name in ("html", "trace", "save")}
    written = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    target = [f"{model_file}:build", "--set", "batch=16", "--option", "plan.planner=greedy"]
    assert main(["explain", *target, "--profile", "cpu", *written]) == 0
    printed = capsys.readouterr()
    assert re.search(r"\d/\d forward", printed.out) and re.search(r"\d/\d backward", printed.out)
    assert "(cpu, 64 units)" in printed.out
    assert "building the model" in printed.err.splitlines()
    report = Report.from_json(files["save"].read_text())
    assert files["html"].read_text() == report.to_html()
    assert files["trace"].read_text() == report.to_trace()
    assert printed.out == f"{report}\n"


def test_explain_prints_json_and_answers_why(model_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing else goes to standard output."""
    quick = ["--option", "device.units=1"]
    assert main(["explain", f"{model_file}:by_name", "--json", *quick]) == 0
    report = Report.from_json(capsys.readouterr().out)
    assert [graph.role for graph in report.graphs] == ["forward", "backward"]
    assert main(["explain", f"{model_file}:by_name", "--why", "vision", *quick]) == 1
    assert "no segment or module is called 'vision'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("towers", "names no function; expected path/to/file.py:function or package.module:function"),
        ("absent.py", "names no function, and there is no such file"),
        ("{file}", "names no function; expected one that returns (model, inputs): {file}:build, {file}:by_name"),
        ("absent.py:build", "there is no file absent.py"),
        ("absent_module:build", "cannot import absent_module: ModuleNotFoundError"),
        ("{file}:absent", "has no function 'absent'; it has: broken, build, by_name, nothing"),
        ("{file}:broken", "{file}:broken failed: {file}:24 in broken: RuntimeError: no weights"),
        ("{file}:nothing", "returned NoneType; expected (model, inputs)"),
    ],
)
def test_a_wrong_target_is_one_line(
    target: str, message: str, model_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """That names the fault."""
    is_there = target in ("{file}:broken", "{file}:nothing")
    assert main(["explain", target.format(file=model_file)]) == (1 if is_there else 2)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("apollo explain: ") and message.format(file=model_file) in last


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "{file}:by_name", "--option", "plan.planer=greedy"],
        ["explain", "{file}:by_name", "--option", "plan.planner=fast"],
        ["explain", "{file}:by_name", "--html", "{folder}/absent/page.html"],
        ["report", "{file}:by_name", "--steps", "1", "--save", "{folder}"],
        ["report", "{file}:by_name", "--steps", "0"],
        ["plan-diff", "{folder}/a.json", "{folder}/b.json"],
    ],
)
def test_wrong_calls_exit_with_two_and_compile_nothing(
    arguments: list[str], model_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong names and values of options, files that cannot be written or are not there."""
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("it compiles"))
    filled = [each.format(file=model_file, folder=tmp_path) for each in arguments]
    with pytest.raises(SystemExit, match="2"):
        sys.exit(main(filled))


@pytest.mark.parametrize("command", ["explain", "report"])
@pytest.mark.parametrize(
    ("inputs", "told"),
    [("torch.ones(2, 4)", "8 in forward: RuntimeError: mat1 and mat2"), ("{'z': 1}", "7 in forward: TypeError: ")],
)
def test_an_error_of_the_model_begins_with_its_own_line(
    command: str, inputs: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What torch.compile says of it comes with `-v` only."""
    file = tmp_path / "bad.py"
    file.write_text(
        "import torch\n\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = torch.nn.Linear(3, 3)\n    def forward(self, x):\n        return self.layer(x)\n\n"
        f"def build():\n    return Model(), {inputs}\n"
    )
    assert main([command, f"{file}:build", "--option", "device.units=1"]) == 1
    errors = capsys.readouterr().err
    assert errors.splitlines()[-1].startswith(f"apollo {command}: {file}:build failed: {file}:{told}")
    assert "Traceback" not in errors and "meta" not in errors
    torch._dynamo.reset()
    assert main([command, f"{file}:build", "--option", "device.units=1", "-v"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "bench", "report"])
def test_a_target_without_a_function_is_answered_before_torch_is_imported(tmp_path: Path, command: str) -> None:
    """Which takes seconds; the file is not run either."""
    file = tmp_path / "models.py"
    file.write_text("import absent\n\ndef build(): ...\n\ndef _hidden(): ...\n")
    code = (
        "import sys; from apollo_compile.tools.cli import main; "
        f"print(main([{command!r}, {str(file)!r}]), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert done.stderr.endswith(f"names no function; expected one that returns (model, inputs): {file}:build\n")


def test_a_saved_report_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In any form, without the model, and without torch's help."""
    report, path = workload_report("clip"), tmp_path / "clip.json"
    path.write_text(report.to_json())
    assert main(["report", str(path), "--html", str(tmp_path / "clip.html")]) == 0
    assert capsys.readouterr().out == f"{report}\n"
    assert (tmp_path / "clip.html").read_text() == report.to_html()
    assert main(["report", str(path), "--json"]) == 0
    assert Report.from_json(capsys.readouterr().out) == report
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(path), "--inference", "--steps", "2"])
    assert stopped.value.code == 2
    assert "shown unchanged; use file.py:function instead of it with --steps, --inference" in capsys.readouterr().err
    assert main(["report", str(path), "--why", "text_model", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["why"].startswith("text_model is ")
    (tmp_path / "other.json").write_text("{}")
    assert main(["report", str(tmp_path / "other.json")]) == 1
    assert "not a report" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "absent.json")]) == 2
    assert capsys.readouterr().err.endswith("absent.json: No such file or directory\n")
    assert main(["report", "model.py"]) == 2
    assert "'model.py' names no function, and there is no such file" in capsys.readouterr().err


@pytest.mark.slow
def test_report_trains_a_model_and_measures(model_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """For so many steps."""
    settings = ("plan.autotune=false", "plan.planner=serial", "debug.strict=true", "runtime.bodies=python")
    options = [part for setting in settings for part in ("--option", setting)]
    assert main(["report", f"{model_file}:build", "--steps", "2", "--json", *options]) == 0
    printed = capsys.readouterr()
    report = Report.from_json(printed.out)
    assert all(graph.measured is not None for graph in report.graphs) and len(report.graphs) == 2
    assert printed.err.splitlines() == ["building the model", "compiling", "running steps"]


# ------------------------------------------------------------------------------------------------------ the other ones


def test_plan_diff_compares_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code says whether they differ, if that is asked for."""
    for name in ("clip", "clap"):
        (tmp_path / f"{name}.json").write_text(workload_report(name).to_json())
    clip, clap = str(tmp_path / "clip.json"), str(tmp_path / "clap.json")
    assert main(["plan-diff", clip, clip, "--exit-code"]) == 0
    assert "same plan" in capsys.readouterr().out
    assert main(["plan-diff", clip, clap]) == 0
    assert "clap_forward: only in the second" in capsys.readouterr().out
    assert main(["plan-diff", clip, clap, "--exit-code", "--json"]) == 1
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["is_same_plan"] is False and found["only_before"] == ["clip_forward", "clip_backward"]
    assert main(["plan-diff", clip, str(tmp_path / "absent.json")]) == 2
    assert main(["plan-diff", clip, str(tmp_path)]) == 1
    assert "there is no plan in" in capsys.readouterr().err


def test_plan_diff_compares_dumps(
    model_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Directories of `APOLLO_DUMP`, and single plans in them."""
    quick = ["--option", "device.units=1"]
    for name in ("first", "second"):
        torch._dynamo.reset()  # as in a process of its own
        monkeypatch.setenv("APOLLO_DUMP", str(tmp_path / name))
        assert main(["explain", f"{model_file}:build", *quick]) == 0
    capsys.readouterr()
    assert main(["plan-diff", str(tmp_path / "first"), str(tmp_path / "second"), "--exit-code"]) == 0
    assert capsys.readouterr().out.count("same plan") == 2
    plan = str(tmp_path / "first" / "0_0_forward" / "plan.json")
    assert main(["plan-diff", plan, plan, "--json"]) == 0
    (graph,) = json.loads(capsys.readouterr().out)["graphs"]
    assert graph["before"] == graph["after"] and graph["before"]["name"] == "0/0 forward"


def test_bench_prints_a_table_and_refuses_wrong_numbers(
    model_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is measured is the harness's business; children find the target by its name."""
    asked: list[tuple[MeasuredTask, list[str]]] = []
    difference = {"loss": 1.0}

    def measure(task: MeasuredTask, variants: Sequence[MeasuredVariant], **_: Any) -> Measurement:
        asked.append((task, [variant.name for variant in variants]))
        times = ((1_000_000, 1_000_000),) * 5
        results = tuple(
            VariantResult(
                variant=variant.name,
                cold_s=1.0,
                rounds_ns=times,
                peak_bytes=None,
                loss=1.0,
                summary=summarize(times, times),
                difference=compare_digests(_digest(difference["loss"]), _digest(1.0)),
            )
            for variant in variants
        )
        return Measurement(task=task, baseline="eager", reference="eager", cpu="a CPU", results=results)

    monkeypatch.setattr(turns, "measure", measure)
    arguments = ["--variants", "eager,apollo", "--set", "batch=2", "--inference", "--dtype", "bfloat16"]
    assert main(["bench", f"{model_file}:build", *arguments]) == 0
    assert "measured in bfloat16 on a CPU" in capsys.readouterr().out
    ((task, names),) = asked
    assert (task.builder, task.mode, names) == (
        "apollo_compile.tools.targets:load_target",
        "inference",
        ["eager", "apollo"],
    )
    assert task.dtype == "bfloat16"
    assert load_target(**task.arguments).inputs["image"].shape == (2, 64)
    difference["loss"] = 1.5
    assert main(["bench", f"{model_file}:build", "--json"]) == 1
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["measurement"]["results"]) == 5
    assert "wrong numbers, more than 1e-03 from eager: eager, inductor, inductor-max-autotune, apollo" in printed.err
    with pytest.raises(SystemExit, match="2"):
        main(["bench", f"{model_file}:build", "--variants", "magic"])
    assert "unknown variant magic; known: eager" in capsys.readouterr().err


def _digest(loss: float) -> dict[str, Any]:
    return {LOSS: np.asarray(loss), "weight": np.ones(2, dtype=np.float32)}


def test_doctor_prints_findings(capsys: pytest.CaptureFixture[str]) -> None:
    """As lines, or as JSON."""
    status = main(["doctor"])
    assert "torch: 2." in capsys.readouterr().out
    assert main(["doctor", "--json"]) == status
    assert {finding["subject"] for finding in json.loads(capsys.readouterr().out)} >= {"torch", "cores", "cache"}


def test_a_reader_that_has_read_enough_is_no_error(tmp_path: Path) -> None:
    """As `head` is."""
    path = tmp_path / "clip.json"
    path.write_text(workload_report("clip").to_json())
    command = [sys.executable, "-m", "apollo_compile.tools.cli", "report", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process:
        errors = process.stderr.read()
    assert (process.returncode, errors) == (141, "")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """As other tools tell theirs."""
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"apollo_compile {apollo_compile.__version__}\n"


def test_every_command_has_json_and_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    """As the top of the file says."""
    for command in ("explain", "report", "bench", "calibrate", "doctor", "plan-diff"):
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
        assert "--json" in (text := capsys.readouterr().out)
        assert "?." not in text and ".." not in text.replace("...", "")
