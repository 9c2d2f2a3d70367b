"""The `apollo` command.

    apollo explain TARGET      plan a model without training it
    apollo report SOURCE       train a model for some steps and report, or show a saved report
    apollo estimate TARGET     estimate a training step on other devices, and on several
    apollo bench TARGET        measure a model: eager, Inductor and its best mode, apollo on one lane, apollo
    apollo calibrate           measure this machine and save its device profile
    apollo doctor              check this machine, and advise how to fix problems
    apollo plan-diff A B       compare the plans of two reports, or of two directories of dumps
    apollo pipeline simulate   simulate a training step over several devices, with encoders in the pipeline's bubbles
    apollo cluster ACTION      plan jobs on a cluster by estimates of their steps, simulate and run them

A TARGET is `path/to/file.py:function` or `package.module:function`; the function returns a model and its inputs
(see `apollo_compile.tools.targets`). Every command has `--json`.

The exit code is 0; 1 if the command failed or found problems (wrong numbers in bench, errors in doctor); 2 if its
arguments are wrong. Results go to standard output; progress goes to standard error, as a bar on a terminal and as lines
elsewhere. A command is a function that takes the parsed arguments and returns the exit code; `_parser` lists them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apollo_compile.config import load_config
from apollo_compile.cost_model.collectives import Link
from apollo_compile.errors import ApolloError, CallError, ConfigError
from apollo_compile.json_form import to_json
from apollo_compile.tools.arguments import positive, split_target
from apollo_compile.tools.cluster import ACTIONS
from apollo_compile.units import format_ns, seconds_to_ns
from apollo_compile.version import __version__

if TYPE_CHECKING:
    from apollo_compile.reports.diff import Side
    from apollo_compile.reports.report import Report

TARGET_HELP = "path/to/file.py:function or package.module:function that returns (model, inputs)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (default: the process's arguments) and return the exit code."""
    args = _parser().parse_args(arguments)
    try:
        _check_outputs(args)
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python reports an error at exit
        return 141  # as shells do
    except (ApolloError, LookupError, OSError, ValueError) as error:
        if getattr(args, "verbose", False):
            traceback.print_exc()
        print(f"apollo {args.command}: {_message(error)}", file=sys.stderr)
        is_absent = isinstance(error, FileNotFoundError) or isinstance(error.__cause__, FileNotFoundError)
        return 2 if is_absent or isinstance(error, CallError | ConfigError) else 1
    except KeyboardInterrupt:
        print(f"apollo {args.command}: interrupted", file=sys.stderr)
        return 130  # as shells do


def _check_outputs(args: argparse.Namespace) -> None:
    """Raise CallError for a file that cannot be written, before anything is compiled."""
    for name in ("html", "trace", "save", "output"):
        path: Path | None = getattr(args, name, None)
        if path is None:
            continue
        existing = next(each for each in (path, *path.parents) if each.exists())
        if existing != path and not existing.is_dir():
            raise CallError(f"--{name} {path} cannot be written: {existing} is a file; name another folder")
        if existing not in (path, path.parent) and name != "output":
            raise CallError(f"--{name} {path} cannot be written: there is no folder {path.parent}; make it first")
        if path.is_dir() or not os.access(existing, os.W_OK):
            raise CallError(f"--{name} {path} cannot be written: it is a folder, or may not be written")


def _message(error: BaseException) -> str:
    """Return the text of an error, without the quotes of a KeyError and the number of an OSError."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text or type(error).__name__


# --------------------------------------------------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="apollo", description="Tools around torch.compile(backend='apollo').")
    parser.add_argument("--version", action="version", version=f"apollo_compile {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    explain = _command(commands, "explain", _explain, "plan a model without training it")
    _add_target(explain)
    explain.add_argument("--profile", metavar="NAME", help="plan for another device, by its profile: h200, or a path")
    _add_renderings(explain)

    report = _command(commands, "report", _report, "train a model for some steps and report, or show a saved report")
    report.add_argument("target", metavar="SOURCE", help=f"a saved report (.json), or {TARGET_HELP}")
    _add_build_options(report)
    _add_renderings(report)
    report.add_argument("--steps", type=positive, help="training steps; default: until autotuning has ended")
    report.add_argument("--inference", action="store_true", help="run forwards without gradients instead")

    estimate = _command(commands, "estimate", _estimate, "estimate a training step on other devices, and on several")
    _add_target(estimate)
    estimate.add_argument(
        "--devices",
        action="append",
        required=True,
        type=_devices,
        metavar="NAME:N,N",
        help="a device with numbers of devices: h100:1,2,4,8; cpu2:1,2 for CPUs with two cores; or the path of a "
        "profile; may be repeated",
    )
    estimate.add_argument(
        "--link",
        type=_link,
        metavar="SECONDS,BYTES",
        help="measured latency and bytes per second between two devices; default: those of data sheets",
    )
    estimate.add_argument(
        "--max-tensor", type=positive, metavar="N", help="most devices that share a layer; default: those of a node"
    )
    estimate.add_argument("--save", type=Path, metavar="FILE", help="write the estimate as JSON, for 'apollo cluster'")

    bench = _command(commands, "bench", _bench, "measure a model: eager, Inductor and its best mode, apollo")
    _add_target(bench)
    bench.add_argument("--rounds", type=positive, default=10, help="turns of every variant; default: 10")
    bench.add_argument("--steps-per-turn", type=positive, default=3, help="timed steps of a turn; default: 3")
    bench.add_argument(
        "--variants",
        help="comma-separated: eager, inductor, inductor-max-autotune, apollo-serial, apollo, which are the default, "
        "inductor-kept-memory, eager-kept-memory",
    )
    bench.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="bfloat16: forward and loss under torch.autocast; default: float32",
    )
    bench.add_argument("--inference", action="store_true", help="measure forwards without gradients instead of steps")
    bench.add_argument("--warm-cache", action="store_true", help="use the user's Inductor cache; no first step is cold")

    calibrate = _command(commands, "calibrate", _calibrate, "measure this machine's cores and save its device profile")
    calibrate.add_argument("--units", type=int, help="cores to use; default: every core that torch uses")
    calibrate.add_argument("--rounds", type=positive, help="rounds over everything; default: 100")
    calibrate.add_argument("--output", type=Path, help="file for the profile; default: the user's cache")

    doctor = _command(commands, "doctor", _doctor, "check this machine, and advise how to fix problems")
    doctor.add_argument("--self-check", action="store_true", help="repeat the self-check of lanes on the GPU")
    doctor.add_argument("--cpu", action="store_true", help="with a GPU: also compile a body for the CPU")

    difference = _command(commands, "plan-diff", _plan_diff, "compare two plans")
    for name in ("before", "after"):
        difference.add_argument(name, type=Path, help="a saved report (.json), a plan.json, or a folder of APOLLO_DUMP")
    difference.add_argument("--exit-code", action="store_true", help="exit with 1 if the plans differ")

    pipelines = commands.add_parser("pipeline", help="pipelines over several devices, with encoders in their bubbles")
    simulate = _command(
        pipelines.add_subparsers(dest="action", required=True, metavar="ACTION"),
        "simulate",
        _simulate_pipeline,
        "simulate a step of a pipeline, before and after encoder work is placed in its bubbles",
    )
    simulate.add_argument("file", type=Path, metavar="FILE", help="a pipeline with encoders, as JSON")
    simulate.add_argument("--html", type=Path, metavar="FILE", help="write the steps as a page")
    simulate.add_argument("--trace", type=Path, metavar="FILE", help="write the steps for Perfetto")

    cluster = commands.add_parser("cluster", help="plan jobs on a cluster by estimates of their steps, and run them")
    actions = cluster.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, action in ACTIONS.items():
        action.add_arguments(_command(actions, name, _cluster, action.text))
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    command.set_defaults(run=run, refuse=command.error)
    return command


def _add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", metavar="TARGET", help=TARGET_HELP)
    _add_build_options(command)


def _add_build_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set", action="append", default=[], type=_setting, metavar="NAME=VALUE", help="argument of the function; JSON"
    )
    command.add_argument(
        "--option",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=VALUE",
        help="option of the backend, e.g. plan.planner=greedy",
    )
    command.add_argument("-v", "--verbose", action="store_true", help="show where an error arose")


def _add_renderings(command: argparse.ArgumentParser) -> None:
    command.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page")
    command.add_argument("--trace", type=Path, metavar="FILE", help="write the timelines for Perfetto")
    command.add_argument("--save", type=Path, metavar="FILE", help="write the report as JSON")
    command.add_argument("--why", metavar="NAME", help="explain why this segment or module runs where and when it does")


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value  # a string without quotes


def _devices(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, counts = text.rpartition(":")
    if not name:
        raise argparse.ArgumentTypeError(f"expected NAME:N,N, as in h100:1,2,4,8, got {text!r}")
    return name, tuple(positive(part) for part in counts.split(","))


def _link(text: str) -> Link:
    try:
        latency, bandwidth = (float(part) for part in text.split(","))
        return Link(latency, bandwidth)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected SECONDS,BYTES, as in 10e-6,360e9, got {text!r}: {error}") from error


# ---------------------------------------------------------------------------------------------------------- commands


def _explain(args: argparse.Namespace) -> int:
    split_target(args.target)  # before torch is imported, which takes seconds
    from apollo_compile.tools.explain import explain
    from apollo_compile.tools.targets import errors_of_the_model, load_target

    with _Progress() as progress:
        progress.tell("building the model")
        target = load_target(args.target, dict(args.set))
        with errors_of_the_model(target):
            report = explain(
                target.model,
                target.args,
                target.kwargs,
                profile=args.profile,
                options=dict(args.option),
                progress=progress.tell,
            )
    return _show(report, args)


def _report(args: argparse.Namespace) -> int:
    from apollo_compile.reports.report import Report

    if ":" not in args.target:
        ignored = [name.replace("_", "-") for name in _FOR_A_MODEL if getattr(args, name)]
        if ignored:
            args.refuse(
                f"a saved report is shown unchanged; use file.py:function instead of it with --{', --'.join(ignored)}"
            )
        if Path(args.target).suffix == ".py":
            split_target(args.target)
        return _show(Report.load(args.target), args)
    return _show(_run_and_report(args), args)


_FOR_A_MODEL = ("set", "option", "steps", "inference")
"""Arguments of `apollo report` that apply to running or planning a model."""


def _run_and_report(args: argparse.Namespace) -> Report:
    import torch

    from apollo_compile.session.registry import is_settled
    from apollo_compile.tools.bench.child import MAX_WARMUP
    from apollo_compile.tools.report import report
    from apollo_compile.tools.targets import errors_of_the_model, load_target

    with _Progress() as progress:
        progress.tell("building the model")
        target = load_target(args.target, dict(args.set))
        model = target.model
        compiled = torch.compile(model, backend="apollo", options=dict(args.option))
        limit = args.steps or MAX_WARMUP

        def run(called: Callable[..., Any]) -> None:
            output = called(*target.args, **target.kwargs)
            if not args.inference:
                target.loss(output).backward()  # type: ignore[no-untyped-call]

        for step in range(limit):
            progress("compiling" if step == 0 else "running steps", step, limit)
            with torch.set_grad_enabled(not args.inference), errors_of_the_model(target, lambda: run(model)):
                run(compiled)
            if isinstance(model, torch.nn.Module):
                model.zero_grad(set_to_none=True)
            if args.steps is None and step >= 1 and is_settled(model):
                break
    return report(model)


def _show(report: Report, args: argparse.Namespace) -> int:
    """Write and print a report in the requested forms."""
    answer = report.why(args.why) if args.why else None  # first, so that a wrong name writes no files
    for path, render in ((args.html, report.to_html), (args.trace, report.to_trace)):
        if path is not None:
            path.write_text(render(), encoding="utf-8")
    if args.save is not None:
        args.save.write_text(report.to_json(), encoding="utf-8")
    if args.json:
        print(json.dumps({"why": answer}) if answer is not None else report.to_json())
    else:
        print(answer if answer is not None else report)
    return 0


def _estimate(args: argparse.Namespace) -> int:
    split_target(args.target)
    from apollo_compile.tools.estimate import estimate, format_estimate
    from apollo_compile.tools.targets import load_target

    with _Progress() as progress:
        progress.tell("building the model")
        found = estimate(
            load_target(args.target, dict(args.set)),
            args.devices,
            link=args.link,
            max_tensor=args.max_tensor,
            options=dict(args.option),
            progress=progress.tell,
        )
    text = json.dumps(to_json(found), indent=1)
    if args.save is not None:
        args.save.write_text(text, encoding="utf-8")
    print(text if args.json else format_estimate(found))
    return 0


def _bench(args: argparse.Namespace) -> int:
    split_target(args.target)
    from apollo_compile.tools.bench.facts import machine_facts
    from apollo_compile.tools.bench.numbers import to_json as measurement_to_json
    from apollo_compile.tools.bench.render import format_measurement
    from apollo_compile.tools.bench.task import KEPT_MEMORY, VARIANTS, MeasuredTask
    from apollo_compile.tools.bench.turns import measure
    from apollo_compile.tools.targets import load_target, tensors_of

    known = {variant.name: variant for variant in (*VARIANTS, *KEPT_MEMORY)}
    names = [variant.name for variant in VARIANTS] if args.variants is None else args.variants.split(",")
    if unknown := [name for name in names if name not in known]:
        args.refuse(f"unknown variant {', '.join(unknown)}; known: {', '.join(known)}")
    chosen = [known[name] for name in names]
    options = dict(args.option)
    variants = [
        replace(variant, options={**options, **variant.options}) if variant.backend == "apollo" else variant
        for variant in chosen
    ]
    task = MeasuredTask(
        builder="apollo_compile.tools.targets:load_target",
        arguments={"text": args.target, "arguments": dict(args.set)},
        mode="inference" if args.inference else "train",
        dtype=args.dtype,
    )
    with _Progress() as progress:
        target = load_target(args.target, dict(args.set))  # a wrong target fails before any process starts
        values = (dict(target.inputs), *getattr(target.model, "parameters", tuple)())
        progress.tell(f"inputs: {', '.join(target.inputs)}")
        if not args.inference and not any(each.requires_grad for each in tensors_of(values)):
            raise CallError(f"{args.target} has no parameter that requires gradients; measure it with --inference")
        measurement = measure(
            task,
            variants,
            rounds=args.rounds,
            steps_per_turn=args.steps_per_turn,
            cold=not args.warm_cache,
            progress=progress.tell,
        )
    if args.json:
        print(json.dumps({"machine": machine_facts(), "measurement": measurement_to_json(measurement)}))
    else:
        print(format_measurement(measurement))
    wrong = [result.variant for result in measurement.results if not result.difference.is_within(task.tolerance)]
    if wrong:
        print(
            f"wrong numbers, more than {task.tolerance:.0e} from {measurement.reference}: {', '.join(wrong)}",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def _calibrate(args: argparse.Namespace) -> int:
    from apollo_compile.device.cpu.calibrate import ROUNDS, calibrate  # torch takes seconds to import: not for --help
    from apollo_compile.device.cpu.execute import available_units
    from apollo_compile.device.cpu.machine import machine_fingerprint
    from apollo_compile.store.profiles import cached_profile_path, format_profile, save_profile

    units = available_units() if args.units is None else args.units
    cache = load_config().device.cache
    assert cache is not None, "load_config fills it in"
    path = cached_profile_path(cache, units) if args.output is None else args.output
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()  # an error of its folder now, instead of after measuring
    fingerprint = machine_fingerprint(units)
    begin = time.perf_counter()
    with _Progress() as progress:
        calibration = calibrate(units, rounds=args.rounds or ROUNDS, progress=progress)
    is_kept = args.output is not None or not calibration.is_disturbed
    if is_kept:
        save_profile(calibration.profile, path, fingerprint=fingerprint)
    if args.json:
        print(format_profile(calibration.profile, fingerprint=fingerprint), end="")
    else:
        took = format_ns(seconds_to_ns(time.perf_counter() - begin))
        print(f"{calibration.profile.name}: measured in {took}" + (f", kept in {path}" if is_kept else ""))
    if calibration.is_disturbed:
        print(
            f"other processes held a core in {calibration.disturbed_share:.0%} of the rounds, so the profile is "
            f"{'unreliable' if is_kept else 'not kept'}; stop them and run 'apollo calibrate' again",
            file=sys.stderr,
        )
        return 1
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from apollo_compile.tools.doctor import diagnose, is_fit, look

    results = diagnose(look(check_gpu_again=args.self_check, try_cpu=args.cpu))
    if args.json:
        print(json.dumps([to_json(result) for result in results], indent=1))
    else:
        for result in results:
            print(f"{result.level.value:8s} {result.subject}: {result.message}")
            if result.advice:
                print(f"{'':8s} -> {result.advice}")
    return 0 if is_fit(results) else 1


def _plan_diff(args: argparse.Namespace) -> int:
    from apollo_compile.reports.diff import compare

    difference = compare(_sides(args.before), _sides(args.after))
    print(json.dumps({**to_json(difference), "is_same_plan": difference.is_same_plan}) if args.json else difference)
    return 1 if args.exit_code and not difference.is_same_plan else 0


def _sides(path: Path) -> tuple[Side, ...]:
    from apollo_compile.reports.diff import sides_of_plans, sides_of_report
    from apollo_compile.reports.report import Report
    from apollo_compile.store.plan_file import is_plan, read_plans

    return sides_of_plans(read_plans(path)) if is_plan(path) else sides_of_report(Report.load(path))


def _simulate_pipeline(args: argparse.Namespace) -> int:
    from apollo_compile.distributed.pipeline.picture import render_html, render_trace
    from apollo_compile.distributed.pipeline.text import format_steps
    from apollo_compile.tools.simulate_pipeline import read_steps

    steps = read_steps(args.file)
    if args.html is not None:
        args.html.write_text(render_html(steps), encoding="utf-8")
    if args.trace is not None:
        args.trace.write_text(json.dumps(render_trace(steps)), encoding="utf-8")
    facts = {
        name: {
            "step_ns": plan.step_ns,
            "hidden_share": plan.hidden_share,
            "live": plan.peak_live(),
            "replica_of": plan.replica_of,
            "pauses": [pause._asdict() for pause in plan.pauses],
        }
        for name, plan in steps.by_name.items()
    }
    print(json.dumps(to_json(facts)) if args.json else format_steps(steps))
    return 0


def _cluster(args: argparse.Namespace) -> int:
    answer = ACTIONS[args.action].run(args, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(to_json(answer.facts), indent=1) if args.json else answer.text)
    return answer.status


class _Progress:
    """Shows progress on standard error: a bar on a terminal, a line per kind of step elsewhere."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._shown = ""

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(unit="step", file=sys.stderr, leave=False)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that step `done` of `total` begins."""
        if self._bar is not None:
            self._bar.total = total
        self._show(what, done)

    def tell(self, what: str) -> None:
        """Show that a step begins; the number of steps is unknown."""
        self._show(what, 0 if self._bar is None else self._bar.n + 1)

    def _show(self, what: str, done: int) -> None:
        if self._bar is None:
            if what != self._shown:
                print(what, file=sys.stderr, flush=True)
        else:
            self._bar.set_description(what, refresh=False)
            self._bar.update(done - self._bar.n)
        self._shown = what


if __name__ == "__main__":
    sys.exit(main())
