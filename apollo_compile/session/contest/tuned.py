"""Code that Inductor tunes, for one graph, and where it is faster.

    compile_tuned(traced, compilation, target, ...) -> TunedCode
    tunable_bodies(compilation) -> bodies with operators that Inductor tunes
    tune_ns(compilations) -> approximate time that tuning takes
    TunedCode.time(inputs, ...)         time it beside the code that is not tuned, and plan with the faster of both

With `max_autotune` Inductor times several kernels for every matrix product and convolution, and takes the fastest.
For a body, which shares the device with others, that may be another one than for the whole graph, and it may be none:
so each body keeps the code that takes less time on the units that it is planned on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from apollo_compile.config import Config
from apollo_compile.device.target import Code, CompiledBody, Run, Runnable, Target
from apollo_compile.ir import BodyId, Capture, Node, Observations, Variant
from apollo_compile.observe import StageRunner
from apollo_compile.operators.entry import WorkKind
from apollo_compile.operators.table import find_operator
from apollo_compile.pipeline import Compilation, plan_partition
from apollo_compile.session.bodies import tune_bodies, units_of_bodies
from apollo_compile.session.variants import Variants
from apollo_compile.torch_bridge.settings import current_settings, tuning_settings
from apollo_compile.torch_bridge.traced import TracedGraph
from apollo_compile.torch_bridge.whole import compile_again, compile_apart

TUNED_SIDES = (Variant.TUNED_INDUCTOR, Variant.TUNED)
"""Variants with tuned code."""

LEAST_GAIN = 1.02
"""How much faster tuned code has to be, by times of the device, to be used, and to be compared in steps."""

TUNE_NS_PER_OPERATOR = 5_000_000_000
"""Approximate time in which Inductor compiles and times the kernels of an operator that it tunes."""

_TUNED = frozenset({WorkKind.MATMUL, WorkKind.CONVOLUTION})


@dataclass(eq=False, kw_only=True)
class TunedCode:
    """Tuned code of one graph, and what it takes."""

    run: Run
    """The whole graph, tuned."""
    whole: Runnable
    """The same as one CUDA graph."""
    bodies: Mapping[BodyId, CompiledBody]
    """Tuned code of the bodies that have any; empty where the graph has no segments."""
    whole_ns: int = 0
    """Time of `whole` on the device."""
    untuned_ns: int = 0
    """Time of the same graph without tuning."""
    chosen: frozenset[BodyId] = frozenset()
    """Bodies whose tuned code is faster."""
    compilation: Compilation | None = None
    """The plan with the faster code of each body."""
    untuned: Compilation | None = None
    """The plan with the code that is not tuned, from times of the same minute."""
    code: Code | None = None
    """The faster code of each body."""

    def time(
        self, inputs: Sequence[torch.Tensor], untuned: Runnable, variants: Variants | None, config: Config
    ) -> None:
        """Time everything for these inputs, and plan the segments with the faster code of each body.

        Arguments:
            inputs: of the graph, which nobody sees changed.
            untuned: the whole graph as it is not tuned.
            variants: the graph in segments; None if it has none.
            config: its `plan` options apply.
        """
        self.whole_ns, self.untuned_ns = _time_of(self.whole, inputs), _time_of(untuned, inputs)
        if variants is None:
            return
        old, target = variants.compilation, variants.target
        code = replace(variants.code, bodies=self._with_tuned(variants.code, self.bodies))
        plain = variants.plan.measure(inputs)
        tuned = target.load(old, code, Variant.TUNED).measure(inputs)
        assert plain is not None and tuned is not None, "runs of this device have no spans"
        self.chosen = choose_bodies(old, plain, tuned, self.bodies)
        best = Observations(
            entries=tuple(
                ours if ours.body in self.chosen else theirs
                for ours, theirs in zip(tuned.entries, plain.entries, strict=True)
            )
        )
        self.code = replace(code, bodies=self._with_tuned(variants.code, self.chosen))
        plan = partial(
            plan_partition, old.capture, old.partition, profile=old.profile, config=config, runner=StageRunner()
        )
        self.untuned = plan(plain)
        self.compilation = plan(best) if self.chosen else self.untuned
        variants.add_plan(Variant.TUNED, self.compilation, self.code)

    def _with_tuned(self, code: Code, which: Collection[BodyId]) -> tuple[CompiledBody, ...]:
        return tuple(
            self.bodies[BodyId(number)] if number in which else body for number, body in enumerate(code.bodies)
        )


def compile_tuned(
    traced: TracedGraph,
    compilation: Compilation,
    target: Target,
    *,
    has_segments: bool,
    at: Callable[[str, int, int], None],
) -> TunedCode:
    """Compile tuned code of a graph, under the settings of its user.

    Arguments:
        traced: the graph after AOTAutograd.
        compilation: the products of its stages.
        target: the device that it runs on.
        has_segments: whether it runs in segments, too, so that their bodies are tuned.
        at: reports progress: the phase, the number of the body, and how many there are.

    Raises:
        Exception: whatever a compile raises.
    """
    run = compile_again(traced.whole, {**current_settings(), **tuning_settings()}, **traced.kwargs)
    bodies: Mapping[BodyId, CompiledBody] = {}
    if has_segments:
        work = partial(tune_bodies, traced, compilation, tunable_bodies(compilation), at)
        bodies = compile_apart(traced.graph_module, work)
    code = Code(bodies=(), contract=traced.contract)
    whole = target.load_whole(compilation, code, run, Variant.TUNED_INDUCTOR)
    return TunedCode(run=run, whole=whole, bodies=bodies)


def is_faster(codes: Iterable[TunedCode]) -> bool:
    """Whether the graphs of a model are faster tuned, each as one CUDA graph."""
    known = list(codes)
    return sum(each.untuned_ns for each in known) > LEAST_GAIN * sum(each.whole_ns for each in known)


def choose_bodies(
    compilation: Compilation, plain: Observations, tuned: Observations, bodies: Collection[BodyId]
) -> frozenset[BodyId]:
    """Return those of these bodies that are faster tuned, on the units that most of their segments are planned on."""
    units = units_of_bodies(compilation)
    times = [{(entry.body, entry.units): entry.median_ns for entry in each.entries} for each in (plain, tuned)]
    where = [(body, units[body]) for body in bodies]
    return frozenset(mode[0] for mode in where if times[0][mode] > LEAST_GAIN * times[1][mode])


def tunable_bodies(compilation: Compilation) -> frozenset[BodyId]:
    """Return the bodies with an operator that Inductor tunes."""
    nodes = compilation.capture.nodes
    return frozenset(
        body.id for body in compilation.partition.bodies if any(_is_tunable(nodes[node]) for node in body.nodes)
    )


def tune_ns(compilations: Iterable[Compilation]) -> int:
    """Return the approximate time that Inductor takes to tune these graphs; 0 if it tunes nothing in them.

    It times alike operators once.
    """
    return TUNE_NS_PER_OPERATOR * len(set().union(*(_tunable_operators(each.capture) for each in compilations)))


def _tunable_operators(capture: Capture) -> set[tuple[str, ...]]:
    nodes = capture.nodes
    return {
        (node.target, node.value, *(nodes[read].value for read in node.inputs)) for node in nodes if _is_tunable(node)
    }


def _is_tunable(node: Node) -> bool:
    return find_operator(node.target).kind in _TUNED


def _time_of(whole: Runnable, inputs: Sequence[torch.Tensor]) -> int:
    measured = whole.measure(inputs)
    assert measured is not None, "runs of this device have no spans"
    return sum(entry.median_ns for entry in measured.entries)
