"""Inductor's lowering of the operator of `onednn.py`: a call of oneDNN."""

from __future__ import annotations

import functools
from typing import Any

from torch._inductor.lowering import register_lowering

from apollo_compile.torch_bridge.onednn import onednn_linear


@functools.cache
def lower_linear() -> None:
    """Register a lowering to oneDNN for the operator of `onednn.py`, like Inductor's for layers with frozen weights.

    Inductor's lowering requires a weight that is a constant and row-major.
    """
    from torch._inductor import ir, mkldnn_ir

    class Linear(mkldnn_ir.LinearUnary):
        """oneDNN's call with a weight that is row-major or column-major."""

        @classmethod
        def make(cls, value: Any, weight: Any, bias: Any) -> Any:
            inputs = [cls.require_contiguous(cls.realize_input(value)), cls.realize_input(weight)]
            if bias is not None:
                inputs.append(cls.require_contiguous(cls.realize_input(bias)))
            size = [value.get_size()[0], weight.get_size()[0]]
            layout = ir.FixedLayout(device=value.get_device(), dtype=value.get_dtype(), size=size)
            no_activation: list[Any] = ["none", [-1], ""]
            constants = no_activation if bias is not None else [None, *no_activation]
            call = cls(layout=layout, inputs=inputs, constant_args=constants)
            return ir.TensorBox.create(mkldnn_ir._create_output_node(call))  # type: ignore[no-untyped-call]

    register_lowering(onednn_linear(), type_promotion_kind=None)(Linear.make)
