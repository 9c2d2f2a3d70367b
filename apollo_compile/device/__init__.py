"""Devices, and how programs run on them.

open.py    opens the device of a Dynamo graph
trials.py  programs by which a device is tried out
cpu/       lanes of pinned threads
gpu/       lanes that are streams, and CUDA graphs
profiles/  device profiles that come with the package
"""
