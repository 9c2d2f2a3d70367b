"""What README, CONTRIBUTING and docs say can be done works: Python, commands, links, options."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from apollo_compile.config import Config, known_options
from apollo_compile.reports.report import Report
from apollo_compile.tools.cli import main
from tests.end_to_end.test_examples import BODIES, use_bodies
from tests.test_commands import COMMANDS, LONG

ROOT = Path(__file__).parents[2]
spec_of_figures = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
assert spec_of_figures is not None and spec_of_figures.loader is not None
figures = importlib.util.module_from_spec(spec_of_figures)
spec_of_figures.loader.exec_module(figures)
PAGES = sorted((ROOT / "docs").glob("*.md"))
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
BENCHMARKS = ROOT / "benchmarks" / "README.md"


class Block(NamedTuple):
    """A block of code in a page."""

    language: str
    title: str
    code: str


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in order."""
    found = re.findall(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(*block) for block in found]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory to work in, which has the docs and nothing else."""
    monkeypatch.chdir(tmp_path)
    modules = set(sys.modules)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    yield tmp_path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    sys.path[:] = [place for place in sys.path if place != str(tmp_path)]


def _pages() -> list[Any]:
    """Pages that start processes, or show many defects of Inductor's, take half a minute each.

    The recipes of stacks.md are compared with eager's in `test_stacks.py`.
    """
    is_long = {"cluster", "commands", "distributed", "loader", "pipelines", "robustness"}
    marks = {page: pytest.mark.soak if page.stem in is_long else () for page in PAGES if page.stem != "stacks"}
    return [pytest.param(page, id=page.stem, marks=mark) for page, mark in marks.items()]


@pytest.mark.slow
@pytest.mark.parametrize("bodies", BODIES)
@pytest.mark.parametrize("page", _pages())
def test_the_code_of_the_docs_runs(
    page: Path, bodies: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order: Python in one namespace, files where they have a title, commands with exit code 0."""
    use_bodies(bodies, monkeypatch)
    module = ModuleType(page.stem)
    monkeypatch.setitem(sys.modules, page.stem, module)  # Dynamo asks for the module of a function that it inlines
    for block in blocks_of(page):
        if block.title:
            (folder / block.title).write_text(block.code)
        elif block.language == "python":
            exec(compile(block.code, f"{page.name}", "exec"), vars(module))
        elif block.language == "console":
            for line in _console_lines(block):
                program, *arguments = shlex.split(line.removeprefix("$ "))
                assert line.startswith("$ ")
                if program == "torchrun":
                    assert "2 ranks have " in _run_torchrun(arguments, folder)
                    continue
                assert program == "apollo"
                assert main(arguments) == 0, (line, capsys.readouterr().err)
        else:
            assert block.language in ("text", ""), f"nothing runs blocks of {block.language}"


def test_reports_in_the_docs_print_what_the_page_shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that text follows, line by line and in this order; `...` stands for lines left out."""
    blocks = blocks_of(ROOT / "docs" / "three-reports.md")
    shown = [(a, b) for a, b in itertools.pairwise(blocks) if (a.language, b.language) == ("console", "text")]
    assert len(shown) == 4
    for command, text in shown:
        assert main(shlex.split(command.code.removeprefix("$ apollo "))) == 0
        printed = iter(capsys.readouterr().out.splitlines())
        for line in text.code.splitlines():
            assert line == "..." or line in printed, f"{command.code.strip()} does not print, or not there: {line}"


def test_texts_of_reports_elsewhere_are_those_of_the_same_run() -> None:
    """Some have remarks behind their lines; `...` begins lines that stand for others."""
    printed = str(Report.load(ROOT / "docs" / "reports" / "clip.json")).splitlines()
    for page in ("autotuning.md", "reading-a-report.md"):
        texts = [block.code for block in blocks_of(ROOT / "docs" / page) if block.code.startswith("0/0")]
        lines = [line for text in texts for line in text.splitlines() if line and not line.startswith("...")]
        assert len(lines) > 5
        for line in lines:
            assert any(line == whole or re.match(rf"{re.escape(whole)} {{2,}}\S", line) for whole in printed), line


def _run_torchrun(arguments: list[str], folder: Path) -> str:
    """Return what the ranks print; they are ended if they hang."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            printed, errors = process.communicate(timeout=900)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its workers; a kill would leave them behind
            printed, errors = process.communicate()
            pytest.fail(f"the ranks hang: {errors}")
    assert process.returncode == 0, errors
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, pytest.param(4, marks=pytest.mark.soak)])
def test_the_code_of_the_readme_runs(layers: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two towers train on nothing but torch until that is settled, and the report begins with the verdict."""
    names: dict[str, object] = {"__name__": "readme"}
    before = set(sys.modules)
    (code,) = (block.code for block in blocks_of(README) if block.language == "python")
    as_written = "layers: int = 4"
    assert code.count(as_written) == 1
    exec(compile(code.replace(as_written, f"layers: int = {layers}"), "README.md", "exec"), names)
    progress, _, printed = capsys.readouterr().out.partition("\n")
    assert re.match(r"\rmeasuring, about \d+ steps left", progress)
    assert re.match(r"settled after \d+ measured steps: \d\.\d\dx as fast as .+ \(.+\).*\n", printed)
    assert all(f"{tower}.layers.{layers - 1}" in printed for tower in ("image", "text"))
    assert (folder / "report.html").exists()
    assert "transformers" not in set(sys.modules) - before
    assert set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)) == {"torch", "apollo_compile"}


def test_tables_and_the_plot_are_those_of_the_results() -> None:
    """As `python docs/figures.py` makes them."""
    of_readme = (figures.table(), figures.table_of_steps(), figures.table_on_a_gpu())
    for page, table in (*((README, table) for table in of_readme), (figures.BENCHMARKS, figures.predictions())):
        text = page.read_text()
        assert figures.with_table(text, table) == text and table in text
    assert figures.PLOT.read_text() == figures.plot()


def test_figures_of_the_readme_are_in_the_results() -> None:
    """Times, speed-ups and intervals; what stands in code is an example."""
    text = re.sub(r"^```.*?^```$|`[^`]*`", "", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = set(re.findall(figures.NUMBER, text))
    assert len(found) > 60
    assert found <= figures.known_numbers(), found - figures.known_numbers()
    fastest, *_, slowest = figures.first_steps()
    told = f"The first step takes {fastest:.2f} to {slowest:.2f} times as long as with Inductor"
    assert told in " ".join(text.split())


OPTION = r"`(?:\w+=)?\"?((?:plan|runtime|device|debug|inductor)\.[a-z_]+)\b[^`(/]*`"


@pytest.mark.parametrize("page", [README, CONTRIBUTING, *PAGES], ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_options_variables_and_flags_that_pages_name_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options of the backend, APOLLO_... variables, and what inline commands of apollo are given."""
    text = page.read_text()
    options = {name for name in re.findall(OPTION, text) if not name.startswith("inductor.")}
    assert options <= set(known_options()), options - set(known_options())
    variables = set(re.findall(r"\bAPOLLO_[A-Z_]+\b", text)) - {"APOLLO_ACCEPT", "APOLLO_SANITIZE"}
    known = (ROOT / "apollo_compile" / "config.py").read_text()
    assert all(name in known for name in variables), variables
    for command, given in re.findall(r"\bapollo ([a-z][a-z-]+)\b([^`\n]*)", text):
        flags = set(re.findall(r"(?<!\S)--[a-z-]+", given))
        if flags and command not in ("pipeline", "cluster"):  # which have commands of their own
            with pytest.raises(SystemExit):
                main([command, "--help"])
            assert flags <= set(re.findall(r"--[a-z-]+", capsys.readouterr().out)), f"apollo {command} {given}"


def test_what_is_looked_for_in_pages_is_found() -> None:
    """Blocks of code, and names that do not exist; else the tests of these would pass on nothing."""
    languages = [block.language for page in PAGES for block in blocks_of(page)]
    assert languages.count("python") > 10 and languages.count("console") > 5
    named = '`plan.planer`, `options={"plan.compile_share": 0}` and `--option runtime.body=x`'
    assert re.findall(OPTION, named) == ["plan.planer"]
    assert len([name for page in PAGES for name in re.findall(OPTION, page.read_text())]) > 30


def test_the_landing_page_fits_on_few_screens() -> None:
    """Tables and stories are on pages of their own."""
    assert len(README.read_text().splitlines()) <= 164


NEVER_WHOLE = {
    "benchmarks.arena": "needs an artifact of others; tests/benchmarks/test_arena.py",
    "benchmarks.gpu_suite": "needs a GPU; tests/benchmarks/gpu_suite/test_main.py",
    "benchmarks.sweep": "takes an hour; tests/benchmarks/test_sweep.py",
    "benchmarks.robustness": "reads what the sweep wrote; tests/benchmarks/test_sweep.py",
}
"""Modules of documented commands that no test runs whole: why, and the test that runs what they are made of."""


def test_documented_commands_run() -> None:
    """Those of apollo in the docs, which a test above runs; others at small sizes, in .ci/run or in `make soak`."""
    command = r"(?:make|apollo|(?:\.venv/bin/)?python -m) [a-z]"
    found = []
    for page in (README, CONTRIBUTING, BENCHMARKS, *PAGES):
        plain = [line for block in blocks_of(page) if block.language == "" for line in block.code.splitlines()]
        found += [line.split("#")[0].strip() for line in plain if re.match(command, line)]
        found += re.findall(rf"`({command}[^`]*)`", page.read_text())
    lines = [line.removeprefix(".venv/bin/") for line in found]
    assert len(lines) > 20
    recipes = (ROOT / "Makefile").read_text().replace("\t$(BIN)/", "").replace("\t$(MAKE)", "make")
    script = (ROOT / ".ci" / "run").read_text().replace(".venv/bin/", "") + recipes
    tested = {command.split()[0] for command in COMMANDS + LONG}
    tested.add("demo")  # tests/benchmarks/test_demo.py
    documented = {line.split()[2] for page in PAGES for block in blocks_of(page) for line in _console_lines(block)}
    documented.add("calibrate")  # test_cli.py runs it: its exit code depends on neighbours
    for line in lines:
        program, *arguments = shlex.split(line)
        if program == "apollo":
            assert arguments[0] in documented, line
            continue
        if program == "make":
            called = rf"make\b.* {arguments[0]}"
            (recipe,) = re.findall(rf"^{arguments[0]}:.*\n(.*)", recipes, re.MULTILINE)
            is_part_of_check = re.search(rf"^check:.* {arguments[0]}$", recipes, re.MULTILINE)
            is_tested = any(f"-m benchmarks.{module} " in recipe for module in tested)
            assert is_part_of_check or is_tested or re.search(rf"^{called}\b", script, re.MULTILINE), line
            continue
        is_run = re.search(rf"^{re.escape(' '.join([program, *arguments[:2]]))}\b", script, re.MULTILINE)
        if arguments[1] == "pytest":
            assert is_run, line
            continue
        module = arguments[1]
        if module in NEVER_WHOLE:
            test = (ROOT / NEVER_WHOLE[module].split("; ")[1]).read_text()
            assert not is_run and re.search(rf"benchmarks[. ].*\b{module.removeprefix('benchmarks.')}\b", test)
        else:
            assert is_run or module.removeprefix("benchmarks.") in tested, line
        file = ROOT / f"{module.replace('.', '/')}.py"
        code = (file if file.exists() else file.with_suffix("") / "__main__.py").read_text() + '"--help"'
        options = [part.split("=")[0] for part in arguments[2:] if part.startswith("--")]
        assert all(f'"{option}"' in code for option in options), line


def _console_lines(block: Block) -> list[str]:
    return block.code.splitlines() if block.language == "console" else []


@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("*.md")), BENCHMARKS, *PAGES], ids=lambda page: f"{page.parent.name}-{page.stem}"
)
def test_links_lead_somewhere(page: Path) -> None:
    """To files of the repository, and to headings of pages; those that leave it are not followed."""
    for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, link


def test_the_page_of_options_has_every_option_with_its_default() -> None:
    """And the variables of the environment."""
    text = (ROOT / "docs" / "options.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.+?) \|", text, re.MULTILINE))
    assert set(rows) == set(known_options())
    for name, shown in rows.items():
        value: object = Config()
        for part in name.split("."):
            value = getattr(value, part)
        expected = "user's cache" if name == "device.cache" else f"`{value!r}`".replace("'", '"')
        assert shown == expected, name
    variables = re.findall(r"^\| (APOLLO_\w+) ", (ROOT / "apollo_compile" / "config.py").read_text(), re.MULTILINE)
    assert all(f"`{variable}=" in text for variable in variables) and len(variables) == 6


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """And fetches nothing from elsewhere; files outside docs that pages link to are part of it."""
    done = _build_the_site(ROOT, tmp_path)
    assert (done.returncode, re.findall("WARNING.*", done.stdout)) == (0, [])
    assert "fonts.googleapis" not in (tmp_path / "index.html").read_text()
    assert 'href="CONTRIBUTING.html"' in (tmp_path / "architecture.html").read_text()
    assert (tmp_path / "CONTRIBUTING.html").exists() and (tmp_path / "benchmarks" / "results" / "lanes.json").exists()


def test_the_site_shows_a_report_as_it_looks_now(tmp_path: Path) -> None:
    """In a site of one page with another report, whose picture is not the one that is kept."""
    pytest.importorskip("playwright")
    if shutil.which("chromium") is None:
        pytest.skip("there is no browser")
    (tmp_path / "docs" / "reports").mkdir(parents=True)
    for name in ("hooks.py", "figures.py", "report.png"):
        shutil.copy(ROOT / "docs" / name, tmp_path / "docs")
    shutil.copy(ROOT / "docs" / "reports" / "vit.json", tmp_path / "docs" / "reports" / "clip.json")
    (tmp_path / "docs" / "index.md").write_text("![A report](report.png)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: one page\nhooks: [docs/hooks.py]\n")
    (tmp_path / "apollo_compile").symlink_to(ROOT / "apollo_compile")
    done = _build_the_site(tmp_path, tmp_path / "site")
    assert done.returncode == 0, done.stdout
    shown, kept = (folder / "report.png" for folder in (tmp_path / "site", ROOT / "docs"))
    assert shown.read_bytes().startswith(b"\x89PNG") and shown.read_bytes() != kept.read_bytes()


def test_the_site_does_not_build_with_a_dead_link(tmp_path: Path) -> None:
    """In a site of one page, whose links to a page, a file outside docs and a heading lead nowhere."""
    yaml = pytest.importorskip("yaml")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    kept = {name: settings[name] for name in ("site_name", "strict", "hooks", "exclude_docs", "validation")}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(kept))
    for folder in ("docs", "benchmarks"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "docs" / "hooks.py", tmp_path / "docs")
    (tmp_path / "CONTRIBUTING.md").write_text("# Contributing\n")
    dead = ["nothing.md", "../benchmarks/nothing.json", "index.md#nothing", "../CONTRIBUTING.md#nothing"]
    dead += ["../benchmarks", "nothing.png"]
    lines = [f"{'!' * link.endswith('png')}[dead]({link})\n\n" for link in dead]
    (tmp_path / "docs" / "index.md").write_text("".join(lines))
    done = _build_the_site(tmp_path, tmp_path / "site", PATH="")  # no browser takes a picture
    assert done.returncode == 1
    assert f"Aborted with {len(dead)} warnings in strict mode" in done.stdout, done.stdout


def _build_the_site(root: Path, site: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command of `make docs`."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module)
    makefile = (ROOT / "Makefile").read_text()
    (recipe,) = re.findall(r"^docs:.*\n\tNO_MKDOCS_2_WARNING=1 \$\(BIN\)/(mkdocs .+)", makefile, re.M)
    command = [sys.executable, "-m", *recipe.split(), "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", **variables}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, cwd=root, env=environment, check=False, **both)


@pytest.mark.slow
def test_torchs_own_switches_show_what_apollo_did(tmp_path: Path) -> None:
    """`TORCH_LOGS` by the package's name; `TORCH_TRACE` with an artifact per plan, which tlparse lists in its page."""
    code = (
        "import torch; from apollo_compile.tools.explain import explain\n"
        "model = torch.nn.Linear(8, 8)\n"
        "explain(model, (torch.ones(2, 8),), options={'device.units': 1})\n"
        "import logging; logging.getLogger('apollo_compile.session').debug('heard')\n"
    )
    environment = {**os.environ, "TORCH_LOGS": "+apollo_compile", "TORCH_TRACE": str(tmp_path / "trace")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert "heard" in done.stderr
    (trace,) = (tmp_path / "trace").iterdir()
    assert '"name": "apollo_0_0_forward", "encoding": "string"' in trace.read_text()
    tlparse = shutil.which("tlparse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if tlparse is None:
        pytest.skip("tlparse is not installed")
    page = tmp_path / "page"
    subprocess.run([tlparse, str(trace), "-o", str(page), "--no-browser"], capture_output=True, check=True)
    (artifact,) = page.glob("*/apollo_0_0_forward_*.txt")
    assert "plan 0/0 forward (serial)" in artifact.read_text()
    assert f"{artifact.parent.name}/{artifact.name}" in (page / "index.html").read_text()
