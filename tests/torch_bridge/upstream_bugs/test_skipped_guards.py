"""Guards of parameters; that freezing and thawing are seen is tested in `session/step/test_traced.py`, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from apollo_compile.torch_bridge.upstream_bugs.skipped_guards import check_parameters
from tests.torch_bridge.upstream_bugs.defects import assert_as_listed


def _num_compiles(*, checked: bool) -> int:
    compiled: list[fx.GraphModule] = []

    def compile_graph(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Any:
        compiled.append(graph_module)
        if checked:
            check_parameters()
        return graph_module.forward

    layer = nn.Linear(4, 4)
    run = torch.compile(layer, backend=compile_graph)
    for trained in (True, False):
        layer.requires_grad_(trained)
        run(torch.ones(2, 4))
    return len(compiled)


def test_torch_does_not_see_that_a_layer_is_frozen() -> None:
    """With its own settings, which other tests of this process may have changed."""
    own = {"skip_tensor_guards_with_matching_dict_tags": True}
    with torch._dynamo.config.patch(own):  # type: ignore[no-untyped-call]
        assert_as_listed("skipped_guards.py", is_there=_num_compiles(checked=False) == 1)


def test_dynamo_compiles_again_after_a_layer_is_frozen() -> None:
    """Whatever the release does by itself."""
    own = {"skip_tensor_guards_with_matching_dict_tags": True}
    with torch._dynamo.config.patch(own):  # type: ignore[no-untyped-call]
        assert _num_compiles(checked=True) == 2
