"""Device profiles with round numbers, for predictions that can be done by hand."""

from __future__ import annotations

from dataclasses import replace

from apollo_compile.ir import KernelKind
from apollo_compile.target.profile import Arithmetic, DeviceProfile, Rate

CPU = DeviceProfile(
    kind="cpu",
    name="test",
    source="default",
    units=4,
    unit_counts=(1, 2, 3, 4),
    arithmetic=(
        Arithmetic(kind=KernelKind.LOOP, dtype="float32", rates=(Rate(size=1, per_s=(1e9, 2e9, 3e9, 4e9)),)),
        Arithmetic(kind=KernelKind.MATMUL, dtype="float32", rates=(Rate(size=1, per_s=(1e10, 2e10, 3e10, 4e10)),)),
        Arithmetic(kind=KernelKind.MATMUL, dtype="float64", rates=(Rate(size=1, per_s=(5e9, 1e10, 1.5e10, 2e10)),)),
    ),
    near_bytes_per_s=(Rate(size=1, per_s=(1e9, 1.5e9, 1.8e9, 2e9)),),
    far_bytes_per_s=(Rate(size=1000, per_s=(1e9, 1.5e9, 1.8e9, 2e9)), Rate(size=2000, per_s=(5e8, 5e8, 5e8, 5e8))),
    kernel_ns=10,
    parallel_ns=5,
    cold_ns=1,
    launch_ns=100,
    tensor_ns=3,
    handover_ns=7,
    slowdown=((1.0, 1.1), (1.2, 1.5)),
)

CUDA = replace(CPU, kind="cuda", parallel_ns=0, cold_ns=0)
