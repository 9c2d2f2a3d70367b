"""Segments of a training step that no compiled graph has: sums of gradients, their norm, and the optimizer.

Gradients are treated in groups: those of one segment of the backward, or of several that make little, are final before
others, so their sum and update may run while the backward goes on elsewhere. Only clipping joins all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch

from apollo_compile.ir import (
    BodyId,
    Buffer,
    BufferId,
    Kernel,
    Role,
    Segment,
    SegmentGraph,
    SegmentId,
    Work,
    merge_kernels,
)
from apollo_compile.target.target import CompiledBody
from apollo_compile.torch_bridge.optimizers import OptimizerInParts

_NORM_BYTES = 4

FEWEST_BYTES = 2 * 2**20
"""Least bytes of gradients that are a group of their own beside others."""

_PIECE = 2**18
"""Elements of a gradient that are cast and added at a time."""

_Function = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientGroup:
    """Parameters whose gradients one segment of the backward makes, or several that make little."""

    name: str
    """Names of the first and the last of them; `~inputs` for gradients that no segment makes."""
    module: str
    """The innermost one that has all of them."""
    sizes: Mapping[int, int]
    """Bytes of the gradients, by the place of the parameter."""
    narrow: Mapping[int, int] = field(default_factory=dict)
    """Bytes of those that the backward makes in a narrower dtype than their parameter's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OneSegment:
    """A graph of one segment, and its code."""

    graph: SegmentGraph
    body: CompiledBody


def group_gradients(backward: SegmentGraph, parameters: Mapping[int, torch.Tensor]) -> Sequence[GradientGroup]:
    """Return the groups of the parameters that the backward makes gradients for, by their places among its outputs.

    Small ones in a row are joined if their dtypes are alike: a call of an optimizer costs a lane 0.1 ms on a CPU.
    """
    made: dict[SegmentId | None, dict[int, int]] = {}
    narrow: dict[int, int] = {}
    for place, parameter in parameters.items():
        output = backward.outputs[place]
        assert output is not None
        size = backward.buffers[output].num_bytes
        if size < parameter.nbytes:
            narrow[place] = size
        made.setdefault(backward.buffers[output].producer, {})[place] = max(size, parameter.nbytes)
    groups, dtypes = list[GradientGroup](), set[torch.dtype]()
    for producer, sizes in made.items():
        maker = None if producer is None else backward.segments[producer]
        name, module = (maker.name, maker.module) if maker else ("~inputs", "")
        before, dtypes = dtypes, {parameters[place].dtype for place in sizes}
        if dtypes == before and all(sum(each.values()) < FEWEST_BYTES for each in (sizes, groups[-1].sizes)):
            own = groups.pop()
            name, sizes = f"{own.name.partition(' to ')[0]} to {name}", {**own.sizes, **sizes}
            levels = zip(own.module.split("."), module.split("."), strict=False)
            module = ".".join(level for level, _ in takewhile(lambda pair: pair[0] == pair[1], levels))
        own_narrow = {place: narrow[place] for place in sizes if place in narrow}
        groups.append(GradientGroup(name=name, module=module, sizes=sizes, narrow=own_narrow))
    return groups


def widen_gradients(group: GradientGroup, parameters: Mapping[int, torch.Tensor]) -> OneSegment:
    """Cast narrow gradients to the dtypes of their parameters."""
    dtypes, makes = [parameters[place].dtype for place in group.narrow], [group.sizes[place] for place in group.narrow]

    def widen(narrow: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [gradient.to(dtype) for gradient, dtype in zip(narrow, dtypes, strict=True)]

    return _one_segment(
        group, "cast", takes=tuple(group.narrow.values()), makes=makes, flops=sum(makes) // 4, body=widen
    )


def add_gradients(group: GradientGroup, parameters: Mapping[int, torch.Tensor], *, in_place: bool) -> OneSegment:
    """Add gradients to those of earlier micro-batches, as autograd adds those of one backward to another's.

    Takes the earlier ones, then the later ones. Makes the sums; if `in_place`, writes to the earlier ones, which are
    sums then. Others may share memory.
    """
    sizes, count = tuple(group.sizes.values()), len(group.sizes)
    narrow = [index for index, place in enumerate(group.sizes) if place in group.narrow]
    wide = [index for index, place in enumerate(group.sizes) if place not in group.narrow]
    dtypes = {index: parameters[place].dtype for index, place in enumerate(group.sizes)}

    def add(terms: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        sums, later = terms[:count], terms[count:]
        of_wide = [sums[index] for index in wide], [later[index] for index in wide]
        if in_place and wide:
            torch._foreach_add_(*of_wide)
        elif wide:
            for index, total in zip(wide, torch._foreach_add(*of_wide), strict=True):
                sums[index] = total
        for index in narrow:
            if not in_place:
                sums[index] = sums[index].to(dtypes[index], memory_format=torch.contiguous_format)
            _add_narrow(sums[index], later[index])
        return [] if in_place else sums

    made = tuple(group.narrow.get(place, size) for place, size in group.sizes.items())
    return _one_segment(
        group,
        "sum",
        takes=(*(sizes if in_place else made), *made),
        makes=() if in_place else sizes,
        flops=sum(sizes) // 4,
        moved=sum(made) + 2 * sum(sizes),
        body=add,
    )


def _add_narrow(total: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient of a narrower dtype; on a CPU in pieces, whose casts stay in the cache of a core."""
    if total.is_cuda:
        total.add_(gradient)
        return
    pieces = torch.split(total.view(-1), _PIECE), torch.split(gradient.reshape(-1), _PIECE)
    for piece, term in zip(*pieces, strict=True):
        piece.add_(term.to(piece.dtype))


def communicate(group: GradientGroup, suffix: str, makes: Sequence[int], collective: _Function) -> OneSegment:
    """Run one collective over the ranks: takes tensors of the sizes of a group, and makes some of other sizes."""
    takes = tuple(group.sizes.values())
    return _one_segment(
        group, suffix, takes=takes, makes=makes, flops=sum(takes) // 4, body=collective, communicates=True
    )


def measure_gradients(group: GradientGroup) -> OneSegment:
    """Measure gradients: takes them and makes one tensor with the norm of each."""
    sizes = tuple(group.sizes.values())
    return _one_segment(
        group, "norm", takes=sizes, makes=(_NORM_BYTES * len(sizes),), flops=sum(sizes) // 2, body=_measure
    )


def limit_gradients(
    groups: Sequence[GradientGroup],
    order: Sequence[int],
    limit: float,
    device: torch.device | None = None,
    *,
    total_norm: Callable[[torch.Tensor], torch.Tensor] = torch.linalg.vector_norm,
    communicates: bool = False,
) -> OneSegment:
    """Find the factor that limits gradients, at most 1: takes the norms of all groups, and makes the factor.

    Arguments:
        groups: in the order of the norms.
        order: places of the parameters, in the order in which norms are added up.
        limit: largest norm of all gradients together.
        device: where the gradients are; None is the CPU.
        total_norm: returns the norm of all gradients, given that of each.
        communicates: whether it does so by a collective.
    """
    taken = [place for group in groups for place in group.sizes]
    index = torch.tensor([taken.index(place) for place in order], device=device)

    def find_factor(norms: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        total = total_norm(torch.cat(norms)[index])
        return [torch.clamp(limit / (total + 1e-6), max=1.0)]

    takes = tuple(_NORM_BYTES * len(group.sizes) for group in groups)
    return _one_segment(
        GradientGroup(name="gradients", module="", sizes={}),
        "clip",
        takes=takes,
        makes=(_NORM_BYTES,),
        flops=len(taken),
        body=find_factor,
        communicates=communicates,
    )


def update_parameters(
    group: GradientGroup,
    parameters: Mapping[int, torch.Tensor],
    optimizer: OptimizerInParts | None,
    *,
    is_clipped: bool,
) -> OneSegment:
    """Step the optimizer for one group: takes parameters, to which it writes, and gradients.

    It takes the factor and makes clipped gradients where they are clipped, and no parameters without an optimizer.
    """
    count, sizes = len(group.sizes), tuple(group.sizes.values())
    owners = [parameters[place] for place in group.sizes]  # those that the optimizer knows, not aliases of them

    def update(taken: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        gradients = taken[-count - is_clipped :][:count]
        if is_clipped:
            gradients = _scale(gradients, taken[-1])
        # A capture is rehearsed with copies of tensors that it writes to, and the optimizer's state has no copy.
        if optimizer is not None and all(map(optimizer.is_at, owners, taken)):  # an empty copy is where its original is
            optimizer.step(owners, gradients)
        return gradients if is_clipped else []

    moved = sum(sizes) * (2 if is_clipped else 0) + (0 if optimizer is None else optimizer.bytes_moved(sum(sizes)))
    return _one_segment(
        group,
        "scale" if optimizer is None else optimizer.name,  # also in the key of the step's verdict
        takes=(*(() if optimizer is None else sizes), *sizes, *((_NORM_BYTES,) if is_clipped else ())),
        makes=sizes if is_clipped else (),
        flops=sum(sizes),
        moved=moved,
        body=update,
    )


def _one_segment(
    group: GradientGroup,
    suffix: str,
    *,
    takes: Sequence[int],
    makes: Sequence[int],
    flops: int,
    body: _Function,
    moved: int = 0,
    communicates: bool = False,
) -> OneSegment:
    """Return a graph of one segment that takes and makes tensors of these sizes in bytes."""
    segment = SegmentId(0)
    name = f"{group.name}:{suffix}"
    buffers = [
        Buffer(
            id=BufferId(number),
            name=f"{'taken' if number < len(takes) else 'made'}{number}",
            producer=None if number < len(takes) else segment,
            readers=(segment,) if number < len(takes) else (),
            num_bytes=size,
            is_output=number >= len(takes),
        )
        for number, size in enumerate((*takes, *makes))
    ]
    inputs, outputs = tuple(b.id for b in buffers[: len(takes)]), tuple(b.id for b in buffers[len(takes) :])
    moved = moved or sum(takes) + sum(makes)
    share = moved // len(takes)
    kernels = (Kernel(flops=flops // len(takes), bytes_moved=share, bytes_from_outside=share),) * len(takes)
    work = Work(
        flops=flops,
        bytes_read=moved - sum(makes),
        bytes_written=sum(makes),
        kernels=len(kernels),
        parts=merge_kernels(kernels),
    )
    graph = SegmentGraph(
        name=name,
        role=Role.INFERENCE,
        segments=(
            Segment(
                id=segment,
                name=name,
                module=group.module,
                body=BodyId(0),
                inputs=inputs,
                outputs=outputs,
                after=(),
                work=work,
                has_collective=communicates,
            ),
        ),
        buffers=tuple(buffers),
        inputs=inputs,
        outputs=outputs,
    )
    return OneSegment(graph=graph, body=CompiledBody(function=body))


def _scale(gradients: list[torch.Tensor], factor: torch.Tensor) -> list[torch.Tensor]:
    """Return gradients times a factor, in their own dtypes, as multiplying in place gives them."""
    scaled = torch._foreach_mul(gradients, factor)  # one without dimensions takes the dtype of the factor
    return [made.to(gradient.dtype) for made, gradient in zip(scaled, gradients, strict=True)]


def _measure(gradients: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    if all(gradient.is_cuda for gradient in gradients):  # in few kernels, as `clip_grad_norm_` does there
        return [torch.stack(torch._foreach_norm(gradients))]
    return [torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])]
