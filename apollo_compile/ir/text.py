"""Deterministic text of every product, for dumps, golden tests and reports.

    format_x(product[, the graph that has the names]) -> lines of text

The text does not depend on the process. Ids have the letter of their kind: n node, s segment, b buffer, e event.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from apollo_compile.ir import (
    BufferId,
    Capture,
    CostSource,
    CostTable,
    Instruction,
    Lane,
    LaneId,
    Launch,
    MemoryPlan,
    Partition,
    Plan,
    Program,
    Record,
    Release,
    SegmentGraph,
    SegmentId,
    SyncPlan,
    Trace,
    Wait,
    Work,
)
from apollo_compile.units import format_bytes, format_ns

TIMELINE_WIDTH = 72
_MARKS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def format_capture(capture: Capture) -> str:
    """Return the nodes of a graph."""
    rows = [
        (
            f"n{node.id}",
            node.kind.value,
            node.name,
            node.target,
            " ".join(
                [
                    *(f"n{other}" for other in node.inputs),
                    *(f"size:n{other}" for other in node.sizes),
                    *(f"after:n{other}" for other in node.after),
                ]
            ),
            format_bytes(node.num_bytes),
            node.work.flops,
            node.module + (":backward" if node.is_backward else ""),
        )
        for node in capture.nodes
    ]
    outputs = " ".join("-" if output is None else f"n{output}" for output in capture.outputs)
    table = _table(rows, ("node", "kind", "name", "target", "reads", "bytes", "flops", "module"), "llllllrl")
    title = f"capture {capture.name} ({capture.role.value}): {format_count(len(capture.nodes), 'node')}"
    unknown = [f"counted by bytes alone: {', '.join(capture.without_formula)}"] if capture.without_formula else []
    sizes = [f"for sizes {', '.join(f'{name}={size}' for name, size in capture.sizes)}"] if capture.sizes else []
    return "\n".join([title, table, f"returns {outputs}", *unknown, *sizes])


def format_partition(partition: Partition) -> str:
    """Return segments, bodies and buffers."""
    graph = partition.graph
    segments = [
        (
            f"s{segment.id}",
            segment.name,
            f"body {segment.body}",
            _buffers(segment.inputs),
            _buffers(segment.outputs),
            " ".join(f"s{other}" for other in segment.after),
            len(partition.nodes_by_segment[segment.id]),
            *_work(segment.work),
        )
        for segment in graph.segments
    ]
    bodies = [
        (
            f"body {body.id}",
            body.name,
            sum(segment.body == body.id for segment in graph.segments),
            len(body.nodes),
            len(body.inputs),
            len(body.outputs),
        )
        for body in partition.bodies
    ]
    title = f"partition {graph.name} ({graph.role.value}): {format_count(len(graph.segments), 'segment')}, "
    title += f"{format_count(len(bodies), 'body', 'bodies')}, {format_count(len(graph.buffers), 'buffer')}"
    headers = ("segment", "name", "body", "takes", "makes", "after", "nodes", "flops", "bytes", "kernels")
    return "\n\n".join(
        [
            f"{title}\n{_table(segments, headers, 'llllllrrrr')}",
            _table(bodies, ("body", "name", "segments", "nodes", "inputs", "outputs"), "llrrrr"),
            f"{_buffer_table(graph)}\ntakes {_buffers(graph.inputs)}\nreturns {_buffers(graph.outputs)}",
        ]
    )


def _buffer_table(graph: SegmentGraph) -> str:
    rows = [
        (
            f"b{buffer.id}",
            buffer.name,
            "call" if buffer.producer is None else f"s{buffer.producer}",
            " ".join([*(f"s{reader}" for reader in buffer.readers), *(["return"] if buffer.is_output else [])]),
            format_bytes(buffer.num_bytes),
        )
        for buffer in graph.buffers
    ]
    return _table(rows, ("buffer", "name", "from", "to", "bytes"), "llllr")


def format_costs(costs: CostTable, graph: SegmentGraph) -> str:
    """Return durations per segment and unit count; measured ones have a star."""
    counts = sorted({mode.units for modes in costs.modes for mode in modes})
    rows = []
    for segment, modes in zip(graph.segments, costs.modes, strict=True):
        cell = {mode.units: format_ns(mode.duration_ns) + mark_source(mode.source) for mode in modes}
        memory = format_bytes(max(mode.memory_bytes for mode in modes))
        rows.append((f"s{segment.id}", segment.name, *(cell.get(units, "") for units in counts), memory))
    headers = ("segment", "name", *(format_count(units, "unit") for units in counts), "bytes")
    title = f"costs {graph.name}: hand-over {format_ns(costs.handover_ns)}, * measured, ~ scaled from a measurement"
    return f"{title}\n{_table(rows, headers, 'll' + 'r' * (len(counts) + 1))}"


def mark_source(source: CostSource) -> str:
    """Return the mark of the source of a duration: `*` measured, `~` scaled, a space for the formula."""
    return {CostSource.MEASURED: "*", CostSource.SCALED: "~", CostSource.FORMULA: " "}[source]


def format_plan(plan: Plan, graph: SegmentGraph) -> str:
    """Return the assignments in start order and a timeline of the lanes."""
    gain = plan.serial_ns / plan.makespan_ns if plan.makespan_ns else 1.0
    title = (
        f"plan {graph.name} ({plan.origin.value}{', pinned' if plan.pinned else ''}): {format_ns(plan.makespan_ns)}, "
        f"serial {format_ns(plan.serial_ns)} ({gain:.2f}x); undisturbed {format_ns(plan.undisturbed_ns)}, bound "
        f"{format_ns(plan.lower_bound_ns)}, gap {plan.gap:.1%}"
    )
    candidates = [
        f"  {candidate.name}: {format_ns(candidate.makespan_ns)}, undisturbed {format_ns(candidate.undisturbed_ns)}"
        for candidate in plan.candidates
    ]
    search = [f"seed {plan.seed}", f"solver {plan.solver}" if plan.solver else "no solver"]
    if plan.stopped_early:
        search.append("stopped by the time limit")
    rows = [
        (
            _mark(assignment.segment),
            f"s{assignment.segment}",
            graph.segments[assignment.segment].name,
            f"lane {assignment.lane}",
            assignment.quota.units,
            assignment.start_ns,
            assignment.end_ns,
            format_ns(assignment.duration_ns),
        )
        for assignment in plan.in_start_order()
    ]
    table = _table(rows, ("mark", "segment", "name", "lane", "units", "start ns", "end ns", "duration"), "llllrrrr")
    spans = [(a.segment, a.lane, a.start_ns, a.end_ns) for a in plan.assignments]
    head = "\n".join([title, ", ".join(search), *candidates])
    return f"{head}\n{draw_lanes(plan.lanes, spans, plan.makespan_ns)}\n\n{table}"


def format_syncs(syncs: SyncPlan, graph: SegmentGraph, plan: Plan) -> str:
    """Return kept and dropped cross-lane dependencies."""
    rows = []
    for kept, dependencies in (("wait", syncs.waits), ("dropped", syncs.dropped)):
        for dependency in dependencies:
            ends = [dependency.consumer, dependency.producer]
            cells = [
                cell
                for end in ends
                for cell in (f"s{end}", f"lane {plan.assignments[end].lane}", graph.segments[end].name)
            ]
            cells.insert(3, "for")
            rows.append((kept, *cells))
    title = (
        f"syncs {graph.name}: {format_count(len(syncs.waits), 'wait')} kept, {len(syncs.dropped)} dropped as implied"
    )
    return f"{title}\n{_table(rows, (), 'llllllll')}".rstrip()


def format_memory(memory: MemoryPlan, graph: SegmentGraph) -> str:
    """Return the release point of every buffer, and the planned peaks."""
    rows = []
    for hold in sorted(memory.holds, key=lambda hold: hold.buffer):
        buffer, segment = graph.buffers[hold.buffer], graph.segments[hold.segment]
        how = "taken by" if segment.id in buffer.readers else "released after"
        rows.append((f"b{buffer.id}", buffer.name, format_bytes(buffer.num_bytes), how, f"s{segment.id}", segment.name))
    for at_end in memory.at_end:
        buffer = graph.buffers[at_end]
        rows.append((f"b{buffer.id}", buffer.name, format_bytes(buffer.num_bytes), "at end", "", ""))
    lanes = ", ".join(f"lane {lane} {format_bytes(peak)}" for lane, peak in enumerate(memory.peak_bytes_by_lane))
    title = f"memory {graph.name}: peak {format_bytes(memory.peak_bytes)}; {lanes}"
    return f"{title}\n{_table(rows, (), 'llrlll')}".rstrip()


def format_program(program: Program, graph: SegmentGraph) -> str:
    """Return the instructions, one block per lane."""
    recorded = _segment_by_event(program)
    counts = f"{format_count(program.num_buffers, 'buffer')}, {format_count(program.num_events, 'event')}"
    blocks = [
        f"program {program.name} ({counts})\ntakes {_buffers(program.inputs)}\nreturns {_buffers(program.outputs)}"
    ]
    for lane, instructions in zip(program.lanes, program.instructions, strict=True):
        lines = [f"{format_lane(lane)}:"]
        for instruction in instructions:
            lines.append(f"    {_instruction(instruction, graph, recorded)}")
        blocks.append("\n".join(lines if instructions else [*lines, "    idle"]))
    return "\n\n".join(blocks)


def _instruction(instruction: Instruction, graph: SegmentGraph, recorded: dict[int, SegmentId]) -> str:
    if isinstance(instruction, Launch):
        inputs = zip(instruction.inputs, instruction.takes, strict=True)
        arguments = ", ".join(f"take b{buffer}" if takes else f"b{buffer}" for buffer, takes in inputs)
        outputs = ", ".join(f"b{buffer}" for buffer in instruction.outputs)
        name = graph.segments[instruction.segment].name
        return f"launch {instruction.segment} {name} ({arguments})" + (f" -> {outputs}" if outputs else "")
    if isinstance(instruction, Record):
        return f"record e{instruction.event}"
    if isinstance(instruction, Wait):
        producer = recorded.get(instruction.event)
        name = "recorded nowhere" if producer is None else graph.segments[producer].name
        return f"wait e{instruction.event}  # {name}"
    assert isinstance(instruction, Release)
    return f"release b{instruction.buffer}"


def _segment_by_event(program: Program) -> dict[int, SegmentId]:
    found: dict[int, SegmentId] = {}
    for instructions in program.instructions:
        latest: SegmentId | None = None
        for instruction in instructions:
            if isinstance(instruction, Launch):
                latest = instruction.segment
            elif isinstance(instruction, Record) and latest is not None:
                found[instruction.event] = latest
    return found


def format_trace(trace: Trace, graph: SegmentGraph, plan: Plan) -> str:
    """Return measured and planned durations of a run's segments, and a timeline of the lanes."""
    rows = []
    for span in trace.spans:
        planned, measured = plan.assignments[span.segment].duration_ns, span.end_ns - span.start_ns
        rows.append(
            (
                _mark(span.segment),
                f"s{span.segment}",
                graph.segments[span.segment].name,
                f"lane {span.lane}",
                "" if span.core < 0 else span.core,
                span.start_ns,
                span.end_ns,
                format_ns(measured),
                format_ns(planned),
                f"{measured / planned:.2f}",
            )
        )
    headers = ("mark", "segment", "name", "lane", "core", "start ns", "end ns", "measured", "planned", "ratio")
    spans = [(span.segment, span.lane, span.start_ns, span.end_ns) for span in trace.spans]
    title = f"trace {graph.name}: {format_ns(trace.duration_ns)}, planned {format_ns(plan.makespan_ns)}"
    return f"{title}\n{draw_lanes(plan.lanes, spans, trace.duration_ns)}\n\n{_table(rows, headers, 'llllrrrrrr')}"


# ------------------------------------------------------------------------------------------------------- pieces


def draw_lanes(lanes: Sequence[Lane], spans: Iterable[tuple[int, int, int, int]], duration_ns: int) -> str:
    """Return one row per lane; a segment is its mark, repeated for as long as it runs, and idle time is dots.

    A span is (segment, lane, start, end), with its lane's id.
    """
    rows = {lane.id: ["."] * TIMELINE_WIDTH for lane in lanes}
    for segment, lane, start, end in sorted(spans, key=lambda span: (span[2], span[0])):
        first = min(TIMELINE_WIDTH - 1, start * TIMELINE_WIDTH // max(1, duration_ns))
        last = min(TIMELINE_WIDTH, max(first + 1, end * TIMELINE_WIDTH // max(1, duration_ns)))
        rows[LaneId(lane)][first:last] = _mark(segment) * (last - first)
    labels = [format_lane(lane) for lane in lanes]
    width = max(map(len, labels))
    return "\n".join(f"{label:<{width}} |{''.join(row)}|" for label, row in zip(labels, rows.values(), strict=True))


def _mark(segment: int) -> str:
    return _MARKS[segment % len(_MARKS)]


def format_lane(lane: Lane) -> str:
    """Return e.g. `lane 1 (2 units: 0-1)`."""
    if not lane.units:
        return f"lane {lane.id} (network)"
    contiguous = lane.units == tuple(range(lane.units[0], lane.units[-1] + 1))
    span = f"{lane.units[0]}-{lane.units[-1]}" if contiguous and len(lane.units) > 1 else ",".join(map(str, lane.units))
    return f"lane {lane.id} ({format_count(len(lane.units), 'unit')}: {span})"


def _buffers(buffers: Iterable[BufferId | None]) -> str:
    """Return e.g. `b1 - b4..b9`, or `nothing`; three or more in a row are a range."""
    runs: list[list[int | None]] = []
    for buffer in buffers:
        last = runs[-1][-1] if runs else None
        if buffer is not None and last is not None and buffer == last + 1:
            runs[-1].append(buffer)
        else:
            runs.append([buffer])
    words: list[str] = []
    for run in runs:
        if len(run) > 2:
            words.append(f"b{run[0]}..b{run[-1]}")
        else:
            words += ["-" if buffer is None else f"b{buffer}" for buffer in run]
    return " ".join(words) or "nothing"


def _work(work: Work) -> tuple[str, str, int]:
    return _flops(work.flops), format_bytes(work.bytes_read + work.bytes_written), work.kernels


def _flops(flops: int) -> str:
    size = float(flops)
    for prefix in ("", "K", "M", "G"):
        if size < 1000:
            return f"{size:.3g} {prefix}F"
        size /= 1000
    return f"{size:.3g} TF"


def format_count(number: int, singular: str, plural: str | None = None) -> str:
    """Return e.g. `1 lane` or `2 lanes`."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def _table(rows: Sequence[Sequence[object]], headers: Sequence[str], align: str) -> str:
    """Return aligned columns, two spaces apart; `align` has `l` or `r` per column."""
    if not rows:
        return ""
    text = [[str(cell) for cell in row] for row in ([headers, *rows] if headers else rows)]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    cells = zip(align, widths, strict=True)
    pattern = "  ".join(f"{{:{'<' if side == 'l' else '>'}{width}}}" for side, width in cells)
    return "\n".join(pattern.format(*row).rstrip() for row in text)
