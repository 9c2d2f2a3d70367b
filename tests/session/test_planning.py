"""A rank takes the plan of another, or stops where that cannot be; both ranks are in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import BackendCompilerFailed

from apollo_compile import __version__
from apollo_compile.distributed.agreement import Agreement
from apollo_compile.distributed.ranks import Ranks, RankStore
from apollo_compile.errors import RankError
from apollo_compile.session import backend, registry
from apollo_compile.session.model import CompiledModel
from tests.end_to_end.models import STRICT, TwoTowers, two_tower_inputs

QUICK = {**STRICT, "plan.planner": "greedy", "plan.time_limit_s": 0.1}
LENIENT = {**QUICK, "debug.strict": False, "device.profile": "cpu", "plan.min_gain": 0.0, "runtime.bodies": "eager"}


class Meddler:
    """A store in which somebody has written something else."""

    def __init__(self, text: str, key: str = "plan") -> None:
        self._text, self._key = text, key

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        if f"/{self._key}" not in key:
            return desired.encode()
        if self._text != "other lanes":
            return f"{__version__}\n{self._text}".encode()
        decision = json.loads(desired.partition("\n")[2])
        decision["plan"]["lanes"].pop()
        return f"{__version__}\n{json.dumps(decision)}".encode()


def follow(store: RankStore, monkeypatch: pytest.MonkeyPatch, **options: object) -> CompiledModel:
    """Train two towers as a rank; return what was compiled for them."""
    torch._dynamo.reset()
    ranks, model = Ranks(store), TwoTowers()
    with monkeypatch.context() as patched:
        patched.setattr(backend, "find_ranks", lambda: ranks)
        run = torch.compile(model, backend="apollo", options={**LENIENT, **options})
        for _ in range(2):
            run(*two_tower_inputs()).square().mean().backward()
    (found,) = registry.find_models(model)
    return found


@pytest.mark.usefixtures("interpreted")
def test_a_plan_that_is_too_large_for_the_store_leaves_the_graph_to_inductor_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also on those whose own would just have been small enough."""
    store = dist.HashStore()
    with monkeypatch.context() as patched:
        patched.setattr("apollo_compile.distributed.agreement.MAX_BYTES", 100)
        first = follow(store, monkeypatch).fallbacks
    assert first == follow(store, monkeypatch).fallbacks != []
    assert all("is too large for the store in which ranks agree on it" in reason for _, reason in first)


def test_a_plan_from_a_file_is_that_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file is damaged on one rank, that one has a line about it, and runs what the first rank has read."""
    dump, store = tmp_path / "dump", dist.HashStore()
    follow(dist.HashStore(), monkeypatch, **{"plan.planner": "serial", "debug.dump": dump})
    (file,) = dump.glob("*_forward/plan.json")
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{")
    ranks = [follow(store, monkeypatch, **{"plan.file": path}) for path in (file, damaged)]
    first, second = (rank.graphs[0].compilation.plan for rank in ranks)
    assert first == second and first.pinned


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "JSONDecodeError"),
        ('{"costs": {"modes": [], "handover_ns": 0}, "plan": null}', "ValueError"),
        ("other lanes", "the plan of another rank is for lanes with"),
    ],
)
def test_a_rank_that_cannot_run_the_plan_of_all_stops(text: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run something else in silence; the error says what differs, and says it again if the call is."""
    ranks = Ranks(Meddler(text))
    monkeypatch.setattr(backend, "find_ranks", lambda: ranks)
    run = torch.compile(TwoTowers(), backend="apollo", options=LENIENT)
    for _ in range(2):
        with pytest.raises(BackendCompilerFailed, match="cannot run the programs of the other ranks") as raised:
            run(*two_tower_inputs())
        assert reason in str(raised.value)


def test_libraries_that_another_rank_cannot_name_stop_the_rank() -> None:
    """Which library computes a product shows in the last bits."""
    agreement = Agreement(Ranks(Meddler("{", key="products")), topic="graph")
    with pytest.raises(RankError, match="the products that ranks agreed on cannot be read"):
        agreement.settle_numbers("products", {"a": 1.0})
