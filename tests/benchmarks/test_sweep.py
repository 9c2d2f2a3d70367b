"""The correctness sweep: its comparisons, its file, and the tables of its page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch._dynamo.exc import BackendCompilerFailed  # noqa: E402

from benchmarks import op_infos, robustness, sweep  # noqa: E402
from benchmarks.harness.results import load_results, save_results  # noqa: E402
from benchmarks.sweep import Case, Result, find_difference  # noqa: E402
from tests.faults.test_table import NO_FAULTS  # noqa: E402

EAGER = {"loss of step 0": torch.tensor(2.0), "gradient of w in step 0": torch.tensor([1.0, -3.0])}
EXACT = {name: value.double() + 1e-7 for name, value in EAGER.items()}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("gradient of w in step 0", torch.tensor([1.0, -3.0 + 1e-6]), None),
        ("gradient of w in step 0", torch.tensor([1.001, -3.0]), "gradient of w in step 0: off by 1.0e-03"),
        ("gradient of w in step 0", torch.tensor([1.0, float("nan")]), "gradient of w in step 0: off by"),
        ("gradient of w in step 0", None, "None instead of"),
        ("gradient of w in step 0", torch.tensor([1.0, -3.0]).double(), "torch.float64"),
        ("loss of step 0", torch.tensor(2.1), "loss of step 0: off by 1.0e-01"),
    ],
)
def test_a_difference_beyond_rounding_is_named(name: str, value: torch.Tensor | None, said: str | None) -> None:
    """Rounding as eager's own is allowed; other numbers, types, NaN and missing gradients are not."""
    found = find_difference({**EAGER, name: value}, EAGER, EXACT, 1e-5)
    if said is None:
        assert found is None
    else:
        assert found is not None and found.what == name and said in found.text


def test_an_error_of_eager_in_one_step_is_allowed_in_later_ones() -> None:
    """Not in earlier ones."""
    exact = {f"loss of step {step}": torch.tensor(1.0, dtype=torch.float64) for step in range(3)}
    eager = {name: torch.tensor(1.1 if "1" in name else 1.0) for name in exact}
    assert find_difference({**eager, "loss of step 2": torch.tensor(1.3)}, eager, exact, 1e-5) is None
    assert find_difference({**eager, "loss of step 0": torch.tensor(1.3)}, eager, exact, 1e-5) is not None


@pytest.mark.parametrize(
    ("eager", "alike", "other"),
    [
        (torch.tensor([True, False]), torch.tensor([True, False]), torch.tensor([True, True])),
        (torch.tensor(3), torch.tensor(3), torch.tensor(4)),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]), torch.tensor([1 + 3j])),
        tuple(torch.tensor([value], dtype=torch.uint64) for value in (7, 7, 8)),
        (None, torch.zeros(2), torch.ones(2)),
    ],
    ids=["masks", "counters", "spectra", "hashes", "None"],
)
def test_values_of_all_types_are_compared(eager: torch.Tensor | None, alike: torch.Tensor, other: torch.Tensor) -> None:
    """Zeros are as good as None: AOTAutograd gives them to inputs of unused outputs."""
    name = "gradient of v in step 0"
    assert find_difference({name: alike}, {name: eager}, None, 1e-5) is None
    assert find_difference({name: other}, {name: eager}, None, 1e-5) is not None


def _off(**sizes: float) -> dict[str, torch.Tensor]:
    return {name: value + sizes.get(name[:4], 0.0) for name, value in EAGER.items()}


@pytest.mark.parametrize(
    ("ours", "its", "is_alike"),
    [
        ({"loss": 0.4}, {"loss": 0.4}, True),
        ({"loss": 0.4}, {"loss": 0.3}, True),
        ({"loss": 0.4}, {"loss": 0.1}, False),
        ({"loss": 0.4}, {"grad": 0.4}, False),
        ({"loss": 0.4}, {"loss": 0.3, "grad": 9.0}, True),
        ({"loss": float("nan")}, {"loss": 0.4}, False),
        ({"loss": float("nan")}, {"loss": float("nan")}, True),
        ({"loss": 0.4}, {}, False),
    ],
)
def test_a_difference_is_inductors_where_inductor_alone_is_off_at_the_same_number(
    ours: dict[str, float], its: dict[str, float], is_alike: bool
) -> None:
    """By at least half as much; its errors in other numbers are no excuse."""
    problem, rival = (find_difference(_off(**sizes), EAGER, EXACT, 1e-5) for sizes in (ours, its))
    assert problem is not None
    assert problem.is_also_in(rival) == is_alike
    if is_alike:
        assert rival is not None and rival.at(problem.what).startswith("loss of step 0: off by")


def test_an_error_is_inductors_where_inductor_alone_raises_one_of_the_same_type() -> None:
    """Of its cause too, where Dynamo's error only says which backend it was; an error is no difference."""
    number = find_difference(_off(loss=0.4), EAGER, EXACT, 1e-5)
    assert number is not None
    value, other, key = map(sweep.problem_of, (ValueError("one"), ValueError("two"), KeyError("one")))
    assert value.is_also_in(other) and other.text == "ValueError: two"
    assert not value.is_also_in(key) and not value.is_also_in(number) and not number.is_also_in(value)
    failed = [BackendCompilerFailed(torch.compile, error, None) for error in (ValueError("one"), KeyError("two"))]
    value, key = map(sweep.problem_of, failed)
    assert value.is_also_in(value) and not value.is_also_in(key)


def test_settings_rotate_over_models_and_meet_in_few() -> None:
    """Every model gets one, all but the plain one; of few, every precision and both modes meet every optimizer."""
    names = list(sweep.model_names())
    cases, few = sweep.rotate(names), sweep.rotate_few()
    assert [case.model for case in cases] == names and len(names) >= 60
    settings = {replace(case, model="") for case in cases}
    assert len(settings) == len(sweep.PRECISIONS) * len(sweep.OPTIMIZERS) * len(sweep.MODES) - 1
    assert Case(model="") not in settings and Case(model=few[0].model) not in few
    assert {(case.precision, case.optimizer) for case in few} == set(product(sweep.PRECISIONS, sweep.OPTIMIZERS))
    assert {(case.optimizer, case.mode) for case in few} == set(product(sweep.OPTIMIZERS, sweep.MODES))
    assert {case.bodies for case in few} == {"native"} and {case.model for case in few} <= set(names)


def test_results_are_read_back_and_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was interrupted goes on where it was; a failed case is the exit code."""
    known = [
        Result(case=Case(model="bert"), outcome="fell back", num_graphs=1, reasons=("a reason",)),
        Result(case=Case(model="clip"), outcome="failed", problem="the process hung", commit="abc"),
    ]
    file = tmp_path / "sweep.json"
    save_results(file, known)
    assert load_results(file, Result) == known
    assert sweep.main(["--only", "bert,clip", "--json", str(file)]) == 1
    assert "fell back 1, inductor 0, failed 1" in capsys.readouterr().out


def test_the_page_has_what_the_results_say() -> None:
    """The tables of docs/robustness.md are made by `python -m benchmarks.robustness`, and nothing in them failed."""
    page = robustness.PAGE.read_text(encoding="utf-8")
    assert robustness.render(page) == page
    results = [*load_results(robustness.SWEEP, Result), *load_results(robustness.OP_INFOS, op_infos.Result)]
    assert all(result.outcome != "failed" and result.commit for result in results)
    lines = json.loads(robustness.TESTS.read_text())
    assert all(line["outcome"] == "passed" for line in lines.values())
    for file, _, test in (line.partition("::") for line in lines):
        assert f"\ndef {test.partition('[')[0]}(" in (robustness.PAGE.parents[1] / file).read_text(encoding="utf-8"), (
            f"there is no {test} in {file} any more"
        )


def test_reasons_that_differ_in_details_count_as_one() -> None:
    """Numbers of graphs, sizes and errors are details; a test that passed with a reason fell back."""
    tests = [
        {"section": "Faults", "subject": subject, "outcome": "passed", "commit": "abc", "reasons": [reason]}
        for subject, reason in {
            "cut": "cannot read the plan of graph3_forward from plan.json: line 1",
            "overwritten": "cannot read the plan of graph17_backward from plan.json: line 9",
            "undisturbed": "nothing to gain: of its 1 segment, predicted to take 4.46 ms in turn, ...",
        }.items()
    ]
    ran = {"section": "Values", "subject": "aliases", "outcome": "passed", "commit": "abc", "segments": 2, "lanes": 0}
    lines = [*map(robustness.line_of_test, tests), robustness.line_of_test(ran)]
    assert [line.outcome for line in lines] == ["fell back"] * 3 + ["passed"]
    assert robustness.format_reasons(lines).splitlines()[2:] == [
        "| Faults | fell back | cannot read the plan of a graph from plan.json | 2 | `cut`, `overwritten` |",
        "| Faults | fell back | nothing to gain | 1 | `undisturbed` |",
    ]
    counts = robustness.format_counts(lines).splitlines()[2:]
    assert counts == ["| Faults | 3 | 0 | 0 | 0 | 3 | 0 | 0 | abc |", "| Values | 1 | 1 | 0 | 1 | 0 | 0 | 0 | abc |"]


SEMANTICS = ("special_operators", "values", "training_loops", "semantics")


def test_every_test_of_semantics_and_every_fault_has_a_line() -> None:
    """And every line a commit; a test without one would count nowhere."""
    root = robustness.PAGE.parents[1]
    lines = json.loads(robustness.TESTS.read_text())
    faults = [path for path in sorted((root / "tests/faults").glob("test_*.py")) if path.name != "test_table.py"]
    for file in [*(root / f"tests/end_to_end/test_{name}.py" for name in SEMANTICS), *faults]:
        tests = set(re.findall(r"^def (test_\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE)) - NO_FAULTS
        wanted = {f"{file.relative_to(root)}::{name}" for name in tests}
        assert wanted and wanted <= lines.keys(), f"no lines of {sorted(wanted - lines.keys())}: pytest --robustness"
    assert all(line["commit"] for line in lines.values())
