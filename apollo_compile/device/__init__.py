"""Devices: what the compiler believes of one, and how a program runs on it.

profile.py      constants of a device, and how fast it is at what
fingerprint.py  what a measurement depends on besides what was measured
lanes.py        the catalogue of lanes that a program may use
cpu/            lanes of pinned threads
gpu/            lanes of green contexts, and CUDA graphs
"""
