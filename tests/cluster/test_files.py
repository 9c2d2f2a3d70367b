"""Files of clusters and jobs: what is wrong is named with its line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from apollo_compile.cluster.files import format_trace, gangs_of, read_cluster, read_jobs, read_plan
from apollo_compile.cluster.generate import generate_jobs
from apollo_compile.cluster.values import Cluster, Gang, Nodes
from apollo_compile.cost_model.cells import Cell, Estimate
from apollo_compile.errors import ClusterError
from apollo_compile.json_form import to_json

CLUSTER = """\
restart_s = 30

[[node]]
kind = "h100"
count = 4
devices = 8
gpu = true

[[node]]  # one machine
kind = "cpu1"
devices = 2
"""
JOBS = """\
[[job]]
name = "clip"
steps = 1000
gangs = ["h100:1=0.5", "h100:8=0.1"]
devices = 8
command = ["train.py"]

[[job]]
name = "act"
steps = 10
arrival_s = 60
gangs = ["cpu1:2=1"]
"""
TRACE = """\
name,arrival_s,steps,devices,samples,gangs
clip,0,1000,8,64,h100:1=0.5 h100:8=0.1
act,60.5,10,0,1,cpu1:2=1
"""


def cell(devices: int, stages: int, step_s: float, fits: bool = True) -> Cell:
    """Return a Cell of a GPU."""
    split = {"devices": devices, "data": devices // stages, "tensor": 1, "stages": stages, "microbatches": 1}
    times = dict.fromkeys(("step_s", "low_s", "high_s"), step_s)
    return Cell(device="h100", **split, **times, memory_bytes=1, fits=fits, bound="arithmetic")


ESTIMATE = Estimate(
    name="clip", batch=64, cells=(cell(1, 1, 3.0, fits=False), cell(2, 1, 2.0), cell(2, 2, 1.5)), sources={}
)


def test_clusters_and_jobs_are_read(tmp_path: Path) -> None:
    """With defaults, and with gangs."""
    (tmp_path / "c.toml").write_text(CLUSTER)
    nodes = (Nodes(kind="h100", count=4, devices=8, gpu=True), Nodes(kind="cpu1", count=1, devices=2))
    assert read_cluster(tmp_path / "c.toml") == Cluster(nodes=nodes, restart_s=30.0)
    (tmp_path / "j.toml").write_text(JOBS)
    clip, act = read_jobs(tmp_path / "j.toml")
    assert clip.gangs == (Gang(kind="h100", devices=1, step_s=0.5), Gang(kind="h100", devices=8, step_s=0.1))
    assert (clip.devices, clip.command, act.arrival_s, act.steps) == (8, ("train.py",), 60.0, 10)


def test_gangs_are_those_cells_of_an_estimate_that_fit(tmp_path: Path) -> None:
    """The fastest for a number of devices; its batch are the samples of a step."""
    (tmp_path / "clip.json").write_text(json.dumps(to_json(ESTIMATE)))
    (tmp_path / "j.toml").write_text('[[job]]\nname = "clip"\nsteps = 5\nestimate = "clip.json"\n')
    (job,) = read_jobs(tmp_path / "j.toml")
    assert job.gangs == gangs_of(ESTIMATE) == (Gang(kind="h100", devices=2, step_s=1.5, data=1, tensor=1, stages=2),)
    assert job.samples == 64


def test_a_trace_may_have_empty_lines_and_a_mark_of_its_encoding(tmp_path: Path) -> None:
    """Editors and spreadsheets write files so."""
    path = tmp_path / "trace.csv"
    path.write_text("\ufeffname,arrival_s,steps,devices,samples,gangs\none,0,3,1,1,h100:1=0.5\n\n", encoding="utf-8")
    assert [job.name for job in read_jobs(path)] == ["one"]


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    """But for digits of the steps' seconds."""
    jobs = generate_jobs(Cluster(nodes=(Nodes(kind="a", count=2, devices=4),)), 20, seed=5)
    (tmp_path / "t.csv").write_text(format_trace(jobs))
    again = read_jobs(tmp_path / "t.csv")
    assert format_trace(again) == format_trace(jobs)
    assert [job.name for job in again] == [job.name for job in jobs]


def wrong(text: str, old: str, new: str) -> str:
    """Return a text with a mistake."""
    assert old in text
    return text.replace(old, new, 1)


NONSENSE: dict[str, list[tuple[str, str]]] = {
    "c.toml": [
        (wrong(CLUSTER, "count = 4", "count = 0"), "5: field 'count': expected a whole number of at least 1, got 0"),
        (wrong(CLUSTER, "devices = 2", 'devices = "2"'), "11: field 'devices': expected a whole number .*, got '2'"),
        (wrong(CLUSTER, "devices = 2\n", ""), "9: field 'devices': expected a whole number .*, got no such field"),
        (wrong(CLUSTER, "restart_s = 30", "restart_s = -1"), "1: field 'restart_s': expected a number of at least 0"),
        (wrong(CLUSTER, "gpu = true", "gpus = 8"), "7: unknown field: expected one of kind, count, .*, got 'gpus'"),
        (wrong(CLUSTER, "gpu = true", "gpu = 8"), "7: field 'gpu': expected true or false, got 8"),
        (wrong(CLUSTER, '"cpu1"', '"h100"'), "10: field 'kind': expected one table for every kind, got a second one"),
        (wrong(CLUSTER, '"cpu1"', '""'), "10: field 'kind': expected a text that is not empty, got ''"),
        (wrong(CLUSTER, "count = 4", "count == 4"), r"5: not TOML"),
        ("", r"1: field 'node': expected at least one table \[\[node\]\], got None"),
    ],
    "j.toml": [
        (wrong(JOBS, "s = 10\n", "s = 1.5\n"), "10: field 'steps': expected a whole number of at least 1, got 1.5"),
        (wrong(JOBS, '"h100:1=0.5"', '"h100=0.5"'), "4: field 'gangs': expected gangs such as .*'h100=0.5'"),
        (wrong(JOBS, '"h100:1=0.5"', '"h100:1=0"'), "4: field 'gangs': expected more than 0 seconds per step"),
        (wrong(JOBS, '"h100:1=0.5"', '"h100:1=1-2"'), "4: field 'gangs': expected gangs such as"),
        (wrong(JOBS, '["h100:1=0.5", "h100:8=0.1"]', '"h100:1=0.5"'), "4: field 'gangs': expected a list of texts"),
        (wrong(JOBS, "es = 8", "es = 4"), "5: field 'devices': expected a number .* that a gang has: 1, 8, got 4"),
        (wrong(JOBS, '"act"', '"clip"'), "9: field 'name': expected a name of its own for every job, got 'clip' again"),
        (wrong(JOBS, 'gangs = ["cpu1:2=1"]', ""), "8: .*expected either gangs or an estimate, got neither"),
        (wrong(JOBS, "arrival_s = 60", 'estimate = "x.json"'), "12: .*expected either gangs or an estimate, got both"),
        (wrong(JOBS, "_s = 60", "_s = inf"), "11: field 'arrival_s': expected a number of at least 0, got inf"),
    ],
    "t.csv": [
        (wrong(TRACE, "name,", "job,"), "1: expected the columns name,arrival_s,.*, got job,arrival_s"),
        (wrong(TRACE, "act,60.5", "act,soon"), "3: field 'arrival_s': expected a number of at least 0, got 'soon'"),
        (wrong(TRACE, ",1000,", ",0,"), "2: field 'steps': expected a whole number of at least 1, got 0"),
        (wrong(TRACE, ",8,64,", ",4,64,"), "2: field 'devices': expected a number of devices .*: 1, 8, got 4"),
        (wrong(TRACE, "act,", "clip,"), "3: field 'name': expected a name of its own for every job, got 'clip' again"),
        (wrong(TRACE, ",cpu1:2=1", ","), "3: field 'gangs': expected either gangs or an estimate, got neither"),
        (wrong(TRACE, "act,60.5,", "act,"), "3: expected 6 columns, got 5"),
        ("", "1: expected the columns name,.*, got nothing"),
        (TRACE.splitlines()[0], "1: expected at least one job, got none"),
    ],
}


@pytest.mark.parametrize(
    ("name", "text", "message"), [(name, *each) for name, found in NONSENSE.items() for each in found]
)
def test_nonsense_in_a_file_is_an_error_with_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    """And what was expected and found."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ClusterError, match=rf"{re.escape(name)}:{message}"):
        (read_cluster if name == "c.toml" else read_jobs)(tmp_path / name)


@pytest.mark.parametrize(
    "content", ["{}", "no json", json.dumps(to_json(Estimate(name="", batch=1, cells=(), sources={})))]
)
def test_an_estimate_that_is_none_is_an_error_of_the_job(tmp_path: Path, content: str) -> None:
    """Also one without a Cell that fits."""
    (tmp_path / "clip.json").write_text(content)
    (tmp_path / "j.toml").write_text('[[job]]\nname = "clip"\nsteps = 5\nestimate = "clip.json"\n')
    with pytest.raises(ClusterError, match=r"j\.toml:4: field 'estimate': expected .*clip\.json"):
        read_jobs(tmp_path / "j.toml")


def test_a_file_that_is_no_plan_is_an_error(tmp_path: Path) -> None:
    """With what wrote one."""
    (tmp_path / "p.json").write_text("[]")
    with pytest.raises(
        ClusterError, match=r"p\.json is not a plan that 'apollo cluster plan --save' wrote: ClusterPlan is \[\]"
    ):
        read_plan(tmp_path / "p.json")
