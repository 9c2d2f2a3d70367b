"""The replay of Arena's traces, on a database and a trace that are made up here."""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
from pathlib import Path

import pytest

from apollo_compile.cluster.values import Cluster, Nodes
from benchmarks import arena
from benchmarks.arena import CELLS, FCFS, TraceJob, fit_s, iteration_s, predict_s, read_database, read_trace, replay

HEADER = "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,gpu_type"
TIMES = {
    "bert_760M_128": {"1_a100_1_n_1_d": 6.0, "1_a100_1_n_2_d": 3.0, "1_v100_1_n_1_d": 12.0},
    "bert_1.3B_256": {"1_a100_1_n_2_d": 18.0, "2_a100_2_n_4_d": 301.0},
}
CLUSTER = Cluster(nodes=(Nodes(kind="a100", count=1, devices=4), Nodes(kind="v100", count=1, devices=16)))


def job(name: str, place: int, steps: int, kind: str, devices: int) -> TraceJob:
    """Return a job with the smallest model."""
    return TraceJob(name=name, round=place, steps=steps, model="bert__760M", batch=128, gang=(kind, devices))


def test_a_database_of_plain_values_is_read_and_a_pickle_that_could_run_code_is_refused(tmp_path: Path) -> None:
    """Before it is loaded."""
    (tmp_path / "d.pkl").write_bytes(pickle.dumps({"optimal": TIMES}))
    assert read_database(tmp_path / "d.pkl") == TIMES
    (tmp_path / "d.pkl").write_bytes(pickle.dumps({"optimal": functools.partial(os.system, "false")}))
    with pytest.raises(ValueError, match=r"REDUCE.*expected plain values only"):
        read_database(tmp_path / "d.pkl")


def test_rounds_of_a_trace_are_those_of_the_artifact(tmp_path: Path) -> None:
    """The first round has what arrives within 300 s of the first job, and a fifth of the iterations is simulated."""
    rows = [f"j{place},{time},50,bert__760M,0,128,1,a100" for place, time in enumerate((1000, 1300, 1301, 1600, 2201))]
    (tmp_path / "t.csv").write_text("\n".join((HEADER, *rows)))
    trace = read_trace(tmp_path / "t.csv")
    assert [row.round for row in trace] == [0, 0, 1, 1, 4]
    assert trace[0] == job("j0", 0, 10, "a100", 1)


def test_a_time_that_was_not_measured_is_that_of_a_larger_model() -> None:
    """1.8 times faster per size; a time above a round is none."""
    small = TraceJob(name="j", round=0, steps=1, model="bert__760M", batch=256, gang=("a100", 2))
    assert iteration_s(TIMES, small, "a100", 2) == pytest.approx(10.0)
    assert iteration_s(TIMES, small, "a100", 1) is None and iteration_s(TIMES, small, "a100", 8) is None


def test_first_come_first_served_is_replayed_round_by_round() -> None:
    """One GPU for 100 iterations of 6 s is two rounds, the first of which is half lost to the search."""
    found = replay(TIMES, [job("a", 0, 100, "a100", 1)], CLUSTER, 4, FCFS)
    rate = 128 / 6
    assert found.per_gpu == pytest.approx((rate / 2 + rate) / 4)
    assert (found.finished, found.completion_s) == (1, 600.0)


def test_jobs_wait_only_for_those_of_the_same_kind() -> None:
    """Two want V100s, a third an A100 that is free."""
    busy = Cluster(nodes=(Nodes(kind="a100", count=1, devices=4), Nodes(kind="v100", count=1, devices=1)))
    trace = [job("a", 0, 100, "v100", 1), job("b", 0, 25, "v100", 1), job("c", 0, 50, "a100", 1)]
    assert replay(TIMES, trace, busy, 10, FCFS).completion_s == pytest.approx((4 * 300 + 5 * 300 + 1 * 300) / 3)


def test_apollo_chooses_the_kind_itself() -> None:
    """The job asked for a V100, which is half as fast; two A100s are faster, and each GPU costs ten of 300 s."""
    found = replay(TIMES, [job("a", 0, 100, "v100", 1)], CLUSTER, 1, CELLS)
    assert found.per_gpu == pytest.approx(128 / 3 / 2 * (1 - 20 / 300))


def test_a_fitted_sample_gives_what_was_measured() -> None:
    """On the gang that it was fitted to; twice as many GPUs take a little more than half."""
    sample_s = fit_s("1.3B", "a100", 2, 128, 10.0)
    assert predict_s("1.3B", sample_s, "a100", 2, 128) == pytest.approx(10.0, rel=1e-3)
    assert 5.0 < predict_s("1.3B", sample_s, "a100", 4, 128) < 6.0


def test_the_script_prints_a_row_per_trace_and_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And errors of estimates."""
    for folder in ("database", "resources", "traces"):
        (tmp_path / folder).mkdir()
    (tmp_path / "database" / "prof_database.pkl").write_bytes(pickle.dumps({"optimal": TIMES}))
    (tmp_path / "resources" / "sim_cluster_spec.json").write_text(json.dumps([{"a100": {"node_num": 1}}]))
    for name in ("philly", "venus", "pai"):
        text = f"{HEADER}\nj,100,500,bert__760M,0,128,1,a100\n"
        (tmp_path / "traces" / f"simulate_trace_{name}.csv").write_text(text)
    assert arena.main([str(tmp_path), "--rounds", "3", "--estimates"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [tuple(line.split()[:2]) for line in lines[4:10]]
    assert rows == list(itertools.product(("philly", "helios", "pai"), ("fcfs", "apollo")))
    assert [line.split()[:2] for line in lines[-2:]] == [["2", "1"], ["8", "1"]]
