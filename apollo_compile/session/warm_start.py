"""Warm start: results of earlier processes that a Dynamo graph reuses, and results that it keeps for later ones.

Findings are plans, the observations that they were made from, and verdicts. Bundles are compiled graphs, which
AOTAutograd's cache stores under a key that is made here. Both are reused under the same circumstances only (machine,
profile, options, compiler settings); where nothing may be kept, nothing is recalled either. If the directory cannot be
read or written, this process goes on, and the next one plans and measures again.
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
from apollo_compile.ir import Capture, Partition, Role, Variant, Verdict
from apollo_compile.store.history import History
from apollo_compile.store.keys import bundle_key, circumstances, finding_key
from apollo_compile.target.compilation import Compilation, Finding
from apollo_compile.target.target import Target
from apollo_compile.torch_bridge.aot_cache import may_cache
from apollo_compile.torch_bridge.aot_graph import has_custom_operator
from apollo_compile.torch_bridge.dynamo_graph import module_paths
from apollo_compile.torch_bridge.settings import compiler_settings
from apollo_compile.torch_bridge.storages import describe_sharing

_logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class WarmStart:
    """Findings and bundles of the graphs that come from one Dynamo graph."""

    name: str
    """Name of the Dynamo graph."""
    config: Config
    target: Target
    is_alone: bool
    """Whether it runs on a single rank: measurements beside other ranks are of no use to another process."""
    is_for_step: bool = False
    """Whether graphs are linked into a training step: then one is compiled in segments also where Inductor had won."""
    outdated: Exception | None = None
    """Why the existing bundles cannot be used."""
    _keys: dict[str, str] = field(default_factory=dict)
    """Keys of findings, by the name of the graph."""
    bundles: History | None = None
    """History with the current generation of bundles; None where graphs do not go into AOTAutograd's cache."""
    _bundle_name: str = ""
    """Their key without the generation; a new generation begins when a bundle turns out to be unusable."""

    def key_of(self, name: str) -> str | None:
        """Return the key of a graph's finding; None where it is not kept."""
        return self._keys.get(name)

    def recall(self, capture: Capture, partition: Partition) -> Finding | None:
        """Return the finding of an earlier process about a graph; None if there is none."""
        if self._history is None or capture.sizes:
            return None
        try:
            self._keys[capture.name] = finding_key(capture, partition, self._circumstances)
            return self._find(self._keys[capture.name], is_whole_kept=capture.role is Role.STEP)
        except Exception as error:  # the graph is planned as if it were new
            if self.config.debug.strict:
                raise
            line = "%s: findings of earlier runs cannot be read, so it is planned as a new graph: %s: %s"
            _logger.info(line, self.name, type(error).__name__, error)
            return None

    def recall_under(self, name: str, key: str | None) -> Finding | None:
        """Return the finding under the key that a bundle holds; later findings of the graph use that key, too."""
        if key is not None:
            self._keys[name] = key
        return self._find(key)

    def keep(self, compilation: Compilation, variant: Variant, verdict: Verdict | None) -> None:
        """Keep plan, variant and verdict of a graph for later processes."""
        history = self._history
        if history is None or compilation.capture.sizes:  # a plan for changing sizes is made quickly
            return
        found = Finding(observations=compilation.observations, plan=compilation.plan, variant=variant, verdict=verdict)
        try:
            history.keep(self._keys[compilation.capture.name], found)
        except Exception as error:  # a failure here must not stop training
            if self.config.debug.strict:
                raise
            line = "%s: its plan cannot be kept, so the next run plans it again: %s: %s"
            _logger.info(line, self.name, type(error).__name__, error)

    def bundle_key(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> str | None:
        """Return the key of the graphs in AOTAutograd's cache; None where they are not to be cached.

        Graphs of a single process on CPU lanes are cached, unless dumps, a plan file or eager bodies are asked for, or
        a graph has custom operators, whose implementation may change.
        """
        config = self.config
        is_usual = config.runtime.bodies != "eager" and config.plan.file is None and config.debug.dump is None
        is_here = all(item.device == self.target.device for item in example_inputs if isinstance(item, torch.Tensor))
        is_native = self.target.has_native_bodies and self.target.keeps_profile
        if not (config.plan.remember and is_usual and is_here and is_native and self.is_alone and may_cache()):
            return None
        if has_custom_operator(graph_module) or config.device.cache is None:
            return None
        self.bundles = History(config.device.cache / "history")
        content = module_paths(graph_module) + describe_sharing(example_inputs)
        self._bundle_name = bundle_key(self._circumstances, f"step {content}" if self.is_for_step else content)
        return f"{self._bundle_name} {self.bundles.generation(self._bundle_name)}"

    def outdate(self, error: Exception) -> None:
        """Record that a bundle cannot be used, and begin a new generation, so that the next process ignores it."""
        self.outdated = error
        if self.bundles is not None:
            self.bundles.begin_generation(self._bundle_name)

    @property
    def _history(self) -> History | None:
        """The store of findings; None where findings of this process are not to be reused."""
        config = self.config
        is_kept = config.plan.remember and config.plan.file is None and self.is_alone and may_be_autotuned(config)
        return History(config.device.cache / "history") if is_kept and config.device.cache is not None else None

    @functools.cached_property
    def _circumstances(self) -> str:
        """The dependencies of graphs and findings besides the Dynamo graph.

        It is computed once, since Inductor's settings may differ when a backward compiles.
        """
        return circumstances(
            profile=self.target.profile,
            config=self.config,
            machine=self.target.circumstances(),
            compiler=compiler_settings(),
        )

    def _find(self, key: str | None, *, is_whole_kept: bool = False) -> Finding | None:
        history = self._history
        finding = None if history is None or key is None else history.recall(key)
        if finding is None:
            return None
        are_segments_needed = self.is_for_step or self.target.captures
        if finding.variant is Variant.INDUCTOR and are_segments_needed and not is_whole_kept:
            return replace(finding, variant=Variant.PLAN, verdict=None)  # its segments are compiled all the same
        if finding.verdict is None:
            return finding
        return replace(finding, verdict=replace(finding.verdict, is_remembered=True))


def may_be_autotuned(config: Config) -> bool:
    """Whether measured times may overrule the plans of graphs; if not, there are no findings."""
    return config.runtime.bodies != "eager" and may_be_compared(config)


def may_be_compared(config: Config) -> bool:
    """Whether measured times may decide what runs."""
    return (
        config.plan.autotune
        and config.plan.planner != "serial"
        and config.plan.memory_quota is None
        and not are_numbers_fixed()
    )


def are_numbers_fixed() -> bool:
    """Whether the user wants reproducible numbers: then no measured time may change what runs."""
    return torch.are_deterministic_algorithms_enabled()
