"""Layers of LSTM that AOTAutograd gives an operator for inference, though they are trained.

    train_lstms()     while AOTAutograd traces a graph

On a CPU, an LSTM is traced as calls of a oneDNN operator unless its input requires a gradient. That its weights do is
not asked. So an LSTM that reads the batch itself has a backward, but the operator, told not to train, makes no
workspace for it: saving what is not there raises, with any backend. Dynamo traces an LSTM if
`torch._dynamo.config.allow_rnn` is set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch._decomp import decompositions


@contextlib.contextmanager
def train_lstms() -> Iterator[None]:
    """Trace an LSTM as operators that have a backward if anything that it takes requires a gradient."""
    own: Any = decompositions
    select = getattr(own, "select_one_layer_lstm_function", None)
    if select is None:  # a later release chooses otherwise
        yield
        return

    def select_layer(given: torch.Tensor, hidden: Sequence[torch.Tensor], weights: Sequence[Any]) -> Any:
        tensors = [*hidden, *(each for layer in weights for each in layer)]
        is_trained = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        return own.one_layer_lstm if is_trained else select(given, hidden, weights)

    with patch.object(own, "select_one_layer_lstm_function", select_layer):
        yield
