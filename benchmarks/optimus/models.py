"""Durations of stages and encoders, from the shapes of transformers and a data sheet.

A layer of width h with an MLP of r h has (4 + 2r) h^2 parameters; its forward takes 2 (4 + 2r) h^2 operations per token
and 4 s h for attention over s tokens. Embeddings and the vocabulary are not counted. With recomputation a backward is
a forward and twice a forward.
"""

from __future__ import annotations

from dataclasses import dataclass

BACKWARD_FORWARDS = 3
"""Forwards that a backward with recomputation is worth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformer:
    """A stack of equal layers."""

    name: str
    width: int
    num_layers: int
    mlp_ratio: int = 4

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer."""
        return (4 + 2 * self.mlp_ratio) * self.width**2

    @property
    def parameters(self) -> int:
        """Parameters of all layers."""
        return self.num_layers * self.layer_parameters

    def layer_flops(self, tokens: int, sequence: int) -> int:
        """Return the operations of one layer's forward for some tokens in sequences of a length."""
        return 2 * self.layer_parameters * tokens + 4 * tokens * sequence * self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A device, from a data sheet."""

    flops_per_s: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The input of a model in one micro-batch."""

    sequence: int
    samples: int
    bytes_per_value: int = 2

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequence * self.samples


def layer_ns(model: Transformer, batch: Batch, hardware: Hardware, *, tensor_parallel: int, efficiency: float) -> int:
    """Return the duration of one layer's forward on as many devices as tensor parallelism has."""
    flops = model.layer_flops(batch.tokens, batch.sequence) / tensor_parallel
    return round(1e9 * flops / (hardware.flops_per_s * efficiency))


def layer_activation_bytes(model: Transformer, batch: Batch, *, tensor_parallel: int) -> int:
    """Return the bytes of a layer's input, which full recomputation keeps, split by sequence parallelism."""
    return batch.tokens * model.width * batch.bytes_per_value // tensor_parallel
