"""What every rank of the pipelines does."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from apollo_compile.distributed.fill_bubbles import BubbleEncoder, FilledPipeline, fill_bubbles
from apollo_compile.distributed.measured_plan import MeasuredPlan
from apollo_compile.distributed.pipeline.values import StageTimes
from apollo_compile.errors import PipelinePlanError
from apollo_compile.units import NS_PER_MS, NS_PER_S
from tests.distributed.work import SIZE, Result, Scenario

STEPS = 10
MICROBATCHES = 4
BATCH = 8
WIDTH, TOKENS, VOCABULARY, PATCHES, PATCH = 16, 6, 32, 4, 12
SHORT_PATIENCE = datetime.timedelta(seconds=2)
"""Timeout of the group in which one rank dies."""


class Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.is_causal = is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.is_causal else None
        return self.layer(x, src_mask=mask)


class Patches(nn.Module):
    """The first segment of a ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(PATCH, WIDTH)
        self.place = nn.Parameter(torch.randn(PATCHES, WIDTH))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.project(images) + self.place


class Stage(nn.Module):
    """A stage of a GPT: the first embeds tokens, and adds features in front; the last predicts."""

    def __init__(self, index: int, num_stages: int, encoders: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else None
        self.layer = Layer(is_causal=True)
        self.head = nn.Linear(WIDTH, VOCABULARY) if index == num_stages - 1 else None
        self.inside = nn.ModuleDict(encoders or {})

    def forward(
        self, x: torch.Tensor, images: torch.Tensor | None = None, sounds: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
            for name, features in (("images", images), ("sounds", sounds)):
                if features is not None:
                    if name in self.inside:
                        features = self.inside[name](features)
                    x = x + features.mean(dim=1, keepdim=True)
        x = self.layer(x)
        return x if self.head is None else self.head(x)


def make_vit(seed: int) -> nn.Sequential:
    """Return an encoder of three segments; the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(Patches(), Layer(is_causal=False), Layer(is_causal=False))


def make_stages(num_stages: int, encoders: Mapping[str, nn.Module] | None = None) -> list[Stage]:
    """Return all stages; the same at every call."""
    torch.manual_seed(0)
    stages = [Stage(index, num_stages) for index in range(num_stages)]
    stages[0].inside.update(encoders or {})
    return stages


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of a micro-batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, targets, images and sounds of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=generator)
    target = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=generator)
    images, sounds = (torch.randn(BATCH, PATCHES, PATCH, generator=generator) for _ in range(2))
    return tokens, target, images, sounds


def make_schedule(
    name: str, stages: Sequence[Stage], rank: int, group: dist.ProcessGroup | None = None
) -> tuple[Any, list[Stage]]:
    """Return the schedule of this rank, and its stages; their activations travel on `group`."""
    own = [
        PipelineStage(stages[index], index, len(stages), torch.device("cpu"), group=group)
        for index in range(rank, len(stages), SIZE)
    ]
    mine = [stages[index] for index in range(rank, len(stages), SIZE)]
    if name == "interleaved":
        return ScheduleInterleaved1F1B(own, MICROBATCHES, loss_fn=loss_of), mine
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[name]
    return kind(own[0], MICROBATCHES, loss_fn=loss_of), mine


def times_of(num_stages: int) -> StageTimes:
    """Return durations of a pipeline that gives encoders some bubbles."""
    return StageTimes(forward_ns=(100,) * num_stages, backward_ns=(200,) * num_stages, transfer_ns=1)


def bubble_encoder(vit: nn.Sequential, feeds: str = "images", **more: Any) -> BubbleEncoder:
    """Return a ViT as the planner wants it; its durations are given unless they are among the rest."""
    features = torch.zeros(BATCH // MICROBATCHES, PATCHES, WIDTH)
    given = {"forward_ns": (5, 25, 25), "backward_ns": (10, 50, 50), **more}
    return BubbleEncoder(segments=list(vit), feeds=feeds, features=features, **given)


def is_text(step: int, microbatch: int, text_only: Sequence[int]) -> bool:
    """Whether a micro-batch has no images: some of every step, and all of the third, if there are any."""
    return microbatch in text_only or (bool(text_only) and step == 2)


def train(
    rank: int,
    schedule: str = "1f1b",
    *,
    encoders: Sequence[str] = ("images",),
    frozen: Sequence[str] = (),
    text_only: Sequence[int] = (),
    is_filled: bool,
    is_measured: bool = False,
    **more: Any,
) -> Result:
    """Train for some steps, with encoders in bubbles or on the first stage; durations are given or measured."""
    vits = {name: make_vit(seed) for seed, name in enumerate(encoders, 1)}
    for name in frozen:
        vits[name].requires_grad_(False)
    num_stages = 2 * SIZE if schedule == "interleaved" else SIZE
    made, mine = make_schedule(schedule, make_stages(num_stages, None if is_filled else vits), rank)
    filled: FilledPipeline | None = None
    if is_filled:
        if is_measured:
            more = {"forward_ns": (), "backward_ns": (), **more}
        own = [bubble_encoder(vit, name, **more) for name, vit in vits.items()]
        filled = fill_bubbles(made, own, times=None if is_measured else times_of(num_stages))
    parameters = [p for module in (*mine, *(vits.values() if is_filled else ())) for p in module.parameters()]
    optimizer = torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.05, momentum=0.9)
    losses: list[float] = []
    predictions = []
    for step in range(STEPS):
        predictions.append(None if filled is None else filled.prediction)
        tokens, target, *media = batch_of(step)
        inputs = {
            name: [
                None if is_text(step, index, text_only) else part
                for index, part in enumerate(value.chunk(MICROBATCHES))
            ]
            for name, value in zip(("images", "sounds"), media, strict=True)
            if name in encoders
        }
        args, found = (tokens,) if rank == 0 else (), list[torch.Tensor]()
        kwargs = {"target": target, "losses": found} if rank == SIZE - 1 else {}
        if filled is not None:
            filled(*args, encoder_inputs=inputs, **kwargs)
        else:
            whole = {name: value for name, value in zip(("images", "sounds"), media, strict=True) if name in encoders}
            made.step(*args, **(whole if rank == 0 else {}), **kwargs)
        losses += [loss.item() for loss in found]
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "stages": [{k: v for k, v in m.state_dict().items() if not k.startswith("inside")} for m in mine],
        "encoders": {name: vit.state_dict() for name, vit in vits.items()},
        "orders": None if filled is None else [[str(op) for op in row] for row in filled.orders],
        "predictions": predictions,
    }


def train_alone(text_only: Sequence[int] = ()) -> Result:
    """Train in one process, without a pipeline."""
    stages, vit = make_stages(SIZE), make_vit(1)
    parameters = [p for module in (*stages, vit) for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        batches = zip(*(part.chunk(MICROBATCHES) for part in batch_of(step)), strict=True)
        for index, (tokens, target, images, _) in enumerate(batches):
            features = None if is_text(step, index, text_only) else vit(images)
            loss = loss_of(stages[1](stages[0](tokens, images=features)), target)
            losses.append(loss.item())
            (loss / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "stages": [stage.state_dict() for stage in stages],
        "encoders": {"images": vit.state_dict()},
    }


def accumulate(rank: int) -> Result:
    """Return gradients after two steps without an optimizer: what was there stays, and is not summed again."""
    vit = make_vit(1)
    schedule, _ = make_schedule("1f1b", make_stages(SIZE), rank)
    filled = fill_bubbles(schedule, bubble_encoder(vit), times=times_of(SIZE))
    tokens, target, images, _ = batch_of(0)
    found = []
    for _ in range(2):
        args = (tokens,) if rank == 0 else ()
        filled(*args, encoder_inputs={"images": images}, **({"target": target} if rank == SIZE - 1 else {}))
        found.append([p.grad.clone() for p in vit.parameters() if p.grad is not None])
    return {"gradients": found}


STAGE_MS = ((40, 10), (10, 40))
"""By stage, forward and backward: each rank waits for the other one, so that waiting would be seen."""
SEGMENT_MS = ((4, 8), (20, 40))
"""The same by segment of the encoder."""


class _Sleep(torch.autograd.Function):
    """Hands on a tensor and its gradient after a while."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Sleeper(nn.Module):
    """A module that takes a given time; features are added to its input."""

    def __init__(self, forward_ns: int, backward_ns: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.durations = forward_ns / NS_PER_S, backward_ns / NS_PER_S

    def forward(self, x: torch.Tensor, features: torch.Tensor | None = None) -> torch.Tensor:
        if features is not None:
            x = x + features
        return _Sleep.apply(x * self.scale, *self.durations)


class FailingStage(Sleeper):
    """A stage that takes no time; one of its backwards fails, counted from when that is set."""

    num_left = 0

    def forward(self, x: torch.Tensor, features: torch.Tensor | None = None) -> torch.Tensor:
        x = super().forward(x, features)
        x.register_hook(self.count_down)
        return x

    def count_down(self, gradient: torch.Tensor) -> None:
        """Fail when enough gradients have come."""
        self.num_left -= 1
        if self.num_left == 0:
            raise ArithmeticError("this backward fails")


def step_sleepers(
    rank: int,
    num_steps: int,
    stage: Sleeper,
    segments: Sequence[Sleeper],
    *,
    times: StageTimes | None = None,
    fails_in: int | None = None,
) -> Result:
    """Return what a pipeline of sleepers follows before every step and behind the last, and what is said of it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger(MeasuredPlan.__module__)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, SIZE, torch.device("cpu")),
        MICROBATCHES,
        loss_fn=lambda output, target: ((output - target) ** 2).sum(),
    )
    encoder = BubbleEncoder(segments=segments, feeds="features", features=torch.zeros(1, 4))
    filled = fill_bubbles(schedule, encoder, times=times)
    followed = [(filled.orders, filled.replica_of, filled.prediction)]
    num_failed = 0
    for step in range(1, num_steps + 1):
        if step == fails_in:  # at the last backward, when no other rank waits for this one
            stage.num_left = MICROBATCHES
        rows = torch.ones(MICROBATCHES, 4)
        try:
            filled(
                *([rows] if rank == 0 else []), encoder_inputs={"features": rows}, **({"target": rows} if rank else {})
            )
        except (ArithmeticError, RuntimeError):
            num_failed += 1
        followed.append((filled.orders, filled.replica_of, filled.prediction))
    logger.removeHandler(handler)
    return {"followed": followed, "lines": lines, "num_failed": num_failed}


def measure(rank: int) -> Result:
    """Measure sleepers of known durations."""
    segments = [Sleeper(forward * NS_PER_MS, backward * NS_PER_MS) for forward, backward in SEGMENT_MS]
    forward, backward = STAGE_MS[rank]
    return step_sleepers(rank, 3, Sleeper(forward * NS_PER_MS, backward * NS_PER_MS), segments)


def measure_segments(rank: int) -> Result:
    """Measure an encoder beside stages whose durations are given."""
    return step_sleepers(rank, 3, Sleeper(0, 0), [Sleeper(0, 0)], times=times_of(SIZE))


def fail_once(rank: int, step: int) -> Result:
    """Fail on the first rank in a step, go on, and measure."""
    stage, frozen = FailingStage(0, 0), Sleeper(0, 0).requires_grad_(False)
    return step_sleepers(rank, 6, stage, [frozen], fails_in=step if rank == 0 else None)


def refusals(rank: int) -> Result:
    """Return what is said of what cannot be filled."""
    times = times_of(SIZE)
    vit = make_vit(1)

    def attempt(call: Callable[[], Any]) -> str:
        try:
            call()
        except PipelinePlanError as error:
            return str(error)
        return "nothing"

    def schedule() -> Any:
        return make_schedule("1f1b", make_stages(SIZE), rank)[0]

    filled = fill_bubbles(schedule(), bubble_encoder(vit), times=times)
    stages = make_stages(SIZE)
    fully_shard(stages[rank])
    sharded = make_vit(1)
    fully_shard(sharded)
    encoder = bubble_encoder(vit)
    return {
        "stage under FSDP2": attempt(
            lambda: fill_bubbles(make_schedule("1f1b", stages, rank)[0], encoder, times=times)
        ),
        "encoder under FSDP2": attempt(
            lambda: fill_bubbles(schedule(), replace(encoder, segments=[sharded], forward_ns=(1,)), times=times)
        ),
        "durations": attempt(lambda: fill_bubbles(schedule(), replace(encoder, forward_ns=(1,)), times=times)),
        "schedule": attempt(lambda: fill_bubbles(object(), encoder, times=times)),
        "inputs": attempt(lambda: filled(encoder_inputs={})),
        "parts": attempt(lambda: filled(encoder_inputs={"images": [None]})),
    }


def death(rank: int) -> Result:
    """Return what a rank is told whose neighbour takes no second step, so that features never come."""
    group = dist.new_group(timeout=SHORT_PATIENCE)
    # From 2.15 on torch waits for its own sends before it raises, as long as their group does.
    schedule, _ = make_schedule("1f1b", make_stages(SIZE), rank, dist.new_group(timeout=SHORT_PATIENCE))
    filled = fill_bubbles(schedule, bubble_encoder(make_vit(1)), times=times_of(SIZE), group=group)
    tokens, target, images, _ = batch_of(0)
    media, error = {"images": images}, "none"
    if rank == 0:
        filled(tokens, encoder_inputs=media)
        try:
            filled(tokens, encoder_inputs=media)
        except RuntimeError as problem:
            error = str(problem)
    else:
        filled(encoder_inputs=media, target=target)
    dist.barrier()
    return {"error": error}


SCENARIOS: dict[int, dict[str, Scenario]] = {
    SIZE: {
        "1f1b on stage 0": partial(train, is_filled=False),
        "1f1b in bubbles": partial(train, is_filled=True),
        "1f1b in bubbles, few live": partial(train, is_filled=True, max_live=1),
        "interleaved on stage 0": partial(train, schedule="interleaved", is_filled=False),
        "interleaved in bubbles": partial(train, schedule="interleaved", is_filled=True),
        "gpipe in bubbles": partial(train, schedule="gpipe", is_filled=True),
        "frozen on stage 0": partial(train, frozen=("images",), is_filled=False),
        "frozen in bubbles": partial(train, frozen=("images",), is_filled=True),
        "two on stage 0": partial(train, encoders=("images", "sounds"), frozen=("sounds",), is_filled=False),
        "two in bubbles": partial(train, encoders=("images", "sounds"), frozen=("sounds",), is_filled=True),
        "text only": partial(train, text_only=(1, 3), is_filled=True),
        "text only, alone": lambda rank: train_alone(text_only=(1, 3)),
        "1f1b in bubbles, measured": partial(train, is_filled=True, is_measured=True),
        "interleaved in bubbles, measured": partial(train, schedule="interleaved", is_filled=True, is_measured=True),
        "text only, measured": partial(train, text_only=(1, 3), is_filled=True, is_measured=True),
        "measured": measure,
        "segments measured": measure_segments,
        "failure in step 2": partial(fail_once, step=2),
        "failure in step 3": partial(fail_once, step=3),
        "accumulate": accumulate,
        "refusals": refusals,
        "death": death,
    }
}
"""By the number of ranks that run them."""
