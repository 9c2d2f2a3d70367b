"""Action chunking with transformers: one ResNet is called for each of two cameras, then a transformer predicts actions.

    ResNet          basic blocks, with the batch norms that it is given
    FrozenBatchNorm a batch norm whose statistics and parameters are constants
    Act             the policy, with the loss of its training

The shapes are those of the policy in LeRobot: a variational encoder reads the actions, and its latent, the state and
the features of all cameras are the tokens of the transformer. Written in plain torch.

Source: Zhao, Kumar, Levine, Finn, "Learning fine-grained bimanual manipulation with low-cost hardware", RSS 2023,
https://arxiv.org/abs/2304.13705
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


class FrozenBatchNorm(nn.Module):
    """Scales and shifts channels by constants."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, normalised."""
        weight, bias, mean, variance = (
            buffer.reshape(1, -1, 1, 1) for buffer in (self.weight, self.bias, self.running_mean, self.running_var)
        )
        scale = weight * (variance + self.eps).rsqrt()
        return x * scale + (bias - mean * scale)


class _Block(nn.Module):
    def __init__(self, channels: int, made: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, made, 3, stride, 1, bias=False)
        self.bn1 = norm(made)
        self.conv2 = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.bn2 = norm(made)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != made:
            self.downsample = nn.Sequential(nn.Conv2d(channels, made, 1, stride, bias=False), norm(made))

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.downsample is None else self.downsample(x)
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + residual)


class ResNet(nn.Module):
    """A ResNet of basic blocks without its head; two blocks in each of four stages make it a ResNet-18."""

    def __init__(self, width: int = 64, stages: Sequence[int] = (2, 2, 2, 2), norm: Norm = FrozenBatchNorm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = norm(width)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.channels = width
        for stage, count in enumerate(stages):
            blocks = []
            for number in range(count):
                stride = 2 if stage and not number else 1
                blocks.append(_Block(self.channels, width * 2**stage, stride, norm))
                self.channels = width * 2**stage
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.num_stages = len(stages)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of pictures."""
        x = self.pool(torch.relu(self.bn1(self.conv1(x))))
        for stage in range(self.num_stages):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        return x


class Act(nn.Module):
    """The policy: a chunk of actions from the pictures of all cameras and the state of a robot."""

    def __init__(
        self,
        *,
        backbone: int,
        stages: Sequence[int],
        width: int,
        hidden: int,
        layers: int,
        heads: int,
        chunk: int,
        joints: int = 14,
        latent: int = 32,
        dropout: float = 0.0,
        norm: Norm = FrozenBatchNorm,
    ) -> None:
        super().__init__()

        def encoder() -> nn.ModuleList:
            return nn.ModuleList(
                nn.TransformerEncoderLayer(width, heads, hidden, dropout=dropout, batch_first=True)
                for _ in range(layers)
            )

        self.latent = latent
        self.vae = nn.ModuleDict(
            {"state": nn.Linear(joints, width), "action": nn.Linear(joints, width), "layers": encoder()}
        )
        self.vae_class = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.vae_positions = nn.Parameter(torch.randn(1, chunk + 2, width) * 0.02)
        self.vae_out = nn.Linear(width, 2 * latent)
        self.backbone = ResNet(backbone, stages, norm)
        self.image = nn.Conv2d(self.backbone.channels, width, 1)
        self.state = nn.Linear(joints, width)
        self.from_latent = nn.Linear(latent, width)
        self.encoder = encoder()
        self.queries = nn.Parameter(torch.randn(1, chunk, width) * 0.02)
        self.decoder = nn.ModuleList(
            [nn.TransformerDecoderLayer(width, heads, hidden, dropout=dropout, batch_first=True)]
        )
        self.head = nn.Linear(width, joints)

    def forward(self, front: Tensor, wrist: Tensor, state: Tensor, actions: Tensor) -> Tensor:
        """Return the loss of a batch: the error of the actions, and the divergence of the latent from a normal one.

        The latent is its mean, so that a step can be repeated.
        """
        mean, log_variance = self._encode(state, actions)
        tokens = [self.from_latent(mean)[:, None], self.state(state)[:, None]]
        for pictures in (front, wrist):
            tokens.append(self.image(self.backbone(pictures)).flatten(2).transpose(1, 2))
        memory = torch.cat(tokens, dim=1)
        for layer in self.encoder:
            memory = layer(memory)
        found = self.queries.expand(len(state), -1, -1)
        for layer in self.decoder:
            found = layer(found, memory)
        error = (self.head(found) - actions).abs().mean()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return error + 10.0 * divergence

    def _encode(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and logarithm of the variance of the latent."""
        first = self.vae_class.expand(len(state), -1, -1)
        tokens = torch.cat([first, self.vae["state"](state)[:, None], self.vae["action"](actions)], dim=1)
        tokens = tokens + self.vae_positions
        for layer in self.vae["layers"]:
            tokens = layer(tokens)
        mean, log_variance = self.vae_out(tokens[:, 0]).split(self.latent, dim=-1)
        return mean, log_variance
