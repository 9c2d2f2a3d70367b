"""Make README's tables, the plot, and the picture of a report: `python docs/figures.py` writes them.

speed_ups() -> every published comparison with Inductor;  table...() -> rows of README;  plot() -> docs/speedup.svg

`tests/end_to_end/test_docs.py` fails where README or the plot is not what this makes, or has a number of its own.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # reports are those of the checkout, not of an installed package

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
PLOT = ROOT / "docs" / "speedup.svg"

COMPARISONS = ("lanes", "modes", "modes_xeon", "modes_xeon_batch4")
"""Files with steps of forward and backward, each beside Inductor's in turn."""

NUMBER = r"\b\d+\.\d+ ms|\b\d\.\d+(?=x| \.\. | to \d\.\d+ times|\)| times)"
"""Times, ratios and intervals, as README writes them."""

NAMES = {
    "two_tower": "two towers",
    "clip": "CLIP",
    "flava": "FLAVA",
    "clap": "CLAP",
    "llava": "LLaVA (a chain)",
    "whisper": "Whisper (a chain)",
    "vit_control": "ViT (a chain)",
    "act": "ACT (a robot policy)",
    "diffusion_policy": "diffusion policy",
    "vla": "vision, language, action",
}
COLORS = {"AMD": "#5c74ea", "Intel": "#ef6c00"}
DARK = """<style>
svg { --page: #ffffff; --ink: #1b1d21; --line: #dddddd }
@media (prefers-color-scheme: dark) { svg { --page: #191c21; --ink: #e7e9ec; --line: #3a404a } }
text { fill: var(--ink) }
</style>"""
"""Colours of the plot by what the reader's system asks for, since a page cannot give a picture its own."""

HEAD = """| forward and backward, batch 4 | eager | torch.compile | max-autotune | apollo | over torch.compile (95 %) |
| --- | ---: | ---: | ---: | ---: | ---: |"""


STEPS = (
    *("steps_policies", "steps_vla", "steps_two_tower", "steps_clip", "steps_dropout", "steps_flava"),
    *("steps_llava", "steps_whisper", "steps_vit"),
)
"""Files with whole steps, each beside the loop with Inductor in turn."""

HEAD_OF_STEPS = """\
| step with AdamW | eager | torch.compile | traced step | `compile_step` | over torch.compile (95 %) |
| --- | ---: | ---: | ---: | ---: | ---: |"""


HEAD_ON_A_GPU = """\
| CLIP on an H200 | reduce-overhead | captured by hand | `compile_step` | over captured by hand (95 %) | it ran |
| --- | ---: | ---: | ---: | ---: | --- |"""
VARIANTS_ON_A_GPU = ("reduce-overhead", "captured by hand", "apollo-step")


class SpeedUp(NamedTuple):
    """How many times as fast as Inductor a model was."""

    name: str
    batch: int
    vendor: str
    ratio: float


def measurements(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the machine and the content of every comparison in a file of results."""
    content = json.loads((RESULTS / f"{name}.json").read_text())
    for run in content.get("runs", [content]) if isinstance(content, dict) else ():
        for measurement in run.get("measurements", ()):
            yield run.get("machine", {}), measurement


def speed_ups() -> list[SpeedUp]:
    """Return every comparison of a step with Inductor's."""
    found = []
    for file in COMPARISONS:
        for machine, each in measurements(file):
            times = {result["variant"]: result["summary"]["median_ns"] for result in each["results"]}
            task, vendor = each["task"]["arguments"], "AMD" if "AMD" in machine["cpu"] else "Intel"
            found.append(SpeedUp(task["name"], task["batch"], vendor, times["inductor"] / times["apollo"]))
    return found


def table() -> str:
    """Return README's table: the steps of `modes.json`."""
    rows = [HEAD]
    for _, each in measurements("modes"):
        found = {result["variant"]: result["summary"] for result in each["results"]}
        eager, whole, best, own = (
            f"{found[name]['median_ns'] / 1e6:.1f} ms"
            for name in ("eager", "inductor", "inductor-max-autotune", "apollo")
        )
        name = NAMES[each["task"]["arguments"]["name"]]
        rows.append(f"| {name} | {eager} | {whole} | {best} | **{own}** | {interval_of(found['apollo'])} |")
    return "\n".join(rows)


def interval_of(summary: dict[str, float]) -> str:
    """Return a speed-up with its interval."""
    return f"{summary['speedup']:.2f}x ({summary['speedup_low']:.2f} .. {summary['speedup_high']:.2f})"


def table_of_steps() -> str:
    """Return README's table of whole steps: all with AdamW in one micro-batch."""
    rows = [HEAD_OF_STEPS]
    for _, each in (found for file in STEPS for found in measurements(file)):
        task = each["task"]["arguments"]
        if (task["optimizer"], task["microbatches"]) == ("adamw", 1):
            found = {result["variant"].removesuffix("-whole"): result["summary"] for result in each["results"]}
            times = [
                f"{found[name]['median_ns'] / 1e6:.1f} ms" if name in found else ""
                for name in ("eager", "inductor", "inductor-traced", "apollo-step")
            ]
            times[-1] = f"**{times[-1]}**"
            dropout = f", dropout {task['dropout']}" if "dropout" in task else ""
            name = f"{NAMES[task['name']]}, batch {task['batch']}{dropout}"
            rows.append(f"| {' | '.join((name, *times, interval_of(found['apollo-step'])))} |".replace("|  |", "| |"))
    return "\n".join(rows)


def runs_on_a_gpu() -> Iterator[tuple[str, dict[str, float], str, str]]:
    """Yield version, milliseconds by variant, speed-up over the step captured by hand, and what `compile_step` ran.

    Of every run in which `compile_step` had decided, and of the one that ran its plan without a comparison.
    """
    for run in json.loads((RESULTS / "gpu_h200_steps.json").read_text())["runs"]:
        if "loops_ms" in run:
            times = {
                name: statistics.median(run["loops_ms"][name]) for name in ("captured by hand", "compile_step, plan")
            }
            by_hand, own = times.values()
            yield "the last one", {"captured by hand": by_hand, "apollo-step": own}, f"{by_hand / own:.2f}x", "its plan"
            continue
        report = run["report"]
        found = report["workloads"]["clip_b32, batch 32, bf16"]
        if "apollo-step" in found and found["apollo-step"]["warm_up"]["is_settled"]:
            times = {name: statistics.median(found[name]["loops_ns"]) / 1e6 for name in VARIANTS_ON_A_GPU}
            (ratio,) = (
                each["found"] for each in report["targets"] if each["name"] == "whole step over captured by hand"
            )
            winner = found["apollo-step"]["decided"]["ran"][0]
            ran = "its plan" if winner.startswith("plan") else "the loop"
            yield f"`{report['facts']['commit'][:7]}`", times, ratio, ran


def table_on_a_gpu() -> str:
    """Return README's table of whole steps on a GPU."""
    rows = [HEAD_ON_A_GPU]
    for version, times, ratio, ran in runs_on_a_gpu():
        shown = [f"{times[name]:.2f} ms" if name in times else "" for name in VARIANTS_ON_A_GPU]
        if times["apollo-step"] == min(times.values()):
            shown[-1] = f"**{shown[-1]}**"
        rows.append(f"| {' | '.join((version, *shown, ratio, ran))} |".replace("|  |", "| |"))
    return "\n".join(rows)


def first_steps() -> list[float]:
    """Return how many times as long as Inductor's every cold first step took, compiling included; shortest first."""
    workloads = json.loads((RESULTS / "first_step.json").read_text())["workloads"]
    return sorted(each["apollo"]["cold_s"] / each["inductor"]["cold_s"] for each in workloads)


def predictions() -> str:
    """Return the table of `docs/benchmarks.md` with what `explain` predicts beside what was measured."""
    from apollo_compile.reports.outlook import WHOLE_NS, Outlook

    rows = ["| model | predicted by `explain` | measured, every comparison |", "| --- | ---: | --- |"]
    for each in json.loads((RESULTS / "outlook.json").read_text()):
        outlook = Outlook(whole_ns=each["serial_ns"] + 2 * WHOLE_NS, predicted_ns=each["predicted_ns"])
        found = sorted(x.ratio for x in speed_ups() if (x.name, x.batch) == (each["model"], each["batch"]))
        name = f"{NAMES[each['model']]}, batch {each['batch']}"
        rows.append(f"| {name} | {outlook.ratio:.2f}x | {', '.join(f'{ratio:.2f}x' for ratio in found)} |")
    return "\n".join(rows)


def known_numbers() -> set[str]:
    """Return all times and ratios of all results, as README writes them."""
    found = {f"{ratio:.2f}" for ratio in first_steps()} | set(re.findall(NUMBER, table_on_a_gpu()))
    for path in RESULTS.glob("*.json"):
        for _, each in measurements(path.stem):
            for summary in (result.get("summary") or {} for result in each["results"]):
                found |= {f"{value / 1e6:.1f} ms" for name, value in summary.items() if name.endswith("_ns")}
                found |= {f"{value:.2f}" for name, value in summary.items() if name.startswith("speedup")}
    return found | {f"{each.ratio:.2f}" for each in speed_ups()}


def plot() -> str:
    """Return the plot: a row per model and batch, a dot per comparison."""
    found = speed_ups()
    rows = sorted({(each.name, each.batch) for each in found}, key=lambda row: (list(NAMES).index(row[0]), row[1]))
    left, width, high, first = 190, 380, 19, 46
    place = {row: first + high * number for number, row in enumerate(rows)}
    bottom = first + high * len(rows)

    def x(ratio: float) -> float:
        return round(left + (ratio - 0.9) / 1.2 * width, 1)

    size = left + width + 20, bottom + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        f'viewBox="0 0 {size[0]} {size[1]}" role="img" font-family="sans-serif" font-size="13" '
        'aria-label="Speed-up over torch.compile by model and batch">',
        DARK,
        '<rect width="100%" height="100%" fill="var(--page)"/>',
        '<text x="8" y="16" font-weight="bold">Speed-up over torch.compile, forward and backward</text>',
    ]
    for number, (vendor, color) in enumerate(COLORS.items()):
        at = left + 255 + 62 * number
        parts.append(f'<circle cx="{at}" cy="12" r="4" fill="{color}"/><text x="{at + 9}" y="16">{vendor}</text>')
    for tick in (0.9, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0):
        line = "var(--ink)" if tick == 1.0 else "var(--line)"
        parts.append(f'<line x1="{x(tick)}" y1="{first - 10}" x2="{x(tick)}" y2="{bottom}" stroke="{line}"/>')
        parts.append(f'<text x="{x(tick)}" y="{first - 14}" text-anchor="middle">{tick:.1f}x</text>')
    for (name, batch), y in place.items():
        parts.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{NAMES[name]}, batch {batch}</text>')
    for each in found:
        title = f"<title>{NAMES[each.name]}, batch {each.batch}, {each.vendor}: {each.ratio:.2f}x</title>"
        parts.append(
            f'<circle cx="{x(each.ratio)}" cy="{place[each.name, each.batch]}" r="4" fill="{COLORS[each.vendor]}" '
            f'fill-opacity="0.75">{title}</circle>'
        )
    return "\n".join([*parts, "</svg>\n"])


def with_table(page: str, made: str) -> str:
    """Return a page with a table that the results make, in the place of the one with the same heading."""
    heading = re.escape(made.partition("\n")[0])
    return re.sub(rf"{heading}\n.*?\n(?=\n)", lambda _: f"{made}\n", page, flags=re.DOTALL)


def take_screenshot(output: Path, *, width: int = 1280, height: int = 1010, is_dark: bool = False) -> None:
    """Write what a browser shows of the page of `docs/reports/clip.json`; needs playwright and Chromium."""
    from playwright.sync_api import sync_playwright

    from apollo_compile.reports.report import Report

    page_of_report = Report.load(ROOT / "docs" / "reports" / "clip.json").to_html()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        scheme: Literal["dark", "light"] = "dark" if is_dark else "light"
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.set_content(page_of_report)
        page.screenshot(path=output)
        browser.close()


if __name__ == "__main__":
    page = README.read_text()
    for made in (table(), table_of_steps(), table_on_a_gpu()):
        page = with_table(page, made)
    README.write_text(page)
    BENCHMARKS.write_text(with_table(BENCHMARKS.read_text(), predictions()))
    PLOT.write_text(plot())
    take_screenshot(ROOT / "docs" / "report.png")
