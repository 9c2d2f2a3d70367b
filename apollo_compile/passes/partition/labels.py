"""Labels of clusters by layer, their groups by label and level, updates, ends and weight gradients."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from apollo_compile.ir import Capture, KernelKind, Node, NodeKind, Role
from apollo_compile.passes.partition.clusters import Clusters

PLACES = ("pre", "mid", "post")
"""Labels of nodes that belong to no module: before all modules, between them, after them."""


UPDATE = ":update"
"""Suffix of the labels of operations on the gradients of a layer."""


CASTS = ":casts"
"""Suffix of the labels of casts of a layer's weights."""


def layer_of(module: str) -> str:
    """Return the path of the layer that a module belongs to: up to and including its first number, else two names.

    >>> layer_of("text_model.encoder.layers.3.mlp.fc1")
    'text_model.encoder.layers.3'
    >>> layer_of("vision_model.embeddings.patch_embedding")
    'vision_model.embeddings'
    """
    parts = module.split(".") if module else []
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ".".join(parts[:2])


def label_clusters(capture: Capture, clusters: Clusters) -> list[str]:
    """Return the layer of every cluster."""
    return [layer_of(capture.nodes[members[0]].module) for members in clusters.members]


def label_updates(clusters: Clusters, labels: list[str]) -> tuple[list[str], list[bool]]:
    """Label the updates of every layer of a whole step, and return labels and whether a cluster belongs to updates.

    An update follows the backward of a single layer, for any micro-batches, and no layer waits for it.
    """
    layers: list[set[str]] = []
    """Per cluster, the nearest layers on the paths that lead to it."""
    follows_backward: list[bool] = []
    for cluster, before in enumerate(clusters.predecessors):
        follows_backward.append(clusters.are_backward[cluster] or any(follows_backward[other] for other in before))
        layers.append({labels[cluster]} if labels[cluster] else set().union(*(layers[other] for other in before)))
    successors = _successors(clusters.predecessors)
    is_awaited = [False] * len(labels)
    for cluster in reversed(range(len(labels))):
        is_awaited[cluster] = any(labels[other] or is_awaited[other] for other in successors[cluster])
    found = [
        not label and not awaited and follows and len(only) == 1
        for label, awaited, follows, only in zip(labels, is_awaited, follows_backward, layers, strict=True)
    ]
    named = [f"{min(only)}{UPDATE}" if each else label for label, each, only in zip(labels, found, layers, strict=True)]
    return named, found


def find_ends(clusters: Clusters, weight: list[float], limit: float) -> list[bool]:
    """Return whether a cluster is at an end of the graph: with the work before or after it, it weighs below `limit`.

    A backward cluster of a step with little work before it is no end: it stays with the backward that reads it.
    """

    def add_up(neighbours: Sequence[Iterable[int]], order: Iterable[int]) -> list[float]:
        total = list(weight)  # a cluster that is reached on several paths counts once for each
        for cluster in order:
            total[cluster] += sum(total[other] for other in neighbours[cluster])
        return total

    order = range(len(weight))
    before = add_up(clusters.predecessors, order)
    after = add_up(_successors(clusters.predecessors), reversed(order))
    first = [total < limit and not backward for total, backward in zip(before, clusters.are_backward, strict=True)]
    return [is_first or total < limit for is_first, total in zip(first, after, strict=True)]


def spread_labels(clusters: Clusters, labels: list[str], is_end: list[bool]) -> list[str]:
    """Give clusters without a label the label of the only labelled piece next to them: on both sides, before, or after.

    Pieces are counted, not labels: the sum of the gradients of a layer that is used twice belongs to neither use, or it
    would make the two uses dependent. A cluster that follows several uses of one layer, and that nothing waits for, is
    labelled as an update. Pieces at an end of the graph count where there are no others.
    """
    successors = _successors(clusters.predecessors)
    keys = _keys(clusters, labels)
    piece = _connect(clusters, keys, is_end)
    ends: dict[Hashable, int] = {}
    piece = [ends.setdefault(keys[first], first) if is_end[first] else first for first in piece]

    def nearest(neighbours: Sequence[Iterable[int]], cluster: int) -> set[int]:
        found = _nearest(neighbours, labels, piece, cluster)
        return {first for first in found if not is_end[first]} or found

    spread = []
    for cluster, label in enumerate(labels):
        if not label:
            before, after = nearest(clusters.predecessors, cluster), nearest(successors, cluster)
            only = next((around for around in (before | after, before, after) if len(around) == 1), None)
            place = PLACES[0 if not before else 2 if not after else 1]
            label = place if only is None else labels[only.pop()]
            if only is None and not after and len(layers := {labels[first] for first in before}) == 1:
                label = f"{layers.pop()}{UPDATE}"
        spread.append(label)
    return spread


def _nearest(neighbours: Sequence[Iterable[int]], labels: list[str], piece: list[int], cluster: int) -> set[int]:
    """Return the nearest labelled pieces on the paths from `cluster` along `neighbours`."""
    found: set[int] = set()
    seen = {cluster}
    stack = list(neighbours[cluster])
    while stack:
        other = stack.pop()
        if other in seen:
            continue
        seen.add(other)
        if labels[other]:
            found.add(piece[other])
        else:
            stack.extend(neighbours[other])
    return found


def _connect(clusters: Clusters, keys: Sequence[Hashable], is_end: list[bool]) -> list[int]:
    """Return for every cluster the first cluster of its piece, a component connected by edges between equal keys.

    Clusters at an end of the graph connect nothing; each is a piece.
    """
    root = list(range(len(keys)))

    def find(cluster: int) -> int:
        while root[cluster] != cluster:
            cluster = root[cluster]
        return cluster

    for cluster, before in enumerate(clusters.predecessors):
        for other in before:
            if keys[other] == keys[cluster] and not is_end[other] and not is_end[cluster]:
                first, second = sorted((find(cluster), find(other)))
                root[second] = first
    return [find(cluster) for cluster in range(len(keys))]


def _successors(predecessors: Sequence[Iterable[int]]) -> list[set[int]]:
    successors: list[set[int]] = [set() for _ in predecessors]
    for cluster, before in enumerate(predecessors):
        for other in before:
            successors[other].add(cluster)
    return successors


def group_by_level(clusters: Clusters, labels: list[str], is_update: list[bool], is_end: list[bool]) -> list[int]:
    """Return the group of every cluster: connected clusters of one label and one level, forward and backward apart.

    A cluster's level is the number of label switches on the longest path to it. A backward cluster that reads values of
    the forward only, such as a mask, moves up to the level of its users, or it would be computed in the forward and
    kept. Updates need not be connected.
    """
    keys = _keys(clusters, labels)
    level: list[int] = []
    for cluster, before in enumerate(clusters.predecessors):
        level.append(max((level[other] + (keys[other] != keys[cluster]) for other in before), default=0))
    for cluster, after in reversed(list(enumerate(_successors(clusters.predecessors)))):
        if clusters.are_backward[cluster] and after and all(keys[other] == keys[cluster] for other in after):
            level[cluster] = min(level[other] for other in after)
    at_level: list[Hashable] = list(zip(keys, level, strict=True))
    connected = _connect(clusters, at_level, is_end)
    return number(key if loose else piece for key, loose, piece in zip(at_level, is_update, connected, strict=True))


def _keys(clusters: Clusters, labels: list[str]) -> list[Hashable]:
    """Return the labels, distinct for forward and backward."""
    return list(zip(labels, clusters.are_backward, strict=True))


def find_weight_casts(capture: Capture, clusters: Clusters) -> list[bool]:
    """Return for every cluster whether it makes fewer bytes of a parameter alone, as autocast does for matmuls."""
    nodes = capture.nodes

    def is_cast(node: Node) -> bool:
        given = [nodes[value] for value in node.inputs if node.kind is NodeKind.COMPUTE and not node.keeps_order]
        return len(given) == 1 and given[0].is_static and node.num_bytes < given[0].num_bytes

    return [is_cast(nodes[members[0]]) for members in clusters.members]


# ------------------------------------------------------------------------------------------------ weight gradients


def find_weight_gradients(
    capture: Capture,
    clusters: Clusters,
    labels: list[str],
    groups: list[int],
    is_update: list[bool],
    is_end: list[bool],
) -> list[bool]:
    """Return for every cluster whether it belongs to the weight gradients of its layer, as far as other matmuls remain.

    A matmul is a weight gradient if no other matmul and no other group depends on it, updates aside. Its successors in
    its group belong to it, and so do predecessors that nothing else needs.
    """
    successors, order = _successors(clusters.predecessors), range(len(groups))
    parts = ([part.kind for node in members for part in capture.nodes[node].work.parts] for members in clusters.members)
    is_matmul = [KernelKind.MATMUL in kinds for kinds in parts]
    may_be = [capture.role is Role.BACKWARD or backward for backward in clusters.are_backward]
    stays_in_group, has_no_later_matmul, found = [False] * len(groups), [False] * len(groups), [False] * len(groups)
    for cluster in reversed(order):
        after = successors[cluster]
        stays_in_group[cluster] = all(
            is_update[other] or (stays_in_group[other] and (is_end[other] or groups[other] == groups[cluster]))
            for other in after
        )
        has_no_later_matmul[cluster] = all(has_no_later_matmul[other] and not is_matmul[other] for other in after)
        is_last = stays_in_group[cluster] and has_no_later_matmul[cluster]
        found[cluster] = is_matmul[cluster] and is_last and may_be[cluster] and not is_update[cluster]
    for cluster in order:
        follows = any(found[other] for other in clusters.predecessors[cluster])
        found[cluster] = found[cluster] or (follows and not is_update[cluster])
    for cluster in reversed(order):
        has_successors = bool(successors[cluster])
        is_for_them = has_successors and stays_in_group[cluster] and all(found[other] for other in successors[cluster])
        found[cluster] = found[cluster] or (is_for_them and not is_matmul[cluster])
    keys = _keys(clusters, labels)
    keep_matmuls = {keys[cluster] for cluster in order if is_matmul[cluster] and not found[cluster]}
    return [found[cluster] and keys[cluster] in keep_matmuls for cluster in order]


def group_apart(clusters: Clusters, labels: list[str], is_apart: list[bool]) -> list[int]:
    """Return the group of every cluster that is apart: those of one label that read each other through no other label.

    The first layer of an encoder shows why labels do not suffice: its norm reads the sum of tokens and positions, which
    is the encoder's, and the gradient of the positions, which is the encoder's too, comes from that norm.
    """
    level: list[int] = []
    for cluster, before in enumerate(clusters.predecessors):
        below = (other for other in before if is_apart[other] or level[other])
        level.append(max((level[other] + (labels[other] != labels[cluster]) for other in below), default=0))
    return number(zip(labels, level, strict=True))


def number(keys: Iterable[Hashable]) -> list[int]:
    """Number the distinct keys by first occurrence, and return the number of every key."""
    number_by_key: dict[Hashable, int] = {}
    return [number_by_key.setdefault(key, len(number_by_key)) for key in keys]
