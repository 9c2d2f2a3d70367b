"""Every file that is read back: whatever is in it, it is a valid object or the documented error."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apollo_compile import __version__
from apollo_compile.distributed.agreement import Agreement
from apollo_compile.distributed.ranks import Ranks
from apollo_compile.errors import ApolloError, ConfigError, InvariantError, PlanFileError, RankError, ReportFileError
from apollo_compile.ir import KernelKind, Observations, Standing, Verdict
from apollo_compile.ir.check import check_plan
from apollo_compile.json_form import to_json
from apollo_compile.observe import StageRunner
from apollo_compile.passes.plan import make_plan
from apollo_compile.pipeline import CostedPlan
from apollo_compile.reports.diff import compare, sides_of_plans
from apollo_compile.reports.report import Report
from apollo_compile.reports.summary import summarize
from apollo_compile.store.files import FileState
from apollo_compile.store.history import History
from apollo_compile.store.plan_file import check_fits, load_plan, read_plans, save_plan
from apollo_compile.store.profiles import default_profile, format_profile, inspect_profile, load_profile
from apollo_compile.target.compilation import Compilation, Finding
from apollo_compile.target.fingerprint import Fingerprint
from apollo_compile.target.lanes import lane_catalogue
from apollo_compile.target.profile import DeviceProfile
from apollo_compile.tools.cli import main
from tests.builders import chains, random_costs, random_graph, random_plan
from tests.faults.mutations import damaged_bytes, damaged_json
from tests.reports.reports import a_break, compile_graph, invent_run

FUZZ = settings(max_examples=settings.default.max_examples * 3 // 2)

_rng = random.Random(0)
_graph = random_graph(_rng, 5)
_lanes = lane_catalogue(4)
_costs = random_costs(_rng, _graph, _lanes)


@functools.cache
def _plan_content() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        save_plan(random_plan(_rng, _graph, _lanes, _costs), _graph, file)
        return json.loads(file.read_text())


@functools.cache
def _profile_content() -> Any:
    return json.loads(format_profile(default_profile(4), fingerprint=_FINGERPRINT))


_FINGERPRINT = Fingerprint(device="a", driver=None, torch="2", cores=4, units=4)


@functools.cache
def _report() -> Report:
    compilation = _compilation()
    standings = (
        Standing(name="plan", step_ns=5.0, ratio=1.0, num_rounds=5),
        Standing(name="Inductor", step_ns=6.0, ratio=1.2, num_rounds=5),
    )
    return Report(
        graphs=(summarize(compilation, invent_run(compilation)),),
        fallbacks=(("1/0", "why"),),
        verdicts=(("0/0", Verdict(standings=standings, num_steps=30)),),
        breaks=(a_break(),),
    )


@functools.cache
def _report_content() -> Any:
    return json.loads(_report().to_json())


def use_plan(path: Path) -> None:
    """Load, pin and compare the plan of a file."""
    assert main(["plan-diff", str(path), str(path)]) in (0, 1, 2)
    try:
        plan = load_plan(path, _graph, _lanes)
    except PlanFileError:
        pass
    else:
        check_plan(make_plan(_graph, _costs, lanes=_lanes, pinned=plan), _graph, _costs)
    try:
        plans = read_plans(path)
    except PlanFileError:
        return
    str(compare(sides_of_plans(plans), sides_of_plans(plans)))


def use_profile(path: Path) -> None:
    """Load the profile of a file and ask it for rates."""
    found = inspect_profile(path, _FINGERPRINT)
    assert (found.content is None) == (found.state is not FileState.CURRENT)
    try:
        profile: DeviceProfile = load_profile(path)
    except ConfigError:
        assert found.state in (FileState.DAMAGED, FileState.MISSING)
        return
    for size in (0, 1, 10**6, 10**15):
        for kind in KernelKind:
            assert profile.flops_per_s(kind, "float32", size, profile.units) > 0
        assert profile.near_rate(size, 1) > 0


def use_report(path: Path) -> None:
    """Load the report of a file, compare it, and render it in every form."""
    assert main(["plan-diff", str(path), str(path)]) in (0, 1, 2)
    try:
        report = Report.load(path)
    except ReportFileError:
        return
    assert Report.from_json(report.to_json()) == report
    str(report)
    report.to_html().encode()
    report.to_trace().encode()
    str(report.diff(_report()))
    for graph in report.graphs:
        for segment in graph.segments:
            report.why(segment.name)


@functools.cache
def _finding() -> Finding:
    return Finding(
        observations=Observations(),
        plan=random_plan(random.Random(1), _graph, _lanes, _costs),
        variant="plan",
        verdict=_report().verdicts[0][1],
    )


@functools.cache
def _finding_content() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        History(Path(folder)).keep("finding", _finding())
        return json.loads((Path(folder) / "finding.json").read_text())


def use_finding(path: Path) -> None:
    """Recall the finding of a file, and take its plan if it is one for the graph."""
    finding = History(path.parent).recall(path.stem)
    if finding is None:
        return
    str(finding.verdict)
    with contextlib.suppress(PlanFileError, InvariantError):
        check_fits(finding.plan, _graph, _lanes, "the plan")
        check_plan(finding.plan, _graph, _costs)


def use_generation(path: Path) -> None:
    """Read the number of the bundles that are right; after a new beginning it is another one."""
    folder = path.parent / "history"
    folder.mkdir(exist_ok=True)
    link = folder / "mine.generation"
    link.unlink(missing_ok=True)
    link.symlink_to(path)
    history = History(folder)
    number = history.generation("mine")
    assert isinstance(number, int)
    history.begin_generation("mine")
    assert history.generation("mine") != number and history.generation("another") == 0


Loader = tuple[Callable[[Path], None], Callable[[], Any]]


def loaders() -> dict[str, Loader]:
    """Return every use of a file that tells its format, with a valid content."""
    return {
        "plan": (use_plan, _plan_content),
        "profile": (use_profile, _profile_content),
        "report": (use_report, _report_content),
        "finding": (use_finding, _finding_content),
    }


def _of_each(kinds: Mapping[str, Loader]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("use", "content"), list(kinds.values()), ids=list(kinds))


each_loader = _of_each({**loaders(), "generation": (use_generation, lambda: {"format": 1, "generation": 7})})


def fuzz(use: Callable[[Path], None], raw: st.SearchStrategy[bytes], config: settings) -> None:
    """Use files with such contents."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file.json"

        @config
        @given(raw)
        def check(raw: bytes) -> None:
            file.write_bytes(raw)
            use(file)

        check()


@each_loader
def test_damaged_values_load_or_are_refused(use: Callable[[Path], None], content: Callable[[], Any]) -> None:
    """Values of other types, out of range, missing, doubled, in another order."""
    fuzz(use, damaged_json(content()).map(str.encode), FUZZ)


@each_loader
def test_damaged_bytes_load_or_are_refused(use: Callable[[Path], None], content: Callable[[], Any]) -> None:
    """Cut off, with other bytes, or something else."""
    few = settings(max_examples=settings.default.max_examples // 2)
    fuzz(use, damaged_bytes(json.dumps(content()).encode()), few)


@each_loader
def test_what_is_no_file_is_refused(use: Callable[[Path], None], content: Callable[[], Any], tmp_path: Path) -> None:
    """Nothing, a folder, a pipe that nobody writes to, a device without end, a file of a terabyte."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    for path in (tmp_path / "nothing", tmp_path / "folder", tmp_path / "pipe", Path("/dev/zero"), tmp_path / "huge"):
        use(path)


@pytest.mark.parametrize("kind", loaders())
@pytest.mark.parametrize("number", [0, 99, "1", None, 10**30])
def test_another_format_is_refused(kind: str, number: object, tmp_path: Path) -> None:
    """A file of an older or a later release; of a finding nobody is told, it is made again."""
    file = tmp_path / "file.json"
    loads = {
        "plan": lambda: load_plan(file, _graph, _lanes),
        "profile": lambda: load_profile(file),
        "report": lambda: Report.load(file),
    }
    _, content = loaders()[kind]
    file.write_text(json.dumps({**content(), "format": number}))
    if kind == "finding":
        assert History(tmp_path).recall("file") is None
    else:
        with pytest.raises(ApolloError, match="format"):
            loads[kind]()


def test_the_files_of_this_test_are_valid(tmp_path: Path) -> None:
    """Else the fuzzer would see nothing but refusals."""
    file = tmp_path / "file.json"
    loads = (
        lambda: load_plan(file, _graph, _lanes),
        lambda: load_profile(file),
        lambda: Report.load(file),
        lambda: History(tmp_path).recall("file") or pytest.fail("nothing was recalled"),
    )
    for (use, content), load in zip(loaders().values(), loads, strict=True):
        file.write_text(json.dumps(content()))
        load()
        use(file)


class _Store:
    """A store in which another rank has left one text under every key with a certain word."""

    def __init__(self, word: str, text: str) -> None:
        self._word, self._content = word, f"{__version__}\n{text}".encode("utf-8", "surrogatepass")

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        return self._content if f"/{self._word} " in key else desired.encode()


@functools.cache
def _compilation() -> Compilation:
    return compile_graph(chains([100_000] * 3, [100_000] * 3, efficiency=0.6)[0])


@functools.cache
def _decision_content() -> Any:
    return to_json(CostedPlan(costs=_compilation().costs, plan=_compilation().plan))


@FUZZ
@given(st.deferred(lambda: damaged_json(_decision_content())))
def test_a_damaged_plan_of_another_rank_is_legal_or_stops_the_rank(text: str) -> None:
    """It is checked against the graph as a plan of this rank is; if it is none, nobody can tell what the others run."""
    own = _compilation()
    try:
        settled = Agreement(Ranks(_Store("plan", text)), topic="graph").settle(own, StageRunner())
    except RankError:
        return
    if settled is not None:
        check_plan(settled.plan, settled.partition.graph, settled.costs)
