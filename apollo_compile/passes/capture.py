"""Stage 0: read an FX graph into plain data.

    (GraphModule, role) -> Capture

The graph comes from AOTAutograd after Inductor's joint-graph passes: functional except for writes to inputs at its end.
All that later stages need from torch is read here once: which nodes compute and which are views, which module a node
came from, how much work it is, and which nodes must keep their order without a data dependency:

* random draws from the global generator stay in graph order,
* a mutation comes after all earlier readers of the storage and before all later ones; an operator that frees a storage
  comes after all earlier readers of any graph input and before all later ones (Note [Resized storages] in `writes.py`),
* operators with side effects, collectives, and custom and higher-order operators stay in graph order; a custom operator
  with the tag `pointwise` is trusted to have no side effects.

A collective stays in one segment with its wait: between the two, the memory that it reads and writes is in use by the
communication library, and only a body that contains both keeps that memory from being reused. The lane blocks in the
wait while other lanes compute.

The work of an operator without a formula is its bytes alone; it is named in `without_formula`.

Note [sizes]: in a graph with dynamic shapes, Dynamo passes every shape symbol as an integer input. Arithmetic on sizes
is cheap, so every segment repeats what it needs. A node lists the sizes that it, its shape or its inputs depend on, and
its segment takes them as inputs, because code for dynamic shapes needs every symbol that occurs in it. Values of the
symbols are used for bytes and work only; nothing else in a capture depends on them, so the same segments serve every
size.

Note [numbers]: a number that the graph reads from a tensor (`item`, where Dynamo may capture it) is cheap too: each
segment that needs it takes the tensor and reads the number itself. A graph that writes to the tensor in between falls
back, and so does one with a tensor whose shape depends on the number, because its readers need that size before the
run.

Note [parts]: a loop over time reads `x[:, 0]`, `x[:, 1]`, and so on. Cloned into the segments that read them, such
views would be the one thing in which their code differs, and every step of the loop would be compiled by itself. So
several equal parts of a value are nodes of their own, and segments take the parts. Its backward puts the gradients of
the parts into zeros, at the same places: these nodes belong to the segments that add them up, which take small parts.

Guarantees: every value is a strided tensor on one device, or a number; `nodes` is a topological order.
Raises `UnsupportedGraphError` where segments cannot run the graph; the backend then falls back to Inductor.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from apollo_compile.errors import UnsupportedGraphError
from apollo_compile.ir import Capture, Node, NodeId, NodeKind, Role, Work
from apollo_compile.operators.call import Expr
from apollo_compile.operators.effects import draws, has_effect, is_collective, is_waited_for, reads_number
from apollo_compile.operators.entry import WorkKind
from apollo_compile.operators.table import find_operator
from apollo_compile.operators.work import NodeWork, evaluate, evaluate_formula, expression, name_of, work_of
from apollo_compile.operators.writes import frees_storage, resizes_storage, written_by

_CPU = torch.device("cpu")

_CELL = r"\.__closure__\[(\d+)\]\.cell_contents"
"""A closure variable that holds a model."""

_ROOT = rf"^[LG]\['([^']*)'\](?:{_CELL})*\.?"
"""The beginning of a module's path: a local, global or closure variable."""

_ALIGNMENT = 16
"""Bytes."""

_Symbolic = torch.SymInt | torch.SymFloat | torch.SymBool


def capture_graph(
    graph_module: fx.GraphModule, *, name: str, role: Role, device: torch.device = _CPU, static: Collection[int] = ()
) -> Capture:
    """Read `graph_module`, whose lanes are on `device`; bytes and work are for the sizes of the trace.

    The inputs at the places `static` are the same tensors in every call, such as parameters.

    Raises:
        UnsupportedGraphError: lanes cannot run the graph; the message names the node.
    """
    symbols = _Symbols(graph_module, device)
    keeps_roots = len({_root_of(fx_node) for fx_node in graph_module.graph.nodes} - {""}) > 1
    ids: dict[fx.Node, NodeId] = {}
    nodes: list[Node] = []
    order = _OrderKeeper()
    is_aligned: list[bool] = []
    outputs: tuple[NodeId | None, ...] = ()
    without_formula: set[str] = set()
    for fx_node in graph_module.graph.nodes:
        if fx_node.op == "output":
            outputs = tuple(_output_id(ids, value) for value in fx_node.args[0])
            continue
        node_id = NodeId(len(nodes))
        ids[fx_node] = node_id
        read = [value for value in fx_node.all_input_nodes if value not in symbols.inputs]
        inputs = tuple(ids[value] for value in read)
        kind = _kind(fx_node, nodes, inputs, device)
        runs_collective = is_collective(fx_node) and kind is NodeKind.COMPUTE
        if runs_collective and not is_waited_for(fx_node):
            raise UnsupportedGraphError(
                f"the graph does not wait for the result of collective {fx_node.name} ({fx_node.target}); segments "
                "take a collective with its wait only"
            )
        work = work_of(fx_node) if kind is NodeKind.COMPUTE else None
        if work is not None and work.kind is WorkKind.UNKNOWN:
            without_formula.add(name_of(fx_node.target))
        is_aligned.append(device.type == "cpu" or _is_aligned(fx_node))
        nodes.append(
            Node(
                id=node_id,
                name=fx_node.name,
                kind=kind,
                target=name_of(fx_node.target),
                inputs=inputs,
                after=order.after(fx_node, node_id, kind, ids),
                is_static=kind is NodeKind.INPUT and node_id in static,
                is_collective=runs_collective,
                is_alone=resizes_storage(fx_node),
                keeps_order=kind is NodeKind.COMPUTE and (draws(fx_node) or has_effect(fx_node)),
                module=module_path(fx_node, keeps_root=keeps_roots),
                is_backward=role is Role.STEP and bool(fx_node.meta.get("autograd_backward")),
                sizes=tuple(sorted(ids[value] for value in symbols.needed_by(fx_node))),
                num_bytes=evaluate_formula(_num_bytes(fx_node), symbols.hints),
                work=Work() if work is None else evaluate(work, symbols.hints),
                signature=_signature(fx_node, inputs, ids),
                value=_describe(fx_node, fx_node.meta.get("val")),
            )
        )
    return Capture(
        name=name,
        role=role,
        nodes=_with_parts(nodes, {ids[root] for root in order.written}, is_aligned),
        outputs=outputs,
        without_formula=tuple(sorted(without_formula)),
        sizes=tuple(sorted((str(symbol), value) for symbol, value in symbols.hints.items())),
    )


@dataclass(frozen=True, slots=True)
class Formulas:
    """Bytes and work of the nodes of a graph, in the symbols of its shapes."""

    num_bytes: tuple[Expr, ...]
    work: tuple[NodeWork | None, ...]

    @property
    def symbols(self) -> dict[str, sympy.Symbol]:
        """The symbols that bytes and work depend on, by name."""
        works = (work for work in self.work if work is not None)
        formulas = [*self.num_bytes, *(f for w in works for f in (w.flops, w.bytes_read, w.bytes_written, w.tiles))]
        return {str(symbol): symbol for formula in formulas for symbol in formula.free_symbols}


def read_formulas(graph_module: fx.GraphModule, capture: Capture) -> Formulas:
    """Return the formulas that `resize_capture` evaluates for other sizes; they hold no torch objects."""
    fx_nodes = [fx_node for fx_node in graph_module.graph.nodes if fx_node.op != "output"]
    return Formulas(
        num_bytes=tuple(_num_bytes(fx_node) for fx_node in fx_nodes),
        work=tuple(
            work_of(fx_node) if node.kind is NodeKind.COMPUTE else None
            for fx_node, node in zip(fx_nodes, capture.nodes, strict=True)
        ),
    )


def resize_capture(capture: Capture, formulas: Formulas, sizes: Mapping[str, int], *, name: str) -> Capture:
    """Return the capture with bytes and work for other sizes; see Note [sizes]."""
    hints = {symbol: sizes[symbol_name] for symbol_name, symbol in formulas.symbols.items()}
    nodes = tuple(
        replace(
            node, num_bytes=evaluate_formula(num_bytes, hints), work=Work() if work is None else evaluate(work, hints)
        )
        for node, num_bytes, work in zip(capture.nodes, formulas.num_bytes, formulas.work, strict=True)
    )
    return replace(capture, name=name, nodes=nodes, sizes=tuple(sorted(sizes.items())))


def module_path(fx_node: fx.Node, *, keeps_root: bool = False) -> str:
    """Return the FQN of the innermost module that a node came from, or an empty string.

    With `keeps_root` it begins with the name of the variable that holds the model, for code that calls several models.
    """
    path = _raw_path(fx_node)
    path = re.sub(r"_modules\['([^']*)'\]", r"\1", path)
    path = re.sub(_ROOT, _name_of_root if keeps_root else "", path)
    path = re.sub(_CELL, r".closure\1", path)
    path = re.sub(r"\[['\"]?([^'\"\]]*)['\"]?\]", r".\1", path)
    path = re.sub(r"(^|\.)_orig_mod(?=\.|$)", "", path)
    return re.sub(r"^_?self\.", "", re.sub(r"\.+", ".", path).strip("."))


def _raw_path(fx_node: fx.Node) -> str:
    """Return the innermost module as Dynamo names it, such as `L['self']._modules['encoder']`, or an empty string."""
    stack = fx_node.meta.get("nn_module_stack") or fx_node.meta.get("fwd_nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def _root_of(fx_node: fx.Node) -> str:
    """Return the beginning of the path of the model that a node came from, or an empty string."""
    found = re.match(_ROOT, _raw_path(fx_node))
    return _name_of_root(found) if found else ""


def _name_of_root(found: re.Match[str]) -> str:
    """Return the name of the variable that a path begins with; closure variables are numbered."""
    return "".join((found[1], *(f".closure{number}" for number in re.findall(_CELL, found[0])), "."))


class _Symbols:
    """The symbols in the shapes of a graph, each with the input that defines it and its value in the trace."""

    def __init__(self, graph_module: fx.GraphModule, device: torch.device) -> None:
        self._device = device
        self._read: set[sympy.Symbol] = set()
        """Symbols of numbers that the graph reads from tensors: Note [numbers]."""
        self.inputs: set[fx.Node] = set()
        """All inputs that are sizes; some are expressions of several symbols."""
        self.hints: dict[sympy.Symbol, int] = {}
        self._input_of: dict[sympy.Symbol, fx.Node] = {}
        self._inputs_for: dict[fx.Node, set[fx.Node]] = {}
        for fx_node in graph_module.graph.find_nodes(op="placeholder"):
            value = fx_node.meta.get("val")
            if not isinstance(value, torch.SymInt):
                continue
            self.inputs.add(fx_node)
            symbol = expression(value)
            if value.node.has_hint() and not isinstance(value.node.hint, int):
                raise UnsupportedGraphError(
                    f"graph input {fx_node.name} is the ragged size of a jagged nested tensor, not a whole number; "
                    "segments take tensors and whole numbers: make nested tensors inside the compiled function, from "
                    "values and offsets"
                )
            if symbol.is_Symbol and symbol not in self._input_of and value.node.has_hint():
                self._input_of[symbol] = fx_node
                self.hints[symbol] = value.node.hint

    def needed_by(self, fx_node: fx.Node) -> set[fx.Node]:
        """Return the size inputs that a node needs; call it for every node in graph order.

        Raises:
            UnsupportedGraphError: no input gives one of its symbols.
        """
        own = self._inputs_for[fx_node] = self._find_inputs(fx_node)
        if fx_node.op == "placeholder":
            return set()
        direct = {value for value in fx_node.all_input_nodes if value in self.inputs}
        return own.union(direct, *(self._inputs_for[value] for value in fx_node.all_input_nodes))

    def _find_inputs(self, fx_node: fx.Node) -> set[fx.Node]:
        value = fx_node.meta.get("val")
        symbols = _free_symbols(value)
        if isinstance(value, _Symbolic) and self._device.type == "cpu":  # a GPU's lane cannot stop to read
            if reads_number(fx_node):
                self._read |= symbols
            symbols -= self._read
        unknown = symbols - self._input_of.keys()
        if unknown:
            names = ", ".join(sorted(map(str, unknown)))
            subject = "is a number" if isinstance(value, _Symbolic) else "has a dynamic shape"
            raise UnsupportedGraphError(
                f"{fx_node.name} {subject}, and no input of the graph says what {names} is: segments take "
                "sizes that are known when the graph is called"
            )
        return {self._input_of[symbol] for symbol in symbols}


def _free_symbols(value: Any) -> set[sympy.Symbol]:
    """Return the symbols in the shapes, strides and offsets of tensors, and in symbolic numbers."""
    found: set[sympy.Symbol] = set()
    for item in value if isinstance(value, list | tuple) else (value,):
        numbers: Iterable[Any] = ()
        if isinstance(item, torch.Tensor) and item.layout is torch.strided:
            numbers = (*item.shape, *item.stride(), item.storage_offset())
        elif isinstance(item, _Symbolic):
            numbers = (item,)
        for number in numbers:
            if isinstance(number, _Symbolic):
                found |= number.node.expr.free_symbols
    return found


class _OrderKeeper:
    """Finds, in one walk over the graph, the nodes that a node must follow without reading their values."""

    def __init__(self) -> None:
        self._last_random: NodeId | None = None
        self._last_effect: NodeId | None = None
        self._bases: dict[fx.Node, frozenset[fx.Node]] = {}
        self._writer: dict[fx.Node, NodeId] = {}
        self._readers: dict[fx.Node, list[NodeId]] = {}
        self._inputs: set[fx.Node] = set()
        """Graph inputs that are tensors."""
        self._numbers: dict[fx.Node, dict[fx.Node, NodeId | None]] = {}
        """Per node that depends on numbers: the tensors that they are read from, each with its last writer before."""

    @property
    def written(self) -> Iterable[fx.Node]:
        """Return the values that something writes to."""
        return self._writer

    def after(
        self, fx_node: fx.Node, node_id: NodeId, kind: NodeKind, ids: dict[fx.Node, NodeId]
    ) -> tuple[NodeId, ...]:
        """Return the extra predecessors of the next node of the walk.

        Raises:
            UnsupportedGraphError: it needs a number that can no longer be read: Note [numbers].
        """
        if kind is NodeKind.INPUT:
            self._inputs.update([fx_node] if _tensors_of(fx_node) else [])
            return ()
        if kind in (NodeKind.CHEAP, NodeKind.PROJECTION):
            if fx_node.all_input_nodes:  # a view's tensor and numbers; tensors that the numbers are read from count too
                self._bases[fx_node] = self._roots(fx_node.all_input_nodes)
            self._keep_numbers(fx_node)
            if kind is NodeKind.CHEAP and any(user.op == "output" for user in fx_node.users):
                return self._read(self._roots([fx_node]) & self._inputs, node_id)  # no view can be made of freed memory
            return ()
        self._check_numbers(fx_node)
        found: set[NodeId] = set()
        if draws(fx_node):
            found.update(() if self._last_random is None else (self._last_random,))
            self._last_random = node_id
        if has_effect(fx_node):
            found.update(() if self._last_effect is None else (self._last_effect,))
            self._last_effect = node_id
        written, read = self._roots(written_by(fx_node)), self._roots(fx_node.all_input_nodes)
        if frees_storage(fx_node):
            written, read = written | self._inputs, read | self._inputs
        for root in written:
            found.update(self._readers.get(root, ()))
        found.update(self._read(read, node_id))
        self._writer.update(dict.fromkeys(written, node_id))
        if written:  # it may return the tensor that it wrote to
            self._bases[fx_node] = written | {fx_node}
        return tuple(sorted(found - {node_id} - {ids[value] for value in fx_node.all_input_nodes}))

    def _read(self, roots: Iterable[fx.Node], node_id: NodeId) -> tuple[NodeId, ...]:
        """Register a node as reader of `roots`, and return their last writers."""
        for root in roots:
            self._readers.setdefault(root, []).append(node_id)
        return tuple(sorted({self._writer[root] for root in roots if root in self._writer}))

    def _keep_numbers(self, fx_node: fx.Node) -> None:
        own: dict[fx.Node, NodeId | None] = {}
        if reads_number(fx_node):
            own = {root: self._writer.get(root) for root in self._bases[fx_node]}
        for value in fx_node.all_input_nodes:
            own = {**self._numbers.get(value, {}), **own}
        if own:
            self._numbers[fx_node] = own

    def _check_numbers(self, fx_node: fx.Node) -> None:
        for value in fx_node.all_input_nodes:
            for root, writer in self._numbers.get(value, {}).items():
                if self._writer.get(root) != writer:
                    raise UnsupportedGraphError(
                        f"{fx_node.name} needs a number read from {root.name}, which was written to or freed since; "
                        "segments read numbers when they need them"
                    )

    def _roots(self, fx_nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
        return frozenset().union(*(self._bases.get(value, (value,)) for value in fx_nodes))


def _kind(fx_node: fx.Node, nodes: list[Node], inputs: tuple[NodeId, ...], device: torch.device) -> NodeKind:
    if fx_node.op == "placeholder":
        _check_input(fx_node, device)
        return NodeKind.INPUT
    if fx_node.op == "get_attr":
        _check_value(fx_node, device)
        return NodeKind.CHEAP
    if fx_node.op != "call_function":
        raise UnsupportedGraphError(f"node {fx_node.name} is a {fx_node.op}; segments take calls of functions only")
    target = fx_node.target
    if isinstance(fx_node.meta.get("val"), _Symbolic):
        return NodeKind.CHEAP  # Note [sizes], Note [numbers]
    if target is operator.getitem:
        return NodeKind.CHEAP if nodes[inputs[0]].kind is NodeKind.CHEAP else NodeKind.PROJECTION
    if isinstance(target, torch._ops.HigherOrderOperator) and str(target) == "with_effects":
        raise UnsupportedGraphError(
            f"node {fx_node.name} carries an effect token; segments cannot order it: it is {name_of(fx_node.args[1])}"
        )
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace == "streams":
            raise UnsupportedGraphError(
                f"node {fx_node.name} ({target}) uses a stream chosen by the user; the plan assigns streams itself"
            )
        _check_value(fx_node, device)
        known = find_operator(name_of(target))
        if known.kind is WorkKind.CONSTANT and not any(_tensors_of(value) for value in fx_node.all_input_nodes):
            is_filled_later = any(fx_node in written_by(user) for user in fx_node.users)
            return NodeKind.COMPUTE if is_filled_later else NodeKind.CHEAP
        if (target.is_view or known.kind is WorkKind.VIEW) and not written_by(fx_node):
            return NodeKind.CHEAP
        if known.stays_with_input:
            is_computed = nodes[inputs[0]].kind not in (NodeKind.INPUT, NodeKind.CHEAP)
            if known.waits and not is_computed:
                raise UnsupportedGraphError(
                    f"node {fx_node.name} waits for {nodes[inputs[0]].name}, which is not the result of a collective "
                    "of this graph; segments take a collective with its wait only"
                )
            return NodeKind.PROJECTION if is_computed else NodeKind.CHEAP
        return NodeKind.COMPUTE
    if not isinstance(fx_node.meta.get("val"), torch.Tensor | tuple | list):
        does = f"computes a {type(fx_node.meta.get('val')).__name__}, not a tensor"
        if str(target).endswith("_rng_state"):
            does = "keeps the state of random numbers for a checkpoint, which segments cannot"
        raise UnsupportedGraphError(f"node {fx_node.name} ({name_of(target)}) {does}")
    _check_value(fx_node, device)
    return NodeKind.COMPUTE


_FEWEST_PARTS = 4
"""Queries, keys and values are three parts, and stay in the segment that reads them."""


def _with_parts(nodes: Sequence[Node], written: Collection[NodeId], is_aligned: Sequence[bool]) -> tuple[Node, ...]:
    """Return the nodes, with views of equal parts of a value marked, and constants with a part: Note [parts].

    Arguments:
        nodes: of the graph.
        written: those that something writes to, of which no part is taken.
        is_aligned: whether a node begins where whole tensors do. Inductor compiles code for such addresses on a GPU.
    """
    alike: dict[tuple[NodeKind, *tuple[object, ...]], list[NodeId]] = defaultdict(list)
    changing = set(written)
    for node in nodes:
        operator = find_operator(node.target)
        if changing & set(node.inputs):
            changing.add(node.id)
        elif node.sizes:
            continue
        elif node.kind is NodeKind.CHEAP and operator.takes_part and is_aligned[node.id]:
            alike[NodeKind.PART, node.inputs, node.target, node.value].append(node.id)
        elif operator.puts_part and nodes[node.inputs[0]].kind is NodeKind.CHEAP and not nodes[node.inputs[0]].inputs:
            alike[NodeKind.CHEAP, node.inputs[0], node.target, node.value].append(node.id)
    changed = {
        node: replace(nodes[node], kind=kind, work=Work())
        for (kind, *_), found in alike.items()
        if len(found) >= _FEWEST_PARTS
        for node in found
    }
    return tuple(changed.get(node.id, node) for node in nodes)


def _check_input(fx_node: fx.Node, device: torch.device) -> None:
    value = fx_node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return
    if not isinstance(value, torch.Tensor):
        raise UnsupportedGraphError(
            f"graph input {fx_node.name} is a {type(value).__name__}, not a tensor; segments take tensors only"
        )
    _check_tensor(fx_node, value, device)


def _check_value(fx_node: fx.Node, device: torch.device) -> None:
    value = fx_node.meta.get("val")
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, torch.Tensor):
            _check_tensor(fx_node, item, device)
        elif item is not None and not isinstance(item, int | float | bool):
            raise UnsupportedGraphError(f"node {fx_node.name} returns a {type(item).__name__}, not a tensor")


def _check_tensor(fx_node: fx.Node, value: torch.Tensor, device: torch.device) -> None:
    if value.device != device:
        lanes = f"all lanes of this graph are on {device}"
        if device.type == "cpu" and fx_node.op != "placeholder":
            lanes = "all lanes of this graph are on the CPU, where its inputs are"
        raise UnsupportedGraphError(f"{fx_node.name} is on device {value.device}; {lanes}")
    if value.layout is not torch.strided:
        raise UnsupportedGraphError(f"{fx_node.name} has layout {value.layout}; segments take strided tensors only")


def _output_id(ids: dict[fx.Node, NodeId], value: Any) -> NodeId | None:
    if value is None:
        return None
    if isinstance(value, fx.Node):
        if isinstance(value.meta.get("val"), _Symbolic):
            number = type(value.meta["val"]).__name__
            raise UnsupportedGraphError(f"the graph returns {value}, a {number}; segments return tensors only")
        return ids[value]
    raise UnsupportedGraphError(f"the graph returns {value!r}, a {type(value).__name__}, not a tensor")


def _tensors_of(fx_node: fx.Node) -> list[torch.Tensor]:
    value = fx_node.meta.get("val")
    return [item for item in (value if isinstance(value, list | tuple) else (value,)) if isinstance(item, torch.Tensor)]


def _num_bytes(fx_node: fx.Node) -> Expr:
    total = sympy.Integer(0)
    for tensor in _tensors_of(fx_node):
        number = sympy.Integer(tensor.element_size())
        for size in tensor.shape:
            number *= expression(size)
        total += number
    return total


def _describe(fx_node: fx.Node, value: Any) -> str:
    if fx_node.op == "get_attr":
        return f"attribute {fx_node.target}"
    if isinstance(value, _Symbolic):
        return f"size {value}"
    return "; ".join(
        f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} strides {list(tensor.stride())}"
        for tensor in _tensors_of(fx_node)
    )


def _is_aligned(fx_node: fx.Node) -> bool:
    """Return whether tensors begin at a multiple of so many bytes as whole tensors do."""
    offsets = [tensor.storage_offset() * tensor.itemsize for tensor in _tensors_of(fx_node)]
    return all(isinstance(offset, int) and offset % _ALIGNMENT == 0 for offset in offsets)


def _signature(fx_node: fx.Node, inputs: tuple[NodeId, ...], ids: dict[fx.Node, NodeId]) -> str:
    def show(value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{inputs.index(ids[value])}" if ids[value] in inputs else f"{value.meta['val']}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(show, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key}: {show(item)}' for key, item in value.items())}}}"
        return repr(value)

    if fx_node.op == "placeholder":
        return ""
    arguments = [*map(show, fx_node.args), *(f"{key}={show(value)}" for key, value in fx_node.kwargs.items())]
    return f"{name_of(fx_node.target)}({', '.join(arguments)})"
