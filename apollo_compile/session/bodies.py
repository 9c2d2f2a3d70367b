"""Compile the bodies of a graph: choose libraries for matmuls, and compile native code.

pieces = extract_bodies(traced, compilation)
choose_libraries(pieces, compilation, config, target, agreement) -> nanoseconds saved; changes the pieces
compile_code(pieces, traced, compilation, config, target) -> Code
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from apollo_compile.config import Config
from apollo_compile.distributed.agreement import Agreement
from apollo_compile.ir.text import format_count
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.matmul import Matmul
from apollo_compile.target.target import Code, CompiledBody, Target
from apollo_compile.torch_bridge.bodies import compile_bodies, extract_body
from apollo_compile.torch_bridge.interpret import interpret_bodies, real_tensors
from apollo_compile.torch_bridge.onednn import find_matmuls, replace_with_onednn
from apollo_compile.torch_bridge.settings import may_choose_library
from apollo_compile.torch_bridge.traced import TracedGraph

_logger = logging.getLogger(__name__)


BodyGraphs = Sequence[tuple[str, fx.GraphModule, Sequence[Any]]]
"""Name, graph and example inputs of each body."""


def extract_bodies(traced: TracedGraph, compilation: Compilation) -> BodyGraphs:
    """Return copies of the bodies of a graph."""
    return [(body.name, *extract_body(traced.graph_module, body)) for body in compilation.partition.bodies]


def choose_libraries(
    pieces: BodyGraphs, compilation: Compilation, config: Config, target: Target, agreement: Agreement
) -> float:
    """Let oneDNN compute the matmuls for which it is faster on the cores of their bodies; return the nanoseconds saved.

    All ranks of `agreement` choose the same.
    """
    is_possible = config.runtime.onednn and config.runtime.bodies != "eager" and target.has_native_bodies
    if not (is_possible and may_choose_library()):
        return 0.0
    units = [Counter[int]() for _ in pieces]  # that segments of a body are planned on: most of them decide
    for segment, assignment in zip(compilation.partition.graph.segments, compilation.plan.assignments, strict=True):
        units[segment.body][assignment.quota.units] += 1
    bodies = [
        (piece.graph, count.total(), count.most_common(1)[0][0])
        for (_, piece, _), count in zip(pieces, units, strict=True)
    ]
    with real_tensors():
        own = target.saved_by_onednn((matmul, cores) for graph, _, cores in bodies for matmul in find_matmuls(graph))
    saved = agreement.settle_numbers("time saved by oneDNN", {_name(*case): ns for case, ns in own.items()})
    saved_ns, num_matmuls = 0.0, 0
    for graph, num_segments, cores in bodies:
        saved_ns += num_segments * sum(saved.get(_name(matmul, cores), 0.0) for matmul in find_matmuls(graph))
        num_matmuls += replace_with_onednn(graph, lambda matmul, cores=cores: _name(matmul, cores) in saved)  # type: ignore[misc]
    if num_matmuls:
        products = format_count(num_matmuls, "matrix product")
        _logger.info("%s: oneDNN computes %s of its bodies", compilation.capture.name, products)
    return saved_ns


def _name(matmul: Matmul, cores: int) -> str:
    return f"{matmul.name} on {cores}"


def compile_code(
    pieces: BodyGraphs,
    traced: TracedGraph,
    compilation: Compilation,
    config: Config,
    target: Target,
    at: Callable[[str, int, int], None] = lambda phase, number, count: None,
) -> Code:
    """Return the code of all bodies of a graph, and its contract.

    `at` is called with the phase, the number of the body, and the number of bodies.
    """
    if config.runtime.bodies == "eager":
        return Code(bodies=interpret_bodies(pieces), contract=traced.contract)
    is_native = config.runtime.bodies == "native" and target.has_native_bodies
    bodies = compile_bodies(pieces, native=is_native, at=at, **traced.kwargs)
    log_python_bodies(compilation, bodies)
    return Code(bodies=bodies, contract=traced.contract)


_num_warnings = itertools.count()
"""Counts warnings about bodies that need Python because the C++ wrapper failed."""


def log_python_bodies(compilation: Compilation, bodies: Sequence[CompiledBody]) -> None:
    """Log why bodies run under the GIL.

    Bodies that call Python are one INFO line. A failed C++ wrapper is a WARNING, once per process, since the reason is
    mostly the same for all of them.
    """
    kept = [
        (body.name, made.keeps_python)
        for body, made in zip(compilation.partition.bodies, bodies, strict=True)
        if made.keeps_python is not None
    ]
    callers = [name for name, why in kept if not why.is_lost]
    if callers:
        names = ", ".join(callers)
        _logger.info("%s: segments that call Python run under the GIL: %s", compilation.capture.name, names)
    lost = [(name, why.reason) for name, why in kept if why.is_lost]
    if lost:
        _logger.log(
            logging.INFO if next(_num_warnings) else logging.WARNING,
            "%s: %d of %s could not be compiled to run without Python, so lanes take turns under the GIL and gain "
            "little or nothing: Inductor's C++ wrapper failed for segment %s: %s; 'apollo doctor' tells whether any "
            "body can be native here (later ones of this process are INFO lines)",
            compilation.capture.name,
            len(lost),
            format_count(len(bodies), "body", "bodies"),
            *lost[0],
        )
