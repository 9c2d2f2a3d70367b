"""The table knows the operators that are met, and says of each what Inductor does with it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.inductor_prims  # registers the operators for seeds
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import lowerings
from torch.utils.flop_counter import flop_registry

import apollo_compile
from apollo_compile.operators.entry import WorkKind
from apollo_compile.operators.table import _ROWS, OPERATORS, UNLISTED, find_operator

PACKAGE = Path(apollo_compile.__file__).parent

FUSED_OR_NOT = frozenset({WorkKind.POINTWISE, WorkKind.REDUCTION, WorkKind.COPY, WorkKind.GATHER})
"""Kinds of which some are loops and some are calls: Note [What Inductor fuses]."""

CALLED_BY_ANOTHER_OVERLOAD = ("aten._upsample_bicubic2d_aa", "aten._upsample_bilinear2d_aa")
"""Inductor takes the overload `vec` apart into the default one, which it calls."""

_BY_BYTES = """
aten._cdist_backward aten._cdist_forward aten._embedding_bag_backward aten._fft_c2c aten._fft_c2r aten._fft_r2c
aten._pdist_forward aten._trilinear aten.linalg_householder_product aten.resize_
fsdp.all_gather_copy_in inductor.accumulate_grad_ inductor.resize_storage_bytes_
"""
BY_BYTES = frozenset(_BY_BYTES.split())
"""Listed without a formula, on purpose."""

REGISTERED = frozenset(torch._C._dispatch_get_all_op_names())
"""Some overloads are for TorchScript only."""


def _overloads(namespace: str) -> Iterator[torch._ops.OpOverload]:
    room = getattr(torch.ops, namespace)
    for name in dir(room):
        packet = getattr(room, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            yield from (getattr(packet, overload) for overload in packet.overloads())


def _overloads_of(name: str) -> list[torch._ops.OpOverload]:
    """Return the overloads that an entry is about, without those that write to arguments."""
    namespace, _, rest = name.partition(".")
    operator, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), operator)
    found = [getattr(packet, each) for each in ([overload] if overload else packet.overloads())]
    found = [each for each in found if each.name() in REGISTERED]
    return [each for each in found if not each._schema.is_mutable] or found


def _is_loop(target: torch._ops.OpOverload, decompositions: Any) -> bool:
    """Whether Inductor takes the operator apart or makes a loop of it, rather than calling it as eager does."""
    if target in decompositions or target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return True
    return target in lowerings and lowerings[target].__name__ != "handler"


def test_no_operator_is_in_two_rows() -> None:
    """One entry each."""
    names = Counter(f"{namespace}.{name}" for namespace, _, names in _ROWS for name in names.split())
    assert [name for name, count in names.items() if count > 1] == []


def test_every_core_operator_of_aten_has_an_entry() -> None:
    """Whatever a model is made of, graphs are made of these after decomposition, or of what is below them."""
    core = [target for target in _overloads("aten") if torch.Tag.core in target.tags]
    assert len(core) > 150
    assert [str(target) for target in core if find_operator(str(target)) is UNLISTED] == []


def test_every_operator_that_the_models_of_the_sweep_meet_has_an_entry() -> None:
    """As `python -m benchmarks.operators` found them, with the six workloads among them."""
    content = json.loads((PACKAGE.parent / "benchmarks" / "results" / "operators.json").read_text(encoding="utf-8"))
    assert {"clip", "flava", "clap", "llava", "whisper", "vit_control"} <= set(content["models"])
    assert [name for name in content["num_models_by_operator"] if find_operator(name) is UNLISTED] == []


def test_what_is_counted_by_its_bytes_is_so_on_purpose() -> None:
    """Reports name such operators, so a new one gets a formula or a line here."""
    assert {name for name, operator in OPERATORS.items() if operator.kind is WorkKind.UNKNOWN} == BY_BYTES


def test_every_operator_that_torch_counts_flops_of_on_a_cpu_has_a_formula() -> None:
    """But for what makes part of another operator on a device, which no graph has."""
    inner = r"aten\.(cudnn_|_slow_|_flash_|_efficient_)"
    counted = [str(packet) for packet in flop_registry if isinstance(packet, torch._ops.OpOverloadPacket)]
    assert [name for name in counted if not re.match(inner, name) and name not in OPERATORS] == []


@pytest.mark.parametrize("name", [name for name in OPERATORS if name.startswith(("aten.", "prims."))])
def test_fusible_is_what_inductor_makes_part_of_a_loop(name: str) -> None:
    """Both ways, for the kinds of which some are; the others are calls, or loops of their own, with a reason."""
    operator, decompositions = OPERATORS[name], select_decomp_table()
    targets = _overloads_of(name)
    assert targets
    if operator.kind in FUSED_OR_NOT:
        is_loop = any(_is_loop(target, decompositions) for target in targets)
        expected = is_loop and name not in CALLED_BY_ANOTHER_OVERLOAD
        assert operator.is_fusible is expected, f"write is_fusible={expected} in its row of table.py"
    elif operator.is_fusible:
        is_free = operator.kind in (WorkKind.VIEW, WorkKind.FREE, WorkKind.CONSTANT)
        assert is_free or name.startswith("prims.inductor_")


def test_every_pointwise_operator_that_inductor_makes_a_loop_of_has_an_entry() -> None:
    """One that is missing would end a fused group that it is part of."""
    decompositions = select_decomp_table()
    loops = [
        target
        for target in lowerings
        if isinstance(target, torch._ops.OpOverload)
        and target.namespace in ("aten", "prims")
        and torch.Tag.pointwise in target.tags
        and not target._schema.is_mutable
        and target not in decompositions
        and lowerings[target].__name__ != "handler"
    ]
    assert len(loops) > 100
    assert [str(target) for target in loops if not find_operator(str(target)).is_fusible] == []


def test_views_are_what_torch_says_is_one() -> None:
    """Two do not say so in their schemas."""
    views = [name for name, operator in OPERATORS.items() if operator.kind is WorkKind.VIEW and name != "getitem"]
    silent = {name for name in views for target in _overloads_of(name) if not target.is_view}
    assert silent == {"aten._unsafe_view", "aten.lift"}


def test_an_overload_is_found_before_its_operator_and_its_functional_form() -> None:
    """A prim without an entry is what ATen's operator of its name is."""
    kinds = [find_operator(f"aten.max.{overload}").kind for overload in ("dim", "other")]
    assert kinds == [WorkKind.REDUCTION, WorkKind.POINTWISE]
    assert find_operator("aten.mul_.Tensor") is find_operator("aten.mul.Scalar")
    assert find_operator("prims.mul.default") is find_operator("aten.mul.Tensor")
    assert find_operator("users.mul.default") is UNLISTED


def test_nothing_else_lists_names_of_operators() -> None:
    """A pass or a model of costs asks the table."""
    rooms = ("cost_model", "passes", "planner", "reports", "session")
    files = [path for room in rooms for path in (PACKAGE / room).rglob("*.py")]
    assert len(files) > 30
    assert not [path.name for path in files if re.search(r"\b(aten|prims)\b[.:]", path.read_text(encoding="utf-8"))]
