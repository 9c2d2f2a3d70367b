"""Check whether lanes work on this machine.

self_check.py     runs the checks in a process of its own, and keeps the verdict
examine.py        results about GPU, driver and torch; the SMs on which kernels of a lane run
experiments.py    small computations on lanes whose results are compared with eager
census_kernel.py  a kernel that records its SM
"""
