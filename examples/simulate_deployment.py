"""Plan a simulated deployment: python examples/simulate_deployment.py --tasks 10 --devices 64.

Contrastive tasks over pairs of modalities with shared encoders of the sizes of ImageBind (Girdhar et al., 2023,
https://arxiv.org/abs/2305.05665), as Spindle trains them. Nothing is measured: times follow from numbers of operations
and a device of 300 TFLOP/s, 148 units and links of 50 GB/s.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from apollo_compile.cost_model.collectives import Link
from apollo_compile.distributed.deploy.plan import DeploymentPlan
from apollo_compile.passes.deploy import (
    EqualDevices,
    ModuleCall,
    ModuleState,
    StepWork,
    group_sizes,
    plan_deployment,
    replicated,
)

ENCODERS = {  # parameters in millions, tokens per sample, width
    "vision": (632, 257, 1280),
    "text": (354, 77, 1024),
    "audio": (86, 229, 768),
    "depth": (22, 197, 384),
    "thermal": (86, 197, 768),
    "imu": (20, 250, 512),
}
TASKS = {  # samples per step
    ("vision", "text"): 4096,
    ("vision", "audio"): 2048,
    ("vision", "depth"): 1024,
    ("vision", "thermal"): 512,
    ("vision", "imu"): 1024,
    ("text", "audio"): 2048,
    ("text", "depth"): 512,
    ("text", "thermal"): 512,
    ("text", "imu"): 512,
    ("audio", "imu"): 1024,
}
PEAK, OVERHEAD_NS, UNITS = 3e14, 200_000, 148
QUOTAS = (UNITS // 4, UNITS // 2, UNITS)
FILLING_SAMPLES = 1.5
"""Samples per device with which a device would run at half of its rate."""


def groups_on(devices: int) -> tuple[tuple[int, int], ...]:
    """Return the numbers of devices and of units that a module may have."""
    return tuple((size, units) for size in group_sizes(devices) for units in QUOTAS)


def times_of(flops: float, samples: int, devices: int) -> tuple[int, ...]:
    """Return the times of a forward: a share of the units costs nothing while its kernels cannot fill more."""
    found = []
    for size, units in groups_on(devices):
        each = samples / size
        used = each / (each + FILLING_SAMPLES)
        found.append(OVERHEAD_NS + round(1e9 * flops * each / (PEAK * min(used, units / UNITS))))
    return tuple(found)


def multitask_clip(tasks: int, devices: int) -> StepWork:
    """Return the step of the first `tasks` tasks."""
    calls: list[ModuleCall] = []
    modules: dict[str, ModuleState] = {}
    for pair, samples in list(TASKS.items())[:tasks]:
        feature_bytes = samples * 1024 * 2
        for encoder in pair:
            params, tokens, width = ENCODERS[encoder]
            size = params * 1_000_000
            forward_ns = times_of(2.0 * size * tokens, samples, devices)
            modules[encoder] = replicated(encoder, groups_on(devices), state_bytes=16 * size, gradient_bytes=2 * size)
            calls.append(
                ModuleCall(
                    name=f"{encoder} of {'-'.join(pair)}",
                    module=encoder,
                    inputs=(),
                    sent_bytes=feature_bytes,
                    returned_bytes=0,
                    activation_bytes=int(samples * tokens * size / (12 * width) * 18),
                    forward_ns=forward_ns,
                    backward_ns=tuple(2 * ns for ns in forward_ns),
                )
            )
        name = f"loss of {'-'.join(pair)}"
        groups = ((min(8, devices), QUOTAS[0]),)
        modules[name] = replicated(name, groups, state_bytes=0, gradient_bytes=0)
        calls.append(
            ModuleCall(
                name=name,
                module=name,
                inputs=tuple(call.name for call in calls[-2:]),
                sent_bytes=0,
                returned_bytes=2 * feature_bytes,
                activation_bytes=samples * 4096,
                forward_ns=(OVERHEAD_NS,),
                backward_ns=(OVERHEAD_NS,),
            )
        )
    return StepWork(modules=tuple(modules.values()), calls=tuple(calls))


def main() -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(description="Plan a simulated deployment of Multitask-CLIP.")
    parser.add_argument("--tasks", type=int, default=10, choices=range(1, len(TASKS) + 1))
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--memory", type=float, default=80.0, help="GiB per device")
    parser.add_argument("--seconds", type=float, default=10.0, help="time of the search")
    parser.add_argument("--svg", type=Path, help="draw the step into this file")
    args = parser.parse_args()
    cluster = EqualDevices(
        devices=args.devices, units=UNITS, memory_bytes=int(args.memory * 2**30), link=Link(2e-5, 50e9)
    )
    found = plan_deployment(multitask_clip(args.tasks, args.devices), cluster, seconds=args.seconds)
    plan = DeploymentPlan(found)
    print(plan)
    if args.svg is not None:
        args.svg.write_text(plan.to_svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
