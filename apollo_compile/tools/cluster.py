"""`apollo cluster`: the actions, each with its arguments and its answer.

ACTIONS     by name: generate, simulate, plan, run
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from apollo_compile.cluster.files import format_plan_file, format_trace, read_cluster, read_jobs, read_plan
from apollo_compile.cluster.values import ClusterPlan, JobSchedule
from apollo_compile.tools.arguments import above_zero, positive

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionResult:
    """What an action has to say."""

    text: str
    facts: Any
    """The same for JSON."""
    status: int = 0
    """Exit code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One action of `apollo cluster`."""

    text: str
    """What it does, in a line."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Tell], ActionResult]


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", type=Path, required=True, metavar="FILE", help="nodes of the cluster, as TOML")


# ---------------------------------------------------------------------------------------------------------- generate


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="TRACE", help="file to write, as CSV")
    _add_cluster(parser)
    parser.add_argument("--jobs", type=positive, default=200, help="number of jobs; default: 200")
    parser.add_argument("--load", type=above_zero, default=1.0, help="what jobs ask for over what there is; default: 1")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers; default: 0")


def _generate(args: argparse.Namespace, tell: Tell) -> ActionResult:
    from apollo_compile.cluster.generate import generate_jobs

    jobs = generate_jobs(read_cluster(args.cluster), args.jobs, seed=args.seed, load=args.load)
    args.file.write_text(format_trace(jobs), encoding="utf-8")
    last_s = max((job.arrival_s for job in jobs), default=0.0)
    text = f"{args.file}: {len(jobs)} jobs, the last of which arrives after {format_s(last_s)}"
    return ActionResult(text=text, facts={"jobs": len(jobs), "last_arrival_s": last_s})


# ---------------------------------------------------------------------------------------------------------- simulate


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="TRACE", help="jobs, as CSV or TOML")
    _add_cluster(parser)
    parser.add_argument(
        "--policy", default="fcfs,gavel,apollo", help="comma-separated policies; default: fcfs,gavel,apollo"
    )


def _simulate(args: argparse.Namespace, tell: Tell) -> ActionResult:
    from apollo_compile.cluster.policies import policy_by_name
    from apollo_compile.cluster.simulate import simulate

    cluster, jobs = read_cluster(args.cluster), read_jobs(args.file)
    policies = [policy_by_name(name, cluster, jobs) for name in args.policy.split(",")]
    schedules = [simulate(cluster, jobs, policy) for policy in policies]
    return ActionResult(text=_format_schedules(schedules), facts=[_facts_of(schedule) for schedule in schedules])


def _format_schedules(schedules: Sequence[JobSchedule]) -> str:
    rows = [
        (
            each.policy,
            format_s(each.mean_completion_s),
            f"{each.mean_completion_s / schedules[0].mean_completion_s - 1:+.1%}",
            format_s(each.makespan_s),
            f"{each.samples_per_s:.4g}",
            f"{each.busy_share:.0%}",
            len(each.placements) - len(each.end_s),
        )
        for each in schedules
    ]
    other = f"to {schedules[0].policy}"
    headers = ("policy", "mean completion", other, "makespan", "samples per s", "devices in use", "interruptions")
    table: str = tabulate(rows, headers=headers, colalign=("left", *["right"] * 6))
    return f"{len(schedules[0].end_s)} jobs, simulated by the steps that their gangs take; nothing was run\n\n{table}"


def _facts_of(schedule: JobSchedule) -> dict[str, Any]:
    return {
        "policy": schedule.policy,
        "mean_completion_s": schedule.mean_completion_s,
        "makespan_s": schedule.makespan_s,
        "samples_per_s": schedule.samples_per_s,
        "busy_share": schedule.busy_share,
        "completion_s": schedule.completion_s,
    }


# -------------------------------------------------------------------------------------------------------------- plan


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="JOBS", help="jobs, as TOML or CSV")
    _add_cluster(parser)
    parser.add_argument(
        "--objective", choices=("mean", "makespan"), default="mean", help="mean completion time (default) or makespan"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the search; default: 0")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the plan as JSON, for 'apollo cluster run'")
    parser.add_argument("--slurm", type=Path, metavar="FOLDER", help="write a script for Slurm per job")


def _plan(args: argparse.Namespace, tell: Tell) -> ActionResult:
    from apollo_compile.cluster.launch import slurm_scripts
    from apollo_compile.cluster.plan import plan_jobs

    plan = plan_jobs(read_cluster(args.cluster), read_jobs(args.file), args.objective, seed=args.seed)
    if args.slurm is not None:
        scripts = slurm_scripts(plan)
        args.slurm.mkdir(parents=True, exist_ok=True)
        for name, text in scripts.items():
            (args.slurm / name).write_text(text, encoding="utf-8")
    if args.save is not None:
        args.save.write_text(format_plan_file(plan), encoding="utf-8")
    return ActionResult(text=_format_plan(plan), facts=plan)


def _format_plan(plan: ClusterPlan) -> str:
    rows = [
        (
            each.job,
            f"{each.gang.devices} x {each.gang.kind}",
            ", ".join(f"{devices} of node {node}" for node, devices in each.nodes),
            format_s(each.start_s),
            format_s(each.end_s),
        )
        for each in plan.placements
    ]
    headers = ("job", "gang", "where", "start", "end")
    table: str = tabulate(rows, headers=headers, colalign=("left", "left", "left", "right", "right"))
    what = {"mean": "mean completion", "makespan": "makespan"}[plan.objective]
    return (
        f"{what} {format_s(plan.value_s)}, at most {plan.gap:.0%} above the best; mean completion "
        f"{format_s(plan.mean_completion_s)}, makespan {format_s(plan.makespan_s)}, "
        f"{plan.samples_per_s:.4g} samples per s: predicted, nothing was run\n\n{table}"
    )


# --------------------------------------------------------------------------------------------------------------- run


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="PLAN", help="a plan that 'apollo cluster plan --save' wrote")
    parser.add_argument("--address", help="address of a Ray cluster; default: start Ray on this machine")
    parser.add_argument(
        "--logs", type=Path, default=Path("logs"), metavar="FOLDER", help="folder for the output of jobs; default: logs"
    )


def _run(args: argparse.Namespace, tell: Tell) -> ActionResult:
    from apollo_compile.cluster.run import run_plan

    outcomes = run_plan(read_plan(args.file), logs=args.logs, address=args.address, tell=tell)
    rows = [(each.job, format_s(each.start_s), format_s(each.end_s), each.problem or "ended") for each in outcomes]
    table: str = tabulate(rows, headers=("job", "start", "end", "outcome"), colalign=("left", "right", "right", "left"))
    return ActionResult(text=table, facts=outcomes, status=1 if any(each.problem for each in outcomes) else 0)


def format_s(seconds: float) -> str:
    """Return a time of a schedule: `4.5 s`, `12.3 min`, `7.2 h`."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


ACTIONS = {
    "generate": Action(text="write a trace of random jobs", add_arguments=_add_generate, run=_generate),
    "simulate": Action(text="simulate jobs under several policies", add_arguments=_add_simulate, run=_simulate),
    "plan": Action(text="plan which job runs where and when", add_arguments=_add_plan, run=_plan),
    "run": Action(text="run a plan on Ray", add_arguments=_add_run, run=_run),
}
"""The actions by name."""
