"""Multimodal models of GPU size, in plain torch: nothing to download, nothing but torch to install.

    build_gpu_workload(name, batch, scale=...) -> GpuWorkload

Widths, depths and tokens are those of published models; weights are random. `scale="tiny"` keeps the shape of a model
and makes everything small, for tests; `scale="least"` has one layer where that has two, since its code is what takes
long to compile.

| name       | like                                                     | side by side                    |
| ---------- | -------------------------------------------------------- | ------------------------------- |
| clip_b32   | CLIP ViT-B/32                                            | image, text                     |
| clip_l14   | CLIP ViT-L/14                                            | image, text                     |
| imagebind  | ImageBind with encoders of base size                     | image, text, audio, depth       |
| flava      | FLAVA                                                    | image, text, then one over both |
| llava      | LLaVA with a small language model                        | nothing: a chain                |
| unified    | one trunk over text and image, a head for either         | two embedders, two heads        |
| act        | a robot's policy, action chunking, 480 x 640 (`act.py`)  | two cameras, encoder of actions |
| diffusion_policy | a robot's policy with a U-Net (`policies.py`)      | two cameras                     |
| vla        | SmolVLA: a frozen SigLIP, an expert (`policies.py`)      | two cameras, the expert         |
| dreamer    | the world model of DreamerV3, 16 steps (`learners.py`)   | heads, prior, decoder           |
| chain      | two layers of an encoder, two of a trunk: a control      | nothing                         |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from benchmarks.workloads.build import assemble
from benchmarks.workloads.learners import WORLD_INPUTS, build_learner


@dataclass(frozen=True, slots=True)
class Tower:
    """The numbers of one transformer encoder and of its input."""

    width: int
    layers: int
    heads: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a workload consists of."""

    towers: Mapping[str, Tower]
    trunk: Tower | None = None
    """Runs over the tokens of all towers, if there is one."""
    heads: int = 0
    """Heads of two layers each behind the trunk."""


SHAPES: Mapping[str, Shape] = {
    "clip_b32": Shape(towers={"image": Tower(768, 12, 12, 50), "text": Tower(512, 12, 8, 77)}),
    "imagebind": Shape(
        towers={
            "image": Tower(768, 12, 12, 197),
            "text": Tower(768, 12, 12, 77),
            "audio": Tower(768, 12, 12, 229),
            "depth": Tower(384, 12, 8, 197),
        }
    ),
    "flava": Shape(
        towers={"image": Tower(768, 12, 12, 197), "text": Tower(768, 12, 12, 77)}, trunk=Tower(768, 6, 12, 274)
    ),
    "clip_l14": Shape(towers={"image": Tower(1024, 24, 16, 257), "text": Tower(768, 12, 12, 77)}),
    "llava": Shape(towers={"image": Tower(1024, 24, 16, 257)}, trunk=Tower(2048, 12, 16, 257)),
    "unified": Shape(
        towers={"image": Tower(1024, 2, 16, 256), "text": Tower(1024, 2, 16, 128)},
        trunk=Tower(1024, 12, 16, 384),
        heads=2,
    ),
    "chain": Shape(towers={"image": Tower(1024, 2, 16, 257)}, trunk=Tower(1024, 2, 16, 257)),
}
"""In the order in which they are worth measuring."""

POLICIES = ("act", "diffusion_policy", "vla")
"""Workloads of `specs.py`. Like the world model of `dreamer` they have size `base`, or `tiny` at the smaller scales."""

NAMES = (*SHAPES, *POLICIES, "dreamer")

SCALES: Mapping[str, int | None] = {"full": None, "tiny": 2, "least": 1}
"""Most layers of a tower, by scale."""


class Encoder(nn.Module):
    """Transformer layers in front of a projection."""

    def __init__(self, tower: Tower, out: int, dropout: float) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, tower.tokens, tower.width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                tower.width, tower.heads, 4 * tower.width, dropout, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(tower.layers)
        )
        self.projection = nn.Linear(tower.width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projected tokens."""
        hidden = x + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        return self.projection(hidden)


class Multimodal(nn.Module):
    """Encoders side by side, then a contrastive loss, or a trunk over all of their tokens and heads behind it."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        joint = shape.trunk.width if shape.trunk else min(tower.width for tower in shape.towers.values())
        self.encoders = nn.ModuleDict({name: Encoder(tower, joint, dropout) for name, tower in shape.towers.items()})
        self.trunk = Encoder(shape.trunk, joint, dropout) if shape.trunk else None
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(joint, 4 * joint), nn.GELU(), nn.Linear(4 * joint, joint))
            for _ in range(shape.heads)
        )

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the loss of a batch."""
        return self.fuse({name: encoder(inputs[name]) for name, encoder in self.encoders.items()})

    def fuse(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """Return the loss, given what every encoder made."""
        if self.trunk is not None:
            hidden = self.trunk(torch.cat(list(tokens.values()), dim=1))
            outputs = [head(hidden) for head in self.heads] or [hidden]
            return torch.stack([output.float().square().mean() for output in outputs]).sum()
        first, *others = (functional.normalize(each.mean(dim=1).float(), dim=-1) for each in tokens.values())
        target = torch.arange(first.shape[0], device=first.device)
        return torch.stack([functional.cross_entropy(first @ other.T / 0.07, target) for other in others]).mean()


class TakesInputs(nn.Module):
    """Calls a model that takes its inputs by their names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the loss of a batch."""
        return self.model(**inputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuWorkload:
    """A model in training mode and its inputs."""

    name: str
    model: Multimodal | TakesInputs
    inputs: dict[str, Tensor]


def build_gpu_workload(
    name: str, *, batch: int, scale: str = "full", device: str = "cuda", dropout: float = 0.0, seed: int = 0
) -> GpuWorkload:
    """Return a workload; equal arguments give equal weights and inputs.

    Raises:
        ValueError: there is no such workload or scale.
    """
    if name not in NAMES or scale not in SCALES:
        known = f"{', '.join(NAMES)} at {', '.join(SCALES)}"
        raise ValueError(f"unknown workload {name!r} at scale {scale!r}; known: {known}")
    most_layers = SCALES[scale]
    if name not in SHAPES:
        model, inputs = _build_sized(name, "base" if most_layers is None else "tiny", batch, seed, dropout)
        inputs = {key: value.to(device) for key, value in inputs.items()}
        return GpuWorkload(name=name, model=TakesInputs(model).to(device).train(), inputs=inputs)
    shape = SHAPES[name] if most_layers is None else _tiny(SHAPES[name], most_layers)
    torch.manual_seed(seed)
    model = Multimodal(shape, dropout).to(device)
    generator = torch.Generator().manual_seed(seed + 1)
    inputs = {
        key: torch.randn(batch, tower.tokens, tower.width, generator=generator).to(device)
        for key, tower in shape.towers.items()
    }
    return GpuWorkload(name=name, model=model.train(), inputs=inputs)


def _build_sized(name: str, size: str, batch: int, seed: int, dropout: float) -> tuple[nn.Module, Mapping[str, Tensor]]:
    if name in POLICIES:
        policy = assemble(name, size, batch=batch, seed=seed, dropout=dropout)
        return policy.model, policy.inputs
    learner = build_learner(name, size, batch=batch, seed=seed)
    return learner.model.get_submodule("world"), {key: learner.batch[key] for key in WORLD_INPUTS}


def is_branchy(name: str) -> bool:
    """Return whether a workload has modules that can run side by side; else it is a control."""
    return name not in SHAPES or len(SHAPES[name].towers) > 1 or SHAPES[name].heads > 1


def _tiny(shape: Shape, most_layers: int) -> Shape:
    """Return the same with few layers, 32 wide, and few tokens; towers of one layer are equal, and share their code."""

    def small(tower: Tower, tokens: int) -> Tower:
        return Tower(width=32, layers=min(most_layers, tower.layers), heads=2, tokens=tokens)

    more = 1 if most_layers > 1 else 0
    towers = {name: small(tower, 4 + more * index) for index, (name, tower) in enumerate(shape.towers.items())}
    tokens = sum(tower.tokens for tower in towers.values())
    return Shape(towers=towers, trunk=small(shape.trunk, tokens) if shape.trunk else None, heads=shape.heads)
