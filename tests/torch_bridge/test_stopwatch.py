"""Pieces of work on a device, timed."""

from __future__ import annotations

import time

import torch

from apollo_compile.torch_bridge.stopwatch import Stopwatch


def test_pieces_are_read_once_and_in_order_with_time_between_them_left_out() -> None:
    """Their sum is within that of a clock around all of them, which the time between makes longer.

    A piece that did not end is forgotten, as are those before it.
    """
    watch = Stopwatch(torch.device("cpu"))
    begin = time.perf_counter_ns()
    for key in ("first", "second", "first"):
        watch.begin()
        torch.ones(8).sum()
        watch.end(key)
    whole = time.perf_counter_ns() - begin
    found = watch.read()
    assert [key for key, _ in found] == ["first", "second", "first"]
    assert all(duration > 0 for _, duration in found) and sum(duration for _, duration in found) < whole
    assert watch.read() == []
    watch.begin()
    watch.end("before")
    watch.begin()
    watch.clear()
    watch.begin()
    watch.end("after")
    assert [key for key, _ in watch.read()] == ["after"]
