"""Our side of the comparison on a GPU: a Dynamo graph compiled once more, as CUDA graphs and then on lanes.

    Challenger(model, settings, graph).prepare(arguments)     each graph after AOTAutograd as Inductor compiles it whole
    .prepare_lanes(), .timing()                               bodies; the next step times them, and plans again
    .use(variant), .run(*arguments), .keep(variants)          what `challenge.py` compares

Nothing here stops training. A graph that fails runs as Inductor compiled it, without a CUDA graph, since its backward
may belong to a forward of ours; `failure` says so, and from the next step on torch.compile's code runs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import fx

from apollo_compile.device.target import Code, Run, Runnable
from apollo_compile.distributed.agreement import Agreement
from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import Role, Variant
from apollo_compile.pipeline import Compilation
from apollo_compile.progress import Progress
from apollo_compile.session.bodies import compile_code
from apollo_compile.session.contest.rival_graph import RivalGraph
from apollo_compile.session.contest.sizes import SizedWhole, StepSizes, without_numbers
from apollo_compile.session.graph import COMPILE_NS_PER_OPERATOR
from apollo_compile.session.model import CompiledModel
from apollo_compile.session.planning import log_summary, plan_graph, role_of
from apollo_compile.torch_bridge.aot_graph import clone_graph
from apollo_compile.torch_bridge.dynamic_sizes import has_sizes
from apollo_compile.torch_bridge.frontend import compile_with_inductor
from apollo_compile.torch_bridge.host_scalars import scalars_on, with_scalars_on
from apollo_compile.torch_bridge.interpret import interpret_whole
from apollo_compile.torch_bridge.kept_graph import KeptGraph
from apollo_compile.torch_bridge.layouts import report_output_strides
from apollo_compile.torch_bridge.settings import (
    current_settings,
    with_settings,
)
from apollo_compile.torch_bridge.traced import TracedGraph, take_graph
from apollo_compile.torch_bridge.whole import compile_again, compile_apart

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Challenger:
    """All graphs of a Dynamo graph, as we run them."""

    model: CompiledModel
    settings: Mapping[str, Any]
    """Inductor's."""
    kept: KeptGraph | None
    """The Dynamo graph, until it is compiled."""
    scalars: Sequence[int] = ()
    """Positions of the arguments that are numbers on the host, which our sides take on the device."""
    graphs: list[RivalGraph] = field(default_factory=list)
    """Forward before backward."""
    run: Callable[..., Any] = field(init=False, default_factory=lambda: _not_compiled)
    """Calls them, as torch.compile's function would be called; from `prepare` on."""
    failure: Exception | None = None
    """Why they must not be called any more."""
    timing_failure: Exception | None = None
    """Why bodies could not be timed."""
    variant: Variant | None = None
    """The current variant."""
    sizes: StepSizes = field(init=False)
    """Which steps our sides may run."""

    def __post_init__(self) -> None:
        """Note which arguments have sizes that change."""
        self.sizes = StepSizes(() if self.kept is None else self.kept.sized)

    @property
    def num_cold_runs(self) -> int:
        """Runs of CUDA graphs of some sizes before they were replayed; 0 where sizes do not change."""
        return sum(graph.whole.num_cold_runs for graph in self.graphs if isinstance(graph.whole, SizedWhole))

    @property
    def compile_share(self) -> float:
        """Largest share of the training time that compiles may take."""
        return self.model.config.plan.compile_share

    @property
    def prepare_ns(self) -> int:
        """Approximate time that `prepare` takes."""
        return 0 if self.kept is None else COMPILE_NS_PER_OPERATOR * self.kept.num_nodes

    @property
    def prepare_lanes_ns(self) -> int:
        """Approximate time that `prepare_lanes` takes."""
        return COMPILE_NS_PER_OPERATOR * sum(len(graph.compilation.capture.nodes) for graph in self.graphs)

    def prepare(self, arguments: Sequence[Any]) -> None:
        """Compile the Dynamo graph for arguments of the shapes that it was traced with.

        Raises:
            UnsupportedGraphError: a CUDA graph cannot hold it, or lanes could not run it.
            Exception: whatever a compile raises.
        """
        assert self.kept is not None
        kept, self.kept = self.kept, None
        config, device = self.model.config, self.model.target.device
        arguments = scalars_on(device, self.scalars, arguments)
        with (
            Progress(f"compiling {self.model.name} again") as progress,
            kept.compiling(arguments, moved=self.scalars) as (graph_module, fakes),
            with_settings(self.settings),
        ):
            progress.at("to be compared with torch.compile,")
            compiled = compile_with_inductor(
                graph_module,
                fakes,
                self._compile_graph,
                recompute_masks=False,
                eager_randomness=config.runtime.bodies == "eager",
                backward_at_once=True,
                settings=self.settings,
            )
        self._check_scalars(len(arguments))
        self.run = with_scalars_on(device, self.scalars, compiled)
        self.graphs.sort(key=lambda graph: graph.compilation.capture.role is Role.BACKWARD)
        self.model.unprofitable[:] = [graph.compilation for graph in self.graphs]  # until a plan runs
        self.use(Variant.INDUCTOR)

    def _compile_graph(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[Run, None]:
        model, role = self.model, role_of(graph_module, kwargs)
        config, target, name = model.config, model.target, model.name_of(role)
        traced = take_graph(graph_module, example_inputs, kwargs)
        _check_capturable(traced, name)
        compilation = plan_graph(
            traced.graph_module,
            name=name,
            role=role,
            profile=target.profile,
            config=replace(config, plan=replace(config.plan, planner=_cheap(config.plan.planner))),
            device=target.device,
        )
        report_output_strides(graph_module)
        original = clone_graph(graph_module)
        if config.runtime.bodies == "eager":
            plain = interpret_whole(original)
        else:
            plain = compile_again(original, current_settings(), **kwargs)
        graph = RivalGraph(
            traced=traced,
            compilation=compilation,
            plain=plain,
            whole=self._load_whole(traced, compilation, plain),
            config=config,
            fail=self.fail,
            fail_in_timing=self.fail_in_timing,
        )
        self.graphs.append(graph)
        return graph, None

    def _check_scalars(self, num_arguments: int) -> None:
        """Check that the graph writes to no number on the host, of which our sides would change a copy.

        Raises:
            UnsupportedGraphError: it does, or may do.
        """
        for graph in self.graphs if self.scalars else ():
            if graph.compilation.capture.role is Role.BACKWARD:
                continue
            written = graph.traced.contract.written_inputs or frozenset()
            are_in_order = len(graph.compilation.partition.graph.inputs) == num_arguments
            if not written.isdisjoint(self.scalars) or (written and not are_in_order):
                raise UnsupportedGraphError(f"{self.model.name} may write to a number on the host")

    def _load_whole(self, traced: TracedGraph, compilation: Compilation, plain: Run) -> Runnable:
        """Return the whole graph as a CUDA graph, or as one for each set of sizes."""
        target, boundary = self.model.target, traced.boundary
        if boundary is None:
            return target.load_whole(compilation, Code(bodies=(), contract=traced.contract), plain)
        graph, contract = without_numbers(compilation.partition.graph, traced.contract, boundary)
        fixed = replace(compilation, partition=replace(compilation.partition, graph=graph))
        code = Code(bodies=(), contract=contract)
        sized = [
            place
            for place, node in enumerate(traced.graph_module.graph.find_nodes(op="placeholder"))
            if place not in boundary.numbers and has_sizes(node.meta["val"])
        ]
        return SizedWhole(boundary, sized, plain, partial(target.load_whole, fixed, code))

    def fail(self, error: Exception) -> None:
        """Give up after an error in a run, and release all memory.

        Raises:
            Exception: the error, with `debug.strict`.
        """
        if self.model.config.debug.strict:
            raise error
        self.failure = error.with_traceback(None)
        for graph in self.graphs:
            graph.has_failed = True
        self.keep(())

    def fail_in_timing(self, error: Exception) -> None:
        """Give up segments after an error in timing them.

        Raises:
            Exception: the error, with `debug.strict`.
        """
        if self.model.config.debug.strict:
            raise error
        self.timing_failure = error.with_traceback(None)

    # ----------------------------------------------------------------------------------------------------------- lanes

    def prepare_lanes(self) -> None:
        """Compile the bodies of all graphs.

        Raises:
            Exception: whatever a compile raises.
        """
        model = self.model
        with Progress(f"compiling segments of {model.name}") as progress:
            for graph in self.graphs:
                begin = time.perf_counter_ns()
                module = graph.traced.graph_module
                compilation, agreement = graph.compilation, Agreement(model.ranks)
                with with_settings(self.settings):
                    work = partial(
                        compile_code, graph.traced, compilation, model.config, model.target, agreement, at=progress.at
                    )
                    code = compile_apart(module, work)
                segments = model.load(compilation, code, compile_whole=None, agreement=agreement)
                segments.learner.is_settled = True  # it is planned again here
                graph.add_segments(segments)
                model.graphs.append(segments)
                model.unprofitable.remove(compilation)
                log_summary(compilation, 0, time.perf_counter_ns() - begin)

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Let the next call of every graph time its bodies, in a `with`."""
        self.timing_failure = None
        for graph in self.graphs:
            graph.is_timed = graph.is_to_time = True
        try:
            yield
        finally:
            for graph in self.graphs:
                graph.is_timed = graph.is_to_time = False

    # ------------------------------------------------------------------------------------------------------ comparison

    def has(self, variant: Variant) -> bool:
        """Whether all graphs can run this variant."""
        return variant is Variant.COMPILED or (self.graphs != [] and all(graph.has(variant) for graph in self.graphs))

    def use(self, variant: Variant) -> None:
        """Run this variant of all graphs from the next forward on."""
        if variant is not self.variant:
            self.variant = variant
            for graph in self.graphs:
                graph.use(variant)

    def keep(self, variants: Collection[Variant]) -> None:
        """Release the memory that other variants hold for their next run."""
        for graph in self.graphs:
            graph.keep(variants)
        self.model.target.keep_only(variants)
        self.model.target.trim_memory()

    def close(self) -> None:
        """Release everything; backwards of forwards that have run still work."""
        self.keep(())
        self.model.graphs.clear()
        self.model.unprofitable[:] = [graph.compilation for graph in self.graphs]
        self.kept, self.graphs, self.run = None, [], _not_compiled

    def prove(self) -> None:
        """Count the current variant as proven: it won."""
        for graph in self.graphs:
            graph.is_proven = True


def _not_compiled(*arguments: Any) -> Any:
    raise AssertionError("a challenger that is not compiled was called")


def _check_capturable(traced: TracedGraph, name: str) -> None:
    """Check that a CUDA graph can hold a graph.

    Raises:
        UnsupportedGraphError: it cannot.
    """
    if traced.contract.unsafe is not None:
        raise UnsupportedGraphError(f"{name} has {traced.contract.unsafe}, which no CUDA graph may hold")
    if traced.contract.written_inputs is None:
        raise UnsupportedGraphError(f"{name} writes to other tensors than its inputs")
    if traced.boundary is not None and traced.boundary.objects:
        raise UnsupportedGraphError(f"{name} takes objects besides tensors and sizes")


def _cheap(planner: str) -> Any:
    """Return the planner for a first look."""
    return "greedy" if planner == "cp_sat" else planner
