"""A rank takes the plan of another, or stops where that cannot be; both ranks are in this process."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import BackendCompilerFailed

from apollo_compile import __version__, backend
from apollo_compile.device.cpu.execute import available_units
from apollo_compile.distributed.agreement import Agreement
from apollo_compile.distributed.ranks import Ranks, Store
from apollo_compile.errors import RankError
from apollo_compile.ir import Plan
from apollo_compile.session import registry
from apollo_compile.session.learner import OBSERVED_RUNS, SKIPPED_RUNS
from apollo_compile.store.profiles import default_profile, save_profile
from tests.end_to_end.models import NEVER_AS_LONG_NS, STRICT, TwoTowers, two_tower_inputs

QUICK = {**STRICT, "plan.planner": "greedy", "plan.time_limit_s": 0.1}
LENIENT = {**QUICK, "debug.strict": False, "device.profile": "cpu", "plan.min_gain": 0.0, "runtime.bodies": "eager"}


class Meddler:
    """A store in which somebody has written something else."""

    def __init__(self, text: str, key: str = "plan ") -> None:
        self._text, self._key = text, key

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        if f"/{self._key}" not in key:
            return desired.encode()
        if self._text == "another version":
            return b"0.0.9\n" + desired.encode()
        if self._text != "other lanes":
            return f"{__version__}\n{self._text}".encode()
        decision = json.loads(desired.partition("\n")[2])
        decision["plan"]["lanes"].pop()
        return f"{__version__}\n{json.dumps(decision)}".encode()


def compile_as_rank(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, launch_ns: int
) -> list[tuple[Plan, Plan]]:
    """Train two towers as a rank that believes in `launch_ns`; return its first and last plan of every graph."""
    torch._dynamo.reset()
    ranks = Ranks(store)
    monkeypatch.setattr(backend, "find_ranks", lambda: ranks)
    file = folder / f"{launch_ns}.json"
    save_profile(dataclasses.replace(default_profile(available_units()), name="wrong", launch_ns=launch_ns), file)
    torch.manual_seed(0)
    model, inputs = TwoTowers(), two_tower_inputs()
    run = torch.compile(model, backend="apollo", options={**QUICK, "device.profile": file})
    first: list[Plan] = []
    for _ in range(2 * (SKIPPED_RUNS + OBSERVED_RUNS)):
        run(*inputs).square().mean().backward()
        (entry,) = registry.find_models(model)
        first = first or [graph.compilation.plan for graph in entry.graphs]
    model.zero_grad()
    run(*inputs).square().mean().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(*inputs).square().mean().backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()], rtol=1e-3, atol=1e-5)
    return list(zip(first, (graph.compilation.plan for graph in entry.graphs), strict=True))


def test_a_rank_that_believes_something_else_runs_the_plan_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first, and when measured times have replaced what either of them believed."""
    store = dist.HashStore()
    first = compile_as_rank(store, tmp_path, monkeypatch, launch_ns=NEVER_AS_LONG_NS)
    second = compile_as_rank(store, tmp_path, monkeypatch, launch_ns=10 * NEVER_AS_LONG_NS)
    assert first == second
    for before, after in first:
        assert before.makespan_ns > NEVER_AS_LONG_NS > after.makespan_ns
    alone = compile_as_rank(dist.HashStore(), tmp_path, monkeypatch, launch_ns=10 * NEVER_AS_LONG_NS)
    assert [plan.makespan_ns for plan, _ in alone] != [plan.makespan_ns for plan, _ in second]


@dataclasses.dataclass
class Followed:
    """What one rank ran, step by step."""

    steps: list[list[tuple[Plan, bool]]]
    """Per step and graph, its plan, and whether that was final."""
    replans: list[int]
    fallbacks: list[str]


def follow(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    fault: Mapping[str, object] | None = None,
    steps: int = SKIPPED_RUNS + OBSERVED_RUNS + 2,
    **options: object,
) -> Followed:
    """Train two towers as a rank on which parts of `compiled_graph` are replaced by others; note what it ran."""
    torch._dynamo.reset()
    ranks = Ranks(store)
    torch.manual_seed(0)
    model, inputs = TwoTowers(), two_tower_inputs()
    seen = []
    with monkeypatch.context() as patched:
        patched.setattr(backend, "find_ranks", lambda: ranks)
        run = torch.compile(model, backend="apollo", options={**LENIENT, **options})
        run(*inputs).square().mean().backward()
        (entry,) = registry.find_models(model)
        for name, stand_in in (fault or {}).items():
            patched.setattr(f"apollo_compile.{name}", stand_in)
        for _ in range(steps):
            run(*inputs).square().mean().backward()
            seen.append([(graph.compilation.plan, graph.is_settled) for graph in entry.graphs])
    reasons = [reason for _, reason in entry.fallbacks]
    return Followed(steps=seen, replans=[graph.num_replans for graph in entry.graphs], fallbacks=reasons)


def fail(*args: object, **kwargs: object) -> Any:
    """Stand for anything that raises."""
    raise RuntimeError("out of luck")


@pytest.mark.parametrize(
    ("part", "is_first"),
    [
        ("session.learner.observe_trace", True),
        ("session.learner.observe_trace", False),
        ("session.learner.plan_partition", False),
    ],
)
def test_ranks_run_the_same_in_every_step_if_one_of_them_cannot_learn(
    part: str, is_first: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It proposes to keep the plan where the others propose another one; whoever comes first decides, for all."""
    monkeypatch.setattr("apollo_compile.session.learner.should_replan", lambda *measured: True)
    store = dist.HashStore()
    faults = {part: fail}, None
    first, second = (follow(store, monkeypatch, fault) for fault in (faults if is_first else faults[::-1]))
    assert first.steps == second.steps and first.replans == second.replans
    assert first.replans == ([0, 0] if is_first else [1, 1])
    settled = [[is_settled for _, is_settled in step] for step in first.steps]
    assert settled[-1] == [is_first] * 2 and settled[0] == [False] * 2
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 2 and all("keeps its plan: RuntimeError: out of luck" in line for line in lines)


def test_a_rank_that_cannot_go_over_to_the_plan_of_all_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others run it already; it says so in every step."""
    monkeypatch.setattr("apollo_compile.session.learner.should_replan", lambda *measured: True)
    monkeypatch.setattr("apollo_compile.session.learner.is_same_placement", lambda first, second: False)
    store = dist.HashStore()
    follow(store, monkeypatch)
    with pytest.raises(RankError, match="cannot go over to the plan that ranks agreed on: RuntimeError: out of luck"):
        follow(store, monkeypatch, {"device.cpu.target.Executable": fail})


def test_a_plan_that_is_too_large_for_the_store_leaves_the_graph_to_inductor_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also on those whose own would just have been small enough."""
    store = dist.HashStore()
    with monkeypatch.context() as patched:
        patched.setattr("apollo_compile.distributed.agreement.MAX_BYTES", 100)
        first = follow(store, monkeypatch, steps=0)
    second = follow(store, monkeypatch, steps=0)
    assert first.fallbacks == second.fallbacks != []
    assert all("is too large for the store in which ranks agree on it" in reason for reason in first.fallbacks)


def test_a_plan_from_a_file_is_that_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file is damaged on one rank, that one has a line about it, and runs what the first rank has read."""
    dump, store = tmp_path / "dump", dist.HashStore()
    follow(dist.HashStore(), monkeypatch, steps=0, **{"plan.planner": "serial", "debug.dump": dump})
    (file,) = dump.glob("*_forward/plan.json")
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{")
    first, second = (follow(store, monkeypatch, steps=1, **{"plan.file": path}) for path in (file, damaged))
    assert first.steps[0][0] == second.steps[0][0]
    assert first.steps[0][0][0].pinned


OTHER_LANES = "the plan of another rank is for lanes with"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "JSONDecodeError"),
        ('{"costs": {"modes": [], "handover_ns": 0}, "plan": null}', "ValueError"),
        ("other lanes", OTHER_LANES),
        ("another version", "was settled by apollo_compile"),
    ],
)
def test_a_rank_that_cannot_run_the_plan_of_all_stops(text: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run something else in silence; the error says what differs, and says it again if the call is."""
    torch._dynamo.reset()
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
        agreement.settle_names("products", ["a", "b"])
