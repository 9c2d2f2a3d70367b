"""Where the memory of CUDA graphs goes, on the stand-in for the GPU."""

from __future__ import annotations

import torch

from apollo_compile.device.gpu.run.ledger import GraphLedger, LaneLedger, ledger_of
from apollo_compile.ir import LaneId, Role
from tests.device.gpu.arena import SEGMENT_BYTES
from tests.device.gpu.fake_gpu import FakeGpu
from tests.device.gpu.run.test_execute import make_pair, step

BYTES = 4 * 4
"""Of a tensor of four numbers."""


def test_a_ledger_has_what_is_held_kept_and_copied() -> None:
    """The forward keeps what one lane made, the backward a gradient on either; both have the same pool."""
    gpu = FakeGpu(units=2)
    pair = make_pair(gpu)
    weight = torch.randn(4)
    for _ in range(4):
        step(pair, weight)
    found = {each.role: ledger_of(each) for each in gpu.captures}

    def ledger(role: Role, copied_out: int, kept: dict[int, int]) -> GraphLedger:
        lanes = (
            LaneLedger(lane=LaneId(1), held_bytes=SEGMENT_BYTES, kept_bytes=kept[1]),
            LaneLedger(lane=LaneId(2), held_bytes=SEGMENT_BYTES, kept_bytes=kept[2]),
            LaneLedger(lane=LaneId(0), held_bytes=0, kept_bytes=0),
        )
        return GraphLedger(role=role, variant=None, copied_in_bytes=BYTES, copied_out_bytes=copied_out, lanes=lanes)

    assert found == {
        Role.FORWARD: ledger(Role.FORWARD, BYTES, {1: BYTES, 2: 0}),
        Role.BACKWARD: ledger(Role.BACKWARD, 0, {1: BYTES, 2: BYTES}),
    }
