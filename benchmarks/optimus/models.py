"""Durations of stages and encoders, from the shapes of transformers and a data sheet.

A layer of width h with an MLP of r h has (4 + 2r) h^2 parameters; its forward takes 2 (4 + 2r) h^2 operations per token
and 4 s h for attention over s tokens. Embeddings and the vocabulary are not counted. With recomputation a backward is
a forward and twice a forward. Tensor parallelism with sequence parallelism has four collectives per forward of a layer
(two all-gathers, two reduce-scatters) and as many per backward and recomputation each (arXiv 2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass

from apollo_compile.distributed.pipeline.values import Gaps

COLLECTIVES_PER_FORWARD = 4
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
    """A device and its links, from a data sheet."""

    flops_per_s: float
    link_bytes_per_s: float
    """To the other devices of its server, in one direction."""
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


def collective_ns(model: Transformer, batch: Batch, hardware: Hardware, *, tensor_parallel: int) -> int:
    """Return the duration of one all-gather or reduce-scatter of a layer's activations at full bandwidth."""
    num_bytes = batch.tokens * model.width * batch.bytes_per_value
    return round(1e9 * num_bytes * (tensor_parallel - 1) / tensor_parallel / hardware.link_bytes_per_s)


def tensor_parallel_gaps(
    model: Transformer, batch: Batch, hardware: Hardware, *, tensor_parallel: int, layers: int
) -> tuple[Gaps, Gaps]:
    """Return the gaps inside a forward and a backward of a stage with some layers, with recomputation."""
    duration_ns = collective_ns(model, batch, hardware, tensor_parallel=tensor_parallel)
    count = COLLECTIVES_PER_FORWARD * layers if tensor_parallel > 1 else 0
    return Gaps(count=count, duration_ns=duration_ns), Gaps(count=2 * count, duration_ns=duration_ns)


def layer_activation_bytes(model: Transformer, batch: Batch, *, tensor_parallel: int) -> int:
    """Return the bytes of a layer's input, which full recomputation keeps, split by sequence parallelism."""
    return batch.tokens * model.width * batch.bytes_per_value // tensor_parallel
