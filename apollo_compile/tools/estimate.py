"""`apollo estimate`: the time of a training step on several devices, for every way to split the model.

    estimate(target, [("h100", (1, 2, 4, 8)), ("cpu2", (1, 2))]) -> Estimate

The model is traced with its loss, forward and backward, once for every size of a micro-batch; nothing is compiled. The
cost model predicts its segments on the profile of every device, and `cost_model/cells.py` puts them together.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from apollo_compile.config import Config, load_config
from apollo_compile.cost_model.cells import Device, Estimate, cells_of
from apollo_compile.cost_model.collectives import GLOO, Link
from apollo_compile.device.cpu.discover import discover_profile
from apollo_compile.device.cpu.execute import available_units
from apollo_compile.errors import TargetError
from apollo_compile.store.profiles import default_profile, load_profile
from apollo_compile.target.profile import DeviceProfile, limit_units
from apollo_compile.tools.model_times import TracedModel, slowdown_beside
from apollo_compile.tools.targets import ModelCall
from apollo_compile.torch_bridge.trees import leaves_of
from apollo_compile.units import NS_PER_S, format_bytes, format_ns

Tell = Callable[[str], None]

ERRORS: Mapping[str, float] = {"measured": 0.15, "scaled": 0.25, "default": 0.4, "datasheet": 0.5}
"""Assumed relative error of times by source of the profile; docs/planning.md has measured ones of segments."""

LINK_ERROR, GIVEN_LINK_ERROR = 0.5, 0.25
"""Assumed relative error of communication: over links of data sheets, and over a link that the user measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sheet:
    """Numbers of a data sheet."""

    memory_bytes: int | None
    per_node: int
    link: Link
    node_link: Link
    text: str


_NVLINK = Link(10e-6, 0.8 * 450e9)
_INFINIBAND = Link(15e-6, 0.8 * 50e9)
_GPU_TEXT = "80 % of NVLink 4 (450 GB/s) within a node of 8, and of 400 Gbit/s per GPU between nodes"
_SHEETS = {
    "h100": _Sheet(memory_bytes=80 * 10**9, per_node=8, link=_NVLINK, node_link=_INFINIBAND, text=_GPU_TEXT),
    "h200": _Sheet(memory_bytes=141 * 10**9, per_node=8, link=_NVLINK, node_link=_INFINIBAND, text=_GPU_TEXT),
}
_GPU = _Sheet(memory_bytes=None, per_node=8, link=_NVLINK, node_link=_INFINIBAND, text=_GPU_TEXT)
_CPU = _Sheet(
    memory_bytes=None,
    per_node=1,
    link=GLOO,
    node_link=Link(100e-6, 1e9),
    text="gloo: 2 GB/s on one machine, 1 GB/s between machines, assumed",
)


def estimate(
    target: ModelCall,
    devices: Sequence[tuple[str, Sequence[int]]],
    *,
    link: Link | None = None,
    max_tensor: int | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Tell = lambda line: None,
) -> Estimate:
    """Return the Cells of a model.

    Arguments:
        target: the model, with the global batch of one step.
        devices: names of devices, each with numbers of them. A name is `h100`, `cpu2` (two cores) or a profile's path.
        link: a measured link between the devices; None takes that of data sheets.
        max_tensor: largest degree of tensor parallelism, 1 for none; None has no limit within a node.
        options: as for `torch.compile(..., options=...)`.
        progress: called with lines of text.

    Raises:
        TargetError: the model cannot be traced, or its inputs have no batch dimension.
        ConfigError: there is no such profile, or an option is unknown.
    """
    config = load_config(options)
    batch = _batch_of(target)
    model = TracedModel(target, batch, config, progress)
    cells, sources = [], {}
    for name, counts in devices:
        profile, sheet = _find_device(name, config)
        device = _describe(name, profile, sheet, link)
        sources[name] = f"{profile.name}, {profile.source}; {sheet.text if link is None else 'link as given'}"
        times_of = functools.cache(functools.partial(model.times, profile))
        for count in sorted(set(counts)):
            is_crowded = profile.kind == "cpu" and 1 < count <= device.per_node
            shares = slowdown_beside(profile, 1.0, 1.0) if is_crowded else 1.0
            own = replace(device, update_bytes_per_s=device.update_bytes_per_s / shares)
            found = cells_of(functools.partial(times_of, is_crowded), own, count, batch, max_tensor)
            cells += found
            if not found and model.error is None:
                progress(f"nothing divides {batch} samples, and the layers of the model, over {count} of {name}")
    if not cells and model.error is not None:
        raise model.error
    return Estimate(name=target.name, batch=batch, cells=tuple(cells), sources=sources)


def _find_device(name: str, config: Config) -> tuple[DeviceProfile, _Sheet]:
    found = re.fullmatch(r"cpu([1-9]\d*)", name)
    if found is None:
        profile = load_profile(Path(name))
        return profile, _SHEETS.get(name, _CPU if profile.kind == "cpu" else _GPU)
    units, here = int(found[1]), available_units()
    if units > here:
        return default_profile(units), _CPU
    profile = discover_profile(here, cache_dir=config.device.cache)
    return limit_units(profile, units), replace(_CPU, per_node=here // units)


def _describe(name: str, profile: DeviceProfile, sheet: _Sheet, link: Link | None) -> Device:
    return Device(
        name=name,
        error=ERRORS[profile.source],
        memory_bytes=sheet.memory_bytes,
        per_node=sheet.per_node,
        link=link or sheet.link,
        node_link=link or sheet.node_link,
        link_error=LINK_ERROR if link is None else GIVEN_LINK_ERROR,
        hides_gradients=profile.kind != "cpu",
        update_bytes_per_s=profile.far_rate(2**30, profile.units),
    )


def _batch_of(target: ModelCall) -> int:
    inputs = leaves_of((target.args, target.kwargs), torch.Tensor)
    sizes: Counter[int] = Counter(each.shape[0] for each in inputs if each.dim())
    if not sizes:
        raise TargetError(f"{target.name} has no input with a batch dimension: expected a tensor with dimensions")
    return sizes.most_common(1)[0][0]


def format_estimate(estimate: Estimate) -> str:
    """Return the table of an estimate, and where its numbers are from."""
    rows = [
        (
            cell.device,
            cell.devices,
            f"{cell.data} x {cell.tensor}",
            f"{cell.stages}" + (f", {cell.microbatches} micro-batches" if cell.stages > 1 else ""),
            format_ns(cell.step_s * NS_PER_S),
            f"{format_ns(cell.low_s * NS_PER_S)} to {format_ns(cell.high_s * NS_PER_S)}",
            format_bytes(cell.memory_bytes) + ("" if cell.fits else ", does not fit"),
            cell.bound,
        )
        for cell in estimate.cells
    ]
    headers = ("device", "devices", "data x tensor", "stages", "step", "error band", "memory each", "bound by")
    table: str = tabulate(rows, headers=headers, colalign=("left", "right", *["left"] * 6))
    sources = [f"{name}: {text}" for name, text in estimate.sources.items()]
    return "\n".join((f"{estimate.name}, {estimate.batch} samples per step; nothing was run", "", table, "", *sources))
