"""What torch knows of dynamic sizes; that it goes with a model is tested in `end_to_end/test_dynamic_shapes.py`."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.torch_bridge.upstream_bugs.defects import assert_as_listed


def _num_shape_envs() -> int:
    torch._dynamo.reset()
    gc.collect()
    return sum(type(item) is ShapeEnv for item in gc.get_objects())


def test_torch_keeps_what_it_knows_of_sizes() -> None:
    """One more for every model that was compiled and forgotten."""

    def compile_layer() -> None:
        run = torch.compile(nn.Linear(4, 4), backend="eager", dynamic=True)
        for rows in (3, 5):
            run(torch.ones(rows, 4))

    compile_layer()
    before = _num_shape_envs()
    for _ in range(3):
        compile_layer()
    assert_as_listed("kept_symbols.py", is_there=_num_shape_envs() > before)
