"""Write down the operators of the models of the sweep, which `apollo_compile/operators/table.py` has to know.

    python -m benchmarks.operators --json benchmarks/results/operators.json           every model
    python -m benchmarks.operators --json build/operators.json --only clip,bert

Models are trained as in `benchmarks.sweep`, operator by operator; one of them also with a compiled AdamW. Counted are
operators of torch in graphs after AOTAutograd, by the number of models that meet them; those of other libraries have no
entry in the table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tqdm import tqdm

from apollo_compile.ir import NodeKind
from apollo_compile.operators.effects import TORCH_NAMESPACES
from apollo_compile.session import registry
from benchmarks.run import names_of
from benchmarks.sweep import Case, build_model, make_options, model_names, train


def main(arguments: list[str] | None = None) -> None:
    """Train the models and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--only", type=names_of(model_names()), default=(), help="models; all by default")
    args = parser.parse_args(arguments)
    cases = [Case(model=name, bodies="eager") for name in args.only or model_names()]
    cases.append(Case(model="two_tower", optimizer="adamw_compiled", bodies="eager"))
    met: Counter[str] = Counter()
    for case in tqdm(cases):
        met.update(operators_of(case))
    models = list(dict.fromkeys(case.model for case in cases))
    content = {"models": models, "num_models_by_operator": dict(sorted(met.items()))}
    args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def operators_of(case: Case) -> set[str]:
    """Return the names of torch's operators in the graphs of a case."""
    workload = build_model(case.model)
    others = registry.compiled_models()
    found: set[str] = set()

    def look(_: Any) -> None:
        for model in registry.compiled_models():
            for graph in model.graphs if model not in others else ():
                nodes = graph.compilation.capture.nodes
                found.update(node.target for node in nodes if node.kind is not NodeKind.INPUT)

    with tempfile.TemporaryDirectory() as folder:
        options = {**make_options(Path(folder) / "profile.json"), "runtime.bodies": case.bodies}
        train(workload, [workload.inputs], case, look=look, backend="apollo", options=options)
    return {name for name in found if name.partition(".")[0] in TORCH_NAMESPACES}


if __name__ == "__main__":
    main()
