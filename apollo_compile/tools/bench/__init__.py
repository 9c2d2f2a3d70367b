"""Measure variants of one model against each other.

    (Task, variants) -> Measurement

    task.py      what is measured
    turns.py     the parent: starts a process per variant and lets them take turns
    child.py     the process of one variant
    numbers.py   from step times to speed-ups, from gradients to differences
    render.py    a measurement as a table
    facts.py     machine, versions and commit

Every variant has its own process: allocator settings, OpenMP teams and pinned threads are per process, and one
variant's would affect another's. The parent lets them take turns, one at a time, in alternating order (ABCD, DCBA,
...), so that drift of the machine affects all of them alike. See Note [idle children] in `turns.py` for the others.

    turn     one untimed step, which brings code and weights back into the caches, then `steps_per_turn` timed steps
    round    one turn of every variant; the bootstrap resamples rounds, because steps of one turn are correlated
    step     forward, loss and backward (train), or forward without gradients (inference), timed inside the child from
             the call to its return; gradients are set to None between steps, outside the timing

Before its first turn a child builds the task, takes one cold step (compile included), and saves loss and gradients of
that step. The parent compares them with those of the reference, which is eager if it is among the variants.

This package returns data and prints nothing; the command line and `benchmarks/` print.
"""
