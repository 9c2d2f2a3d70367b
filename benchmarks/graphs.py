"""Segment graphs of the workloads at size `base`, saved so that planning them needs neither torch nor their models.

    python -m benchmarks.graphs [--only clip,llava] [--folder DIR]     write <workload>_<part>.json again
    load_graphs() -> SegmentGraph by name                              read those of benchmarks/graphs

A training step is traced in bfloat16 on fake tensors, through the stages up to the partition: nothing is executed, and
weights take no memory. Dynamo's two options for values that depend on data are on, which makes LLaVA one graph instead
of four. The backward is there twice: with the gradients of weights in the segments of their layers, and apart. A file
says which versions of torch and transformers it came from, beside the graph itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from apollo_compile.config import PartitionConfig
from apollo_compile.ir import Role, SegmentGraph
from apollo_compile.json_form import from_json, to_json

if TYPE_CHECKING:
    from torch import Tensor, fx, nn
    from torch._subclasses.fake_tensor import FakeTensorMode

FOLDER = Path(__file__).parent / "graphs"
PARTS = ("forward", "backward", "backward_apart")
WORKLOADS = ("clip", "flava", "clap", "llava", "whisper", "vit_control")


def main(arguments: list[str] | None = None) -> int:
    """Write the graphs; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graphs", description="Save segment graphs.")
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, separated by commas")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where files go; default: %(default)s")
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.only.split(","):
        for graph in trace_step(name):
            file = save_graph(graph, args.folder)
            print(f"{file.name}: {len(graph.segments)} segments, {file.stat().st_size / 1024:.0f} KiB", flush=True)
    return 0


def load_graphs() -> dict[str, SegmentGraph]:
    """Return the saved graphs by name, in the order of `WORKLOADS` and `PARTS`."""
    names = [f"{workload}_{part}" for workload in WORKLOADS for part in PARTS]
    return {
        name: from_json(SegmentGraph, json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["graph"])
        for name in names
    }


def save_graph(graph: SegmentGraph, folder: Path) -> Path:
    """Write a graph and the versions that it came from to a folder; return the file."""
    import torch
    import transformers

    content = {"torch": torch.__version__, "transformers": transformers.__version__, "graph": to_json(graph)}
    file = folder / f"{graph.name}.json"
    file.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    return file


# --------------------------------------------------------------------------------------------------------- tracing


def trace_step(name: str) -> list[SegmentGraph]:
    """Return the `PARTS` of a training step of the workload `name` at size `base`."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from transformers.initialization import no_init_weights

    from apollo_compile.torch_bridge.frontend import compile_with_inductor
    from benchmarks.workloads import assemble

    found: list[SegmentGraph] = []

    def trace(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_with_inductor(graph_module, example_inputs, partition, recompute_masks=True)

    def partition(
        graph_module: fx.GraphModule, _: Sequence[Any], *, is_backward: bool = False, **__: Any
    ) -> tuple[Any, None]:
        role = Role.BACKWARD if is_backward else Role.FORWARD
        found.append(_partition(graph_module, name=f"{name}_{role}", role=role, weight_gradients="together"))
        if is_backward:
            found.append(_partition(graph_module, name=f"{name}_{role}_apart", role=role, weight_gradients="apart"))
        return _return_empty(graph_module), None

    with no_init_weights():  # memory that nobody writes into is never taken
        workload = assemble(name, "base")
    fakes = FakeTensorMode(shape_env=ShapeEnv())
    _fake_weights(workload.model, fakes)
    inputs = {key: _fake(value, fakes) for key, value in workload.inputs.items()}
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"  # LLaVA compares numbers, which fakes do not have
    with fakes:
        with torch.no_grad():
            workload.model(**inputs)  # installs hooks, as `benchmarks.workloads` explains
        with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
            workload.loss(torch.compile(workload.model, backend=trace, dynamic=False)(**inputs)).backward()
    torch._dynamo.reset()
    if [graph.name for graph in found] != [f"{name}_{part}" for part in PARTS]:
        raise RuntimeError(
            f"{name} was traced as {[graph.name for graph in found]}, expected one forward, one backward in two forms"
        )
    return found


def _partition(
    graph_module: fx.GraphModule, *, name: str, role: Role, weight_gradients: Literal["together", "apart"]
) -> SegmentGraph:
    from apollo_compile.passes.capture import capture_graph
    from apollo_compile.passes.partition import partition_graph

    config = PartitionConfig(weight_gradients=weight_gradients)
    return partition_graph(capture_graph(graph_module, name=name, role=role), config=config).graph


def _return_empty(graph_module: fx.GraphModule) -> Callable[[list[Any]], list[Any]]:
    """Return a stand-in for the compiled graph: AOTAutograd only looks at the shapes of what it returns."""
    import torch

    values: Iterable[Any] = graph_module.graph.output_node().args[0]  # type: ignore[assignment]
    fakes = [None if value is None else value.meta["val"] for value in values]

    def run(inputs: list[Any]) -> list[Any]:
        inputs.clear()
        return [
            torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype) if isinstance(fake, torch.Tensor) else fake
            for fake in fakes
        ]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _fake_weights(model: nn.Module, fakes: FakeTensorMode) -> None:
    """Replace parameters and buffers; shared ones stay shared."""
    from torch import nn

    fake_by_id: dict[int, nn.Parameter] = {}
    originals = list(model.parameters())  # keeps them alive, and so their ids apart
    for parameter in originals:
        fake_by_id[id(parameter)] = nn.Parameter(
            _fake(parameter.detach(), fakes), requires_grad=parameter.requires_grad
        )
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            setattr(module, key, fake_by_id[id(parameter)])
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, _fake(buffer, fakes))


def _fake(value: Any, fakes: FakeTensorMode) -> Any:
    """Return a fake tensor for a tensor, in bfloat16 if it has floating point numbers; anything else as it is."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
    empty: Tensor = torch.empty_like(value, dtype=dtype)
    return fakes.from_tensor(empty, static_shapes=True)


if __name__ == "__main__":
    sys.exit(main())
