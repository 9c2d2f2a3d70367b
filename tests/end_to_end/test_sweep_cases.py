"""Cases of the correctness sweep, one for each kind of outcome that it can have."""

from __future__ import annotations

from dataclasses import asdict

import pytest

pytest.importorskip("transformers")

from benchmarks.sweep import Case, Result, rotate_few, run_case


def _run(**setting: str) -> Result:
    result = run_case(Case(**setting))
    assert (result.problem, result.inductor_problem) == ("", "")
    return result


CASES = [
    # A codebook in buffers, AdamW in one kernel call, and eval, no_grad and inference_mode between the steps.
    Case(model="quantizer", optimizer="adamw_fused", mode="switches", bodies="eager"),
    # The step of the optimizer is a graph of its own.
    Case(model="quantizer", optimizer="adamw_compiled", bodies="eager"),
    *(pytest.param(case, marks=pytest.mark.soak) for case in rotate_few()),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_models_train_in_every_precision_and_mode_with_every_optimizer(case: Case) -> None:
    """Compiled optimizers have graphs too, and switches of the mode are between steps."""
    result = _run(**asdict(case))
    assert result.outcome == "passed"
    assert result.num_graphs == result.num_in_segments >= (3 if case.optimizer == "adamw_compiled" else 2)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("model", "num_graphs", "complaint"),
    [
        ("recurrent", 0, "Attempted to wrap RNN, GRU, or LSTM"),
        ("transformer", 1, "Unsupported Tensor.item() call"),  # the mask is a graph, which trains nothing
    ],
)
def test_what_dynamo_leaves_in_eager_is_no_pass_of_ours(model: str, num_graphs: int, complaint: str) -> None:
    """It trains as ever, and the result says why it is no pass."""
    result = _run(model=model, bodies="eager")
    assert result.outcome == "fell back"
    assert result.num_graphs == num_graphs
    (reason,) = result.reasons
    assert reason.startswith(f"Dynamo leaves the training of the whole model to eager: {complaint}")
