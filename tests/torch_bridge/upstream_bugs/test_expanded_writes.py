"""Writes to tensors whose elements share memory; gradients of such writes with lanes are in `end_to_end/`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile.torch_bridge.upstream_bugs.expanded_writes import write_to_copies
from tests.torch_bridge.upstream_bugs.defects import assert_as_listed


def _write(target: Tensor, where: Tensor) -> Tensor:
    return target.index_put((where,), torch.ones(()))


def _to_windows(x: Tensor, where: Tensor) -> Tensor:
    return _write((x + 1).flatten().unfold(0, 4, 1), where)


def _num_guards(traced: fx.GraphModule) -> int:
    shape_env = getattr(traced, "shape_env", None)
    return 0 if shape_env is None else len(shape_env.guards)


@pytest.mark.parametrize(
    ("view", "num_copies"),
    [
        (lambda x: x[:, None].expand(4, 3, 4), 1),
        (lambda x: x[:1].expand(4, 4), 1),
        (lambda x: x.flatten().unfold(0, 4, 1), 1),
        (lambda x: x.T, 0),
        (lambda x: x[::2, 1:], 0),
        (lambda x: x[:, None].expand(4, 1, 4), 0),
    ],
    ids=["expanded", "expanded rows", "windows", "transposed", "slices", "not expanded"],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_write_goes_to_a_copy_only_where_elements_share_memory(
    view: Callable[[Tensor], Tensor], num_copies: int, *, dynamic: bool
) -> None:
    """Whatever the sizes are, which are left without guards."""

    def write(x: Tensor, where: Tensor) -> Tensor:
        return _write(view(x), where)

    inputs = torch.arange(16.0).view(4, 4), torch.tensor([0])
    traced = make_fx(write, tracing_mode="symbolic" if dynamic else "fake")(*inputs)
    num_guards = _num_guards(traced)
    write_to_copies(traced.graph)
    traced.graph.lint()
    assert len(traced.graph.find_nodes(op="call_function", target=torch.ops.prims.clone.default)) == num_copies
    assert _num_guards(traced) == num_guards
    traced.recompile()
    assert torch.equal(traced(*inputs), write(*inputs))


def test_torch_writes_to_all_elements_that_share_memory() -> None:
    """A window that was not written to has ones of the first."""
    inputs = torch.arange(16.0).view(4, 4), torch.tensor([0])
    written = torch.compile(_to_windows, backend="inductor")(*inputs)
    assert_as_listed("expanded_writes.py", is_there=not torch.equal(written, _to_windows(*inputs)))
