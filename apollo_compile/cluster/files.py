"""Files of a cluster, its jobs and plans; whatever is wrong in one is an error with its line.

    read_cluster(path)                      TOML
    read_jobs(path), format_trace(jobs)     TOML; or CSV: name, arrival_s, steps, devices, samples, gangs
    read_plan(path), format_plan_file(plan) JSON

A gang is written as `h100:2=0.23`: two devices of kind h100, 0.23 s per step. In a TOML file of jobs, `estimate` names
a file that `apollo estimate --save` wrote; the Cells in it that fit are the gangs.
"""

from __future__ import annotations

import csv
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from apollo_compile.cluster.values import Cluster, ClusterPlan, Gang, Job, Nodes
from apollo_compile.cost_model.cells import Estimate
from apollo_compile.errors import ClusterError
from apollo_compile.json_form import from_json, parse, to_json


class _Field(NamedTuple):
    """A field of a table or a row."""

    expected: str
    is_right: Callable[[Any], bool]
    default: Any = None
    """None: the field has to be there."""


def _text(default: str | None = None) -> _Field:
    return _Field("a text that is not empty", lambda value: isinstance(value, str) and bool(value.strip()), default)


def _texts() -> _Field:
    return _Field(
        "a list of texts", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value), []
    )


def _whole(least: int, default: int | None = None) -> _Field:
    return _Field(f"a whole number of at least {least}", lambda value: type(value) is int and value >= least, default)


def _number(default: float) -> _Field:
    return _Field(
        "a number of at least 0", lambda value: type(value) in (int, float) and 0 <= value < math.inf, default
    )


_TOP = {"restart_s": _number(0.0)}
_NODE = {
    "kind": _text(),
    "count": _whole(1, 1),
    "devices": _whole(1),
    "gpu": _Field("true or false", lambda value: isinstance(value, bool), False),
}
_ROW = {
    "name": _text(),
    "arrival_s": _number(0.0),
    "steps": _whole(1),
    "devices": _whole(0, 0),
    "samples": _number(1.0),
    "gangs": _texts(),
}
_JOB = {**_ROW, "estimate": _text("-"), "command": _texts()}


class _Table(NamedTuple):
    """A table of a TOML file, or a row of a CSV file."""

    path: Path
    lines: Sequence[str]
    """Lines of the table, with its header."""
    line: int
    """Number of the first one."""
    values: Mapping[str, Any]

    def refuse(self, name: str, expected: str, got: str, what: str | None = None) -> NoReturn:
        """Raise `ClusterError` for a field, with its line, or that of the table if it is missing."""
        at = (number for number, line in enumerate(self.lines) if re.match(rf"\s*\"?{re.escape(name)}\"?\s*=", line))
        place = f"{self.path}:{self.line + next(at, 0)}"
        raise ClusterError(f"{place}: {what or f'field {name!r}'}: expected {expected}, got {got}")

    def check(self, fields: Mapping[str, _Field]) -> dict[str, Any]:
        """Return all fields, with defaults."""
        if unknown := [name for name in self.values if name not in fields]:
            self.refuse(unknown[0], f"one of {', '.join(fields)}", repr(unknown[0]), what="unknown field")
        found = {name: self.values.get(name, field.default) for name, field in fields.items()}
        for name, field in fields.items():
            if not field.is_right(found[name]):
                got = repr(found[name]) if name in self.values else "no such field"
                self.refuse(name, field.expected, got)
        return found


def _tables(path: Path, name: str) -> tuple[_Table, list[_Table]]:
    """Return the top of a TOML file, and its tables `[[name]]`, of which there is at least one."""
    lines = _read(path).splitlines()
    try:
        values = tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        raise ClusterError(f"{path}:{found[1] if found else 1}: not TOML: {error}") from error
    starts = [number for number, line in enumerate(lines) if line.strip().startswith("[")]
    ends = [*starts[1:], len(lines)]
    items = values.pop(name, None)
    top = _Table(path, lines[: min(starts, default=len(lines))], 1, values)
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        top.refuse(name, f"at least one table [[{name}]]", repr(items))
    own = [(at, end) for at, end in zip(starts, ends, strict=False) if lines[at].strip().startswith(f"[[{name}]]")]
    own += [(0, 0)] * (len(items) - len(own))  # tables that are written in another way
    return top, [_Table(path, lines[at:end], at + 1, item) for (at, end), item in zip(own, items, strict=False)]


def _rows(path: Path) -> Iterator[_Table]:
    """Yield the rows of a CSV file, of which there is at least one."""
    rows = csv.reader(_read(path).splitlines())
    header = next(rows, [])
    if header != list(_ROW):
        raise ClusterError(f"{path}:1: expected the columns {','.join(_ROW)}, got {','.join(header) or 'nothing'}")
    row: list[str] = []
    for row in filter(None, rows):
        if len(row) != len(header):
            raise ClusterError(f"{path}:{rows.line_num}: expected {len(header)} columns, got {len(row)}")
        values = {name: text if name == "name" else _value(text) for name, text in zip(header, row, strict=True)}
        yield _Table(path, (), rows.line_num, {**values, "gangs": row[-1].split()})
    if not row:
        raise ClusterError(f"{path}:1: expected at least one job, got none")


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # editors may write a mark of the encoding
    except UnicodeDecodeError as error:
        raise ClusterError(f"{path}:1: expected text in UTF-8: {error}") from error


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that a TOML file describes.

    Raises:
        ClusterError: something in it is wrong; the message begins with file and line.
        OSError: it cannot be read.
    """
    top, tables = _tables(path, "node")
    nodes: dict[str, Nodes] = {}
    for table in tables:
        found = Nodes(**table.check(_NODE))
        if found.kind in nodes:
            table.refuse("kind", "one table for every kind", f"a second one for {found.kind!r}")
        nodes[found.kind] = found
    return Cluster(nodes=tuple(nodes.values()), restart_s=float(top.check(_TOP)["restart_s"]))


def read_jobs(path: Path) -> tuple[Job, ...]:
    """Return the jobs in a TOML file, or in a trace if its name ends in `.csv`.

    Raises:
        ClusterError: something in it is wrong; the message begins with file and line.
        OSError: it, or an estimate that it names, cannot be read.
    """
    is_trace = path.suffix == ".csv"
    jobs: dict[str, Job] = {}
    for table in _rows(path) if is_trace else _tables(path, "job")[1]:
        job = _job(table)
        if job.name in jobs:
            table.refuse("name", "a name of its own for every job", f"{job.name!r} again")
        jobs[job.name] = job
    return tuple(jobs.values())


def _job(table: _Table) -> Job:
    found = table.check(_JOB)
    texts, source = found["gangs"], found.pop("estimate")
    if (source == "-") == (not texts):
        table.refuse("gangs", "either gangs or an estimate", "both" if texts else "neither")
    if texts:
        gangs = tuple(_gang(text, table) for text in texts)
    else:
        estimate = _read_estimate(table.path.parent / source, table)
        gangs = gangs_of(estimate)
        found["samples"] = table.values.get("samples", estimate.batch)
    if found["devices"] and all(gang.devices != found["devices"] for gang in gangs):
        counts = sorted({gang.devices for gang in gangs})
        expected = f"a number of devices that a gang has: {', '.join(map(str, counts))}"
        table.refuse("devices", expected, str(found["devices"]))
    numbers = {name: float(found[name]) for name in ("arrival_s", "samples")}
    return Job(**{**found, **numbers, "gangs": gangs, "command": tuple(found["command"])})


def _gang(text: str, table: _Table) -> Gang:
    found = re.fullmatch(r"([^\s:=]+):([1-9]\d*)=([0-9.eE+-]+)", text)
    step_s = _value(found[3]) if found else text
    if found is None or isinstance(step_s, str):
        table.refuse("gangs", "gangs such as h100:2=0.23, two devices and seconds per step", repr(text))
    if not 0 < step_s < math.inf:
        table.refuse("gangs", "more than 0 seconds per step", repr(text))
    return Gang(kind=found[1], devices=int(found[2]), step_s=float(step_s))


def _read_estimate(path: Path, table: _Table) -> Estimate:
    try:
        estimate = from_json(Estimate, parse(_read(path)))
    except ValueError as error:
        table.refuse("estimate", "a file that 'apollo estimate --save' wrote", f"{path}: {error}")
    if not gangs_of(estimate):
        table.refuse("estimate", "an estimate with a Cell that fits its devices", str(path))
    return estimate


def gangs_of(estimate: Estimate) -> tuple[Gang, ...]:
    """Return the fastest Cell that fits, for every device and number of devices."""
    best: dict[tuple[str, int], Gang] = {}
    for cell in estimate.cells:
        key = cell.device, cell.devices
        if cell.fits and (key not in best or cell.step_s < best[key].step_s):
            best[key] = Gang(
                kind=cell.device,
                devices=cell.devices,
                step_s=cell.step_s,
                data=cell.data,
                tensor=cell.tensor,
                stages=cell.stages,
            )
    return tuple(best.values())


def format_trace(jobs: Sequence[Job]) -> str:
    """Return jobs as CSV."""
    lines = [",".join(_ROW)]
    for job in jobs:
        gangs = " ".join(f"{gang.kind}:{gang.devices}={gang.step_s:g}" for gang in job.gangs)
        lines.append(f"{job.name},{job.arrival_s:g},{job.steps},{job.devices},{job.samples:g},{gangs}")
    return "\n".join(lines) + "\n"


def read_plan(path: Path) -> ClusterPlan:
    """Return the plan in a file that `apollo cluster plan --save` wrote.

    Raises:
        ClusterError: it is no plan.
        OSError: it cannot be read.
    """
    try:
        return from_json(ClusterPlan, parse(_read(path)))
    except ValueError as error:
        raise ClusterError(f"{path} is not a plan that 'apollo cluster plan --save' wrote: {error}") from error


def format_plan_file(plan: ClusterPlan) -> str:
    """Return the text of a plan's file."""
    return json.dumps(to_json(plan), indent=1) + "\n"
