"""What torch.profiler sees of lanes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from apollo_compile.session import registry
from tests.end_to_end.marks import needs_two_cores
from tests.end_to_end.models import TwoTowers, two_tower_inputs

pytestmark = needs_two_cores


class Event(NamedTuple):
    """One range of a trace."""

    name: str
    tid: int
    threads: tuple[str, ...]
    """Names of its thread: Kineto gives one of the threads that of the process, too."""
    begin: float
    end: float


@pytest.fixture(scope="module")
def step(lanes: dict[str, Any]) -> Callable[[], None]:
    """A training step of two towers on lanes, after those in which it compiles."""
    torch._dynamo.reset()
    options = {**lanes["options"], "plan.replan": False}  # segments stay on their lanes
    run = torch.compile(TwoTowers(depth=1), backend=lanes["backend"], options=options)

    def train() -> None:
        run(*two_tower_inputs()).square().mean().backward()

    for _ in range(3):
        train()
    return train


def events_of(profiler: profile, path: Path) -> Iterator[Event]:
    """Yield the ranges of a trace with the names of their threads, as the trace says them."""
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    threads = defaultdict(tuple)
    for event in events:
        if event["name"] == "thread_name":
            threads[event["tid"]] += (event["args"]["name"],)
    for event in events:
        if event["ph"] == "X":
            tid, begin = event["tid"], event["ts"]
            yield Event(event["name"], tid, threads[tid], begin, begin + event["dur"])


def segments_of(model: Any) -> dict[str, tuple[int, bool]]:
    """Return the lane of every segment by the name of its range, and whether that lane is the caller."""
    found = {}
    for graph in model.graphs:
        plan = graph.compilation.plan
        for segment, assignment in zip(graph.compilation.partition.graph.segments, plan.assignments, strict=True):
            is_caller = len(plan.lanes[assignment.lane].units) == torch.get_num_threads()
            lane = assignment.lane
            found[f"{segment.name} ({graph.compilation.capture.name}, lane {lane})"] = (lane, is_caller)
    return found


def test_a_profile_has_a_range_per_segment_on_a_thread_named_after_its_lane(
    step: Callable[[], None], tmp_path: Path
) -> None:
    """With operators beneath, and inside the range that the user gave the step, in every step."""
    segments = segments_of(registry.compiled_models()[-1])
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            with record_function("my step"):
                step()
    events = list(events_of(profiler, tmp_path / "trace.json"))
    steps = [event for event in events if event.name == "my step"]
    found = defaultdict(list)
    for event in events:
        if event.name in segments:
            found[event.name].append(event)
    assert found.keys() == segments.keys()
    assert len({lane for lane, is_caller in segments.values() if not is_caller}) == 2
    main = steps[0].tid
    for name, (lane, is_caller) in segments.items():
        assert len(found[name]) == len(steps) == 2
        for each, around in zip(sorted(found[name], key=lambda e: e.begin), steps, strict=True):
            assert (each.tid == main) is is_caller
            assert is_caller or any(re.search(rf"\bapollo-lane-{lane}\b", name) for name in each.threads)
            assert around.begin <= each.begin <= each.end <= around.end
            beneath = [e for e in events if e.tid == each.tid and each.begin <= e.begin and e.end <= each.end]
            assert any(e.name.startswith("aten::") for e in beneath)


def test_lanes_are_recorded_only_while_a_profiler_records(step: Callable[[], None], tmp_path: Path) -> None:
    """Before, after, and in a second profile; a step is recorded once, also if all threads are."""
    segments = segments_of(registry.compiled_models()[-1])
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    for number, config in enumerate((None, everything, None)):
        step()
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
            step()
        step()
        events = [e.name for e in events_of(profiler, tmp_path / f"{number}.json") if e.name in segments]
        assert sorted(events) == sorted(segments)
