"""Select the fastest variant by measuring in the user's own training steps; no torch, tested on a clock.

comparison.py   candidates take turns until one remains: statistics of one comparison
budget.py       share of the training time that compiles may take
drift.py        detect that the winner's steps take longer or shorter than they did
tuner.py        which candidate runs the next step: order of comparisons, budget, drift, verdicts
graphs.py       the tuner of a model whose graphs are called one by one
"""
