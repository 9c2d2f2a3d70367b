"""Costs of modules as functions of the sizes of samples: `apollo_compile.module_costs`.

    module_costs(model, example_batch, sizes={"tokens": ("input_ids", 1)}) -> ModuleCosts

A call of the model is traced with symbols for the sizes, forward and, if gradients are needed, backward. The graphs are
cut into segments, and the cost model predicts the segments at powers of two times each size of the example; nothing is
compiled. The segments do not depend on the sizes.

Guarantees: the model and the inputs do not change, as in `explain.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx, nn

from apollo_compile.config import Config, load_config
from apollo_compile.device.open import select_profile
from apollo_compile.distributed.loader.costs import REST, ModuleCosts, ModuleTable, owner_of
from apollo_compile.errors import TargetError, UnsupportedGraphError
from apollo_compile.ir import Capture, Observations, Partition
from apollo_compile.operators.work import expression
from apollo_compile.passes.capture import Formulas, capture_graph, read_formulas, resize_capture
from apollo_compile.passes.cost import estimate_costs
from apollo_compile.passes.partition import partition_graph, resize_partition
from apollo_compile.session.planning import role_of
from apollo_compile.session.private_copy import Arguments, PrivateCopy, copy_inputs, same_random_states
from apollo_compile.store.profiles import load_profile
from apollo_compile.target.profile import DeviceProfile
from apollo_compile.target.target import Run
from apollo_compile.torch_bridge.boundary import extract_boundary
from apollo_compile.torch_bridge.compile_context import compile_apart, original_callable
from apollo_compile.torch_bridge.dynamic_sizes import find_size, follow_dimension
from apollo_compile.torch_bridge.frontend import compile_with_inductor
from apollo_compile.torch_bridge.graph_breaks import is_of_user, problem_of
from apollo_compile.torch_bridge.interpret import run_as_traced
from apollo_compile.torch_bridge.layouts import adopt_layouts
from apollo_compile.torch_bridge.settings import inductor_settings, with_settings
from apollo_compile.units import NS_PER_S

Place = tuple[str | int, int]
"""Name or position of an argument, and a dimension of it."""

SPAN = 16
"""Range of a table: the example's size divided by this number, to the example's size times this number."""

MAX_SIZES = 3
"""Limit of sizes. Tables have an entry per combination: per factor of two with one size, of four with more sizes."""


def module_costs(
    model: Callable[..., Any],
    example_batch: Any,
    *,
    sizes: Mapping[str, Place],
    modules: Sequence[str] | None = None,
    samples: int = 1,
    profile: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> ModuleCosts:
    """Return the cost of every module of `model` per sample, as a function of the sample's sizes.

    A cost is the time of a call with the example's other dimensions, divided by `samples`. It includes the backward if
    the call needs gradients, so call this outside of `torch.no_grad` for training.

    Arguments:
        model: a module on the CPU, or a function of tensors; compiled or not.
        example_batch: inputs of one call: a mapping by name, a tuple by position, or one tensor. Every size in it is at
            least 2, and different from all other dimensions of inputs that must not vary.
        sizes: by name of a size, an argument and its dimension with this size. Dimensions of other inputs with the same
            number in the example are taken to be the same size. A size in dimension 0 is the total over all samples of
            the batch; a size in another dimension is the size of each sample.
        modules: names of submodules to distinguish, such as `model.vision_tower`; None is the children of `model`.
        samples: number of samples in the example batch.
        profile: device to predict for, a path or a packaged name; None is this machine's CPU.
        options: as for `torch.compile(..., options=...)`.

    Raises:
        TargetError: the model cannot be traced into one graph with these sizes; the message names the place.
        ConfigError: an option is unknown, or the profile cannot be read.
        LookupError: there is no submodule of a name.
    """
    if samples < 1:
        raise TargetError(f"samples is {samples}: expected the number of samples in the example batch, at least 1")
    config = load_config(options)
    device = select_profile(config) if profile is None else load_profile(Path(profile))
    names = _module_names(model, modules)
    call = copy_inputs(_to_call(example_batch))
    traced = _trace(model, call, _find_dimensions(call, sizes), config)
    is_total = {name: sizes[name][1] == 0 for name in sizes}
    tables = _Tables(traced, device, names, {name: samples if is_total[name] else 1 for name in sizes}, samples)
    return ModuleCosts(sizes=tuple(sizes), modules=tuple(tables.tabulate(name) for name in (*names, REST)))


def _module_names(model: Callable[..., Any], modules: Sequence[str] | None) -> tuple[str, ...]:
    original = original_callable(model)
    owner = original if isinstance(original, nn.Module) else getattr(original, "__self__", None)
    if modules is None:
        return tuple(name for name, _ in owner.named_children()) if isinstance(owner, nn.Module) else ()
    known = dict(owner.named_modules()) if isinstance(owner, nn.Module) else {}
    for name in modules:
        if not name or name not in known:
            children = [child for child in known if child and child.count(".") < 2]
            raise LookupError(f"the model has no submodule {name!r}; it has {', '.join(children) or 'none'}")
    return tuple(dict.fromkeys(modules))


def _to_call(batch: Any) -> Arguments:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


@dataclass(frozen=True, slots=True)
class _Dimension:
    """One size in the example."""

    tensor: torch.Tensor
    dimension: int
    value: int
    same: tuple[tuple[torch.Tensor, int], ...]
    """All dimensions of inputs with this value, itself included."""


def _find_dimensions(call: Arguments, sizes: Mapping[str, Place]) -> dict[str, _Dimension]:
    if not 1 <= len(sizes) <= MAX_SIZES:
        raise TargetError(f"{len(sizes)} sizes: expected 1 to {MAX_SIZES}, as in sizes={{'tokens': ('input_ids', 1)}}")
    args, kwargs = call
    inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    found: dict[str, _Dimension] = {}
    for name, (argument, dimension) in sizes.items():
        value = kwargs.get(str(argument)) if isinstance(argument, str) else dict(enumerate(args)).get(argument)
        if not isinstance(value, torch.Tensor) or not 0 <= dimension < value.dim():
            known = [*range(len(args)), *kwargs]
            raise TargetError(
                f"size {name!r} is dimension {dimension} of argument {argument!r}, and the example has none: its "
                f"arguments are {', '.join(map(repr, known))}"
            )
        number = value.shape[dimension]
        if number < 2:
            raise TargetError(f"size {name!r} is {number} in the example: expected at least 2, as torch fixes 0 and 1")
        same = tuple((each, d) for each in inputs for d in range(each.dim()) if each.shape[d] == number)
        found[name] = _Dimension(value, dimension, number, same)
    numbers = Counter(each.value for each in found.values())
    if max(numbers.values()) > 1:
        shown = ", ".join(f"{name}={each.value}" for name, each in found.items())
        raise TargetError(f"sizes are equal in the example ({shown}): give an example in which all of them differ")
    return found


@dataclass(frozen=True, slots=True)
class _Graph:
    """A forward or backward graph with its formulas."""

    capture: Capture
    formulas: Formulas
    partition: Partition


@dataclass(kw_only=True, slots=True)
class _Traced:
    """A backend that keeps the graphs for the cost model, and runs them in eager."""

    config: Config
    dimensions: Mapping[str, _Dimension]
    graphs: list[_Graph] = field(default_factory=list)
    symbols: dict[str, int | torch.SymInt | None] = field(default_factory=dict)

    def compile(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Keep the graphs of the only Dynamo graph."""
        self.symbols = {
            name: find_size(graph_module, each.tensor, each.dimension) for name, each in self.dimensions.items()
        }
        settings = inductor_settings(self.config.mode, self.config.inductor)
        with with_settings(settings):
            return compile_with_inductor(
                graph_module,
                example_inputs,
                self._keep,
                recompute_masks=self.config.runtime.recompute_masks,
                backward_at_once=True,
                settings=settings,
            )

    def _keep(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> tuple[Run, None]:
        role = role_of(graph_module, kwargs)
        aside = extract_boundary(graph_module, example_inputs, kwargs)
        piece, inputs = (graph_module, example_inputs) if aside is None else aside[:2]
        adopt_layouts(piece, inputs)
        capture = capture_graph(piece, name=str(role), role=role)
        # Merging small pieces would attribute them to other modules, and depend on the example's sizes.
        partition = partition_graph(capture, config=replace(self.config.partition, min_segment_share=0.0))
        self.graphs.append(_Graph(capture, read_formulas(piece, capture), partition))
        return run_as_traced(graph_module), None


def _trace(model: Callable[..., Any], call: Arguments, dimensions: Mapping[str, _Dimension], config: Config) -> _Traced:
    traced = _Traced(config=config, dimensions=dimensions)
    private = PrivateCopy(original_callable(model))
    for each in dimensions.values():
        for tensor, dimension in each.same:
            follow_dimension(tensor, dimension)
    args, kwargs = call
    used = [traced]

    def compile_graph(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return used[0].compile(graph_module, example_inputs)

    try:
        with same_random_states():
            compile_apart(private.run, backend=compile_graph, dynamic=False, fullgraph=True)(*args, **kwargs)
    except Exception as error:
        cause = next((each for each in _causes(error) if isinstance(each, UnsupportedGraphError)), None)
        problem = str(cause) if cause is not None else problem_of(error)
        if problem is None or is_of_user(error):
            raise
        raise TargetError(
            f"cannot compute costs of modules: the model is not one graph: {problem}; 'apollo explain' shows every "
            "graph break"
        ) from error
    finally:
        used.clear()  # Dynamo keeps backends forever; this frees the inputs and graphs
    if not traced.graphs:
        raise TargetError("Dynamo found nothing to compile: expected a call that runs operators of torch on its inputs")
    return traced


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or getattr(error, "inner_exception", None)


class _Tables:
    """Predictions of all modules, by sizes.

    Arguments:
        traced: the graphs.
        profile: the device.
        names: names of the modules to distinguish.
        scale: by size, the factor from a sample's size to the batch's.
        samples: number of samples of the batch.
    """

    def __init__(
        self, traced: _Traced, profile: DeviceProfile, names: Sequence[str], scale: Mapping[str, int], samples: int
    ) -> None:
        self._graphs = traced.graphs
        self._profile = profile
        self._scale = scale
        self._samples = samples
        self._example = {name: each.value for name, each in traced.dimensions.items()}
        self._expressions = {name: _linear(name, traced.symbols[name]) for name in self._example}
        self._owners = [[owner_of(each.module, names) for each in g.partition.graph.segments] for g in self._graphs]
        self._compute = functools.cache(self._predict_batch)

    def tabulate(self, module: str) -> ModuleTable:
        """Return the table of one module."""
        sizes = tuple(name for name, (symbol, _, _) in self._expressions.items() if symbol in self._symbols_of(module))
        values = {name: _nodes(self._example[name], len(self._example)) for name in sizes}
        seconds = tuple(
            self._predict({**self._example, **dict(zip(sizes, point, strict=True))})[0][module]
            / NS_PER_S
            / self._samples
            for point in itertools.product(*values.values())
        )
        return ModuleTable(
            name=module,
            sizes=sizes,
            nodes=tuple(tuple(value / self._scale[name] for value in values[name]) for name in sizes),
            seconds=seconds,
            needs=tuple(name for name in sizes if self._is_idle_without(name, module)),
        )

    def _symbols_of(self, module: str) -> set[str]:
        """Return the symbols that bytes and work of a module depend on."""
        found: set[str] = set()
        for graph, owners in zip(self._graphs, self._owners, strict=True):
            for segment, owner in enumerate(owners):
                for node in graph.partition.nodes_by_segment[segment] if owner == module else ():
                    work = graph.formulas.work[node]
                    formulas = [graph.formulas.num_bytes[node]]
                    formulas += [] if work is None else [work.flops, work.bytes_read, work.bytes_written]
                    found |= {str(symbol) for formula in formulas for symbol in formula.free_symbols}
        return found

    def _is_idle_without(self, size: str, module: str) -> bool:
        """Return whether a module has flops at the example's sizes, and none if `size` is 0."""
        if not self._predict(self._example)[1][module]:
            return False
        try:
            return self._predict({**self._example, size: 0})[1][module] <= 0
        except (ArithmeticError, ValueError, TypeError, AttributeError):  # formulas divide by the size
            return self._symbols_of(module) <= {self._expressions[size][0]}

    def _predict(self, sizes: Mapping[str, int]) -> tuple[Counter[str], Counter[str]]:
        """Return nanoseconds and flops by module, for a batch of these sizes."""
        return self._compute(*(sizes[name] for name in self._example))

    def _predict_batch(self, *sizes: int) -> tuple[Counter[str], Counter[str]]:
        times: Counter[str] = Counter()
        flops: Counter[str] = Counter()
        values = {}
        for (symbol, slope, offset), value in zip(self._expressions.values(), sizes, strict=True):
            values[symbol] = -(-(value - offset) // slope)
        for graph, owners in zip(self._graphs, self._owners, strict=True):
            capture = resize_capture(
                graph.capture, graph.formulas, {**dict(graph.capture.sizes), **values}, name=graph.capture.name
            )
            segments = resize_partition(graph.partition, capture).graph
            costs = estimate_costs(segments, self._profile, Observations())
            for segment, modes, owner in zip(segments.segments, costs.modes, owners, strict=True):
                times[owner] += modes[-1].duration_ns
                flops[owner] += segment.work.flops
        return times, flops


def _nodes(value: int, num_sizes: int) -> list[int]:
    """Return the sizes in a table: `value` times powers of two, or of four for several sizes."""
    ratio = 2 if num_sizes == 1 else 4
    factors = [ratio**power for power in range(1, SPAN) if ratio**power <= SPAN]
    return sorted({max(1, value // factor) for factor in factors} | {value} | {value * factor for factor in factors})


def _linear(name: str, size: int | torch.SymInt | None) -> tuple[str, int, int]:
    """Return symbol, slope and offset, such that the size is slope * symbol + offset.

    Raises:
        TargetError: the size is fixed, or is computed from other sizes.
    """
    if size is None:
        raise TargetError(f"size {name!r} is a dimension of an input that the model does not use: name another input")
    formula = expression(size)
    symbols = sorted(formula.free_symbols, key=str)
    slope = sympy.diff(formula, symbols[0]) if len(symbols) == 1 else None
    if slope is None or not slope.is_Integer:
        raise TargetError(
            f"costs cannot depend on size {name!r}: the model's code fixes it to {formula}; give an example in which "
            "no other dimension has the same number, and check for code that fixes it, such as a table of positions"
        )
    return str(symbols[0]), int(slope), int(formula.subs(symbols[0], 0))
