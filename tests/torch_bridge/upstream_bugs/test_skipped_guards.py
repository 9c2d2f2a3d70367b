"""Guards of parameters; that freezing and thawing are seen is tested in `session/step/test_traced.py`, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.testing import CompileCounter

from apollo_compile.torch_bridge.upstream_bugs.skipped_guards import check_parameters
from tests.torch_bridge.upstream_bugs.defects import assert_as_listed

OWN_SETTINGS = torch._dynamo.config.patch(skip_tensor_guards_with_matching_dict_tags=True)
"""Torch's own, which other tests of this process may have changed."""


def _num_compiles(*, checked: bool) -> int:
    counter = CompileCounter()

    def compile_graph(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Any:
        if checked:
            check_parameters()
        return counter(graph_module, example_inputs)

    layer = nn.Linear(4, 4)
    run = torch.compile(layer, backend=compile_graph)
    for trained in (True, False):
        layer.requires_grad_(trained)
        run(torch.ones(2, 4))
    return counter.frame_count


@OWN_SETTINGS
def test_torch_does_not_see_that_a_layer_is_frozen() -> None:
    """It calls the graph of the layer that was trained."""
    assert_as_listed("skipped_guards.py", is_there=_num_compiles(checked=False) == 1)


@OWN_SETTINGS
def test_dynamo_compiles_again_after_a_layer_is_frozen() -> None:
    """Checked parameters have guards, whatever the release does by itself."""
    assert _num_compiles(checked=True) == 2
