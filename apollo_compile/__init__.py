"""Let the modules of a multimodal model share one device: `torch.compile(model, backend="apollo")`.

Importing this package imports neither torch nor ortools; torch finds the backend through its entry point.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from apollo_compile.version import __version__ as __version__

if TYPE_CHECKING:
    from apollo_compile.config import known_options
    from apollo_compile.distributed.deploy.build import deploy
    from apollo_compile.distributed.deploy.plan import DeploymentPlan
    from apollo_compile.distributed.fill_bubbles import BubbleEncoder, fill_bubbles
    from apollo_compile.distributed.loader.costs import ModuleCosts
    from apollo_compile.distributed.loader.ranks import share_costs, weigh_loss
    from apollo_compile.distributed.loader.sampler import BalancedBatchSampler
    from apollo_compile.distributed.loader.stream import BalancedStreamSampler
    from apollo_compile.distributed.pipeline.values import StageTimes
    from apollo_compile.reports.report import Report
    from apollo_compile.step import compile_step
    from apollo_compile.tools.explain import explain
    from apollo_compile.tools.explain_step import explain_step
    from apollo_compile.tools.module_costs import module_costs
    from apollo_compile.tools.report import report, status

__all__ = [
    "BalancedBatchSampler",
    "BalancedStreamSampler",
    "BubbleEncoder",
    "DeploymentPlan",
    "ModuleCosts",
    "Report",
    "StageTimes",
    "compile_step",
    "deploy",
    "explain",
    "explain_step",
    "fill_bubbles",
    "known_options",
    "module_costs",
    "report",
    "share_costs",
    "status",
    "weigh_loss",
]

_MODULES = {
    "BalancedBatchSampler": "apollo_compile.distributed.loader.sampler",
    "BalancedStreamSampler": "apollo_compile.distributed.loader.stream",
    "BubbleEncoder": "apollo_compile.distributed.fill_bubbles",
    "DeploymentPlan": "apollo_compile.distributed.deploy.plan",
    "ModuleCosts": "apollo_compile.distributed.loader.costs",
    "Report": "apollo_compile.reports.report",
    "StageTimes": "apollo_compile.distributed.pipeline.values",
    "compile_step": "apollo_compile.step",
    "deploy": "apollo_compile.distributed.deploy.build",
    "explain": "apollo_compile.tools.explain",
    "explain_step": "apollo_compile.tools.explain_step",
    "fill_bubbles": "apollo_compile.distributed.fill_bubbles",
    "known_options": "apollo_compile.config",
    "module_costs": "apollo_compile.tools.module_costs",
    "report": "apollo_compile.tools.report",
    "share_costs": "apollo_compile.distributed.loader.ranks",
    "status": "apollo_compile.tools.report",
    "weigh_loss": "apollo_compile.distributed.loader.ranks",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'apollo_compile' has no attribute {name!r}; public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
