"""The strong scaling of Optimus, simulated beside its published figures: ViT-22B and GPT-175B on 1,536 to 3,072 GPUs.

    simulate_size(size) -> SizeResult;  compare(results) -> rows, computed beside published

Published (arXiv 2408.03505): step times of Megatron-LM, of a balanced division of all layers, and of Optimus; the share
of encoder work that is hidden after coarse and after fine filling; 0.167 s in which parameters are gathered and 0.458 s
in which gradients are reduced. Shapes and parallel plans are theirs. Assumed, since it is not published:

- `EFFICIENCY` of the language model's kernels and `ENCODER_EFFICIENCY` of the encoder's are fitted: the first to the
  balanced steps, the second to the coarse shares, which are one constant over the number of micro-batches.
- `KERNELS_PER_LAYER`: a layer of the encoder is so many kernels of equal length, none of which is interrupted.
- Nothing runs in the gaps in which kernels wait for collectives of tensor parallelism, which the published runs fill
  too.
- Transfers between ranks are free, and so is the encoder's own communication.
- Megatron-LM has the whole encoder in its first stage, in front of the language model's first layers. How the layers
  were divided in the published run is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apollo_compile.distributed.pipeline.schedules import interleaved
from apollo_compile.distributed.pipeline.simulate import end_of, simulate
from apollo_compile.distributed.pipeline.values import Encoder, FilledPlan, Schedule, StageTimes
from apollo_compile.units import NS_PER_MS, NS_PER_S
from benchmarks.optimus.models import (
    BACKWARD_FORWARDS,
    Batch,
    Hardware,
    Transformer,
    layer_activation_bytes,
    layer_ns,
)
from benchmarks.optimus.search import (
    EncoderPlan,
    balance_layers,
    choose_plan,
    encoder_plans,
    place_replicas,
    sum_stages,
)

EFFICIENCY = 0.39
ENCODER_EFFICIENCY = 0.21
KERNELS_PER_LAYER = 24

PIPELINE_PARALLEL, TENSOR_PARALLEL, STAGES_PER_RANK = 8, 8, 12
GATHER_NS, REDUCE_NS = 167 * NS_PER_MS, 458 * NS_PER_MS

ENCODER = Transformer(name="ViT-22B", width=6144, num_layers=48)
LANGUAGE_MODEL = Transformer(name="GPT-175B", width=12288, num_layers=96)
BATCH = Batch(sequence=2048, samples=2)
HARDWARE = Hardware(flops_per_s=989e12, memory_bytes=80_000_000_000)

TIME_TOLERANCE = 0.07
SPEEDUP_TOLERANCE = 0.03
SHARE_TOLERANCE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """One size of the strong scaling, with its published figures."""

    num_gpus: int
    num_microbatches: int
    megatron_s: float
    balanced_s: float
    optimus_s: float
    coarse_share: float
    fine_share: float


SIZES = (
    Size(
        num_gpus=1536, num_microbatches=32,
        megatron_s=10.65, balanced_s=10.43, optimus_s=9.80, coarse_share=0.343, fine_share=0.575,
    ),
    Size(
        num_gpus=2048, num_microbatches=24,
        megatron_s=8.26, balanced_s=8.06, optimus_s=7.29, coarse_share=0.458, fine_share=0.693,
    ),
    Size(
        num_gpus=3072, num_microbatches=16,
        megatron_s=5.91, balanced_s=5.87, optimus_s=4.87, coarse_share=0.687, fine_share=0.850,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeResult:
    """The computed steps of one size."""

    size: Size
    megatron_ns: int
    balanced_ns: int
    encoder_plan: EncoderPlan
    coarse: FilledPlan
    fine: FilledPlan


@dataclass(frozen=True, slots=True)
class Row:
    """A published figure and the computed one."""

    num_gpus: int
    name: str
    computed: float
    published: float
    tolerance: float
    is_relative: bool

    @property
    def difference(self) -> float:
        """Computed less published; of times as a share of the published one."""
        return (self.computed - self.published) / (self.published if self.is_relative else 1)

    @property
    def is_within(self) -> bool:
        """Whether the difference is within the tolerance."""
        return abs(self.difference) <= self.tolerance


def simulate_size(size: Size) -> SizeResult:
    """Return the steps of one size: Megatron-LM, balanced, and with the encoder in the bubbles."""
    schedule = interleaved(PIPELINE_PARALLEL, STAGES_PER_RANK, size.num_microbatches)
    language_ns = _layer_ns(LANGUAGE_MODEL, EFFICIENCY)
    encoder_ns = _layer_ns(ENCODER, ENCODER_EFFICIENCY)
    language = [language_ns] * LANGUAGE_MODEL.num_layers
    layers = [encoder_ns] * ENCODER.num_layers + language
    balanced = sum_stages(layers, balance_layers(layers, schedule.num_stages))
    per_stage = sum_stages(language, balance_layers(language, schedule.num_stages))
    megatron = (per_stage[0] + ENCODER.num_layers * encoder_ns, *per_stage[1:])
    times = _stage_times(per_stage)
    held = ((STAGES_PER_RANK - 1) * PIPELINE_PARALLEL + 2 * (PIPELINE_PARALLEL - 1) + 1) * max(
        1, LANGUAGE_MODEL.num_layers // schedule.num_stages
    )
    plans = encoder_plans(
        pipeline_parallel=PIPELINE_PARALLEL,
        tensor_parallel=TENSOR_PARALLEL,
        pipeline_parameters=LANGUAGE_MODEL.parameters,
        encoder_parameters=ENCODER.parameters,
        activation_bytes=held * layer_activation_bytes(LANGUAGE_MODEL, BATCH, tensor_parallel=TENSOR_PARALLEL),
        memory_bytes=HARDWARE.memory_bytes,
    )
    plan, coarse, fine = choose_plan(plans, make_encoder, schedule, times)
    return SizeResult(
        size=size,
        megatron_ns=_step_ns(schedule, megatron),
        balanced_ns=_step_ns(schedule, balanced),
        encoder_plan=plan,
        coarse=coarse,
        fine=fine,
    )


def make_encoder(plan: EncoderPlan) -> Encoder:
    """Return the encoder as its parallel plan splits it."""
    layer = layer_ns(ENCODER, BATCH, HARDWARE, tensor_parallel=plan.tensor_parallel, efficiency=ENCODER_EFFICIENCY)
    kernel_ns = round(layer / KERNELS_PER_LAYER)
    num_kernels = ENCODER.num_layers // plan.pipeline_parallel * KERNELS_PER_LAYER
    return Encoder(
        name=ENCODER.name,
        forward_ns=((kernel_ns,) * num_kernels,) * plan.pipeline_parallel,
        backward_ns=((kernel_ns,) * (BACKWARD_FORWARDS * num_kernels),) * plan.pipeline_parallel,
        replicas=place_replicas(plan, PIPELINE_PARALLEL, TENSOR_PARALLEL),
    )


def compare(results: Sequence[SizeResult]) -> tuple[Row, ...]:
    """Return every published figure beside the computed one, by size."""
    rows = []
    for result in results:
        size = result.size
        optimus_s = result.fine.step_ns / NS_PER_S
        balanced_s = result.balanced_ns / NS_PER_S
        speedup = balanced_s / optimus_s
        for name, computed, published, tolerance, is_relative in (
            ("Megatron-LM, s", result.megatron_ns / NS_PER_S, size.megatron_s, TIME_TOLERANCE, True),
            ("balanced, s", balanced_s, size.balanced_s, TIME_TOLERANCE, True),
            ("Optimus, s", optimus_s, size.optimus_s, TIME_TOLERANCE, True),
            ("balanced over Optimus", speedup, size.balanced_s / size.optimus_s, SPEEDUP_TOLERANCE, False),
            ("hidden, coarse", result.coarse.hidden_share, size.coarse_share, SHARE_TOLERANCE, False),
            ("hidden, fine", result.fine.hidden_share, size.fine_share, SHARE_TOLERANCE, False),
        ):
            rows.append(Row(size.num_gpus, name, computed, published, tolerance, is_relative))
    return tuple(rows)


def _layer_ns(model: Transformer, efficiency: float) -> int:
    return layer_ns(model, BATCH, HARDWARE, tensor_parallel=TENSOR_PARALLEL, efficiency=efficiency)


def _stage_times(forward_ns: Sequence[int]) -> StageTimes:
    return StageTimes(
        forward_ns=tuple(forward_ns),
        backward_ns=tuple(BACKWARD_FORWARDS * duration_ns for duration_ns in forward_ns),
        lead_ns=GATHER_NS,
        trail_ns=REDUCE_NS,
    )


def _step_ns(schedule: Schedule, forward_ns: Sequence[int]) -> int:
    times = _stage_times(forward_ns)
    return end_of(simulate(schedule, times), times)
