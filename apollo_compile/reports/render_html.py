"""A report as one self-contained HTML page: it needs no network and no other file.

    ModelSummary -> str

The page is complete without its script: texts and positions come from `page.html` (a Jinja template) and `page.css`.
`page.js` adds interaction: switching timelines, zoom, details of a segment, sorting. Numbers are shown rounded and with
their unit; `data-v` has the exact value.

Positions on a timeline are percentages, so that zooming only changes a width. Positions in the graph of modules are
pixels, with a column per distance from the inputs.
"""

from __future__ import annotations

import functools
import html
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import resources
from typing import NamedTuple

import jinja2
from markupsafe import Markup

from apollo_compile.ir import Lane, LaneId
from apollo_compile.ir.text import format_count, format_lane, mark_source
from apollo_compile.reports.colors import COLORS, color_of_branches
from apollo_compile.reports.glossary import GLOSSARY
from apollo_compile.reports.values import GraphSummary, ModelSummary, Timeline
from apollo_compile.reports.words import (
    NOT_MEASURED_YET,
    NOTHING_YET,
    breaks_by_place,
    describe,
    describe_device,
    describe_search,
    describe_state,
    format_interval,
)
from apollo_compile.units import format_bytes, format_ns

FRAME_HEIGHT = 900
"""Pixels of a report in a notebook."""

ROW = 30
"""Height in pixels of a lane, its gap included."""

TICKS = 8
"""Approximate number of labels on a time axis."""

LONGEST = 1.5
"""Part of a run that a timeline shows, over the longest planned duration."""

COLUMN_WIDTH, NODE_WIDTH, NODE_HEIGHT, NODE_GAP = 280, 230, 46, 16


def render_html(report: ModelSummary) -> str:
    """Return the page."""
    return _template().render(
        report=report,
        state=describe_state(report.states),
        describe=describe,
        css=read_asset("page.css"),
        js=read_asset("page.js"),
    )


def render_frame(report: ModelSummary) -> str:
    """Return the page inside an iframe for notebooks, so that its style and script do not affect the notebook."""
    page = html.escape(render_html(report), quote=True)
    style = f"width:100%;height:{FRAME_HEIGHT}px;border:0"
    return f'<iframe title="apollo report" style="{style}" srcdoc="{page}"></iframe>'


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(
        ns=format_ns,
        bytes=format_bytes,
        count=format_count,
        breakable=make_breakable,
        interval=format_interval,
        percent=lambda share: f"{share:.0%}",
    )
    environment.globals.update(
        GLOSSARY={**GLOSSARY, **{f"{word}s": GLOSSARY[word] for word in ("segment", "unit", "lane")}},
        breaks_by_place=breaks_by_place,
        by_id=lambda graph: {segment.id: segment for segment in graph.segments},
        NODE_HEIGHT=NODE_HEIGHT,
        NODE_WIDTH=NODE_WIDTH,
        NOTHING_YET=NOTHING_YET,
        NOT_MEASURED_YET=NOT_MEASURED_YET,
        ROW=ROW,
        color_of_branches=color_of_branches,
        colors=COLORS,
        describe_device=describe_device,
        describe_search=describe_search,
        mark_source=mark_source,
        module_graph=place_modules,
        rows=lane_rows,
        ticks=make_ticks,
        waits=place_waits,
        short=short_name,
        where=percent_of,
        scale=time_scale,
        is_long=is_long,
    )
    return environment.from_string(read_asset("page.html"))


def read_asset(name: str) -> str:
    """Return the text of a file in the directory of this module."""
    return resources.files("apollo_compile.reports").joinpath(name).read_text(encoding="utf-8")


def make_breakable(name: str) -> Markup:
    """Return the name of a module as HTML that may break after its dots."""
    return Markup("<wbr>").join(f"{part}." for part in name.split("."))[:-1]


def short_name(name: str) -> str:
    """Return the last two parts of a module's name, which distinguish it."""
    return ".".join(name.split(".")[-2:])


# ------------------------------------------------------------------------------------------------------- timelines


def time_scale(graph: GraphSummary) -> int:
    """Return the nanoseconds that the width of a timeline represents; all timelines of a graph have the same scale.

    A disturbed run is cut at `LONGEST` times the planned duration, so that the plans stay readable.
    """
    planned_ns = max(1, *(line.duration_ns for line in graph.timelines if line.name != "measured"))
    return min(round(LONGEST * planned_ns), max(planned_ns, graph.latest.duration_ns))


def percent_of(time_ns: int, scale_ns: int) -> str:
    """Return a time as a percentage of the scale."""
    return f"{100 * time_ns / scale_ns:.4g}%"


def is_long(duration_ns: int, scale_ns: int) -> bool:
    """Whether a bar has room for a label without zoom."""
    return duration_ns > 0.06 * scale_ns


class Row(NamedTuple):
    """One lane of a timeline."""

    lane: int
    label: str
    detail: str


def lane_rows(graph: GraphSummary, line: Timeline) -> list[Row]:
    """Return the lanes on which a timeline has segments."""
    used = {bar.lane for bar in line.bars}
    found = []
    for lane in graph.lanes:
        if lane.id in used:
            label, _, detail = format_lane(Lane(id=LaneId(lane.id), units=lane.units)).partition(" (")
            found.append(Row(lane.id, label, detail.removesuffix(")")))
    return found


class Tick(NamedTuple):
    """A mark on a time axis."""

    place: str
    label: str
    is_minor: bool
    """Whether it is shown only when there is room."""


def make_ticks(scale_ns: int) -> list[Tick]:
    """Return round times on a scale, subdivided by minor ticks."""
    rough = scale_ns / TICKS
    size = 10 ** math.floor(math.log10(rough))
    step = next((size * factor for factor in (1, 2, 5) if size * factor >= rough), 10 * size)
    minor = max(1, round(step / 5))
    count = int(scale_ns // minor)
    return [
        Tick(percent_of(minor * index, scale_ns), format_ns(minor * index) if index else "0", index % 5 != 0)
        for index in range(count + 1)
        if minor * index < 0.985 * scale_ns
    ]


class WaitLine(NamedTuple):
    """A kept wait, from the end of its producer to the start of its consumer."""

    producer: int
    consumer: int
    x1: str
    y1: float
    x2: str
    y2: float


def place_waits(graph: GraphSummary, line: Timeline) -> Iterator[WaitLine]:
    """Yield the waits of a timeline; the serial plan has none."""
    if line.name == "serial":
        return
    bars = {bar.segment: bar for bar in line.bars}
    middle = {row.lane: (index + 0.5) * ROW for index, row in enumerate(lane_rows(graph, line))}
    scale_ns = time_scale(graph)
    for wait in graph.waits:
        if wait.kept and wait.producer in bars and wait.consumer in bars:
            producer, consumer = bars[wait.producer], bars[wait.consumer]
            yield WaitLine(
                wait.producer,
                wait.consumer,
                percent_of(producer.end_ns, scale_ns),
                middle[producer.lane],
                percent_of(consumer.start_ns, scale_ns),
                middle[consumer.lane],
            )


# --------------------------------------------------------------------------------------------------------- modules


class ModuleNode(NamedTuple):
    """A module in the graph of modules."""

    x: int
    y: int
    label: str
    name: str


class ModuleGraph(NamedTuple):
    """Modules as boxes, and edges between them as curves."""

    width: int
    height: int
    nodes: list[ModuleNode]
    edges: list[str]
    """Paths of SVG."""


RowItem = int | tuple[int, int]
"""Item in a row of a column: a module by its index, or the passage of all edges from a module through a column."""


def place_modules(graph: GraphSummary) -> ModuleGraph:
    """Return the modules of a graph in columns by their distance from the inputs.

    An edge over several columns has a row of its own in those between, so that it runs behind no box. Modules may form
    a cycle, since each consists of several segments; edges to earlier modules do not affect columns.
    """
    rank: list[int] = []
    for index, module in enumerate(graph.modules):
        rank.append(1 + max((rank[other] for other in module.after if other < index), default=-1))
    before: dict[RowItem, set[RowItem]] = {index: set() for index in range(len(rank))}
    ways = [_way(rank, other, index) for index, module in enumerate(graph.modules) for other in module.after]
    for way in ways:
        for earlier, item in itertools.pairwise(way):
            before.setdefault(item, set()).add(earlier)
    columns: dict[int, list[RowItem]] = defaultdict(list)
    for item in before:
        columns[item[1] if isinstance(item, tuple) else rank[item]].append(item)
    place = _order_columns(columns, before)
    step = NODE_HEIGHT + NODE_GAP
    height = max(map(len, columns.values()), default=0) * step
    boxes = {}
    for number, column in columns.items():
        top = (height - len(column) * step) // 2 + NODE_GAP // 2
        for item in column:
            name = "" if isinstance(item, tuple) else graph.modules[item].name
            boxes[item] = ModuleNode(number * COLUMN_WIDTH + 4, top + place[item] * step, _fit(name), name)
    edges = [_curve([boxes[item] for item in way]) for way in ways]
    width = max(len(columns), 1) * COLUMN_WIDTH - (COLUMN_WIDTH - NODE_WIDTH) + 8
    return ModuleGraph(width, height, [boxes[index] for index in range(len(graph.modules))], edges)


def _way(rank: Sequence[int], start: int, end: int) -> list[RowItem]:
    """Return the modules where an edge starts and ends, and the passages between them."""
    return [start, *((start, column) for column in range(rank[start] + 1, rank[end])), end]


def _order_columns(
    columns: Mapping[int, list[RowItem]], before: Mapping[RowItem, Collection[RowItem]]
) -> dict[RowItem, int]:
    """Return the row of every item in its column, close to the items that it reads from."""
    place: dict[RowItem, int] = {}
    for number in sorted(columns):
        weights = {}
        for position, item in enumerate(columns[number]):
            rows = [place[other] for other in before[item] if other in place]
            weights[item] = (sum(rows) / len(rows) if rows else float(position), position)
        for row, item in enumerate(sorted(columns[number], key=weights.__getitem__)):
            place[item] = row
    return place


def _fit(name: str) -> str:
    """Return a name, shortened at its beginning to fit into a node."""
    return name if len(name) <= 30 else "…" + name[-29:]


def _curve(way: Sequence[ModuleNode]) -> str:
    """Return a path from the first box to the last, straight through the passages between them."""
    start, end = way[0], way[-1]
    x1, y1 = start.x + NODE_WIDTH, start.y + NODE_HEIGHT // 2
    path = f"M{x1},{y1}"
    if end.x < x1:  # back, or within a column: around the boxes
        y = max(start.y, end.y) + NODE_HEIGHT + NODE_GAP // 2
        return f"{path} C{x1 + 30},{y} {end.x - 30},{y} {end.x},{end.y + NODE_HEIGHT // 2}"
    for box in way[1:]:
        y2, middle = box.y + NODE_HEIGHT // 2, (x1 + box.x) // 2
        path += f" C{middle},{y1} {middle},{y2} {box.x},{y2}"
        x1, y1 = box.x + NODE_WIDTH, y2
        path += f" H{x1}" if box is not end else ""
    return path
