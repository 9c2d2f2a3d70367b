"""What outlives the process: plans, device profiles, and what was found out by measuring.

files.py         the one mechanism: format, age, eviction, lock, atomic write, damage
keys.py          under which keys things are kept
history.py       what was found out about a graph, and generations of bundles
matmul_gains.py  which library was the faster for which matrix products
profiles.py      files of device profiles
plan_file.py     files of plans
"""
