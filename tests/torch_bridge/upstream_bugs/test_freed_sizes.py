"""Views of products that graphs return are made again without calls whose sizes were freed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd import collect_metadata_analysis
from torch._functorch.aot_autograd import make_boxed_func

from apollo_compile.torch_bridge.upstream_bugs.freed_sizes import forget_sizes
from tests.torch_bridge.upstream_bugs.defects import assert_as_listed

SAVE = """
import torch
from torch._C import _functionalization

product = torch._to_functional_tensor(torch.ones(6, 4))
torch._enable_functionalization(reapply_views=True)
view = torch.ops.aten._unsafe_view(product, [2, 3, 4])
torch._disable_functionalization()
(call,) = _functionalization.get_view_meta_sequence(view)
print("calls", flush=True)
assert list(call.as_tuple()[-1]) == [2, 3, 4]
"""


def test_torch_saves_sizes_that_were_freed() -> None:
    """It reads whatever is there, which may end the process."""
    done = subprocess.run([sys.executable, "-c", SAVE], capture_output=True, text=True, check=False)
    assert done.stdout == "calls\n", done.stderr
    assert_as_listed("freed_sizes.py", is_there=done.returncode != 0)


@pytest.mark.parametrize("part", [lambda y: y[:, -1:], lambda y: y.flatten(1)], ids=["a slice", "a view"])
def test_a_product_and_a_view_of_it_share_memory_as_in_eager(
    part: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call that views the product is left for the cache; values and gradients are those of eager."""
    kept: list[Any] = []

    def compile_graph(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        own: Any = collect_metadata_analysis.OutputAliasInfo

        def note(**facts: Any) -> Any:
            kept.append(facts["view_meta_sequence"])
            return own(**facts)

        with forget_sizes(), monkeypatch.context() as patched:
            patched.setattr(collect_metadata_analysis, "OutputAliasInfo", note)
            interpret = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward))
            return interpret(graph_module, example_inputs)

    def both(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = nn.functional.linear(x, weight)
        return product, part(product)

    x, weight = torch.randn(2, 3, 4), torch.randn(5, 4, requires_grad=True)
    found, expected = torch.compile(both, backend=compile_graph)(x, weight), both(x, weight)
    torch.testing.assert_close(found, expected)
    assert found[0].data_ptr() == found[1].data_ptr() - (expected[1].data_ptr() - expected[0].data_ptr())
    slopes = [torch.autograd.grad(one.sum() + other.square().sum(), weight) for one, other in (found, expected)]
    torch.testing.assert_close(*slopes)
    assert kept == [None, None]
