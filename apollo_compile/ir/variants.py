"""The variants of a graph or of a training step, between which autotuning decides."""

from __future__ import annotations

import enum


class Variant(enum.StrEnum):
    """One way to run a graph or a step; its value is its name in reports and in files."""

    SERIAL = "segments in turn"
    """The serial plan: segments one after the other on the whole device."""
    LISTED = "list schedule"
    """The plan of the best list schedule."""
    PLAN = "plan"
    STREAMS = "plan without quotas"
    """On a GPU: the order of the plan, on streams that may use every unit."""
    PRIORITIES = "plan with priorities"
    """The same, with streams of different priorities."""
    OVERLAPPING = "plan with overlapping quotas"
    """On a GPU: the plan, on lanes that share units with their neighbours."""
    INDUCTOR = "Inductor"
    """The whole graph as Inductor compiles it."""
    LOOP = "loop over micro-batches"
    """A step: forward and backward of one micro-batch after the other, as autograd calls them, then the optimizer."""
    TRACED = "Inductor, traced step"
    """A step: forward and backward of all micro-batches in one graph, as Dynamo traces and Inductor compiles it."""
