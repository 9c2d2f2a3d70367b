"""Fragments: a model that falls into many Dynamo graphs, why, and which of its modules to compile by themselves.

Every graph break ends a graph, and Dynamo then compiles the functions that were called around it one by one, with
their own breaks. A model that reads sizes from tensors in every layer becomes dozens of graphs. Each of them takes
seconds to compile, and nothing overlaps between them. Modules in which nothing breaks are better compiled alone.

A module is whole if no break was met in the code of its class, nor in that of a module inside it. Where one instance of
a class breaks, all of them count as broken.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from torch import nn

from apollo_compile.ir import GraphBreak

MANY = 8
"""Graphs up to which nothing is said: seven are common where the first forward still has to install its hooks."""

_MIN_SHARE = 0.01
"""Of all parameters, from which a module with a list of layers inside is worth being named."""

_MOST = 0.3
"""The same of a module without such a list."""

_MAX_NAMES = 3

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Their own code only reaches the modules inside, which count by themselves."""


def describe_fragments(
    run: Callable[..., Any] | None, num_graphs: int, breaks: Sequence[GraphBreak], *, is_over: bool
) -> str:
    """Return in one line how many graphs a call of `run` became, mostly why, and what to compile instead.

    Arguments:
        run: the module or function that was compiled; None if it is not known.
        num_graphs: number of Dynamo graphs.
        breaks: what ended them.
        is_over: whether the call is over; otherwise more graphs may follow.

    Returns:
        The line, which is empty for few graphs.
    """
    if num_graphs <= MANY or not breaks:
        return ""
    places = Counter((found.file, found.line) for found in breaks)
    (place, count), *_ = places.most_common(1)
    main = next(found for found in breaks if (found.file, found.line) == place)
    how_many = f"{num_graphs} graphs" if is_over else f"more than {MANY} graphs"
    remedy = f"; try: {main.remedies[0]}" if main.remedies else ""
    return (
        f"{_name_of(run)} falls into {how_many}, between which nothing overlaps: {count} of {len(breaks)} graph breaks "
        f"{'is' if count == 1 else 'are'} at {main.file}:{main.line} in {main.function}: {main.code} ({main.problem})"
        f"{_advice(_modules_of(run), breaks, so_far='' if is_over else ' so far') or remedy}"
    )


def _advice(modules: Mapping[str, nn.Module], breaks: Sequence[GraphBreak], *, so_far: str) -> str:
    """Return which modules to compile instead; empty if none of them is whole and has a share of the parameters."""
    total = max(1, sum(map(_size, modules.values())))
    broken = _broken_classes(modules.values(), breaks)
    whole = dict(each for top in modules.items() for each in _whole_modules(*top, broken))
    shares = {
        name: share
        for name, module in whole.items()
        for has_layers in [any(isinstance(inner, nn.ModuleList) for inner in module.modules())]
        if (share := _size(module) / total) >= (_MIN_SHARE if has_layers else _MOST)
    }
    named = sorted(shares, key=lambda name: -shares[name])[:_MAX_NAMES]
    if not named:
        return ""
    listed = f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else named[0]
    share = sum(shares[name] for name in named)
    return f"; compile {listed} instead, where no graph broke{so_far} ({share:.0%} of the parameters)"


def _whole_modules(name: str, module: nn.Module, broken: frozenset[type]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest modules in `module` that are whole and have modules inside; a list is `each of` its name."""
    if any(not broken.isdisjoint(type(inner).__mro__) for inner in module.modules()):
        for child, inner in module.named_children():
            yield from _whole_modules(f"{name}.{child}".lstrip("."), inner, broken)
        return
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if any(list(part.children()) for part in (module.children() if is_list else [module])):
        yield f"each of {name}" if is_list else name, module


def _broken_classes(modules: Collection[nn.Module], breaks: Sequence[GraphBreak]) -> frozenset[type]:
    """Return the classes of modules whose code a break is in, or leads to."""
    reached = {place for found in breaks for place in found.callers}
    inside = [type(inner) for module in modules for inner in module.modules()]
    classes = {cls for kind in inside for cls in kind.__mro__ if issubclass(cls, nn.Module)}
    return frozenset(cls for cls in classes - {nn.Module, *_CONTAINERS} if not reached.isdisjoint(_lines_of(cls)))


def _lines_of(cls: type) -> Iterator[str]:
    """Yield every line of the functions of a class, decorated or not, as `file:line`."""
    for member in vars(cls).values():
        function = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))
        if inspect.isfunction(function):
            yield from _lines_of_code(function.__code__)


def _lines_of_code(code: CodeType) -> Iterator[str]:
    yield from (f"{code.co_filename}:{line}" for _, _, line in code.co_lines() if line is not None)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _lines_of_code(inner)


def _modules_of(run: Callable[..., Any] | None) -> dict[str, nn.Module]:
    """Return the modules that a module calls, or that a function finds by a name, by that name."""
    if isinstance(run, nn.Module):
        return dict(run.named_children())
    if not inspect.isfunction(run):
        return {}
    known = inspect.getclosurevars(run)
    found = {**known.globals, **known.nonlocals}
    return {name: value for name, value in found.items() if isinstance(value, nn.Module)}


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _name_of(run: Callable[..., Any] | None) -> str:
    if run is None:
        return "the model"
    return type(run).__name__ if isinstance(run, nn.Module) else getattr(run, "__name__", type(run).__name__)
