"""Every operator of torch writes to what it says, to all of its tensors, or is listed with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch._inductor.inductor_prims
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile.operators.effects import TORCH_NAMESPACES
from apollo_compile.operators.table import OPERATORS, find_operator
from apollo_compile.operators.writes import frees_storage, written_by

if torch.distributed.is_available():
    import torch.distributed.fsdp._fully_shard._fsdp_collectives  # registers the operators of FSDP

aten, inductor = torch.ops.aten, torch.ops.inductor


def _registered() -> list[Any]:
    """Return the schemas of all operators that torch has, those that Inductor registers among them."""
    names = (name.partition(".") for name in torch._C._dispatch_get_all_op_names())
    schemas = [torch._C._get_schema(name, overload) for name, _, overload in names]
    return [schema for schema in schemas if schema.name.partition("::")[0] in TORCH_NAMESPACES]


def _call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return fx.Graph().call_function(target, args, kwargs)


def _inputs(count: int) -> list[fx.Node]:
    graph = fx.Graph()
    return [graph.placeholder(f"x{number}") for number in range(count)]


def _overload(schema: Any) -> Any:
    namespace, _, name = schema.name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), name), schema.overload_name or "default")


def _written(target: Any, schema: Any) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return what a call with a tensor wherever one may be writes to, and all of these tensors."""
    graph = fx.Graph()
    args = [graph.placeholder(f"x{n}") if "Tensor" in str(a.type) else None for n, a in enumerate(schema.arguments)]
    given = {a.name: value for a, value in zip(schema.arguments, args, strict=True) if a.kwarg_only}
    node = graph.call_function(target, tuple(args[: len(args) - len(given)]), given)
    return list(written_by(node)), [value for value in args if value is not None]


def test_every_operator_without_outputs_is_a_write_or_is_listed_with_a_reason() -> None:
    """It has no other reason to be in a graph: it writes, to what it declares or to any tensor, or is listed."""
    read_only = {name for name, operator in OPERATORS.items() if operator.reads_only}
    silent = [schema for schema in _registered() if not schema.returns]
    undeclared = {schema.name for schema in silent if not schema.is_mutable}
    assert undeclared >= {"inductor::resize_storage_bytes_", "aten::_assert_async"}  # the walk sees them
    assert undeclared >= {name.replace(".", "::") for name in read_only if not name.startswith("prims.")}
    for schema in silent:
        written, tensors = _written(_overload(schema), schema)
        if find_operator(str(_overload(schema))).reads_only:
            assert not written, schema
        elif not schema.is_mutable:
            assert written == tensors, schema


def test_every_operator_that_declares_a_write_writes_to_just_that() -> None:
    """By position, by name, and in lists."""
    declaring = [schema for schema in _registered() if schema.is_mutable]
    assert len(declaring) > 1000
    for schema in declaring:
        written, tensors = _written(_overload(schema), schema)
        names = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
        declared = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        assert written == [tensor for name, tensor in zip(names, tensors, strict=True) if name in declared], schema


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no operators of FSDP")
def test_what_fsdp_gathers_into_is_written_to() -> None:
    """Though one of the operators does not say so, and another one has it behind what it reads."""
    x, y, out = _inputs(3)
    assert written_by(_call(torch.ops.fsdp.all_gather_copy_in.default, [x, y], out, [4, 4], 8, 0)) == (out,)
    assert written_by(_call(torch.ops.fsdp.split_with_sizes_copy.default, x, [4, 4], 1, out=[y, out])) == (y, out)


def test_a_higher_order_operator_writes_if_the_graph_inside_does() -> None:
    """Which of its arguments that reaches is not looked into."""

    def outer(inner: Any) -> fx.Node:
        graph = fx.Graph()
        x = graph.placeholder("x")
        root = torch.nn.Module()
        root.inner = make_fx(inner)(torch.ones(4))
        called = graph.call_function(torch.ops.higher_order.invoke_subgraph, (graph.get_attr("inner"), "inner", x))
        fx.GraphModule(root, graph)
        return called

    assert [node.name for node in written_by(outer(lambda x: (aten.copy_(x, x.sin()),)))] == ["x"]
    assert written_by(outer(lambda x: (x.sin(),))) == ()


def test_memory_is_freed_by_a_size_of_zero_or_one_that_is_not_known() -> None:
    """Memory that is given frees nothing."""
    x, size = _inputs(2)
    resize = inductor.resize_storage_bytes_.default
    assert [frees_storage(_call(resize, x, value)) for value in (0, size, 16)] == [True, True, False]
