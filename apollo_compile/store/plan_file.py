"""Plans in files.

    save_plan(plan, graph, path)            write one plan
    load_plan(path, graph, lanes) -> Plan   read the plan of a graph: from its file, or from a directory of dumps
    read_plans(path) -> [NamedPlan]         read plans without their graphs, for display
    is_plan(path)                           whether a path is a plan file or a directory

A file holds the plan and a fingerprint of its graph: segments, buffers and dependencies, but not their work. A
directory is one that `debug.dump` wrote: `0_0_forward/plan.json` for the graph `0/0 forward`. Files are data: every
field is checked against its type, and no content is executed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from apollo_compile.errors import PlanFileError
from apollo_compile.ir import Lane, Plan, SegmentGraph
from apollo_compile.store.files import FileFormat, read_file
from apollo_compile.store.keys import digest

FILE_NAME = "plan.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class _About:
    """The graph that a plan is for."""

    name: str
    fingerprint: str
    segments: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Content:
    graph: _About
    plan: Plan


_FORMAT = FileFormat(kind="plan", number=1, content=_Content, max_bytes=64 * 2**20)
"""File format of plans; a plan of 10,000 segments takes about 2 MB."""


def save_plan(plan: Plan, graph: SegmentGraph, path: Path) -> None:
    """Write a plan atomically; equal plans give equal bytes. Raises `OSError` if that fails."""
    about = _About(
        name=graph.name, fingerprint=fingerprint(graph), segments=tuple(segment.name for segment in graph.segments)
    )
    _FORMAT.write(path, _Content(graph=about, plan=plan))


def folder_of(name: str) -> str:
    """Return the folder of a graph in a directory of dumps: `0_0_forward` for `0/0 forward`."""
    return re.sub(r"[^\w.,=\[\]-]+", "_", name)


def load_plan(path: Path, graph: SegmentGraph, lanes: tuple[Lane, ...]) -> Plan:
    """Return the plan in a file or in a directory of dumps; it must be for `graph` on `lanes`.

    Raises:
        PlanFileError: the file cannot be read, is not a plan, or its plan is for another graph or other lanes.
    """
    file = path / folder_of(graph.name) / FILE_NAME if path.is_dir() else path
    try:
        content = _FORMAT.read(file)
    except (OSError, ValueError) as error:
        raise PlanFileError(
            f"cannot read the plan of {graph.name} from {file}: {error}; expected a file that save_plan or "
            "'debug.dump' wrote"
        ) from error
    if content.graph.fingerprint != fingerprint(graph):
        raise PlanFileError(
            f"the plan in {file} was made for {content.graph.name}, whose segments are not those of {graph.name}: the "
            "model, its inputs or the partition's options have changed"
        )
    check_fits(content.plan, graph, lanes, f"the plan in {file}")
    return content.plan


def check_fits(plan: Plan, graph: SegmentGraph, lanes: tuple[Lane, ...], name: str) -> None:
    """Check that a plan is for this graph on these lanes; `name` is its name in messages.

    Raises:
        PlanFileError: it has other lanes, misses segments, or starts one before a segment that it depends on.
    """
    if plan.lanes != lanes:
        raise PlanFileError(
            f"{name} is for lanes with {[len(lane.units) for lane in plan.lanes]} units, but this device has "
            f"lanes with {[len(lane.units) for lane in lanes]} units; set 'device.units' to run it here"
        )
    place = {assignment.segment: index for index, assignment in enumerate(plan.in_start_order())}
    is_complete = [assignment.segment for assignment in plan.assignments] == list(range(len(graph.segments)))
    if not is_complete or not all(0 <= assignment.lane < len(lanes) for assignment in plan.assignments):
        raise PlanFileError(f"{name} does not assign each of the {len(graph.segments)} segments to a lane")
    for segment in graph.segments:
        if late := [other for other in graph.predecessors(segment.id) if place[other] > place[segment.id]]:
            raise PlanFileError(
                f"{name} starts segment {segment.id} ({segment.name}) before segment {late[0]}, which it depends on"
            )


class NamedPlan(NamedTuple):
    """A plan from a file, without its graph."""

    name: str
    """Name of the graph."""
    segments: tuple[str, ...]
    plan: Plan


def read_plans(path: Path) -> tuple[NamedPlan, ...]:
    """Return the plan in a file, or all plans in a directory of dumps, with the names of their graphs.

    Raises:
        PlanFileError: a file cannot be read or is not a plan, or the directory has none.
    """
    files = sorted(path.glob(f"*/{FILE_NAME}")) if path.is_dir() else [path]
    if not files:
        raise PlanFileError(f"there is no plan in {path}; expected <graph>/{FILE_NAME}, as 'debug.dump' writes it")
    found = []
    for file in files:
        try:
            content = _FORMAT.read(file)
            plan, names = content.plan, content.graph.segments
            if [assignment.segment for assignment in plan.assignments] != list(range(len(names))):
                raise ValueError(f"it has {len(plan.assignments)} assignments, expected one per segment, {len(names)}")
            if not {assignment.lane for assignment in plan.assignments} <= {lane.id for lane in plan.lanes}:
                raise ValueError("it assigns segments to lanes that it does not have")
            found.append(NamedPlan(content.graph.name, names, plan))
        except (OSError, ValueError) as error:
            raise PlanFileError(f"cannot read a plan from {file}: {error}") from error
    return tuple(found)


def is_plan(path: Path) -> bool:
    """Return whether a path is a directory, or a file with a plan, which may be malformed."""
    if path.is_dir():
        return True
    try:
        content = read_file(path, max_bytes=_FORMAT.max_bytes)
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "plan" in content


def fingerprint(graph: SegmentGraph) -> str:
    """Return a hash of the segments, buffers and dependencies that a plan refers to."""
    structure = [
        [(s.name, s.body, s.inputs, s.outputs, s.after) for s in graph.segments],
        [(b.producer, b.readers, b.num_bytes, b.is_output) for b in graph.buffers],
        graph.role,
    ]
    return digest(structure)
