"""Files that outlive the process: plans, device profiles, and results of measurements.

files.py         formats and stores of files: age, eviction, lock, atomic write, damage
keys.py          keys of findings and bundles
history.py       findings about graphs, and generations of bundles
self_checks.py   results of self-checks of a GPU, driver and torch
profiles.py      files of device profiles
plan_file.py     files of plans
"""
