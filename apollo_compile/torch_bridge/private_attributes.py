"""Attributes of torch's objects that have no public name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch

TANGENT = "tangents_"

_Callable = TypeVar("_Callable")


def mark_boxed(run: _Callable) -> _Callable:
    """Let AOTAutograd pass the inputs of `run` in a list, and return `run`."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def reason_against_gradients(leaves: Iterable[torch.Tensor]) -> str | None:
    """Return why only autograd may leave gradients at these leaves; None if anybody may."""
    for leaf in leaves:
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            return "a gradient has hooks"
        if leaf.grad_dtype is not leaf.dtype:
            return "a gradient may have another dtype than its parameter"
    return None


def count_hooks(model: torch.nn.Module) -> int:
    """Return how many hooks before and after forwards the modules of a model have."""
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def times_written(tensor: torch.Tensor) -> int:
    """Return how often a tensor has been written to, as autograd counts it; 0 for one that has no count."""
    return 0 if tensor.is_inference() else tensor._version


def reaches(ctx: Any) -> bool:
    """Return whether the backward that runs on this thread computes the gradient of the first input of a function."""
    return torch._C._will_engine_execute_node(ctx.next_functions[0][0])


def keeps_graph() -> bool:
    """Return whether the backward that runs on this thread keeps its graph, so that another may go through it."""
    return torch._C._current_graph_task_id() != -1 and torch._C._autograd._get_current_graph_task_keep_graph()


def has_saved_tensor_hooks() -> bool:
    """Return whether `saved_tensors_hooks` are active on this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
