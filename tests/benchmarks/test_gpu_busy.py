"""How much of a GPU a profile shows to be busy, and with what."""

from __future__ import annotations

import pytest

from benchmarks.harness import gpu_busy
from benchmarks.harness.gpu_busy import KernelRecord, StepKernels, kernel_classes, read_step


def kernel(begin: int, end: int, blocks: int, context: int = 1, stream: int = 7) -> KernelRecord:
    """Return a kernel of a profile."""
    return KernelRecord(begin_ns=begin, end_ns=end, blocks=blocks, stream=stream, context=context)


@pytest.mark.parametrize(
    ("kernels", "busy", "together"),
    [
        ([], 0.0, 0.0),
        ([kernel(0, 10, 50)], 0.5, 0.0),
        ([kernel(0, 10, 1000)], 1.0, 0.0),
        ([kernel(0, 10, 1000, context=2)], 0.2, 0.0),
        ([kernel(0, 10, 30), kernel(30, 40, 90)], 0.3, 0.0),
        ([kernel(0, 10, 60, stream=1), kernel(5, 10, 90, stream=2)], 0.8, 0.5),
        ([kernel(0, 10, 10, context=2, stream=1), kernel(5, 15, 90, context=2, stream=2)], 1 / 6, 1 / 3),
        ([kernel(0, 10, 10), kernel(10, 20, 30)], 0.2, 0.0),
    ],
)
def test_busy_sms_are_those_of_blocks_within_the_quota(
    kernels: list[KernelRecord], busy: float, together: float
) -> None:
    """Of a device with 100 SMs, of which context 2 has 20; idle time counts, and no SM twice."""
    assert gpu_busy.busy_share(kernels, num_sms=100, sms={2: 20}) == pytest.approx(busy)
    assert gpu_busy.side_by_side_share(kernels) == pytest.approx(together)


def event(name: str, cat: str, ts: float, context: int, grid: list[int]) -> dict[str, object]:
    """Return an event of a profile."""
    args = {"grid": grid, "stream": 7, "context": context}
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": 2.5, "args": args}


def test_a_profile_tells_kernels_from_markers_and_all_else() -> None:
    """By what torch's profiler writes; a marker has a block for every SM of its context.

    Its memory is filled before it; where one context has several markers, the largest counts.
    """
    events: list[object] = [
        event("gemm", "kernel", 20.0, 1, [4, 2, 1]),
        event("_note_and_spin_0d1d", "kernel", 1.0, 3, [64, 1, 1]),
        event("norm", "kernel", 10.5, 3, [9, 1, 1]),
        event("fill", "kernel", 0.5, 3, [700, 1, 1]),
        event("_note_and_spin_0d1d", "kernel", 3.5, 1, [96, 1, 1]),
        event("fill", "kernel", 4.0, 1, [900, 1, 1]),
        event("_note_and_spin_0d1d", "kernel", 6.5, 1, [32, 1, 1]),
        {"ph": "X", "name": "cudaGraphLaunch", "cat": "cuda_runtime", "ts": 1, "dur": 1, "args": {}},
        {"ph": "M", "name": "process_name", "args": {}},
    ]
    assert read_step({"traceEvents": events}) == StepKernels(
        kernels=(kernel(10_500, 13_000, 9, context=3), kernel(20_000, 22_500, 8)),
        sms={3: 64, 1: 96},
        mixed_contexts=(1,),
    )
    unmarked = [event("gemm", "kernel", 20.0, 1, [4, 2, 1])]
    assert read_step({"traceEvents": unmarked}) == StepKernels(kernels=(kernel(20_000, 22_500, 8),), sms={})


def test_kernels_are_counted_by_class() -> None:
    """By their names; markers, and what was before them, are none."""
    names = (
        "void pytorch_flash::flash_fwd_kernel<...>",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n",
        "nvjet_hsh_128x256_64x4",
        "triton_tem_fused_mm_3",
        "triton_poi_fused_add_gelu_2",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
        "void at::native::direct_copy_kernel_cuda",
        "void at::native::reduce_kernel<512>",
    )
    early = {**event("fill", "kernel", 0.0, 1, [1, 1, 1]), "dur": 100.0}
    marker = event("_note_and_spin", "kernel", 5.0, 1, [1, 1, 1])
    step = [event(name, "kernel", 10.0, 1, [1, 1, 1]) for name in names]
    found = kernel_classes({"traceEvents": [early, marker, *step]})
    others = ("attention", "Inductor's loops", "optimizer", "copies and fills", "others")
    assert {name: entry["kernels"] for name, entry in found.items()} == {"matmul": 3, **dict.fromkeys(others, 1)}
    assert found["matmul"]["ns"] == 7_500
