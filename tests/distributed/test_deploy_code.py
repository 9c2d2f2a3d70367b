"""Code in and around placed modules has the gradients of one process, on two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import deploy_code_work as work
from tests.distributed.conftest import needs_gloo, read_ranks, start_ranks

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Any]]:
    """Return losses and states by case and placement, as every rank saw them."""
    folder = tmp_path_factory.mktemp("ranks")
    start_ranks(work.run_rank, work.__name__, work.SIZE, folder)
    return read_ranks(folder, work.SIZE)


@pytest.mark.parametrize(("case", "where"), work.PAIRS)
def test_losses_and_parameters_are_those_of_one_process(
    ranks: list[dict[tuple[str, str], Any]], case: str, where: str
) -> None:
    """After steps with momentum and weight decay."""
    for rank in ranks:
        (losses, state), (expected, expected_state) = rank[case, where], rank[case, ""]
        assert losses == pytest.approx(expected, rel=1e-4)
        torch.testing.assert_close(state, expected_state, rtol=1e-3, atol=1e-5)


def test_a_module_whose_output_is_not_by_sample_is_an_error_on_both_ranks(ranks: list[dict[Any, Any]]) -> None:
    """It was planned in training mode, in which the output has samples."""
    for rank in ranks:
        assert "module 'image' returned a tensor of shape (1, 16) for 4 samples: expected 4" in rank["pools", ""]


@pytest.mark.parametrize(("phase", "step", "where"), work.FAILURES)
def test_a_module_that_fails_on_one_rank_ends_the_steps_of_all(
    ranks: list[dict[Any, Any]], phase: str, step: int, where: str
) -> None:
    """Within the patience of gloo: the rank shows its own error, the others and later steps name rank and module."""
    told = f"DeploymentError: module 'image' failed on rank 1, so all ranks stop: ValueError: no {phase}"
    assert ranks[0][phase, str(step)] == [told] * (3 - step)
    assert ranks[1][phase, str(step)] == [f"ValueError: no {phase}"] + [told] * (2 - step)
