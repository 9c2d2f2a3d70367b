"""What torch knows of dynamic sizes; that it goes with a model is tested in `end_to_end/test_dynamic_shapes.py`."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tests.torch_bridge.upstream_bugs.defects import assert_as_listed

COUNT = """
import gc
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

def compile_layer():
    run = torch.compile(torch.nn.Linear(4, 4), backend="eager", dynamic=True)
    for rows in (3, 5):
        run(torch.ones(rows, 4))
    torch._dynamo.reset()
    gc.collect()
    return sum(type(item) is ShapeEnv for item in gc.get_objects())

first = compile_layer()
print(compile_layer() - first, compile_layer() - first)
"""


def test_torch_keeps_what_it_knows_of_sizes() -> None:
    """One more for every model that was compiled and forgotten, in a process where nothing else was compiled."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(COUNT)], capture_output=True, text=True, check=True)
    assert_as_listed("kept_symbols.py", is_there=done.stdout.split() == ["1", "2"])
