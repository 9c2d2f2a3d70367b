"""Functions of MKL that are called before lanes start.

That MKL is inaccurate in a first call is seen in one of twenty processes, on busy cores only; so a test looks at its
version. By hand, in several processes at once: `(torch.sin(x) - torch.sin(x)).abs().max()` for x of 512 x 512.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from apollo_compile.device.cpu import execute
from apollo_compile.ir import Lane, LaneId
from apollo_compile.torch_bridge.upstream_bugs.vector_functions import choose_vector_kernels
from tests.torch_bridge.upstream_bugs.defects import assert_as_listed

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")

FUNCTIONS = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cbrt", "CdfNorm", "Ceil"),
    *("Cos", "Cosh", "Erf", "Erfc", "ErfcInv", "ErfInv", "Exp", "Exp10", "Exp2", "Expm1"),
    *("Floor", "Inv", "InvSqrt", "LGamma", "Ln", "Log10", "Log1p", "Log2", "Logb", "NearbyInt"),
    *("Rint", "Round", "Sin", "Sinh", "Sqr", "Sqrt", "Tan", "Tanh", "TGamma", "Trunc"),
)
"""Functions of one argument, by their names in MKL."""


def test_torch_has_an_mkl_that_chooses_kernels_without_a_lock() -> None:
    """The report finds releases before 2025 wrong."""
    found = re.search(r"Math Kernel Library Version (\d+)", torch.__config__.show())
    assert found is not None
    assert_as_listed("vector_functions.py", is_there=int(found[1]) < 2025)


def test_all_functions_that_torch_takes_from_mkl_are_called() -> None:
    """In both precisions, also where a compile with fake tensors is in progress."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    linked = {each for each in FUNCTIONS if hasattr(library, f"vms{each}") or hasattr(library, f"vmd{each}")}
    assert "Tanh" in linked
    with FakeTensorMode(), profile(activities=[ProfilerActivity.CPU]) as seen:
        choose_vector_kernels.__wrapped__()
    calls = [event.name.removeprefix("aten::") for event in seen.events()]
    for name in linked:
        assert calls.count({"Ln": "log"}.get(name, name.lower())) == 2, name


def test_lanes_start_after_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs on them."""
    seen: list[str] = []
    monkeypatch.setattr(execute, "choose_vector_kernels", lambda: seen.append("calls"))
    monkeypatch.setattr(execute, "prepare_lane_thread", lambda num_threads: seen.append("lane"))
    monkeypatch.setattr(execute, "_lanes_by_key", {})
    execute.start_lanes((Lane(id=LaneId(0), units=(0,)), Lane(id=LaneId(1), units=())), park_team=False)
    assert seen[0] == "calls" and "lane" in seen[1:]
