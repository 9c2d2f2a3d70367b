"""A calibration gives a usable profile of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from apollo_compile.cost_model.roofline import predict  # noqa: E402
from apollo_compile.device.cpu.calibrate import calibrate  # noqa: E402
from apollo_compile.device.cpu.execute import available_units  # noqa: E402
from apollo_compile.ir import KernelKind, Work  # noqa: E402
from apollo_compile.store.profiles import load_profile  # noqa: E402
from apollo_compile.target.lanes import lane_catalogue  # noqa: E402
from apollo_compile.target.profile import DeviceProfile  # noqa: E402
from apollo_compile.tools.cli import main  # noqa: E402


def is_complete(profile: DeviceProfile, units: int) -> bool:
    """Whether it has every kind of kernel and every number of units, and predicts times."""
    return (
        (profile.kind, profile.source, profile.units) == ("cpu", "measured", units)
        and {table.kind for table in profile.arithmetic} == set(KernelKind)
        and {table.dtype for table in profile.arithmetic} == {"float32", "float64", "float16", "bfloat16"}
        and {len(lane.units) for lane in lane_catalogue(units)} <= set(profile.unit_counts)
        and profile.kernel_ns > 0
        and (profile.handover_ns > 0) == (units > 1)
        and predict(Work(flops=10**6, kernels=1), profile, units).duration_ns > 1
    )


@pytest.mark.slow
def test_a_calibration_measures_everything() -> None:
    """Progress ends at its total; torch keeps its threads."""
    if available_units() < 2:
        pytest.skip("torch can use one core")
    threads, steps = torch.get_num_threads(), []
    result = calibrate(2, rounds=3, progress=lambda what, done, total: steps.append((what, done, total)))
    assert is_complete(result.profile, 2)
    assert torch.get_num_threads() == threads
    assert [done for _, done, _ in steps] == list(range(len(steps)))
    assert steps[-1][1] + 1 == steps[-1][2]
    assert 0 <= result.disturbed_share <= 1


@pytest.mark.slow
def test_the_command_measures_and_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code says whether other processes disturbed it, as does the last line."""
    path = tmp_path / "machine.json"
    status = main(["calibrate", "--units", "1", "--rounds", "3", "--output", str(path), "--json"])
    printed = capsys.readouterr()
    assert printed.out == path.read_text()
    assert is_complete(load_profile(path), 1)
    told = printed.err.splitlines()
    assert told[:3] == ["compiling test segments", "measuring", "done"]
    assert status == ("other processes held a core" in told[-1])


@pytest.mark.parametrize("units", (0, 10_000))
def test_units_that_torch_does_not_use_are_refused(units: int) -> None:
    """Before anything is measured."""
    with pytest.raises(ValueError, match=f"cannot calibrate {units} units"):
        calibrate(units)
