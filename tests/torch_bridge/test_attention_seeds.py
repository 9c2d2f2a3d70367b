"""Seeds of attention with dropout, which backwards read on the host or in a capture on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile.torch_bridge import whole
from apollo_compile.torch_bridge.attention_seeds import BACKWARDS, place_seeds, read_seeds_anywhere, replacement_of

ATTENTION, DIRECT = BACKWARDS
NAMES = ("query", "philox_seed", "philox_offset", "dropout_p")


def traced(dropout: float) -> fx.GraphModule:
    """Return forward and backward of memory-efficient attention on a GPU that need not be there."""

    def run(query: torch.Tensor) -> Any:
        out, sums, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, query, query, None, True, dropout
        )
        wanted = [True, True, True, False]
        gradient, *_ = ATTENTION(out, query, query, query, None, out, sums, seed, offset, dropout, wanted)
        shape = out.shape[2]
        own, *_ = DIRECT(
            out, query, query, query, None, out, None, None, shape, shape, sums, dropout, seed, offset, 0, False
        )
        return gradient, own

    with FakeTensorMode():
        return make_fx(run)(torch.empty(2, 4, 16, 64, device="cuda"))


def targets(graph: fx.Graph) -> list[Any]:
    """Return the backwards of attention in a graph."""
    known = {*BACKWARDS, *map(replacement_of, BACKWARDS)}
    return [node.target for node in graph.nodes if node.target in known]


def test_backwards_with_dropout_are_replaced() -> None:
    """And give tensors of the same sizes and strides; those without read no seed and stay."""
    graph_module = traced(0.1)
    expected = [node.meta["val"] for node in graph_module.graph.output_node().all_input_nodes]
    read_seeds_anywhere(graph_module.graph)
    assert targets(graph_module.graph) == list(map(replacement_of, BACKWARDS))
    kept = [node.meta for node in graph_module.graph.nodes if node.target in map(replacement_of, BACKWARDS)]
    strides = [meta["eager_input_vals"][0][1].stride() for meta in kept]
    assert strides == 2 * [(4096, 1024, 64, 1)], "Inductor lays the query out so"
    graph_module.recompile()
    with expected[0].fake_mode:
        found = graph_module(torch.empty(2, 4, 16, 64, device="cuda"))
    assert [(each.shape, each.stride()) for each in found] == [(each.shape, each.stride()) for each in expected]
    without = traced(0.0)
    read_seeds_anywhere(without.graph)
    assert targets(without.graph) == list(BACKWARDS)


def test_inductor_gets_replaced_backwards_of_whole_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that was traced stays."""

    class SeenError(Exception):
        """What would be compiled is seen."""

    def see(piece: fx.GraphModule, *_: object, **__: object) -> None:
        raise SeenError(targets(piece.graph))

    monkeypatch.setattr(whole, "compile_fx_inner", see)
    graph_module = traced(0.1)
    with pytest.raises(SeenError) as seen:
        whole.compile_again(graph_module, {})
    assert seen.value.args == (list(map(replacement_of, BACKWARDS)),)
    assert targets(graph_module.graph) == list(BACKWARDS)


@pytest.mark.parametrize(("is_replayed", "is_capturing"), [(False, False), (True, False), (True, True)])
def test_seeds_are_where_they_are_read(is_replayed: bool, is_capturing: bool) -> None:
    """Whether the forward was launched, which leaves them on the host, or replayed."""
    waits = []

    def to_host(seed: torch.Tensor) -> torch.Tensor:
        waits.append(seed)
        return seed.cpu()

    host = [torch.tensor(7), torch.tensor(11)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        query = torch.empty(2, device="cuda")
        seeds = [torch.zeros((), dtype=torch.long, device="cuda") for _ in range(2)] if is_replayed else host
        placed = place_seeds(NAMES, [query, *seeds, 0.1], is_capturing=is_capturing, to_host=to_host)
    assert placed[0] is query and placed[3] == 0.1
    assert [each.device.type for each in placed[1:3]] == 2 * ["cuda" if is_capturing else "cpu"]
    assert all(each.dtype == torch.long and not each.dim() for each in placed[1:3])
    assert len(waits) == (2 if is_replayed and not is_capturing else 0), "a capture must not wait"
    assert is_replayed != is_capturing or all(one is other for one, other in zip(placed[1:3], seeds, strict=True))


def test_numbers_of_a_launch_go_into_a_capture() -> None:
    """A graph that was launched is captured to be timed."""
    arguments = [torch.empty(2, device="meta"), torch.tensor(7), torch.tensor(11), 0.1]
    placed = place_seeds(NAMES, arguments, is_capturing=True, to_host=torch.Tensor.cpu)
    assert [each.device.type for each in placed[1:3]] == ["meta", "meta"]
