"""Cases of the correctness sweep, one for each kind of outcome that it can have."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks.sweep import Case, Result, run_case


def _run(**setting: str) -> Result:
    result = run_case(Case(**setting))
    assert (result.problem, result.inductor_problem) == ("", "")
    return result


def test_a_model_with_buffers_that_it_writes_trains_in_every_mode() -> None:
    """A codebook in buffers, AdamW in one kernel call, and eval, no_grad and inference_mode between the steps."""
    result = _run(model="quantizer", optimizer="adamw_fused", mode="switches", bodies="eager")
    assert result.outcome == "passed"
    assert result.num_graphs == result.num_in_segments > 0


def test_batches_of_several_sizes_run_on_lanes() -> None:
    """One graph for all of them, forward and backward."""
    result = _run(model="recommender", shapes="changing", bodies="eager")
    assert result.outcome == "passed"
    assert result.num_in_segments >= 2


def test_what_dynamo_leaves_in_eager_is_no_pass_of_ours() -> None:
    """It does not trace recurrent layers of torch, and the result says so."""
    result = _run(model="recurrent")
    assert result.outcome == "fell back"
    assert result.num_graphs == 0
    assert "in eager" in result.reasons[0]
