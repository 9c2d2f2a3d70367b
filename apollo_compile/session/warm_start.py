"""What a Dynamo graph takes over from earlier processes, and leaves to later ones.

    recall(capture, partition) -> Finding | None;    keep(compilation, variant, verdict)        through history.py
    bundle_key(graph_module, example_inputs) -> str | None;    outdate(error)               through bundle.py

Findings are plans, what they were made from, and verdicts. Bundles are compiled graphs, which AOTAutograd's cache keeps
under a key that comes from here. Both hold for the same circumstances only; where nothing may be kept, nothing is
recalled either. A directory that cannot be read or written costs the next process time, and this one nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from apollo_compile.config import Config
from apollo_compile.device.cpu.machine import machine_fingerprint
from apollo_compile.device.target import Target
from apollo_compile.ir import Capture, Partition, Variant, Verdict
from apollo_compile.pipeline import Compilation
from apollo_compile.store.history import Finding, History
from apollo_compile.store.keys import bundle_key, circumstances, finding_key
from apollo_compile.store.profiles import cached_profile_path, inspect_profile
from apollo_compile.torch_bridge.aot_cache import may_cache
from apollo_compile.torch_bridge.aot_graph import has_custom_operator
from apollo_compile.torch_bridge.dynamo_graph import module_paths
from apollo_compile.torch_bridge.settings import compiler_settings

_logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class WarmStart:
    """Findings and bundles of the graphs that come from one Dynamo graph."""

    name: str
    """Of the Dynamo graph."""
    config: Config
    target: Target
    is_for_others: bool
    """Whether another process would find the same: one rank alone, on lanes of a CPU."""
    outdated: Exception | None = None
    """Why the bundles that are there cannot be used."""
    _keys: dict[str, str] = field(default_factory=dict)
    """Of findings, by graph."""
    _bundles: History | None = None
    """Says which bundles are right; None where AOTAutograd's cache is not to have the graphs."""
    _bundle_name: str = ""
    """What all of them have in common; a new generation begins when one was found that is no longer right."""

    @property
    def has_bundles(self) -> bool:
        """Whether AOTAutograd's cache is to have the graphs; a backward compiles with its forward then."""
        return self._bundles is not None

    def key_of(self, name: str) -> str | None:
        """Return under which key the finding of a graph is kept; None where it is not."""
        return self._keys.get(name)

    def recall(self, capture: Capture, partition: Partition) -> Finding | None:
        """Return what is known about a graph from earlier processes."""
        if self._history is None or capture.sizes:
            return None
        try:
            self._keys[capture.name] = finding_key(capture, partition, self._circumstances)
            return self._find(self._keys[capture.name])
        except Exception as error:  # the graph is planned as if it were new
            if self.config.debug.strict:
                raise
            _logger.info("%s: earlier runs are not recalled: %s: %s", self.name, type(error).__name__, error)
            return None

    def recall_under(self, name: str, key: str | None) -> Finding | None:
        """Return what is known under the key that a bundle holds, and keep what becomes of the graph there too."""
        if key is not None:
            self._keys[name] = key
        return self._find(key)

    def keep(self, compilation: Compilation, variant: Variant, verdict: Verdict | None) -> None:
        """Leave to later processes how a graph runs and why."""
        history = self._history
        if history is None or compilation.capture.sizes:  # other sizes are planned in no time, and in the background
            return
        finding = Finding(
            observations=compilation.observations, plan=compilation.plan, variant=variant, verdict=verdict
        )
        try:
            history.keep(self._keys[compilation.capture.name], finding)
        except Exception as error:  # this may be in the midst of a user's step
            if self.config.debug.strict:
                raise
            _logger.info("%s: not kept for the next run: %s: %s", self.name, type(error).__name__, error)

    def bundle_key(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> str | None:
        """Return the key of the graphs in AOTAutograd's cache; None where it is not to have them.

        It has what runs on CPU lanes of one process, unless stages or operators are to be watched one by one, or what
        an operator does is the user's to change.
        """
        config = self.config
        is_usual = config.runtime.bodies != "eager" and config.plan.file is None and config.debug.dump is None
        is_here = all(item.device == self.target.device for item in example_inputs if isinstance(item, torch.Tensor))
        if not (config.plan.remember and is_usual and is_here and self.is_for_others and may_cache()):
            return None
        if has_custom_operator(graph_module) or not self._is_profile_kept() or config.device.cache is None:
            return None
        self._bundles = History(config.device.cache / "history")
        self._bundle_name = bundle_key(self._circumstances, module_paths(graph_module))
        return f"{self._bundle_name} {self._bundles.generation(self._bundle_name)}"

    def outdate(self, error: Exception) -> None:
        """Note that a bundle cannot be used: the next process would find the same one."""
        self.outdated = error
        if self._bundles is not None:
            self._bundles.begin_generation(self._bundle_name)

    @property
    def _history(self) -> History | None:
        """Where findings are kept; None where what is found out here is nobody else's business."""
        config = self.config
        is_kept = config.plan.remember and config.plan.file is None and self.is_for_others and may_be_autotuned(config)
        return History(config.device.cache / "history") if is_kept and config.device.cache is not None else None

    @functools.cached_property
    def _circumstances(self) -> str:
        """What shapes graphs and findings besides the Dynamo graph; settings may be others when a backward compiles."""
        return circumstances(
            fingerprint=machine_fingerprint(self.target.profile.units),
            profile=self.target.profile,
            config=self.config,
            machine=self.target.circumstances(),
            compiler=compiler_settings(),
        )

    def _is_profile_kept(self) -> bool:
        """Whether the next process plans for the same device: what a busy machine gave is measured every time."""
        if self.config.device.profile is not None or self.config.device.cache is None:
            return self.config.device.profile is not None
        path = cached_profile_path(self.config.device.cache, self.target.profile.units)
        return inspect_profile(path, machine_fingerprint(self.target.profile.units)).profile == self.target.profile

    def _find(self, key: str | None) -> Finding | None:
        history = self._history
        finding = None if history is None or key is None else history.recall(key)
        if finding is None or finding.variant not in (Variant.PLAN, Variant.SERIAL, Variant.INDUCTOR):
            return None
        if finding.verdict is None:
            return finding
        return replace(finding, verdict=replace(finding.verdict, is_remembered=True))


def may_be_autotuned(config: Config) -> bool:
    """Whether measured times may overrule plans; if not, there is nothing to find out."""
    return (
        config.plan.autotune
        and config.runtime.bodies != "eager"
        and config.plan.planner != "serial"
        and config.plan.memory_quota is None
        and not are_numbers_fixed()
    )


def are_numbers_fixed() -> bool:
    """Whether the user wants the same numbers every time: then no time that is measured may change what runs."""
    return torch.are_deterministic_algorithms_enabled()
