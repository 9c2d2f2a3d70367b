"""A calibration gives a usable profile of this machine."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from apollo_compile import calibrate as calibration  # noqa: E402
from apollo_compile.calibrate import calibrate  # noqa: E402
from apollo_compile.ir import KernelKind, Work  # noqa: E402
from apollo_compile.lanes import lane_catalogue  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("units", (1, 2))
def test_a_calibration_measures_everything(units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of kernel and every number of units; progress ends at its total; torch keeps its threads."""
    if torch.get_num_threads() < units:
        pytest.skip(f"torch uses {torch.get_num_threads()} threads")
    from apollo_compile.cost_model.roofline import predict

    monkeypatch.setattr(calibration, "ROUNDS", 3)
    threads, steps = torch.get_num_threads(), []
    result = calibrate(units, progress=lambda what, done, total: steps.append((what, done, total)))
    profile = result.profile
    assert torch.get_num_threads() == threads
    assert (profile.kind, profile.source, profile.units) == ("cpu", "measured", units)
    assert {table.kind for table in profile.arithmetic} == set(KernelKind)
    assert {table.dtype for table in profile.arithmetic} == {"float32", "float64", "float16", "bfloat16"}
    assert {len(lane.units) for lane in lane_catalogue(units)} <= set(profile.unit_counts)
    assert profile.kernel_ns > 0 and (profile.handover_ns > 0) == (units > 1)
    assert [done for _, done, _ in steps] == list(range(len(steps)))
    assert steps[-1][1] + 1 == steps[-1][2]
    assert 0 <= result.disturbed_share <= 1
    assert predict(Work(flops=10**6, kernels=1), profile, units).duration_ns > 1


@pytest.mark.parametrize("units", (0, 10_000))
def test_units_that_torch_does_not_use_are_refused(units: int) -> None:
    """Before anything is measured."""
    with pytest.raises(ValueError, match=f"cannot calibrate {units} units"):
        calibrate(units)
