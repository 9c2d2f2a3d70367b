"""The file that touches private torch APIs, with `cpp_wrapper.py`: Inductor's entry points, and tensor handles.

    reset_cuda_graphs       let go of what Inductor captured for fallbacks
    compile_plainly         what torch.compile alone would do with a Dynamo graph: a fallback
    inductor_settings       Inductor's settings of a mode and options, as torch.compile takes them
    copy_of_dynamo_graph    a graph that compiling may change, so that the other can still fall back
    compile_with_inductor   run a Dynamo graph through AOTAutograd and Inductor's passes, with our inner compiler
    set_aside               leave out of a graph what is no tensor and only passes through; see to its sizes
    adopt_layouts           trace a graph again for the strides that its inputs really have
    traced_tensors          what a Dynamo graph was traced with, fake inputs or not
    writes_inputs           whether a graph mutates what it is given
    keep_with               tie a value to the lifetime of a compiled function
    release_symbols_with    tie what torch knows of dynamic sizes to the lifetime of a value
    trace_artifact          add a text to torch's structured trace
    compiler_settings       all settings that shape what Inductor compiles
    compile_whole           what Inductor would do with a post-AOT graph, untouched
    compile_again           the same, later, for a graph whose outputs others already rely on
    compiler_complaint      what keeps C++ code from being made, if it was that
    extract_body            cut the nodes of one body out of the graph
    compile_bodies          compile bodies with Inductor: native entry (no GIL) or Python callable
    CachedGraph             what AOTAutograd's cache keeps of a compiled graph, and what a bundle of it is made of
    interpret_bodies        bodies that call one operator after the other
    interpret_whole         a graph that does
    report_output_strides   tell AOTAutograd the layout of the graph's outputs
    count_uses              how many tensors refer to the memory of each
    real_tensors            compute in the midst of a compile
    check_overrides         whether this torch has the methods that we override
    may_choose_library      whether who computes matrix products is left to us
    clear_workspaces        let cuBLAS take its workspaces anew
    units_left_out          tell libraries of SMs that are not for what they launch
    depends_on_units        whether Inductor may make other code for another number of SMs

Note [pieces of a graph]: three facts of the whole graph must be hidden while a piece compiles, and are put back after:
`TracingContext.output_strides` (Inductor asserts that it is empty), `fw_metadata.bw_donated_idxs` (names inputs of the
whole backward; a piece would reuse memory that another piece still reads), and AOTAutograd's cache (Inductor would
leave the code of pieces to it). The first two shape the generated code but are not in Inductor's cache key, hence a key
tag of our own.

Note [bundles]: AOTAutograd's cache holds the result of tracing a Dynamo graph, splitting it in forward and backward,
and compiling both. It takes graphs of any kind that can become data and code again, but only where code is bundled with
the rest; so it is told that it is, while Inductor goes on keeping the code of pieces by itself. The backward compiles
with the forward then, since AOTAutograd would look at those settings again later, when they are no longer set.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import ctypes
import functools
import hashlib
import inspect
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import sympy
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._dynamo.exc import TorchDynamoException
from torch._functorch._aot_autograd import aot_autograd_result
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, FXGraphCacheMiss
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import exc, inductor_prims
from torch._inductor.codecache import FxGraphCache, PyCodeCache
from torch._inductor.codegen import cpp
from torch._inductor.compile_fx import compile_fx, compile_fx_inner, fake_tensor_prop
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.post_grad import noop_registry, same_meta, view_to_reshape
from torch._inductor.fx_utils import get_fake_args_kwargs
from torch._inductor.lowering import clone, register_lowering
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants, OutputCode
from torch._inductor.utils import BoxedBool, set_tracing_context_output_strides
from torch._library.fake_class_registry import FakeScriptObject
from torch._logging._internal import trace_structured
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.printers import PythonPrinter

from apollo_compile.device.target import CompiledBody, KeepsPython, Run
from apollo_compile.errors import ConfigError, UnsupportedGraphError
from apollo_compile.ir import Body
from apollo_compile.operators.effects import TORCH_NAMESPACES
from apollo_compile.operators.writes import resizes_storage, written_by
from apollo_compile.torch_bridge import cpp_wrapper
from apollo_compile.torch_bridge.cpp_wrapper import lane_wrapper
from apollo_compile.torch_bridge.onednn import is_linear, onednn_linear
from apollo_compile.torch_bridge.signatures import Signatures, check_signatures
from apollo_compile.torch_bridge.upstream_bugs import miscompiled
from apollo_compile.torch_bridge.upstream_bugs.miscompiled import write_otherwise
from apollo_compile.torch_bridge.upstream_bugs.overwrites import keep_copies, keep_reads
from apollo_compile.torch_bridge.upstream_bugs.resizes import settle_resizes

_logger = logging.getLogger(__name__)

_compile_lock = threading.RLock()
"""Guards Inductor's process-wide configuration and code generator tables while a body compiles."""


def _renew_lock() -> None:
    """In a forked child: a thread of the parent may have held it."""
    global _compile_lock
    _compile_lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)

_OWN_CODE = b"".join(Path(file).read_bytes() for file in (__file__, cpp_wrapper.__file__, miscompiled.__file__))

_CACHE_KEY_TAG = f"apollo-{hashlib.sha256(_OWN_CODE).hexdigest()[:16]}"
"""Part of Inductor's cache key while a body compiles: other code in these files may generate other code.

The number of threads goes behind it: how deep loops are made parallel depends on it, and with `cpp.dynamic_threads`
Inductor's own key does not hold it. So does the number of SMs where code is for a part of a GPU.
"""

Bundle = Callable[[], Any]
"""Returns a graph as data; raises `UnsupportedGraphError` if it cannot be."""

InnerCompile = Callable[..., tuple[Run, Bundle | None]]
"""`compile(graph_module, example_inputs, **kwargs)`; the bundle is None where the cache is not to have the graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """How AOTAutograd's cache gives graphs back: Note [bundles]."""

    key: str
    """What shaped a graph besides itself, the settings of torch and what `compile_with_inductor` is told."""
    unbundle: Callable[[Any], Run]
    """Makes code of a bundle."""


_NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


def may_cache() -> bool:
    """Whether AOTAutograd may keep results, as it does unless the user says no, and can keep those of any kind."""
    is_wanted = functorch_config.enable_autograd_cache and inductor_config.fx_graph_cache
    return bool(is_wanted) and hasattr(aot_autograd_result, "BundledOutputCodeLoadable") and _is_known_to_cache()


def check_overrides() -> None:
    """See whether all methods of torch that we override are those that the overrides were written for.

    Raises:
        UnsupportedGraphError: this torch has others.
    """
    check_signatures({**cpp_wrapper.KNOWN_SIGNATURES, **_OUTPUT_CODE, **_STORE})


def compile_with_inductor(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    inner_compile: InnerCompile,
    *,
    recompute_masks: bool,
    eager_randomness: bool = False,
    backward_at_once: bool = False,
    cache: Cache | None = None,
    settings: Mapping[str, Any] = _NO_SETTINGS,
) -> Callable[..., Any]:
    """Run Inductor's front half on a Dynamo graph; `inner_compile` gets the post-AOT graphs.

    `recompute_masks` makes the min-cut partitioner recompute what is cheap in the backward instead of saving it.
    Inductor's CPU code that writes boolean masks is many times slower than code that recomputes them.
    `eager_randomness` keeps the random operators of eager PyTorch instead of Inductor's, which only compiled code has.
    `backward_at_once` compiles the backward with the forward instead of when it is first called.
    `cache` lets AOTAutograd look for the whole in its cache first, and keep it there.
    `settings` are those of Inductor that are in force, and are to be when a backward is compiled later.
    """
    users, tag = inductor_config.joint_custom_pre_pass, torch.compiler.config.cache_key_tag
    patches: dict[str, Any] = {
        "bundled_autograd_cache": cache is not None,
        "donated_buffer": False,  # we use none, and without them backward(retain_graph=True) works
    }
    if cache is None:
        patches["enable_autograd_cache"] = False
    if recompute_masks:
        patches["recompute_views"] = True
    if backward_at_once or cache is not None:
        patches["force_non_lazy_backward_lowering"] = True
    graphs: list[CachedGraph] = []

    def compile_behind_passes(*args: Any, **kwargs: Any) -> Any:
        with (
            inductor_config.patch(
                {**settings, "joint_custom_pre_pass": users}
            ),  # parts of the keys of Inductor's cache
            torch.compiler.config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
            functorch_config.patch(bundled_autograd_cache=False),
        ):
            run, bundle = inner_compile(*args, **kwargs)
        _donate_nothing()
        if cache is None:
            return run
        graphs.append(CachedGraph(run, bundle))
        return graphs[-1]

    own: dict[str, Any] = {"joint_custom_pre_pass": _FirstPasses(users)}
    if eager_randomness:
        own["fallback_random"] = True
    with contextlib.ExitStack() as stack:
        stack.enter_context(functorch_config.patch(patches))
        stack.enter_context(inductor_config.patch(own))
        if cache is not None:
            stack.enter_context(torch.compiler.config.patch(cache_key_tag=f"{tag} {cache.key}"))  # type: ignore[attr-defined]
            stack.callback(_cache.reset, _cache.set(cache))
        compiled = compile_fx(graph_module, list(example_inputs), inner_compile=compile_behind_passes)
    for graph in graphs:
        graph.bundle = None
    return compiled  # type: ignore[return-value]


def _donate_nothing() -> None:
    """Say that backwards reuse no memory of inputs: not being told, AOTAutograd refuses backward(retain_graph=True)."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is not None and metadata.bw_donated_idxs is None:
        metadata.bw_donated_idxs = []


class _FirstPasses(CustomGraphPass):
    """Passes over the graph of forward and backward, before those of Inductor."""

    def __init__(self, users: Any) -> None:
        self.users = users
        passes = users if isinstance(users, list | tuple) else [users] if users is not None else []
        self._users = tuple(passes)

    def __call__(self, graph: fx.Graph) -> None:
        """Run the user's own passes, and ours: keep apart what Inductor's would make one, and keep numbers right."""
        for custom in self._users:
            custom(graph)
        _lower_clones()
        settle_resizes(graph)
        keep_reads(graph, _copied_by)
        keep_copies(graph, _copied_by)
        write_otherwise(graph)

    def uuid(self) -> Any:
        """Name the passes for the keys of caches; None is that some of them have no name, so that nothing is cached."""
        names = [custom.uuid() if isinstance(custom, CustomGraphPass) else None for custom in self._users]
        return None if None in names else (_CACHE_KEY_TAG, *names)


def _copied_by(node: fx.Node) -> fx.Node | None:
    """Return what Inductor takes for the same as `node`."""
    is_noop, source = noop_registry.get(node.target, (None, None))
    if callable(source):
        (takes,) = inspect.signature(source).parameters  # the node from torch 2.15 on, before that its arguments
        found = source(node if takes == "node" else node.args)
    else:
        found = None if source is None else node.args[source]
    if not (isinstance(found, fx.Node) and same_meta(node, found)):
        return None
    is_known, args, kwargs = get_fake_args_kwargs(node)
    return found if is_known and is_noop(*args, **kwargs) else None


@functools.cache
def _lower_clones() -> None:
    """Let Inductor compile `prims.clone`, which it does not know, as it does `aten.clone`."""
    register_lowering(torch.ops.prims.clone, type_promotion_kind=None)(clone)


def traced_tensors(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors that a Dynamo graph was traced with.

    Where Dynamo cuts a graph for the buckets of DDP, the inputs of the pieces are fake; what was an input of the whole
    graph still has the tensor that it stands for. What another piece computes is left out. The graphs of compiled
    autograd take their tensors in a list.
    """
    found = []
    for node, value in zip(graph_module.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        argument = node.meta.get("grapharg")
        real = argument.example if is_fake(value) and argument is not None else value
        items = real if isinstance(real, list | tuple) else (real,)
        found += [item for item in items if isinstance(item, torch.Tensor) and not is_fake(item)]
    return found


def storages_of(tensors: Iterable[torch.Tensor]) -> frozenset[StorageWeakRef]:
    """Return the storages of tensors, to tell whether it is the same ones; sparse and uninitialized tensors have none.

    Nothing refers to the tensors, not even weakly, since torch swaps no tensor that is referred to: `Module.to` may
    want to. Nor is their memory kept, only its number.
    """
    found = set()
    for tensor in tensors:
        with contextlib.suppress(NotImplementedError, ValueError):
            found.add(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
    return frozenset(found)


def compile_plainly(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], settings: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile a Dynamo graph as `torch.compile(mode=..., options=...)` does: same code, same caches, same memory.

    Arguments:
        graph_module: what Dynamo traced; compiling changes it.
        example_inputs: its inputs.
        settings: Inductor's, from `inductor_settings`.
    """
    return compile_fx(graph_module, list(example_inputs), config_patches=dict(settings))  # type: ignore[return-value]


def inductor_settings(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of Inductor that `torch.compile(mode=mode, options=options)` stands for.

    Raises:
        ConfigError: there is no such mode or setting, or a value has the wrong type.
    """
    try:
        settings: dict[str, Any] = torch._TorchCompileInductorWrapper(mode, dict(options), None).config  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigError(f"Inductor does not take the mode or an option 'inductor.<setting>': {error}") from error
    return settings


def is_for_dynamo(error: Exception) -> bool:
    """Whether an error tells Dynamo what to do, such as to trace again."""
    return isinstance(error, TorchDynamoException)


def reset_cuda_graphs() -> None:
    """Let go of the CUDA graphs that Inductor keeps for what falls back; `torch._dynamo.reset` asks for it."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


def with_settings(settings: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Let these settings of Inductor be in force."""
    return inductor_config.patch(dict(settings))  # type: ignore[no-any-return]


@contextlib.contextmanager
def copy_of_dynamo_graph(graph_module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Give a copy of a Dynamo graph that may be compiled, which changes a graph and those inside it.

    Parameters, buffers and modules are shared, and so is what Dynamo notes about the graph. As Dynamo does with its
    own, what is noted about nodes is dropped afterwards: it refers to parameters, which nobody could swap then.
    """
    copied = _copy_dynamo_graph(graph_module)
    try:
        yield copied
    finally:
        for module in copied.modules():
            for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
                node.meta.clear()


def _copy_dynamo_graph(graph_module: fx.GraphModule) -> fx.GraphModule:
    copied = clone_graph(graph_module)
    for node, original in zip(copied.graph.nodes, graph_module.graph.nodes, strict=True):
        vars(node).update({**vars(original), **vars(node)})
    for name, inner in copied.named_children():
        if isinstance(inner, fx.GraphModule):
            setattr(copied, name, _copy_dynamo_graph(inner))
    for name, value in vars(graph_module).items():  # in their order, which is part of the keys of AOTAutograd's cache
        if name != "_code":
            vars(copied).setdefault(name, value)
    copied.meta = dict(graph_module.meta)
    return copied


def writes_inputs(graph_module: fx.GraphModule) -> bool:
    """Whether the graph writes into its inputs."""
    return any(map(written_by, graph_module.graph.nodes))


def written_inputs(graph_module: fx.GraphModule) -> frozenset[int] | None:
    """Return the positions of the inputs that the graph writes to; None where it also writes to something else.

    After AOTAutograd a graph writes to its inputs themselves, at its end, and to nothing else.
    """
    placeholders = {node: index for index, node in enumerate(graph_module.graph.find_nodes(op="placeholder"))}
    written = {value for node in graph_module.graph.nodes for value in written_by(node)}
    return frozenset(map(placeholders.__getitem__, written)) if written <= placeholders.keys() else None


def user_outputs(graph_module: fx.GraphModule) -> frozenset[int]:
    """Return the positions of the outputs that outlive the next run; all of them where nothing says which."""
    visible = graph_module.graph.output_node().meta.get("user_visible_output_idxs")
    return frozenset(range(len(_outputs(graph_module))) if visible is None else visible)


def find_uncapturable(graph_module: fx.GraphModule) -> str | None:
    """Return the name of an operator that must not be in a CUDA graph; None where there is none.

    That is one that says so, and one after which an input has other memory.
    """
    calls = [node for node in graph_module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    unsafe = (n.target for n in calls if torch.Tag.cudagraph_unsafe in n.target.tags or resizes_storage(n))
    return next(map(str, unsafe), None)


def storage_handles(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return what `count_uses` knows the memory of each tensor by, for as long as the tensor lives."""
    return [tensor.untyped_storage()._cdata for tensor in tensors]


def count_uses(handles: Iterable[int]) -> list[int]:
    """Return for each memory how many tensors refer to it."""
    return list(map(torch._C._storage_Use_Count, handles))


def clear_workspaces() -> None:
    """Give the workspaces of cuBLAS back to the allocator; the next call of it takes new ones."""
    torch._C._cuda_clearCublasWorkspaces()


_get_left_out: Callable[[], int | None] = getattr(torch._C, "_get_sm_carveout_experimental", lambda: None)
_set_left_out: Callable[[int | None], None] | None = getattr(torch._C, "_set_sm_carveout_experimental", None)

_units_lock = threading.RLock()
"""Guards the number of SMs left out, which torch keeps for the whole process; held while something is launched."""


@contextlib.contextmanager
def units_left_out(count: int) -> Iterator[None]:
    """Let what is launched inside leave `count` SMs of the device alone, as far as it asks.

    It is a hint: scaled products of cuBLASLt and FlashAttention 3 follow it. Who asks the device is told of all SMs.
    """
    if not count or _set_left_out is None:
        yield
        return
    with _units_lock:
        before = _get_left_out()
        _set_left_out(count)
        try:
            yield
        finally:
            _set_left_out(before)


@contextlib.contextmanager
def _compiled_without(count: int) -> Iterator[None]:
    """Let the code that Inductor makes on this thread leave `count` SMs alone: persistent grids fill the others.

    Inductor asks torch for the number that libraries are told. To set that for as long as a compile takes would keep
    all other threads from launching, so Inductor gets an answer of its own, on this thread alone. `_compile_lock` is
    held.
    """
    if not count:
        yield
        return
    own = threading.get_ident()
    torch._C._get_sm_carveout_experimental = lambda: count if threading.get_ident() == own else _get_left_out()
    try:
        yield
    finally:
        torch._C._get_sm_carveout_experimental = _get_left_out


def depends_on_units() -> bool:
    """Whether Inductor may make other code for another number of SMs, as the user set it up.

    With max-autotune it does: persistent grids are as large as the device, and the fastest of many kernels is another
    one on other SMs. Without it, no number of SMs is in its code but that of reductions, which are right on any.
    """
    return bool(inductor_config.max_autotune or inductor_config.max_autotune_gemm)


@dataclass(frozen=True, slots=True)
class Boundary:
    """What a graph takes and returns besides tensors.

    Objects that it only returns, as DTensor's device meshes, are left out of it. Sizes, which are integers, go through
    it as tensors without dimensions, since buffers hold tensors; those that it returns are computed from those that it
    takes.
    """

    objects: tuple[int, ...]
    """Positions of the inputs that are objects, ascending."""
    returned: tuple[tuple[int, int], ...]
    """Positions of outputs that are objects, and of the inputs that are returned there."""
    numbers: tuple[int, ...]
    """Positions of the inputs that are sizes."""
    symbols: tuple[tuple[str, int], ...]
    """Names of the symbols in the graph's shapes, and the positions of the inputs that give them."""
    traced: tuple[int, ...]
    """What they were when the graph was traced."""
    computed: tuple[tuple[int, Callable[..., Any]], ...]
    """Positions of outputs that are numbers, and what computes them from the values of `symbols`, in their order."""

    @property
    def sizes(self) -> dict[str, int]:
        """What the symbols were when the graph was traced, by name."""
        return {name: size for (name, _), size in zip(self.symbols, self.traced, strict=True)}

    def take(self, inputs: list[Any]) -> dict[int, Any]:
        """Leave tensors in the inputs of a call, and return what else was there by position."""
        taken = {position: inputs[position] for position in (*self.objects, *self.numbers)}
        for position in self.numbers:
            inputs[position] = torch.tensor(inputs[position], dtype=torch.int64, device="cpu")
        for position in reversed(self.objects):
            del inputs[position]
        return taken

    def give(self, outputs: Sequence[Any], taken: Mapping[int, Any]) -> list[Any]:
        """Return the outputs with objects and sizes put back."""
        complete = list(outputs)
        for output, position in self.returned:
            complete[output] = taken[position]
        sizes = [taken[position] for _, position in self.symbols]
        for output, compute in self.computed:
            complete[output] = compute(*sizes)
        return complete


def set_aside(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[fx.GraphModule, list[Any], dict[str, Any], Boundary] | None:
    """Return a graph that returns tensors only, what belongs to it, and what is between it and its callers.

    None if it takes tensors only. An object that an operator uses stays: that graph is not for lanes.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    values = [node.meta.get("val") for node in placeholders]
    objects = {
        node: position
        for position, (node, value) in enumerate(zip(placeholders, values, strict=True))
        if isinstance(value, FakeScriptObject) and all(user.op == "output" for user in node.users)
    }
    numbers = tuple(position for position, value in enumerate(values) if isinstance(value, torch.SymInt))
    if not objects and not numbers:
        return None
    positions: dict[Any, int] = {}
    for position in numbers:
        if values[position].node.expr.is_Symbol and values[position].node.has_hint():
            positions.setdefault(values[position].node.expr, position)
    outputs = list(enumerate(_outputs(graph_module)))
    sizes = [(place, node.meta["val"]) for place, node in outputs if _is_number(node)]
    piece = clone_graph(graph_module)
    copies = piece.graph.find_nodes(op="placeholder")
    output_node = piece.graph.output_node()
    returned = list(_outputs(piece))
    for place, _ in sizes:
        returned[place] = None
    output_node.args = (tuple(returned),)
    for position in objects.values():
        copies[position].replace_all_uses_with(None)
        piece.graph.erase_node(copies[position])
    boundary = Boundary(
        objects=tuple(objects.values()),
        returned=tuple((place, objects[value]) for place, value in outputs if value in objects),
        numbers=numbers,
        symbols=tuple((str(symbol), position) for symbol, position in positions.items()),
        traced=tuple(values[position].node.hint for position in positions.values()),
        computed=tuple((place, _compute(size, positions, values)) for place, size in sizes),
    )
    gone = boundary.objects
    kept = [position for position in range(len(placeholders)) if position not in gone]
    static = [kept.index(position) for position in kwargs.get("static_input_idxs") or () if position not in gone]
    inputs = [example_inputs[position] for position in kept]
    return piece, inputs, {**kwargs, "static_input_idxs": static}, boundary


def _is_number(node: Any) -> bool:
    symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), symbolic)


def _compute(number: Any, positions: Mapping[Any, int], values: Sequence[Any]) -> Callable[..., Any]:
    """Return a function of the symbols in `positions` that computes a symbolic number.

    Arguments:
        number: as it was traced.
        positions: of the symbols among the inputs.
        values: the inputs, as they were traced.

    Raises:
        UnsupportedGraphError: the number depends on something else, or on a function that has no form in Python.
    """
    expr = number.node.expr
    unknown = expr.free_symbols - positions.keys()
    if unknown:
        names = ", ".join(sorted(map(str, unknown)))
        raise UnsupportedGraphError(f"the graph returns the number {expr}, and none of its inputs says what {names} is")
    try:
        names_in_code = {"math": math, "torch": torch}
        compute = sympy.lambdify(list(positions), expr, modules=[names_in_code], printer=PythonPrinter, cse=False)
        is_right = compute(*(values[position].node.hint for position in positions.values())) == number.node.hint
    except Exception as error:
        raise UnsupportedGraphError(
            f"the graph returns the number {expr}, which Python cannot compute: {error}"
        ) from error
    if not is_right:
        raise UnsupportedGraphError(f"the graph returns the number {expr}, which Python computes otherwise than torch")
    return compute  # type: ignore[no-any-return]


def adopt_layouts(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Trace the values of a graph again if its inputs do not lie in memory as they did when it was traced.

    Inductor may choose the strides of what a forward saves, and AOTAutograd tells the backward by its example inputs.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    if any(
        _lies_otherwise(node.meta.get("val"), real) for node, real in zip(placeholders, example_inputs, strict=True)
    ):
        view_to_reshape(graph_module)  # type: ignore[no-untyped-call]  # a view of the old strides may need a copy with the new ones
        with torch.no_grad():
            fake_tensor_prop(graph_module, list(example_inputs), True)


def _lies_otherwise(traced: Any, real: Any) -> bool:
    if not (isinstance(traced, torch.Tensor) and isinstance(real, torch.Tensor)):
        return False
    return _exprs(traced.stride()) != _exprs(real.stride())


def _exprs(sizes: Sequence[Any]) -> list[Any]:
    """Return sizes as expressions, so that comparing them leaves no guard behind."""
    return [size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes]


def keep_with(compiled: Callable[..., Any], value: object) -> None:
    """Keep `value` alive as long as Dynamo keeps `compiled`."""
    innermost = compiled
    while hasattr(innermost, "_torchdynamo_orig_callable"):  # Dynamo takes wrappers of its own off and drops them
        innermost = innermost._torchdynamo_orig_callable
    innermost.apollo_keeps = value  # type: ignore[attr-defined]


def release_symbols_with(value: object) -> None:
    """Let what torch knows of the sizes of the graph that is being compiled go when `value` does.

    By itself it stays for good where sizes are dynamic. A ShapeEnv keeps the fake tensors that were traced, whose sizes
    refer to it from C++, where no garbage collector looks; and caches of its methods, which all of them share, keep
    those that used them last. While Dynamo has not made its guards from it, it is left alone: `value` may be dropped at
    once.
    """
    context = TracingContext.try_get()
    shape_env = context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None
    if shape_env is not None:
        weakref.finalize(value, _release_symbols, weakref.ref(shape_env)).atexit = False


def _release_symbols(reference: weakref.ref[ShapeEnv]) -> None:
    shape_env = reference()
    if shape_env is None or not shape_env.frozen:
        return
    shape_env.tracked_fakes = None
    for method in vars(ShapeEnv).values():
        clear = getattr(method, "cache_clear", None)
        if clear is not None:
            clear()


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to torch's structured trace, which `tlparse` shows; it is made only where there is such a trace."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


def compiler_settings() -> str:
    """Return Inductor's settings and torch's that choose kernels, as one text that is the same for the same ones."""
    settings = sorted(inductor_config.save_config_portable().items())
    cuda, mkldnn = torch.backends.cuda, torch.backends.mkldnn
    kernels = (
        # Each by itself: `get_float32_matmul_precision` raises where one was set that the old setting has no word for.
        *(place.fp32_precision for place in (cuda.matmul, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)),  # type: ignore[attr-defined]
        cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
        cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
        mkldnn.enabled,
        mkldnn.deterministic,
    )
    return f"{kernels!r} {settings!r}"


def compile_whole(graph_module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile a post-AOT graph as Inductor alone would, but for code that is known to be wrong."""
    tag = torch.compiler.config.cache_key_tag
    is_own = kwargs.get("is_backward") or _is_mended(graph_module)  # the key knows nothing of donated buffers
    with (
        _compile_lock,
        _right_scatters(),
        torch.compiler.config.patch(cache_key_tag=f"{tag} {_CACHE_KEY_TAG}" if is_own else tag),  # type: ignore[attr-defined]
    ):
        return compile_fx_inner(graph_module, example_inputs, **kwargs)


def _is_mended(graph_module: fx.GraphModule) -> bool:
    """Whether Inductor's cache may have wrong code for the graph: its key does not tell."""
    return any(
        "should_fallback" in node.meta or str(node.target).startswith(_ADDITIONS) for node in graph_module.graph.nodes
    )


_ADDITIONS = (
    "aten.index_put.",
    "aten._unsafe_index_put.",
    "aten._unsafe_masked_index_put_accumulate.",
    "aten.index_add.",
    "aten.scatter_add.",
    "aten.scatter_reduce.",
    "aten.embedding_dense_backward.",
)
"""Beginnings of the names of operators whose code may add at addresses that it reads."""


_STORE: Signatures = {(cpp.CppTile2DKernel, "store"): ("self, name, index, value, mode",)}


@contextlib.contextmanager
def _right_scatters() -> Iterator[None]:
    """Let C++ code for several threads add transposed values at the right addresses.

    A loop over tiles has its place in the tile added to addresses twice where they depend on what was read: by the
    store of a tile, and by the atomic addition that it calls. So `x.index_add(0, where, y.T[None])` writes to other
    rows, or behind the tensor. Here such a store leaves it to the addition.
    Source: https://github.com/pytorch/pytorch/issues/191837
    """
    if "index_expr" not in vars(cpp.CppTile2DOverrides):  # then it is added once
        yield
        return
    check_signatures(_STORE)
    tiles: Any = cpp.CppTile2DKernel
    vectors: Any = cpp.CppVecKernel
    wrong = tiles.store

    def store(kernel: Any, name: Any, index: Any, value: Any, mode: Any = None) -> Any:
        is_atomic = mode == "atomic_add" and (inductor_config.cpp.dynamic_threads or kernel.num_threads != 1)
        if is_atomic and not kernel.need_vec_transpose(kernel.rename_indexing(index)):
            return vectors.store(kernel, name, index, value, mode)
        return wrong(kernel, name, index, value, mode)

    tiles.store = store
    try:
        yield
    finally:
        tiles.store = wrong


def current_settings() -> Mapping[str, Any]:
    """Return Inductor's settings as they are now, or were before `compile_with_inductor` added to the user's passes."""
    entries: Mapping[str, Any] = inductor_config._config  # type: ignore[attr-defined]
    # To read one that is deprecated is a warning, and those that are no other name of one have no effect any more.
    names = (n for n, e in entries.items() if e.alias is None and not getattr(e, "deprecated", False))
    settings = {name: getattr(inductor_config, name) for name in names}
    passes = settings["joint_custom_pre_pass"]
    return {**settings, "joint_custom_pre_pass": passes.users if isinstance(passes, _FirstPasses) else passes}


def compile_again(
    graph_module: fx.GraphModule, settings: Mapping[str, Any], **kwargs: Any
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile a post-AOT graph as Inductor alone would, after AOTAutograd is done and other code relies on the result.

    `settings` are Inductor's, as they were when the bodies were compiled: the two are to compute the same.

    Every output keeps the strides that were traced, as the outputs of bodies do, so that the two can be exchanged. It
    runs on a thread of its own: the caller may be in the midst of a user's step, under autocast or inference mode.
    Inductor looks into its cache only where it is told of the tracing, so there is a context that says just that.

    Raises:
        Exception: whatever Inductor raises.
        UnsupportedGraphError: Inductor gave an output other strides than traced, or its code is for some dynamic sizes
            only, which Dynamo can no longer check.
    """
    piece = clone_graph(graph_module)
    output = piece.graph.output_node()
    output.meta["user_visible_output_idxs"] = [i for i, v in enumerate(_outputs(piece)) if isinstance(v, fx.Node)]
    fakes = [node.meta["val"] for node in piece.graph.find_nodes(op="placeholder")]
    made: list[Callable[[list[Any]], Sequence[Any]]] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            own = {**settings, "triton.cudagraphs": False}  # those are ours
            fake_mode = detect_fake_mode(fakes)
            with tracing(TracingContext(fake_mode)), _compile_lock, inductor_config.patch(own), _as_piece():
                layouts = _output_layouts(piece)
                with _within_guards(fakes, is_late=True):
                    compiled = compile_fx_inner(piece, fakes, **shared_kwargs(kwargs))
                _check_layouts("the whole graph", compiled, layouts)
                made.append(_with_numbers(compiled, fakes))
        except BaseException as error:  # raised again on the caller's thread
            failed.append(error)

    context = contextvars.copy_context()  # the settings of other parts of torch, as the user has them
    thread = threading.Thread(target=lambda: context.run(work), name="apollo-compile")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


@contextlib.contextmanager
def _within_guards(fakes: Sequence[Any], *, is_late: bool = False) -> Iterator[None]:
    """Let what is compiled inside rely on no more about dynamic sizes than Dynamo checks, once that is fixed.

    Arguments:
        fakes: inputs of what is compiled.
        is_late: it is fixed, though nothing says so any more.

    Raises:
        UnsupportedGraphError: the compiler asks for more, or this torch cannot tell.
    """
    sizes = [fake for fake in fakes if isinstance(fake, torch.SymInt)]
    if not sizes or not (is_late or sizes[0].node.shape_env.frozen):
        yield
        return
    shape_env = sizes[0].node.shape_env
    if not hasattr(shape_env, "error_on_new_guards"):
        raise UnsupportedGraphError(f"torch {torch.__version__} does not tell when code is for some dynamic sizes only")
    try:
        with shape_env.error_on_new_guards():
            yield
    except Exception as error:
        if "Guard attempted" not in str(error):
            raise
        raise UnsupportedGraphError(f"Inductor's code would be for some of the dynamic sizes only: {error}") from error


def compiler_complaint(error: BaseException) -> str | None:
    """Return a line about what keeps C++ code from being made, if `error` says so; None if not.

    There is no compiler, or it failed, or what it reads could not be written, as on a disk that is full or read-only.
    """
    seen: BaseException | None = error
    is_cause = True  # else it may have been dealt with before the error came
    while seen is not None:
        match seen:
            case exc.InvalidCxxCompiler():
                return str(seen)
            case exc.CppCompileError():
                lines = [line.strip() for line in seen.output.splitlines() if line.strip()] or ["no output"]
                told = next((line for line in lines if "error" in line.lower()), lines[-1])
                return f"{seen.cmd[0]} failed: {told}"
            case PermissionError(filename=str(name)) if name in _compilers():
                return f"{name} is not executable"
            case OSError() if is_cause:
                return f"{type(seen).__name__}: {seen}"
        cause = getattr(seen, "inner_exception", None) or seen.__cause__
        is_cause = is_cause and cause is not None
        seen = cause or seen.__context__
    return None


def _compilers() -> Sequence[Any]:
    """Return the names under which Inductor looks for a C++ compiler."""
    names = inductor_config.cpp.cxx
    return names if isinstance(names, list | tuple) else [names]


# ---------------------------------------------------------------------------------------------------------- bodies


def extract_body(graph_module: fx.GraphModule, body: Body) -> tuple[fx.GraphModule, list[Any]]:
    """Copy the nodes of `body` into a graph of their own; return it with the fake tensors and sizes that it takes."""
    originals = [node for node in graph_module.graph.nodes if node.op != "output"]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    fakes = []
    for number, value in enumerate(body.inputs):
        original = originals[value]
        placeholder = graph.placeholder(f"in{number}")
        placeholder.meta = {key: item for key, item in original.meta.items() if key in ("val", "tensor_meta")}
        copies[original] = placeholder
        fakes.append(original.meta["val"])
    for value in body.nodes:
        copies[originals[value]] = graph.node_copy(originals[value], lambda node: copies[node])
    output = graph.output(tuple(copies[originals[value]] for value in body.outputs))
    output.meta["user_visible_output_idxs"] = list(range(len(body.outputs)))
    return _LazyGraphModule(graph_module, graph), fakes


def compile_bodies(
    pieces: Sequence[tuple[str, fx.GraphModule, Sequence[Any]]],
    *,
    native: bool,
    units: int | None = None,
    left_out: int = 0,
    at: Callable[[str, int, int], None] = lambda phase, number, count: None,
    **kwargs: Any,
) -> tuple[CompiledBody, ...]:
    """Compile pieces with Inductor.

    Inductor lowers one piece after the other on this thread, while the C++ compiler works on earlier ones.

    Arguments:
        pieces: name for the log, graph that returns tensors only (consumed), a fake tensor or a size per input.
        native: try the C++ wrapper first; a piece that it cannot express is compiled with the Python wrapper.
        units: SMs that the code is for, where it is for a part of the device.
        left_out: SMs of the device that are not among them.
        at: called with what is being done to which of how many pieces.
        kwargs: what AOTAutograd passed for the whole graph, such as `is_backward` and `graph_id`.
    """
    shared = shared_kwargs(kwargs)
    if any(is_linear(node.target) for _, piece, _ in pieces for node in piece.graph.nodes):
        _lower_linear()
    with (
        _within_guards([fake for _, _, fakes in pieces for fake in fakes]),
        _compile_lock,
        _as_piece(units),
        _compiled_without(left_out),
    ):
        layouts = [_output_layouts(piece) for _, piece, _ in pieces]
        started = []
        for number, (_, piece, fakes) in enumerate(pieces, 1):
            if native:
                at("body", number, len(pieces))
            started.append(_start_native(piece, fakes, shared) if native else None)
        bodies = []
        for number, ((_, piece, fakes), compiled) in enumerate(zip(pieces, started, strict=True), 1):
            at("C++ code of body" if native else "body", number, len(pieces))
            bodies.append(_finish(compiled, piece, fakes, shared))
    for (name, _, _), body, layout in zip(pieces, bodies, layouts, strict=True):
        _check_layouts(f"segment {name}", body.function, layout)
    return tuple(
        replace(body, function=_with_numbers(body.function, fakes))
        for (_, _, fakes), body in zip(pieces, bodies, strict=True)
    )


@functools.cache
def _lower_linear() -> None:
    """Let Inductor call oneDNN for the operator of `matmul.py`, as it does for a layer whose weight is frozen.

    The lowering that Inductor has for that layer asks for a weight that is a constant, and by rows.
    """
    from torch._inductor import ir, mkldnn_ir

    class Linear(mkldnn_ir.LinearUnary):
        """oneDNN's call with a weight by rows or by columns."""

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


def interpret_bodies(pieces: Sequence[tuple[str, fx.GraphModule, Sequence[Any]]]) -> tuple[CompiledBody, ...]:
    """Return bodies that call the operators of pieces one by one, under the GIL; nothing is compiled."""
    return tuple(CompiledBody(function=_with_numbers(_interpret(piece), fakes)) for _, piece, fakes in pieces)


def interpret_whole(graph_module: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Return what calls the operators of a post-AOT graph one by one, as AOTAutograd calls a compiled graph."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides:
        context.output_strides.clear()  # a compiler that failed may have come so far
    report_output_strides(graph_module)
    run = _interpret(graph_module)
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Let what is called inside compute, on tensors that have memory: in the midst of a compile they would not."""
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def may_choose_library() -> bool:
    """Whether it is left to us who computes a matrix product on a CPU.

    There is oneDNN, and nobody wants the same numbers every time, or numbers of less precision. That Inductor is told
    to tune matrix products (`max_autotune`) does not matter: its C++ template is for constants, and weights are inputs.
    """
    mkldnn = torch.backends.mkldnn
    if not (mkldnn.is_available() and mkldnn.enabled):  # type: ignore[no-untyped-call]
        return False
    is_fixed = (
        torch.are_deterministic_algorithms_enabled()
        or mkldnn.deterministic
        or getattr(inductor_config, "deterministic", False)
    )
    is_full = mkldnn.matmul.fp32_precision in ("none", "ieee")  # type: ignore[attr-defined]
    return is_full and not is_fixed


def _interpret(piece: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    view_to_reshape(piece)  # type: ignore[no-untyped-call]  # an operator need not lay its result out as traced
    for node in piece.graph.nodes:
        node.target = _SEEDED.get(node.target, node.target)
    piece.graph.set_codegen(_BoxedCodeGen())
    function = fx.GraphModule(piece, piece.graph).forward

    def run(inputs: list[Any]) -> Sequence[Any]:
        # Operators of `torch.ops.prims` give gradients to what they make of one that has some, under `no_grad` too. And
        # an output that is a view of another one, in which `detach` leaves no trace, would get the gradient of that.
        inputs[:] = _detached(inputs)
        return _detached(function(inputs))

    return run


def _detached(values: Sequence[Any]) -> list[Any]:
    return [value.detach() if isinstance(value, torch.Tensor) else value for value in values]


def _draw(size: Sequence[int], seed: torch.Tensor, mode: str, **_: Any) -> torch.Tensor:
    generator = torch.Generator(seed.device).manual_seed(int(seed))
    drawn: torch.Tensor = getattr(torch, mode)(size, generator=generator, device=seed.device, dtype=torch.float32)
    return drawn


def _draw_integers(low: int, high: int, size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(seed.device).manual_seed(int(seed))
    return torch.randint(low, high, tuple(size), generator=generator, device=seed.device)


_SEEDED: Mapping[Any, Callable[..., torch.Tensor]] = {
    inductor_prims.random: _draw,
    inductor_prims.randint: _draw_integers,
}
"""Inductor's random operators draw the same again from the same seed when compiled, and forget the seed when called."""


def _with_numbers(function: Callable[[list[Any]], Sequence[Any]], fakes: Sequence[Any]) -> Callable[..., Any]:
    """Return `function` with tensors for its sizes; those are at the positions where `fakes` are symbolic integers."""
    numbers = [position for position, fake in enumerate(fakes) if isinstance(fake, torch.SymInt)]
    if not numbers:
        return function

    def call(inputs: list[Any]) -> Sequence[Any]:
        for position in numbers:
            inputs[position] = int(inputs[position])
        return function(inputs)

    return call


def shared_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of AOTAutograd's arguments for the whole graph that hold for a piece of it too."""
    return {key: kwargs[key] for key in ("is_backward", "is_inference", "graph_id") if key in kwargs}


_Layouts = list[tuple[tuple[Any, ...], tuple[Any, ...]] | None]
"""Shape and strides of outputs, sizes that are symbols among them; None for one that is no tensor."""


def _output_layouts(piece: fx.GraphModule) -> _Layouts:
    values = [node.meta["val"] if isinstance(node, fx.Node) else None for node in _outputs(piece)]
    return [None if value is None else (tuple(value.shape), tuple(value.stride())) for value in values]


def _check_layouts(name: str, function: Callable[..., Any], layouts: _Layouts) -> None:
    """Refuse code whose outputs do not lie as traced: the readers were compiled for that."""
    chosen = getattr(function, "output_strides", None) or [None] * len(layouts)
    for number, (layout, strides) in enumerate(zip(layouts, chosen, strict=True)):
        if layout is None or strides is None:
            continue
        shape, traced = layout
        differs = [not _is_same(t, s) for s, t, size in zip(strides, traced, shape, strict=True) if not _is_one(size)]
        if any(differs):
            raise UnsupportedGraphError(
                f"Inductor gave output {number} of {name} the strides {tuple(strides)} instead of {traced}"
            )


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size <= 1


def _is_same(traced: int | torch.SymInt, chosen: Any) -> bool:
    """Whether a stride is what Inductor says of it: a number, or an expression as text or as itself."""
    if isinstance(traced, torch.SymInt):
        if isinstance(chosen, str):
            chosen = traced.node.shape_env.deserialize_symexpr(chosen)
        expr = chosen.node.expr if isinstance(chosen, torch.SymInt) else chosen
        return bool(sympy.expand(traced.node.expr - expr) == 0)
    return str(chosen) == str(traced)


_CALLS_PYTHON = KeepsPython("it calls Python, or operators that may be written in Python", is_lost=False)


def _start_native(piece: fx.GraphModule, fakes: Sequence[torch.Tensor], shared: dict[str, Any]) -> Any:
    """Lower a copy of `piece` and start its C++ compiler; return why not where Python has to run it."""
    if has_custom_operator(piece) or any(map(resizes_storage, piece.graph.nodes)):
        return _CALLS_PYTHON
    try:
        with _native_code():
            compiled = compile_fx_inner(clone_graph(piece), list(fakes), cpp_wrapper=True, **shared)
        _let_go_of_module(compiled)
        return compiled
    except Exception as error:  # whatever stops the C++ wrapper, the Python wrapper may still do
        return _loss(error)


def _finish(started: Any, piece: fx.GraphModule, fakes: Sequence[torch.Tensor], shared: dict[str, Any]) -> CompiledBody:
    body = started if started is None or isinstance(started, KeepsPython) else _finish_native(started)
    if isinstance(body, CompiledBody):
        return body
    return replace(_compile_for_python(piece, fakes, shared), keeps_python=body)


def _finish_native(compiled: Any) -> CompiledBody | KeepsPython:
    """Wait for the C++ compiler; return why not where only Python can run the piece."""
    function = getattr(compiled, "current_callable", None)
    if function is None:  # a piece without any call is returned as plain Python
        return CompiledBody(function=compiled)
    lane_body = getattr(function, "lane_body", None)
    if lane_body is None:
        return _CALLS_PYTHON
    try:
        path, constants = lane_body()
    except Exception as error:  # the C++ compiler failed, which its caller learns only now
        return _loss(error)
    return _with_entry(path, tuple(constants), compiled)


def _loss(error: Exception) -> KeepsPython:
    lines = str(error).strip().splitlines() or [""]
    return KeepsPython(f"{type(error).__name__}: {lines[0]}", is_lost=True)


def _let_go_of_module(compiled: Any) -> None:
    """Keep the Python side of a native body only as long as the body; Inductor keeps every module it has loaded."""
    lane_body = getattr(getattr(compiled, "current_callable", None), "lane_body", None)
    if lane_body is None:
        return
    own = lane_body.__globals__  # functions keep it without the module
    PyCodeCache.modules[:] = [module for module in PyCodeCache.modules if vars(module) is not own]
    PyCodeCache.modules_no_attr.pop(own["__file__"], None)
    PyCodeCache.linemaps.pop(own["__file__"], None)
    named = sys.modules.get(own["__name__"])
    if named is not None and vars(named) is own:
        del sys.modules[own["__name__"]]


def _with_entry(path: str, constants: tuple[torch.Tensor, ...], function: Callable[..., Any]) -> CompiledBody:
    library = ctypes.CDLL(path)
    address = ctypes.cast(library.inductor_entry_impl, ctypes.c_void_p).value
    return CompiledBody(function=function, entry_address=address, constants=constants, library=library)


def _compile_for_python(piece: fx.GraphModule, fakes: Sequence[torch.Tensor], shared: dict[str, Any]) -> CompiledBody:
    with inductor_config.patch(_body_options()):
        return CompiledBody(function=compile_fx_inner(piece, list(fakes), **shared))


def has_custom_operator(graph_module: fx.GraphModule) -> bool:
    """Whether an operator, of graphs inside too, may be written in Python.

    The Python wrapper passes its exceptions on as themselves, and no key of a cache holds what it does.
    """
    graphs = (module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule))
    return any(_is_custom(node.target) for graph in graphs for node in graph.nodes)


def _is_custom(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])  # type: ignore[no-untyped-call]
    is_foreign = isinstance(target, torch._ops.OpOverload) and target.namespace not in TORCH_NAMESPACES
    return is_foreign and not is_linear(target)


def module_paths(graph_module: fx.GraphModule) -> str:
    """Return which modules the nodes of a Dynamo graph come from, as a text that is the same for the same ones."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in graph_module.graph.nodes)
    return repr([[path for path, _ in stack.values()] for stack in stacks])


@contextlib.contextmanager
def _native_code() -> Iterator[None]:
    """Let Inductor generate code of bodies that lanes can run without Python."""
    with inductor_config.patch(_body_options()), lane_wrapper():
        yield


def _body_options() -> dict[str, Any]:
    """Options that every body shares.

    Thread counts are the lane's business, not baked into the code. On a GPU one CUDA graph over all lanes is ours, and
    a reduction whose blocks wait for each other, as many as the device has SMs, would hang on a lane with fewer.
    """
    return {
        "cpp.dynamic_threads": True,
        "triton.cudagraphs": False,
        "triton.cooperative_reductions": False,
        "triton.force_cooperative_reductions": False,
    }


def clone_graph(piece: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the nodes; Inductor changes the graph that it compiles."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in piece.graph.nodes:
        copies[node] = graph.node_copy(node, lambda original: copies[original])
    return _LazyGraphModule(piece, graph)  # its code is made when it is asked for, and stays in `linecache` for ever


@contextlib.contextmanager
def _as_piece(units: int | None = None) -> Iterator[None]:
    """Hide what belongs to the whole graph, and keep what is made here apart from other code; hold the lock.

    See Note [pieces of a graph]. Inductor keeps the times of kernels that it chose among, and not on how many SMs they
    were measured; so those of a part of the device are neither looked up nor kept.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    strides = context.output_strides if context is not None else None
    donated = metadata.bw_donated_idxs if metadata is not None else None
    tag = f"{_CACHE_KEY_TAG}-{torch.get_num_threads()}" + (f"-on-{units}" if units is not None else "")
    try:
        if context is not None:
            context.output_strides = None
        if metadata is not None:
            metadata.bw_donated_idxs = None
        with (
            _right_scatters(),
            torch.compiler.config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
            functorch_config.patch(bundled_autograd_cache=False),
            inductor_config.patch({} if units is None else {"autotune_local_cache": False}),
        ):
            yield
    finally:
        if context is not None:
            context.output_strides = strides
        if metadata is not None:
            metadata.bw_donated_idxs = donated


# --------------------------------------------------------------------------------------------------------- bundles


_cache: contextvars.ContextVar[Cache] = contextvars.ContextVar("apollo_cache")
"""Where what AOTAutograd gives back now becomes code."""


_OUTPUT_CODE: Signatures = {
    (OutputCode, "__call__"): ("self, inputs",),
    (OutputCode, "prepare_for_serialization"): ("self",),
    (OutputCode, "post_compile"): ("self, example_inputs, constants, graph_kwargs",),
    (OutputCode, "set_triton_bundle"): ("self, triton_bundle",),
}


@functools.cache
def _is_known_to_cache() -> bool:
    try:
        check_signatures(_OUTPUT_CODE)
    except UnsupportedGraphError as error:
        _logger.warning("graphs are not kept for the next process: %s", error)
        return False
    return True


class CachedGraph(OutputCode):
    """A compiled graph as AOTAutograd's cache knows it: callable, and data while it is there. See Note [bundles]."""

    def __init__(self, run: Run, bundle: Bundle | None) -> None:
        """Stand for `run`; without `bundle` it cannot be kept."""
        self._boxed_call = True  # AOTAutograd looks for it in `__dict__`
        self.run: Run | None = run
        self.bundle = bundle
        self.data: Any = None

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run the graph."""
        return self.run(inputs)  # type: ignore[misc, arg-type]

    def prepare_for_serialization(self) -> None:
        """Become data; this is a copy, which the cache made.

        Raises:
            BypassAOTAutogradCache: this graph is not to be kept.
        """
        if self.bundle is None:
            raise BypassAOTAutogradCache("apollo_compile does not keep a graph of this kind")
        try:
            self.data = self.bundle()
        except Exception as error:  # the next process compiles as this one did
            raise BypassAOTAutogradCache(f"{type(error).__name__}: {error}") from error
        self.run = self.bundle = None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """Become code again.

        Raises:
            FXGraphCacheMiss: it cannot; AOTAutograd compiles the whole anew.
        """
        try:
            self.run, self.data = _cache.get().unbundle(self.data), None
        except Exception as error:
            raise FXGraphCacheMiss(f"{type(error).__name__}: {error}") from error

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Bodies keep their kernels themselves."""


@dataclass(frozen=True, slots=True)
class BundledBody:
    """A body as data."""

    code: CompiledFxGraph
    library: str | None
    """Path of what lanes run without Python; None where they need Python."""
    constants: tuple[torch.Tensor, ...]
    keeps_python: KeepsPython | None


def bundle_body(body: CompiledBody) -> BundledBody:
    """Return a compiled body as data.

    Raises:
        UnsupportedGraphError: it is not code of Inductor.
    """
    path = None if body.library is None else body.library._name
    code = bundle_code(body.function)
    return BundledBody(code=code, library=path, constants=body.constants, keeps_python=body.keeps_python)


def unbundle_body(bundled: BundledBody) -> CompiledBody:
    """Return a body that can run. Where its library is still there, no code is loaded that only Python would call.

    Raises:
        UnsupportedGraphError: it compiles no longer.
    """
    path = bundled.library
    if path is not None and Path(path).exists():
        return _with_entry(path, bundled.constants, _LoadedLater(bundled.code))
    if path is None:
        return CompiledBody(function=unbundle_code(bundled.code), keeps_python=bundled.keeps_python)
    with _compile_lock, _native_code():
        body = _finish_native(_load(bundled.code))
    if isinstance(body, KeepsPython):
        raise UnsupportedGraphError(f"the code of a segment compiles no longer: {body.reason}")
    return body


class _LoadedLater:
    """The way to a native body for threads with Python, which hardly ever take it."""

    def __init__(self, code: CompiledFxGraph) -> None:
        self._code = code
        self._lock = threading.Lock()
        self._function: Run | None = None

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        with self._lock:
            if self._function is None:
                with _compile_lock, _native_code():
                    self._function = _load(self._code)
        return self._function(inputs)


def bundle_code(compiled: Any) -> CompiledFxGraph:
    """Return code of Inductor as data.

    Raises:
        UnsupportedGraphError: it is not code of Inductor.
    """
    if not isinstance(compiled, CompiledFxGraph) or set(compiled.device_types) - {"cpu"}:
        raise UnsupportedGraphError(f"{type(compiled).__name__} is not code of Inductor for a CPU")
    code = copy.copy(compiled)
    code.prepare_for_serialization()
    return code


def unbundle_code(code: CompiledFxGraph) -> Run:
    """Return code of Inductor's Python wrapper that can run."""
    with _compile_lock, inductor_config.patch(_body_options()):
        return _load(code)


def _load(code: CompiledFxGraph) -> Run:
    constants = CompiledFxGraphConstants()
    loaded, _ = FxGraphCache.cache_hit_post_compile(code, {}, constants)
    if loaded is None:
        raise UnsupportedGraphError("code of an earlier run cannot be loaded")
    kwargs: Any = {"cudagraphs": BoxedBool(False), "is_backward": code.fx_kwargs["is_backward"]}
    loaded.post_compile([], constants, kwargs)
    _let_go_of_module(loaded)
    return loaded


def bundle_graph(graph_module: fx.GraphModule) -> bytes:
    """Return a post-AOT graph as data.

    Raises:
        UnsupportedGraphError: it holds more than operators.
    """
    if graph_module.graph.find_nodes(op="get_attr"):
        raise UnsupportedGraphError("a graph with constants is not kept")
    return GraphPickler.dumps(graph_module, Options(ops_filter=None))


def unbundle_graph(data: bytes) -> fx.GraphModule:
    """Return the graph, with values that are traced anew."""
    graph_module: Any = GraphPickler.loads(data, FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()))
    return graph_module  # type: ignore[no-any-return]


def report_output_strides(graph_module: fx.GraphModule) -> None:
    """Fill the tracing context with the strides of the graph's outputs, which every body keeps as traced.

    Inductor does it, as for code of its own: whether strides of dynamic sizes are told as expressions or as numbers
    depends on the release of torch, and the wrong ones make the backward one for these sizes only.
    """
    values = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in _outputs(graph_module)]
    write = PythonPrinter().doprint
    strides = [tuple(map(write, _exprs(v.stride()))) if isinstance(v, torch.Tensor) else None for v in values]
    inputs = [node.meta.get("val") for node in graph_module.graph.find_nodes(op="placeholder")]
    compiled: Any = SimpleNamespace(output_strides=strides)
    set_tracing_context_output_strides(inputs, compiled)


def _outputs(graph_module: fx.GraphModule) -> Sequence[Any]:
    return graph_module.graph.output_node().args[0]  # type: ignore[return-value]


# -------------------------------------------------------------------------------------------------- tensor handles


@functools.cache
def tensor_api() -> tuple[int, int]:
    """Return the addresses of torch's C functions that clone and delete a tensor handle."""
    return _address("aoti_torch_new_tensor_handle"), _address("aoti_torch_delete_tensor_object")


@functools.cache
def error_text_address() -> int:
    """Return the address of torch's C function that gives the text of a thread's last error; 0 in older releases."""
    return _address("torch_exception_get_what_without_backtrace", default=0)


def _address(name: str, default: int | None = None) -> int:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    function = getattr(library, name, None)
    if function is None:
        if default is None:
            raise UnsupportedGraphError(f"torch {torch.__version__} has no function {name}; lanes need torch 2.11 on")
        return default
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def to_handles(tensors: list[torch.Tensor]) -> list[Any]:
    """Return one owned handle per tensor."""
    return torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)


def from_handles(handles: list[Any]) -> list[torch.Tensor]:
    """Return the tensors behind owned handles, which are used up."""
    return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(handles)


def prepare_lane_thread(num_threads: int) -> None:
    """Set what a new thread does not inherit: its thread quota for OpenMP and MKL, and no autograd."""
    torch.get_num_threads()  # the first use on a thread sets the process-wide default: let it happen before, not after
    torch.set_num_threads(num_threads)
    torch._C._set_grad_enabled(False)
