"""Lanes on a GPU: streams, and CUDA graphs that replay launches on them.

    target.py       a GPU as a target of compiled graphs
    run/            loads programs, launches them on lanes, captures and replays them
    check/          tries whether lanes work on this machine
    fingerprint.py  names a GPU, its driver and torch

`check` may import `run`; `run` never imports `check`.

The native side (runtime/, `cuda_lane.h`) opens the driver, splits the device once and creates the streams.
"""
