"""Policies of robots with an encoder per camera or beside another model, in plain torch.

    DiffusionPolicy     a ResNet for each of two cameras, then a one-dimensional U-Net that removes noise from actions
    Vla                 a frozen vision transformer, and an expert for actions that attends to each of its layers

Their `forward` returns the loss of a batch. Noise and times are inputs, so that a step can be repeated. The shapes are
those of the policies in LeRobot.

Sources: Chi et al., "Diffusion policy: visuomotor policy learning via action diffusion", RSS 2023,
https://arxiv.org/abs/2303.04137; Shukor et al., "SmolVLA: a vision-language-action model for affordable and efficient
robotics", 2025, https://arxiv.org/abs/2506.01844
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from benchmarks.workloads.act import ResNet


def embed_times(times: Tensor, width: int) -> Tensor:
    """Return sines and cosines of times, of one number per sample."""
    rates = torch.exp(torch.arange(width // 2, device=times.device) * (-math.log(10000.0) / (width // 2 - 1)))
    angles = times[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class _Camera(nn.Module):
    """A ResNet with group norms; features are where its channels look at a picture, on average."""

    def __init__(self, backbone: int, stages: Sequence[int], keypoints: int) -> None:
        super().__init__()
        self.backbone = ResNet(backbone, stages, lambda channels: nn.GroupNorm(max(1, channels // 16), channels))
        self.points = nn.Conv2d(self.backbone.channels, keypoints, 1)
        self.out = nn.Linear(2 * keypoints, 2 * keypoints)

    def forward(self, pictures: Tensor) -> Tensor:
        heat = self.points(self.backbone(pictures))
        down, right = (torch.linspace(-1, 1, size, device=heat.device) for size in heat.shape[2:])
        attention = heat.flatten(2).softmax(-1).unflatten(2, heat.shape[2:])
        means = torch.cat([attention.sum(3) @ down[:, None], attention.sum(2) @ right[:, None]], dim=-1)
        return torch.relu(self.out(means.flatten(1)))


class _Smooth(nn.Sequential):
    def __init__(self, channels: int, made: int, kernel: int, groups: int) -> None:
        super().__init__(nn.Conv1d(channels, made, kernel, padding=kernel // 2), nn.GroupNorm(groups, made), nn.Mish())


class _Residual(nn.Module):
    """Two convolutions; the condition scales and shifts what is between them."""

    def __init__(self, channels: int, made: int, condition: int, kernel: int, groups: int) -> None:
        super().__init__()
        self.first, self.second = _Smooth(channels, made, kernel, groups), _Smooth(made, made, kernel, groups)
        self.condition = nn.Sequential(nn.Mish(), nn.Linear(condition, 2 * made))
        self.skip = nn.Conv1d(channels, made, 1) if channels != made else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.condition(condition)[..., None].chunk(2, dim=1)
        return self.second(scale * self.first(x) + shift) + self.skip(x)


class UNet1d(nn.Module):
    """A U-Net over time whose blocks are all told one condition."""

    def __init__(self, actions: int, widths: Sequence[int], condition: int, kernel: int = 5, groups: int = 8) -> None:
        super().__init__()

        def pair(channels: int, made: int) -> nn.ModuleList:
            sizes = ((channels, made), (made, made))
            return nn.ModuleList(_Residual(*each, condition, kernel, groups) for each in sizes)

        last = widths[-1]
        self.down = nn.ModuleList(pair(*each) for each in zip((actions, *widths), widths, strict=False))
        self.shrink = nn.ModuleList(nn.Conv1d(width, width, 3, 2, 1) for width in widths[:-1])
        self.middle = pair(last, last)
        self.up = nn.ModuleList(pair(2 * width, made) for made, width in reversed(list(itertools.pairwise(widths))))
        self.grow = nn.ModuleList(nn.ConvTranspose1d(width, width, 4, 2, 1) for width in reversed(widths[:-1]))
        self.out = nn.Sequential(_Smooth(widths[0], widths[0], kernel, groups), nn.Conv1d(widths[0], actions, 1))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Return what is like `x`, of (samples, actions, steps)."""
        seen = []
        for level, (first, second) in enumerate(self.down):
            x = second(first(x, condition), condition)
            seen.append(x)
            x = self.shrink[level](x) if level < len(self.shrink) else x
        for block in self.middle:
            x = block(x, condition)
        for (first, second), grow in zip(self.up, self.grow, strict=True):
            x = grow(second(first(torch.cat([x, seen.pop()], dim=1), condition), condition))
        return self.out(x)


class DiffusionPolicy(nn.Module):
    """The policy: noise is removed from a chunk of actions, given pictures of two cameras and states of a robot."""

    def __init__(
        self,
        *,
        backbone: int,
        stages: Sequence[int],
        widths: Sequence[int],
        keypoints: int = 32,
        observations: int = 2,
        joints: int = 14,
        times: int = 100,
        time_width: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.cameras = nn.ModuleDict({name: _Camera(backbone, stages, keypoints) for name in ("front", "wrist")})
        self.time = nn.Sequential(
            nn.Linear(time_width, 4 * time_width), nn.Mish(), nn.Linear(4 * time_width, time_width)
        )
        self.time_width = time_width
        self.unet = UNet1d(joints, widths, time_width + observations * (joints + 2 * 2 * keypoints))
        angles = (torch.arange(times + 1) / times + 0.008) / 1.008 * math.pi / 2
        kept = angles.cos().square()
        self.register_buffer("kept", (kept[1:] / kept[:-1]).clamp(min=0.001).cumprod(0))

    def forward(
        self, front: Tensor, wrist: Tensor, state: Tensor, actions: Tensor, noise: Tensor, timesteps: Tensor
    ) -> Tensor:
        """Return the error of the noise that is found in noisy actions.

        Pictures and states have several observations per sample.
        """
        found = [state.flatten(1)]
        for name, pictures in (("front", front), ("wrist", wrist)):
            found.append(self.cameras[name](pictures.flatten(0, 1)).unflatten(0, pictures.shape[:2]).flatten(1))
        kept = self.kept[timesteps][:, None, None]
        noisy = kept.sqrt() * actions + (1 - kept).sqrt() * noise
        condition = torch.cat([self.time(embed_times(timesteps, self.time_width)), *found], dim=-1)
        return functional.mse_loss(self.unet(noisy.transpose(1, 2), condition).transpose(1, 2), noise)


class Vla(nn.Module):
    """A frozen vision transformer over two cameras, beside an expert that predicts where noise flows to actions."""

    def __init__(
        self,
        *,
        width: int,
        layers: int,
        heads: int,
        picture: int,
        patch: int,
        expert: int,
        expert_layers: int,
        expert_heads: int,
        expert_hidden: int,
        joints: int = 32,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vision = nn.ModuleDict(
            {
                "patches": nn.Conv2d(3, width, patch, patch),
                "layers": nn.ModuleList(
                    nn.TransformerEncoderLayer(
                        width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True
                    )
                    for _ in range(layers)
                ),
            }
        )
        self.positions = nn.Parameter(torch.randn(1, (picture // patch) ** 2, width) * 0.02)
        for parameter in (*self.vision.parameters(), self.positions):
            parameter.requires_grad_(False)
        self.connectors = nn.ModuleList(nn.Linear(width, expert) for _ in range(expert_layers))
        self.state = nn.Linear(joints, expert)
        self.actions = nn.Linear(joints, expert)
        self.time = nn.Sequential(nn.Linear(2 * expert, expert), nn.SiLU(), nn.Linear(expert, expert))
        self.expert = nn.ModuleList(
            nn.TransformerDecoderLayer(
                expert, expert_heads, expert_hidden, dropout, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(expert_layers)
        )
        self.out = nn.Linear(expert, joints)

    def forward(
        self, front: Tensor, wrist: Tensor, state: Tensor, actions: Tensor, noise: Tensor, time: Tensor
    ) -> Tensor:
        """Return the error of the flow from noise to actions, at the sigmoid of `time` on the way."""
        seen = [self._see(pictures) for pictures in (front, wrist)]
        way = time.sigmoid()
        noisy = self.actions(way[..., None] * noise + (1 - way[..., None]) * actions)
        at = embed_times(1000 * way[:, 0], noisy.shape[-1])[:, None].expand_as(noisy)
        hidden = torch.cat([self.state(state)[:, None], self.time(torch.cat([noisy, at], dim=-1))], dim=1)
        for number, layer in enumerate(self.expert):
            depth = number * len(seen[0]) // len(self.expert)
            memory = torch.cat([features[depth] for features in seen], dim=1)
            hidden = layer(hidden, self.connectors[number](memory))
        return functional.mse_loss(self.out(hidden[:, 1:]), noise - actions)

    def _see(self, pictures: Tensor) -> list[Tensor]:
        """Return the features behind each layer."""
        hidden = self.vision["patches"](pictures).flatten(2).transpose(1, 2) + self.positions
        found = []
        for layer in self.vision["layers"]:
            hidden = layer(hidden)
            found.append(hidden)
        return found
