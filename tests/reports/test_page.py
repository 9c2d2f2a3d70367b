"""The page of a report: complete without a network, and as it behaves in a real browser."""

from __future__ import annotations

import html
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from apollo_compile.reports.glossary import GLOSSARY
from apollo_compile.reports.render_html import NODE_HEIGHT, NODE_WIDTH, make_ticks, place_modules, time_scale
from apollo_compile.reports.report import Report
from apollo_compile.reports.summary import summarize
from benchmarks.graphs import WORKLOADS
from tests.browser import PATIENCE_MS
from tests.builders import random_graph
from tests.reports.reports import STATE, a_break, compile_graph, full_report, invent_run, report_of, workload_report
from tests.reports.test_summary import RUN, compilation

VOID = {"meta", "link", "br", "wbr", "img", "input"}


class Page(HTMLParser):
    """Reads a page and refuses tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


# ------------------------------------------------------------------------------------------------------ without browser


def test_a_page_needs_nothing_else() -> None:
    """No address in it, apart from names of formats; what comes from outside is text, not markup."""
    text = full_report().to_html()
    page = Page(text)
    assert not re.search(r"https?://|@import|url\(", text)
    sources = [attributes.get(key) for _, attributes in page.tags for key in ("src", "href") if key in attributes]
    assert all(source and (source.startswith(("#", "data:"))) for source in sources)
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text
    assert "&lt;b&gt;&amp;" in text


def test_every_part_has_a_name_for_those_who_do_not_see_it() -> None:
    """Charts, bars, tables, buttons, regions that scroll; ids occur once."""
    page = Page(full_report().to_html())
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        if attributes.get("role") in ("list", "listitem", "img", "region", "group"):
            assert attributes.get("aria-label"), (tag, attributes)
        if attributes.get("tabindex") == "0":
            assert attributes.get("aria-label")
    tables = [tag for tag, _ in page.tags if tag in ("table", "caption")]
    assert tables.count("table") == tables.count("caption") > 8


def test_five_hundred_segments_make_a_page_under_a_megabyte() -> None:
    """With a run, so that all three timelines are there."""
    graph = random_graph(random.Random(0), 500)
    named = tuple(
        replace(segment, name=f"language_model.model.layers.{segment.id}", module=f"language_model.model.{segment.id}")
        for segment in graph.segments
    )
    made = compile_graph(replace(graph, segments=named), time_limit_s=0.1)
    text = report_of(summarize(made, invent_run(made))).to_html()
    assert text.count('class="bar') >= 1500
    assert len(text.encode()) < 1_000_000


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    """Style and script of the page stay inside."""
    report = full_report()
    frame = report._repr_html_()
    assert frame.count("<") == 2
    match = re.fullmatch(r'<iframe title="apollo report" style="[^"]*" srcdoc="([^"]*)"></iframe>', frame)
    assert match and html.unescape(match[1]) == report.to_html()


@pytest.mark.parametrize("workload", WORKLOADS)
def test_axes_have_round_times_and_boxes_do_not_overlap(workload: str) -> None:
    """On every saved graph."""
    for graph in workload_report(workload).graphs:
        ticks = make_ticks(time_scale(graph))
        assert 4 <= sum(not tick.is_minor for tick in ticks) <= 10
        places = [float(tick.place.removesuffix("%")) for tick in ticks]
        assert places == sorted(places) and places[-1] < 100
        net = place_modules(graph)
        spots = {(node.x, node.y) for node in net.nodes}
        assert len(spots) == len(net.nodes)
        for one in net.nodes:
            assert 0 <= one.x <= net.width - NODE_WIDTH and 0 <= one.y <= net.height - 46
            assert not any(one.x == x and 0 < abs(one.y - y) < 46 for x, y in spots)


@pytest.mark.parametrize(("factor", "shown"), [(1.0, 1.0), (1.4, 1.4), (9.0, 1.5)])
def test_a_disturbed_run_does_not_stretch_the_axis(factor: float, shown: float) -> None:
    """It is cut, and says so; the plans keep most of the width."""
    (graph,) = report_of(summarize(compilation(), RUN)).graphs
    longest = max(line.duration_ns for line in graph.timelines[:2])
    run = replace(graph.latest, duration_ns=round(factor * longest))
    disturbed = replace(graph, timelines=(*graph.timelines[:2], run))
    assert time_scale(disturbed) == round(shown * longest)
    page = report_of(disturbed).to_html()
    assert ("; cut at " in page) is ('class="lanes cut"' in page) is (factor > shown)


def points_of(path: str) -> Iterator[tuple[float, float]]:
    """Yield points on a path of cubic curves and horizontal lines."""
    commands = re.findall(r"([MCH])([^MCH]*)", path)
    at = (0.0, 0.0)
    for command, numbers in commands:
        values = [float(each) for each in re.split(r"[ ,]", numbers.strip())]
        if command == "M":
            at = (values[0], values[1])
            continue
        across = (values[0], at[1])
        corners = [at, at, across, across] if command == "H" else [at, *zip(values[::2], values[1::2], strict=True)]
        for share in (number / 40 for number in range(41)):
            weights = [(1 - share) ** 3, 3 * share * (1 - share) ** 2, 3 * share**2 * (1 - share), share**3]
            yield tuple(sum(w * corner[axis] for w, corner in zip(weights, corners, strict=True)) for axis in (0, 1))  # type: ignore[misc]
        at = corners[-1]  # type: ignore[assignment]


@pytest.mark.parametrize("seed", range(6))
def test_edges_between_modules_run_behind_no_box(seed: int) -> None:
    """Those of random modules that read from several columns before; edges back go around, as good as they can."""
    chance = random.Random(seed)
    (graph,) = workload_report("clip").graphs[:1]
    modules = [
        replace(graph.modules[0], name=f"m{index}", after=tuple(sorted(chance.sample(range(index), min(index, 3)))))
        for index in range(9)
    ]
    net = place_modules(replace(graph, modules=tuple(modules)))
    assert len(net.edges) == sum(len(module.after) for module in modules)
    for path in net.edges:
        for x, y in points_of(path):
            inside = [n for n in net.nodes if n.x + 1 < x < n.x + NODE_WIDTH - 1 and n.y < y < n.y + NODE_HEIGHT]
            assert not inside, (path, inside)


def test_words_of_the_glossary_are_told_where_the_page_has_them() -> None:
    """As the documentation tells them, without its marks."""
    page = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \|$", page, re.MULTILINE)
    assert {word: re.sub("[`*]", "", text) for word, text in rows} == GLOSSARY and len(GLOSSARY) == 10
    shown = html.unescape(full_report().to_html())
    assert sum(f'title="{text}' in shown or f": {text} " in shown for text in GLOSSARY.values()) >= 7


# --------------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open the page of a report in the browser, which must not complain of anything."""
    contexts, complaints = [], []

    def show(report: Report, **options: Any) -> Any:
        report.save_html(tmp_path / "report.html")
        contexts.append(browser.new_context(offline=True, **options))
        contexts[-1].set_default_timeout(PATIENCE_MS)
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(request.url))
        page.goto((tmp_path / "report.html").as_uri())
        return page

    yield show
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def tab(show: Callable[..., Any]) -> Any:
    """The page of the small report with a run, on a laptop."""
    report = report_of(summarize(compilation(), RUN), breaks=(a_break(),), states=(STATE,))
    return show(report, viewport={"width": 1280, "height": 900})


def test_how_far_it_is_stands_above_all_graphs(tab: Any) -> None:
    """In view when the page opens."""
    line = tab.locator(".state")
    assert line.inner_text() == "measuring: round 3 of at least 5"
    box, first = line.bounding_box(), tab.locator("section").first.bounding_box()
    assert tab.locator("header").bounding_box()["height"] <= box["y"] < box["y"] + box["height"] <= first["y"] < 900


def test_pointing_at_a_segment_shows_its_numbers(tab: Any) -> None:
    """And outlines what it needs; away from it they are gone."""
    tab.locator(".line[data-line=measured] .bar[data-s='3']").hover()
    tip = tab.locator("#tip")
    assert tip.is_visible()
    text = tip.inner_text()
    assert text.startswith("head") and "60 ns" in text and "80 ns" in text
    assert tab.locator(".bar.needs").count() == 3 * 2  # two segments on three timelines
    tab.locator("h2").first.hover()
    assert not tip.is_visible() and tab.locator(".bar.needs").count() == 0


def test_a_tap_shows_the_numbers_on_a_phone(show: Callable[..., Any]) -> None:
    """Where nothing can be pointed at."""
    page = show(full_report(), viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.locator(".line[data-line=measured] .bar").first.tap()
    page.wait_for_function("!document.getElementById('tip').hidden")


def test_zoom_widens_every_timeline_around_the_same_time(tab: Any) -> None:
    """With buttons, with keys, and back."""
    bar = tab.locator(".line[data-line=predicted] .bar[data-s='1']")
    before = bar.bounding_box()["width"]
    for _ in range(3):
        tab.locator("[data-zoom='2']").click()
    assert bar.bounding_box()["width"] == pytest.approx(8 * before, rel=0.01)
    assert tab.locator("output").inner_text() == "8x"
    tab.wait_for_function(
        """() => {
          const places = [...document.querySelectorAll('.line .scroll')].map(pane => pane.scrollLeft);
          return places[0] > 0 && new Set(places).size === 1;
        }"""
    )
    tab.locator(".line[data-line=serial] .scroll").focus()
    tab.keyboard.press("-")
    assert tab.locator("output").inner_text() == "4x"
    tab.locator("[data-zoom='0']").click()
    assert bar.bounding_box()["width"] == pytest.approx(before, rel=0.01)


def test_timelines_can_be_switched(tab: Any) -> None:
    """One, or all of them."""
    assert tab.locator(".line:visible").count() == 3
    tab.locator("[data-show=measured]").click()
    assert tab.locator(".line:visible").get_attribute("data-line") == "measured"
    assert tab.locator("[aria-pressed=true]").inner_text() == "measured"
    tab.locator("[data-show=all]").click()
    assert tab.locator(".line:visible").count() == 3


def test_the_keyboard_goes_from_segment_to_segment(tab: Any) -> None:
    """Without a mouse one gets the same numbers."""
    tab.locator(".line[data-line=predicted] .scroll").focus()
    names = []
    for _ in range(4):
        tab.keyboard.press("ArrowRight")
        names.append(tab.locator("#tip b").inner_text())
    assert names == ["embed", "image.layers.0", "text.layers.0", "head"]
    tab.keyboard.press("Escape")
    assert not tab.locator("#tip").is_visible()


def test_tables_sort_by_number_and_by_name(tab: Any) -> None:
    """Of numbers the largest come first, then the other way round; a sorted column says so."""
    table = tab.locator("[data-segments]")

    def column(number: int) -> list[str]:
        found: list[str] = table.locator(f"tbody tr > :nth-child({number})").all_inner_texts()
        return found

    table.get_by_role("button", name="predicted").click()
    assert column(5) == ["400 ns", "200 ns", "60 ns", "50 ns"]
    table.get_by_role("button", name="predicted").click()
    assert column(5) == ["50 ns", "60 ns", "200 ns", "400 ns"]
    table.get_by_role("button", name="segment").click()
    assert column(1) == ["embed", "head", "image.layers.0", "text.layers.0"]
    assert table.locator("th[aria-sort=ascending]").inner_text().startswith("segment")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_and_the_button(show: Callable[..., Any], scheme: str) -> None:
    """Text and background change places, and keep their contrast."""
    page = show(full_report(), color_scheme=scheme)
    first = contrast_and_lightness(page)
    page.locator("#theme").click()
    then = contrast_and_lightness(page)
    assert [lightness > 0.5 for _, lightness in (first, then)] == [scheme == "light", scheme == "dark"]
    assert min(contrast for contrast, _ in (first, then)) >= 4.5


def test_paper_is_light_and_shows_everything(show: Callable[..., Any]) -> None:
    """Whatever the page looked like: dark, and zoomed in; nothing stands where a reader would have to scroll."""
    page = show(full_report(), color_scheme="dark", viewport={"width": 715, "height": 1000})
    page.locator("[data-zoom='2']").first.click()
    page.emulate_media(media="print")
    contrast, lightness = contrast_and_lightness(page)
    assert contrast >= 4.5 and lightness == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 715
    hidden = """() => [...document.querySelectorAll('.scroll')].filter(e => e.checkVisibility())
             .filter(e => e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1)
             .map(e => e.getAttribute('aria-label'))"""
    assert page.evaluate(hidden) == []


def contrast_and_lightness(page: Any) -> tuple[float, float]:
    """Return the least contrast of texts to what is behind them, by WCAG 2, and how light the page is."""
    found: list[float] = page.evaluate(
        """() => {
          const parse = c => c.match(/[\\d.]+/g).map(Number);
          const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 :
            ((v + 0.055) / 1.055) ** 2.4).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
          const behind = e => {
            for (; e; e = e.parentElement) {
              const c = parse(getComputedStyle(e).backgroundColor);
              if (c.length < 4 || c[3] > 0.99) return c;
            }
            return [255, 255, 255];
          };
          const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
          let least = 21;
          for (const e of document.querySelectorAll('h1,h2,h3,h4,p,dt,dd,li,td,th,a,button,em,code,span,.hint')) {
            if (e.textContent.trim()) {
              least = Math.min(least, ratio(light(parse(getComputedStyle(e).color)), light(behind(e))));
            }
          }
          for (const e of document.querySelectorAll('.bar')) {
            const fill = parse(getComputedStyle(e.querySelector('rect')).fill);
            least = Math.min(least, ratio(light(parse(getComputedStyle(e.querySelector('text')).fill)), light(fill)));
          }
          return [least, light(parse(getComputedStyle(document.body).backgroundColor))];
        }"""
    )
    return found[0], found[1]


MISPLACED = {
    "blocks that overlap": """() => {
          const found = [];
          for (const group of document.querySelectorAll('main, section, .tiles, .panel, .line, .bar-top, header')) {
            const boxes = [...group.children].filter(e => e.checkVisibility() && !e.classList.contains('hidden'))
              .map(e => [e, e.getBoundingClientRect()]).filter(([, b]) => b.width && b.height);
            for (const [i, [a, p]] of boxes.entries()) for (const [b, q] of boxes.slice(i + 1)) {
              const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
              const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
              if (wide > 1 && high > 1) found.push([a.outerHTML.slice(0, 80), b.outerHTML.slice(0, 80)]);
            }
          }
          return found;
        }""",
    "texts that are clipped": """() => [
          ...document.querySelectorAll('h1,h2,h3,h4,.tiles dd,.tiles dt,.seg button,.words li,#theme')]
             .filter(e => e.checkVisibility() && getComputedStyle(e).display !== 'inline')
             .filter(e => e.scrollWidth > e.clientWidth + 1)
             .map(e => e.outerHTML.slice(0, 80))""",
    "labels of axes": """() => [...document.querySelectorAll('.lanes .scroll')].flatMap(pane => {
             const boxes = [...pane.querySelectorAll('.tick text')].map(t => [t, t.getBoundingClientRect()])
               .filter(([t, box]) => box.width && t.checkVisibility({visibilityProperty: true}));
             const end = pane.getBoundingClientRect().right + 1;
             const isBad = ([, box], i) => box.right > end || (i > 0 && box.left < boxes[i - 1][1].right);
             return boxes.length < 3 ? ['few labels'] : boxes.filter(isBad).map(([t]) => t.textContent);
           })""",
    "names of modules": """() => [...document.querySelectorAll('.net g text')]
             .filter(t => t.getBoundingClientRect().right + 6 >
               t.parentElement.querySelector('rect').getBoundingClientRect().right).map(t => t.textContent)""",
    "names of segments": """() => [...document.querySelectorAll('.bar text')]
             .filter(t => t.textContent && t.getBBox().width + 6 > t.parentElement.getBoundingClientRect().width + 1)
             .map(t => t.textContent)""",
}
"""Functions that return what stands where it should not."""


@pytest.mark.parametrize("width", [375, 1280, 1920])
@pytest.mark.parametrize("workload", ["clip", "llava"])
def test_nothing_sticks_out_or_overlaps(show: Callable[..., Any], workload: str, width: int) -> None:
    """The page is as wide as the window, and blocks of text stand apart."""
    page = show(full_report(workload), viewport={"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for what, function in MISPLACED.items():
        assert page.evaluate(function) == [], what
