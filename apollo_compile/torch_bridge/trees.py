"""Nested containers of tensors, as torch flattens them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import _pytree as pytree


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and mappings, in order."""
    return list(pytree.tree_leaves(tree))


def flatten(tree: Any) -> tuple[list[Any], str, Callable[[Sequence[Any]], Any]]:
    """Return the leaves of a tree, its structure as a text, and a function that builds the tree from other leaves."""
    leaves, structure = pytree.tree_flatten(tree)
    return leaves, str(structure), lambda others: pytree.tree_unflatten(list(others), structure)
