"""Run the operators and modules of torch's own tests in apollo's segments and compare every number with eager's.

    python -m benchmarks.op_infos --json build/op_infos.json                    all of them, operator by operator
    python -m benchmarks.op_infos --json build/op_infos.json --bodies native --every 10    one of ten, compiled
    python -m benchmarks.op_infos --only nn.functional.gelu,nn.GELU             by their names

`torch.testing._internal` describes 672 operators that take float32 on a CPU and 114 modules, with samples of their
inputs. A case is one of them: up to `MAX_SAMPLES` of its samples, as different as they come, or the only one twice, are
computed in one graph, so that there is something to cut and to run at the same time. It runs `STEPS` times, forward and
backward, in eager, with apollo, and with the rival, which runs the same code without it: Inductor's decompositions
uncompiled where bodies are eager, Inductor where they are compiled. Outputs, gradients, and the last values of inputs,
parameters and buffers are compared as in `benchmarks.sweep`, whose settings and outcomes these are too: no comparison,
hand-overs that are free, our own defects raised. Modules are in training mode, and in eval mode too if they tell the
two apart.

Every result is written at once, with its commit; those that the file has of the commit at hand are not run again.
Exit code 1: a case failed.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from tqdm import tqdm

from apollo_compile.session import registry
from apollo_compile.tools.bench.facts import machine_facts
from benchmarks.harness.results import load_results, run_each, save_results
from benchmarks.sweep import (
    BODIES,
    OUTCOMES,
    RIVALS,
    TOLERANCE,
    Numbers,
    Problem,
    complaints_of_dynamo,
    find_difference,
    how_graphs_ran,
    make_options,
    problem_of,
)

MAX_SAMPLES = 4
STEPS = 2
CASES_PER_PROCESS = {"eager": 60, "native": 20}
"""Compiled code stays in the memory of a process; importing torch's tests takes it ten seconds."""

MIN_SHARES = {"eager": 0.05, "native": 0.2}
"""Least shares of a graph's work in a segment, by bodies: each segment takes a C++ compile, or none."""

FEW = (
    ("operator", "addmm"),
    ("operator", "cumsum"),
    ("operator", "index_add"),
    ("operator", "split"),
    ("operator", "var_mean"),
    ("module", "nn.BatchNorm2d"),
)
"""Those that every run of the tests can afford: products, scans, several outputs, views, writes, buffers."""

UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Operators whose outputs may hold anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """An operator or a module, and how segments run."""

    kind: str
    name: str
    bodies: str = "eager"

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.bodies} bodies)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The outcome of a case."""

    case: Case
    outcome: str
    num_samples: int = 0
    """Those that were computed in one graph."""
    num_with_gradients: int = 0
    """Those of them whose gradients were compared."""
    num_graphs: int = 0
    num_in_segments: int = 0
    num_on_lanes: int = 0
    reasons: tuple[str, ...] = ()
    """Why graphs went to Inductor, or Dynamo left something in eager."""
    problem: str = ""
    """The worst difference of apollo, or its error."""
    rivals: Mapping[str, str] = field(default_factory=dict)
    """Problems of torch's backends, by their names; an empty text where one is right."""
    seconds: float = 0.0
    commit: str = ""


def main(arguments: list[str] | None = None) -> int:
    """Run cases that the file lacks, print a line for each case; return the exit code."""
    args = _parse(arguments)
    commit = str(machine_facts()["commit"])
    kept = load_results(args.json, Result) if args.json is not None and args.json.exists() else []
    results = {result.case: result for result in kept}
    known = {case for case, result in results.items() if result.commit == commit and not commit.endswith("-dirty")}
    chosen = _cases(args)
    cases = [case for case in chosen if case not in known]
    for result in run_cases(cases, timeout_s=args.timeout):
        results[result.case] = replace(result, commit=commit)
        if args.json is not None:
            save_results(args.json, results.values())
        tqdm.write(format_result(result))
    found = [results[case] for case in chosen]
    print(", ".join(f"{outcome} {sum(result.outcome == outcome for result in found)}" for outcome in OUTCOMES))
    return 1 if any(result.outcome == "failed" for result in found) else 0


def format_result(result: Result) -> str:
    """Return one line."""
    where = f"{result.num_in_segments} of {result.num_graphs} graphs in segments, {result.num_on_lanes} on lanes"
    rivals = [f"{name}: {problem or 'right'}" for name, problem in result.rivals.items() if problem or result.problem]
    details = [where, *result.reasons, *filter(None, (result.problem, *rivals))]
    return f"{result.outcome:9} {result.case}: {'; '.join(details)} [{result.seconds:.1f} s]"


def run_cases(cases: Sequence[Case], *, timeout_s: float) -> Iterator[Result]:
    """Yield the result of every case."""
    for bodies, number in CASES_PER_PROCESS.items():
        own = [case for case in cases if case.bodies == bodies]
        yield from run_each(run_case, own, Result, timeout_s=timeout_s, cases_per_process=number)


# ---------------------------------------------------------------------------------------------- descriptions of torch


@functools.cache
def _infos() -> dict[tuple[str, str], Any]:
    """Return torch's descriptions of operators and modules that take float32, by kind and name."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    on_gpu_alone = "jiterator_"
    operators = {
        ("operator", info.full_name): info
        for info in op_db
        if torch.float32 in info.supported_dtypes("cpu") and not info.name.startswith(on_gpu_alone)
    }
    return operators | {("module", info.name): info for info in module_db if torch.float32 in info.dtypes}


def all_cases(bodies: str = "eager") -> list[Case]:
    """Return a case for each operator and each module, in torch's order."""
    return [Case(kind=kind, name=name, bodies=bodies) for kind, name in _infos()]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor among the arguments of a call."""

    position: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One call, and the tensors that it takes."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    """With a `Slot` for each tensor, as in `args`."""
    tensors: tuple[torch.Tensor, ...]
    finish: Callable[[Any], Any] = lambda outputs: outputs
    """Makes outputs whose gradient is defined."""

    @property
    def signature(self) -> str:
        """Return its difference from other samples, numbers in tensors aside."""
        shapes = [(tensor.dtype, tuple(tensor.shape), tensor.layout) for tensor in self.tensors]
        own = type(self.function).__name__, str(self.function) if isinstance(self.function, torch.nn.Module) else ""
        return repr((own, shapes, self.args, dict(self.kwargs)))


class Several(torch.nn.Module):
    """Computes samples that have nothing in common."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        super().__init__()
        self.samples = tuple(samples)
        self.parts = torch.nn.ModuleList(it.function for it in samples if isinstance(it.function, torch.nn.Module))

    def forward(self, arguments: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> list[Any]:
        """Return the outputs of every sample, called with these arguments."""
        outputs = []
        for position in range(len(self.samples)):
            outputs.append(self.compute(position, *arguments[position]))
        return outputs

    def compute(self, position: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the outputs of one sample, in a frame of its own: where Dynamo breaks a graph, others are whole."""
        return self.samples[position].function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Several:
        return Several([replace(sample, function=copy.deepcopy(sample.function, memo)) for sample in self.samples])


def _fill(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return arguments with tensors in their slots."""
    if isinstance(value, Slot):
        return tensors[value.position]
    if type(value) in (tuple, list):
        return type(value)([_fill(item, tensors) for item in value])
    return {name: _fill(item, tensors) for name, item in value.items()} if type(value) is dict else value


def sample_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], **more: Any) -> Sample:
    """Return a call with slots for its tensors; `more` are other fields."""
    leaves, spec = tree_flatten((args, dict(kwargs)))
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    positions = {name: position for position, name in enumerate(tensors)}
    slots = [Slot(positions[id(leaf)]) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(slots, spec)
    return Sample(function=function, args=args, kwargs=kwargs, tensors=tuple(tensors.values()), **more)


def _samples_of(case: Case) -> list[Sample]:
    """Return samples of a case that eager can compute, as different as they come."""
    info = _infos()[case.kind, case.name]
    _seed(0)
    found = list(_operator_samples(info) if case.kind == "operator" else _module_samples(info))
    distinct = {sample.signature: sample for sample in found}
    alike = [sample for sample in found if distinct[sample.signature] is not sample]
    usable: list[Sample] = []
    for sample in (*spread(list(distinct.values())), *alike):
        usable += _as_eager_can(sample)
        if len(usable) == MAX_SAMPLES:
            break
    return usable * 2 if len(usable) == 1 else usable  # two have something to run at the same time


def _operator_samples(info: Any) -> Iterator[Sample]:
    needs_gradient = info.supports_autograd and torch.float32 in info.supported_backward_dtypes("cpu")
    for it in info.sample_inputs("cpu", torch.float32, requires_grad=needs_gradient):
        yield sample_of(info.op, (it.input, *it.args), it.kwargs, finish=it.output_process_fn_grad)


def _module_samples(info: Any) -> Iterator[Sample]:
    for training in (True, False) if info.train_and_eval_differ else (True,):
        for it in info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        ):
            if it.forward_input is None:
                continue
            module = info.module_cls(*it.constructor_input.args, **it.constructor_input.kwargs)
            module = module.train(training).float()  # some have buffers in float64
            if info.is_lazy:
                module(*it.forward_input.args, **it.forward_input.kwargs)
            yield sample_of(module, it.forward_input.args, it.forward_input.kwargs)


def spread(samples: Sequence[Sample]) -> Iterator[Sample]:
    """Yield samples so that the first few are from everywhere."""
    step = max(1, len(samples) // MAX_SAMPLES)
    for first in range(step):
        yield from samples[first::step]


def _as_eager_can(sample: Sample) -> list[Sample]:
    """Return the sample, without gradients where eager has none of it; nothing where it raises.

    An operator that writes to its input takes none that is a leaf.
    """
    for tensors in (sample.tensors, tuple(tensor.detach() for tensor in sample.tensors)):
        candidate = replace(sample, tensors=tensors)
        try:
            run(Several([candidate]))
        except Exception:  # whatever it is, it is eager's
            continue
        return [candidate]
    return []


# -------------------------------------------------------------------------------------------------------- one case


def run_case(case: Case) -> Result:
    """Run a case in eager, with apollo, and with its rival."""
    begin = time.monotonic()
    with _without_own_seeds():
        result = _run_case(case)
    return replace(result, seconds=round(time.monotonic() - begin, 1))


def _run_case(case: Case) -> Result:
    samples = _samples_of(case)
    if not samples:
        return Result(case=case, outcome="fell back", reasons=("eager computes none of its samples",))
    if case.name in UNDEFINED:
        samples = [replace(it, function=functools.partial(_zeros_instead, it.function)) for it in samples]
    subject = Several(samples)
    eager = run(subject)
    is_random = find_difference(run(subject, seed=1), eager, None, TOLERANCE["float32"]) is not None
    exact = None if is_random else _run_exactly(subject)
    others = registry.compiled_models()
    found: dict[str, Any] = {}

    def try_with(look: Callable[[], object] = bool, **compile_options: Any) -> tuple[Numbers, Problem | None]:
        """Return the numbers of a compiled run, and their problem."""
        counters.clear()
        actual: Numbers = {}
        try:
            with inductor_config.patch(fallback_random=True):
                actual = run(subject, look=look, **compile_options)
            return actual, find_difference(actual, eager, exact, TOLERANCE["float32"])
        except Exception as error:  # whatever it is, it is the result
            return actual, problem_of(error)

    def look() -> None:
        found.update(how_graphs_ran([each for each in registry.compiled_models() if each not in others]))
        if counters["graph_break"] or counters["unimplemented"]:
            left = "a part" if found["num_graphs"] else "all of it"
            found["reasons"] = (*found["reasons"], f"Dynamo leaves {left} to eager: {complaints_of_dynamo()}")

    with tempfile.TemporaryDirectory() as folder:
        options = {
            **make_options(Path(folder) / "profile.json"),
            "runtime.bodies": case.bodies,
            "partition.min_segment_share": MIN_SHARES[case.bodies],
        }
        numbers, problem = try_with(look, backend="apollo", options=options)
    if problem is None and not found["num_graphs"] and not found["reasons"]:
        found["reasons"] = ("there is nothing to compute",)

    def is_also_in(its_numbers: Numbers, its_problem: Problem | None) -> bool:
        """Return whether a rival has apollo's problem; of random numbers, whether it draws the same ones."""
        if is_random and numbers and its_numbers:
            return find_difference(numbers, its_numbers, None, TOLERANCE["float32"]) is None
        return problem is not None and problem.is_also_in(its_problem)

    rivals: dict[str, str] = {}
    outcome = "fell back" if found.get("reasons") else "passed"
    for backend_of_torch in RIVALS[case.bodies]:
        if rivals and outcome != "failed":
            break
        its_numbers, its_problem = try_with(backend=backend_of_torch)
        rivals[backend_of_torch] = "" if its_problem is None else its_problem.text
        if problem is not None:
            outcome = "inductor" if is_also_in(its_numbers, its_problem) else "failed"
    return Result(
        case=case,
        outcome=outcome,
        num_samples=len(samples),
        num_with_gradients=sum(any(it.requires_grad for it in sample.tensors) for sample in samples),
        problem="" if problem is None else problem.text,
        rivals=rivals,
        **found,
    )


def run(subject: Several, *, seed: int = 0, look: Callable[[], object] = bool, **compile_options: Any) -> Numbers:
    """Compute outputs and gradients of all samples on copies, `STEPS` times; return every number.

    `look` is called at the end, that of an error too. `compile_options` go to `torch.compile`; without any it stays
    eager.
    """
    model = copy.deepcopy(subject)
    function: Callable[..., Any] = model
    if compile_options:
        torch._dynamo.reset()
        function = torch.compile(model, **compile_options)
    numbers: Numbers = {}
    try:
        for step in range(STEPS):
            _seed(seed)
            numbers |= _take_step(model, function, f"in step {step}")
    finally:
        look()
    for name, value in model.named_buffers():
        numbers[f"{name} at the end"] = _number(value)
    return numbers


def _take_step(model: Several, function: Callable[..., Sequence[Any]], when: str) -> Numbers:
    inputs = [[_copy(tensor) for tensor in sample.tensors] for sample in model.samples]
    wanted = {
        f"input {number} of sample {position}": tensor
        for position, own in enumerate(inputs)
        for number, tensor in enumerate(own)
    }
    wanted |= dict(model.named_parameters())
    numbers: Numbers = {}
    finished = []
    arguments = [(_fill(it.args, own), _fill(it.kwargs, own)) for it, own in zip(model.samples, inputs, strict=True)]
    for position, (sample, output) in enumerate(zip(model.samples, function(arguments), strict=True)):
        numbers |= _numbers_of(output, f"sample {position} {when}")
        finished.append(sample.finish(output))
    numbers |= {f"gradient of {name} {when}": gradient for name, gradient in _gradients(finished, wanted).items()}
    return numbers | {f"{name} {when}": _number(tensor) for name, tensor in wanted.items()}


def _numbers_of(outputs: Any, what: str) -> Numbers:
    """Return the numbers of a sample's outputs; other values are parts of names."""
    numbers: Numbers = {}
    for position, leaf in enumerate(tree_leaves(outputs)):
        name = f"output {position} of {what}"
        if isinstance(leaf, torch.Tensor):
            numbers[name] = _number(leaf)
            numbers[f"{name} requires a gradient"] = torch.tensor(leaf.requires_grad)
        elif isinstance(leaf, bool | int | float | complex):
            numbers[name] = torch.tensor(leaf)
        else:
            numbers[f"{name}: {leaf!r}"] = None
    return numbers


def _number(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the values of `tensor`, which may be sparse."""
    value = tensor.detach()
    return (value if value.layout is torch.strided else value.to_dense()).clone().resolve_conj().resolve_neg()


def _gradients(outputs: Any, wanted: Mapping[str, torch.Tensor]) -> Numbers:
    """Return gradients of a sum in which every element of the outputs has a weight of its own."""
    ends = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    ends = [leaf for leaf in ends if leaf.layout is torch.strided]
    own = {name: tensor for name, tensor in wanted.items() if tensor.requires_grad and tensor.is_leaf}
    if not ends or not own:
        return {}
    weights = [torch.arange(1, leaf.numel() + 1).cos().reshape(leaf.shape).to(leaf.dtype) for leaf in ends]
    found = torch.autograd.grad(ends, list(own.values()), weights, allow_unused=True)
    return {name: None if it is None else _number(it) for name, it in zip(own, found, strict=True)}


def _run_exactly(subject: Several) -> Numbers | None:
    """Return the numbers of eager in float64; None where something insists on float32."""
    wide = copy.deepcopy(subject).double()
    samples = [replace(it, tensors=tuple(map(_widen, it.tensors))) for it in wide.samples]
    try:
        return run(Several(samples))
    except Exception:  # whatever it is, it is eager's
        return None


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}.get(tensor.dtype, tensor.dtype)
    return tensor.detach().to(wide).requires_grad_(tensor.requires_grad)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _zeros_instead(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return torch.zeros_like(function(*args, **kwargs))


@contextmanager
def _without_own_seeds() -> Iterator[None]:
    """Keep torch's descriptions from setting a seed within an operator, at which Dynamo breaks the graph."""
    from torch.testing._internal import common_methods_invocations

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    with mock.patch.object(common_methods_invocations, "wrapper_set_seed", call):
        yield


# ------------------------------------------------------------------------------------------------------- arguments


def _cases(args: argparse.Namespace) -> list[Case]:
    cases = all_cases(args.bodies)
    if args.only is not None:
        cases = [case for case in cases if case.name in args.only]
    return cases[args.first :: args.every]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.op_infos", description="Compare operators with eager.")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names, separated by commas; default: all")
    parser.add_argument("--bodies", choices=BODIES, default="eager")
    parser.add_argument("--every", type=int, default=1, help="one of so many; default: all")
    parser.add_argument("--first", type=int, default=0, help="position of the first of them")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a case hangs")
    parser.add_argument("--json", type=Path, help="write results there; those of this commit are not run again")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
