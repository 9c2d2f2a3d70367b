"""Matmuls go to the library that was measured to be the faster, and each is measured once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from apollo_compile.device.cpu import matmul_libraries
from apollo_compile.store.files import MAX_AGE_S
from apollo_compile.target.matmul import Matmul

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def a_matmul(rows: int = 256, **changes: Any) -> Matmul:
    """Return a product that is worth measuring."""
    lies: dict[str, Any] = {"is_left_transposed": False, "is_right_transposed": True, "has_bias": False}
    return Matmul(**{"rows": rows, "inner": 64, "columns": 128, **lies, **changes})


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Matmul, int]]:
    """Return what is measured; oneDNN is twice as fast where there is a bias, else half as fast."""
    found: list[tuple[Matmul, int]] = []

    def measure(product: Matmul, cores: int) -> matmul_libraries.LibraryTimes:
        found.append((product, cores))
        return times_of(2.0 if product.has_bias else 0.5)

    monkeypatch.setattr(matmul_libraries, "_measure", measure)
    return found


def times_of(gain: float) -> matmul_libraries.LibraryTimes:
    """Return times by which oneDNN is `gain` times as fast."""
    return matmul_libraries.LibraryTimes(blas=1000 * gain, onednn=1000.0)


LOSES, WINS = a_matmul(), a_matmul(has_bias=True)


def test_a_product_is_measured_once_per_number_of_cores(measured: list[Any], tmp_path: Path) -> None:
    """And in the next process not again."""
    cases = [(LOSES, 1), (WINS, 1), (WINS, 1), (LOSES, 2)]
    for libraries in (matmul_libraries.Libraries(tmp_path / "new"), matmul_libraries.Libraries(tmp_path / "new")):
        for _ in range(2):
            assert libraries.choose(cases) == {(WINS, 1): 1000}
    assert measured == [(LOSES, 1), (WINS, 1), (LOSES, 2)]


def test_processes_keep_what_others_have_measured(measured: list[Any], tmp_path: Path) -> None:
    """Although both had looked into the file before."""
    one, other = matmul_libraries.Libraries(tmp_path), matmul_libraries.Libraries(tmp_path)
    for libraries, rows in ((one, 256), (other, 300), (one, 400)):
        libraries.choose([(a_matmul(rows), 1)])
    matmul_libraries.Libraries(tmp_path).choose([(a_matmul(rows), 1) for rows in (256, 300, 400)])
    assert len(measured) == 3


def test_threads_that_compile_at_once_measure_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And each product once."""
    inside, seen = threading.Lock(), []

    def measure(product: Matmul, cores: int) -> matmul_libraries.LibraryTimes:
        assert inside.acquire(blocking=False)
        time.sleep(0.001)
        seen.append(product)
        inside.release()
        return times_of(2.0)

    monkeypatch.setattr(matmul_libraries, "_measure", measure)
    libraries, cases = matmul_libraries.Libraries(tmp_path), [(a_matmul(rows), 1) for rows in range(256, 276)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(libraries.choose, [cases] * 4)) == [dict.fromkeys(cases, 1000)] * 4
    assert len(seen) == 20


def test_small_products_are_left_and_smaller_ones_stand_for_large_ones(measured: list[Any]) -> None:
    """The borders are numbers of operations and of bytes; the time saved grows with the operations."""
    libraries, small = matmul_libraries.Libraries(None), a_matmul(4, has_bias=True)
    assert small.flops < matmul_libraries.LEAST_FLOPS and not libraries.choose([(small, 1)]) and not measured
    large = {(a_matmul(rows, has_bias=True), 1) for rows in (2**20, 2**21)}
    saved = libraries.choose(large)
    ((product, _),) = measured
    assert saved == {(matmul, cores): 1000 * matmul.flops / product.flops for matmul, cores in large}
    assert matmul_libraries.MOST_FLOPS / 2 < product.flops <= matmul_libraries.MOST_FLOPS
    assert (product.inner, product.columns) == (64, 128)
    flat = a_matmul(1, inner=2**13, columns=2**14, has_bias=True)
    assert flat.flops > matmul_libraries.MOST_FLOPS and libraries.choose([(flat, 1)])
    assert matmul_libraries.MOST_BYTES / 2 < measured[-1][0].num_bytes <= matmul_libraries.MOST_BYTES


@pytest.mark.parametrize(
    ("gain", "is_enough"), [(1 + matmul_libraries.MARGIN / 2, False), (1 + 2 * matmul_libraries.MARGIN, True)]
)
def test_a_gain_within_noise_is_none(monkeypatch: pytest.MonkeyPatch, gain: float, is_enough: bool) -> None:
    """BLAS is what the user had."""
    monkeypatch.setattr(matmul_libraries, "_measure", lambda product, cores: times_of(gain))
    assert bool(matmul_libraries.Libraries(None).choose([(LOSES, 1)])) == is_enough


def change(path: Path, **changes: Any) -> None:
    """Change fields of a file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda path: path.write_text("[]"), id="another kind"),
        pytest.param(lambda path: change(path, times={"a": "b"}), id="a word"),
        pytest.param(lambda path: change(path, made_at=time.time() - MAX_AGE_S - 1), id="too old"),
        pytest.param(
            lambda path: change(path, fingerprint={**json.loads(path.read_text())["fingerprint"], "torch": "1.0"}),
            id="another torch",
        ),
    ],
)
def test_what_cannot_be_used_is_measured_anew(
    measured: list[Any], tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    """And is right afterwards."""
    assert matmul_libraries.Libraries(tmp_path).choose([(WINS, 1)])
    spoil(tmp_path / "matmul-1.json")
    for _ in range(2):
        assert matmul_libraries.Libraries(tmp_path).choose([(WINS, 1)])
    assert len(measured) == 2


def test_old_measurements_make_room(measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the file does not grow for ever; its date stays that of the first."""
    monkeypatch.setattr(matmul_libraries, "MAX_ENTRIES", 3)
    libraries, dates = matmul_libraries.Libraries(tmp_path), set()
    for rows in (256, 300, 400, 500):
        libraries.choose([(a_matmul(rows), 1)])
        content = json.loads((tmp_path / "matmul-1.json").read_text())
        dates.add(content["made_at"])
    assert [name.partition("x")[0] for name in content["times"]] == ["300", "400", "500"] and len(dates) == 1


@pytest.mark.parametrize(("folder", "count"), [(None, 1), ("file", 2)], ids=["none", "a file"])
def test_without_a_directory_every_process_measures(
    measured: list[Any], tmp_path: Path, folder: str | None, count: int
) -> None:
    """It is known in one process only; where a file is in the place of the directory, too."""
    (tmp_path / "file").write_text("")
    libraries = [matmul_libraries.Libraries(folder and tmp_path / folder) for _ in range(count)]
    assert [each.choose([(WINS, 1)]) for each in 2 * libraries] == 2 * count * [{(WINS, 1): 1000}]
    assert len(measured) == count and [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_a_measurement_leaves_threads_as_they_were(left: bool, right: bool, tmp_path: Path) -> None:
    """It takes place, and gives two times."""
    threads = torch.get_num_threads()
    product = a_matmul(is_left_transposed=left, is_right_transposed=right, has_bias=right)
    matmul_libraries.Libraries(tmp_path).choose([(product, threads + 1)])
    assert torch.get_num_threads() == threads
    (path,) = tmp_path.glob("matmul-*.json")
    (times,) = json.loads(path.read_text())["times"].values()
    assert 0.01 < times["blas"] / times["onednn"] < 100


def test_what_a_library_cannot_compute_stays_with_blas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That is asked once by a process, and no other one is told; threads stay as they were."""
    calls: list[torch.Tensor] = []

    def refuse(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(value)
        raise RuntimeError("could not create a primitive descriptor")

    monkeypatch.setattr(matmul_libraries, "call_onednn", refuse)
    threads, libraries = torch.get_num_threads(), matmul_libraries.Libraries(tmp_path)
    for _ in range(2):
        assert not libraries.choose([(WINS, threads + 1)])
    assert len(calls) == 1 and torch.get_num_threads() == threads and not list(tmp_path.iterdir())


@pytest.mark.parametrize("gains", [(2.0, 0.5), (0.5, 2.0)])
def test_a_calibration_calls_the_libraries_of_bodies(
    monkeypatch: pytest.MonkeyPatch, gains: tuple[float, float]
) -> None:
    """The linear layer and the gradient of its weight may differ; only the gradient has a copy for oneDNN."""
    asked: list[tuple[str, int]] = []
    called: list[bool] = []

    def measure(matmul: Matmul, cores: int) -> matmul_libraries.LibraryTimes:
        asked.append((matmul.name, cores))
        return times_of(gains[matmul.is_left_transposed])

    def call_onednn(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        called.append(bias is None)
        return torch.nn.functional.linear(value, weight, bias)

    monkeypatch.setattr(matmul_libraries, "_measure", measure)
    monkeypatch.setattr(matmul_libraries, "call_onednn", call_onednn)
    results: Any = matmul_libraries.call_as_bodies(128, 2)()
    assert asked == [("128x128 128x128T+bias", 2), ("128x128T 128x128", 2)]
    assert called == [gains[1] > 1]
    assert [result[0, 0].item() for result in results] == [129, 128, 1][: 2 + called[0]]


def test_a_calibration_calls_blas_where_there_is_no_choice(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small matmuls are not measured, and none is where torch has no oneDNN."""
    monkeypatch.setattr(matmul_libraries, "call_onednn", lambda *arguments: pytest.fail("called oneDNN"))
    matmul_libraries.call_as_bodies(16, 1)()
    monkeypatch.setattr(matmul_libraries, "has_onednn", lambda: False)
    matmul_libraries.call_as_bodies(128, 1)()
    assert not measured


def test_interruptions_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most calls of the faster one are interrupted for longer than the slower one takes."""
    clock, counts = [0], [0, 0]

    def call(which: int, ns: int) -> None:
        counts[which] += 1
        clock[0] += ns + (10**7 if which == 0 and counts[which] % 4 else 0)

    monkeypatch.setattr(matmul_libraries.time, "perf_counter_ns", lambda: clock[0])
    faster, slower = matmul_libraries._least_times([[lambda: call(0, 10**6), lambda: call(1, 2 * 10**6)]])
    assert (faster, slower) == (10**6, 2 * 10**6)
