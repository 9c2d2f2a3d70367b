"""Operators and modules of torch's own tests: which samples are taken, what is compared, and how a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("expecttest")

from benchmarks import op_infos  # noqa: E402
from benchmarks.harness.results import load_results, save_results  # noqa: E402
from benchmarks.op_infos import MAX_SAMPLES, Case, Result, Several  # noqa: E402


def test_a_few_operators_and_modules_run_in_segments_as_in_eager() -> None:
    """Forward and backward; `make soak` runs all of them. What torch's tests set up is left to a process of its own."""
    for result in op_infos.run_cases([Case(kind=kind, name=name) for kind, name in op_infos.FEW], timeout_s=600.0):
        assert (result.outcome, result.problem, result.reasons) == ("passed", "", ()), op_infos.format_result(result)
        assert result.num_in_segments == result.num_graphs == 2, "a forward and a backward"
        assert 2 <= result.num_samples <= MAX_SAMPLES
        assert result.num_on_lanes or torch.get_num_threads() < 2


def test_samples_are_computed_and_compared_each_on_its_own() -> None:
    """Outputs, gradients, what the inputs are afterwards, and what is no number."""
    x, y = torch.ones(2, requires_grad=True), torch.ones(3)

    def function(x: torch.Tensor, *, name: str) -> tuple[torch.Tensor, str]:
        return x * 2, name

    samples = [op_infos.sample_of(function, (tensor,), {"name": name}) for tensor, name in ((x, "a"), (y, "b"))]
    numbers = op_infos.run(Several(samples))
    assert {name for name in numbers if "step 1" in name} == {
        "output 0 of sample 0 in step 1",
        "output 0 of sample 0 in step 1 requires a gradient",
        "output 1 of sample 0 in step 1: 'a'",
        "output 0 of sample 1 in step 1",
        "output 0 of sample 1 in step 1 requires a gradient",
        "output 1 of sample 1 in step 1: 'b'",
        "gradient of input 0 of sample 0 in step 1",
        "input 0 of sample 0 in step 1",
        "input 0 of sample 1 in step 1",
    }
    torch.testing.assert_close(numbers["gradient of input 0 of sample 0 in step 1"], 2 * torch.tensor([1.0, 2.0]).cos())
    assert x.grad is None


def test_a_tensor_that_is_given_twice_stays_one() -> None:
    """An operator may write to it."""
    x = torch.ones(2)
    (sample,) = [op_infos.sample_of(lambda x, others: others[0].add_(x), (x, [x]), {})]
    assert len(sample.tensors) == 1
    torch.testing.assert_close(op_infos.run(Several([sample]))["input 0 of sample 0 in step 0"], torch.full((2,), 2.0))


def test_each_module_keeps_the_parameters_it_has_for_the_next_run() -> None:
    """A run trains copies; buffers are among the numbers."""
    module = torch.nn.BatchNorm1d(3)
    subject = Several([op_infos.sample_of(module, (torch.randn(4, 3),), {})])
    first, second = op_infos.run(subject), op_infos.run(subject)
    assert {"parts.0.num_batches_tracked at the end", "gradient of parts.0.weight in step 0"} <= first.keys()
    assert int(module.num_batches_tracked) == 0
    for name, value in first.items():
        assert torch.equal(value, second[name])


@pytest.mark.parametrize("count", [1, 3, 4, 9, 40])
def test_the_samples_that_are_taken_are_from_everywhere(count: int) -> None:
    """Each is offered once, should others not do."""
    order = list(op_infos.spread(range(count)))
    assert sorted(order) == list(range(count))
    assert max(order[:MAX_SAMPLES]) >= count // 2


def test_results_of_this_commit_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of other commits are; a failed case is the exit code."""
    file, here = tmp_path / "op_infos.json", op_infos.machine_facts()
    monkeypatch.setattr(op_infos, "machine_facts", lambda: {**here, "commit": "abc"})
    known = [
        Result(case=Case(kind="operator", name="add"), outcome="passed", rivals={"inductor": ""}, commit="abc"),
        Result(case=Case(kind="operator", name="mul"), outcome="failed", problem="differs", commit="abc"),
    ]
    save_results(file, known)
    assert load_results(file, Result) == known
    cases = {case.name: case for case in (result.case for result in known)}
    monkeypatch.setattr(op_infos, "all_cases", lambda bodies: list(cases.values()))
    assert op_infos.main(["--json", str(file)]) == 1
    assert "passed 1, fell back 0, inductor 0, failed 1" in capsys.readouterr().out
    assert op_infos.main(["--only", "add", "--json", str(file)]) == 0
