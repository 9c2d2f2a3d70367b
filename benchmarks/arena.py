"""Replay the traces of Arena's public artifact, and compare with what its own simulator reports.

    python -m benchmarks.arena FOLDER --rounds 60

FOLDER is a copy of the branch `ae-eurosys` of github.com/sjtu-epcc/arena, of which nothing is part of this repository.
Its database has measured iteration times of models on A100, V100, A40 and A10; its traces are those of Philly, Helios
(Venus) and PAI. The artifact's simulator works in rounds of 300 s and reports the mean over rounds of the mean over
running jobs of samples per second and GPU. This script computes the same number for first come, first served, each job
on what it asked for, which checks the replay, and for the policy `apollo`. The pickle of the database is read only if
its opcodes make plain values.

`--estimates` also predicts the times of BERT on all other numbers of GPUs from the smallest one that was measured, with
`cost_model/cells.py`, and compares with what was measured there.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import math
import pickle
import pickletools
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from apollo_compile.cluster.policies import Apollo, Fcfs
from apollo_compile.cluster.simulate import simulate
from apollo_compile.cluster.values import Cluster, Gang, Job, JobPlacement, Nodes
from apollo_compile.cost_model.cells import Device, Layer, ModelTimes, cells_of
from apollo_compile.cost_model.collectives import Link

ROUND_S = 300
STEPS_DIVISOR = 5
"""The artifact's simulator divides the iterations of its traces by this."""

CAPACITY = {"a100": 4, "v100": 16, "a40": 2, "a10": 2}
"""GPUs of a node in the artifact's simulated cluster."""

SIZES = {
    "wide_resnet": ("500M", "1B", "2B", "4B", "6.8B", "13B"),
    "bert": ("760M", "1.3B", "2.6B", "6.7B", "15B", "39B"),
    "moe": ("690M", "1.3B", "2.4B", "10B", "27B", "70B"),
}
GROWTH = 1.8
"""Where a model was not measured on a gang, the artifact takes a larger model, this many times faster per size."""

TRACES = {"philly": "simulate_trace_philly.csv", "helios": "simulate_trace_venus.csv", "pai": "simulate_trace_pai.csv"}
COUNTS = (1, 2, 4, 8, 16)

_PLAIN = frozenset(
    {
        *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET"),
        *("EMPTY_DICT", "EMPTY_LIST", "SETITEM", "SETITEMS", "APPEND", "APPENDS"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINFLOAT", "BININT", "BININT1", "BININT2"),
    }
)
"""Opcodes of a pickle that make dictionaries, lists, texts and numbers, and nothing else."""

Times = Mapping[str, Mapping[str, float]]
"""Seconds of an iteration, by model and by gang."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it names {module}.{name}")


def read_database(path: Path) -> Times:
    """Return the measured times. Raises `ValueError` if the pickle could run code."""
    content = path.read_bytes()
    if other := {opcode.name for opcode, _, _ in pickletools.genops(content)} - _PLAIN:
        raise ValueError(f"{path} has opcodes {sorted(other)}: expected plain values only")
    times: Times = _PlainUnpickler(io.BytesIO(content)).load()["optimal"]
    return times


def read_cluster(path: Path) -> Cluster:
    """Return the artifact's simulated cluster."""
    (counts,) = json.loads(path.read_text())
    nodes = (
        Nodes(kind=kind, count=each["node_num"], devices=CAPACITY[kind], gpu=True) for kind, each in counts.items()
    )
    return Cluster(nodes=tuple(nodes))


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A row of a trace."""

    name: str
    round: int
    steps: int
    model: str
    batch: int
    gang: tuple[str, int]
    """Kind and number of GPUs that it asked for."""


def read_trace(path: Path) -> list[TraceJob]:
    """Return the jobs of a trace, with the round in which the artifact's simulator sees them."""
    rows = list(csv.DictReader(path.read_text().splitlines()))
    begin = int(rows[0]["submission_time"])
    return [
        TraceJob(
            name=row["job_id"],
            round=max(0, math.ceil((int(row["submission_time"]) - begin) / ROUND_S) - 1),
            steps=int(row["num_iteration"]) // STEPS_DIVISOR,
            model=row["model_name"],
            batch=int(row["batch_size"]),
            gang=(row["gpu_type"], int(row["num_gpu"])),
        )
        for row in rows
    ]


def iteration_s(times: Times, job: TraceJob, kind: str, devices: int) -> float | None:
    """Return the time of an iteration on full nodes, as the artifact's simulator looks it up; None if infeasible."""
    per_node = min(devices, CAPACITY[kind])
    hosts = devices // per_node
    gang = f"{hosts}_{kind}_{hosts}_n_{per_node}_d"
    family, size = job.model.split("__")
    sizes = SIZES[family]
    for grown, other in enumerate(sizes[sizes.index(size) :]):
        known = times.get(f"{family}_{other}_{job.batch}", {})
        if gang in known:
            seconds = known[gang]
            return seconds / GROWTH**grown if 0 < seconds <= ROUND_S else None
    return None


@dataclass(frozen=True, slots=True)
class Policy:
    """How a policy pays for the start of a job: it searches a plan of parallelism for so long."""

    name: str
    per_gpu_s: int
    most_s: int

    def lost_rounds(self, devices: int) -> tuple[float, ...]:
        """Return the share of its first rounds that a job loses."""
        search_s = min(self.per_gpu_s * devices, self.most_s)
        return (search_s / ROUND_S,) if search_s <= ROUND_S else (1.0,) * math.ceil(search_s / ROUND_S)


FCFS = Policy("fcfs", 150, 600)
"""Without hints to the search."""
CELLS = Policy("apollo", 10, 40)
"""With the parallelism of a Cell as a hint, as for Crius."""


def make_jobs(times: Times, trace: Sequence[TraceJob], cluster: Cluster, policy: Policy, asked: bool) -> list[Job]:
    """Return the jobs whose gangs are feasible; a step is the whole job, in whole rounds."""
    jobs = []
    for row in trace:
        gangs = []
        for kind, devices in [row.gang] if asked else itertools.product(CAPACITY, COUNTS):
            seconds = iteration_s(times, row, kind, devices)
            if seconds is not None:
                rounds = math.ceil(max(1, row.steps) * seconds / ROUND_S - 1e-9)
                delay = len(policy.lost_rounds(devices)) - 1
                gangs.append(Gang(kind=kind, devices=devices, step_s=float((max(1, rounds) + delay) * ROUND_S)))
        fitting = tuple(gang for gang in gangs if cluster.fits(gang))
        if fitting:
            jobs.append(Job(name=row.name, steps=1, gangs=fitting, arrival_s=float(row.round * ROUND_S)))
    return jobs


@dataclass(frozen=True, slots=True)
class Result:
    """What a policy reached in the first rounds of a trace."""

    per_gpu: float
    """Mean over rounds of the mean over running jobs of samples per second and GPU."""
    throughput: float
    """Mean over rounds of the samples per second of all jobs."""
    finished: int
    completion_s: float
    """Mean of the finished jobs, from arrival to end."""


def replay(
    times: Times, trace: Sequence[TraceJob], cluster: Cluster, rounds: int, policy: Policy, **options: Any
) -> Result:
    """Return what a policy reaches; `options` are those of `Apollo`."""
    trace = [row for row in trace if row.round < rounds]
    jobs = make_jobs(times, trace, cluster, policy, asked=policy is FCFS)
    if policy is FCFS:  # a job waits only for those that asked for the same kind
        groups = [[job for job in jobs if job.gangs[0].kind == nodes.kind] for nodes in cluster.nodes]
        found = [simulate(cluster, group, Fcfs()) for group in groups]
    else:
        found = [simulate(cluster, jobs, Apollo(cluster, jobs, **options))]
    placements = [each for schedule in found for each in schedule.placements]
    rows = {row.name: row for row in trace}
    per_gpu, totals = [], []
    for place in range(rounds):
        now_s = place * ROUND_S
        rates = [
            (rate, each.gang.devices)
            for each in placements
            if each.start_s <= now_s < each.end_s
            for rate in [_rate(times, rows[each.job], each, now_s, policy)]
        ]
        per_gpu.append(statistics.fmean(rate / devices for rate, devices in rates) if rates else 0.0)
        totals.append(sum(rate for rate, _ in rates))
    last_s = (rounds - 1) * ROUND_S
    ended = [each.end_s - rows[each.job].round * ROUND_S for each in placements if each.end_s <= last_s]
    return Result(
        per_gpu=statistics.fmean(per_gpu),
        throughput=statistics.fmean(totals),
        finished=len(ended),
        completion_s=statistics.fmean(ended) if ended else 0.0,
    )


def _rate(times: Times, row: TraceJob, placement: JobPlacement, now_s: float, policy: Policy) -> float:
    seconds = iteration_s(times, row, placement.gang.kind, placement.gang.devices)
    assert seconds is not None, "only feasible gangs are placed"
    lost = policy.lost_rounds(placement.gang.devices)
    place = round((now_s - placement.start_s) / ROUND_S)
    return row.batch / seconds * (1 - lost[place] if place < len(lost) else 1.0)


# --------------------------------------------------------------------------------------------------------- estimates

BERT = {"760M": (1536, 24), "1.3B": (2048, 24), "2.6B": (2560, 32), "6.7B": (4096, 32)}
"""Width and layers, with sequences of 1,024 tokens in float16."""
TOKENS = 1024
VOCABULARY = 51_200

_PCIE, _NVLINK, _NETWORK = Link(10e-6, 20e9), Link(10e-6, 120e9), Link(20e-6, 10e9)
LINKS = {"a100": _PCIE, "v100": _NVLINK, "a40": _PCIE, "a10": _PCIE}
"""Within a node, assumed: 80 % of PCIe 4 x16 and of V100's NVLink; between nodes 80 % of 100 Gbit/s."""
MEMORY_BYTES_PER_S = {"a100": 1.6e12, "v100": 0.9e12, "a40": 0.7e12, "a10": 0.6e12}


def bert_times(size: str, sample_s: float, samples: int) -> ModelTimes:
    """Return a BERT whose forward and backward of one sample take `sample_s` on one GPU."""
    width, num_layers = BERT[size]
    block, head = 12 * width**2, VOCABULARY * width
    activation = samples * TOKENS * width * 2

    def layer(name: str, parameters: int, products: int) -> Layer:
        seconds = samples * sample_s * parameters / (num_layers * block + head)
        return Layer(
            name=name,
            forward_s=seconds / 3,
            backward_s=seconds * 2 / 3,
            divisible=1.0,
            products=products,
            weight_bytes=2 * parameters,
            frozen_bytes=0,
            activation_bytes=activation,
            saved_bytes=activation,
            cut_bytes=activation,
        )

    layers = (*(layer(f"layers.{place}", block, 4) for place in range(num_layers)), layer("head", head, 1))
    return ModelTimes(layers=layers, memory_share=0.0, launch_share=0.0, workspace_bytes=0)


def predict_s(size: str, sample_s: float, kind: str, devices: int, batch: int) -> float:
    """Return the time of the best Cell."""
    device = Device(
        name=kind,
        error=0.0,
        memory_bytes=None,
        per_node=CAPACITY[kind],
        link=LINKS[kind],
        node_link=_NETWORK,
        link_error=0.0,
        hides_gradients=True,
        update_bytes_per_s=MEMORY_BYTES_PER_S[kind],
    )
    return min(
        cell.step_s for cell in cells_of(lambda samples: bert_times(size, sample_s, samples), device, devices, batch)
    )


def fit_s(size: str, kind: str, devices: int, batch: int, measured_s: float) -> float:
    """Return the time of a sample on one GPU with which `devices` GPUs take what was measured, by bisection."""
    low, high = 0.0, measured_s * devices / batch
    for _ in range(30):
        middle = (low + high) / 2
        if predict_s(size, middle, kind, devices, batch) < measured_s:
            low = middle
        else:
            high = middle
    return high


def estimate_errors(times: Times) -> dict[int, list[float]]:
    """Return the relative errors of predicted times, by number of GPUs."""
    errors: dict[int, list[float]] = {}
    for model, gangs in times.items():
        family, size, batch = re.fullmatch(r"(.*)_([^_]*)_(\d+)", model).groups()  # type: ignore[union-attr]
        if family != "bert" or size not in BERT:
            continue
        for kind, capacity in CAPACITY.items():
            measured = {}
            for devices in COUNTS:
                hosts = -(-devices // capacity)
                seconds = gangs.get(f"{hosts}_{kind}_{hosts}_n_{devices // hosts}_d", -1.0)
                if seconds > 0:
                    measured[devices] = seconds
            if len(measured) > 1:
                first = min(measured)
                sample_s = fit_s(size, kind, first, int(batch), measured.pop(first))
                for devices, seconds in measured.items():
                    errors.setdefault(devices, []).append(
                        predict_s(size, sample_s, kind, devices, int(batch)) / seconds - 1
                    )
    return errors


# -------------------------------------------------------------------------------------------------------------- main


def run_theirs(folder: Path, python: str, policy: str, trace: str, rounds: int) -> float:
    """Return what the artifact's simulator reports; this runs the artifact's code with an interpreter that can."""
    command = [python, "simulator.py", f"--policy={policy}", f"--trace_type={trace}", f"--max_sched_round={rounds}"]
    command += ["--enable_alpa", "--no_res_stored", *(["--sched_with_opt"] if policy == "crius" else [])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    found = re.findall(r"Average job-level throughput per GPU: ([\d.]+)", done.stdout)
    return float(found[-1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="copy of the artifact")
    parser.add_argument("--rounds", type=int, default=60, help="rounds of 300 s; default: 60")
    parser.add_argument("--theirs", metavar="PYTHON", help="also run the artifact's simulator, with this interpreter")
    parser.add_argument("--estimates", action="store_true", help="also predict times of BERT")
    args = parser.parse_args(arguments)
    times = read_database(args.folder / "database" / "prof_database.pkl")
    cluster = read_cluster(args.folder / "resources" / "sim_cluster_spec.json")
    rows = []
    for name, file in TRACES.items():
        trace = read_trace(args.folder / "traces" / file)
        for policy in (FCFS, CELLS):
            found = replay(times, trace, cluster, args.rounds, policy)
            other = {"fcfs": "fcfs", "apollo": "crius"}[policy.name]
            theirs = run_theirs(args.folder, args.theirs, other, name, args.rounds) if args.theirs else None
            rows.append(
                (name, policy.name, found.per_gpu, found.throughput, found.finished, found.completion_s, other, theirs)
            )
    headers = ("trace", "policy", "samples/s per GPU", "samples/s", "finished", "completion (s)", "beside", "theirs")
    print(f"{args.rounds} rounds, simulated\n\n{tabulate(rows, headers=headers, floatfmt='.3f')}")
    if args.estimates:
        errors = estimate_errors(times)
        lines = [
            (devices, len(values), statistics.fmean(map(abs, values)), statistics.median(values))
            for devices, values in sorted(errors.items())
        ]
        print("\nBERT, predicted from the smallest measured number of GPUs of each kind\n")
        print(tabulate(lines, headers=("GPUs", "cases", "mean error", "median, signed"), floatfmt=".3f"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
