"""Ten words of reports; `docs/glossary.md` has them too."""

from __future__ import annotations

GLOSSARY = {
    "segment": (
        "A piece of a model's graph that runs without interruption. It ends where a layer or a branch of the "
        "model ends."
    ),
    "body": "The compiled function of a segment. Equal layers share one body.",
    "unit": "One core of a CPU, or one multiprocessor of a GPU.",
    "lane": "Some units that run segments one after the other. Lanes with other units run at the same time.",
    "plan": (
        "For each segment, on which lane it runs and after which others. A serial plan uses one lane with all units."
    ),
    "origin": (
        "How a plan was found: greedy by a list schedule, feasible by search, optimal with a proof that no "
        "plan on these lanes is faster."
    ),
    "bound, gap": "The bound is a time that no plan can be faster than; the gap is how far the plan is from it.",
    "variant": (
        "One way to run a graph or a step: the plan, its segments in turn, torch.compile's own code, and others."
    ),
    "autotuning": "Variants take turns in your own training steps until one is known to be the fastest.",
    "fallback": "A graph that torch.compile runs as it would without apollo; a line says why.",
}
