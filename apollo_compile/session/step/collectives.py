"""Mean of gradients over the ranks of a model: in DistributedDataParallel, under FSDP2, or with a mesh of ranks.

    find_data_parallel(model, mesh) -> DataParallel, or why gradients are left to the wrapper
    DataParallel.average(propose)      after the loop: averages `.grad`, bucket by bucket
    DataParallel.averages              the same for a program, with a segment for every bucket

Note [collectives of a step]
    A rank may run a loop where another runs its program: after a batch of another shape, or where one rank could not
    link its step. Their collectives have to match. So buckets belong to the step and not to a program: all ranks settle
    them once, in the first step, and loops and programs average the same buckets in the same order. A loop does so
    after its last backward, a program as soon as the gradients of a bucket are final. Gradients of micro-batches are
    summed before, and communicated once.

    Under FSDP2 a bucket is one collective for parameters, too: before its first forward, a step gathers buckets in the
    opposite order, which is about that of the forward, and its gradients are averaged into shards. Clipping adds the
    squares of norms up over the ranks. Loops and programs do the same, in the same order.

    Buckets are in the order in which their gradients can be final at the earliest, if everything that does not depend
    on each other runs at once: the last layers of several towers come first. As with DDP, the order is that of the
    first step of one rank.

Numbers are those of DDP: gradients are divided by the number of ranks, then summed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from apollo_compile.cost_model.collectives import GLOO, Link, all_reduce_seconds, bucket_bytes, reduce_scatter_seconds
from apollo_compile.distributed.agreement import Agreement
from apollo_compile.distributed.link import measure_link, sum_as_one
from apollo_compile.distributed.ranks import Ranks, find_ranks
from apollo_compile.errors import TargetError, UnsupportedGraphError
from apollo_compile.json_form import from_json
from apollo_compile.observe import StageRunner
from apollo_compile.session.step.micro_batch import MicroBatchGraphs
from apollo_compile.target.compilation import Compilation
from apollo_compile.torch_bridge.data_parallel import (
    Replicas,
    is_sharded,
    reason_against,
    reason_for_reducer,
    replicas_of,
    replicas_on,
    without_reducer,
)
from apollo_compile.torch_bridge.optimizers import OptimizerInParts
from apollo_compile.units import NS_PER_S

if TYPE_CHECKING:
    from apollo_compile.torch_bridge.sharded import ShardedModel

Propose = Callable[[], Sequence[torch.Tensor]]
"""Returns parameters in the order in which their gradients are final."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Averages:
    """Buckets of gradients, and how a program averages them."""

    buckets: Sequence[Sequence[torch.Tensor]]
    """Parameters by bucket, in the order of the collectives."""
    average: Callable[[Sequence[torch.Tensor], list[torch.Tensor]], list[torch.Tensor]]
    """Returns the means of the gradients of a bucket; of sharded parameters, this rank's parts."""
    ranks: int
    link: Link
    sharded: ShardedModel | None = None
    """Gathers parameters; None where every rank has them whole."""
    gathers: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    """Whole parameters by name of the collective that gathers them, in the order of these."""
    total_norm: Callable[[torch.Tensor], torch.Tensor] = torch.linalg.vector_norm
    """Returns the norm of all gradients, given those of this rank's."""

    def duration_ns(self, num_bytes: int) -> int:
        """Return the predicted time of a collective in which so many bytes are averaged or gathered."""
        seconds = all_reduce_seconds if self.sharded is None else reduce_scatter_seconds
        return max(1, round(NS_PER_S * seconds(num_bytes, self.ranks, self.link)))


@dataclass(frozen=True, slots=True)
class _Buckets:
    buckets: tuple[tuple[int, ...], ...]


class DataParallel:
    """The ranks that average the gradients of one step."""

    def __init__(self, replicas: Replicas | ShardedModel) -> None:
        self._replicas, self._group = replicas, replicas.group
        self.model = replicas.model
        """Model that the loss function is called with."""
        self.ranks = find_ranks()
        self._settled: dict[tuple[torch.Tensor, ...], Averages] = {}
        """Averages by the parameters that are trained; ranks freeze some before the same step, which is a loop then."""

    @property
    def _parameters(self) -> tuple[torch.Tensor, ...]:
        return tuple(each for each in self._replicas.parameters if each.requires_grad)

    @property
    def averages(self) -> Averages:
        """Buckets and how to average them, which the first step that trains these parameters has settled."""
        return self._settled[self._parameters]

    @property
    def is_syncing(self) -> bool:
        """Whether steps average gradients: False inside of `no_sync`."""
        return self._replicas.is_syncing()

    def opened(self) -> AbstractContextManager[None]:
        """Return the context in which steps are taken."""
        return nullcontext()

    def begin_step(self) -> None:
        """Copy the buffers of rank 0, as the first forward of a step does."""
        if self.is_syncing:
            self._replicas.broadcast_buffers()

    def begin_loop(self) -> None:
        """Gather parameters for a loop; a program gathers them itself."""

    def average(self, propose: Propose) -> None:
        """Replace the gradients in `.grad` by their means.

        Arguments:
            propose: called in the first step; may raise `UnsupportedGraphError`.

        Raises:
            TargetError: a parameter has no gradient; nothing was sent.
            RankError: buckets cannot be settled.
        """
        if not self.is_syncing:
            return
        missing = [name for name, each in self.model.named_parameters() if each.requires_grad and each.grad is None]
        if missing:
            raise TargetError(
                f"cannot average gradients over ranks: {', '.join(missing[:3])} got none in this step; expected one "
                "for every parameter; freeze others, or use DistributedDataParallel with find_unused_parameters=True"
            )
        if (own := self._parameters) not in self._settled:
            buckets = [[own[index] for index in bucket] for bucket in self._settle_buckets(propose)]
            self._settled[own] = self._make_averages(buckets, self._measure_link())
        for bucket in self._settled[own].buckets:
            gradients = [each.grad for each in bucket if each.grad is not None]
            self._leave(bucket, self._average(bucket, gradients))

    def clip(self, parameters: Iterable[torch.Tensor], limit: float) -> None:
        """Clip the gradients that `average` has left to a norm of all of them together."""
        torch.nn.utils.clip_grad_norm_(parameters, limit)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step an optimizer after a backward by the kernels that a program calls, so that ranks do not drift apart."""
        parts = OptimizerInParts(optimizer)
        reason = parts.problem_of(optimizer) or parts.problem_of_state(optimizer) or parts.reason_against()
        members = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        if reason or is_sharded(self.model) or any(each.grad.dtype is not each.dtype for each in members):
            optimizer.step()
            return
        parts.step(members, [each.grad for each in members])
        parts.note_taken()

    def optimizer_in_parts(self, optimizer: torch.optim.Optimizer) -> OptimizerInParts:
        """Return the optimizer for parameters inside of a program."""
        return OptimizerInParts(optimizer)

    def _make_averages(self, buckets: Sequence[Sequence[torch.Tensor]], link: Link) -> Averages:
        return Averages(buckets=buckets, average=self._average, ranks=self._group.size(), link=link)

    def _leave(self, bucket: Sequence[torch.Tensor], means: list[torch.Tensor]) -> None:
        """Store the means in the place of a loop's gradients."""
        torch._foreach_copy_([each.grad for each in bucket if each.grad is not None], means)

    def _average(self, bucket: Sequence[torch.Tensor], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the means of gradients, which share memory."""
        return sum_as_one(gradients, self._group, divided_by=self._group.size())

    def predict(self, order: Sequence[torch.Tensor]) -> Averages:
        """Return buckets that this rank would propose, with an assumed link; nothing is sent.

        Arguments:
            order: copies of the parameters, in the order in which their gradients are final.
        """
        filled = fill_buckets(range(len(order)), order, self._least_bytes)
        return self._make_averages([[order[index] for index in bucket] for bucket in filled], GLOO)

    @property
    def _least_bytes(self) -> int:
        """Size at which a bucket is full: DDP's `bucket_cap_mb`, or less."""
        return min(self._replicas.bucket_bytes_cap, bucket_bytes(sum(each.nbytes for each in self._parameters)))

    def _settle_buckets(self, propose: Propose) -> Sequence[Sequence[int]]:
        """Return parameters by bucket, by their index, as the first rank to arrive proposes."""
        parameters, least = self._parameters, self._least_bytes
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        try:
            order = [index_of[id(parameter)] for parameter in propose() if id(parameter) in index_of]
        except UnsupportedGraphError:  # the reducer's own guess
            order = []
        backwards = list(reversed(range(len(parameters))))
        if not self.ranks.can_agree:
            return fill_buckets(backwards, parameters, least)
        order += [index for index in backwards if index not in set(order)]
        own = fill_buckets(order, parameters, least)
        described = [(tuple(each.shape), str(each.dtype)) for each in parameters]
        text = repr((dist.get_process_group_ranks(self._group), described))
        topic = self.ranks.enroll(
            f"gradients {hashlib.sha256(text.encode()).hexdigest()[:16]}", "the buckets of a step"
        )
        settled = self.ranks.settle(f"{topic}/buckets", json.dumps(own))
        try:
            buckets = from_json(_Buckets, {"buckets": json.loads(settled)}).buckets
            if sorted(index for bucket in buckets for index in bucket) != sorted(order):
                raise ValueError(f"expected each of {len(order)} parameters once, got {settled[:100]}")
        except ValueError as error:
            raise self.ranks.fail(f"the buckets of gradients that ranks agreed on cannot be used: {error}") from error
        return buckets

    def _measure_link(self) -> Link:
        """Measure latency and bandwidth between the ranks; all of them do so in their first step."""
        rounds = self._rounds * (self._group.size() - 1)
        device = next((each.device for each in self._parameters), torch.device("cpu"))
        return measure_link(self._probe, rounds, self._group, device)

    _rounds = 2
    """Times that a piece goes around the ring for the mean of gradients."""

    def _probe(self, gradient: torch.Tensor) -> None:
        """Average one gradient, to measure the link."""
        self._average((), [gradient])


class ShardedDataParallel(DataParallel):
    """The ranks that gather the parameters of one step, and average its gradients into shards."""

    def __init__(self, sharded: ShardedModel) -> None:
        super().__init__(sharded)
        self._sharded = sharded

    def opened(self) -> AbstractContextManager[None]:
        """Return a context in which the model has whole parameters."""
        return self._sharded.opened()

    def begin_loop(self) -> None:
        """Gather all parameters; in the first step, when nothing is settled, in one bucket for each dtype."""
        if self._parameters not in self._settled:
            everything = self._sharded.parameters
            dtypes = fill_buckets(range(len(everything)), everything, sys.maxsize)
            buckets: Iterable[Sequence[torch.Tensor]] = [[everything[index] for index in bucket] for bucket in dtypes]
        else:
            buckets = self.averages.gathers.values()
        for bucket in buckets:
            self._sharded.fill(bucket)

    def clip(self, parameters: Iterable[torch.Tensor], limit: float) -> None:
        """Clip the gradients that `average` has left to a norm of all of them on all ranks together."""
        with torch.no_grad():
            gradients = self._sharded.local_gradients(parameters)
            if gradients:
                total = self._total_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients]))
                torch._foreach_mul_(gradients, torch.clamp(limit / (total + 1e-6), max=1.0))

    def optimizer_in_parts(self, optimizer: torch.optim.Optimizer) -> OptimizerInParts:
        """Return the optimizer for shards inside of a program."""
        return self._sharded.optimizer_in_parts(optimizer)

    def _make_averages(self, buckets: Sequence[Sequence[torch.Tensor]], link: Link) -> Averages:
        frozen: list[torch.Tensor] = [each for each in self._sharded.parameters if not each.requires_grad]
        frozen_buckets = fill_buckets(range(len(frozen)), frozen, sys.maxsize)
        gathers = {f"frozen{number}": [frozen[i] for i in bucket] for number, bucket in enumerate(frozen_buckets)}
        gathers |= {f"bucket{number}": list(buckets[number]) for number in reversed(range(len(buckets)))}
        averages = super()._make_averages(buckets, link)
        return replace(averages, sharded=self._sharded, gathers=gathers, total_norm=self._total_norm)

    def _average(self, bucket: Sequence[torch.Tensor], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        return self._sharded.scatter(bucket, gradients)

    def _leave(self, bucket: Sequence[torch.Tensor], means: list[torch.Tensor]) -> None:
        for whole in bucket:
            whole.grad = None
        self._sharded.leave(bucket, means)

    def _total_norm(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the norm of all shards; those of this rank have these norms."""
        total: torch.Tensor = torch.linalg.vector_norm(norms).square()
        dist.all_reduce(total, group=self._group)
        return total.sqrt()

    _rounds = 1

    def _probe(self, gradient: torch.Tensor) -> None:
        self._sharded.probe(gradient)


def find_data_parallel(model: nn.Module, mesh: DeviceMesh | None = None) -> DataParallel | str | None:
    """Return the ranks that average the gradients of a model; why its wrapper has to; None if they are not averaged.

    Arguments:
        model: the module that is trained. A wrapper is DistributedDataParallel or FSDP2's `fully_shard`.
        mesh: ranks that average the gradients of a module without a wrapper. Parameters of its first one are copied.

    Raises:
        TargetError: a mesh is given and has several dimensions, or gradients cannot be averaged over it.
    """
    if mesh is not None:
        _check_mesh(model, mesh)
    if find_ranks().is_alone:
        return None
    if mesh is not None:
        return DataParallel(replicas_on(model, mesh.get_group()))
    if is_sharded(model):
        from apollo_compile.torch_bridge.sharded import ShardedModel, reason_for_hooks  # FSDP2 is slow to import

        return reason_for_hooks(model) or ShardedDataParallel(ShardedModel(model))
    if not isinstance(model, DistributedDataParallel):
        return None
    return reason_for_reducer(model) or DataParallel(replicas_of(model))


def called_alone(model: nn.Module) -> nn.Module:
    """Return what a step on one rank calls: of DistributedDataParallel a view that does not average gradients."""
    if not isinstance(model, DistributedDataParallel) or not find_ranks().is_alone or reason_for_reducer(model):
        return model
    return without_reducer(model)


def _check_mesh(model: nn.Module, mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise TargetError(
            f"mesh has {mesh.ndim} dimensions; expected one, over which gradients are averaged, such as "
            f"mesh[{(mesh.mesh_dim_names or ('data',))[0]!r}]"
        )
    is_wrapped = is_sharded(model) or isinstance(model, DistributedDataParallel)
    reason = "its wrapper has ranks of its own" if is_wrapped else reason_against(model)
    if reason is not None:
        raise TargetError(f"cannot average gradients of a {type(model).__name__} over a mesh: {reason}")


def fill_buckets(order: Sequence[int], parameters: Sequence[torch.Tensor], least_bytes: int) -> list[list[int]]:
    """Return parameters in buckets, each of one dtype, in the order of the first of each.

    Arguments:
        order: indices of parameters.
        parameters: all of them.
        least_bytes: size at which a bucket is full; the last one of a dtype may be smaller.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[torch.dtype, tuple[list[int], int]] = {}
    for index in order:
        parameter = parameters[index]
        bucket, size = open_buckets.pop(parameter.dtype, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(index)
        size += parameter.nbytes
        if size < least_bytes:
            open_buckets[parameter.dtype] = bucket, size
    return buckets


def order_of_gradients(micro: MicroBatchGraphs) -> list[torch.Tensor]:
    """Return parameters in the order in which their gradients can be final at the earliest."""
    compilation = micro.backward.compilation
    graph = compilation.partition.graph
    ends: dict[int, int] = {}
    for segment in graph.segments:
        start = max((ends[other] for other in graph.predecessors(segment.id)), default=0)
        ends[segment.id] = start + compilation.costs.modes[segment.id][-1].duration_ns

    def end(place: int) -> int:
        buffer = graph.outputs[place]
        producer = None if buffer is None else graph.buffers[buffer].producer
        return 0 if producer is None else ends[producer]

    return [micro.parameters[place] for place in sorted(micro.parameters, key=lambda place: (end(place), -place))]


def settle_plan(own: Compilation, ranks: Ranks) -> Compilation:
    """Return the plan of a step that all ranks run.

    Raises:
        UnsupportedGraphError: it is too large for the store.
        RankError: the plan of the others is unknown, or not legal here.
    """
    agreement = Agreement(ranks)
    agreement.enroll(own)
    settled = agreement.settle(own, StageRunner())
    if settled is None:
        raise UnsupportedGraphError("the plan of the step is too large for the store in which ranks agree on it")
    return settled
