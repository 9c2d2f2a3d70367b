"""Estimated time of a training step on several devices, split in all ways: Cells.

    cells_of(times_of, device, count, batch) -> [Cell]

A Cell fixes a number of devices and of pipeline stages, and holds the fastest of its data x tensor parallel splits that
fits the memory. The idea and the name are those of Crius (Arena, arXiv 2403.16125). A model is a chain of layers with
times for one micro-batch, `ModelTimes`. The step is the sum of

    compute     the micro-batches of the slowest stage; t-fold tensor parallelism divides products and attention by t
    bubbles     one forward one backward: the stages before the slowest one fill up, those after it drain
    tensors     all-reduces of activations, one per two matrix products
    transfers   activations, and their gradients, from stage to stage
    gradients   an all-reduce of every bucket over the replicas; on GPUs, only what the backward cannot hide
    update      Adam: gradient and two moments are read, two moments and the weight are read and written

Memory per device: weight, gradient and two moments, the activations of the micro-batches in flight, and the largest
workspace.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from apollo_compile.cost_model.collectives import Link, all_reduce_seconds, bucket_bytes, send_seconds

COPIES = 4
"""Weight, gradient and two moments."""

UPDATE_TRAFFIC = 7
"""Adam reads the four copies, and writes three."""

BUCKET_BYTES = 25 * 2**20
"""Bytes that DistributedDataParallel reduces at once; the last bucket is final after the backward has ended."""

MICROBATCHES_PER_STAGE = (1, 2, 4)
"""Numbers of micro-batches per stage that are tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A part of a model on one device, for one micro-batch."""

    name: str
    forward_s: float
    backward_s: float
    divisible: float
    """Share of the time in products and attention, which tensor parallelism divides, 0 to 1."""
    products: int
    """Matrix products of the forward."""
    weight_bytes: int
    """Bytes of trained parameters."""
    frozen_bytes: int
    """Bytes of the other parameters."""
    activation_bytes: int
    """Largest output of the forward."""
    saved_bytes: int
    """Bytes that the forward keeps for the backward."""
    cut_bytes: int
    """Bytes that cross to the next stage if the pipeline is cut after this layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTimes:
    """A model on one device, for one micro-batch."""

    layers: tuple[Layer, ...]
    memory_share: float
    """Share of the time spent waiting for memory, 0 to 1."""
    launch_share: float
    """Share of the time spent on fixed costs, 0 to 1."""
    workspace_bytes: int
    lanes_gain: float = 1.0
    """How many times faster lanes make the whole model on one device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A kind of device, and how its devices are connected."""

    name: str
    error: float
    """Relative error of its times."""
    memory_bytes: int | None
    """None is no limit."""
    per_node: int
    link: Link
    """Between devices of a node."""
    node_link: Link
    """Between nodes, per device."""
    link_error: float
    """Relative error of communication."""
    hides_gradients: bool
    """Whether gradients are reduced while the backward goes on; cores of a CPU have only one of both to do."""
    update_bytes_per_s: float
    """Rate of the optimizer."""

    def link_of(self, ranks: int) -> Link:
        """Return the slowest link of a ring of `ranks` devices."""
        return self.link if ranks <= self.per_node else self.node_link


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A number of devices and of pipeline stages, and the best way to train on them."""

    device: str
    devices: int
    data: int
    tensor: int
    stages: int
    microbatches: int
    step_s: float
    low_s: float
    """Lower end of the error band."""
    high_s: float
    memory_bytes: int
    """Per device."""
    fits: bool
    """Whether that is within the device's memory."""
    bound: str
    """The largest part of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Cells of one model, from `apollo estimate`."""

    name: str
    batch: int
    """Samples of a step, over all devices."""
    cells: tuple[Cell, ...]
    sources: Mapping[str, str]
    """Sources of numbers, by device."""


TimesOf = Callable[[int], ModelTimes | None]
"""Times of a model by the samples of a micro-batch; None where it cannot have so many."""


def cells_of(times_of: TimesOf, device: Device, count: int, batch: int, max_tensor: int | None = None) -> list[Cell]:
    """Return a Cell of `count` devices for every number of stages that can divide the layers and the batch.

    Tensor parallelism is limited to a node, and to `max_tensor` devices.
    """
    max_tensor = device.per_node if max_tensor is None else min(device.per_node, max_tensor)
    found = []
    for stages in _divisors(count):
        ways = [
            _estimate(times, device, data, tensor, stages, microbatches)
            for data in _divisors(count // stages)
            if (tensor := count // stages // data) <= max_tensor and batch % data == 0
            for microbatches in _microbatches(batch // data, stages)
            if (times := times_of(batch // data // microbatches)) and stages <= len(times.layers)
        ]
        if ways:
            found.append(min(ways, key=lambda cell: (not cell.fits, cell.step_s)))
    return found


def _divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]


def _microbatches(local_batch: int, stages: int) -> list[int]:
    if stages == 1:
        return [1]
    return [stages * factor for factor in MICROBATCHES_PER_STAGE if local_batch % (stages * factor) == 0]


def _estimate(times: ModelTimes, device: Device, data: int, tensor: int, stages: int, microbatches: int) -> Cell:
    parts = list(split_layers(times.layers, stages))
    link = device.link_of(data * tensor * stages)
    on_lanes = times.lanes_gain if stages == tensor == 1 else 1.0
    compute = [sum(map(_both, part)) for part in parts]
    split = [
        sum(_both(layer) * (1 - layer.divisible * (1 - 1 / tensor)) for layer in part) / on_lanes for part in parts
    ]
    reduced = [2 * sum(_tensor_seconds(layer, tensor, device) for layer in part) for part in parts]
    whole = [a + b for a, b in zip(split, reduced, strict=True)]
    slowest = max(range(stages), key=whole.__getitem__)
    weights = [sum(layer.weight_bytes for layer in part) / tensor for part in parts]
    backward_s = microbatches * sum(layer.backward_s for layer in parts[slowest]) * split[slowest] / compute[slowest]
    transfers = [send_seconds(part[-1].cut_bytes / tensor, link) for part in parts[:-1]]
    spent = {
        "compute": microbatches * split[slowest],
        "bubbles": sum(whole) - whole[slowest],
        "tensor parallel sums": microbatches * reduced[slowest],
        "transfers": 2 * sum(transfers) + 2 * (microbatches - 1) * max(transfers, default=0.0),
        "gradient sums": _gradient_seconds(max(weights), data, device, link, backward_s),
        "update": max(weights) * UPDATE_TRAFFIC / device.update_bytes_per_s,
    }
    step_s = sum(spent.values())
    talk_s = spent["tensor parallel sums"] + spent["transfers"] + spent["gradient sums"]
    error_s = device.error * (step_s - talk_s) + device.link_error * talk_s
    live = [min(microbatches, stages - place) for place in range(stages)]
    memory = max(
        COPIES * weight + sum(layer.frozen_bytes + layer.saved_bytes * count for layer in part) / tensor
        for weight, part, count in zip(weights, parts, live, strict=True)
    )
    num_bytes = round(memory + times.workspace_bytes / tensor)
    return Cell(
        device=device.name,
        devices=data * tensor * stages,
        data=data,
        tensor=tensor,
        stages=stages,
        microbatches=microbatches,
        step_s=step_s,
        low_s=step_s - error_s,
        high_s=step_s + error_s,
        memory_bytes=num_bytes,
        fits=device.memory_bytes is None or num_bytes <= device.memory_bytes,
        bound=_bound(spent, times),
    )


def _both(layer: Layer) -> float:
    return layer.forward_s + layer.backward_s


def _tensor_seconds(layer: Layer, tensor: int, device: Device) -> float:
    """Return the all-reduces of one direction: the second product of every pair leaves a sum on each device."""
    if tensor == 1 or not layer.products:
        return 0.0
    return -(-layer.products // 2) * all_reduce_seconds(layer.activation_bytes, tensor, device.link_of(tensor))


def _gradient_seconds(weight_bytes: float, data: int, device: Device, link: Link, backward_s: float) -> float:
    if data == 1 or not weight_bytes:
        return 0.0
    if not device.hides_gradients:
        buckets = max(1, round(weight_bytes / bucket_bytes(round(weight_bytes))))
        return buckets * all_reduce_seconds(weight_bytes / buckets, data, link)
    whole_s = all_reduce_seconds(weight_bytes, data, link)
    return max(whole_s - backward_s, all_reduce_seconds(min(weight_bytes, BUCKET_BYTES), data, link))


def _bound(spent: dict[str, float], times: ModelTimes) -> str:
    """Return the largest part, with compute divided into what it waits for."""
    compute = spent["compute"]
    parts = {name: seconds for name, seconds in spent.items() if name != "compute"}
    parts["memory traffic"] = compute * times.memory_share
    parts["launches"] = compute * times.launch_share
    parts["arithmetic"] = compute - parts["memory traffic"] - parts["launches"]
    return max(parts, key=parts.__getitem__)


def split_layers(layers: Sequence[Layer], stages: int) -> Iterator[tuple[Layer, ...]]:
    """Yield `stages` runs of consecutive layers, the slowest of which is as fast as possible."""
    ends = list(itertools.accumulate(map(_both, layers), initial=0.0))
    slowest = dict(enumerate(ends))  # by number of layers, in the stages so far
    cuts: list[dict[int, int]] = []
    for stage in range(1, stages):
        cut, now = {}, {}
        for end in range(stage + 1, len(layers) + 1):
            now[end], cut[end] = min((max(slowest[at], ends[end] - ends[at]), at) for at in range(stage, end))
        slowest = now
        cuts.append(cut)
    borders = [len(layers)]
    for cut in reversed(cuts):
        borders.append(cut[borders[-1]])
    for begin, end in itertools.pairwise([0, *reversed(borders)]):
        yield tuple(layers[begin:end])
