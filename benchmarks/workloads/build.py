"""Build the public workloads: models with random weights, inputs and losses.

    build(name, size, batch=..., seed=..., dropout=...) -> Workload
    build_spec(name, spec, size, ...)                   -> the same, for a spec that is not among the public ones
    assemble(...)                                       -> as `build`, before its first forward

Hugging Face models come from their config classes, so nothing is downloaded; the numbers are in `specs.py`.
Every dropout is set to `dropout`; layer drop and drop path are always off, so that gradients can be compared.

A Hugging Face model installs hooks in its first forward. If that forward is the compiled one, the graph breaks (seven
graphs instead of one), so `build` runs each model once in eager, with buffers restored after it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
import torch.utils._pytree as pytree
from torch import Tensor, nn

from benchmarks.workloads.act import Act
from benchmarks.workloads.chain import Chain
from benchmarks.workloads.policies import DiffusionPolicy, Vla
from benchmarks.workloads.specs import SPECS, Spec

SIZES = ("tiny", "small", "base")
_NEVER_DROPPED = ("layerdrop", "drop_path_rate", "mask_time_prob", "mask_feature_prob")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model in training mode, the keyword arguments of its call, and how a loss is read off its output."""

    name: str
    model: nn.Module
    inputs: dict[str, Any]
    loss: Callable[[Any], Tensor]
    branches: tuple[str, ...]
    """Modules without a data dependence between them in the forward pass."""


class TwoTower(nn.Module):
    """Two transformer encoders on sequences of vectors, with a symmetric contrastive loss."""

    def __init__(self, *, width: int, hidden: int, layers: int, heads: int, tokens: tuple[int, int], dropout: float):
        super().__init__()
        self.image = _Tower(width, hidden, layers, heads, tokens[0], dropout)
        self.text = _Tower(width, hidden, layers, heads, tokens[1], dropout)
        self.log_scale = nn.Parameter(torch.tensor(2.6592))  # log(1 / 0.07), as in CLIP

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        """Return the loss of a batch of pairs."""
        logits = self.log_scale.exp() * self.image(image) @ self.text(text).t()
        target = torch.arange(logits.shape[0], device=logits.device)
        return (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.t(), target)) / 2


class _Tower(nn.Module):
    def __init__(self, width: int, hidden: int, layers: int, heads: int, tokens: int, dropout: float):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, hidden, dropout=dropout, batch_first=True) for _ in range(layers)
        )
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, sequence: Tensor) -> Tensor:
        hidden = sequence + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.normalize(self.projection(hidden.mean(dim=1)), dim=-1)


def build(name: str, size: str = "tiny", *, batch: int | None = None, seed: int = 0, dropout: float = 0.0) -> Workload:
    """Return the workload `name` at `size`; equal arguments give equal weights and inputs.

    `batch` overrides the batch size of the spec. Raises `ValueError` for an unknown name or size.
    """
    return build_spec(name, _look_up(name, size), size, batch=batch, seed=seed, dropout=dropout)


def build_spec(
    name: str, spec: Spec, size: str = "tiny", *, batch: int | None = None, seed: int = 0, dropout: float = 0.0
) -> Workload:
    """Return the workload that `spec` describes, under a name of the caller's."""
    workload = _assemble(name, spec, size, batch=batch, seed=seed, dropout=dropout)
    _run_once(workload.model, workload.inputs)
    return workload


def assemble(name: str, size: str, *, batch: int | None = None, seed: int = 0, dropout: float = 0.0) -> Workload:
    """Return the workload as `build` does, but execute nothing: its first forward has still to install its hooks."""
    return _assemble(name, _look_up(name, size), size, batch=batch, seed=seed, dropout=dropout)


def _look_up(name: str, size: str) -> Spec:
    if name not in SPECS or size not in SPECS[name]["sizes"]:
        raise ValueError(f"unknown workload {name!r} at size {size!r}; known: {', '.join(SPECS)} at {', '.join(SIZES)}")
    return SPECS[name]


def _assemble(name: str, spec: Spec, size: str, *, batch: int | None, seed: int, dropout: float) -> Workload:
    sized = spec["sizes"][size]
    torch.manual_seed(seed)
    if spec["config"] is None:
        model: nn.Module = _PLAIN[spec["model"]](**sized["config"], dropout=dropout)
    else:
        model = _build_hugging_face(spec, copy.deepcopy(sized["config"]), dropout)
    model.train()
    inputs = _make_inputs(sized["inputs"], batch, torch.Generator().manual_seed(seed + 1))
    loss = _LOSSES[spec["loss"]]
    return Workload(name=name, model=model, inputs=inputs, loss=loss, branches=spec["branches"])


def _build_hugging_face(spec: Spec, numbers: dict[str, Any], dropout: float) -> nn.Module:
    import transformers

    config = getattr(transformers, spec["config"])(**numbers)
    _set_dropout(config, dropout)
    model: nn.Module = getattr(transformers, spec["model"])(config)
    return model


def _set_dropout(config: Any, dropout: float) -> None:
    """Set every dropout of a config and of the configs inside it."""
    from transformers import PretrainedConfig

    for key, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _set_dropout(value, dropout)
        elif isinstance(value, float | int) and any(word in key for word in _NEVER_DROPPED):
            setattr(config, key, type(value)(0))  # some configs insist on the type
        elif isinstance(value, float | int) and "dropout" in key:
            setattr(config, key, dropout)


def _make_inputs(specs: dict[str, Any], batch: int | None, generator: torch.Generator) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    for name, spec in specs.items():
        inputs[name] = _make_input(spec, batch, generator, inputs) if isinstance(spec, dict) else spec
    return inputs


def _make_input(spec: Spec, batch: int | None, generator: torch.Generator, earlier: dict[str, Any]) -> Tensor:
    if spec["kind"] == "labels":
        labels: Tensor = earlier[spec["of"]].clone()
        for token in spec["ignore"]:
            labels[labels == token] = -100
        return labels
    shape = list(spec["shape"])
    if batch is not None:
        shape[0] = batch
    if spec["kind"] == "image":
        drawn = torch.randn(shape, generator=generator)
        return drawn.flatten(0, 1) if spec["packed"] else drawn
    if spec["kind"] == "rows":
        return torch.tensor(spec["rows"]).repeat(shape[0], 1)
    if spec["kind"] == "ones":
        return torch.ones(shape, dtype=torch.int64)
    ids = torch.randint(spec["low"], spec["high"], shape, generator=generator)
    for column, token in spec.get("columns", ()):
        ids[:, column] = token
    for first, last, token in spec.get("spans", ()):
        ids[:, first:last] = token
    return ids.float() if spec.get("floating") else ids


def _run_once(model: nn.Module, inputs: dict[str, Any]) -> None:
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    with torch.no_grad():
        model(**inputs)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    torch.set_rng_state(state)


def _returned_loss(output: Any) -> Tensor:
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def _flava_loss(output: Any) -> Tensor:
    """Contrast the two class tokens; the last term keeps the multimodal encoder in the graph."""
    text = functional.normalize(output.text_embeddings[:, 0], dim=-1)
    image = functional.normalize(output.image_embeddings[:, 0], dim=-1)
    target = torch.arange(text.shape[0], device=text.device)
    logits = text @ image.T / 0.07  # the temperature of CLIP
    contrastive = (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.T, target)) / 2
    loss: Tensor = contrastive + output.multimodal_embeddings.float().pow(2).mean()
    return loss


def weigh_outputs(output: Any) -> Tensor:
    """Return the mean of every floating-point tensor of `output`, weighed with a wave, so that no element is alike.

    A mean of squares would not do: behind a layer norm it is a constant.
    """
    found = [tensor for tensor in pytree.tree_leaves(output) if isinstance(tensor, Tensor)]
    terms = [
        (tensor * torch.arange(tensor.numel(), device=tensor.device).to(tensor.dtype).cos().view_as(tensor)).mean()
        for tensor in found
        if tensor.is_floating_point()
    ]
    return torch.stack([term.to(terms[0].dtype) for term in terms]).sum()


_PLAIN: dict[str, Callable[..., nn.Module]] = {
    each.__name__: each for each in (TwoTower, Chain, Act, DiffusionPolicy, Vla)
}

_LOSSES: dict[str, Callable[[Any], Tensor]] = {"returned": _returned_loss, "flava": _flava_loss, "waves": weigh_outputs}
