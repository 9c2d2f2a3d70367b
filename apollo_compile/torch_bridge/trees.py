"""Nested containers of tensors, as torch flattens them."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree


def leaves_of(tree: Any, kind: type | tuple[type, ...] = object) -> list[Any]:
    """Return the leaves of a kind in nested lists, tuples and mappings, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, kind)]


def count_tensors(tree: Any) -> int:
    """Return the number of different tensors in a tree."""
    return len(set(map(id, leaves_of(tree, torch.Tensor))))


def structure_of(tree: Any) -> str:
    """Return the structure of nested lists, tuples and mappings."""
    return str(pytree.tree_structure(tree))


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return a tree with the results of a function for all tensors; Dynamo traces it."""
    return pytree.tree_map_only(torch.Tensor, function, tree)


def map_leaves(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree with the results of a function for all leaves of a kind."""
    return pytree.tree_map_only(kind, function, tree)


def map_together(function: Callable[..., Any], trees: Sequence[Any]) -> Any:
    """Return a tree with the results of a function for the leaves of trees of one structure."""
    return pytree.tree_map(function, *trees)


def flatten_objects(tree: Any) -> tuple[list[Any], str, Callable[[Sequence[Any]], Any]]:
    """Return the leaves of a tree, its structure as a text, and a function that builds the tree from other leaves.

    Objects with named parts are trees, too: data classes, namespaces, subclasses of dictionaries and lists, and what is
    like a dictionary, as batches of Hugging Face's tokenizers are.
    """
    leaves, structure = pytree.tree_flatten(tree)
    named = [{} if isinstance(leaf, torch.Tensor) else parts_of(leaf) for leaf in leaves]
    if not any(named):
        return leaves, str(structure), lambda others: pytree.tree_unflatten(list(others), structure)
    names = list(map(list, named))
    parts = [list(own.values()) if own else [leaf] for leaf, own in zip(leaves, named, strict=True)]
    inner, inner_structure, build = flatten_objects(parts)

    def build_all(others: Sequence[Any]) -> Any:
        built = zip(leaves, names, build(others), strict=True)
        return pytree.tree_unflatten(
            [_with_parts(leaf, own, each) if own else each[0] for leaf, own, each in built], structure
        )

    return inner, f"{structure} of {list(map(type, leaves))} with {names}: {inner_structure}", build_all


def kind_of_tree(tree: Any) -> Any:
    """Return structure and types of a tree, with shapes and dtypes of tensors; fast for dictionaries and lists."""
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.dtype, tree.requires_grad
    if (kind := type(tree)) is dict:
        return tuple(tree), tuple(map(kind_of_tree, tree.values()))
    if kind is list or kind is tuple:
        return kind, tuple(map(kind_of_tree, tree))
    leaves, structure, _ = flatten_objects(tree)
    return kind if leaves and leaves[0] is tree else (structure, tuple(map(kind_of_tree, leaves)))


def parts_of(value: Any) -> Mapping[Any, Any]:
    """Return the parts of an object by their names, keys or places; none of what is no tree."""
    if isinstance(value, dict | UserDict | SimpleNamespace):
        return vars(value) if isinstance(value, SimpleNamespace) else dict(value)
    if isinstance(value, list):
        return dict(enumerate(value))
    is_data = is_dataclass(value) and not isinstance(value, type)
    return {each.name: getattr(value, each.name) for each in fields(value)} if is_data else {}


def _with_parts(value: Any, names: Sequence[Any], parts: Sequence[Any]) -> Any:
    """Return a copy of an object with other parts."""
    copied = copy.copy(value)
    has_keys, attributes = isinstance(copied, dict | list | UserDict), getattr(copied, "__dict__", {})
    for name, part in zip(names, parts, strict=True):
        if not has_keys or (name in attributes and attributes[name] is copied[name]):  # keys may be attributes, too
            object.__setattr__(copied, name, part)  # it may be frozen
        if has_keys:
            copied[name] = part
    return copied


def are_equal(one: Any, other: Any) -> bool:
    """Return whether tensors of two trees are equal but for the order of sums."""
    pairs = [leaves_of(tree, torch.Tensor) for tree in (one, other)]
    return len(pairs[0]) == len(pairs[1]) and all(
        a.shape == b.shape
        and torch.allclose(a, b, rtol=0, atol=torch.finfo(a.dtype).eps ** 0.5 * max(1e-30, b.abs().max().item()))
        if a.is_floating_point()
        else torch.equal(a, b)
        for a, b in zip(*pairs, strict=True)
    )
