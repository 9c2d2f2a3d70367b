"""The command line: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import apollo_compile  # noqa: E402
from apollo_compile.device.cpu import calibrate as calibration  # noqa: E402
from apollo_compile.device.cpu.calibrate import Calibration, ReportStep  # noqa: E402
from apollo_compile.device.cpu.discover import discover_profile  # noqa: E402
from apollo_compile.reports.report import Report  # noqa: E402
from apollo_compile.store.profiles import cached_profile_path, default_profile, load_profile  # noqa: E402
from apollo_compile.tools.bench import turns  # noqa: E402
from apollo_compile.tools.bench.numbers import Measurement  # noqa: E402
from apollo_compile.tools.bench.task import MeasuredTask, MeasuredVariant  # noqa: E402
from apollo_compile.tools.targets import load_target  # noqa: E402
from tests.reports.reports import workload_report  # noqa: E402
from tests.tools.conftest import Apollo  # noqa: E402
from tests.tools.test_bench import measured  # noqa: E402

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


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Replace the measurement, which takes a minute, by the default profile, with so large a share disturbed."""

    def replace_by(disturbed_share: float) -> None:
        def calibrate(units: int, *, rounds: int, progress: ReportStep) -> Calibration:
            if units > 8:
                raise ValueError(f"cannot calibrate {units} units")
            for done, what in enumerate(("compiling", "measuring", "measuring", "done")):
                progress(what, done, 4)
            return Calibration(profile=default_profile(units), disturbed_share=disturbed_share)

        monkeypatch.setattr(calibration, "calibrate", calibrate)

    replace_by(0.0)
    return replace_by


@pytest.mark.usefixtures("measure")
def test_a_calibration_is_kept_where_compiles_look(cache: Path, apollo: Apollo) -> None:
    """With its fingerprint, so that discovery takes it as it is; progress is a line per kind of step."""
    ran, path = apollo("calibrate", "--units", 2), cached_profile_path(cache, 2)
    assert ran.code == 0 and str(path) in ran.out
    assert ran.err.splitlines() == ["compiling", "measuring", "done"]
    assert discover_profile(2, cache_dir=cache) == load_profile(path) == default_profile(2)


@pytest.mark.usefixtures("measure")
def test_a_profile_goes_where_it_is_asked_for(cache: Path, tmp_path: Path, apollo: Apollo) -> None:
    """And nowhere else; `--json` prints what the file holds."""
    path = tmp_path / "mine.json"
    assert apollo("calibrate", "--units", 3, "--output", path, "--json")[:2] == (0, path.read_text())
    assert load_profile(path) == default_profile(3)
    assert not cache.exists()


def test_a_disturbed_calibration_is_not_kept(
    cache: Path, tmp_path: Path, measure: Callable[[float], None], apollo: Apollo
) -> None:
    """The exit code says so, and the message what to do; a file that was asked for is written all the same."""
    measure(0.75)
    ran = apollo("calibrate", "--units", 2)
    assert ran.code == 1 and "75%" in ran.err and "not kept" in ran.err
    assert not cached_profile_path(cache, 2).exists()
    assert apollo("calibrate", "--units", 2, "--output", tmp_path / "p.json").code == 1
    assert load_profile(tmp_path / "p.json") == default_profile(2)


@pytest.mark.usefixtures("cache", "measure")
def test_what_cannot_be_done_is_one_line(tmp_path: Path, apollo: Apollo) -> None:
    """No traceback: too many units, and a file where none can be written, which is told before anything is measured."""
    assert apollo("calibrate", "--units", 9) == (1, "", "apollo calibrate: cannot calibrate 9 units\n")
    (tmp_path / "file").write_text("")
    ran = apollo("calibrate", "--units", 2, "--output", tmp_path / "file" / "p.json")
    assert ran.code == 2 and ran.err.splitlines()[-1].startswith("apollo calibrate: ")
    assert apollo("calibrate", "--units", 2, "--output", "/proc/folder/p.json").err.startswith(
        "apollo calibrate: /proc"
    )


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


def test_explain_writes_every_form_and_prints_a_report(model_file: str, tmp_path: Path, apollo: Apollo) -> None:
    """From a file and a function, with arguments and options, for another device."""
    files = {name: tmp_path / f"report.{name}" for name in ("html", "trace", "save")}
    written = [part for name, path in files.items() for part in (f"--{name}", path)]
    target = [f"{model_file}:build", "--set", "batch=16", "--option", "plan.planner=greedy"]
    ran = apollo("explain", *target, "--profile", "cpu", *written)
    assert re.search(r"\d/\d forward", ran.out) and re.search(r"\d/\d backward", ran.out)
    assert "(cpu, 64 units)" in ran.out
    assert "building the model" in ran.err.splitlines()
    report = Report.from_json(files["save"].read_text())
    assert files["html"].read_text() == report.to_html()
    assert files["trace"].read_text() == report.to_trace()
    assert ran[:2] == (0, f"{report}\n")


def test_explain_prints_json_and_answers_why(model_file: str, apollo: Apollo) -> None:
    """Nothing else goes to standard output."""
    explain = ("explain", f"{model_file}:by_name", "--option", "device.units=1")
    ran = apollo(*explain, "--json")
    assert ran.code == 0 and [graph.role for graph in Report.from_json(ran.out).graphs] == ["forward", "backward"]
    ran = apollo(*explain, "--why", "vision")
    assert ran.code == 1 and "no segment or module is called 'vision'" in ran.err


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
def test_a_wrong_target_is_one_line(target: str, message: str, model_file: str, apollo: Apollo) -> None:
    """That names the fault."""
    ran = apollo("explain", target.format(file=model_file))
    assert ran.code == (1 if target in ("{file}:broken", "{file}:nothing") else 2)
    last = ran.err.splitlines()[-1]
    assert last.startswith("apollo explain: ") and message.format(file=model_file) in last


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["unknown"], ["calibrate", "--units", "two"], ["explain", "a:b", "--option", "units"]),
        ["explain", "{file}:by_name", "--option", "plan.planer=greedy"],
        ["explain", "{file}:by_name", "--option", "plan.planner=fast"],
        ["explain", "{file}:by_name", "--html", "{folder}/absent/page.html"],
        ["report", "{file}:by_name", "--steps", "1", "--save", "{folder}"],
        ["report", "{file}:by_name", "--steps", "0"],
        ["plan-diff", "{folder}/a.json", "{folder}/b.json"],
    ],
)
def test_wrong_calls_exit_with_two_and_compile_nothing(
    arguments: list[str], model_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apollo: Apollo
) -> None:
    """Wrong names and values of options, files that cannot be written or are not there; else the usage is shown."""
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("it compiles"))
    ran = apollo(*(each.format(file=model_file, folder=tmp_path) for each in arguments))
    assert ran.code == 2 and ("usage: apollo" in ran.err or "{" in str(arguments))


@pytest.mark.parametrize("command", ["explain", "report"])
def test_an_option_that_inductor_refuses_is_one_line(command: str, model_file: str, apollo: Apollo) -> None:
    """Dynamo calls the backend, and wraps its errors."""
    ran = apollo(command, f"{model_file}:by_name", "--option", "inductor.max_autotune=yes")
    assert ran.code == 2 and "Traceback" not in ran.err
    assert "Unexpected type of attr max_autotune, got str should be bool" in ran.err.splitlines()[-1]


@pytest.mark.parametrize("command", ["explain", "report"])
@pytest.mark.parametrize(
    ("inputs", "told"),
    [("torch.ones(2, 4)", "8 in forward: RuntimeError: mat1 and mat2"), ("{'z': 1}", "7 in forward: TypeError: ")],
)
def test_an_error_of_the_model_begins_with_its_own_line(
    command: str, inputs: str, told: str, tmp_path: Path, apollo: Apollo
) -> None:
    """What torch.compile says of it comes with `-v` only."""
    file = tmp_path / "bad.py"
    file.write_text(
        "import torch\n\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = torch.nn.Linear(3, 3)\n    def forward(self, x):\n        return self.layer(x)\n\n"
        f"def build():\n    return Model(), {inputs}\n"
    )
    call = (command, f"{file}:build", "--option", "device.units=1")
    ran = apollo(*call)
    assert ran.code == 1
    assert ran.err.splitlines()[-1].startswith(f"apollo {command}: {file}:build failed: {file}:{told}")
    assert "Traceback" not in ran.err and "meta" not in ran.err
    torch._dynamo.reset()
    ran = apollo(*call, "-v")
    assert ran.code == 1 and "Traceback" in ran.err


def test_inputs_and_losses_that_do_not_fit_are_one_line(tmp_path: Path, apollo: Apollo) -> None:
    """A model that takes other inputs, and those that have nothing to train; a function can be measured without."""
    file = tmp_path / "odd.py"
    file.write_text(
        "import torch\n\ndef few():\n    return torch.nn.Bilinear(3, 3, 3), torch.ones(2, 3)\n\n"
        "def frozen():\n    return torch.nn.Linear(3, 3).requires_grad_(False), torch.ones(2, 3)\n\n"
        "def function():\n    return lambda x: x.exp(), torch.ones(2, 3)\n"
    )
    ran = apollo("bench", f"{file}:few")
    assert ran.code == 1 and "few returns inputs for another signature" in ran.err
    ran = apollo("report", f"{file}:frozen", "--steps", 1, "--option", "runtime.bodies=eager")
    assert ran.code == 1 and "frozen failed: " in ran.err and "does not require grad" in ran.err.splitlines()[-1]
    for name in ("frozen", "function"):
        ran = apollo("bench", f"{file}:{name}")
        assert ran.code == 2 and f"{name} has no parameter that requires gradients; " in ran.err.splitlines()[-1]
    rounds = ("--rounds", 1, "--steps-per-turn", 1, "--warm-cache")
    assert apollo("bench", f"{file}:function", "--inference", "--variants", "eager", *rounds).code == 0


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


def test_a_saved_report_is_shown_again(tmp_path: Path, apollo: Apollo) -> None:
    """In any form, without the model, and without torch's help."""
    report, path = workload_report("clip"), tmp_path / "clip.json"
    path.write_text(report.to_json())
    assert apollo("report", path, "--html", tmp_path / "clip.html")[:2] == (0, f"{report}\n")
    assert (tmp_path / "clip.html").read_text() == report.to_html()
    ran = apollo("report", path, "--json")
    assert ran.code == 0 and Report.from_json(ran.out) == report
    ran = apollo("report", path, "--why", "text_model", "--json")
    assert ran.code == 0 and json.loads(ran.out)["why"].startswith("text_model is ")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["clip.json", "--inference", "--steps", "2"], 2, "instead of it with --steps, --inference\n"),
        (["other.json"], 1, "not a report"),
        (["absent.json"], 2, "absent.json: No such file or directory\n"),
        (["model.py"], 2, "'model.py' names no function, and there is no such file"),
    ],
)
def test_what_is_no_report_to_show_is_told(
    arguments: list[str], code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apollo: Apollo
) -> None:
    """Also options that a saved one cannot follow."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip.json").write_text(workload_report("clip").to_json())
    (tmp_path / "other.json").write_text("{}")
    ran = apollo("report", *arguments)
    assert ran.code == code and told in ran.err


@pytest.mark.slow
def test_report_trains_a_model_and_measures(model_file: str, apollo: Apollo) -> None:
    """For so many steps."""
    settings = ("plan.autotune=false", "plan.planner=serial", "debug.strict=true", "runtime.bodies=python")
    options = [part for setting in settings for part in ("--option", setting)]
    ran = apollo("report", f"{model_file}:build", "--steps", 2, "--json", *options)
    assert ran.code == 0 and ran.err.splitlines() == ["building the model", "compiling", "running steps"]
    graphs = Report.from_json(ran.out).graphs
    assert all(graph.measured is not None for graph in graphs) and len(graphs) == 2


# ------------------------------------------------------------------------------------------------------ the other ones


def test_plan_diff_compares_reports(tmp_path: Path, apollo: Apollo) -> None:
    """The exit code says whether they differ, if that is asked for."""
    for name in ("clip", "clap"):
        (tmp_path / f"{name}.json").write_text(workload_report(name).to_json())
    clip, clap = tmp_path / "clip.json", tmp_path / "clap.json"
    ran = apollo("plan-diff", clip, clip, "--exit-code")
    assert ran.code == 0 and "same plan" in ran.out
    ran = apollo("plan-diff", clip, clap)
    assert ran.code == 0 and "clap_forward: only in the second" in ran.out
    ran = apollo("plan-diff", clip, clap, "--exit-code", "--json")
    found: dict[str, Any] = json.loads(ran.out)
    assert ran.code == 1 and found["is_same_plan"] is False
    assert found["only_before"] == ["clip_forward", "clip_backward"]
    assert apollo("plan-diff", clip, tmp_path / "absent.json").code == 2
    ran = apollo("plan-diff", clip, tmp_path)
    assert ran.code == 1 and "there is no plan in" in ran.err


def test_plan_diff_compares_dumps(
    model_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apollo: Apollo
) -> None:
    """Directories of `APOLLO_DUMP`, and single plans in them."""
    for name in ("first", "second"):
        torch._dynamo.reset()  # as in a process of its own
        monkeypatch.setenv("APOLLO_DUMP", str(tmp_path / name))
        assert apollo("explain", f"{model_file}:build", "--option", "device.units=1").code == 0
    ran = apollo("plan-diff", tmp_path / "first", tmp_path / "second", "--exit-code")
    assert ran.code == 0 and ran.out.count("same plan") == 2
    plan = tmp_path / "first" / "0_0_forward" / "plan.json"
    ran = apollo("plan-diff", plan, plan, "--json")
    (graph,) = json.loads(ran.out)["graphs"]
    assert ran.code == 0 and graph["before"] == graph["after"] and graph["before"]["name"] == "0/0 forward"


def test_bench_prints_a_table_and_refuses_wrong_numbers(
    model_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apollo: Apollo
) -> None:
    """What is measured is the harness's business; children find the target by its name."""
    asked: list[tuple[MeasuredTask, list[str]]] = []
    losses = {"inductor": 1.0}

    def measure(task: MeasuredTask, variants: Sequence[MeasuredVariant], **_: Any) -> Measurement:
        asked.append((task, [variant.name for variant in variants]))
        return measured(task, {each.name: 1_000_000 for each in variants}, tmp_path, rounds=5, losses=losses)

    monkeypatch.setattr(turns, "measure", measure)
    arguments = ["--variants", "eager,apollo", "--set", "batch=2", "--inference", "--dtype", "bfloat16"]
    ran = apollo("bench", f"{model_file}:build", *arguments)
    assert ran.code == 0 and "measured in bfloat16 on " in ran.out
    ((task, names),) = asked
    assert (task.builder, task.mode) == ("apollo_compile.tools.targets:load_target", "inference")
    assert (task.dtype, names) == ("bfloat16", ["eager", "apollo"])
    assert load_target(**task.arguments).inputs["image"].shape == (2, 64)
    losses["inductor"] = 1.5
    ran = apollo("bench", f"{model_file}:build", "--json")
    assert ran.code == 1 and len(json.loads(ran.out)["measurement"]["results"]) == 5
    assert "wrong numbers, more than 1e-03 from eager: inductor\n" in ran.err
    ran = apollo("bench", f"{model_file}:build", "--variants", "magic")
    assert ran.code == 2 and "unknown variant magic; known: eager" in ran.err


def test_doctor_prints_results(apollo: Apollo) -> None:
    """As lines, or as JSON."""
    lines, as_json = apollo("doctor"), apollo("doctor", "--json")
    assert "torch: 2." in lines.out and lines.code == as_json.code
    assert {finding["subject"] for finding in json.loads(as_json.out)} >= {"torch", "cores", "cache"}


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


def test_the_version_is_that_of_the_package(apollo: Apollo) -> None:
    """As other tools tell theirs."""
    assert apollo("--version")[:2] == (0, f"apollo_compile {apollo_compile.__version__}\n")


@pytest.mark.parametrize("command", ["explain", "report", "bench", "calibrate", "doctor", "plan-diff"])
def test_every_command_has_json_and_a_description(command: str, apollo: Apollo) -> None:
    """As the top of the file says."""
    ran = apollo(command, "--help")
    assert ran.code == 0 and "--json" in ran.out
    assert "?." not in ran.out and ".." not in ran.out.replace("...", "")
