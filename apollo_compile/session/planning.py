"""Plan one FX graph after AOTAutograd, and decide whether segments may be faster than Inductor's code of the graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from apollo_compile.config import Config
from apollo_compile.distributed.agreement import Agreement
from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import Capture, Partition, Plan, Role, Variant, check, text
from apollo_compile.ir.text import format_count
from apollo_compile.observe import StageRunner, warn_of_files
from apollo_compile.passes.capture import capture_graph
from apollo_compile.pipeline import compile_partition, partition_capture
from apollo_compile.session.warm_start import may_be_autotuned
from apollo_compile.store.plan_file import FILE_NAME, folder_of, save_plan
from apollo_compile.target.compilation import Compilation, Finding
from apollo_compile.target.profile import DeviceProfile
from apollo_compile.torch_bridge.compile_context import trace_artifact
from apollo_compile.torch_bridge.traced_backward import is_whole_step
from apollo_compile.units import format_ns

_logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")

WRAPPER_NS_PER_KERNEL = 8_000
"""Approximate cost of Inductor's Python wrapper per kernel; a body's C++ wrapper takes less than a tenth of it."""

WORTH_NATIVE = 0.05
"""Share of the wrapper in a graph's predicted time from which native segments are worth compiling for that alone."""

FEW_PIECES = 2
"""Graphs of one call that are compiled in segments if these may be faster; later ones must save `LEAST_GAIN_NS`."""

LEAST_GAIN = 1.05
"""Least predicted speed-up of a plan over Inductor's whole graph for which it is compiled where nothing is compared
(among several ranks), and on a GPU, where segments in turn are not faster."""

LEAST_GAIN_NS = 100_000
"""Least time that the plan of a further graph saves in a call: 10 s of compiling pay off after 100,000 calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fallback:
    """Why a graph does not run in segments."""

    reason: str
    unprofitable: Compilation | None = None
    """Its plan, if it has one that is not worth compiling."""
    level: int = logging.INFO
    """Level of the log line; a WARNING where segments should have worked."""


def plan_graph(
    graph_module: fx.GraphModule,
    *,
    name: str,
    role: Role,
    profile: DeviceProfile,
    config: Config,
    device: torch.device = _CPU,
    static: Collection[int] = (),
    agreement: Agreement | None = None,
    recall: Callable[[Capture, Partition], Finding | None] = lambda capture, partition: None,
) -> Compilation:
    """Take a graph after AOTAutograd through all stages up to the program, and dump it if `debug.dump` says so.

    With `agreement`, the plan is the one that all ranks agree on; with `recall`, it may be one from an earlier process.

    Raises:
        UnsupportedGraphError: segments cannot express the graph, or its plan is too large for ranks to agree on.
        RankError: the plan that ranks agreed on is unknown, or not legal here.
    """
    dump = config.debug.dump / folder_of(name) if config.debug.dump is not None else None
    runner = StageRunner(dump)
    capture = runner.run(
        "capture",
        capture_graph,
        graph_module,
        name=name,
        role=role,
        device=device,
        static=static,
        check=check.check_capture,
        text=text.format_capture,
    )
    is_alone = agreement is None or agreement.ranks.is_alone
    partition = partition_capture(capture, profile=profile, config=config, runner=runner, is_alone=is_alone)
    finding = recall(capture, partition)
    compilation = compile_partition(capture, partition, finding, profile=profile, config=config, runner=runner)
    if agreement is not None:
        agreement.enroll(compilation)
        settled = agreement.settle(compilation, runner)
        if settled is None:
            raise UnsupportedGraphError(
                f"its plan of {format_count(len(compilation.plan.assignments), 'segment')} is too large for the store "
                "in which ranks agree on it; cut it into fewer by 'partition.granularity'"
            )
        compilation = settled
    if dump is not None:
        with warn_of_files("the plan is not dumped"):
            save_plan(compilation.plan, compilation.partition.graph, dump / FILE_NAME)
    trace_artifact(f"apollo_{folder_of(name)}", lambda: text.format_plan(compilation.plan, compilation.partition.graph))
    return compilation


def reason_to_fall_back(
    compilation: Compilation, config: Config, *, num_before: int = 0, is_alone: bool = True, saved_ns: float = 0.0
) -> str | None:
    """Return why a graph should fall back to Inductor from the start; None where its plan is worth compiling.

    Arguments:
        compilation: its products.
        config: all options.
        num_before: graphs that were compiled before it for the same call of a module or function.
        is_alone: whether no other rank runs it; several ranks compare nothing, so its plan must be predicted to gain.
        saved_ns: nanoseconds by which oneDNN shortens its matmuls; the plan's times are those with oneDNN.
    """
    if compilation.finding is not None and compilation.finding.verdict is not None:
        has_inductor_won = compilation.finding.variant is Variant.INDUCTOR
        reason = f"Inductor was the fastest when it was measured: {compilation.finding.verdict}"
        return reason if has_inductor_won else None
    plan, is_captured = compilation.plan, not compilation.profile.is_predictable
    if is_captured and compilation.capture.role is Role.BACKWARD:
        return None  # a CUDA graph of it reads what that of its forward saved
    if not is_autotuned(plan, config):
        return None
    if num_before >= FEW_PIECES and plan.serial_ns - plan.makespan_ns < LEAST_GAIN_NS:
        saved = format_ns(plan.serial_ns - plan.makespan_ns)
        return (
            f"not worth compiling: it is graph {num_before + 1} of a call that falls into many, and lanes would save "
            f"{saved} of its {format_ns(plan.serial_ns)}, by prediction; remove graph breaks, or compile the module "
            "that matters by itself"
        )
    if is_captured or not is_alone:
        inductor_ns = plan.serial_ns + saved_ns
        return None if inductor_ns >= LEAST_GAIN * plan.makespan_ns else _nothing_to_gain(plan)
    return None if _may_gain(compilation, config) else _nothing_to_gain(plan)


def _may_gain(compilation: Compilation, config: Config) -> bool:
    """Return whether segments could be faster than the graph as Inductor compiles it.

    Segments may win without lanes, too: serial native segments are different code from the whole graph, whose kernels
    fuse across segments and are called from Python. No formula tells which is faster; on chains of layers, segments
    were up to 13 % faster, or Inductor 3 %. A single segment differs only in the Python between kernels.
    """
    segments, plan = compilation.partition.graph.segments, compilation.plan
    wrapper_ns = sum(kernel.count for segment in segments for kernel in segment.work.parts) * WRAPPER_NS_PER_KERNEL
    if plan.uses_lanes or wrapper_ns >= WORTH_NATIVE * max(1, plan.serial_ns):
        return True
    return config.runtime.bodies == "native" and len(segments) > 1


def is_autotuned(plan: Plan, config: Config) -> bool:
    """Whether measured times may overrule the plan: not if it is pinned, or an option or determinism forbids it."""
    return may_be_autotuned(config) and not plan.pinned


def _nothing_to_gain(plan: Plan) -> str:
    possible = plan.serial_ns / plan.lower_bound_ns if plan.lower_bound_ns else 1.0
    return (
        f"nothing to gain: of its {format_count(len(plan.assignments), 'segment')}, predicted to take "
        f"{format_ns(plan.serial_ns)} in turn, no plan was found that is faster by 'plan.min_gain', and none can be "
        f"more than {possible:.2f}x as fast"
    )


def role_of(graph_module: fx.GraphModule, kwargs: Mapping[str, Any]) -> Role:
    """Return the role of a graph, from the arguments that AOTAutograd passes with it, and from its nodes."""
    if kwargs.get("is_backward"):
        return Role.BACKWARD
    if not kwargs.get("is_inference"):
        return Role.FORWARD
    return Role.STEP if is_whole_step(graph_module) else Role.INFERENCE


def log_summary(compilation: Compilation, planning_ns: int, compiling_ns: int, *, did: str = "compiled") -> None:
    """Log the plan of a graph and the times of its compile, in one line."""
    plan = compilation.plan
    times = plan.makespan_ns, plan.serial_ns, plan.lower_bound_ns, planning_ns, compiling_ns
    _logger.info(
        "%s: %s %d segments (%d bodies) onto %s: predicted %s, serial %s, bound %s; planning took %s, rest %s",
        compilation.capture.name,
        did,
        len(plan.assignments),
        len(compilation.partition.bodies),
        format_count(len({assignment.lane for assignment in plan.assignments}), "lane"),
        *map(format_ns, times),
    )
