"""Programs on native lanes of the CPU."""

from __future__ import annotations

import threading

import torch

from apollo_compile.device.cpu.execute import Executable
from apollo_compile.ir import LaneId
from apollo_compile.passes.plan import plan_in_order
from apollo_compile.target.lanes import lane_catalogue, with_network
from apollo_compile.target.target import CompiledBody
from tests.builders import follow, graph


def test_a_lane_without_units_waits_beside_the_callers_lane() -> None:
    """Its segment ends only when one on all units has run; it has one thread, since that lane has the cores."""
    made, lanes = graph((), ()), with_network(lane_catalogue(1))
    has_computed = threading.Event()

    def communicate(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        assert has_computed.wait(timeout=60)
        return [inputs[0] + torch.get_num_threads()]

    def compute(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        has_computed.set()
        return [2 * inputs[0]]

    *_, program = follow(made, plan_in_order([LaneId(1), LaneId(0)], lanes))
    bodies = [CompiledBody(function=function) for function in (communicate, compute)]
    executable = Executable(program, made, bodies, mutates=False, park_team=True)
    assert [float(each) for each in executable.run([torch.tensor(10.0)]) if each is not None] == [11.0, 20.0]
    assert {span.segment: span.lane for span in executable.trace().spans} == {0: 1, 1: 0}
