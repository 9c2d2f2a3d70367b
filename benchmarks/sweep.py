"""Train many models with apollo's own segments and compare every number with eager's.

    python -m benchmarks.sweep --json build/sweep.json                          every model, float32, SGD
    python -m benchmarks.sweep --json build/sweep.json --settings rotate        every model, each with another setting
    python -m benchmarks.sweep --json build/sweep.json --settings few            a dozen, compiled, in other settings
    python -m benchmarks.sweep --json build/sweep.json --bodies eager            operator by operator: many times faster
    python -m benchmarks.sweep --json build/sweep.json --shapes changing         every model, batches of several sizes
    python -m benchmarks.sweep --only clip,bert --precision bfloat16 --optimizer adamw_fused --mode switches

A case is a model in a setting: precision, optimizer, mode, shapes, bodies. It takes five optimizer steps from the same
weights, in eager and compiled; losses, every gradient of every step, and the last parameters and buffers are compared.
In mode `switches` the model also runs in eval mode under `no_grad` and `inference_mode`, and in training mode under
`no_grad`, between two steps. With shapes that are `changing`, it is compiled with `dynamic=True` and sees batches of
several sizes. An error counts against a run of eager in float64: compiled code may be five times as far from it as
eager in the case's own precision, plus a few bits (`TOLERANCE`): of float32 where the loss is, as models of Hugging
Face have it in every precision, and with a compiled AdamW, which counts steps in float32. Compiled code draws eager's
random numbers (`fallback_random`), for the models that have dropout.

`make_options` sees to it that apollo's own plan runs: no autotuning, so the plan runs wherever there is one; a
device profile on which hand-overs between lanes are free, so that plans of tiny models use lanes; every defect of ours
is raised instead of handed to Inductor; and segments are larger than by default, since each of them takes a C++
compile. A result says how many graphs ran in segments, and how many of these on lanes.

    passed      every graph ran in segments, numbers as in eager, and every parameter was trained by such graphs
    fell back   numbers as in eager; a graph went to Inductor whole, or Dynamo left the training of a parameter in eager
    inductor    apollo differs or raises, and Inductor alone does the same: the number that is off most in the one is
                off by at least half as much in the other, or both raise an error of one type
    failed      apollo differs or raises where Inductor does not, or the process died or hung

Cases run in a process of their own, which is replaced when it dies, hangs or has run `CASES_PER_PROCESS` of them. With
`--json` every result is written at once, with the commit that it is of, and cases that the file has are not run again.
Exit code 1: a case failed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from tqdm import tqdm

from apollo_compile.device.cpu.execute import available_units
from apollo_compile.ir import Role
from apollo_compile.session import registry
from apollo_compile.session.model import CompiledModel
from apollo_compile.store.profiles import default_profile, save_profile
from apollo_compile.tools.bench.facts import machine_facts
from apollo_compile.torch_bridge.storages import storages_of
from benchmarks.harness.results import load_results, run_each, save_results
from benchmarks.run import names_of
from benchmarks.workloads import Workload, build_spec, sweep_cases
from benchmarks.workloads.specs import SPECS
from benchmarks.workloads.sweep_models import OWN_MODELS, build_own
from benchmarks.workloads.sweep_today import TODAY

PRECISIONS = ("float32", "bfloat16", "float64")
OPTIMIZERS = ("sgd", "adamw_foreach", "adamw_fused", "adamw_compiled")
MODES = ("train", "switches")
SHAPES = ("static", "changing")
BATCHES = (3, 5)
"""Sizes of batches in between, where shapes change."""

OUTCOMES = ("passed", "fell back", "inductor", "failed")

STEPS = 5
CASES_PER_PROCESS = 12
"""Compiled code stays in the memory of a process, so it is replaced now and then."""

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float64": 1e-9}
"""Shares of the largest element, for sums in another order, and in bfloat16 for chains that round once."""

BODIES = ("native", "eager")
"""Compiled, or operator by operator: then it is the cut, the plan and the lanes that are compared, not the compiler."""

RIVALS = {"native": ("inductor",), "eager": ("aot_eager_decomp_partition", "inductor")}
"""Backends of torch that are asked where apollo differs; the longer name runs Inductor's decompositions uncompiled."""

PUBLIC = {"Multimodal": ("clip", "flava", "clap", "llava", "whisper", "two_tower"), "Vision": ("vit_control",)}
"""Workloads of `workloads/specs.py` by family."""

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Multimodal": {**{name: SPECS[name] for name in PUBLIC["Multimodal"]}, **sweep_cases.MULTIMODAL},
    "Text": sweep_cases.TEXT,
    "Vision": {**{name: SPECS[name] for name in PUBLIC["Vision"]}, **sweep_cases.VISION},
    "Sound": sweep_cases.SOUND,
    "Today": TODAY,
}
OWN = "Hand-written"

FEW = (
    "experts",
    "ast",
    "imagegpt",
    "adversaries",
    "lxmert",
    "vision_text_dual_encoder",
    "gpt2",
    "attention",
    "contrast",
    "two_tower",
    "quantizer",
    "spectral",
)
"""Models of every family that are quick to compile; the order gives each precision to each optimizer (`rotate_few`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model in a setting."""

    model: str
    precision: str = "float32"
    optimizer: str = "sgd"
    mode: str = "train"
    shapes: str = "static"
    bodies: str = "native"

    @property
    def setting(self) -> str:
        """Return all but the model, in words."""
        parts = [self.precision, self.optimizer, self.mode]
        if self.shapes != "static":
            parts.append(f"{self.shapes} shapes")
        return ", ".join(parts if self.bodies == "native" else [*parts, f"{self.bodies} bodies"])

    def __str__(self) -> str:
        return f"{self.model} ({self.setting})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The outcome of a case."""

    case: Case
    outcome: str
    num_graphs: int = 0
    """Graphs that apollo was given, without those that compute nothing."""
    num_in_segments: int = 0
    """Those that ran in segments."""
    num_on_lanes: int = 0
    """Those of them whose segments ran on more than one lane."""
    reasons: tuple[str, ...] = ()
    """Why graphs went to Inductor."""
    problem: str = ""
    """The worst difference of apollo, or its error."""
    inductor_problem: str = ""
    """The same of Inductor, or of its decompositions, where they were asked."""
    seconds: float = 0.0
    commit: str = ""
    """The commit of apollo; with `-dirty` behind it where files had been changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A difference between two runs, or an error."""

    text: str
    what: str
    """The number that is off most, in units of its tolerance; of an error its type, with that of its cause."""
    sizes: Mapping[str, float]
    """The difference of every number; infinite where there is nothing to subtract, and for an error."""

    def is_also_in(self, other: Problem | None) -> bool:
        """Return whether `other` is off there too, by at least half as much."""
        return other is not None and other.sizes.get(self.what, 0.0) >= self.sizes[self.what] / 2

    def at(self, what: str) -> str:
        """Return it in words, as seen at `what`."""
        return self.text if what == self.what else f"{what}: off by {self.sizes[what]:.1e}"


Numbers = dict[str, Tensor | None]
"""Tensors by their names: `loss of step 0`, `gradient of head.weight in step 0`, `head.weight at the end`."""


def model_names() -> dict[str, str]:
    """Return the family of every model, in the order of the table."""
    return {name: family for family, specs in FAMILIES.items() for name in specs} | dict.fromkeys(OWN_MODELS, OWN)


def main(arguments: list[str] | None = None) -> int:
    """Run cases that the file lacks, print a line for each case; return the exit code."""
    args = _parse(arguments)
    results = load_results(args.json, Result) if args.json is not None and args.json.exists() else []
    known = {result.case for result in results}
    cases = [case for case in _cases(args) if case not in known]
    begin, commit = time.monotonic(), str(machine_facts()["commit"])
    for result in run_cases(cases, timeout_s=args.timeout):
        results.append(replace(result, commit=commit))
        if args.json is not None:
            save_results(args.json, results)
        tqdm.write(format_result(result))
        if args.budget is not None and time.monotonic() - begin > args.budget:
            break
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in OUTCOMES}
    left = len(cases) - (len(results) - len(known))
    print(", ".join(f"{outcome} {count}" for outcome, count in counts.items()), f"; {left} left" if left else "")
    return 1 if counts["failed"] else 0


def format_result(result: Result) -> str:
    """Return one line."""
    where = f"{result.num_in_segments} of {result.num_graphs} graphs in segments, {result.num_on_lanes} on lanes"
    details = [where, *result.reasons, *filter(None, (result.problem, result.inductor_problem))]
    return f"{result.outcome:9} {result.case}: {'; '.join(details)} [{result.seconds:.0f} s]"


def run_cases(cases: Sequence[Case], *, timeout_s: float) -> Iterator[Result]:
    """Yield the result of every case."""
    return run_each(run_case, cases, Result, timeout_s=timeout_s, cases_per_process=CASES_PER_PROCESS)


# -------------------------------------------------------------------------------------------------------- one case


def run_case(case: Case) -> Result:
    """Train the model of `case` in eager and with apollo; ask Inductor only where the two differ."""
    begin = time.monotonic()
    workload = build_model(case.model)
    batches = [workload.inputs] if case.shapes == "static" else [workload.inputs, *other_batches(case.model)]
    exact = _train_exactly(workload, batches, case)
    eager = train(workload, batches, case)
    others = registry.compiled_models()
    used = {case.precision, str(eager["loss of step 0"].dtype).removeprefix("torch.")}
    if case.optimizer == "adamw_compiled":
        used.add("float32")  # in which it counts steps, and so corrects its moments; not compiled, it does in Python
    tolerance = max(TOLERANCE[precision] for precision in used)
    found: dict[str, Any] = {}

    def look(model: torch.nn.Module) -> None:
        own = [each for each in registry.compiled_models() if each not in others]
        found.update(how_graphs_ran(own))
        if left := _left_in_eager(own, model):
            reason = f"Dynamo leaves the training of {left} to eager: {complaints_of_dynamo()}"
            found["reasons"] = tuple(sorted({*found["reasons"], reason}))

    with tempfile.TemporaryDirectory() as folder:
        options = {**make_options(Path(folder) / "profile.json"), "runtime.bodies": case.bodies}
        shapes = {"dynamic": True} if case.shapes == "changing" else {}

        def compare(look: Callable[[torch.nn.Module], object] = bool, **compile_options: Any) -> Problem | None:
            """Return the problem of the compiled run."""
            try:
                with inductor_config.patch(fallback_random=True):
                    actual = train(workload, batches, case, look=look, **shapes, **compile_options)
                return find_difference(actual, eager, exact, tolerance)
            except Exception as error:  # whatever it is, it is the result
                return problem_of(error)

        counters.clear()
        problem = compare(look, backend="apollo", options=options)
        outcome, inductor_problem = "fell back" if found.get("reasons") else "passed", ""
        if problem is not None:
            rivals = ((rival, compare(backend=rival)) for rival in RIVALS[case.bodies])
            alike = (f"{rival}: {its.at(problem.what)}" for rival, its in rivals if its and problem.is_also_in(its))
            inductor_problem = next(alike, "")
            outcome = "inductor" if inductor_problem else "failed"
    return Result(
        case=case,
        outcome=outcome,
        problem="" if problem is None else problem.text,
        inductor_problem=inductor_problem,
        seconds=round(time.monotonic() - begin, 1),
        **found,
    )


def problem_of(error: Exception) -> Problem:
    """Return the problem of a run that raised `error`."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    inner = getattr(error, "inner_exception", None)  # of Dynamo's, which all backends' have in common
    what = type(error).__name__ if inner is None else f"{type(error).__name__}: {type(inner).__name__}"
    text = f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]  # the first line may only name the backend
    return Problem(text=text, what=what, sizes={what: math.inf})


def build_model(name: str, batch: int | None = None) -> Workload:
    """Return the model `name` of the sweep with its inputs and loss."""
    if name in OWN_MODELS:
        return build_own(name, batch)
    (spec,) = (specs[name] for specs in FAMILIES.values() if name in specs)
    return build_spec(name, spec, batch=batch, seed=batch or 0)


def other_batches(name: str) -> list[dict[str, Any]]:
    """Return inputs of other batch sizes for the model `name`."""
    return [build_model(name, batch).inputs for batch in BATCHES]


def make_options(profile: Path) -> dict[str, Any]:
    """Return the options of the sweep; `profile` is where the device profile is written that they name."""
    save_profile(replace(default_profile(available_units()), handover_ns=0), profile)
    return {
        "debug.strict": True,
        "plan.autotune": False,
        "plan.min_gain": 0.0,
        "plan.time_limit_s": 0.5,
        "partition.min_segment_share": 0.05,
        "device.profile": profile,
    }


def how_graphs_ran(compiled: Sequence[CompiledModel]) -> dict[str, Any]:
    """Return the numbers of graphs of a run in segments and on lanes, as fields of a `Result`."""
    graphs = [graph for each in compiled for graph in each.graphs if graph.has_run and graph.bodies]
    lanes = [{span.lane for span in graph.trace().spans} for graph in graphs]
    return {
        "num_graphs": len(graphs) + sum(len(each.fallbacks) for each in compiled),
        "num_in_segments": sum(map(bool, lanes)),
        "num_on_lanes": sum(len(used) > 1 for used in lanes),
        "reasons": tuple(sorted({reason for each in compiled for _, reason in each.fallbacks})),
    }


def complaints_of_dynamo() -> str:
    """Return why Dynamo broke graphs, or left something in eager, since its counters were cleared."""
    complaints = {text.splitlines()[0] for name in ("unimplemented", "graph_break") for text in counters[name]}
    return "; ".join(sorted(complaints)) or "it says nothing"


def _left_in_eager(compiled: Sequence[CompiledModel], model: torch.nn.Module) -> str:
    """Return, in words, which parameters have a gradient that comes from no graph; an empty text if all do.

    A graph that only runs forward trains nothing, such as that of a mask, or of a compiled optimizer.
    """
    trains = [
        each
        for each in compiled
        if any(graph.compilation.capture.role is Role.BACKWARD for graph in each.graphs)
        or any(name.endswith(f"_{Role.BACKWARD}") for name, _ in each.fallbacks)
    ]
    known = frozenset[Any]().union(*(each.storages for each in trains))
    trained = {name: value for name, value in model.named_parameters() if value.grad is not None}
    left = [name for name, value in trained.items() if not storages_of([value]) & known]
    if len(left) == len(trained):
        return "the whole model" if left else ""
    return ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")


# -------------------------------------------------------------------------------------------------------- training


def train(
    workload: Workload,
    batches: Sequence[Mapping[str, Any]],
    case: Case,
    *,
    look: Callable[[torch.nn.Module], object] = bool,
    **compile_options: Any,
) -> Numbers:
    """Train a copy of the model in the setting of `case`, on one batch after the other; return every number.

    `look` sees the copy after its last step. `compile_options` go to `torch.compile`, for the model and, in the setting
    `adamw_compiled`, for the optimizer's step; without any both stay eager.
    """
    torch._dynamo.reset()
    gc.collect()  # graphs of earlier cases go with the records that Dynamo kept of them
    torch.manual_seed(0)
    model = _cast(copy.deepcopy(workload.model), case.precision)
    inputs = [{name: _cast(copy.deepcopy(value), case.precision) for name, value in b.items()} for b in batches]
    run = torch.compile(model, **compile_options) if compile_options else model
    optimizer, take_step = _make_optimizer(model.parameters(), case.optimizer, compile_options)
    numbers: Numbers = {}

    def loss_of(step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if case.precision == "bfloat16" else nullcontext():
            loss = workload.loss(run(**inputs[step % len(inputs)]))
            return loss.float() if case.precision == "bfloat16" else loss

    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(step)
        loss.backward()
        numbers[f"loss of step {step}"] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            numbers[f"gradient of {name} in step {step}"] = None if gradient is None else gradient.clone()
        take_step()
        if case.mode == "switches" and step == 1:
            numbers |= _run_in_other_modes(run, partial(loss_of, step))
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        numbers[f"{name} at the end"] = value.detach().clone()
    look(model)
    return numbers


def _run_in_other_modes(run: torch.nn.Module, loss_of: Callable[[], Tensor]) -> Numbers:
    numbers: Numbers = {}
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    for training in (False, True):
        run.train(training)
        for name, mode in modes.items():
            if training and mode is torch.inference_mode:
                continue  # buffers that are written to would be inference tensors from then on
            with mode():
                numbers[f"loss under {name}, training {training}"] = loss_of().clone()
    return numbers


def _cast(value: Any, precision: str) -> Any:
    if precision != "float64":
        return value
    if isinstance(value, torch.nn.Module):
        return value.apply(_cast_own)
    return _cast_tensor(value) if isinstance(value, torch.Tensor) else value


def _cast_own(module: torch.nn.Module) -> None:
    """Cast the tensors of one module, complex ones included; they keep their strides."""
    for parameter in module.parameters(recurse=False):
        parameter.data = _cast_tensor(parameter.data)
    for name, buffer in module.named_buffers(recurse=False):
        setattr(module, name, _cast_tensor(buffer))


def _cast_tensor(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _make_optimizer(
    parameters: Iterator[torch.nn.Parameter], name: str, compile_options: Mapping[str, Any]
) -> tuple[torch.optim.Optimizer, Callable[[], Any]]:
    """Return the optimizer and a function that takes a step.

    AdamW divides gradients by their size, so that rounding of a gradient that is zero becomes a full step; with an
    `eps` above that rounding it does not.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if name == "sgd":
        sgd = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
        return sgd, sgd.step
    fused = {"fused": True} if name == "adamw_fused" else {"foreach": True}
    adamw = torch.optim.AdamW(trained, lr=1e-3, eps=1e-4, **fused)
    if name == "adamw_compiled" and compile_options:
        return adamw, torch.compile(lambda: adamw.step(), **compile_options)
    return adamw, adamw.step


def _train_exactly(workload: Workload, batches: Sequence[Mapping[str, Any]], case: Case) -> Numbers | None:
    """Return the numbers of eager in float64; None where the model has parts that insist on another type."""
    try:
        return train(workload, batches, replace(case, precision="float64"))
    except (RuntimeError, TypeError):
        return None


def find_difference(actual: Numbers, eager: Numbers, exact: Numbers | None, tolerance: float) -> Problem | None:
    """Return the worst difference that is not allowed; None if there is none.

    What eager's own error was in earlier steps is allowed in later ones: in a training that amplifies rounding, errors
    of one step may happen to cancel out.

    A gradient that is None in eager may be zero: AOTAutograd gives zeros to inputs of outputs that the loss does
    not use, with every backend.
    """
    if actual.keys() != eager.keys():
        text = f"other numbers: {sorted(actual.keys() ^ eager.keys())[:3]}"
        return Problem(text=text, what=text, sizes={text: math.inf})
    exact = eager if exact is None else exact
    largest = max((_largest(value) for name, value in eager.items() if name.startswith("gradient")), default=0.0)
    worst, what, text = 1.0, "", ""
    own: dict[str, float] = defaultdict(float)
    sizes: dict[str, float] = {}
    for name, expected in eager.items():
        found = actual[name]
        if expected is None or found is None:
            if (found is not None and found.any()) or (expected is not None and expected.any()):
                text = f"{name}: {'None' if found is None else 'a tensor'} instead of the other"
                return Problem(text=text, what=name, sizes={**sizes, name: math.inf})
            continue
        if found.dtype != expected.dtype or found.shape != expected.shape:
            text = f"{name}: {found.dtype} {tuple(found.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
            return Problem(text=text, what=name, sizes={**sizes, name: math.inf})
        reference = exact[name]
        if reference is None:
            reference = expected
        floor = 0.01 * largest if name.startswith("gradient") and largest else 1e-2
        quantity = name.partition(" step ")[0]
        own[quantity] = max(own[quantity], _distance(expected, reference))
        allowed = 5 * own[quantity] + tolerance * (_largest(reference) + floor)
        sizes[name] = _distance(found, reference)
        ratio = sizes[name] / allowed
        if not ratio <= worst:
            worst, what = ratio, name
            text = f"{name}: off by {sizes[name]:.1e}, allowed {allowed:.1e}"
    return Problem(text=text, what=what, sizes=sizes) if text else None


def _largest(tensor: Tensor | None) -> float:
    if tensor is None or tensor.numel() == 0:
        return 0.0
    if tensor.is_floating_point():
        tensor = tensor.nan_to_num(0.0, 0.0, 0.0)
    elif not tensor.is_complex():
        tensor = tensor.to(torch.float64)
    return float(tensor.abs().max())


def _distance(left: Tensor, right: Tensor) -> float:
    """Return the largest difference of two elements; equal infinities and two NaNs are no difference."""
    if left.numel() == 0:
        return 0.0
    wide = torch.complex128 if left.is_complex() else torch.float64
    left, right = left.to(wide), right.to(wide)
    differs = (left != right) & ~(left.isnan() & right.isnan())
    difference = (left - right).abs()[differs]
    return float(difference.nan_to_num(math.inf).max()) if difference.numel() else 0.0


# ------------------------------------------------------------------------------------------------------- arguments


def _cases(args: argparse.Namespace) -> list[Case]:
    names = [name for name in model_names() if args.only is None or name in args.only]
    if args.settings == "few":
        return [case for case in rotate_few() if case.model in names]
    own = {"shapes": args.shapes, "bodies": args.bodies}
    if args.settings == "one":
        return [
            Case(model=name, precision=args.precision, optimizer=args.optimizer, mode=args.mode, **own)
            for name in names
        ]
    return [replace(case, **own) for case in rotate(names)]


def rotate(names: Sequence[str]) -> list[Case]:
    """Give every model another setting; the plain one, which is run for all models anyway, is left out."""
    settings = [
        setting for setting in product(MODES[::-1], OPTIMIZERS, PRECISIONS) if setting != ("train", "sgd", "float32")
    ]
    return [
        Case(model=name, precision=precision, optimizer=optimizer, mode=mode)
        for number, name in enumerate(names)
        for mode, optimizer, precision in [settings[7 * number % len(settings)]]
    ]


def rotate_few() -> list[Case]:
    """Give each of `FEW` another setting, compiled: each precision meets each optimizer, each optimizer both modes."""
    settings = zip(FEW, product(PRECISIONS, OPTIMIZERS), strict=True)
    return [
        Case(model=name, precision=precision, optimizer=optimizer, mode=MODES[number % 3 == 0])
        for number, (name, (precision, optimizer)) in enumerate(settings)
    ]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description="Compare many models with eager.")
    parser.add_argument("--only", type=names_of(model_names()), help="models, separated by commas; default: all")
    parser.add_argument("--settings", choices=("one", "rotate", "few"), default="one", help="one for all, or one each")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--mode", choices=MODES, default="train")
    parser.add_argument("--shapes", choices=SHAPES, default="static")
    parser.add_argument("--bodies", choices=BODIES, default="native")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a case hangs")
    parser.add_argument("--budget", type=float, help="begin no case after so many seconds; run again to go on")
    parser.add_argument("--json", type=Path, help="write results there; cases that it has are not run again")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
