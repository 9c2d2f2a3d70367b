"""Exchange between ranks: costs once, and tokens in every step.

share_costs(costs)                  the costs of the first rank
weigh_loss(loss, tokens)            a mean loss, weighted so that the mean over ranks is the mean over tokens
find_rank(num_replicas, rank)       number of ranks and rank, by default from the process group
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from apollo_compile.distributed.loader.costs import ModuleCosts


def share_costs(costs: ModuleCosts | None, group: dist.ProcessGroup | None = None) -> ModuleCosts:
    """Return the first rank's costs on every rank of a group; other ranks may pass None.

    Predictions depend on the machine, and ranks with different costs would use some samples twice and others never. All
    ranks must call this, once.

    Raises:
        ValueError: the first rank has no costs; the error is raised on all ranks.
    """
    texts = [None if costs is None else costs.to_json()]
    dist.broadcast_object_list(texts, group=group, group_src=0)
    if texts[0] is None:
        raise ValueError("the first rank has no costs to share: call module_costs on this rank")
    return ModuleCosts.from_json(texts[0])


def weigh_loss(
    loss: torch.Tensor, tokens: int, *, total: int | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the mean loss of a micro-batch times its share of the step's tokens times the number of ranks.

    DDP and FSDP average gradients over ranks, which gives tokens of a short micro-batch a larger weight. With this
    loss, gradients that are summed over the micro-batches of a step and averaged over ranks are those of the mean over
    all tokens of the step. Without a process group the weight is `tokens` / `total`.

    Arguments:
        loss: mean over `tokens`, a scalar.
        tokens: number of tokens that the loss is a mean over: labels that are not ignored, or samples.
        total: tokens of the step, over all its micro-batches and ranks. None sums `tokens` over the ranks, by an
            all-reduce of one number: that is the total if a step has one micro-batch, and every rank must call this.
        group: the ranks that gradients are averaged over.

    Raises:
        ValueError: there are no tokens in the step, or a negative number or a fraction in the micro-batch.
    """
    has_group = dist.is_available() and dist.is_initialized()
    num_ranks = dist.get_world_size(group) if has_group else 1
    if total is None:
        count = torch.tensor(tokens, dtype=torch.int64, device=loss.device)
        if has_group:
            dist.all_reduce(count, group=group)
        total = int(count)
    if tokens < 0 or tokens % 1 or total < max(tokens, 1):
        raise ValueError(f"a micro-batch has {tokens} of the step's {total} tokens: expected a whole number, 0 to all")
    if not tokens:
        return torch.where(torch.isfinite(loss), loss, 0.0) * 0.0  # the mean over no tokens is NaN
    return loss * (tokens * num_ranks / total)


def find_rank(num_ranks: int | None, rank: int | None) -> tuple[int, int]:
    """Return number of ranks and rank, from the default process group if they are None.

    Raises:
        ValueError: there is no process group, or the rank is not below the number of ranks.
    """
    if num_ranks is None or rank is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError("num_replicas and rank are unknown: pass both, or call init_process_group first")
        num_ranks = dist.get_world_size() if num_ranks is None else num_ranks
        rank = dist.get_rank() if rank is None else rank
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank is {rank} of {num_ranks}: expected 0 to {num_ranks - 1}")
    return num_ranks, rank
