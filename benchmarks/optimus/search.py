"""Divide layers among stages, and an encoder beside a pipeline among stages and tensor ranks.

    balance_layers(costs, num_stages) -> layers per stage
    encoder_plans(sizes, memory) -> plans;  choose_plan(plans, ...) -> the best one, and its steps

The encoder's pipeline depth divides the pipeline's number of ranks, its tensor parallelism that of the pipeline, so
that replicas fill the devices of one pipeline evenly. Plans that do not fit into memory are dropped; of the others the
coarse fill is compared, which takes a fraction of the time, and the best one is filled finely.
Method: Optimus (arXiv 2408.03505).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apollo_compile.distributed.pipeline.fill import fill
from apollo_compile.distributed.pipeline.values import Encoder, FilledPlan, Filling, Schedule, StageTimes
from apollo_compile.errors import PipelinePlanError

BYTES_PER_PARAMETER = 6
"""Weights and gradients in two bytes each; optimizer state is divided among the ranks of data parallelism."""


def balance_layers(costs: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return how many layers each stage takes, in order, so that the most expensive stage is as cheap as possible.

    Raises:
        PipelinePlanError: there are fewer layers than stages.
    """
    if not 1 <= num_stages <= len(costs):
        raise PipelinePlanError(f"{len(costs)} layers cannot be divided among {num_stages} stages; use fewer stages")
    limits = range(max(costs), sum(costs) + 1)
    place = bisect.bisect_left(limits, True, key=lambda limit: len(_divide(costs, limit, num_stages)) <= num_stages)
    return tuple(_divide(costs, limits[place], num_stages))


def _divide(costs: Sequence[int], limit: int, num_stages: int) -> list[int]:
    """Return the layers per stage if each takes as many as the limit and the stages behind it allow."""
    counts: list[int] = []
    cost, count = 0, 0
    for index, layer in enumerate(costs):
        if count and (cost + layer > limit or len(costs) - index < num_stages - len(counts)):
            counts.append(count)
            cost, count = 0, 0
        cost, count = cost + layer, count + 1
    return [*counts, count]


def sum_stages(costs: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Return the cost of every stage."""
    layers = iter(costs)
    return tuple(sum(itertools.islice(layers, count)) for count in counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderPlan:
    """The division of one encoder among the devices of one pipeline."""

    pipeline_parallel: int
    tensor_parallel: int
    num_replicas: int
    """Per pipeline."""
    memory_bytes: int
    """Of a device: weights of pipeline and encoder, and the pipeline's activations."""


def encoder_plans(
    *,
    pipeline_parallel: int,
    tensor_parallel: int,
    pipeline_parameters: int,
    encoder_parameters: int,
    activation_bytes: int,
    memory_bytes: int,
) -> tuple[EncoderPlan, ...]:
    """Return the plans of an encoder that fit into memory, those with the shortest kernels first.

    The pipeline has `pipeline_parallel` ranks, of `tensor_parallel` devices each. `memory_bytes` are those of a device,
    of which the pipeline holds `activation_bytes`.

    Raises:
        PipelinePlanError: none fits.
    """
    num_devices = pipeline_parallel * tensor_parallel
    found: list[EncoderPlan] = []
    for tensor, depth in itertools.product(_divisors(tensor_parallel), _divisors(pipeline_parallel)):
        num_replicas = num_devices // (tensor * depth)
        weights = BYTES_PER_PARAMETER * (num_replicas * encoder_parameters + pipeline_parameters) // num_devices
        found.append(
            EncoderPlan(
                pipeline_parallel=depth,
                tensor_parallel=tensor,
                num_replicas=num_replicas,
                memory_bytes=weights + activation_bytes,
            )
        )
    fitting = [plan for plan in found if plan.memory_bytes <= memory_bytes]
    if not fitting:
        least = min(plan.memory_bytes for plan in found)
        raise PipelinePlanError(
            f"no plan of the encoder fits: the smallest needs {least} bytes per device, there are {memory_bytes}; "
            "use more devices per pipeline, or a smaller micro-batch"
        )
    return tuple(sorted(fitting, key=lambda plan: (-plan.tensor_parallel, plan.pipeline_parallel)))


def place_replicas(plan: EncoderPlan, pipeline_parallel: int, tensor_parallel: int) -> tuple[tuple[int, ...], ...]:
    """Return the devices of every replica: neighbouring ranks in one column."""
    return tuple(
        tuple(column * pipeline_parallel + first + stage for stage in range(plan.pipeline_parallel))
        for column in range(tensor_parallel // plan.tensor_parallel)
        for first in range(0, pipeline_parallel, plan.pipeline_parallel)
    )


def choose_plan(
    plans: Sequence[EncoderPlan],
    make_encoder: Callable[[EncoderPlan], Encoder],
    schedule: Schedule,
    times: StageTimes,
) -> tuple[EncoderPlan, FilledPlan, FilledPlan]:
    """Return the plan with the shortest coarse step, to a percent, and the step with it, filled coarsely and finely."""
    made = [(plan, make_encoder(plan)) for plan in plans]
    steps_ns = [fill(schedule, times, (encoder,), filling=Filling.COARSE, max_moves=0).step_ns for _, encoder in made]
    ranks = [round(100 * step_ns / min(steps_ns)) for step_ns in steps_ns]
    plan, encoder = made[ranks.index(min(ranks))]
    return plan, fill(schedule, times, (encoder,), filling=Filling.COARSE), fill(schedule, times, (encoder,))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
