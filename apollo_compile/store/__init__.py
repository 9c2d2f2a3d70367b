"""Files that outlive the process: plans, device profiles, and findings from measurements.

files.py         the one mechanism: format, age, eviction, lock, atomic write, damage
keys.py          keys of findings and bundles
history.py       findings about graphs, and generations of bundles
matmul_gains.py  which library is faster for which matmul
self_checks.py   whether lanes work with a GPU, driver and torch
profiles.py      files of device profiles
plan_file.py     files of plans
verdicts.py      what runs Dynamo graphs on a GPU
"""
