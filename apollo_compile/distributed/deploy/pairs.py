"""Find linear layers that devices can divide: columns of some, then rows of the one that reads them.

    find_pairs(module, args, kwargs, most) -> pairs

As in Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053: an MLP, or an attention whose heads are counted
from the data. Nothing is assumed of the code between the layers: every share of a pair, with random parameters, runs on
a real input. The shares have to sum to the output of the row layer, and the module around them must see no difference.
Gradients are then those of the sum, unless code has a backward of its own that is not the derivative of its forward.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from apollo_compile.passes.deploy import LinearPair
from apollo_compile.torch_bridge.trees import are_equal

_Calls = dict[nn.Module, list[tuple[tuple[Any, ...], dict[str, Any], Any]]]  # arguments and output of every call


def find_pairs(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], most: int) -> tuple[LinearPair, ...]:
    """Return the pairs that up to `most` devices can divide; none if the module draws random numbers."""
    calls: _Calls = defaultdict(list)
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    before = random_states(device)
    with contextlib.ExitStack() as stack:
        for each in module.modules():
            stack.enter_context(each.register_forward_hook(lambda m, *call: calls[m].append(call), with_kwargs=True))
        module(*args, **kwargs)
    if not all(map(torch.equal, before, random_states(device))):
        return ()
    owners = Counter(id(each) for own in module.modules() for each in own.parameters(recurse=False))
    degrees = [1 << power for power in reversed(range(1, most.bit_length()))]
    found: list[LinearPair] = []
    for path, parent in module.named_modules():
        linears: dict[nn.Module, str] = {
            each: name
            for name, each in parent.named_children()
            if type(each) is nn.Linear and len(calls[each]) == 1 and owners[id(each.weight)] == 1
        }
        columns: list[str] = []
        for linear in filter(linears.__contains__, calls if parent in calls else ()):  # in the order of the calls
            row, tries = linears[linear], [columns, columns[-1:]] if columns else []
            ways = ((names, n) for names in tries for n in degrees if _is_divisible(parent, calls, names, row, n))
            divided, degree = next(ways, ((), 0))
            columns = [] if degree else [*columns, row]
            if degree:
                prefix = f"{path}." if path else ""
                found.append(LinearPair(columns=tuple(prefix + n for n in divided), row=prefix + row, degree=degree))
    return tuple(found)


def random_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of torch's random numbers on the CPU and a device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _is_divisible(parent: nn.Module, calls: _Calls, columns: Sequence[str], row: str, degree: int) -> bool:
    """Return whether shares of a pair sum to its output, and the module around them does not see a difference."""
    last, (args, kwargs, _) = parent.get_submodule(row), calls[parent][-1]
    fixed = calls[last][-1][2].detach()
    draw = torch.Generator().manual_seed(0)  # layers that begin with zeros would hide what is between them
    state = {
        name: torch.randn(each.shape, generator=draw).to(each) / each[0].numel() ** 0.5
        for name, each in parent.named_parameters()
        if name.rpartition(".")[0] in (*columns, row)
    }
    if any(state[f"{name}.weight"].shape[name == row] % degree for name in (*columns, row)):
        return False
    sums: dict[int, Any] = {1: 0, degree: 0}
    seen = []
    for share, shares in ((0, 1), *((share, degree) for share in range(degree))):
        own = {name: each.chunk(shares, int(name == f"{row}.weight"))[share] for name, each in state.items()}
        own |= {f"{row}.bias": torch.zeros_like(state[f"{row}.bias"])} if f"{row}.bias" in state else {}

        def replace(_module: nn.Module, _args: Any, output: torch.Tensor, shares: int = shares) -> torch.Tensor:
            sums[shares] = sums[shares] + output.detach()
            return torch.empty_like(fixed).copy_(fixed)

        try:
            with last.register_forward_hook(replace):
                seen.append(torch.func.functional_call(parent, own, args, kwargs))
        except Exception:  # code that cannot run with a share of the layers, whatever it raises, is not divided
            return False
    return are_equal(*sums.values()) and all(are_equal(seen[0], each) for each in seen[1:])
