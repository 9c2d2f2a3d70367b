"""Every file that is read back: whatever is in it, it is a valid object or the documented error."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apollo_compile import __version__
from apollo_compile.distributed.agreement import Agreement
from apollo_compile.distributed.ranks import Ranks
from apollo_compile.errors import ApolloError, ConfigError, InvariantError, PlanFileError, RankError, ReportFileError
from apollo_compile.ir import KernelKind
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
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.fingerprint import Fingerprint
from apollo_compile.target.lanes import lane_catalogue
from apollo_compile.target.profile import DeviceProfile
from apollo_compile.tools.cli import main
from tests.builders import chains, random_costs, random_graph, random_plan
from tests.faults.mutations import damaged_bytes, damaged_json
from tests.reports.reports import STATE, VERDICT, a_break, compile_graph, invent_run
from tests.store.test_history import a_finding

FUZZ = settings(max_examples=settings.default.max_examples * 3 // 2)

_rng = random.Random(0)
_graph = random_graph(_rng, 5)
_lanes = lane_catalogue(4)
_costs = random_costs(_rng, _graph, _lanes)

_FINGERPRINT = Fingerprint(device="a", driver=None, torch="2", cores=4, units=4)


@functools.cache
def _report() -> Report:
    compilation = _compilation()
    return Report(
        graphs=(summarize(compilation, invent_run(compilation)),),
        fallbacks=(("1/0", "why"),),
        verdicts=(("0/0", VERDICT),),
        breaks=(a_break(),),
        states=(STATE,),
    )


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


USES = {"plan": use_plan, "profile": use_profile, "report": use_report, "finding": use_finding}
"""Uses of all files that tell their format."""

each_use = pytest.mark.parametrize(("kind", "use"), [*USES.items(), ("generation", use_generation)])


@functools.cache
def content_of(kind: str) -> Any:
    """Return a valid content of a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{kind}.json"
        match kind:
            case "plan":
                save_plan(random_plan(_rng, _graph, _lanes, _costs), _graph, file)
            case "profile":
                file.write_text(format_profile(default_profile(4), fingerprint=_FINGERPRINT))
            case "report":
                file.write_text(_report().to_json())
            case "finding":
                History(file.parent).keep(file.stem, a_finding())
            case _:
                return {"format": 1, "generation": 7}
        return json.loads(file.read_text())


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


@each_use
def test_damaged_values_load_or_are_refused(kind: str, use: Callable[[Path], None]) -> None:
    """Values of other types, out of range, missing, doubled, in another order."""
    fuzz(use, damaged_json(content_of(kind)).map(str.encode), FUZZ)


@each_use
def test_damaged_bytes_load_or_are_refused(kind: str, use: Callable[[Path], None]) -> None:
    """Cut off, with other bytes, or something else."""
    few = settings(max_examples=settings.default.max_examples // 2)
    fuzz(use, damaged_bytes(json.dumps(content_of(kind)).encode()), few)


@pytest.mark.parametrize("use", [*USES.values(), use_generation])
def test_what_is_no_file_is_refused(use: Callable[[Path], None], tmp_path: Path) -> None:
    """Nothing, a folder, a pipe that nobody writes to, a device without end, a file of a terabyte."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    for path in (tmp_path / "nothing", tmp_path / "folder", tmp_path / "pipe", Path("/dev/zero"), tmp_path / "huge"):
        use(path)


LOADS: dict[str, Callable[[Path], object]] = {
    "plan": lambda file: load_plan(file, _graph, _lanes),
    "profile": load_profile,
    "report": Report.load,
    "finding": lambda file: History(file.parent).recall(file.stem),
}
"""Readers of each kind of file, as users call them."""


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("number", [0, 99, "1", None, 10**30])
def test_another_format_is_refused(kind: str, number: object, tmp_path: Path) -> None:
    """A file of an older or a later release; of a finding nobody is told, it is made again."""
    file = tmp_path / "file.json"
    file.write_text(json.dumps({**content_of(kind), "format": number}))
    if kind == "finding":
        assert LOADS[kind](file) is None
    else:
        with pytest.raises(ApolloError, match="format"):
            LOADS[kind](file)


def test_the_files_of_this_test_are_valid(tmp_path: Path) -> None:
    """Else the fuzzer would see nothing but refusals."""
    file = tmp_path / "file.json"
    for kind, load in LOADS.items():
        file.write_text(json.dumps(content_of(kind)))
        assert load(file) is not None
        USES[kind](file)


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
