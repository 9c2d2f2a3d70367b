"""Files of a cluster, its jobs and plans; whatever is wrong in one is an error with its line.

    read_cluster(path), read_jobs(path)     TOML
    read_trace(path), format_trace(jobs)    CSV: name, arrival_s, steps, devices, samples, gangs
    read_plan(path), format_plan_file(plan) JSON

A gang is written as `h100:2=0.23`: two devices of kind h100, 0.23 s per step. In a TOML file of jobs, `estimate` names
a file that `apollo estimate --save` wrote; the Cells in it that fit are the gangs.
"""

from __future__ import annotations

import csv
import functools
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from apollo_compile.cluster.values import Cluster, ClusterPlan, Gang, Job, Nodes
from apollo_compile.cost_model.cells import Estimate
from apollo_compile.errors import ClusterError
from apollo_compile.json_form import from_json, parse, to_json

_COLUMNS = ("name", "arrival_s", "steps", "devices", "samples", "gangs")


class _Table:
    """A table of a TOML file, whose fields are checked.

    Arguments:
        path: the file.
        text: its text.
        header: the header of the table, such as `[[job]]`; empty for the top of the file.
        index: which of the tables with this header.
        values: the fields.
        known: names of fields that may be in it.
    """

    def __init__(
        self, path: Path, text: str, header: str, index: int, values: Mapping[str, Any], known: Sequence[str]
    ) -> None:
        self._path = path
        self._lines = text.splitlines()
        self._values = values
        headers = [number for number, line in enumerate(self._lines) if header and line.strip().startswith(header)]
        self._first = headers[index] if index < len(headers) else 0
        for name in values:
            if name not in known:
                self.refuse(name, f"one of {', '.join(known)}", repr(name), what="unknown field")

    def refuse(self, name: str, expected: str, got: str, what: str | None = None) -> NoReturn:
        """Raise `ClusterError` for a field."""
        raise ClusterError(
            f"{self._path}:{self._line_of(name)}: {what or f'field {name!r}'}: expected {expected}, got {got}"
        )

    def _line_of(self, name: str) -> int:
        """Return the line of a field, or of the header if the field is missing or written in another way."""
        for number in range(self._first, len(self._lines)):
            line = self._lines[number].strip()
            if number > self._first and line.startswith("["):
                break
            if re.match(rf"\"?{re.escape(name)}\"?\s*=", line):
                return number + 1
        return self._first + 1

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text that is not empty."""
        value = self._get(name, default, "a text that is not empty")
        if not isinstance(value, str) or not value.strip():
            self.refuse(name, "a text that is not empty", repr(value))
        return value

    def texts(self, name: str, default: Sequence[str] = ()) -> tuple[str, ...]:
        """Return a list of texts."""
        value = self._get(name, list(default), "a list of texts")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.refuse(name, "a list of texts", repr(value))
        return tuple(value)

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number."""
        value = self._get(name, default, f"a whole number of at least {least}")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(name, f"a whole number of at least {least}", repr(value))
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number of at least 0."""
        value = self._get(name, default, "a number of at least 0")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            self.refuse(name, "a number of at least 0", repr(value))
        return float(value)

    def flag(self, name: str) -> bool:
        """Return true or false; false if the field is missing."""
        value = self._get(name, False, "true or false")
        if not isinstance(value, bool):
            self.refuse(name, "true or false", repr(value))
        return value

    def _get(self, name: str, default: Any, expected: str) -> Any:
        if name in self._values:
            return self._values[name]
        if default is None:
            self.refuse(name, expected, "no such field")
        return default


def _tables(path: Path, name: str, top: Sequence[str], known: Sequence[str]) -> tuple[_Table, list[_Table]]:
    """Return the top of a file, and its tables `[[name]]`, of which there is at least one."""
    text = _read(path)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        raise ClusterError(f"{path}:{line[1] if line else 1}: not TOML: {error}") from error
    head = _Table(path, text, "", 0, values, (*top, name))
    items = values.get(name)
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        head.refuse(name, f"at least one table [[{name}]]", repr(items))
    return head, [_Table(path, text, f"[[{name}]]", index, item, known) for index, item in enumerate(items)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ClusterError(f"{path}:1: expected text in UTF-8: {error}") from error


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that a TOML file describes.

    Raises:
        ClusterError: something in it is wrong; the message begins with file and line.
        OSError: it cannot be read.
    """
    head, tables = _tables(path, "node", ("restart_s",), ("kind", "count", "devices", "gpu"))
    nodes: list[Nodes] = []
    for table in tables:
        kind = table.text("kind")
        if any(kind == each.kind for each in nodes):
            table.refuse("kind", "one table for every kind", f"a second one for {kind!r}")
        nodes.append(
            Nodes(kind=kind, count=table.whole("count", 1), devices=table.whole("devices"), gpu=table.flag("gpu"))
        )
    return Cluster(nodes=tuple(nodes), restart_s=head.number("restart_s", 0.0))


def read_jobs(path: Path) -> tuple[Job, ...]:
    """Return the jobs in a TOML file, or in a trace if its name ends in `.csv`.

    Raises:
        ClusterError: something in it is wrong; the message begins with file and line.
        OSError: it, or an estimate that it names, cannot be read.
    """
    if path.suffix == ".csv":
        return read_trace(path)
    known = ("name", "steps", "arrival_s", "devices", "samples", "gangs", "estimate", "command")
    jobs: dict[str, Job] = {}
    for table in _tables(path, "job", (), known)[1]:
        job = _job(path.parent, table)
        if job.name in jobs:
            table.refuse("name", "a name of its own for every job", f"{job.name!r} again")
        jobs[job.name] = job
    return tuple(jobs.values())


def _job(folder: Path, table: _Table) -> Job:
    texts, source = table.texts("gangs"), table.text("estimate", "-")
    if (source == "-") == (not texts):
        table.refuse("gangs", "either gangs or an estimate", "both" if texts else "neither")
    if texts:
        gangs, samples = tuple(_gang(text, functools.partial(table.refuse, "gangs")) for text in texts), 1.0
    else:
        estimate = _read_estimate(folder / source, functools.partial(table.refuse, "estimate"))
        gangs, samples = gangs_of(estimate), float(estimate.batch)
    devices = table.whole("devices", 0, least=0)
    if devices and all(gang.devices != devices for gang in gangs):
        counts = sorted({gang.devices for gang in gangs})
        table.refuse("devices", f"a number of devices that a gang has: {', '.join(map(str, counts))}", str(devices))
    return Job(
        name=table.text("name"),
        steps=table.whole("steps"),
        gangs=gangs,
        arrival_s=table.number("arrival_s", 0.0),
        devices=devices,
        samples=table.number("samples", samples),
        command=table.texts("command"),
    )


Refuse = Callable[[str, str], NoReturn]
"""Raises an error with what was expected and what was found."""


def _gang(text: str, refuse: Refuse) -> Gang:
    found = re.fullmatch(r"([^\s:=]+):([1-9]\d*)=([0-9.eE+-]+)", text)
    expected = "gangs such as h100:2=0.23, two devices and seconds per step"
    if found is None:
        refuse(expected, repr(text))
    try:
        step_s = float(found[3])
    except ValueError:
        refuse(expected, repr(text))
    if not (0 < step_s < math.inf):
        refuse("more than 0 seconds per step", repr(text))
    return Gang(kind=found[1], devices=int(found[2]), step_s=step_s)


def _read_estimate(path: Path, refuse: Refuse) -> Estimate:
    try:
        estimate = from_json(Estimate, parse(_read(path)))
    except ValueError as error:
        refuse("a file that 'apollo estimate --save' wrote", f"{path}: {error}")
    if not gangs_of(estimate):
        refuse("an estimate with a Cell that fits its devices", str(path))
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


def read_trace(path: Path) -> tuple[Job, ...]:
    """Return the jobs in a CSV file.

    Raises:
        ClusterError: something in it is wrong; the message begins with file and line.
        OSError: it cannot be read.
    """
    rows = csv.reader(_read(path).splitlines())
    header = next(rows, [])
    if tuple(header) != _COLUMNS:
        raise ClusterError(f"{path}:1: expected the columns {','.join(_COLUMNS)}, got {','.join(header) or 'nothing'}")
    jobs: dict[str, Job] = {}
    for row in rows:
        refuse = functools.partial(_refuse_row, path, rows.line_num)
        job = _row(row, refuse)
        if job.name in jobs:
            refuse("a name of its own for every job", f"{job.name!r} again")
        jobs[job.name] = job
    if not jobs:
        _refuse_row(path, 1, "at least one job", "none")
    return tuple(jobs.values())


def _refuse_row(path: Path, line: int, expected: str, got: str) -> NoReturn:
    raise ClusterError(f"{path}:{line}: expected {expected}, got {got}")


def _row(row: Sequence[str], refuse: Refuse) -> Job:
    if len(row) != len(_COLUMNS):
        refuse(f"{len(_COLUMNS)} columns", str(len(row)))
    fields = dict(zip(_COLUMNS, row, strict=True))

    def number(name: str, least: float) -> float:
        try:
            value = float(fields[name])
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            refuse(f"{name} of at least {least:g}", repr(fields[name]))
        return value

    gangs = tuple(_gang(text, refuse) for text in fields["gangs"].split())
    devices = int(number("devices", 0))
    if not gangs or (devices and all(gang.devices != devices for gang in gangs)):
        refuse(f"a gang of {devices} devices" if gangs else "at least one gang", repr(fields["gangs"]))
    return Job(
        name=fields["name"],
        steps=int(number("steps", 1)),
        gangs=gangs,
        arrival_s=number("arrival_s", 0),
        devices=devices,
        samples=number("samples", 0),
    )


def format_trace(jobs: Sequence[Job]) -> str:
    """Return jobs as CSV."""
    lines = [",".join(_COLUMNS)]
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
