"""Devices: their profiles, and how programs run on them.

profile.py      calibrated constants and rates of a device
fingerprint.py  identity of the machine that a measurement was taken on
lanes.py        the catalogue of lanes that a program may use
cpu/            lanes of pinned threads
gpu/            lanes of green contexts, and CUDA graphs
"""
